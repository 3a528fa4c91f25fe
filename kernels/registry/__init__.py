"""Registered operations from one description each: arguments by their annotations, results by one function of them.

What torch needs to know of an operation - its schema, what it returns on fake tensors, what autograd keeps - is derived
from that description and never written by hand. `operation` registers; `registered` lists what is.
"""

from .arguments import flatten
from .gradient import gradient_of
from .output import Output, absent, like, matrix_like
from .registration import Registered, operation, registered

__all__ = ["Output", "Registered", "absent", "flatten", "gradient_of", "like", "matrix_like", "operation", "registered"]
