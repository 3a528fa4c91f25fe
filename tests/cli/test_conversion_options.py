"""Options of conversions are said once: a verb's option, its help and the argument of the function are one field."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from te_models import checkpoints
from te_models.checkpoints.tools import options
from te_models.checkpoints.tools.conversion import ConversionKeywords
from te_models.cli.main import build_parser, verbs_of
from te_models.cli.options import fields_of, flag_of
from te_models.config.keys import field_docs
from te_models.gguf import export_gguf, import_gguf

FUNCTIONS: dict[str, tuple[type[options.ConversionOptions], tuple[Callable[..., Any], ...], set[str]]] = {
    "import": (
        options.ImportOptions,
        (checkpoints.import_hf, checkpoints.import_checkpoint, import_gguf),
        {"run_file", "step"},
    ),
    "export": (
        options.ExportOptions,
        (checkpoints.export_hf, checkpoints.export_checkpoint, export_gguf),
        {"adapter", "base_model"},
    ),
    "relayout": (options.RelayoutOptions, (checkpoints.relayout,), set()),
    "reshard": (options.ShardedOptions, (checkpoints.reshard,), set()),
    "merge-shards": (options.ConversionOptions, (checkpoints.reshard,), set()),
    "quantize": (options.QuantizeOptions, (checkpoints.quantize,), set()),
    "dequantize": (options.DequantizeOptions, (checkpoints.dequantize,), set()),
    "upcycle": (options.UpcycleOptions, (checkpoints.upcycle,), set()),
    "toy": (options.ToyOptions, (checkpoints.toy,), set()),
}
"""Verb -> its options, the functions that take them, and what another verb's function takes."""
OTHERWISE = {("export", "layout"), ("export", "type"), ("toy", "layers"), ("export", "to"), ("import", "config")}
"""Whose default is another one, or says that there is none."""


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_a_field_is_the_option_its_help_and_the_argument(verb: str) -> None:
    part, functions, elsewhere = FUNCTIONS[verb]
    parser = verbs_of(build_parser(asked=verb)).choices[verb]
    text = "".join(parser.format_help().split())  # lines may end within a word, after a hyphen
    arguments: dict[str, inspect.Parameter] = {}
    for function in functions:
        arguments |= inspect.signature(function).parameters
    for name, field in fields_of(part).items():
        assert flag_of(part, name) in text
        assert "".join(field_docs(part)[name].rstrip(".")[1:].replace("Whether ", "").split()) in text
        if name in elsewhere or name in ConversionKeywords.__annotations__:
            continue
        assert name in arguments, name
        default = arguments[name].default
        if (verb, name) not in OTHERWISE:
            missing = field.default is dataclasses.MISSING
            assert (default is inspect.Parameter.empty) if missing else (default == field.default), name


def test_only_the_verb_that_is_asked_has_its_options() -> None:
    parser = verbs_of(build_parser(asked="info")).choices["import"]
    assert "--storage" not in parser.format_help()
    assert "--storage" in verbs_of(build_parser()).choices["import"].format_help()
