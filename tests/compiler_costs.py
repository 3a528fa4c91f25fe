"""Without what torch's compiler does after each compilation for its statistics, and for processes that live long: it
empties the processor's cache to measure its guards, and collects garbage. And with room for the bytecode of all
functions of a model, of which it keeps 128 and reads each again in every graph. Importing this module changes both."""

import functools
import os

os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # read by what is imported next

import torch._dynamo.bytecode_transformation as bytecode
import torch._dynamo.guards as guards

if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *_: 0.0

if hasattr(getattr(bytecode, "_cached_cleaned_instructions", None), "__wrapped__"):
    bytecode._cached_cleaned_instructions = functools.lru_cache(2048)(bytecode._cached_cleaned_instructions.__wrapped__)
