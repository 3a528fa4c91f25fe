"""Compile a Triton kernel for compute capability 9.0 without such a GPU: types, shared memory and instructions.

Triton's interpreter does not type-check a kernel, nor say whether it fits. Compiling needs the real decorator, so it
happens in a child process without TRITON_INTERPRET: `in_child`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SHARED_MEMORY = 232448  # bytes one program can have


def can_compile() -> str | None:
    """Return why this machine cannot compile for CUDA, None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton has no build for this platform"
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    missing = [name for name in ("ptxas", "cuobjdump") if not (tools / name).exists()]
    return f"this build of triton comes without {' and '.join(missing)}" if missing else None


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    stages: int,
    capability: int = 90,
    any_multiple: tuple[str, ...] = ("M", "G", "T"),
) -> Any:
    """Compile; types: of arguments that are not constants. All but `any_multiple` are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = types[name]
            if types[name].startswith("*") or name not in any_multiple:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages})


def summary(compiled: Any) -> dict[str, int]:
    """Return what tells whether the tensor cores are used asynchronously, and whether the program fits.

    shared: bytes; wgmma, copies: instructions; wide: loads and stores of 16 bytes that are not copies; in_flight:
    products that the loop leaves running; stack: bytes per thread that did not fit the registers; fused:
    multiplications that are not rounded before an addition; bytes: stores of one byte."""
    ptx = compiled.asm["ptx"]
    return {
        "shared": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "in_flight": max(map(int, re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)), default=0),
        "copies": ptx.count("cp.async.c"),
        "wide": len(re.findall(r"(?:ld|st)\.global\S*\.v4", ptx)),
        "bytes": len(re.findall(r"st\.global\.\w*8", ptx)),
        "fused": ptx.count("fma.rn.f32"),
        "stack": _stack(compiled.asm["cubin"]),
    }


def resources(compiled: Any) -> dict[str, Any]:
    """Return what a kernel's binary takes of the hardware.

    registers: of a thread; spilled: bytes of a thread that did not fit them; shared: bytes of a program; loads, stores:
    {bytes: instructions} of global memory. copies: asynchronous ones, to shared memory."""
    ptx, usage = compiled.asm["ptx"], _usage(compiled.asm["cubin"])
    copies = len(re.findall(r"cp\.async\.c\w+", ptx))
    return {
        "registers": usage["REG"],
        "spilled": usage["STACK"],
        "shared": compiled.metadata.shared,
        "loads": _widths(ptx, "ld"),
        "copies": copies,
        "stores": _widths(ptx, "st"),
    }


def _widths(ptx: str, which: str) -> dict[int, int]:
    """Count the global loads (ld) or stores (st) of each number of bytes, widest first."""
    found = re.findall(rf"\b{which}\.global\S*?(?:\.v(\d))?\.[a-z](\d+)\b", ptx)
    counts = Counter(int(number or 1) * int(bits) // 8 for number, bits in found)
    return dict(sorted(counts.items(), reverse=True))


def _stack(cubin: bytes) -> int:
    """Return the bytes of stack that a thread uses."""
    return _usage(cubin)["STACK"]


def _usage(cubin: bytes) -> dict[str, int]:
    """Return what a binary says of itself, such as REG and STACK, by the tool that comes with triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", text)}
    assert found.keys() == {"REG", "STACK"}, text
    return found


def in_child(module: str, *arguments: str) -> dict[str, Any]:
    """Run `module` as a program that prints what it found as JSON, without the interpreter; skip where none can."""
    if (reason := can_compile()) is not None:
        pytest.skip(reason)
    # triton 3.9 warns where nobody says whether it may fuse a multiplication and an addition
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)
