"""`te-models train`: the options beside the TOML file are its keys, typed by the configuration itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parser import Verbs, emit, verb

DESCRIPTION = """\
Train a model as CONFIG.toml says. Every key of the file is also an option, with dots for
tables and dashes for underscores: --optimizer.lr 1e-4, --data.sequence-length 512,
--no-compile. `te-models train CONFIG.toml --help-keys` lists them all with their values.
A run that was interrupted continues from its newest checkpoint when started again."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "train",
        run,
        "train a model described by a TOML file",
        DESCRIPTION,
        "te-models train train.toml --steps 100 --precision.recipe mxfp8",
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="the training configuration")
    parser.add_argument("--help-keys", action="store_true", help="list the keys of the configuration and exit")
    parser.add_argument("--dry-run", action="store_true", help="check the configuration, print it and stop")


def run(args: argparse.Namespace) -> int:
    """Train, and print the last metrics. Of torchrun's processes only rank 0 prints."""
    from ..training.config import load_config
    from ..training.distributed import is_main_process

    later = [word for word in args.overrides if word.endswith(".toml")]
    if later and not Path(args.config).exists():  # the value of an option that came first was taken for the file
        raise ValueError(f"CONFIG.toml comes before its keys: te-models train {later[0]} --KEY VALUE")
    overrides = ["--help"] if args.help_keys else args.overrides
    config = load_config(args.config, overrides)
    if args.dry_run:
        if is_main_process():
            print(config.to_json(), end="")
        return 0

    from ..training import train

    result = train(config)
    if not is_main_process():
        return 0
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(result).items()}
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    emit(args, values, f"{result.step} steps{loss}: {result.model_dir}")
    return 0
