"""Compressed keys (DeepSeek-V4): sums of several tokens, gated by a softmax of each channel."""

from .reference import compress, last_tokens, roped_last, visible_compressed_keys, window_hides

__all__ = ["compress", "last_tokens", "roped_last", "visible_compressed_keys", "window_hides"]
