"""Which dtype a CPU multiplies 16-bit matrices in.

A product of two bfloat16 (or two float16) values is exact in float32, and either GEMM accumulates in float32. A float32
GEMM of the up-cast operands is therefore the same sum in another order, rounded once. CPUs without bfloat16 units are 4
to 80 times as fast that way, casts included; those with AMX are slower. A machine decides once for all its processes.

Measured with one thread, torch 2.13, 1024^3 in GFLOP/s, bfloat16 against float32 with its casts: AVX2 10 (x w^T),
0.9 (dy w), 17 (dy^T x) against 60 to 78; AVX-512 with bfloat16 at half rate 83 against 154 without casts.
"""

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from te_models.suggestions import shown

from ..machine import NoCacheFolderError, cache_folder, cpu_name, make_private
from ..torch_versions import constant_when_traced

CpuGemm = Literal["bf16", "float32"]
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_MEASURED = 512  # rows, columns and depth of the GEMM that decides where the instruction set does not
_backend: CpuGemm | None = None  # None: to be chosen at the first GEMM
WIDE: dict[torch.dtype, torch.dtype] = {}
"""What `operand_dtype` has answered for eager code on a CPU, until the choice changes: read without a call."""


def cpu_gemm() -> CpuGemm:
    """Return the dtype in which this process multiplies 16-bit matrices on CPU, chosen for the machine or set."""
    global _backend
    if _backend is None:
        _backend = automatic_choice()[0]
    return _backend


def set_cpu_gemm(backend: Literal["auto", "bf16", "float32"]) -> None:
    """Multiply 16-bit matrices on CPU in their own dtype ("bf16"), or up-cast in float32, from now on in this process.

    "auto" chooses for the machine, see `automatic_choice`. Ranks of one run want the same one: the trainer sees to it.
    Raises ValueError for anything else.
    """
    global _backend
    allowed = ("auto", *get_args(CpuGemm))
    if backend not in allowed:
        raise ValueError(f"the CPU GEMM is {shown(backend)}; allowed: {', '.join(allowed)}")
    _backend = None if backend == "auto" else backend
    WIDE.clear()


@contextlib.contextmanager
def using_cpu_gemm(backend: Literal["auto", "bf16", "float32"]) -> Iterator[None]:
    """Inside, `set_cpu_gemm(backend)` holds, in all threads."""
    global _backend
    before = _backend
    set_cpu_gemm(backend)
    try:
        yield
    finally:
        _backend = before
        WIDE.clear()


def in_float32(x: Tensor) -> bool:
    """Whether a GEMM of x runs in float32 for being on this CPU."""
    if _backend == "bf16" or x.dtype not in _SIXTEEN_BITS or x.device.type != "cpu":
        return False
    return _backend == "float32" or _chosen_float32()


def unrounded(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices so that an operation that rounds its product to their dtype does not round one that a scale
    is still to multiply: up-cast, on a machine that does so in any case."""
    return (left.float(), right.float()) if in_float32(left) else (left, right)


def operand_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which operands that are made for a GEMM in `dtype` are best made: float32 where the GEMM on
    this device is of that, so that they are not up-cast again. Not in a graph, because it may keep them."""
    if _backend == "bf16" or dtype not in _SIXTEEN_BITS or device.type != "cpu":
        return dtype
    if torch.compiler.is_compiling():  # perhaps in another thread: values in either dtype give the same product
        return dtype
    return torch.float32 if _backend == "float32" or cpu_gemm() == "float32" else dtype


@constant_when_traced
def _chosen_float32() -> bool:
    """Whether the choice is float32; makes the choice if no GEMM has made it. A trace sees what is returned, and not
    the variable that changes meanwhile: it goes on with the value that it has read."""
    return cpu_gemm() == "float32"


def automatic_choice() -> tuple[CpuGemm, str]:
    """Return the faster of the two on this machine, and why, as a clause.

    AMX multiplies bfloat16 at several times the rate of float32, and x86 CPUs without AVX512_BF16 emulate it. Between
    the two, and on other architectures, a GEMM of 512^3 is timed once per machine and instruction set; the result
    is kept in the cache folder (`TE_MODELS_CACHE`, or ~/.cache/te_models), so that all processes agree.
    """
    forced = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    if x86 and _supports("_is_amx_tile_supported") and forced in ("", "DEFAULT", "AVX10_1_512_AMX", "AVX512_CORE_AMX"):
        return "bf16", "AMX multiplies bfloat16"
    if x86 and (not _supports("_is_avx512_bf16_supported") or forced in _WITHOUT_BF16):
        return "float32", "the CPU has no instructions that multiply bfloat16"
    return _measured(f"{platform.machine()} {cpu_name()} {forced} {torch.__version__} {torch.get_num_threads()}")


_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


def _supports(name: str) -> bool:
    asked: Callable[[], bool] | None = getattr(torch.cpu, name, None)
    return bool(asked and asked())


def _measured(machine: str) -> tuple[CpuGemm, str]:
    """Return what was measured on this machine before, or measure now and keep it."""
    try:
        file = cache_folder() / "cpu_gemm.json"
    except NoCacheFolderError:
        file = Path(os.devnull) / "cpu_gemm.json"  # is never there, and cannot be made
    timings = _read(file)
    if machine not in timings:
        timings = {**timings, machine: _time_both()}
        with contextlib.suppress(OSError):  # a folder that cannot be written: the next process measures again
            make_private(file.parent)
            temporary = file.with_name(f"{file.name}.{os.getpid()}")
            temporary.write_text(json.dumps(timings, indent=1))
            temporary.replace(file)
            timings = {**timings, **_read(file)}  # of processes that measured at once, the last to write decides
    times = timings[machine]
    backend: CpuGemm = "bf16" if times["bf16"] <= times["float32"] else "float32"
    return backend, f"{_MEASURED}^3 takes {times['bf16']:.2g} ms in bfloat16 and {times['float32']:.2g} ms in float32"


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    fits = isinstance(found, dict) and all(
        isinstance(times, dict) and all(isinstance(times.get(name), (int, float)) for name in get_args(CpuGemm))
        for times in found.values()
    )
    return found if fits else {}


def _time_both() -> dict[str, float]:
    """Return the best of five times of each, in ms, taken in turns: fprop (with w^T) and dgrad (with w)."""
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "bf16": lambda x: (x @ x.t()) @ x,
        "float32": lambda x: ((x.float() @ x.float().t()).bfloat16().float() @ x.float()).bfloat16(),
    }
    best = dict.fromkeys(runs, float("inf"))
    # whatever asks first, perhaps a tracer or an autocast region, is not what is timed
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        x = torch.ones(_MEASURED, _MEASURED, dtype=torch.bfloat16, device="cpu")
        for attempt in range(6):
            for name, run in runs.items():
                begin = time.perf_counter()
                run(x)
                if attempt:
                    best[name] = min(best[name], 1e3 * (time.perf_counter() - begin))
    return best
