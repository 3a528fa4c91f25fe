"""`te-models init`: a first training configuration for a model and this machine."""

import argparse
from pathlib import Path

from ...sizes import format_size
from ...terminal import say_while_waiting
from ..info import RECIPES
from ..parser import Verbs, emit, verb

DESCRIPTION = """\
Write a training configuration for a model that fits this machine: the length of a window, the
micro-batch, activation checkpointing, the moments' dtype, the recipe and what is compiled are
decided by the memory and the kind of the device, and a comment behind each says why. The file is
planned and checked as `te-models train` checks it before it is written. Of MODEL only the
configuration is read: a folder, a hub id, ORGANISATION/NAME, or a name that `te-models models`
lists."""
TASKS = ("pretrain", "sft", "lora", "qlora", "dpo")


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "init",
        run,
        "a first training configuration that fits this machine",
        DESCRIPTION,
        "te-models init --model ./smollm2 --task lora --data corpus --output lora.toml",
    )
    parser.add_argument(
        "--model", metavar="MODEL", required=True, help="a model folder, a hub id, or a name in the catalogue"
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        required=True,
        metavar="TASK",
        help="pretrain: random weights; sft: all weights on chats; lora: adapters; qlora: adapters over weights stored "
        "quantized; dpo: adapters on preference pairs",
    )
    parser.add_argument(
        "--recipe",
        choices=("auto", "none", *(name for name, what in RECIPES.items() if "Python only" not in what)),
        default="auto",
        metavar="NAME",
        help="recipe of the GEMMs; auto: bf16 on a CPU, MXFP8 from compute capability 10.0 on, FP8 with a scale per "
        "tensor on 8.9 and 9.0",
    )
    parser.add_argument(
        "--data", metavar="INPUT", nargs="+", default=[], help="text as `tokenize` takes it, or a token data set"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help='folder with a tokenizer.json, or "bytes" (MODEL)')
    parser.add_argument("--output", metavar="FILE", help="the file to write (TASK.toml)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> int:
    """Write the configuration, and say what it takes."""
    output = Path(args.output or f"{args.task}.toml")
    say_while_waiting("planning what fits into this machine's memory; this takes some ten seconds")
    from ...init import Machine, write_config

    machine = Machine.here()
    config, sizes = write_config(
        output,
        args.model,
        args.task,
        recipe=args.recipe,
        data=args.data,
        tokenizer=args.tokenizer,
        machine=machine,
        force=args.force,
    )
    result = {
        "output": str(output),
        "planned_memory": round(sizes.memory),
        "memory": machine.memory,
        "config": config.to_dict(),
    }
    of = f"{format_size(sizes.memory)} planned of {format_size(machine.memory)} on {machine.name}"
    emit(args, result, f"{output}: {of}; train it: te-models train {output}")
    return 0
