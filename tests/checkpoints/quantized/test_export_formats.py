"""Quantized folders of ours in formats other than their own: what is exact, what is refused, what is quantized anew."""

import json
from pathlib import Path

import pytest
import torch

from te_models.checkpoints import CheckpointError, dequantize, export_hf, import_hf, inspect, quantize, relayout, verify
from te_models.checkpoints.formats import WRITABLE
from te_models.checkpoints.io.boxes import Range
from te_models.checkpoints.io.store import MemoryStore
from te_models.checkpoints.mapping.quantized_format import SUFFIXES, quantized_metadata
from te_models.checkpoints.quantized import requantize
from te_models.checkpoints.quantized import row_blocks as bands
from te_models.checkpoints.quantized.dequantized_store import ValueStore
from te_models.layers.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tests.checkpoints.hf_cases import assert_same_bits, stored
from tests.checkpoints.quantized_cases import CASES, Case, fp8_block, make

POW2 = CASES["fp8-ue8m0"]
RECIPES = {"mxfp8": "mxfp8", "block": "fp8", "current": "fp8-per-tensor", "nvfp4": "nvfp4-pack-quantized"}
"""Recipe -> the format in which its weights are written."""
EIGHT_BITS = ("fp8", "mxfp8", "modelopt-fp8", "float-quantized", "mxfp8-quantized", "modelopt-mxfp8")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model of ours for each of RECIPES, and beside it its values in float32 (`mxfp8-values`)."""
    root = tmp_path_factory.mktemp("quantized")
    _, reference = make(CASES["fp8-moe"], root)
    import_hf(reference, root / "plain")
    for recipe in RECIPES:
        quantize(root / "plain", root / recipe, recipe)
        dequantize(root / recipe, root / f"{recipe}-values", dtype="float32")
    return root


@pytest.mark.parametrize(
    "quantizer",
    [
        MXFP8Quantizer(),
        MXFP8Quantizer(two_dimensional=True),
        MXFP8Quantizer(rowwise=False),
        Float8BlockQuantizer(),
        Float8BlockQuantizer(block_scaling_dim=1),
        Float8BlockQuantizer(block_scaling_dim=1, rowwise=False),
        Float8CurrentScalingQuantizer(),
        NVFP4Quantizer(),
        NVFP4Quantizer(rowwise=False),
        NVFP4Quantizer(with_2d_quantization=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(200, 176), (3, 160, 192)])
def test_regions_of_values_are_those_of_the_whole(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)

    def below(n: int) -> int:
        return int(torch.randint(0, n, (), generator=generator))

    fields = quantizer.quantize_fields(torch.randn(shape, generator=generator))
    whole = quantizer.dequantize_fields(fields, torch.float32, shape)
    entries = MemoryStore({"w" + SUFFIXES[name]: value for name, value in fields.items()})
    store = ValueStore(entries, {"w": (shape, quantized_metadata(quantizer, torch.float32))})
    assert set(store.tensors) == {"w"} and not store.can_read_bytes("w")
    for _ in range(30):
        box = []
        for n in shape:
            start, step = below(n), 1 + below(2)
            box.append(Range(start, start + (1 + below((n - 1 - start) // step + 1)) * step, step))
        assert torch.equal(store.read("w", tuple(box)), whole[tuple(slice(*r) for r in box)]), box


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_moe-ragged", "qwen3"])
def test_what_mxfp8_took_over_from_fp8_blocks_goes_back(tmp_path: Path, model: str, layout: str) -> None:
    """`--storage mxfp8` repeats the scales; the export writes each once again."""
    source, _ = make(Case(model, fp8_block(pow2=True), POW2.config), tmp_path)
    import_hf(source, tmp_path / "ours", storage="mxfp8", layout=layout)
    plan = export_hf(tmp_path / "ours", tmp_path / "back")
    assert {x.kind for x in plan.report.lines.values()} == {"exact", "re-encoded exact"}
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())
    export_hf(tmp_path / "ours", tmp_path / "mxfp8", format="mxfp8")
    import_hf(tmp_path / "mxfp8", tmp_path / "values", dequantize=True)
    import_hf(source, tmp_path / "expected", dequantize=True)
    assert verify(tmp_path / "values", tmp_path / "expected").equal


def test_uneven_scales_are_refused_and_requantized_as_asked(tmp_path: Path) -> None:
    """MXFP8 in 32x32 blocks that were never 128x128 ones."""
    source, _ = make(POW2, tmp_path)
    import_hf(source, tmp_path / "ours", storage="mxfp8")
    from safetensors.torch import safe_open, save_file

    file = tmp_path / "ours/model.safetensors"
    name = "decoder.layers.1.mlp.experts.linear_fc2.weight"
    with safe_open(file, "pt") as opened:
        tensors, metadata = {n: opened.get_tensor(n) for n in opened.keys()}, opened.metadata()  # noqa: SIM118
    tensors[f"{name}_scale_inv"][1, 2, 3] += 1
    save_file(tensors, file, metadata)
    (tmp_path / "ours/manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=rf"{name} .* as fp8: its scales differ inside of blocks of 128x128; .*--allow"
    ):
        export_hf(tmp_path / "ours", tmp_path / "new/back")
    assert not (tmp_path / "new").exists()
    plan = export_hf(tmp_path / "ours", tmp_path / "back", format="fp8", allow_requantize=True)
    (line,) = (line for line in plan.report.lines.values() if line.kind == "requantized")
    assert (line.tensors, line.count, line.source, line.target) == ("mlp.experts.linear_fc2.weight", 1, "mxfp8", "fp8")
    assert line.max_error
    back, before = stored(tmp_path / "back"), stored(source)
    changed = {n for n in before if not torch.equal(back[n].view(torch.uint8), before[n].view(torch.uint8))}
    assert changed and all(n.startswith("model.layers.1.mlp.experts.") and ".down_proj." in n for n in changed)


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["published", "fused"])
@pytest.mark.parametrize("format", WRITABLE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_pair_is_exact_or_requantized(
    quantized: Path, tmp_path: Path, recipe: str, format: str, form: str
) -> None:
    exact, source = True, quantized / recipe
    try:
        export_hf(source, tmp_path / "hf", format=format, form=form)
    except CheckpointError as error:
        exact = False
        assert "--allow-requantize" in str(error) or "four bits" in str(error)
        assert not (tmp_path / "hf").exists()
        plan = export_hf(source, tmp_path / "hf", format=format, form=form, allow_requantize=True)
        lines = [line for line in plan.report.lines.values() if line.kind == "requantized"]
        assert [line.count for line in lines] == [2] * 4
        pow2 = recipe == "block" and "mxfp8" in format  # of 128x128 blocks fit smaller ones
        assert all(line.max_error == 0 if pow2 else line.max_error for line in lines)
        assert json.loads((tmp_path / "hf/conversion.json").read_text())["classes"] == plan.report.to_dict()
    again = import_hf(tmp_path / "hf", tmp_path / "again")  # what is written is taken over, without options
    assert not {"requantized", "dequantized"} & {line.kind for line in again.report.lines.values()}
    import_hf(tmp_path / "hf", tmp_path / "back", dequantize=True)
    back, values = stored(tmp_path / "back"), stored(quantized / f"{recipe}-values")
    assert exact or format != RECIPES[recipe]
    for name, expected in values.items():
        found, expected = back[name].float(), expected.float()
        if not name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")):
            assert torch.equal(found, expected), name
            continue
        # Half a step of the format: relative to the value, or to the largest value for those far below it. E2M1 has 4
        # and 6, and as MXFP4 nothing up to 8. What is exact is rounded to the dtype of the import, bfloat16.
        error, largest = (found - expected).abs(), expected.abs().max()
        if exact:
            assert (error <= 2.0**-8 * expected.abs()).all(), name
        elif format in EIGHT_BITS:
            assert (error <= 2.0**-3.9 * expected.abs() + 2.0**-9 * largest).all(), name
        else:
            assert (error <= 0.26 * expected.abs() + 0.05 * largest).all(), name


@pytest.mark.sentinels("False-modelopt-fp8-published")
@pytest.mark.parametrize("form", ["published", "fused"])
@pytest.mark.parametrize("format", ["modelopt-fp8", "float-quantized"])
@pytest.mark.parametrize("large", [False, True])
def test_what_one_parameter_joins_is_quantized_as_one_matrix(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, form: str, large: bool
) -> None:
    """Written as tensors with one scale, taken over as the parameter that our own quantizing gives."""
    if large:  # of many bands, which threads share
        for module in (bands, requantize):
            monkeypatch.setattr(module, "BAND_ELEMENTS", 1 << 11)
    export_hf(quantized / "mxfp8", tmp_path / "hf", format=format, form=form, allow_requantize=True)
    import_hf(tmp_path / "hf", tmp_path / "found")
    quantize(quantized / "mxfp8-values", tmp_path / "expected", "current")
    found, expected = stored(tmp_path / "found"), stored(tmp_path / "expected")
    linear = {n: t for n, t in expected.items() if ".linear_" in n and "norm" not in n}
    assert len(linear) == 16 and found.keys() == expected.keys()
    assert_same_bits({n: found[n] for n in linear}, linear)
    assert len(set(found["decoder.layers.0.mlp.experts.linear_fc1.weight_scale_inv"].tolist())) == 3


@pytest.mark.slow
def test_mxfp4_comes_back_from_requantizing(tmp_path: Path) -> None:
    """The scales of a block may differ then, its values do not; a value of eight bits is rounded."""
    source, _ = make(CASES["mxfp4-pack-quantized"], tmp_path)
    import_hf(source, tmp_path / "ours")
    plan = export_hf(tmp_path / "ours", tmp_path / "back", allow_requantize=True)
    assert not [x for x in plan.report.lines.values() if x.kind == "requantized"]
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    import_hf(source, tmp_path / "values", dequantize=True)
    quantize(tmp_path / "values", tmp_path / "mxfp8", "mxfp8")
    plan = export_hf(tmp_path / "mxfp8", tmp_path / "mxfp4", format="mxfp4", allow_requantize=True)
    import_hf(tmp_path / "mxfp4", tmp_path / "again", dequantize=True)
    assert verify(tmp_path / "values", tmp_path / "again").equal


def test_experts_of_gpt_oss_are_requantized_in_their_own_layout(tmp_path: Path) -> None:
    source, _ = make(CASES["mxfp4-gpt-oss"], tmp_path, torch.float32)
    import_hf(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"stored as mxfp8 cannot be written as fp8; .*--allow-requantize"):
        export_hf(tmp_path / "ours", tmp_path / "fp8", format="fp8")
    for form, name in (("published", "gate_up_proj"), ("per-expert", "1.up_proj.weight")):
        folder = tmp_path / form
        plan = export_hf(tmp_path / "ours", folder, format="fp8", form=form, allow_requantize=True)
        errors = {x.tensors: x.max_error for x in plan.report.lines.values() if x.kind == "requantized"}
        assert set(errors) == {"mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"}
        assert f"model.layers.0.mlp.experts.{name}_scale_inv" in stored(folder)
        import_hf(folder, tmp_path / f"{form}-values", dequantize=True)
        import_hf(source, tmp_path / f"{form}-expected", dequantize=True)
        found, expected = stored(tmp_path / f"{form}-values"), stored(tmp_path / f"{form}-expected")
        for tensor, value in expected.items():
            error = (found[tensor] - value).abs().max()
            known = [e or 0.0 for kind, e in errors.items() if tensor.endswith(kind)]
            assert error <= (1.001 * known[0] if known else 0.0), tensor
            assert not known or error > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp8-moe", "mxfp4-gpt-oss", "modelopt-nvfp4", "modelopt-fp8"])
@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
def test_exported_values_are_those_of_dequantizing_first(tmp_path: Path, case: str, layout: str) -> None:
    source, _ = make(CASES[case], tmp_path)
    import_hf(source, tmp_path / "ours")
    relayout(tmp_path / "ours", tmp_path / "q", layout)
    plan = export_hf(tmp_path / "q", tmp_path / "at-once", dequantize=True, max_shard_bytes=300_000)
    assert {line.kind for line in plan.report.lines.values()} == {"exact", "dequantized"}
    dequantize(tmp_path / "q", tmp_path / "values")
    export_hf(tmp_path / "values", tmp_path / "in-two-steps")
    assert_same_bits(stored(tmp_path / "in-two-steps"), stored(tmp_path / "at-once"))
    config = json.loads((tmp_path / "at-once/config.json").read_text())
    assert "quantization_config" not in config and not (tmp_path / "at-once/hf_quant_config.json").exists()
    assert config == json.loads((tmp_path / "in-two-steps/config.json").read_text())


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source, reference = make(CASES["fp8-dense"], tmp_path)
    import_hf(reference, tmp_path / "plain")
    import_hf(source, tmp_path / "ours")
    for folder, options, message in (
        ("plain", {"dequantize": True}, "has no quantized weights to dequantize; quantize it first"),
        ("plain", {"allow_requantize": True}, "has no quantized weights to requantize; quantize it first"),
        ("ours", {"dequantize": True, "format": "fp8"}, "choose no format and no requantizing"),
        ("ours", {"dequantize": True, "allow_requantize": True}, "choose no format and no requantizing"),
        ("ours", {"allow_requantize": True, "format": "gguf"}, "the format is 'gguf'; allowed: fp8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export_hf(tmp_path / folder, tmp_path / "x", **options)
    assert not (tmp_path / "x").exists() and inspect(tmp_path / "ours").formats == {"float8_block": 8}
