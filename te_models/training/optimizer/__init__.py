"""The optimizer of a run, and its learning rate as a function of the step."""
