"""Without what torch's compiler does after each compilation for its statistics, and for processes that live long: it
empties the processor's cache to measure its guards, and collects garbage. Without the libraries that Inductor builds
and loads to learn which vector instructions the C++ compiler knows: its options tell. And with room for the bytecode of
all functions of a model, of which it keeps 128 and reads each again in every graph. Importing this module changes all.
"""

import functools
import os
import subprocess
from typing import Any

os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # read by what is imported next

import torch._dynamo.bytecode_transformation as bytecode
import torch._dynamo.guards as guards
import torch._inductor.cpu_vec_isa as vectors

if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *_: 0.0

if hasattr(getattr(bytecode, "_cached_cleaned_instructions", None), "__wrapped__"):
    bytecode._cached_cleaned_instructions = functools.lru_cache(2048)(bytecode._cached_cleaned_instructions.__wrapped__)


@functools.cache
def _has_options(compiler: str, options: str) -> bool:
    command = [compiler, *options.split(), "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _has_instructions(isa: Any, code: str) -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    return _has_options(get_cpp_compiler(), isa.build_arch_flags())


if hasattr(vectors.VecISA, "check_build"):
    vectors.VecISA.check_build = _has_instructions
