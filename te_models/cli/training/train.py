"""`te-models train`: the options beside the TOML file are its keys, made of the configuration itself."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...signals import Interrupted, StopSignals
from ...sizes import plural
from ..parser import Verbs, emit, verb

if TYPE_CHECKING:
    from ...training.config.overrides import Override

Keys = Literal["none", "hidden", "shown"]
"""Whether the keys of the configuration are options of the parser, and stand in its help. They take 0.15 s to add."""

DESCRIPTION = """\
Train a model as CONFIG.toml says. Every key of the file is also an option, with dots for
tables and dashes for underscores: --optimizer.lr 1e-4, --data.sequence-length 512,
--no-compile. `te-models train --help-keys` lists them all, `--help-keys data` the keys of one table.
A run that was interrupted continues from its newest checkpoint when started again, or from
the one that --resume-from names. SIGTERM and Ctrl-C let the step that runs finish, save a
checkpoint and end with 143 or 130."""


def add(verbs: Verbs, *, keys: Keys) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "train",
        run,
        "train a model described by a TOML file",
        DESCRIPTION,
        "te-models train train.toml --steps 100 --precision.recipe mxfp8",
    )
    parser.usage = "te-models train CONFIG.toml [--KEY VALUE ...] [--dry-run] [--json] [--debug]\n"
    parser.usage += "       te-models train [CONFIG.toml] --help-keys [TABLE]"
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="the training configuration")
    parser.add_argument(
        "--help-keys",
        metavar="TABLE",
        nargs="?",
        const="",
        help="list the keys of the configuration, or of one table, and exit",
    )
    parser.add_argument("--dry-run", action="store_true", help="check the configuration, print it and stop")
    parser.add_argument("--no-verify", action="store_true", help="as --no-model.verify: do not check the weights")
    parser.set_defaults(usage_error=parser.error)
    if keys != "none":
        from ...training.config.overrides import add_key_options

        add_key_options(parser, shown=keys == "shown")


def run(args: argparse.Namespace) -> int:
    """Train, and print the last metrics. Of torchrun's processes only rank 0 prints."""
    if (args.help_keys or "").endswith(".toml") and args.config is None:  # --help-keys CONFIG.toml
        args.config, args.help_keys = args.help_keys, ""
    if args.help_keys is not None:
        return _help_keys(args)
    if args.config is None:
        return args.usage_error(_without_config(args.overrides))
    from ...training.config.file import read_config
    from ...training.config.overrides import Override

    if args.no_verify:
        args.overrides = [*args.overrides, Override("model.verify", "--no-verify", False, ("--no-verify",))]
    config = read_config(Path(args.config), args.overrides)
    if args.dry_run:
        if _is_main_process():
            print(config.to_json(), end="")
        return 0

    try:
        with StopSignals():  # now: importing torch takes seconds, and may swallow what a signal raises
            from ...training import train

            result = train(config)
    except Interrupted as stop:
        if not _is_main_process():
            return stop.exit_code
        saved = f"{stop}; continue with: {_continuing(args, config.resume)}" if str(stop) else ""
        raise Interrupted(stop.signum, saved) from None
    if not _is_main_process():
        return 0
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(result).items()}
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    emit(args, values, f"{plural(result.step, 'step')}{loss}: {result.model_dir}")
    return 0


def _is_main_process() -> bool:
    """Whether this process speaks for the run, torchrun's rank 0 or one that torchrun did not start: known without
    torch."""
    return int(os.environ.get("RANK", "0")) == 0


def _help_keys(args: argparse.Namespace) -> int:
    from ...config.keys import tables_of
    from ...training.config import TrainConfig
    from ...training.config.file import read_config
    from .keys import keys_json, keys_text, select_tables

    values = None if args.config is None else read_config(Path(args.config), args.overrides).to_dict()
    tables = select_tables(list(tables_of(TrainConfig)), args.help_keys, "--help-keys")
    emit(args, {"keys": keys_json(tables)}, keys_text(tables, values))
    return 0


def _without_config(overrides: Iterable[Override]) -> str:
    """Return the sentence for a command line without a file; it may be among the values of an option."""
    later = [word for override in overrides for word in override.words[1:] if word.endswith(".toml")]
    if later:
        return f"CONFIG.toml comes before keys that are lists: te-models train {later[0]} --KEY VALUE ..."
    return "train needs CONFIG.toml"


def _continuing(args: argparse.Namespace, resumes: bool) -> str:
    """Return the command that continues the run."""
    started_afresh = any(override.path == "resume" and override.value is False for override in args.overrides)
    words = ["train", args.config, *_without_start(args.overrides)]
    words += [] if resumes or started_afresh else ["--resume"]
    words += ["--json"] if args.json else []
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(["te-models", *words])
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    nodes = f"--nproc-per-node {os.environ['WORLD_SIZE']}" if alone else "..."
    return f"PYTHONSAFEPATH=1 torchrun {nodes} -m te_models {shlex.join(words)}"


def _without_start(overrides: Iterable[Override]) -> Iterator[str]:
    """Yield the options but those that say where to start: the newest checkpoint is where the run goes on."""
    for override in overrides:
        if override.path != "resume_from" and not (override.path == "resume" and override.value is False):
            yield from override.words
