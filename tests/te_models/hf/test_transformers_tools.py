"""transformers' Trainer and pipeline with TEModelForCausalLM."""

import dataclasses
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import refused

pytest.importorskip("transformers", reason="TEModelForCausalLM is a transformers model")
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from te_models import GPTModel, ModelConfig
from te_models.checkpoints import reshard, verify
from te_models.hf import RecipeStateCallback, TEConfig, TEModelForCausalLM
from te_models.layers import DelayedScaling, MXFP8BlockScaling
from tests.te_models.hf_models import hf_model

SENTENCES = ["a b c d e f g h", "b c d e f g h a", "c d e f g h a b"] * 8


@pytest.fixture
def tokenizer() -> Any:
    import tokenizers

    words = {"<pad>": 0, "<end>": 1, "<unknown>": 2, **{w: i + 3 for i, w in enumerate("abcdefgh")}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unknown>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


@pytest.fixture(params=["qwen3_moe", pytest.param("llama", marks=pytest.mark.slow)])
def theirs(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = transformers.AutoConfig.for_model(
        request.param,
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **(experts if request.param == "qwen3_moe" else {}),
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def save(model: Any, folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(folder)
    return folder


def trainer(model: Any, tokenizer: Any, folder: Path, **options: Any) -> transformers.Trainer:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it: pip install 'te_models[trainer]'")
    settings: dict[str, Any] = {
        "max_steps": 12,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_steps": 6,
        "seed": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(str(folder), **(settings | options))
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=[dict(tokenizer(sentence)) for sentence in SENTENCES],
        eval_dataset=[dict(tokenizer(sentence)) for sentence in SENTENCES[:4]],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )


def losses(run: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trainer_learns_as_with_transformers_own_model(theirs: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The same data, optimizer and initial weights: the same losses, dense and with experts."""
    ours = TEModelForCausalLM.from_pretrained(save(theirs, tmp_path / "hf"))
    run, reference = trainer(ours, tokenizer, tmp_path / "a"), trainer(theirs, tokenizer, tmp_path / "b")
    run.train()
    reference.train()
    assert losses(run) == pytest.approx(losses(reference), rel=2e-3)
    assert losses(run)[-1] < 0.6 * losses(run)[0]
    assert run.evaluate()["eval_loss"] == pytest.approx(reference.evaluate()["eval_loss"], rel=5e-3)


def test_a_token_weighs_the_same_in_every_micro_batch(tmp_path: Path) -> None:
    """A step of SGD over answers of 10, 1 and 3 tokens, one micro-batch each, moves weights as transformers' model."""
    torch.manual_seed(5)
    theirs = hf_model("llama").float()
    ours = TEModelForCausalLM.from_pretrained(save(theirs, tmp_path / "hf"), dtype=torch.float32)
    rows = []
    for answer in (10, 1, 3):
        ids = torch.randint(3, 61, (12,))
        rows.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) < 12 - answer, -100)})
    moved = []
    for model in (ours, theirs):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=1, gradient_accumulation_steps=3, max_steps=1,
            optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=1e9, save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
        )  # fmt: skip
        before = model.get_input_embeddings().weight.detach().clone()
        transformers.Trainer(model, arguments, train_dataset=rows).train()
        moved.append(model.get_input_embeddings().weight.detach() - before)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-6)


def test_trainer_resumes_and_its_checkpoints_are_model_folders(theirs: Any, tokenizer: Any, tmp_path: Path) -> None:
    source = save(theirs, tmp_path / "hf")
    steps = {"max_steps": 4, "save_steps": 2}
    whole = trainer(TEModelForCausalLM.from_pretrained(source), tokenizer, tmp_path / "out", **steps)
    whole.train()
    whole.save_model()
    resumed = trainer(TEModelForCausalLM.from_pretrained(source), tokenizer, tmp_path / "out", **steps)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert losses(resumed)[-2:] == pytest.approx(losses(whole)[-2:], rel=1e-6)
    assert (tmp_path / "out/checkpoint-4/optimizer.pt").is_file() and (tmp_path / "out/checkpoint-2").is_dir()
    assert verify(tmp_path / "out", tmp_path / "out/checkpoint-4").equal
    folder = tmp_path / "out"
    loaded = GPTModel.from_pretrained(folder)
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), whole.model.parameters(), strict=True))
    assert transformers.AutoTokenizer.from_pretrained(folder)("a b").input_ids == [3, 4]


@pytest.mark.slow
def test_trainer_under_a_recipe_with_layers_recomputed(theirs: Any, tokenizer: Any, tmp_path: Path) -> None:
    ours = TEModelForCausalLM.from_pretrained(save(theirs, tmp_path / "hf"), dtype=torch.float32)
    ours.recipe = MXFP8BlockScaling()
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    recompute = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    run = trainer(ours, tokenizer, tmp_path / "out", save_strategy="no", **{recompute: True})
    run.train()
    assert ours.is_gradient_checkpointing and losses(run)[-1] < 0.6 * losses(run)[0]


@pytest.mark.slow
def test_trainer_smooths_labels_of_the_next_tokens(theirs: Any, tokenizer: Any, tmp_path: Path) -> None:
    ours = TEModelForCausalLM.from_pretrained(save(theirs, tmp_path / "hf"))
    options = {"label_smoothing_factor": 0.2, "max_steps": 8, "save_strategy": "no"}
    run, reference = (trainer(m, tokenizer, tmp_path / "out", **options) for m in (ours, theirs))
    run.train()
    reference.train()
    assert losses(run) == pytest.approx(losses(reference), rel=2e-3)


@pytest.mark.slow
def test_trainer_goes_on_with_weights_stored_quantized(theirs: Any, tokenizer: Any, tmp_path: Path) -> None:
    """From a checkpoint in one file or in several, and from the best one at the end."""
    source, ids = save(theirs, tmp_path / "hf"), torch.arange(3, 9)[None]

    def run(folder: str, **options: Any) -> tuple[transformers.Trainer, torch.Tensor]:
        resume = options.pop("resume", None)
        model = TEModelForCausalLM.from_pretrained(source, recipe=MXFP8BlockScaling())
        trained = trainer(model, tokenizer, tmp_path / folder, max_steps=4, **{"save_steps": 2, **options})
        trained.train(resume_from_checkpoint=resume)
        return trained, model.eval()(ids).logits

    _, expected = run("a")
    checkpoint = tmp_path / "a/checkpoint-2"
    assert torch.equal(run("b", resume=str(checkpoint), save_strategy="no")[1], expected)
    reshard(checkpoint, tmp_path / "split", max_shard_bytes=20_000)
    for file in checkpoint.glob("*.pt*"):
        shutil.copy(file, tmp_path / "split")
    shutil.copy(checkpoint / "trainer_state.json", tmp_path / "split")
    assert (tmp_path / "split/model.safetensors.index.json").is_file()
    assert torch.equal(run("c", resume=str(tmp_path / "split"), save_strategy="no")[1], expected)
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # the first one
    found, logits = run("d", **best)
    assert found.state.best_model_checkpoint == str(tmp_path / "d/checkpoint-2") and not torch.equal(logits, expected)
    assert torch.equal(logits, TEModelForCausalLM.from_pretrained(found.state.best_model_checkpoint)(ids).logits)
    with pytest.raises(ValueError, match="is stored quantized, and the model does not have it in that format"):
        TEModelForCausalLM.from_pretrained(source).load_state_dict(load_file(checkpoint / "model.safetensors"))


@pytest.mark.slow
def test_trainer_goes_on_with_the_state_of_a_recipe(theirs: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Without the callback the scales of delayed scaling begin at 1 again, and the losses are others."""
    source = save(theirs, tmp_path / "hf")

    def run(resume: str | None, callback: bool = True) -> list[float]:
        model = TEModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model.recipe = DelayedScaling()
        trained = trainer(model, tokenizer, tmp_path / "out", max_steps=4, save_steps=2)
        if callback:
            trained.add_callback(RecipeStateCallback())
        trained.train(resume_from_checkpoint=resume)
        return losses(trained)[-2:]

    whole, checkpoint = run(None), tmp_path / "out/checkpoint-2"
    assert run(str(checkpoint)) == whole != run(str(checkpoint), callback=False)
    file = checkpoint / "recipe_state.0.safetensors"
    assert file.stat().st_mode == (checkpoint / "trainer_state.json").stat().st_mode
    data = file.read_bytes()
    file.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    with pytest.raises(ValueError, match=r"is not as it was written: '.*' was changed, lost or added"):
        run(str(checkpoint))
    tensors = load_file(file)
    tensors.popitem()
    with safe_open(file, "pt") as opened:
        save_file(tensors, file, metadata=opened.metadata())
    refused(lambda: run(str(checkpoint)), "is not as it was written")
    file.write_bytes(data[:100])
    refused(lambda: run(str(checkpoint)), "recipe_state.0.safetensors cannot be read")
    file.unlink()
    refused(lambda: run(str(checkpoint)), "recipe_state.0.safetensors is missing")


def test_pipeline(theirs: Any, tokenizer: Any, tmp_path: Path) -> None:
    folder = save(theirs, tmp_path / "hf")
    tokenizer.save_pretrained(folder)
    TEModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    prompts = ["a b c", "d e f g h"]
    results = []
    for name in (folder, tmp_path / "ours"):
        generator = transformers.pipeline("text-generation", model=str(name), device="cpu")
        settings = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=0)
        results.append(generator(prompts, generation_config=settings, batch_size=2))
    assert isinstance(generator.model, TEModelForCausalLM) and results[0] == results[1]
    assert any(len(result[0]["generated_text"]) > len(text) for result, text in zip(results[0], prompts, strict=True))


@torch.no_grad()
def test_a_model_that_accelerate_offloads(theirs: Any, tmp_path: Path) -> None:
    """Weights come when a module is called. That of an embedding is then gone again when an output layer shares it."""
    accelerate = pytest.importorskip("accelerate", reason="it offloads")
    ids = torch.arange(3, 9)[None]
    ours = TEModelForCausalLM.from_pretrained(save(theirs, tmp_path / "hf"))
    expected = ours(ids).logits
    assert torch.equal(accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))(ids).logits, expected)
    tied = TEModelForCausalLM(TEConfig(config=tied_configuration(ours).to_dict())).eval()
    accelerate.cpu_offload(tied, execution_device=torch.device("cpu"))
    refused(lambda: tied(ids), "shares the embedding's weight, which is on the meta device")


def tied_configuration(model: TEModelForCausalLM) -> ModelConfig:
    config = model.gpt.config
    return config.replace(embedding=config.embedding.replace(share_embeddings_and_output_weights=True))
