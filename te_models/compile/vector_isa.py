"""Which vector instructions the C++ compiler knows, asked once per machine.

Inductor builds and loads a library for each instruction set of the processor before it compiles for a CPU. With empty
caches that takes ten seconds of processor time, and loading the libraries again one second in each later process.
"""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from te_models.kernels.machine import NoCacheFolderError, cache_folder, instruction_sets, make_private


@functools.cache
def compiler_knows_all() -> bool:
    """Whether the compiler is known to build for every instruction set that Inductor would choose from here.

    False where the user has decided (`TORCHINDUCTOR_VEC_ISA_OK`), where some are not known, and on other systems than
    Linux on x86: there Inductor asks in its own way. The answer is kept in the cache folder (`TE_MODELS_CACHE`, or
    ~/.cache/te_models) for this compiler, this torch, and a processor with these instruction sets.
    """
    from torch._inductor import config, cpu_vec_isa

    if config.cpp.vec_isa_ok is not None or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    file = _file()
    if file is None:
        return False
    if not os.access(file, os.F_OK):
        with config.patch({"cpp.vec_isa_ok": True}):
            every = cpu_vec_isa.valid_vec_isa_list.__wrapped__()
        if cpu_vec_isa.valid_vec_isa_list() != every:
            return False
        with contextlib.suppress(OSError):  # a folder that cannot be written: the next process asks again
            make_private(file.parent)
            file.touch()
    return True


def _file() -> Path | None:
    """Return the file that is there where the compiler knows all; None without a compiler, or a folder for it."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = shutil.which(get_cpp_compiler())
    except RuntimeError:  # InvalidCxxCompiler: Inductor says so where it is to compile
        return None
    if compiler is None:
        return None
    found = Path(compiler).resolve().stat()
    parts = (compiler, str(found.st_size), str(found.st_mtime_ns), torch.__version__, instruction_sets())
    with contextlib.suppress(NoCacheFolderError):
        return cache_folder() / "vector_isa" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return None
