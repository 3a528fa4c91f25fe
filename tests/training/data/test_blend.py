"""Mixtures of data sets: exact shares at every position, from which alone a run resumes, and validation sets."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_models.training as training
from te_models.config import ConfigError
from te_models.training.data.blend import Blend
from tests.training.runs import TEXT, assert_same_bits, curve, rows_of, tensors_under, tiny_run


def of_one_token(path: Path, token: int, count: int) -> training.Windows:
    return training.Windows(training.write_dataset(path, [[[token] * 4 * count]], 257), 4, "train", 0.0, 0)


@given(st.lists(st.fractions(min_value=Fraction(1, 100), max_value=100), min_size=1, max_size=5), st.integers(1, 300))
@settings(deadline=None, max_examples=50)
def test_counts_follow_the_weights_at_every_position(weights: list[Fraction], positions: int) -> None:
    blend = object.__new__(Blend)
    object.__setattr__(blend, "weights", tuple(weights))
    seen = [0] * len(weights)
    for position in range(positions):
        i, own = blend.source(position)
        assert own == seen[i], "each data set is read in its own order, without gaps"
        seen[i] += 1
        for count, weight in zip(seen, weights, strict=True):
            assert abs(count - (position + 1) * weight / sum(weights)) < len(weights)


def test_a_blend_reads_its_data_sets_by_weight(tmp_path: Path) -> None:
    parts = tuple(of_one_token(tmp_path / str(i), i, 3) for i in range(3))
    blend = Blend(parts, (Fraction("0.5"), Fraction("0.3"), Fraction("0.2")))
    assert torch.bincount(blend.examples(0, 10).input_ids[:, 0]).tolist() == [5, 3, 2]
    for position in (0, 7, 10**15):
        assert torch.equal(blend.examples(position, 4).input_ids[1:], blend.examples(position + 1, 3).input_ids)


def test_text_and_chats_are_mixed(tmp_path: Path) -> None:
    """Batches of text alone have labels, too: ranks and steps agree about what is computed."""
    chats, text = tmp_path / "chats.jsonl", of_one_token(tmp_path / "text", 1, 3)
    chats.write_text('{"prompt": "abc", "completion": "defgh"}\n' * 6)
    options = training.DocumentOptions(format="prompt_completion")
    data = training.build_dataset(tmp_path / "chats", [chats], "bytes", options=options)
    blend = Blend((text, training.Windows(data, 4, "train", 0.0, 0)), (Fraction(1), Fraction(1)))
    for position in range(6):
        ids, labels, *places = blend.examples(position, 1)
        answer = ids.masked_fill((ids >= ord("a")) & (ids <= ord("c")), -100)
        assert torch.equal(labels, ids if (ids == 1).all() else answer) and places == [None, None]


def blended(tmp_path: Path, name: str, **changes: object) -> training.TrainConfig:
    run = tiny_run(tmp_path, name, steps=4)
    folders = [tmp_path / "json", tmp_path / "email"]
    for folder, text in zip(folders, (TEXT, TEXT.replace("json", "email")), strict=True):
        if not folder.exists():
            training.build_dataset(folder, [text], "bytes")
    blend = (f"{folders[0]}=0.7", f"{folders[1]}=0.3")
    data = training.DataConfig(blend=blend, sequence_length=32, micro_batch_size=2, gradient_accumulation=2)
    sets = (f"mail={folders[1]}", f"code={folders[0]}")
    values: dict[str, Any] = {
        "schedule": training.ScheduleConfig(kind="constant"),
        "data": data,
        "evaluation": training.EvaluationConfig(every=2, batches=2, sets=sets),
    }
    return run.replace(**values, checkpoint=training.CheckpointConfig(every=2), **changes)


def test_a_run_on_a_blend_resumes_bit_for_bit_and_measures_each_set(tmp_path: Path) -> None:
    whole, parts = blended(tmp_path, "whole"), blended(tmp_path, "parts")
    training.train(whole)
    training.train(parts.replace(steps=2))
    training.train(parts)
    assert curve(whole) == curve(parts)
    assert_same_bits(*(tensors_under(Path(run.output_dir) / "checkpoints") for run in (whole, parts)))
    rows = rows_of(whole)
    assert list(rows[1]["validation_losses"]) == ["mail", "code"]
    assert rows[1]["validation_losses"]["mail"] != rows[1]["validation_losses"]["code"]
    assert "validation_loss" in rows[1] and "validation_losses" not in rows[0]
    other = blended(tmp_path, "parts", steps=6)
    other = other.replace(data=other.data.replace(blend=other.data.blend[::-1]))
    with pytest.raises(ConfigError, match=r"data.blend differ from the checkpoint's"):
        training.train(other)


WRONG = {
    ("a",): r'data.blend is \'a\'; allowed: "folder=weight" with a positive number',
    ("a=0",): "data.blend is 'a=0'",
    ("a=1/0",): "data.blend is 'a=1/0'",
    ("=1",): "data.blend is '=1'",
    ("a=1", "a=2"): "each folder once",
}


@pytest.mark.parametrize("blend", WRONG)
def test_a_wrong_blend_is_named(blend: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=WRONG[blend]):
        training.DataConfig(blend=blend)


def test_what_a_blend_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a folder, or data.blend, and not both"):
        training.DataConfig(path="a", blend=("b=1",))
    with pytest.raises(ConfigError, match=r"evaluation.sets is 'code'; allowed: .name=folder."):
        training.EvaluationConfig(sets=("code",))
    run = blended(tmp_path, "run")
    absent = run.replace(data=run.data.replace(blend=(f"{tmp_path / 'absent'}=1",)))
    with pytest.raises(training.DataError, match="absent is not a token data set"):
        training.train(absent)


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=40)
def test_stages_go_on_where_the_ones_before_ended(stages: list[list[int]], data: st.DataObject) -> None:
    """Every data set is read in order without gaps, and a stage reads by its own weights."""
    blend = object.__new__(Blend)
    begins = [0]
    for _ in stages[1:]:
        begins.append(begins[-1] + data.draw(st.integers(1, 30)))
    weights = [tuple(map(Fraction, stage)) for stage in stages]
    object.__setattr__(blend, "weights", weights[0])
    object.__setattr__(blend, "later", tuple(zip(begins[1:], weights[1:], strict=True)))
    seen = [0] * 3
    for stage, (begin, end) in enumerate(zip(begins, [*begins[1:], begins[-1] + 40], strict=True)):
        before = list(seen)
        for position in range(begin, end):
            i, own = blend.source(position)
            assert own == seen[i] and weights[stage][i] > 0
            seen[i] += 1
            for count, first, weight in zip(seen, before, weights[stage], strict=True):
                assert abs(count - first - (position + 1 - begin) * weight / sum(weights[stage])) < 3


def test_a_curriculum_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The weights change within the run, and a run that stops after that goes on with them."""
    config = blended(tmp_path, "whole")
    json, email = (text.rpartition("=")[0] for text in config.data.blend)
    data = config.data.replace(blend=(f"{json}=1", f"{email}=0"), blend_steps=(f"2: {json}=0, {email}=1",))
    config = config.replace(data=data)
    training.train(config)
    parts = config.replace(output_dir=str(tmp_path / "parts"))
    training.train(parts.replace(steps=3))
    training.train(parts)
    assert_same_bits(*(tensors_under(tmp_path / name / "final") for name in ("whole", "parts")))
    other = config.replace(data=data.replace(path=json, blend=(), blend_steps=()), output_dir=str(tmp_path / "other"))
    training.train(other)
    files = [tmp_path / name / "metrics.jsonl" for name in ("whole", "other")]
    rows = [[row["loss"] for row in training.read_metrics(file)] for file in files]
    assert rows[0][:2] == rows[1][:2] and rows[0][2:] != rows[1][2:]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (("a=1",), '"step: folder=weight, folder=weight"'),
        (("5: a=1, b=1", "5: a=1, b=2"), "a step after 5, in ascending order"),
        (("5: a=1",), "each folder of data.blend, and no other; not so: b"),
        (("5: a=0, b=0",), "a weight above 0"),
    ],
)
def test_a_wrong_curriculum_is_named(steps: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        training.DataConfig(blend=("a=1", "b=1"), blend_steps=steps)
    with pytest.raises(ConfigError, match=r"data\.blend_steps is \[.*\]; allowed: empty without blend"):
        training.DataConfig(path="a", blend_steps=("5: a=1",))
