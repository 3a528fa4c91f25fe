"""The bits of every quantizer that a recipe asks for, of inputs made of integers alone, and their recorded digests.

    python -m tests.kernels.quantize.golden --write      record them anew, which a change of the bits needs

A case is a quantizer with its usages and an input; its tensors are the stored fields, those of rows in groups, and the
values that both stand for. The definitions of any processor and the kernels of any GPU make the same bits.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from te_models.layers.quantizer import NVFP4Quantizer, Quantizer
from tests.kernels.triton.quantize.quantizer_samples import all_quantizers

FILE = Path(__file__).with_suffix(".json")
SHAPES = {"wide": (33, 272), "tall": (160, 48)}
ROWS = [9, 0, 20]
"""Rows of each group; those past the last one belong to none."""
Tensors = dict[str, Tensor]


def values(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """Bits of a multiplicative sequence, of no library; both zeros, neighbours of ties and subnormals are there."""
    index = torch.arange(shape[0] * shape[1], dtype=torch.int64)
    bits = (index * 2654435761 + seed * 40503 + 12345) % (1 << 32)
    bits = (bits ^ (bits >> 15)) * 2246822519 % (1 << 32)
    bits = bits ^ (bits >> 13)
    mantissa, exponent = 1 + (bits & 127).double() / 128, ((bits >> 7) & 15).double() - 11
    sign = 1 - 2 * ((bits >> 11) & 1).double()
    size = torch.where((bits >> 12) % 19 == 0, 0.0, torch.ldexp(mantissa, exponent.int()))
    return (sign * size).view(shape).to(dtype)


def cases() -> Iterator[tuple[str, Callable[[torch.device], Tensors]]]:
    """Yield (name, function of a device that returns the tensors, there)."""
    for quantizer in all_quantizers():
        for at, (label, shape) in enumerate(SHAPES.items()):
            x = values(shape, (torch.bfloat16, torch.float32)[at], seed=at)
            yield f"{label}: {quantizer}", partial(tensors, quantizer, x)


def tensors(quantizer: Quantizer, x: Tensor, device: torch.device) -> Tensors:
    """Quantize x, and its rows in groups, on a device."""
    x, key = x.to(device), torch.tensor([3, 5], device=device)
    fields = quantizer.quantize_fields(x, key)
    found = dict(fields) | {"values": quantizer.dequantize_fields(fields, x.dtype, x.shape)}
    if not (isinstance(quantizer, NVFP4Quantizer) and quantizer.with_2d_quantization):  # of weights only
        splits = torch.tensor(ROWS, device=device)
        fields = quantizer.quantize_rows(x, splits, key)
        found |= {f"rows, {name}": field for name, field in fields.items()}
        found["rows, values"] = quantizer.dequantize_rows(fields, splits, x.shape, x.dtype)
    return {name: field for name, field in found.items() if field is not None}


def digest(tensor: Tensor) -> str:
    """Return a digest of dtype, sizes and bits; a NaN counts as one, whatever its payload."""
    t = tensor.cpu().contiguous()
    if t.dtype.is_floating_point:
        t = torch.where(t.float().isnan(), float("nan"), t.float()).to(t.dtype)
    text = hashlib.sha256(f"{t.dtype} {list(t.shape)} ".encode())
    text.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return text.hexdigest()[:16]


def recorded() -> dict[str, dict[str, str]]:
    """Return {case: {tensor: digest}}."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"rewrite {FILE.name}")
    options = parser.parse_args()
    found = {name: {n: digest(t) for n, t in run(torch.device("cpu")).items()} for name, run in cases()}
    print(f"{sum(map(len, found.values()))} tensors of {len(found)} cases")
    if options.write:
        lines = (f" {json.dumps(name)}: {json.dumps(digests)}" for name, digests in found.items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
