"""Registered operations from one description each: arguments by their annotations, results by one function of them.

What torch needs to know of an operation - its schema, what it returns on fake tensors, what autograd keeps - is derived
from that description and never written by hand. `operation` registers; `registered` lists what is; `caller` and
`differentiable` make functions of whole values of it. Other folders make their types known with `add_kind` and describe
new kinds of results as a `Result`.
"""

from .boundary import differentiable
from .gradient import register_gradient
from .registration import Registered, caller, direct, entry_of, operation, registered
from .results import Alias, Output, Result, absent, like, matrix_like
from .schema import Encoded, Kind, add_kind, flatten
from .takes import FLOATS, INTEGERS, Takes, apart, expands, takes

__all__ = [
    "FLOATS",
    "INTEGERS",
    "Alias",
    "Encoded",
    "Kind",
    "Output",
    "Registered",
    "Result",
    "Takes",
    "absent",
    "add_kind",
    "apart",
    "caller",
    "differentiable",
    "direct",
    "entry_of",
    "expands",
    "flatten",
    "like",
    "matrix_like",
    "operation",
    "register_gradient",
    "registered",
    "takes",
]
