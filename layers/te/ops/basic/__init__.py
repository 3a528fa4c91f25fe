"""The basic operations, one differentiable step each."""
