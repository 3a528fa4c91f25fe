"""Without what torch's compiler does after each compilation for its statistics, and for processes that live long: it
empties the processor's cache to measure its guards, and collects garbage. Importing this module leaves both out."""

from __future__ import annotations

import os

os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # read by what is imported next

import torch._dynamo.guards as guards

if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *_: 0.0
