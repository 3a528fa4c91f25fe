"""inspect: weights by part of the model, and the scales of quantized weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_models import GPTModel
from te_models.checkpoints import inspect, quantize
from te_models.checkpoints.tools import statistics
from te_models.checkpoints.tools.statistics import ScaleStatistics, scale_statistics
from te_models.cli.main import main
from te_models.layers import QuantizedTensor
from tests.checkpoints.hf_cases import HFFolder, stored
from tests.checkpoints.quantized_cases import CASES, CHANNEL, make


def test_parts_add_up_and_are_what_they_say(hf_folder: HFFolder) -> None:
    found = inspect(hf_folder("qwen3_moe-mixed-layers"))  # layer 0 is dense
    assert sum(found.parts.values()) == found.parameters
    assert found.parts == {
        "embedding": 61 * 32,
        "norms": 5 * 32 + 4 * 8,
        "attention": 2 * ((4 + 2 + 2) * 8 * 32 + 4 * 8 * 32),
        "mlp": 3 * 48 * 32,
        "router": 3 * 32,
        "experts": 3 * 3 * 24 * 32,
        "output": 61 * 32,
    }
    assert inspect(hf_folder("llama-tied-biases-llama3")).parts.keys() == {"embedding", "norms", "attention", "mlp"}


@pytest.mark.parametrize(("recipe", "bits"), [("current", 8), ("block", 8), ("mxfp8", 16.5), ("nvfp4", 4.5)])
def test_scales_are_counted_and_read(hf_folder: HFFolder, tmp_path: Path, recipe: str, bits: float) -> None:
    quantize(hf_folder("qwen3_moe"), tmp_path / "fp8", recipe)
    ((name, summary),) = inspect(tmp_path / "fp8").quantized.items()
    model = GPTModel.from_pretrained(tmp_path / "fp8")
    weights = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    assert summary.parameters == len(weights) and summary.weights == sum(w.numel() for w in weights)
    sizes = {
        kind: sum(t.nbytes for w in weights for f, t in w.fields.items() if f.endswith(ends))
        for kind, ends in (("data", "_data"), ("scale", ("_scale_inv", "_amax")))
    }
    assert (summary.data_bytes, summary.scale_bytes) == (sizes["data"], sizes["scale"])
    assert bits <= summary.bits_per_weight < 1.05 * bits
    found = scale_statistics(tmp_path / "fp8")[name]
    scales = torch.cat([w.fields["rowwise_scale_inv"].flatten() for w in weights])
    values = 2.0 ** (scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
    assert found.count == values.numel()
    assert (found.smallest, found.largest) == (values.min().item(), values.max().item())
    assert found.median == values.median().item()


def test_scales_of_eight_bits_are_kept_as_counts() -> None:
    """NVFP4 has one for 16 weights: all of a large model's are more than fit in memory."""
    stored = torch.randint(0, 127, (300, 200), dtype=torch.uint8)
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        values, counts = statistics._counted(stored.view(dtype))
        assert len(values) == len(counts) == 127 and int(counts.sum()) == stored.numel()
        assert int(counts[values.argmin()]) == int((stored == 0).sum())


def test_the_verb(hf_folder: HFFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize(hf_folder("llama"), tmp_path / "fp8", "mxfp8")
    assert main(["inspect", str(tmp_path / "fp8"), "--scales", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["formats"]["mxfp8"] == result["quantized"]["mxfp8"]["parameters"] == 8
        and result["scales"]["mxfp8"]["count"] > 100
    )
    assert main(["inspect", str(tmp_path / "fp8"), "--scales"]) == 0
    out = capsys.readouterr().out
    assert "mxfp8: 8 parameters, 16.52 bits per weight, of which 3.1% scales" in out
    assert "of these    embedding 1,952, attention" in out or "of these    embedding 1,952, norms" in out
    assert main(["inspect", str(hf_folder("qwen3")), "--scales", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scales"] == {}


@pytest.mark.parametrize(("case", "bits"), [("modelopt-fp8-stacks", 8.0), ("modelopt-nvfp4-stacks", 4.5)])
def test_stacks_that_lie_as_modelopt_has_them(tmp_path: Path, case: str, bits: float) -> None:
    source, _ = make(CASES[case], tmp_path)
    ((name, summary),) = inspect(source).quantized.items()
    data = [n for n, t in stored(source).items() if t.dtype in (torch.float8_e4m3fn, torch.uint8) and "_scale" not in n]
    assert summary.parameters == len(data) > 4
    assert 8 * (summary.data_bytes + summary.scale_bytes) / summary.weights == pytest.approx(bits, rel=0.01)
    assert scale_statistics(source)[name].count > 0


@pytest.mark.parametrize(("case", "name"), [("mxfp4-gpt-oss", "mxfp4"), ("channel", "float-quantized")])
def test_a_hugging_face_folder_has_what_its_files_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, name: str
) -> None:
    """Not the form in which an import would store it: MXFP4 becomes MXFP8, and channels have no form at all."""
    source, reference = make(CASES.get(case, CHANNEL), tmp_path)
    files, plain = stored(source), stored(reference)
    scales = [t for n, t in files.items() if n.endswith(("_scales", "_scale"))]
    data = [t for n, t in files.items() if n.endswith("_blocks") or t.dtype == torch.float8_e4m3fn]
    weights = sum(t.numel() for n, t in plain.items() if n not in files or files[n].dtype != t.dtype)
    found = inspect(source)
    assert found.formats == {name: len(data)}
    summary = found.quantized[name]
    assert (summary.parameters, summary.weights) == (len(data), weights)
    assert (summary.data_bytes, summary.scale_bytes) == (sum(t.nbytes for t in data), sum(t.nbytes for t in scales))
    assert f"{name}: {len(data)} tensors, {8 * (summary.data_bytes + summary.scale_bytes) / weights:.2f} b" in str(
        found
    )
    values = torch.cat([t.flatten().double() for t in scales])
    values = 2 ** (values - 127) if case == "mxfp4-gpt-oss" else values
    of_files = scale_statistics(source)[name]
    expected = ScaleStatistics(values.numel(), *(f(values).item() for f in (torch.min, torch.median, torch.max)))
    assert of_files == expected and main(["inspect", str(source), "--scales", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scales"][name]["count"] == values.numel()


def test_a_scale_that_is_no_number_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = make(CASES["fp8-dense"], tmp_path)
    tensors, name = stored(source), "model.layers.1.mlp.up_proj.weight_scale_inv"
    tensors[name][0, 0] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert main(["inspect", str(source), "--scales", "--json"]) == 2
    assert f"{name!r} has a scale that is NaN" in capsys.readouterr().err
