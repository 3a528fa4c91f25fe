"""mistral3: a mistral, a ministral3 or a mistral4 beside a model that sees images."""

from dataclasses import replace

from .base.names import Fused
from .base.text_part import TextPart, with_images
from .ministral3 import MINISTRAL3
from .mistral import MISTRAL
from .mistral4 import MISTRAL4

_PLAIN = with_images("mistral3", "Mistral3ForConditionalGeneration", TextPart((MISTRAL, MISTRAL4, MINISTRAL3)))
MISTRAL3 = replace(
    _PLAIN,
    names=replace(_PLAIN.names, experts=Fused()),
    other_names=tuple(replace(form, experts=Fused()) for form in _PLAIN.other_names),
)
