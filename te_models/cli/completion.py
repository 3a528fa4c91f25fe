"""`te-models completion`: the script that completes verbs, options and folders with the Tab key, made by shtab."""

import argparse
from typing import Any

from ..extras import require
from .parser import Verbs, emit, verb

DESCRIPTION = """\
Print the script that completes verbs, options, keys of the training configuration, their values
and folders with the Tab key. Needs the extra `completion`.

bash: te-models completion bash > ~/.local/share/bash-completion/completions/te-models
zsh:  te-models completion zsh > "${fpath[1]}/_te-models"
fish: te-models completion fish > ~/.config/fish/completions/te-models.fish"""

SHELLS = ("bash", "zsh", "fish")
FOLDERS = {"DIR", "HF_DIR", "HF_OUT", "IN", "OUT", "A", "B"}
FILES = {"FILE", "CONFIG.toml"}


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "completion",
        run,
        "script for completion with the Tab key",
        DESCRIPTION,
        "te-models completion bash",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell to write for")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    shtab = require("shtab", "completion", feature="the completion script")
    from .main import build_parser, verbs_of

    parser = build_parser("shown")
    verbs = verbs_of(parser)
    verbs.help = "what to do"  # shtab leaves out what has no help, and ours is in the description
    for sub in verbs.choices.values():
        for action in sub._actions:
            places: dict[Any, Any] = dict.fromkeys(FOLDERS, shtab.DIRECTORY) | dict.fromkeys(FILES, shtab.FILE)
            if action.metavar in places:
                action.complete = places[action.metavar]
    script = shtab.complete(parser, shell=args.shell)
    emit(args, {"shell": args.shell, "script": script}, script.rstrip("\n"))
    return 0
