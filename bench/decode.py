"""Where the time of a decoded token goes: SmolLM2-135M in bfloat16, batch 1, one thread, beside transformers.

    python -m bench.decode [--tokens 16] [--rounds 5] [--print-only]
    python -m bench.limited decode

Processor time. `products` are the model's own weights multiplied by one row each, in the order of a step, the output
layer's apart: what reading the weights takes. `rest` is what a step takes beside them: norms, rotations, attention, and
the Python between operations. Steps of both libraries and products take turns. On two cores it takes a minute.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from typing import Any

import torch

from bench.common import Samples, ratio, versions, write_result
from bench.generation import Side, Tokens, of_gpt, of_transformers, prompt
from te_models import GPTModel
from te_models.kernels.gemm import gemv
from te_models.quickstart.smollm import smollm_folder

LENGTH = 32


def products(weights: list[torch.Tensor]) -> float:
    """Multiply each weight by a row; return the seconds of processor time."""
    rows = {w.shape[1]: torch.ones(1, w.shape[1], dtype=w.dtype) for w in weights}
    begun = time.process_time()
    with torch.no_grad():
        for weight in weights:
            gemv.gemv_linear(rows[weight.shape[1]], weight, None)
    return time.process_time() - begun


def measure(sides: dict[str, Side], layers: list[torch.Tensor], output: torch.Tensor, rounds: int, new: int) -> Any:
    steps = {name: Samples() for name in sides}
    found: dict[str, list[float]] = {"layers": [], "output_layer": []}
    for run in sides.values():
        run(4, Tokens())
    for _ in range(rounds):
        for name, run in sides.items():
            tokens = Tokens()
            run(1 + new, tokens)
            times = [cpu for cpu, _ in tokens.times[1:]]
            steps[name].cpu += [after - before for before, after in itertools.pairwise(times)]
        found["layers"].append(products(layers))
        found["output_layer"].append(products([output]))
    ms = {name: 1e3 * statistics.median(samples.cpu) for name, samples in steps.items()}
    parts = {name: 1e3 * statistics.median(values) for name, values in found.items()}
    parts["rest"] = ms["te_models"] - parts["layers"] - parts["output_layer"]
    return {
        "ms_of_token": {name: round(value, 2) for name, value in ms.items()},
        "speed_of_transformers": ratio(steps["transformers"].cpu, steps["te_models"].cpu),
        "ms_of_parts": {name: round(value, 2) for name, value in parts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--print-only", action="store_true", help="write no result")
    args = parser.parse_args()
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, ids = smollm_folder(), prompt(1, LENGTH)
    model = GPTModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    sides = {"transformers": of_transformers(theirs, ids), "te_models": of_gpt(model, ids)}
    layers = [p for p in model.decoder.parameters() if p.dim() == 2]
    output = model.embedding.word_embeddings.weight
    load = [round(x, 2) for x in os.getloadavg()]
    results = {"versions": versions("torch", "transformers"), "load_average_before": load}
    results |= {"tokens": args.tokens, "rounds": args.rounds}
    results |= measure(sides, layers, output, args.rounds, args.tokens)
    print(results)
    if not args.print_only:
        print(f"written to {write_result('decode', results)}")


if __name__ == "__main__":
    main()
