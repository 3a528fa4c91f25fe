"""Softmax attention of documents that lie one after another in a row, without a mask: memory is linear in the row."""

from ..documents import document_runs, documents_of_lengths, first_positions, sees_own_document
from .flex import flex_packed_attention
from .op import packed_attention

__all__ = [
    "document_runs",
    "documents_of_lengths",
    "first_positions",
    "flex_packed_attention",
    "packed_attention",
    "sees_own_document",
]
