"""Families for model types that only transformers knows: found, proven and written.

probe      small models of random weights: transformers' side
pool       what the known families say          near      the nearest ones
naming     which tensor is which part           toggles   elements of the mathematics
solve      the model of one configuration       moves     every field moved
fields     what each field does                 declare   the family's file and its test
wrapped    text models within others            report    what was found
adopting   the whole chain

May import everything but the command line. transformers is imported inside functions.
"""

from .adopting import Adopted, adopt, write_adopted
from .fields import outcome
from .probe import AdoptError
from .report import AdoptReport
from .wrapped import known_type

__all__ = ["AdoptError", "AdoptReport", "Adopted", "adopt", "known_type", "outcome", "write_adopted"]
