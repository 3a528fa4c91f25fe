"""toy: rows of the original, byte for byte, and a model that transformers loads."""

import contextlib
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, import_hf, inspect, toy
from te_models.checkpoints.families.base.unused import COUNTS
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.folder.test_passthrough import FAMILIES as FURTHER
from tests.checkpoints.hf_cases import HFFolder, assert_same_bits, stored, there_and_back, transformers


def save(case: str, folder: Path, **options: bool) -> Path:
    with warnings.catch_warnings(action="ignore"):
        make(case, dtype=torch.bfloat16).save_pretrained(folder, **options)
    return folder


def is_subset(part: torch.Tensor, whole: torch.Tensor, *, first: bool) -> bool:
    """Whether `part` is `whole`, or its first rows."""
    rows = whole[tuple(slice(n) for n in part.shape)] if first else whole
    return part.dtype == whole.dtype and part.shape == rows.shape and torch.equal(part, rows)


@pytest.mark.sentinels("mixtral", "gpt_oss", "deepseek_v3", "llama4", "gpt2", "gemma3")
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_family(tmp_path: Path, case: str) -> None:
    """One layer, or those up to the first one with experts, and two experts."""
    source = save(case, tmp_path / "hf")
    whole = inspect(source).config
    moe = whole["moe"] if whole["moe"] and whole["moe"]["layers"] else None
    number = 1 if moe is None else moe["layers"][0] + 1
    number = whole["num_layers"] if case.startswith("olmo_hybrid") else number  # transformers wants attention in it
    experts = None if moe is None or moe.get("hash_layers") else 2
    plan = None
    while plan is None:  # families that say layers by a pattern cannot say the first one alone
        with contextlib.nullcontext() if number == whole["num_layers"] else contextlib.suppress(CheckpointError):
            plan = toy(source, tmp_path / "toy", layers=number, experts=experts)
        number += plan is None
    assert plan.ignored == ()
    parts, originals = stored(tmp_path / "toy"), stored(source)
    assert len(parts) < len(originals) or number == whole["num_layers"]
    for name, part in parts.items():
        assert is_subset(part, originals[name], first=moe is not None or "per_layer" in name), name
    small = inspect(tmp_path / "toy").config
    assert small["num_layers"] == number and small["hidden_size"] == whole["hidden_size"]
    if moe is not None and experts is not None:
        assert small["moe"]["num_moe_experts"] == 2
        assert any(p.shape != originals[n].shape or "experts" in n for n, p in parts.items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "toy", dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.arange(3, 20)[None]
    ours = GPTModel.from_pretrained(tmp_path / "toy", dtype=torch.float32).eval()
    expected = theirs(ids, use_cache=False).logits  # its cache of a model without attention fails
    off = (ours(ids).logits - expected).abs()
    if case == "youtu":  # transformers sets the padding token's row to zero as it reads tied weights
        off = off[..., 1:]
    bound = 1e-3 if case.startswith("minimax") else 1e-5  # its files hold tables of decays, which bfloat16 rounds
    assert off.max() <= bound * expected.abs().max()


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "exaone_moe", "dots1"])
@torch.no_grad()
def test_groups_of_one_expert_are_dropped(tmp_path: Path, case: str) -> None:
    """Of four groups with two experts each: two of them would have fewer experts than a token uses, and transformers
    cannot value a group of one."""
    source = save(case, tmp_path / "hf")
    router = inspect(source).config["moe"]["router"]
    assert (router["num_groups"], router["topk_groups"]) == (4, 2)
    for experts, groups in ((4, None), (8, 4)):
        toy(source, tmp_path / f"toy{experts}", layers=2, experts=experts)
        assert inspect(tmp_path / f"toy{experts}").config["moe"]["router"]["num_groups"] == groups
    small = tmp_path / "toy4"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(3, 20)[None]
    ours, expected = GPTModel.from_pretrained(small, dtype=torch.float32).eval(), theirs(ids).logits
    assert (ours(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("case", "noted"), [("glm4_moe", True), ("qwen2_moe", False)])
@torch.no_grad()
def test_one_expert_that_transformers_does_not_run_is_noted(tmp_path: Path, case: str, noted: bool) -> None:
    plan = toy(save(case, tmp_path / "hf"), tmp_path / "toy", layers=2, experts=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "toy")
    ids = torch.arange(3, 20)[None]
    assert [f"transformers does not run {case} with one expert" in note for note in plan.notes] == [True] * noted
    with pytest.raises(RuntimeError, match="out of range") if noted else contextlib.nullcontext():
        theirs(ids)
    assert GPTModel.from_pretrained(tmp_path / "toy")(ids).logits.isfinite().all()


@pytest.mark.parametrize("case", ["qwen2_moe", "deepseek_v3", "exaone_moe"])
def test_the_fused_form_is_kept(tmp_path: Path, case: str) -> None:
    toy(save(case, tmp_path / "hf", save_original_format=False), tmp_path / "toy", layers=2, experts=3)
    fused = [name for name in stored(tmp_path / "toy") if name.endswith("experts.gate_up_proj")]
    assert fused and all(stored(tmp_path / "toy")[name].shape[0] == 3 for name in fused)


def test_layers_are_the_first_ones_and_one_with_experts(llama: Path, tmp_path: Path) -> None:
    source = save("deepseek_v3", tmp_path / "hf")  # layer 0 is dense
    assert inspect(source).config["moe"]["layers"] == [1]
    toy(source, tmp_path / "toy", layers=1)
    assert inspect(tmp_path / "toy").config["moe"]["layers"] == [0]
    original, part = stored(source), stored(tmp_path / "toy")
    name = "self_attn.o_proj.weight"
    assert torch.equal(part[f"model.layers.0.{name}"], original[f"model.layers.1.{name}"])
    toy(llama, tmp_path / "one", layers=1)
    parts, whole = stored(tmp_path / "one"), stored(llama)
    assert parts.keys() == {name for name in whole if ".layers.1." not in name}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in parts.items())
    before, after = (json.loads((f / "config.json").read_text()) for f in (llama, tmp_path / "one"))
    assert after["num_hidden_layers"] == 1
    assert {k for k in before if before[k] != after.get(k)} <= {"num_hidden_layers", "layer_types"}
    assert (tmp_path / "one/tokenizer.json").is_file()


def add_further_layer(source: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Add a layer that predicts further tokens: with all that the last layer has, and more. Return all tensors."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    at = f"model.layers.{last}."
    further = {f"{prefix}{n.removeprefix(at)}": t + 1 for n, t in tensors.items() if n.startswith(at)}
    further |= {f"{prefix}eh_proj.weight": torch.rand(32, 64), f"{prefix}enorm.weight": torch.rand(32).half()}
    save_file({**tensors, **further}, file, metadata={"format": "pt"})
    return {**tensors, **further}


@pytest.mark.sentinels("glm4_moe-published", "deepseek_v3-fused", "ernie4_5_moe-published")
@pytest.mark.parametrize("form", ["published", "fused"])
@pytest.mark.parametrize("family", FURTHER)
def test_layers_that_predict_further_tokens_are_kept(tmp_path: Path, family: str, form: str) -> None:
    """Behind the layers that there are then, and with so many experts."""
    source = save(family, tmp_path / "hf", save_original_format=form == "published")
    prefix = FURTHER[family]
    originals = add_further_layer(source, prefix)
    plan = toy(source, tmp_path / "toy", layers=2, experts=2)
    layers = inspect(tmp_path / "toy").config["num_layers"]
    new = f"model.layers.{layers}." if prefix.startswith("model.layers.") else prefix
    parts, at = stored(tmp_path / "toy"), f"model.layers.{layers - 1}."
    assert not plan.ignored and set(plan.passthrough) == {name for name in parts if name.startswith(new)}
    found = {name.removeprefix(new): parts[name] for name in plan.passthrough}
    of_a_layer = {name.removeprefix(at): tensor for name, tensor in parts.items() if name.startswith(at)}
    assert found.keys() == of_a_layer.keys() | {"eh_proj.weight", "enorm.weight"}
    for name, part in found.items():
        assert part.shape == of_a_layer.get(name, part).shape
        assert is_subset(part, originals[prefix + name], first=name in of_a_layer), name
    assert any(part.shape != originals[prefix + name].shape or "experts.1." in name for name, part in found.items())
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "toy"))
    assert [after.get(name) for name in COUNTS] == [before.get(name) for name in COUNTS]
    assert_same_bits(stored(there_and_back(tmp_path / "toy", tmp_path)), parts)


def test_constants_of_layers_that_are_taken_are_kept(llama: Path, tmp_path: Path) -> None:
    file = llama / "model.safetensors"
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)]
    save_file({**load_file(file), **{name: torch.rand(3) for name in names}}, file, metadata={"format": "pt"})
    plan = toy(llama, tmp_path / "toy", layers=1)
    assert plan.passthrough == (names[0],) and names[1] not in stored(tmp_path / "toy")
    assert torch.equal(stored(tmp_path / "toy")[names[0]], stored(llama)[names[0]])


def test_what_is_not_there_is_refused(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("qwen3_moe")
    for options, message in (
        ({"layers": 3}, "layers is 3; allowed: 1 to 2, what the model has"),
        ({"layers": 0}, "layers is 0"),
        ({"experts": 5}, "experts is 5; allowed: 1 to 4, what the model has"),
        ({"experts": 0}, "experts is 0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            toy(source, tmp_path / "toy", **options)
    with pytest.raises(CheckpointError, match="experts is 1; allowed: None, because the model has no experts"):
        toy(hf_folder("llama"), tmp_path / "toy", experts=1)
    import_hf(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="toy takes a Hugging Face folder"):
        toy(tmp_path / "ours", tmp_path / "toy")
    assert not (tmp_path / "toy").exists()
    assert len(toy(source, tmp_path / "toy", dry_run=True).outputs) > 10 and not (tmp_path / "toy").exists()
