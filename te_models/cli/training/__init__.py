"""The verbs of training runs: what they begin with, what they would take, the run itself, and its report."""
