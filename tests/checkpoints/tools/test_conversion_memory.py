"""Memory of conversions: that of parts of tensors, for models ten times larger than their largest tensor."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_models.checkpoints import FAMILIES, inspect
from te_models.checkpoints.mapping.plan import ConversionPlan, OutputTensor
from te_models.checkpoints.write.shards import header_bytes, split_shards

CHILD = Path(__file__).parents[1].joinpath("memory_child.py")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "vocab_size": 12288, "hidden_size": 1024, "intermediate_size": 4096}
    | {"num_hidden_layers": 6, "num_attention_heads": 8},
    "moe": {"model_type": "mixtral", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024}
    | {"num_hidden_layers": 6, "num_attention_heads": 8, "num_local_experts": 8},
}


def make_sparse_folder(folder: Path, config: dict[str, Any]) -> None:
    """Make a Hugging Face folder of zeros whose data takes no disk space (a file with a hole)."""
    family = FAMILIES[config["model_type"]]
    namespace = family.namespace(family.read_config(config))
    plan = ConversionPlan(tuple(OutputTensor(name, "BF16", stored.shape) for name, stored in namespace.stored.items()))
    (shard,) = split_shards(plan, 10**12)
    folder.mkdir()
    header = header_bytes(shard)
    (folder / shard.file).write_bytes(header)
    os.truncate(folder / shard.file, len(header) + plan.total_bytes)
    (folder / "config.json").write_text(json.dumps(config))


def largest_and_total(folder: Path) -> tuple[int, int]:
    found = inspect(folder)
    widths = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
    sizes = [widths[dtype] * math.prod(shape) for dtype, shape in found.tensors.values()]
    return max(sizes), sum(sizes)


Step = tuple[str, str, str, dict[str, Any]]
"""The function, the names of the source and of the destination, and options."""


def peaks_of(folder: Path, steps: list[Step]) -> list[int]:
    """Return the peak of each conversion; one process runs them all, because it takes seconds to start."""
    paths = [(verb, str(folder / source), str(folder / out), options) for verb, source, out, options in steps]
    command = [sys.executable, str(CHILD), json.dumps(paths)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert all(values["samples"] > 20 for values in found), "the peak was not sampled"
    return [values["peak"] for values in found]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("model", "more"),
    [("moe", False), *(pytest.param(*c, marks=pytest.mark.slow) for c in (("dense", 0), ("moe", True)))],
)
def test_import_and_export_stay_below_the_largest_tensor(tmp_path: Path, model: str, more: bool) -> None:
    """more: as single experts and in float32, too."""
    make_sparse_folder(tmp_path / "hf", MODELS[model])
    steps: list[Step] = [("import_hf", "hf", "ours", {}), ("export_hf", "ours", "other", {})]
    if more:
        steps += [
            ("relayout", "ours", "other", {"layout": "per-gemm", "overwrite": True}),
            ("import_hf", "hf", "other", {"dtype": "float32", "overwrite": True}),
        ]
    peaks = peaks_of(tmp_path, steps)
    # "ours" has the largest tensor of all: the grouped experts, or the embedding
    largest, total = largest_and_total(tmp_path / "ours")
    assert total > 9.9 * largest, "the model is ten times larger than its largest tensor"
    for (verb, *_), peak in zip(steps, peaks, strict=True):
        assert peak < largest + (64 << 20), f"{verb} took {peak >> 20} MiB"
        assert peak < 64 << 20, f"{verb} took {peak >> 20} MiB, although it streams parts of tensors"


QUANTIZED: dict[str, Any] = {
    "dense": {"model_type": "llama", "vocab_size": 1024, "hidden_size": 2048, "intermediate_size": 16384}
    | {"num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 2},
    "moe": {"model_type": "mixtral", "vocab_size": 1024, "hidden_size": 2048, "intermediate_size": 4096}
    | {"num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 2, "num_local_experts": 4},
}
"""Models with large matrices: 128 MiB (dense, both halves of the gated MLP) and 4 times 32 MiB in bfloat16."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from Linux's /proc")
@pytest.mark.parametrize(("model", "recipe"), [("dense", "mxfp8"), ("moe", "block")])
def test_quantize_and_dequantize_stay_below_the_largest_tensor(tmp_path: Path, model: str, recipe: str) -> None:
    """Quantizing holds one copy of one parameter, in fewer bits than the parameter; the way back a few rows."""
    make_sparse_folder(tmp_path / "hf", QUANTIZED[model])
    largest = 128 << 20
    steps: list[Step] = [("quantize", "hf", "quantized", {"recipe": recipe}), ("dequantize", "quantized", "back", {})]
    there, back = peaks_of(tmp_path, steps)
    assert there < largest, f"quantize took {there >> 20} MiB"
    assert largest_and_total(tmp_path / "back")[0] == largest
    assert back < 64 << 20, f"dequantize took {back >> 20} MiB, although it streams parts of tensors"


LARGE: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
    | {"num_hidden_layers": 10, "num_attention_heads": 32},
    "moe": {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 4096}
    | {"num_hidden_layers": 10, "num_attention_heads": 16, "num_local_experts": 8},
}
"""Models of more than 4 GiB."""


STEPS = {
    "plain": [
        ("import_hf", "hf", "ours", {}),
        ("export_hf", "ours", "back", {}),
        ("quantize", "hf", "mxfp8", {"recipe": "mxfp8"}),
        ("dequantize", "mxfp8", "values", {}),
        ("quantize", "hf", "block", {"recipe": "block"}),
        ("reshard", "block", "other", {}),
    ],
    "quantized": [
        ("quantize", "hf", "ours", {"recipe": "block"}),
        ("export_hf", "ours", "fp8", {}),
        ("reshard", "fp8", "other", {}),
        ("import_hf", "fp8", "again", {}),
        ("import_hf", "fp8", "values", {"dequantize": True}),
        ("import_hf", "fp8", "requantized", {"storage": "mxfp8", "allow_requantize": True}),
        ("export_hf", "ours", "mxfp8", {"format": "mxfp8", "allow_requantize": True}),
        ("export_hf", "ours", "plain", {"dequantize": True}),
    ],
}
"""Every way from and to quantized files of more than 4 GiB, and the ways that plain ones go."""
QUANTIZED_LAYERS = 21
"""Enough of LARGE's layers that also their quantized weights fill more than 4 GiB."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from Linux's /proc")
@pytest.mark.parametrize("model", LARGE)
@pytest.mark.parametrize("kind", STEPS)
def test_four_gib_stay_below_the_largest_tensor_and_128_mib(tmp_path: Path, kind: str, model: str) -> None:
    """In files of 1 GB, so that several are written at once. Needs 20 GB of disk."""
    needed = 20 << 30
    if shutil.disk_usage(tmp_path).free < needed:
        pytest.skip(f"{needed >> 30} GiB of disk are needed")
    make_sparse_folder(
        tmp_path / "hf", LARGE[model] | ({"num_hidden_layers": QUANTIZED_LAYERS} if kind == "quantized" else {})
    )
    failed = []
    for step, (verb, source, destination, options) in enumerate(STEPS[kind], 1):
        (peak,) = peaks_of(tmp_path, [(verb, source, destination, {"max_shard_bytes": 10**9, **options})])
        largest, total = largest_and_total(tmp_path / destination)
        assert total > (4 << 30) or (kind == "plain" and "block" in (options.get("recipe"), source))
        print(f"{model} {verb} {options}: {peak >> 20} MiB; largest tensor {largest >> 20}, in all {total >> 20}")
        if peak > largest + (128 << 20):
            failed.append((verb, options, peak >> 20, largest >> 20))
        read_later = {later for _, later, *_ in STEPS[kind][step:]}
        for folder in {source, destination} - read_later:
            shutil.rmtree(tmp_path / folder)
    assert not failed
