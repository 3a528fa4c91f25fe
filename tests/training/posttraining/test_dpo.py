"""Direct preference optimization: the definition, resumes with a copy or adapters as reference, pairs, refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_models import GPTModel
from te_models.config import ConfigError
from te_models.training import DataConfig, DataError, LoRAConfig, ModelSource, ScheduleConfig, TrainConfig, train
from te_models.training import PosttrainingConfig as Posttraining
from te_models.training.data.dataset import TokenDataset
from te_models.training.data.encoder import Encoder
from te_models.training.data.formats import Document, Fields, RowError
from te_models.training.data.pairs import Pairs
from te_models.training.data.windows import Batch
from te_models.training.posttraining import DPO, reference_of
from tests.training.runs import assert_same_bits, rows_of, tensors_under, tiny_model, tiny_run

NAMES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
WORDS = ("red", "green", "blue", "yellow")


def definition(policy: Tensor, reference: Tensor, labels: Tensor, config: Posttraining) -> tuple[Tensor, list[Tensor]]:
    """TRL's DPOTrainer on logits [2 pairs, S, V], whose first half is chosen: loss, and its four metrics."""
    labels = labels[:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    ratios = []
    for logits in (policy, reference):
        per_token = logits[:, :-1].log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
        log_probs = (per_token * mask).sum(-1)
        ratios.append(log_probs / mask.sum(-1) if config.loss_type == "ipo" else log_probs)
    (chosen, rejected), (ref_chosen, ref_rejected) = (ratio.chunk(2) for ratio in ratios)
    logits, beta, smoothing = (chosen - rejected) - (ref_chosen - ref_rejected), config.beta, config.label_smoothing
    if config.loss_type == "ipo":
        losses = (logits - 1 / (2 * beta)) ** 2
    else:
        losses = -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing
    rewards = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    metrics = [*rewards, rewards[0] - rewards[1], (rewards[0] > rewards[1]).to(losses.dtype)]
    return losses.mean(), [metric.mean() for metric in metrics]


def pair_batch() -> Batch:
    ids = torch.arange(6 * 12).view(6, 12) * 7 % 257
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1::2, 9:] = -100
    return Batch(ids, labels)


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("options", [{"beta": 0.3}, {"label_smoothing": 0.2}, {"loss_type": "ipo"}], ids=str)
def test_loss_gradients_and_metrics_are_the_definition(options: dict[str, Any], chunk: int | None) -> None:
    config = Posttraining(method="dpo", **options)
    policy, copy = (GPTModel(tiny_model(), dtype=torch.float64) for _ in range(2))
    policy.output_layer.loss_chunk_tokens = chunk
    batch = pair_batch()
    objective = DPO(config, reference_of(policy, copy, config, compiled=False))
    loss, terms = objective.loss(policy, batch, None, **objective.inputs(batch))
    loss.backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    order = [*range(0, 6, 2), *range(1, 6, 2)]
    assert batch.labels is not None
    with torch.no_grad():
        reference = copy(batch.input_ids[order]).logits.double()
    logits = policy(batch.input_ids[order]).logits.double()
    expected, metrics = definition(logits, reference, batch.labels[order], config)
    expected.backward()
    assert objective.metrics == NAMES and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert terms[3:].tolist() == pytest.approx([metric.item() for metric in metrics], rel=1e-5, abs=1e-6)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=name)


def write_pairs(file: Path, count: int = 24) -> Path:
    rows = [
        {"prompt": f"{i} is ", "chosen": WORDS[0], "rejected": WORDS[1 + i % 3] + "!" * (i % 3)} for i in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def dpo_run(tmp_path: Path, name: str, **changes: Any) -> TrainConfig:
    base, pairs = tmp_path / "base", tmp_path / "pairs.jsonl"
    if not base.exists():
        torch.manual_seed(0)
        GPTModel(tiny_model(), dtype=torch.float32).save_pretrained(base)
        write_pairs(pairs)
    options = {"format": "preference_pairs", "tokenizer": "bytes", "sequence_length": 24, "validation_fraction": 0.1}
    paths = {"path": str(tmp_path / "data"), "text": (str(pairs),)}
    data = DataConfig(**paths, **options, micro_batch_size=2, gradient_accumulation=2)
    values = {"model": ModelSource(path=str(base)), "data": data, "posttraining": Posttraining(method="dpo"), **changes}
    return tiny_run(tmp_path, name, schedule=ScheduleConfig(kind="constant"), **{"steps": 4, **values})


@pytest.mark.parametrize("lora", [LoRAConfig(), LoRAConfig(rank=4, dropout=0.1)], ids=["copy", "adapters"])
def test_a_run_learns_the_pairs_and_resumes_bit_for_bit(tmp_path: Path, lora: LoRAConfig) -> None:
    whole, parts = (dpo_run(tmp_path, name, lora=lora) for name in ("whole", "parts"))
    train(whole)
    train(parts.replace(steps=2))
    train(parts)
    rows, others = (rows_of(run) for run in (whole, parts))
    kept = ("step", "loss", "tokens", "grad_norm", *NAMES)
    assert [[row.get(k) for k in kept] for row in rows] == [[row.get(k) for k in kept] for row in others]
    assert_same_bits(*(tensors_under(Path(run.output_dir) / "final") for run in (whole, parts)))
    first, last = rows[0], rows[-1]
    assert last["validation_loss"] == others[-1]["validation_loss"] and first["tokens"] == 4 * 2 * 24
    if not lora.dropout:
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and first["rewards/margins"] == 0.0
    assert last["loss"] < first["loss"] and last["rewards/margins"] > 0
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("mode", ["whole", "block"])
@pytest.mark.parametrize("lora", [LoRAConfig(), LoRAConfig(rank=4)], ids=["copy", "adapters"])
def test_a_compiled_run_computes_the_same(tmp_path: Path, lora: LoRAConfig, mode: str) -> None:
    options = {"lora": lora, "compile_mode": mode, "steps": 3}
    runs = [dpo_run(tmp_path, str(compiled), compile=compiled, **options) for compiled in (False, True)]
    for run in runs:
        train(run)
    eager, compiled = (rows_of(run) for run in runs)
    for row, other in zip(eager, compiled, strict=True):
        assert [row[k] for k in ("loss", *NAMES)] == pytest.approx([other[k] for k in ("loss", *NAMES)], abs=1e-4)


def test_a_pair_is_a_window_of_two_rows(tmp_path: Path) -> None:
    train(dpo_run(tmp_path, "run", steps=1))
    ids, labels, *_ = Pairs(TokenDataset.open(tmp_path / "data"), 24, "all", 0.0, 0).examples(0, 1)
    assert labels is not None and ids.shape == (2, 24)
    written = [bytes(row[row.ne(0) & row.ne(256)].tolist()).decode() for row in ids]
    scored = [bytes(row[row.ge(0) & row.ne(256)].tolist()).decode() for row in labels]
    prompt = written[0].removesuffix(scored[0])
    assert prompt.endswith(" is ") and written == [prompt + answer for answer in scored]
    assert scored[0] in WORDS and scored[0] != scored[1]
    assert [int((row == 256).sum()) for row in labels] == [1, 1], "the end is in the loss"


def test_both_answers_of_a_chat_are_written_or_neither() -> None:
    row = {
        "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
    }
    document = Fields("preference_pairs").document("here", row)

    def chat(one: Document) -> list[tuple[list[int], list[int], int]]:
        answer = one.messages[-1]["content"]
        return [([1, ord(answer)], [0, 1], 0)] * (2 if answer == "c" and rewritten else 1)

    encoder, rewritten = Encoder("some", lambda text: (), 257, chat=chat), False
    assert [list(pieces) for pieces, _ in encoder.documents(document)] == [[([1, 98], [0, 1])], [([1, 99], [0, 1])]]
    rewritten = True
    with pytest.raises(RowError, match="here: the chat template writes an answer otherwise when the chat goes on"):
        list(encoder.documents(document))
    del row["rejected"]
    with pytest.raises(RowError, match="here has no field 'rejected'"):
        Fields("preference_pairs").document("here", row)


def test_what_pairs_are_not_trained_with_is_refused(tmp_path: Path) -> None:
    run = dpo_run(tmp_path, "run", steps=1)
    for change, sentence in (
        ({"data": run.data.replace(format="preference")}, "data.format is 'preference'; allowed: 'preference_pairs'"),
        ({"data": run.data.replace(pack_documents=True)}, "data.pack_documents is True; allowed: false with"),
        ({"posttraining": Posttraining()}, "data.format is 'preference_pairs'; allowed: another format"),
    ):
        with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
            run.replace(**change)
    with pytest.raises(ConfigError, match=r"model.path is unset; allowed with posttraining.method = 'dpo': a model"):
        train(run.replace(model=ModelSource(config=tiny_model())))
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.1; allowed: 0 unless"):
        Posttraining(method="dpo", loss_type="ipo", label_smoothing=0.1)
    with pytest.raises(DataError, match=r"pairs? of 24 with more than 10 tokens in an answer \(the longest has"):
        train(run.replace(data=run.data.replace(sequence_length=10)))
    short = run.data.replace(sequence_length=12, skip_bad_rows=True, path=str(tmp_path / "short"))
    train(run.replace(data=short, output_dir=str(tmp_path / "short-run")))
    text = run.data.replace(text=(), tokenizer=None, format=None)
    with pytest.raises(DataError, match=r"has preference pairs; allowed: posttraining.method = 'dpo'"):
        train(run.replace(data=text, posttraining=Posttraining(), output_dir=str(tmp_path / "text-run")))
