"""LoRA in a run: only adapters are trained, over any weights; runs resume, and merged models equal adapted ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import FAMILIES
from te_models.config import ConfigError, ModelConfig
from te_models.lora import add_lora, load_adapter
from te_models.lora.adapter import adapters_of
from te_models.parallel import ParallelDims
from te_models.parallel.parts import ModelParts
from te_models.training import LoRAConfig, ModelSource, PrecisionConfig, ScheduleConfig, TrainConfig, train
from te_models.training.build import build_model, build_optimizer
from te_models.training.checkpoints.checks import TrainingCheckpointError
from te_models.training.lora import Adapters
from te_models.training.preflight import check_run_layout
from te_models.training.trained import adapted_layers
from tests.checkpoints.family_cases import make
from tests.training.runs import assert_same_bits, balanced_model, curve, tensors_under, tiny_model, tiny_run

IDS = torch.arange(24)[None] * 7 % 257
MODELS = {"dense": tiny_model(), "experts": tiny_model(moe=True), "latent attention, shared experts": balanced_model()}


def lora_run(tmp_path: Path, name: str, model: ModelConfig, **changes: Any) -> TrainConfig:
    """A run from a saved model, whose adapters move far."""
    base = tmp_path / "base"
    if not base.exists():
        torch.manual_seed(0)
        GPTModel(model, dtype=torch.float32).save_pretrained(base)
    values = {"lora": LoRAConfig(rank=4), "model": ModelSource(path=str(base)), **changes}
    return tiny_run(tmp_path, name, steps=4, schedule=ScheduleConfig(kind="constant"), **values)


def with_adapter(base: Path, adapter: Path) -> GPTModel:
    model = GPTModel.from_pretrained(base, dtype="float32").eval()
    load_adapter(model, adapter)
    return model


@pytest.mark.sentinels("experts")
@pytest.mark.parametrize("kind", MODELS)
def test_merged_equals_the_base_with_the_adapter(kind: str, tmp_path: Path) -> None:
    """In float32 to 1e-5 of the largest logit; the base's files are unchanged, and a resumed run has the same bits."""
    lora = LoRAConfig(rank=4, use_dora=kind == "dense")
    whole, parts = (lora_run(tmp_path, name, MODELS[kind], lora=lora) for name in ("whole", "parts"))
    train(whole)
    with torch.no_grad():
        adapted = with_adapter(tmp_path / "base", tmp_path / "whole/adapter")(IDS).logits
        merged = GPTModel.from_pretrained(tmp_path / "whole/final", dtype="float32").eval()(IDS).logits
        base = GPTModel.from_pretrained(tmp_path / "base", dtype="float32").eval()(IDS).logits
    largest = base.abs().max()
    assert (adapted - merged).abs().max() < 1e-5 * largest
    assert (merged - base).abs().max() > 1e-3 * largest, "the adapters learned"
    if kind != "dense":
        return
    train(parts.replace(steps=2))
    train(parts)
    assert [row[:-1] for row in curve(whole)] == [row[:-1] for row in curve(parts)]
    for folder in ("checkpoints", "final", "adapter"):
        assert_same_bits(*(tensors_under(Path(run.output_dir) / folder) for run in (whole, parts)))
    base_of_last = tensors_under(tmp_path / "whole/checkpoints/step-00000004/model")
    assert_same_bits(tensors_under(tmp_path / "base"), base_of_last)


def test_stored_quantized_weights_stay_and_adapters_are_trained(tmp_path: Path) -> None:
    precision = PrecisionConfig(dtype="bf16", recipe="current", quantized_weights=True)
    train(lora_run(tmp_path, "run", tiny_model(moe=True), precision=precision))
    folder = tmp_path / "run/checkpoints"
    first, last = (tensors_under(folder / f"step-0000000{step}/model") for step in (2, 4))
    assert any(t.dtype == torch.float8_e4m3fn for t in first.values())
    assert_same_bits(first, last)
    factors = [tensors_under(folder / f"step-0000000{step}") for step in (2, 4)]
    names = [name for name in factors[0] if ":lora." in name]
    assert {name.rpartition("linear_")[2].partition(".")[0] for name in names} == {"qkv", "proj", "fc1", "fc2"}
    assert any(".experts." in name for name in names)
    assert all(not torch.equal(factors[0][name], factors[1][name]) for name in names)


@pytest.mark.slow
def test_dora_resumes_bit_for_bit_under_fp8(tmp_path: Path) -> None:
    """With dropout, over stored FP8 weights; no part of the adapters stands still."""
    precision = PrecisionConfig(dtype="bf16", recipe="current", quantized_weights=True)
    lora = LoRAConfig(rank=2, use_dora=True, dropout=0.1, targets=("*.0.*linear_qkv", "experts.linear_fc2"))
    runs = [lora_run(tmp_path, n, tiny_model(moe=True), precision=precision, lora=lora) for n in ("whole", "parts")]
    train(runs[0])
    train(runs[1].replace(steps=2))
    train(runs[1])
    assert [row[:-1] for row in curve(runs[0])] == [row[:-1] for row in curve(runs[1])]
    for folder in ("checkpoints", "final", "adapter"):
        assert_same_bits(*(tensors_under(Path(run.output_dir) / folder) for run in runs))
    two, four = (tensors_under(tmp_path / f"whole/checkpoints/step-0000000{step}") for step in (2, 4))
    names = [name for name in two if ":lora." in name]
    assert len(names) == 3 * 3  # qkv of one layer, fc2 of two: A, B and the lengths
    assert not any(torch.equal(two[name], four[name]) for name in names)
    assert not (tmp_path / "whole/adapter-hf").exists(), "peft has no DoRA of fused experts"


def test_peft_and_transformers_read_what_a_run_leaves(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from te_models.checkpoints import export_hf
    from te_models.hf import TEModelForCausalLM

    train(lora_run(tmp_path, "run", tiny_model()))
    export_hf(tmp_path / "base", tmp_path / "base-hf")
    with torch.no_grad():
        merged = GPTModel.from_pretrained(tmp_path / "run/final", dtype="float32").eval()(IDS).logits
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base-hf", dtype=torch.float32)
        with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
            adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "run/adapter-hf").eval()(IDS).logits
        ours = TEModelForCausalLM.from_pretrained(tmp_path / "run/adapter", dtype="float32")(IDS).logits
    for logits in (adapted, ours):
        assert (logits - merged).abs().max() < 1e-5 * merged.abs().max()


def test_only_adapters_have_optimizer_state(tmp_path: Path) -> None:
    run = lora_run(tmp_path, "run", tiny_model(), lora=LoRAConfig(rank=2, targets=("linear_qkv",)))
    model = build_model(run, "cpu", None)
    Adapters(run, model)
    names = build_optimizer(run, model).parameters
    assert names and all(".linear_qkv.lora_" in name for name in names)


def test_an_adapter_of_all_rows_is_not_continued_as_one_of_a_part(tmp_path: Path) -> None:
    """An earlier release took q_proj for the whole layer: what it has of k and v would be merged without training."""

    def adapters(*targets: str) -> tuple[Adapters, ModelParts]:
        run = lora_run(tmp_path, "run", tiny_model(), lora=LoRAConfig(rank=2, targets=targets))
        model = build_model(run, "cpu", None)
        return Adapters(run, model), ModelParts(model)

    whole, _ = adapters("linear_qkv")
    tensors = {name: torch.ones_like(tensor) for name, tensor in whole.state_tensors().items()}
    some, own = adapters("q_proj")
    with pytest.raises(TrainingCheckpointError, match=r"adapter of all rows of .*linear_qkv, of which .*'q_proj'"):
        some.load_state_tensors(tensors, own)
    again, own = adapters("q_proj", "k_proj", "v_proj")
    again.load_state_tensors(tensors, own)


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    run = lora_run(tmp_path, "run", tiny_model(), lora=LoRAConfig(rank=2, targets=("linear_qvk",)))
    with pytest.raises(ConfigError, match=r"lora.targets is \['linear_qvk'\]: .*not found"):
        Adapters(run, build_model(run, "cpu", None))
    for name, wrong, says in (
        ("rank", -1, "lora.rank is -1"),
        ("targets", (), "lora.targets is"),
        ("alpha", 0, "alpha"),
    ):
        with pytest.raises(ConfigError, match=says):
            LoRAConfig(**{name: wrong})
    with pytest.raises(ConfigError, match=r"optimizer.ema_decay is 0.9; allowed: null with lora.rank"):
        run.replace(optimizer=run.optimizer.replace(ema_decay=0.9))
    with pytest.raises(ConfigError, match=r"optimizer.freeze is .*; allowed: none with lora.rank"):
        run.replace(optimizer=run.optimizer.replace(freeze=("*",)))
    apart = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}
    dropping = run.replace(lora=LoRAConfig(rank=2, dropout=0.1))
    with pytest.raises(ConfigError, match=r"lora.dropout is 0.1; allowed with expert_tensor_parallel_size"):
        check_run_layout(dropping, tiny_model(moe=True), ParallelDims.of(apart, 2))


@pytest.mark.parametrize("loss_coeff", [0.0, 0.1])
def test_names_alone_say_which_layers_have_adapters(loss_coeff: float, tmp_path: Path) -> None:
    """An indexer that no loss trains has none."""
    model = FAMILIES["deepseek_v32"].read_config(json.loads(make("deepseek_v32").config.to_json_string()))
    assert model.attention.indexer is not None
    indexer = model.attention.indexer.replace(loss_coeff=loss_coeff)
    model = model.replace(attention=model.attention.replace(indexer=indexer))
    adapted = GPTModel(model, device="meta")
    add_lora(adapted, 2)
    names = adapted_layers(tiny_run(tmp_path, lora=LoRAConfig(rank=2)), model)
    assert names == {name for name, _ in adapters_of(adapted)}
    assert any(".indexer." in name for name in names) == bool(loss_coeff)
