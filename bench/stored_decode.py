"""Decoding with weights stored quantized, against the same model in bfloat16.

    python -m bench.stored_decode [--models NAME ...] [--formats NAME ...] [--rounds 7] [--print-only]

A llama, and a mixtral of eight experts, of which a token takes two, of hidden size 1024 and four layers with random
weights, batch 1, greedy, without `autocast`: weights in each recipe's format, and integers in groups of 32 or 128,
are multiplied as they are stored.
`dequantized`: the same where every token dequantizes the weights that it needs, as without a C++ compiler. Memory:
bytes of all parameters. One thread, CPU time, all sides in turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from bench.common import versions, write_result
from bench.generation import RECIPES, Side, Tokens, of_gpt, prompt, relative
from bench.recipes import named
from te_models import GPTModel
from te_models.kernels.backend import using_backend
from te_models.layers import GroupedLinear, LayerNormLinear, Linear, QuantizedTensor
from te_models.layers.quantizer import Int4Quantizer, Int8Quantizer, IntQuantizer

DECODED = 16


MODELS = ("llama", "mixtral")
INTEGERS = {
    "int4": Int4Quantizer(),
    "int4, groups of 128": Int4Quantizer(group_size=128, zero_points=True),
    "int8": Int8Quantizer(),
}


def _model(name: str, folder: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 1024}
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=2816)
    else:
        config = transformers.MixtralConfig(**sizes, intermediate_size=1408, num_local_experts=8)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _dequantizing(run: Side) -> Side:
    def without_library(new: int, tokens: Tokens) -> None:
        with using_backend("definition"):
            run(new, tokens)

    return without_library


def _store(model: GPTModel, form: IntQuantizer) -> None:
    """Store the weights of linear layers as integers."""
    for module in model.modules():
        if isinstance(module, (Linear, LayerNormLinear, GroupedLinear)):
            stored = form.quantize(module.weight.detach())
            module.weight = torch.nn.Parameter(stored, requires_grad=False)  # type: ignore[arg-type]


def _bytes(model: GPTModel) -> int:
    total = 0
    for parameter in model.parameters():
        fields = parameter.fields.values() if isinstance(parameter, QuantizedTensor) else (parameter,)
        total += sum(field.nbytes for field in fields)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--formats", nargs="+", choices=(*RECIPES, *INTEGERS), default=(*RECIPES, *INTEGERS))
    parser.add_argument("--name", default="stored_decode", help="of the result")
    parser.add_argument("--print-only", action="store_true", help="write no result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    before = os.getloadavg()
    found = {name: _measured(name, args.rounds, args.formats) for name in args.models}
    load = {"load_average_before": [round(x, 2) for x in before]}
    load["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
    results = {"versions": versions("torch", "transformers"), "rounds": args.rounds, "decoded": DECODED} | load | found
    print(results)
    if not args.print_only:
        print(f"written to {write_result(args.name, results)}")


def _measured(name: str, rounds: int, formats: Collection[str]) -> dict[str, Any]:
    ids = prompt(1, 32)
    with tempfile.TemporaryDirectory() as scratch:
        _model(name, Path(scratch))
        plain = GPTModel.from_pretrained(scratch, dtype=torch.bfloat16).eval()
        sides: dict[str, Side] = {"bf16": of_gpt(plain, ids)}
        memory = {"bf16": _bytes(plain)}
        for recipe in (r for r in RECIPES if r in formats):
            model = GPTModel.from_pretrained(scratch, dtype=torch.bfloat16, recipe=named(recipe)).eval()
            run = of_gpt(model, ids)
            sides |= {recipe: run, f"{recipe}, dequantized": _dequantizing(run)}
            memory[recipe] = _bytes(model)
        for name, form in ((n, f) for n, f in INTEGERS.items() if n in formats):
            model = GPTModel.from_pretrained(scratch, dtype=torch.bfloat16).eval()
            _store(model, form)
            run = of_gpt(model, ids)
            sides |= {name: run, f"{name}, dequantized": _dequantizing(run)}
            memory[name] = _bytes(model)
    of_bf16 = {recipe: round(size / memory["bf16"], 3) for recipe, size in memory.items()}
    return relative(sides, rounds, DECODED) | {"memory_of_bf16": of_bf16}


if __name__ == "__main__":
    main()
