"""`te-models generate`: continue prompts with a model folder, one, many, or the turns of a chat."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sizes import plural
from ..terminal import is_terminal, say, say_while_waiting
from ..tokenizer import ends_of
from .adapters import adapter_folder, check_is_model, load_model
from .codec import Codec, check_device, open_codec
from .parser import Verbs, dtype, emit, integer, needs, number, read_text, verb

if TYPE_CHECKING:
    from ..generation import Draft, TextStream
    from ..model import GPTModel

DESCRIPTION = """\
Continue a prompt with a model folder (ours or Hugging Face's), using a key-value cache.
The tokenizer is the one in the folder, or --tokenizer's; a token that it puts before every text
is put there. Ends where the model, or the tokenizer, says that a text ends, or at --stop. The same
seed gives the same text. --prompts continues many prompts in batches: the lines of a file, or the
field "prompt" of a .jsonl file. --chat reads turns from standard input, one a line, and answers
each with the chat template of the tokenizer, until the input ends."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "generate",
        run,
        "continue a prompt, many prompts, or a chat",
        DESCRIPTION,
        'te-models generate ./model --prompt "def main():" --max-new-tokens 40',
    )
    parser.add_argument("model", metavar="DIR", help="the model folder")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue; - reads standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with the text to continue")
    prompt.add_argument("--prompts", metavar="FILE", help="a file of prompts: lines of text, or .jsonl")
    prompt.add_argument("--chat", action="store_true", help="answer the lines of standard input in turn")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument("--output", metavar="FILE.jsonl", help="with --prompts: where texts go (standard output)")
    parser.add_argument("--batch-size", type=integer, metavar="N", help="with --prompts: prompts at a time (8)")
    parser.add_argument("--max-new-tokens", type=integer, default=50, metavar="N", help="stop after N tokens (50)")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text (repeatable)")
    parser.add_argument("--temperature", type=number, default=0.0, metavar="T", help="0 takes the best token (0)")
    parser.add_argument("--top-k", type=integer, metavar="K", help="sample among the K best tokens")
    parser.add_argument("--top-p", type=number, metavar="P", help="sample among the best tokens of total probability P")
    parser.add_argument("--seed", type=integer, default=0, help="seed of the sampling (0)")
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA or DoRA adapter to put over the model")
    parser.add_argument("--compile", action="store_true", help="compile decoding: slow at first, then faster")
    parser.add_argument("--draft-model", metavar="DIR", help="a smaller model that proposes tokens")
    parser.add_argument("--draft-mtp", action="store_true", help="the model's layers of further tokens propose them")
    parser.add_argument("--num-draft-tokens", type=integer, default=4, metavar="N", help="it proposes at a time (4)")
    parser.add_argument(
        "--dtype", type=dtype, choices=("bfloat16", "float32"), default="bfloat16", help="weights and compute"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument(
        "--dequantize", action="store_true", help="compute with the values of quantized weights, faster"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not check the weights against manifest.json")
    parser.add_argument("--tokenizer", metavar="DIR", help='folder with tokenizer.json, or "bytes", if DIR has none')


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, write the continuations of many, or answer turns."""
    _check_options(args)
    from te_models.checkpoints.io.hub import local_folder

    folder = local_folder(args.model)
    check_is_model(folder, args.model)
    args.adapter = adapter_folder(args.adapter)
    with ThreadPoolExecutor(1) as beside:  # another process reads the tokenizer while this one imports torch
        opened = beside.submit(open_codec, folder, args.tokenizer, "generate")
        check_device(args.device)
        say_while_waiting(f"loading {args.model}")
        codec = opened.result()
    if args.chat:
        from .chat import run_chat

        return run_chat(args, codec, lambda: Model.load(args, folder, codec))
    if args.prompts is not None:
        prompts = read_prompts(Path(args.prompts))
        ids = [codec.prompt_ids(prompt) for prompt in prompts]
        return _many(args, Model.load(args, folder, codec), prompts, ids)
    prompt = _prompt(args)
    prompt_ids = codec.prompt_ids(prompt)
    return _one(args, Model.load(args, folder, codec), prompt, prompt_ids)


def _check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options out of range, and for those that nothing would read."""
    for name in ("max_new_tokens", "num_draft_tokens", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; allowed: 1 or more")
    if args.temperature == 0:
        needs(args, ("top_k", "top_p", "seed"), "--temperature above 0: at 0 the best token is taken")
    if not args.chat:
        needs(args, ("system",), "--chat")
    if args.prompts is None:
        needs(args, ("output", "batch_size"), "--prompts")
    if args.draft_model is None and not args.draft_mtp:
        needs(args, ("num_draft_tokens",), "--draft-model or --draft-mtp")
    asked = {"--compile": args.compile, "--draft-model": args.draft_model is not None, "--draft-mtp": args.draft_mtp}
    first, *others = [option for option, there in asked.items() if there] or [""]
    if others:
        raise ValueError(f"{first} and {others[0]} are both given; allowed: one of them")
    if first.startswith("--draft") and (args.batch_size or 1) > 1:
        raise ValueError(f"--batch-size is {args.batch_size}; allowed with {first}: 1")
    if "" in args.stop:
        raise ValueError("--stop is empty; allowed: text")


@dataclass(frozen=True)
class Model:
    """A loaded model with what it decodes with. ends: the tokens that end a text."""

    args: argparse.Namespace
    gpt: GPTModel
    draft: GPTModel | Draft | None
    codec: Codec
    ends: list[int]

    @classmethod
    def load(cls, args: argparse.Namespace, folder: Path, codec: Codec) -> Model:
        """Read the model, and the draft model where there is one."""
        import torch

        from te_models.checkpoints.io.hub import local_folder

        from .. import GPTModel, MTPDraft

        how: Any = {"device": args.device, "dequantize": args.dequantize, "verify": not args.no_verify}
        how["dtype"] = getattr(torch, args.dtype)
        gpt = load_model(folder, args.adapter, **how, mtp=args.draft_mtp)
        draft: GPTModel | Draft | None = MTPDraft() if args.draft_mtp else None
        if args.draft_model is not None:
            draft = GPTModel.from_pretrained(local_folder(args.draft_model), **how)
        ends = ends_of(folder, codec.tokenizer)
        if codec.tokenizer is None and codec.eos is not None:
            ends.append(codec.eos)
        return cls(args, gpt, draft, codec, [id for id in ends if id < gpt.config.vocab_size])

    def text(self, *, show_ends: bool = True) -> TextStream:
        """Return a text that tokens are added to."""
        from ..generation.text import TextStream

        return TextStream(self.codec.decode, stop=self.args.stop, ends=self.ends, show_ends=show_ends)

    def new_tokens(self, prompts: list[list[int]], *, most: int | None = None) -> Iterator[list[int]]:
        """Yield the next token of each prompt, after checking that all have room. most: None is --max-new-tokens."""
        import torch

        from .. import stream

        config = self.gpt.config
        count: int = self.args.max_new_tokens if most is None else most
        largest = max(max(ids) for ids in prompts)
        if largest >= config.vocab_size:
            raise ValueError(
                f"the tokenizer gives the prompt the token {largest}, and the model has {config.vocab_size}: "
                "it is another model's"
            )
        longest = max(map(len, prompts))
        room = config.max_position_embeddings - longest
        if room < 1:
            raise ValueError(
                f"the prompt has {plural(longest, 'token')}; allowed: fewer than the model's "
                f"{config.max_position_embeddings} positions"
            )
        if count > room:
            raise ValueError(f"--max-new-tokens is {count}; allowed: 1..{room}, the positions after the prompt")
        rows = [[0] * (longest - len(ids)) + ids for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        steps = stream(
            self.gpt,
            torch.tensor(rows, device=self.args.device),
            count,
            attention_mask=torch.tensor(mask, device=self.args.device),
            temperature=self.args.temperature,
            top_k=self.args.top_k,
            top_p=self.args.top_p,
            seed=self.args.seed,
            eos_token_id=self.ends,
            compile=self.args.compile,
            draft_model=self.draft,
            num_draft_tokens=self.args.num_draft_tokens,
        )
        return (token.tolist() for token in steps)


def _one(args: argparse.Namespace, model: Model, prompt: str, prompt_ids: list[int]) -> int:
    show: Callable[[str], None] = (lambda part: None) if args.json else (lambda part: print(part, end="", flush=True))
    steps, text = model.new_tokens([prompt_ids]), model.text()
    show(prompt)
    begun = time.perf_counter()
    for (token,) in steps:
        show(text.add(token))
        if text.finished:
            break
    speed = len(text.tokens) / (time.perf_counter() - begun)
    if args.json:
        result = {"prompt": prompt, "text": text.text, "tokens": text.tokens, "tokens_per_second": speed}
        emit(args, result, "")
    else:
        print(text.rest())
    return 0


def _many(args: argparse.Namespace, model: Model, prompts: list[str], ids: list[list[int]]) -> int:
    """Continue prompts in batches, and write a line of JSON for each, in their order."""
    size = args.batch_size or (8 if model.draft is None else 1)
    lines, begun = [], time.perf_counter()
    for begin in range(0, len(prompts), size):
        texts = [model.text(show_ends=False) for _ in ids[begin : begin + size]]
        for tokens in model.new_tokens(ids[begin : begin + size]):
            for text, token in zip(texts, tokens, strict=True):
                if not text.finished:
                    text.add(token)
            if all(text.finished for text in texts):
                break
        for prompt, text in zip(prompts[begin : begin + size], texts, strict=True):
            finish = "stop" if text.finished else "length"
            lines.append({"prompt": prompt, "text": text.text, "tokens": text.tokens, "finish": finish})
        if is_terminal(sys.stderr):
            say(f"{len(lines)} of {plural(len(prompts), 'prompt')}")
    text_of_lines = "".join(json.dumps(line) + "\n" for line in lines)
    if args.output is None:
        print(text_of_lines, end="")
        return 0
    from te_models.checkpoints.io.atomic import replace_text

    replace_text(Path(args.output), text_of_lines)
    count = sum(len(line["tokens"]) for line in lines)
    speed = count / (time.perf_counter() - begun)
    result = {"output": args.output, "prompts": len(lines), "tokens": count, "tokens_per_second": speed}
    emit(args, result, f"{args.output}: {plural(len(lines), 'text')}, {plural(count, 'token')}, {speed:,.1f} tokens/s")
    return 0


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a file: each line, or of .jsonl the text in the field "prompt" of each line's object.

    Raises ValueError for a line that has none."""
    text, found = read_text(str(file)).removeprefix("\ufeff"), []
    for number_of_line, line in enumerate(text.split("\n"), 1):  # other line ends may be in the text of JSON
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        where = f"{file}, line {number_of_line}"
        prompt: Any = line
        if file.suffix in (".jsonl", ".ndjson"):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f'{where} has no prompt; allowed: text, or in .jsonl an object with a text "prompt"')
        found.append(prompt)
    if not found:
        raise ValueError(f"{file} has no line; allowed: a prompt on each")
    return found


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
