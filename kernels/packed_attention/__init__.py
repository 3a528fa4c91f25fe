"""Softmax attention of documents that lie one after another in a row, without a mask: memory is linear in the row."""

from .flex import flex_packed_attention
from .op import document_runs, documents_of_lengths, first_positions, packed_attention, sees_own_document

__all__ = [
    "document_runs",
    "documents_of_lengths",
    "first_positions",
    "flex_packed_attention",
    "packed_attention",
    "sees_own_document",
]
