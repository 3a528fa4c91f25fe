"""The keys of configurations as people read them: a type, a default and a sentence for every field."""

import dataclasses
import re
import typing
from typing import Literal

import pytest

from te_models.config import ConfigPart, ModelConfig
from te_models.config.keys import KeyTable, field_docs, nested_part, tables_of, toml_words, type_words
from te_models.training import TrainConfig

TRAINING = {table.name: table for table in tables_of(TrainConfig)}


def keys(table: KeyTable) -> dict[str, tuple[str, str]]:
    return {key.name: (key.type, key.default_words) for key in table.keys}


def test_every_field_has_a_sentence() -> None:
    """And only one: written below the field, nowhere else."""
    for table in TRAINING.values():
        assert table.sentence.endswith(".") and table.keys, table.name
        for key in table.keys:
            assert re.fullmatch(r"[A-Za-z0-9].*[^.]\.", key.sentence), key.path
            assert ". " not in key.sentence.replace("arXiv 2", ""), key.path


@pytest.mark.parametrize("part", [TrainConfig, ModelConfig])
def test_every_field_is_a_key_or_a_table(part: type[ConfigPart]) -> None:
    tables = {table.name: table for table in tables_of(part)}

    def check(part: type[ConfigPart], name: str) -> None:
        hints = typing.get_type_hints(part)
        for f in dataclasses.fields(part):
            assert field_docs(part)[f.name]
            nested = nested_part(hints[f.name])
            if nested is None:
                assert f.name in keys(tables[name])
            else:
                check(nested, f"{name}.{f.name}".lstrip("."))

    check(part, "")


def test_types_and_defaults_are_words_of_toml() -> None:
    assert keys(TRAINING["data"])["path"] == ("string", "unset")
    assert keys(TRAINING["data"])["text"] == ("list of strings", "[]")
    assert keys(TRAINING["optimizer"])["betas"] == ("list of numbers", "[0.9, 0.95]")
    assert keys(TRAINING["schedule"])["decay_steps"] == ("integer", "unset")
    assert keys(TRAINING["precision"])["dtype"] == ('"fp32", "bf16" or "bf16-mixed"', '"bf16"')
    assert keys(TRAINING[""])["compile"] == ("true or false", "true")
    assert keys(TRAINING["model.config.embedding"])["multiplier"][0] == 'number or "sqrt_hidden_in_weight_dtype"'
    assert type_words(tuple[Literal["a", "b"], ...]) == 'list of "a" or "b"'
    assert toml_words((1, 2)) == "[1, 2]"


def test_tables_come_in_the_order_of_the_fields() -> None:
    names = list(TRAINING)
    assert names[:4] == ["", "model", "model.config", "model.config.attention"]
    assert names[-2:] == ["profile", "hub"]
    assert TRAINING["model.config.rope_sliding"].sentence.startswith("Rotary position embedding of sliding layers")
