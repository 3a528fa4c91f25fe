"""`te-models train`: the options beside the TOML file are its keys, typed by the configuration itself."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..signals import Interrupted, StopSignals
from .parser import Verbs, emit, verb

DESCRIPTION = """\
Train a model as CONFIG.toml says. Every key of the file is also an option, with dots for
tables and dashes for underscores: --optimizer.lr 1e-4, --data.sequence-length 512,
--no-compile. `te-models train CONFIG.toml --help-keys` lists them all with their values.
A run that was interrupted continues from its newest checkpoint when started again, or from
the one that --resume-from names. SIGTERM and Ctrl-C let the step that runs finish, save a
checkpoint and end with 143 or 130."""


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
    from ..training.ranks.data_parallel import is_main_process

    later = [word for word in args.overrides if word.endswith(".toml")]
    if later and not Path(args.config).exists():  # the value of an option that came first was taken for the file
        raise ValueError(f"CONFIG.toml comes before its keys: te-models train {later[0]} --KEY VALUE")
    overrides = ["--help"] if args.help_keys else args.overrides
    config = load_config(args.config, overrides)
    if args.dry_run:
        if is_main_process():
            print(config.to_json(), end="")
        return 0

    try:
        with StopSignals():  # now: importing torch takes seconds, and may swallow what a signal raises
            from ..training import train

            result = train(config)
    except Interrupted as stop:
        if not is_main_process():
            return stop.exit_code
        saved = f"{stop}; continue with: {_continuing(args, config.resume)}" if str(stop) else ""
        raise Interrupted(stop.signum, saved) from None
    if not is_main_process():
        return 0
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(result).items()}
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    emit(args, values, f"{result.step} steps{loss}: {result.model_dir}")
    return 0


def _continuing(args: argparse.Namespace, resumes: bool) -> str:
    """Return the command that continues the run."""
    words = ["train", args.config, *_without_start(args.overrides)]
    words += [] if resumes or "--no-resume" in args.overrides else ["--resume"]
    words += ["--json"] if args.json else []
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(["te-models", *words])
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    nodes = f"--nproc-per-node {os.environ['WORLD_SIZE']}" if alone else "..."
    return f"torchrun {nodes} -m te_models {shlex.join(words)}"


def _without_start(overrides: Sequence[str]) -> Iterator[str]:
    """Yield the options but those that say where to start: the newest checkpoint is where the run goes on."""
    words = iter(overrides)
    for word in words:
        if word == "--resume-from":
            next(words, None)
        elif word != "--no-resume" and not word.startswith("--resume-from="):
            yield word
