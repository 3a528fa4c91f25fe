"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880): a residual stream of several lanes per token. Each
sublayer reads their weighted sum and writes to them by a mixing matrix that adds up to one in rows and columns.

reference  the definition, in plain operations that a compiler fuses
"""

from .reference import Mixing, add_to_lanes, collapsed, doubly_stochastic, mixing_of, read_weights

__all__ = ["Mixing", "add_to_lanes", "collapsed", "doubly_stochastic", "mixing_of", "read_weights"]
