"""Rehearsals: which recipe loses how much on a model and its data, measured on a CPU before a GPU is rented.

Start reading at `run.py`. `observe` sees the operands of GEMMs, `errors` measures what formats do to them, `effect`
what they do to the loss, `predict` and `search` choose, `table` writes the [precision] table, `page` the HTML page.
"""

from .result import Rehearsal
from .run import rehearse
from .setting import RehearsalOptions

__all__ = ["Rehearsal", "RehearsalOptions", "rehearse"]
