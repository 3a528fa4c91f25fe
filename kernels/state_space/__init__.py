"""State spaces: the scan of Mamba-2 (arXiv 2405.21060), whose decay is a scalar for each head, and the selective scan
of Mamba (arXiv 2312.00752), with a decay for each channel and state."""

from .op import selective_scan, state_space_scan

__all__ = ["selective_scan", "state_space_scan"]
