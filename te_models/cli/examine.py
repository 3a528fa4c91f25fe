"""The verbs that read model folders and change nothing: inspect, verify."""

from __future__ import annotations

import argparse

from .parser import Verbs, verb


def add(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = verb(
        verbs,
        "inspect",
        run_inspect,
        "what a model folder holds",
        "Show the kind, family, configuration, parameter count and number formats of a model folder.\n"
        "Reads headers only, so it is instant for any size.",
        "te-models inspect ./moe",
    )
    parser.add_argument("folder", metavar="DIR", help="a te_models or Hugging Face folder")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")

    parser = verb(
        verbs,
        "verify",
        run_verify,
        "whether two folders hold the same model",
        "Compare two model folders bit for bit, whatever their kind and layout. Exit code 0 if they\n"
        "hold the same model, 1 if not.",
        "te-models verify ./SmolLM2-135M ./smollm2",
    )
    parser.add_argument("a", metavar="A", help="a model folder")
    parser.add_argument("b", metavar="B", help="a model folder")


def run_inspect(args: argparse.Namespace) -> int:
    raise NotImplementedError


def run_verify(args: argparse.Namespace) -> int:
    raise NotImplementedError
