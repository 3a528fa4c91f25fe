"""Options of conversions are said once: a verb's option, its help and the argument of the function are one field."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from te_models import checkpoints
from te_models.checkpoints.folder.te_folder import TEFolder
from te_models.checkpoints.tools import options
from te_models.checkpoints.tools.conversion import ConversionKeywords
from te_models.cli.main import build_parser, main, verbs_of
from te_models.cli.options import fields_of, flag_of
from te_models.config.keys import field_docs
from te_models.gguf import export_gguf, import_gguf
from tests.build import tiny

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
    assert "--storage" not in verbs_of(build_parser(asked="info")).choices["import"].format_help()
    assert "--storage" in verbs_of(build_parser()).choices["import"].format_help()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["import", "HF", "--step", "1"], "--step is of training systems' checkpoints"),
        (["import", "HF", "--step", "1", "--storage", "mxfp8"], "--step is of training systems' checkpoints"),
        (["import", "HF", "--qkv-not-interleaved"], "--qkv-not-interleaved is of training systems' checkpoints"),
        (["import", "FILE", "--qkv-not-interleaved"], "--qkv-not-interleaved does nothing here; allowed: "),
        (["import", "DCP", "--config", "OURS", "--no-verify"], "--no-verify does nothing here; allowed: "),
        (["import", "DCP", "--config", "OURS", "--step", "1"], "--step does nothing here; allowed: "),
        (["import", "DCP", "--config", "OURS", "--qkv-not-interleaved"], "qkv_weight_interleaved is of 'transformer_e"),
        (
            ["import", "DCP", "--config", "OURS", "--run", "x", "--dtype", "bf16"],
            "--dtype does nothing here; allowed: ",
        ),
        (["export", "OURS", "--tensor-model-parallel-size", "1"], "--tensor-model-parallel-size is of --to megatron"),
        (["export", "OURS", "--make-vocab-size-divisible-by=128"], "divisible-by is of --to megatron"),
        (
            ["export", "OURS", "--to", "torchtitan", "--max-shard-size", "5GiB"],
            "--max-shard-size does nothing here; allowed: ",
        ),
        (["export", "OURS", "--to", "megatron", "--file-digests"], "--file-digests does nothing here; allowed: "),
        (
            ["export", "OURS", "--to", "gguf", "--max-shard-size", "2GiB"],
            "--max-shard-size does nothing here; allowed: ",
        ),
        (["export", "OURS", "--to", "gguf", "--no-verify"], "--no-verify does nothing here; allowed: "),
        (["export", "RUN", "--to", "torchtitan", "--dtype", "bf16"], "--dtype does nothing here; allowed: "),
        (["export", "OURS", "--adapter", "x", "--to", "hf"], "--to is of models"),
        (
            ["export", "OURS", "--adapter", "x", "--max-shard-size", "2GiB"],
            "--max-shard-size does nothing here; allowed: ",
        ),
        (["merge", "OURS", "ADAPTER", "--seed", "0"], "--seed needs --rounding stochastic"),
        (["generate", "OURS", "--prompt", "x", "--seed", "0"], "--seed needs --temperature above 0"),
        (["generate", "OURS", "--prompt", "x", "--num-draft-tokens", "4"], "--num-draft-tokens needs --draft-model or"),
        (["eval", "OURS", "--text", "x", "--limit", "3"], "--limit needs --task"),
        (["eval", "OURS", "--task", "x", "--text-field", "text"], "--text-field needs --text"),
        (["certify", "--check", "x", "--ranks", "8"], "--ranks needs SOURCE"),
        (["verify", "OURS", "--tokens", "256"], "--tokens needs --logits"),
        (["info", "--dynamic", "auto"], "--dynamic needs --compile-report DIR"),
        (["info", "--keys", "moe", "--compile-report", "x"], "--compile-report needs no --keys"),
    ],
)
def test_an_option_that_does_nothing_is_refused_also_with_its_default(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file in (("HF", "config.json"), ("OURS", "config.json"), ("DCP", ".metadata"), ("RUN", "training.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "OURS/config.json").write_bytes(TEFolder("grouped", tiny()).to_bytes())
    (tmp_path / "FILE").write_text("GGUF")
    words = [str(tmp_path / word) if word.isupper() else word for word in words]
    out = [str(tmp_path / "out")] if words[0] in ("import", "export", "merge") else []
    assert main([*words, *out]) == 2 and sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
