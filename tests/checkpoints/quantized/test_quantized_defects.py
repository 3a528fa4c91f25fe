"""Quantized folders that are not what they declare: one sentence with the tensor or the field, nothing written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models.checkpoints import CheckpointError, export_hf, import_hf, open_checkpoint, quantize
from tests.checkpoints.hf_cases import refused, stored
from tests.checkpoints.quantized_cases import CASES, FP8_CONFIG, Tensors, compressed, edit_config, make, modelopt

Q = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.experts.0.gate_proj.weight"
Edit = Callable[[Path], object]


def tensors(change: Callable[[Tensors], object]) -> Edit:
    """Return what edits the tensors of a folder."""

    def edit(folder: Path) -> None:
        values = load_file(folder / "model.safetensors")
        change(values)
        save_file({n: t.contiguous() for n, t in values.items()}, folder / "model.safetensors", {"format": "pt"})

    return edit


def config(**fields: object) -> Edit:
    """Return what edits quantization_config."""
    return lambda folder: edit_config(folder, quantization_config=FP8_CONFIG | fields)


def compression(**fields: object) -> Edit:
    """Return what edits quantization_config of compressed-tensors."""
    values = compressed("float-quantized", num_bits=8, strategy="tensor") | fields
    return lambda folder: edit_config(folder, quantization_config=values)


def separate(**fields: object) -> Edit:
    """Return what edits hf_quant_config.json."""
    return lambda folder: (folder / "hf_quant_config.json").write_text(json.dumps(modelopt("NVFP4", **fields)))


def set_value(name: str, value: float) -> Edit:
    return tensors(lambda t: t[name].view(-1)[-1:].fill_(value))


def set_byte(name: str, value: int) -> Edit:
    return tensors(lambda t: t[name].view(torch.uint8).view(-1)[-1:].fill_(value))


SCALE = f"{Q}_scale_inv"
SEPARATE = "hf_quant_config.json"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
PACKED = "model.layers.0.mlp.experts.2.up_proj.weight"
ROTATIONS = [{"targets": ["re:.*down_proj$"], "location": where} for where in ("weight_input", "input")]
DEFECTS: dict[str, tuple[str, Edit, str]] = {
    "NaN scale": ("fp8-dense", set_value(SCALE, float("nan")), f"'{SCALE}' has a scale that is NaN"),
    "infinite scale": ("fp8-dense", set_value(SCALE, float("inf")), f"'{SCALE}' has a scale that is NaN or infinite"),
    "negative scale": ("fp8-dense", set_value(SCALE, -1.0), f"'{SCALE}' has a scale that is zero or negative"),
    "NaN byte": ("mxfp4-gpt-oss", set_byte(f"{EXPERTS}_scales", 255), f"'{EXPERTS}_scales' has a scale that is NaN"),
    "NaN block scale": (
        "modelopt-nvfp4",
        set_byte(f"{PACKED}_scale", 127),
        f"'{PACKED}_scale' has a scale that is NaN",
    ),
    "zero factor": ("modelopt-nvfp4", set_value(f"{PACKED}_scale_2", 0.0), "scale_2' has a scale that is zero or neg"),
    "missing scale": ("fp8-dense", tensors(lambda t: t.pop(SCALE)), f"missing: '{SCALE}'"),
    "missing weight": ("fp8-dense", tensors(lambda t: t.pop(Q)), f"missing: '{Q}'"),
    "missing both": ("fp8-dense", tensors(lambda t: (t.pop(Q), t.pop(SCALE))), f"missing: '{Q}'"),
    "missing second scale": ("modelopt-nvfp4", tensors(lambda t: t.pop(f"{PACKED}_scale_2")), "missing: .*_scale_2"),
    "missing blocks": ("mxfp4-gpt-oss", tensors(lambda t: t.pop(f"{EXPERTS}_blocks")), "missing: .*down_proj_blocks"),
    "too few blocks": (
        "fp8-dense",
        tensors(lambda t: t.update({SCALE: t[SCALE][:, :1].clone()})),
        rf"'{SCALE}' has shape \[2, 1\] where \[2, 2\] is expected",
    ),
    "transposed blocks": (
        "mxfp4-gpt-oss",
        tensors(lambda t: t.update({f"{EXPERTS}_scales": t[f"{EXPERTS}_scales"].mT.clone()})),
        r"'.*down_proj_scales' has shape \[3, 3, 256\] where \[3, 256, 3\] is expected",
    ),
    "a scale per row": (
        "modelopt-fp8",
        tensors(lambda t: t.update({f"{GATE}_scale": torch.ones(128, 1)})),
        rf"'{GATE}_scale' has shape \[128, 1\] where \[\] is expected",
    ),
    "scales of another dtype": (
        "fp8-dense",
        tensors(lambda t: t.update({SCALE: t[SCALE].double()})),
        f"'{SCALE}' has dtype F64 where BF16 or F16 or F32 is expected",
    ),
    "data of another dtype": (
        "fp8-dense",
        tensors(lambda t: t.update({Q: t[Q].float().to(torch.float8_e5m2)})),
        f"'{Q}' has dtype F8_E5M2 where F8_E4M3 is expected",
    ),
    "scale of a stranger": (
        "fp8-dense",
        tensors(lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)})),
        "not part of this model: 'model.norm.weight_scale_inv'",
    ),
    "scales differ": (
        "modelopt-nvfp4",
        set_value(f"{GATE}_scale_2", 1.0),
        "'.*gate_proj.weight_scale_2' and '.*up_proj.weight_scale_2' differ, and it has one scale for both",
    ),
    "half quantized": (
        "fp8-dense",
        tensors(lambda t: (t.pop(SCALE), t.update({Q: t[Q].bfloat16()}))),
        f"'{Q}' is not quantized, and other parts of it are",
    ),
    "not declared": (
        "fp8-dense",
        lambda folder: edit_config(folder, quantization_config=None),
        f"not part of this model: .*{SCALE[:20]}",
    ),
    "other method": ("fp8-dense", config(quant_method="aqlm"), "quantization by 'aqlm'; supported: fp8, "),
    "no method": ("fp8-dense", config(quant_method=None), "quantization by None; supported: fp8, "),
    "not an object": (
        "fp8-dense",
        lambda folder: edit_config(folder, quantization_config="fp8"),
        "declares quantization by None",
    ),
    "other blocks": ("fp8-dense", config(weight_block_size=[64, 64]), r"weight_block_size = \[64, 64\]; supported"),
    "bytes for matrices": (
        "fp8-per-tensor",
        config(weight_block_size=None, scale_fmt="ue8m0"),
        "has scale_fmt = 'ue8m0'; supported: float",
    ),
    "blocks of matrices": ("fp8-per-tensor", config(), r"weight_scale_inv' has shape \[\] where \[2, 2\] is expected"),
    "other numbers": ("fp8-dense", config(fmt="e5m2"), "fmt = 'e5m2'; supported: e4m3, float8_e4m3fn"),
    "other scales": ("fp8-dense", config(scale_fmt="ue4m3"), "scale_fmt = 'ue4m3'; supported: float, ue8m0"),
    "other algorithm": (
        "modelopt-nvfp4",
        separate(quant_algo="W4A8_AWQ"),
        "quant_algo = 'W4A8_AWQ'; supported: FP8, N",
    ),
    "other group of 32": (
        "modelopt-mxfp8",
        separate(quant_algo="MXFP8", group_size=16),
        "group_size = 16; supported: 32",
    ),
    "other group": ("modelopt-nvfp4", separate(group_size=32), "group_size = 32; supported: 16"),
    "two declarations": (
        "modelopt-nvfp4",
        config(),
        "config.json declares the format 'fp8' and hf_quant_config.json 'modelopt-nvfp4'",
    ),
    "empty separate file": (
        "modelopt-nvfp4",
        lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
        "hf_quant_config.json has no 'quantization' object",
    ),
    "separate file leads out": (
        "fp8-dense",
        lambda folder: (folder / "hf_quant_config.json").symlink_to("/etc/hostname"),
        "symbolic link that leaves the folder",
    ),
    "integers": (
        "float-quantized-tensor",
        lambda folder: edit_config(
            folder, quantization_config=compressed("float-quantized", num_bits=4, strategy="tensor")
        ),
        "num_bits = 4; supported: 8",
    ),
    "other compressed format": (
        "float-quantized-tensor",
        lambda folder: edit_config(folder, quantization_config=compressed("marlin-24")),
        "format = 'marlin-24'; supported: nvfp4-pack-quantized",
    ),
    "transformed activations": (
        "float-quantized-tensor",
        compression(transform_config={"config_groups": {"R4": {"type": "hadamard", "apply": ROTATIONS}}}),
        "has a transform_config with the location 'input', which models here do not compute; supported: weight_input",
    ),
    "sparse weights": (
        "float-quantized-tensor",
        compression(sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]}),
        "has a sparsity_config with the format 'sparse-24-bitmask'; supported: dense",
    ),
    "groups of activations alone": (
        "float-quantized-tensor",
        compression(config_groups={"attention": {"targets": ["LlamaAttention"], "weights": None}}),
        "the quantization configuration has no group that quantizes weights",
    ),
    "no groups": (
        "float-quantized-tensor",
        lambda folder: edit_config(
            folder, quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized"}
        ),
        "has no 'config_groups' object",
    ),
    "activations too large": (
        "modelopt-fp8",
        tensors(lambda t: t.update({f"{GATE.removesuffix('.weight')}.input_scale": torch.ones(5000)})),
        "'.*gate_proj.input_scale' is not a scale of activations",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_quantized_folder_is_refused(tmp_path: Path, defect: str) -> None:
    case, edit, message = DEFECTS[defect]
    folder, _ = make(CASES[case], tmp_path)
    edit(folder)
    with refused(message, tmp_path):
        import_hf(folder, tmp_path / "new" / "ours")


def test_declarations_that_say_nothing_of_values_are_read(tmp_path: Path) -> None:
    """As llm-compressor writes them: fields that are empty or of activations, rotations that are in the weights."""
    source, _ = make(CASES["float-quantized-tensor"], tmp_path)
    values = compressed("float-quantized", num_bits=8, strategy="tensor")
    groups = values["config_groups"] | {"attention": {"targets": ["Attention"], "weights": None}}
    for fields in (
        {"sparsity_config": {}, "transform_config": {}, "version": "0.10.2", "quantization_status": "frozen"},
        {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}, "global_compression_ratio": 1.5},
        {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": ROTATIONS[:1]}}}},
        {"config_groups": groups, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ):
        compression(**fields)(source)
        import_hf(source, tmp_path / "ours", overwrite=True)
        export_hf(tmp_path / "ours", tmp_path / "back", overwrite=True)
        written = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
        assert written == values | fields


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source, reference = make(CASES["fp8-dense"], tmp_path)
    for options, message in (
        ({"storage": "nvfp4"}, "fp8 cannot be stored as 'nvfp4'; allowed: float8_block, mxfp8"),
        ({"storage": "mxfp8"}, "not a power of two, as storage in mxfp8 needs; --storage float8_block takes"),
        ({"dequantize": True, "allow_requantize": True}, "choose no storage and no requantizing"),
    ):
        with pytest.raises(CheckpointError, match=message):
            import_hf(source, tmp_path / "x", **options)
    with pytest.raises(CheckpointError, match="declares no quantization"):
        import_hf(reference, tmp_path / "x", dequantize=True)
    import_hf(reference, tmp_path / "plain")
    with pytest.raises(CheckpointError, match="has no quantized weights to write as fp8; quantize it first"):
        export_hf(tmp_path / "plain", tmp_path / "x", format="fp8")
    quantize(tmp_path / "plain", tmp_path / "q", "mxfp8")
    with pytest.raises(CheckpointError, match="stored as mxfp8 cannot be written as fp8; choose mxfp8 or mxfp4"):
        export_hf(tmp_path / "q", tmp_path / "x", format="fp8")
    with pytest.raises(CheckpointError, match="has values that four bits do not hold"):
        export_hf(tmp_path / "q", tmp_path / "x", format="mxfp4")
    with pytest.raises(CheckpointError, match="the format is 'gguf'; allowed: fp8"):
        export_hf(tmp_path / "q", tmp_path / "x", format="gguf")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda details: details.update(ones=3),
        lambda details: details.update(dtypes={"_scale": "F7"}),
        lambda details: details.update(separate=[]),
        lambda details: details.update(numbers={"x": "y"}),
        lambda details: details.update(activations={"x": ["F32", [2], [1.0]]}),
        lambda details: details.update(activations={"x": ["I32", [], [1]]}),
        lambda details: details.update(activations={"x": 3}),
        lambda details: details.update(activations=[3]),
        lambda details: details.update(activations=[{"dtype": "F32", "shape": [], "scales": {"x": "1"}}]),
        lambda details: details.update(activations=[{"dtype": "F32", "shape": 1, "scales": {"x": 1.0}}]),
        lambda details: details.pop("ones"),
        lambda details: details.update(more=1),
    ],
)
def test_edited_details_are_refused(tmp_path: Path, change: Callable[[dict], object]) -> None:
    source, _ = make(CASES["modelopt-fp8"], tmp_path)
    import_hf(source, tmp_path / "ours")
    path = tmp_path / "ours/config.json"
    values = json.loads(path.read_text())
    change(values["source"]["quantization"])
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="quantization is not what an import writes"):
        open_checkpoint(tmp_path / "ours")


def test_loading_checks_scales_too(tmp_path: Path) -> None:
    source, _ = make(CASES["fp8-dense"], tmp_path)
    set_value(SCALE, float("nan"))(source)
    with open_checkpoint(source) as ckpt, pytest.raises(CheckpointError, match="NaN or infinite"):
        ckpt.load_into({})


def test_the_exports_of_recipes_come_back(tmp_path: Path) -> None:
    _, reference = make(CASES["fp8-moe"], tmp_path)
    import_hf(reference, tmp_path / "plain")
    for recipe, form in (
        ("block", "fp8"),
        ("current", "fp8-per-tensor"),
        ("delayed", "fp8-per-tensor"),
        ("mxfp8", "mxfp8"),
    ):
        quantize(tmp_path / "plain", tmp_path / recipe, recipe)
        plan = export_hf(tmp_path / recipe, tmp_path / f"{recipe}-hf")
        assert plan.report is not None and f"-> {form}: exact" in str(plan.report)
        import_hf(tmp_path / f"{recipe}-hf", tmp_path / f"{recipe}-back")
        before, after = stored(tmp_path / recipe), stored(tmp_path / f"{recipe}-back")
        for name, value in after.items():
            assert torch.equal(value.flatten().view(torch.uint8), before[name].flatten().view(torch.uint8)), name
        assert all("_columnwise" in name for name in before.keys() - after.keys())


@pytest.mark.sentinels("float-quantized-block-config.json")
@pytest.mark.parametrize(("case", "file"), [("float-quantized-block", "config.json"), ("modelopt-nvfp4", SEPARATE)])
def test_any_value_in_a_declaration_is_read_or_refused(tmp_path: Path, case: str, file: str) -> None:
    source, _ = make(CASES[case], tmp_path)
    original = json.loads((source / file).read_text())
    root = "quantization_config" if file == "config.json" else "quantization"
    results = set()
    for path in [(root,), *((root, *path) for path in paths_in(original[root]))]:
        for value in (None, 0, True, "x", [], {}, 10**30, [[]], {"g": {"weights": {"strategy": []}}}):
            edited = json.loads(json.dumps(original))
            at = edited
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            (source / file).write_text(json.dumps(edited))
            try:
                import_hf(source, tmp_path / "ours", dry_run=True)
                results.add("read")
            except CheckpointError:
                results.add("refused")
    assert results == {"read", "refused"}


def paths_in(value: object) -> list[tuple[str, ...]]:
    """Return the keys that lead to every value inside nested dictionaries."""
    if not isinstance(value, dict):
        return []
    return [path for key, inner in value.items() for path in [(key,), *((key, *rest) for rest in paths_in(inner))]]
