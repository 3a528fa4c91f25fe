"""`te-models generate`: continue a prompt with a model folder."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ..terminal import say_while_waiting
from ..tokenizer import FILE, Tokenizer, end_token, read_tokenizer
from .parser import Verbs, emit, integer, number, read_text, verb

DESCRIPTION = """\
Continue a prompt with a model folder (ours or Hugging Face's), using a key-value cache.
The tokenizer is the one in the folder, or --tokenizer's; a token that it puts before every text
is put there. Ends where the model, or the tokenizer, says that a text ends. The same seed gives
the same text."""


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
    parser.add_argument("--max-new-tokens", type=integer, default=50, metavar="N", help="stop after N tokens (50)")
    parser.add_argument("--temperature", type=number, default=0.0, metavar="T", help="0 takes the best token (0)")
    parser.add_argument("--top-k", type=integer, metavar="K", help="sample among the K best tokens")
    parser.add_argument("--top-p", type=number, metavar="P", help="sample among the best tokens of total probability P")
    parser.add_argument("--seed", type=integer, default=0, help="seed of the sampling (0)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and compute")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument(
        "--dequantize", action="store_true", help="compute with the values of quantized weights, faster"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not check the weights against manifest.json")
    parser.add_argument("--tokenizer", metavar="DIR", help="a folder with tokenizer.json, if DIR has none")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; allowed: 1 or more")
    for option in ("top_k", "top_p"):
        if getattr(args, option) is not None and args.temperature == 0:
            raise ValueError(f"--{option.replace('_', '-')} needs --temperature above 0: at 0 the best token is taken")
    from te_models.checkpoints.io.hub import local_folder

    _check_device(args.device)
    say_while_waiting(f"loading {args.model}")
    folder = local_folder(args.model)
    tokenizer, eos = _tokenizer(local_folder(args.tokenizer) if args.tokenizer else folder)
    ends = sorted({*_ends(folder), *(() if eos is None else (eos,))})
    prompt = _prompt(args)
    prompt_ids = _prompt_ids(tokenizer, prompt)

    import torch

    from .. import GPTModel, stream

    dtype = getattr(torch, args.dtype)
    how = {"device": args.device, "dequantize": args.dequantize, "verify": not args.no_verify}
    model = GPTModel.from_pretrained(folder, dtype=dtype, **how)
    if max(prompt_ids) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives the prompt the token {max(prompt_ids)}, and the model has {model.config.vocab_size}: "
            "it is another model's"
        )
    room = model.config.max_position_embeddings - len(prompt_ids)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt_ids)} tokens; allowed: fewer than the model's "
            f"{model.config.max_position_embeddings} positions"
        )
    if args.max_new_tokens > room:
        raise ValueError(
            f"--max-new-tokens is {args.max_new_tokens}; allowed: 1..{room}, the positions after the prompt"
        )
    steps = stream(
        model,
        torch.tensor([prompt_ids], device=args.device),
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        eos_token_id=ends,
    )
    start, new, text = time.perf_counter(), [], ""
    if not args.json:
        print(prompt, end="", flush=True)
    for token in steps:
        new.append(int(token))
        grown = tokenizer.decode(new)
        # A character of several bytes can be cut by the end of a token: it is shown when it is complete.
        if not args.json and not grown.endswith("\N{REPLACEMENT CHARACTER}"):
            print(grown[len(text) :], end="", flush=True)
            text = grown
    speed = len(new) / (time.perf_counter() - start)
    if args.json:
        emit(
            args,
            {
                "prompt": prompt,
                "text": tokenizer.decode(new),
                "tokens": new,
                "tokens_per_second": speed,
            },
            "",
        )
    else:
        print(tokenizer.decode(new)[len(text) :])
    return 0


def _check_device(name: str) -> None:
    import torch

    gpus = torch.cuda.device_count()
    allowed = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    allowed += ["mps"] if torch.backends.mps.is_available() else []
    if name not in allowed:
        raise ValueError(f"--device is {name!r}; allowed here: {', '.join(allowed)}")


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt_file is not None:
        return read_text(args.prompt_file)
    if args.prompt != "-":
        prompt = args.prompt
    elif sys.stdin is None:
        raise ValueError("--prompt - reads standard input, which is closed")
    else:
        prompt = sys.stdin.read()
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError("the prompt is not UTF-8 text") from None
    return prompt


def _prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens to continue: as transformers, with those that the tokenizer puts before every text, but without those
    that it puts behind it. A prompt that has the first ones written out gets no second ones."""
    prompt_tokens = tokenizer.encode(prompt, add_special_tokens=False)
    if not prompt_tokens:
        raise ValueError("the prompt is empty")
    whole = tokenizer.encode(prompt)
    before = next((i for i in range(len(whole)) if whole[i : i + len(prompt_tokens)] == prompt_tokens), 0)
    return prompt_tokens if prompt_tokens[:before] == whole[:before] else whole[:before] + prompt_tokens


def _tokenizer(folder: Path) -> tuple[Tokenizer, int | None]:
    """The tokenizer in `folder` and the id of the token that ends a text, if it names one."""
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} has no {FILE}; --tokenizer names a folder that has one")
    tokenizer, eos = read_tokenizer(folder, "generate"), end_token(folder)
    return tokenizer, None if eos is None else tokenizer.token_to_id(eos)


def _ends(folder: Path) -> list[int]:
    """The ids of the tokens at which the model itself says that generation ends, such as the end of a turn."""
    from te_models.checkpoints.io.strict_json import read_object
    from te_models.checkpoints.io.weight_files import plain_file

    name = "generation_config.json"
    if not (folder / name).is_file():
        return []
    ends = read_object(plain_file(folder, name)).get("eos_token_id")
    return [i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int]
