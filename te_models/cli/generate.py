"""`te-models generate`: continue a prompt with a model folder."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ..extras import require
from .parser import Verbs, emit, verb

DESCRIPTION = """\
Continue a prompt with a model folder (ours or Hugging Face's), using a key-value cache.
The tokenizer is the one in the folder, or --tokenizer's. The same seed gives the same text."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "generate",
        run,
        "continue a prompt",
        DESCRIPTION,
        'te-models generate ./model --prompt "def main():" --max-new-tokens 40',
    )
    parser.add_argument("model", metavar="DIR", help="the model folder")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue; - reads standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=50, metavar="N", help="stop after N tokens (50)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the best token (0)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K best tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the best tokens of total probability P")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and compute")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--tokenizer", metavar="DIR", help="a folder with tokenizer.json, if DIR has none")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; allowed: 1 or more")
    folder = Path(args.tokenizer or args.model)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json; --tokenizer names a folder that has one")
    transformers = require("transformers", "hf", feature="generate")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = _prompt(args)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty")

    import torch

    from .. import GPTModel, generate

    model = GPTModel.from_pretrained(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    start = time.perf_counter()
    out = generate(
        model,
        ids.to(args.device),
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        eos_token_id=tokenizer.eos_token_id,
    )
    seconds = time.perf_counter() - start
    new = out[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(new)
    result = {"prompt": prompt, "text": text, "tokens": new, "tokens_per_second": len(new) / seconds}
    emit(args, result, prompt + text)
    return 0


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt_file is not None:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    return sys.stdin.read() if args.prompt == "-" else args.prompt
