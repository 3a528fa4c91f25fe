"""Distillation: the definition, runs nearing a teacher that resume bit for bit, quantized teachers, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_models.training as training
from te_models import GPTModel
from te_models.checkpoints import quantize
from te_models.config import ConfigError
from te_models.kernels.cross_entropy import linear_kl, log_probs
from te_models.training.data.windows import Batch
from te_models.training.posttraining import Distillation
from tests.training.runs import assert_same_bits, tensors_under, tiny_model, tiny_run

T, V = 13, 37


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((T, 8), (V, 8), (V,), (T, 6), (V, 6), (V,))
    return [torch.randn(*size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("tokens", "words"), [(None, 40), (5, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients(
    tokens: int | None, words: int, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs, "CHUNK_WORDS", words)
    factor, exact = torch.linspace(-1, 1, T), inputs(torch.float64)
    x, w, b, y, u, c = exact
    student = 3.1 * torch.tanh(1.7 * (x @ w.T + b) / 3.1) / 1.9
    teacher = 5.0 * torch.tanh(0.5 * (y @ u.T + c) / 5.0) / 1.9
    expected = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    (expected * factor).sum().backward()
    own = inputs(dtype)
    options = {"temperature": 1.9, "multipliers": (1.7, 0.5), "softcaps": (3.1, 5.0), "chunk_tokens": tokens}

    def run(*operands: torch.Tensor) -> torch.Tensor:
        return linear_kl(*operands, **options)

    found = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(*own)
    (found * factor).sum().backward()
    for value, right in zip([found, *(t.grad for t in own[:3])], [expected, *(t.grad for t in exact[:3])], strict=True):
        tolerances = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
        torch.testing.assert_close(value.detach(), right.detach().to(dtype), **tolerances)
    assert all(t.grad is None for t in own[3:])
    if compiled:
        assert torch.equal(found, run(*own))


def distilling(tmp_path: Path, name: str = "run", posttraining: dict[str, Any] | None = None, **changes: Any):
    """A student of random weights, and a teacher that knows more, in the folder `teacher`."""
    folder = tmp_path / "teacher"
    if not folder.exists():
        torch.manual_seed(1)
        GPTModel(tiny_model(hidden=32).replace(init_method_std=0.3), dtype=torch.float32).save_pretrained(folder)
    table = {"method": "distill", "teacher": str(folder), "temperature": 2.0, "alpha": 1.0, **(posttraining or {})}
    return tiny_run(tmp_path, name, **({"posttraining": training.PosttrainingConfig(**table)} | changes))


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_the_objective_is_the_definition(tmp_path: Path, alpha: float) -> None:
    config = distilling(tmp_path, posttraining={"alpha": alpha})
    torch.manual_seed(0)
    student = GPTModel(tiny_model(moe=True), dtype=torch.float64)
    teacher = GPTModel.from_pretrained(tmp_path / "teacher", dtype=torch.float64).eval()
    ids = torch.arange(48).view(2, 24) * 7 % 257
    labels, documents = ids.clone(), (torch.arange(24) >= 9).long().repeat(2, 1)
    labels[:, 4:9] = -100
    batch, weight = Batch(ids, labels, None, documents), torch.tensor(0.75)
    objective = Distillation(config, teacher, compiled=False)
    loss, terms = objective.loss(student, batch, weight, **objective.inputs(batch))

    places = {"document_ids": documents}
    output = student(ids, labels=labels, **places)
    counted = labels[:, 1:] != -100
    with torch.no_grad():
        theirs = teacher(ids, **places).logits[:, :-1][counted] / 2.0
    ours = output.logits[:, :-1][counted] / 2.0
    kl = F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
    expected = (alpha * 4.0 * kl + (1 - alpha) * (output.loss - output.aux_loss)) * 0.75 + output.aux_loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert terms[3:].tolist() == pytest.approx([0.75 * kl.item(), 0.75 * (output.loss - output.aux_loss).item()], 1e-6)


def test_a_run_comes_closer_to_its_teacher_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    evaluation = training.EvaluationConfig(every=4, batches=1)
    changes = {"evaluation": evaluation, "schedule": training.ScheduleConfig(kind="constant")}
    config = distilling(tmp_path, steps=12, **changes)
    before = tensors_under(tmp_path / "teacher")
    rows = training.read_metrics(training.train(config).metrics_file)
    assert rows[-1]["distillation/kl"] < 0.9 * rows[0]["distillation/kl"]
    assert rows[0]["loss"] == pytest.approx(4.0 * rows[0]["distillation/kl"], rel=1e-5)
    assert rows[-1]["validation_loss"] < rows[3]["validation_loss"]
    parts = distilling(tmp_path, "parts", steps=12, **changes)
    training.train(parts.replace(steps=6))
    training.train(parts)
    assert_same_bits(*(tensors_under(tmp_path / name / "final") for name in ("run", "parts")))
    assert_same_bits(before, tensors_under(tmp_path / "teacher"))


def test_a_teacher_with_quantized_weights(tmp_path: Path) -> None:
    """Its weights stay as the folder has them; the run is that of the values that they have."""
    distilling(tmp_path)
    quantize(tmp_path / "teacher", tmp_path / "mxfp8", recipe="mxfp8")
    values = GPTModel.from_pretrained(tmp_path / "mxfp8", dtype=torch.float32, dequantize=True)
    values.save_pretrained(tmp_path / "values")
    losses = []
    for name in ("mxfp8", "values", "teacher"):
        config = distilling(tmp_path, f"run-{name}", {"teacher": str(tmp_path / name)}, steps=2)
        losses.append([row["loss"] for row in training.read_metrics(training.train(config).metrics_file)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] != losses[2]


def refused(config: training.TrainConfig, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        training.train(config)


def test_what_a_teacher_cannot_be(tmp_path: Path) -> None:
    config = distilling(tmp_path)
    other = tmp_path / "other"
    GPTModel(tiny_model().replace(vocab_size=300)).save_pretrained(other)
    refused(distilling(tmp_path, posttraining={"teacher": str(other)}), "300 words; allowed: a teacher with the 257")
    short = tmp_path / "short"
    GPTModel(tiny_model().replace(max_position_embeddings=16)).save_pretrained(short)
    refused(distilling(tmp_path, posttraining={"teacher": str(short)}), "16 positions; allowed: as many as")
    for folder, words in ((tmp_path / "teacher", {"a": 0, "b": 1}), (tmp_path / "student", {"a": 1, "b": 0})):
        if not folder.exists():
            GPTModel(tiny_model()).save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": words, "merges": []}}))
    refused(distilling(tmp_path, posttraining={"teacher": "org/name"}), "teacher is org/name: there is no such folder")
    data = training.DataConfig(path=str(tmp_path / "data"), sequence_length=32)
    student = config.replace(model=training.ModelSource(path=str(tmp_path / "student")), data=data)
    refused(student, "whose tokenizer has 'a' as 0, and .*student as 1; allowed: a teacher of the same tokenizer")
    with pytest.raises(ConfigError, match=r"posttraining\.teacher is None; allowed: a folder with posttraining"):
        training.PosttrainingConfig(method="distill")
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size is 2; allowed: 1 with .*'distill': every rank"):
        config.replace(parallel=config.parallel.replace(tensor_model_parallel_size=2))
