"""Which of torchrun's processes speaks for the run; to know it, nothing of torch is needed."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Whether this process speaks for the run: torchrun's rank 0, or one that torchrun did not start."""
    return int(os.environ.get("RANK", "0")) == 0
