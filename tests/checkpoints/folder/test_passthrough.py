"""Tensors that the model does not use: kept by every conversion, byte for byte, and given back by an export."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models import GPTModel
from te_models.checkpoints import (
    CheckpointError,
    dequantize,
    export_hf,
    import_hf,
    inspect,
    open_checkpoint,
    quantize,
    relayout,
    upcycle,
    verify,
)
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import HFFolder, assert_same_bits, stored, there_and_back, transformers

LAYERS_BEHIND = {
    "deepseek_v3": "model.layers.2.",
    "glm4_moe": "model.layers.2.",
    "glm4_moe_lite": "model.layers.3.",
    "hy_v3": "model.layers.2.",
    "minimax_m2": "model.layers.2.",
}
FAMILIES = {**LAYERS_BEHIND, "ernie4_5_moe": "model.mtp_block.0.", "exaone_moe": "mtp.layers.0."}
"""Family -> where its files hold what predicts further tokens; the cases have two layers, or three."""


def further_tensors(prefix: str) -> dict[str, torch.Tensor]:
    """Tensors as such layers have them, in the dtypes that quantized files use, too, with NaN and odd sizes."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (6, 10), dtype=torch.uint8, generator=generator)
    weight = torch.randn(7, 5, generator=generator).bfloat16()
    weight[1, 2] = float("nan")
    return {
        f"{prefix}eh_proj.weight": weight,
        f"{prefix}mlp.experts.0.gate_proj.weight": codes.view(torch.float8_e4m3fn),
        f"{prefix}mlp.experts.0.gate_proj.weight_scale_inv": torch.rand(1, 3, generator=generator),
        f"{prefix}mlp.experts.0.up_proj.scale": codes[:, :3].contiguous().view(torch.float8_e8m0fnu),
        f"{prefix}linear_proj.weight": (codes ^ 1).view(torch.float4_e2m1fn_x2),
        f"{prefix}flag": torch.tensor(7, dtype=torch.int64),
        f"{prefix}nothing": torch.empty(0, 4),
    }


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = next(folder.glob("*.safetensors"))
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def save(case: str, folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        make(case, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def passthrough_in(folder: Path) -> dict[str, torch.Tensor]:
    return {n.removeprefix("carried."): t for n, t in stored(folder).items() if n.startswith("carried.")}


@pytest.mark.sentinels("deepseek_v3", "ernie4_5_moe")
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_conversion_keeps_them(tmp_path: Path, family: str) -> None:
    source, further = save(family, tmp_path / "hf"), further_tensors(FAMILIES[family])
    plain = {name: t.clone() for name, t in stored(source).items()}
    add_tensors(source, further)
    plan = import_hf(source, tmp_path / "ours")
    assert plan.passthrough == tuple(f"carried.{name}" for name in sorted(further, key=list(stored(source)).index))
    assert plan.ignored == ()
    assert_same_bits(passthrough_in(tmp_path / "ours"), further)
    relayout(tmp_path / "ours", tmp_path / "per-gemm", "per-gemm")
    export_hf(tmp_path / "per-gemm", tmp_path / "back", max_shard_bytes=30_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert_same_bits(stored(tmp_path / "back"), plain | further)
    for folder in ("ours", "per-gemm", "back"):
        assert verify(source, tmp_path / folder).equal
    quantize(tmp_path / "ours", tmp_path / "fp8", "current")
    dequantize(tmp_path / "fp8", tmp_path / "values", dtype="float32")
    model = GPTModel.from_pretrained(tmp_path / "fp8")
    model.save_pretrained(tmp_path / "saved")
    GPTModel.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "from-hf")
    for folder in ("fp8", "values", "saved", "from-hf"):
        assert_same_bits(passthrough_in(tmp_path / folder), further)
    export_hf(tmp_path / "from-hf", tmp_path / "again")
    again = stored(tmp_path / "again")
    assert again.keys() == plain.keys() | further.keys()
    assert_same_bits({name: again[name] for name in further}, further)
    assert not any("carried" in name for name, _ in model.stored_tensors())


def test_transformers_loads_an_export_that_has_them(tmp_path: Path) -> None:
    source = save("exaone_moe", tmp_path / "hf")
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)
    add_tensors(source, {"mtp.norm.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3, 4)})
    there_and_back(source, tmp_path)
    got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(got(ids).logits, expected(ids).logits)


def test_recomputable_buffers_come_back(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    add_tensors(llama, {name: torch.ones(4)})
    plan = import_hf(llama, tmp_path / "ours", dtype="float16")
    assert plan.passthrough == (f"carried.{name}",) and plan.to_dict()["carried"] == [f"carried.{name}"]
    plan = export_hf(tmp_path / "ours", tmp_path / "back", dtype="bfloat16")
    assert plan.passthrough == (name,)
    assert torch.equal(stored(tmp_path / "back")[name], torch.ones(4)), "no conversion of its dtype"
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", LAYERS_BEHIND)
def test_only_as_many_layers_as_the_configuration_says(tmp_path: Path, family: str) -> None:
    source, prefix = save(family, tmp_path / "hf"), LAYERS_BEHIND[family]
    after = f"model.layers.{int(prefix.split('.')[2]) + 1}.norm.weight"
    add_tensors(source, {f"{prefix}norm.weight": torch.ones(3), after: torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"not part of this model: '{after}'"):
        import_hf(source, tmp_path / "x")
    count = "num_mtp_modules" if family == "minimax_m2" else "num_nextn_predict_layers"
    for further in ("num_nextn_predict_layers", "num_mtp_layers"):
        edit_config(source, **{further: None})
    edit_config(source, **{count: 2})
    assert len(import_hf(source, tmp_path / "ours").passthrough) == 2
    edit_config(source, **{count: 0})
    with pytest.raises(CheckpointError, match=f"not part of this model: '{prefix}norm.weight', '{after}'"):
        import_hf(source, tmp_path / "x")
    edit_config(source, **{count: "many"})
    with pytest.raises(CheckpointError, match=f"{count} = 'many', which is not an integer"):
        import_hf(source, tmp_path / "x")


@pytest.mark.parametrize("name", ["mtp.norm.weight", "model.mtp_norm.weight", "model.layers.2.norm.weight", "x"])
def test_a_family_without_them_refuses_them(hf_folder: HFFolder, tmp_path: Path, name: str) -> None:
    source = hf_folder("qwen3_moe")
    add_tensors(source, {name: torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"not part of this model: '{name}'"):
        import_hf(source, tmp_path / "ours")


@pytest.mark.parametrize("name", ["carried.x", "carried.mtp.norm", "carried.lm_head.weight", "carried."])
def test_our_folders_hold_only_what_the_family_carries(llama: Path, tmp_path: Path, name: str) -> None:
    import_hf(llama, tmp_path / "ours")
    add_tensors(tmp_path / "ours", {name: torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"not part of this model: '{name}'"):
        open_checkpoint(tmp_path / "ours")


def test_what_another_model_has_no_use_for_is_left_out_and_listed(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    add_tensors(llama, {name: torch.ones(4)})
    assert upcycle(llama, tmp_path / "moe", 2, 1).ignored == (name,)
    assert not passthrough_in(tmp_path / "moe")
    glm = save("deepseek_v3", tmp_path / "glm")
    add_tensors(glm, further_tensors("model.layers.2."))
    import_hf(glm, tmp_path / "ours")
    assert len(export_hf(tmp_path / "ours", tmp_path / "kimi", family="kimi_k2").passthrough) == 7


def test_verify_notices_one_changed_byte(tmp_path: Path) -> None:
    source, further = save("exaone_moe", tmp_path / "a"), further_tensors("mtp.")
    add_tensors(source, further)
    for name, expected in (("mtp.linear_proj.weight", "byte 0 differs"), ("mtp.flag", "7 and 6")):
        changed = {n: t.clone() for n, t in further.items()}
        changed[name].view(-1).view(torch.uint8)[0] ^= 1
        other = save("exaone_moe", tmp_path / name)
        add_tensors(other, changed)
        assert verify(source, source).equal
        (difference,) = verify(source, other).differences
        assert f"carried.{name}" in difference and expected in difference
    assert inspect(source).to_dict()["carried_bytes"] == sum(t.nbytes for t in further.values())
