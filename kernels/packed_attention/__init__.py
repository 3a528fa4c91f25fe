"""Softmax attention of documents that lie one after another in a row, without a mask: memory is linear in the row."""

from .op import documents_of_lengths, packed_attention, sees_own_document

__all__ = ["documents_of_lengths", "packed_attention", "sees_own_document"]
