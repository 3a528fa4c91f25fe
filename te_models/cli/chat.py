"""`te-models generate --chat`: turns of standard input, answered with the chat template of the tokenizer."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..terminal import is_terminal
from ..tokenizer import ChatTokenizer, ends_of
from .codec import Codec
from .parser import emit

if TYPE_CHECKING:
    from .generate import Model


def run_chat(args: argparse.Namespace, codec: Codec, load: Callable[[], Model]) -> int:
    """Answer each line of standard input, with all turns before it; lines without text are passed over."""
    if codec.folder is None:
        raise ValueError("--chat needs a tokenizer folder with a chat template; the tokenizer 'bytes' has none")
    if sys.stdin is None:
        raise ValueError("--chat reads standard input, which is closed")
    template = ChatTokenizer(codec.folder, ends=ends_of(codec.folder, codec.tokenizer))
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    template.prompt([*messages, {"role": "user", "content": "a"}])  # refused before the weights are read
    model = load()
    ends = sorted({*model.ends, *(id for id in template.turn_ends() if id < model.gpt.config.vocab_size)})
    model = dataclasses.replace(model, ends=ends)
    while line := _next_turn():
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        text = model.text(show_ends=False)
        ids = template.prompt(messages)
        room = model.gpt.config.max_position_embeddings - len(ids)
        for (token,) in model.new_tokens([ids], most=min(args.max_new_tokens, max(1, room))):
            part = text.add(token)
            if not args.json:
                print(part, end="", flush=True)
            if text.finished:
                break
        if not args.json:
            print(text.rest(), flush=True)
        messages.append({"role": "assistant", "content": text.text})
    if args.json:
        emit(args, {"messages": messages}, "")
    return 0


def _next_turn() -> str:
    """Return the next line of standard input, "" at its end; a person at a terminal sees where to write it."""
    if is_terminal(sys.stdin) and is_terminal(sys.stderr):
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()
