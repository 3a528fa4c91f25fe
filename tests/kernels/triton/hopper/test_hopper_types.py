"""Every launch of every registered operation is a typed program for a GPU, which the interpreter does not ask."""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from te_models.kernels.quantize import triton_output
from te_models.kernels.quantize.fp8 import triton_blockwise, triton_tensor
from te_models.kernels.quantize.nvfp4 import triton as triton_nvfp4
from tests.kernels.triton.hopper.compiler import in_child
from tests.kernels.triton.hopper.test_hopper_rows import specialised
from tests.kernels.triton.op_samples import FAMILIES
from tests.kernels.triton.quantize.quantizer_samples import as_on_a_gpu
from tests.kernels.triton.test_registered_ops import OPERATIONS

TARGET = GPUTarget("cuda", 90, 32)


class Checked:
    """The different launches so far, and those that are no typed program: {kernel and arguments: error}."""

    def __init__(self, most: int | None) -> None:
        """most: launches of a kernel that are translated; None: all."""
        self.most, self.of_kernel = most, Counter[str]()
        self.seen: set[str] = set()
        self.failed: dict[str, str] = {}

    def launch(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        signature, constants, attributes, options = specialised(kernel, arguments, named)
        name = f"{kernel.__name__} {signature} {constants} {attributes} {options}"
        if name in self.seen or self.of_kernel[kernel.__name__] == self.most:
            return
        self.seen.add(name)
        self.of_kernel[kernel.__name__] += 1
        context, backend = ir.context(), make_backend(TARGET)
        ir.load_dialects(context)
        backend.load_dialects(context)
        parsed = backend.parse_options(options)
        source = ASTSource(kernel, signature, constants, attributes)
        functions = backend.get_codegen_implementation(parsed)
        try:
            source.make_ir(TARGET, parsed, functions, backend.get_module_map(), context)
        except Exception as error:  # of any kind, as the translation meets what it cannot
            self.failed[name] = f"{type(error).__name__}: {error}"

    def tuned(self, tuner: Any, *arguments: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        """Launch the smallest and the largest tile that fit; tuner: an autotuned kernel."""
        given = dict(zip(tuner.arg_names, arguments, strict=False))
        configs = tuner.early_config_prune(tuner.configs, given, **named)
        for config in (configs[0], configs[-1]):
            self.launch(tuner.fn, *arguments, grid=grid, **named, **config.kwargs)


def samples() -> Iterator[tuple[str, tuple[Any, ...]]]:
    device = torch.device("cpu")
    for family in FAMILIES:
        yield from family(device)


def main(most: int | None = None) -> dict[str, Any]:
    checked = Checked(most)
    JITFunction.run = lambda kernel, *args, **named: checked.launch(kernel, *args, **named)
    Autotuner.run = lambda tuner, *args, **named: checked.tuned(tuner, *args, **named)
    for module in (triton_blockwise, triton_nvfp4, triton_output, triton_tensor):
        module.native_fp8 = lambda device: True
    torch.manual_seed(0)
    with as_on_a_gpu(torch.device("cpu")):
        for name, arguments in samples():
            with contextlib.suppress(NotImplementedError):  # torch 2.11 has no scaled GEMM for a CPU
                OPERATIONS[name].op(*arguments)
    return {"launches": len(checked.seen), "kernels": len(checked.of_kernel), "failed": checked.failed}


@pytest.mark.slow
@pytest.mark.parametrize(("most", "launches"), [("1", 30), (None, 400)])
def test_launches_are_well_typed(most: str | None, launches: int) -> None:
    """Unpadded rows were permuted by a kernel that added to the missing pointer of padding rows, an error on GPUs."""
    found = in_child("tests.kernels.triton.hopper.test_hopper_types", *([] if most is None else [most]))
    assert found["failed"] == {} and found["launches"] > launches
    assert found["kernels"] > 30


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
