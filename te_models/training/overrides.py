"""Command-line overrides of a TrainConfig, through tyro (extra `train`).

tyro reads the annotations of the configuration tree, so every field is an option with its type and default, and
`--help` is always complete. The table [model.config] is left out on purpose: a ModelConfig derives fields from others
(head dimension, layer types), so changing one of them after the fact would keep stale values of the others.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

from ..config import ConfigError
from ..extras import require
from .config import TrainConfig

_TABLE = "[model.config]"
"""Stands for the TOML table while tyro reads the options."""


def apply_overrides(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return `config` with options like `--data.micro-batch-size 4` applied. `--help` prints the options and exits.

    Raises ConfigError for an unknown option or a value of the wrong type.
    """
    if not overrides:
        return config
    tyro = require("tyro", "train", feature="changing the configuration on the command line")
    table, errors = config.model.config, io.StringIO()
    if table is not None:
        config = config.replace(model=config.model.replace(config=None, config_file=_TABLE))
    try:
        with contextlib.redirect_stderr(errors):
            result: TrainConfig = tyro.cli(
                TrainConfig,
                default=config,
                args=list(overrides),
                prog="te-models train CONFIG.toml",
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise ConfigError(_first_sentence(errors.getvalue())) from None
    if result.model.config_file == _TABLE:
        result = result.replace(model=result.model.replace(config=table, config_file=None))
    return result


def _first_sentence(report: str) -> str:
    """Return what the first box of a tyro report says, on one line."""
    words: list[str] = []
    for line in report.splitlines():
        text = line.strip("│╭╮╰╯ ")
        if text.startswith("──") and words:
            break
        if line.startswith("│"):
            words.append(text)
    return " ".join(words) or report.strip()
