"""Throughput of importing, exporting and quantizing a folder, against a plain copy of its bytes in the same run.

    python -m bench.import_throughput [--gib 1.5] [--rounds 4] [--dir FOLDER] [--print-only]

Both read the same files (from the page cache, after one warming read), write as many bytes to the same disk, and flush
them. The copy is `shutil.copyfile` and fsync; the import also plans, rearranges experts and q/k/v, and hashes each
byte; an export also compares what it reads with a manifest. Runs alternate (copy, import, import,
copy, ...); each result is the median of the ratios of neighbours, on the clock and in processor time. On a machine
whose cores are busy with other work only the latter says something. Targets on the clock: 0.9 of a copy's speed for
import and export, 0.5 for quantizing to block, current and nvfp4, 0.4 to mxfp8, 0.3 for requantizing.

Requantizing: the folder as DeepSeek stores it, E4M3 in 128x128 blocks with float32 scales, is imported as NVFP4 in both
copies, with the largest error of every weight. Its peer is a copy of the folder in bfloat16, as for quantizing, and its
processor time is given as a multiple of plain quantizing to NVFP4 (one copy), too (target: 3).


Scaling: some of them on one core and on two, in turn; the speed of two as a multiple of that of one (target: 1.6).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import ratio, versions, write_result
from te_models.checkpoints import FAMILIES, export_hf, import_hf, quantize, verify
from te_models.checkpoints.io import sha256
from te_models.checkpoints.mapping.plan import ConversionPlan, OutputTensor
from te_models.checkpoints.write.shards import header_bytes, split_shards
from te_models.layers import recipe

RECIPES = ("block", "current", "mxfp8", "nvfp4")

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
MOE: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 1792,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 16,
}


def make_folder(folder: Path, config: dict[str, Any], nbytes: int) -> int:
    """Write a folder of random weights with as many layers as fit in `nbytes`; return the bytes of its weights."""
    family = FAMILIES[config["model_type"]]

    def plan(layers: int) -> ConversionPlan:
        namespace = family.namespace(family.read_config(config | {"num_hidden_layers": layers}))
        return ConversionPlan(tuple(OutputTensor(n, "BF16", s.shape) for n, s in namespace.stored.items()))

    fixed, layer = plan(1).total_bytes, plan(2).total_bytes - plan(1).total_bytes
    layers = max(1, 1 + (nbytes - fixed) // layer)
    folder.mkdir()
    # normal numbers: of random bytes every 256th is a NaN or an infinity, which no weight is
    values = torch.randn(8 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    block = values.view(torch.uint8).numpy().tobytes()
    for shard in split_shards(plan(layers), 600_000_000):
        with (folder / shard.file).open("wb") as file:
            file.write(header_bytes(shard))
            left = sum(output.nbytes for output in shard.outputs)
            while left:
                left -= file.write(block[: min(left, len(block))])
    shards = split_shards(plan(layers), 600_000_000)
    if len(shards) > 1:
        weight_map = {output.name: shard.file for shard in shards for output in shard.outputs}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return plan(layers).total_bytes


def copy_folder(source: Path, destination: Path) -> None:
    """Copy all files and flush them: what a plain copy that survives a power cut costs."""
    destination.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, destination / path.name)
        fd = os.open(destination / path.name, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)


def timed(function: Any, source: Path, destination: Path) -> tuple[float, float]:
    """Return (seconds on the clock, processor seconds)."""
    os.sync()
    start, processor = time.perf_counter(), time.process_time()
    function(source, destination)
    seconds = time.perf_counter() - start, time.process_time() - processor
    shutil.rmtree(destination)
    return seconds


def measure(source: Path, scratch: Path, rounds: int, function: Any) -> dict[str, Any]:
    """Time `function` and the plain copy of `source` in turn."""
    timed(function, source, scratch / "out")  # torch loads its formulas for shapes once, which takes a second
    timed(copy_folder, source, scratch / "out")
    pairs = []
    for number in range(rounds):
        order = (copy_folder, function) if number % 2 == 0 else (function, copy_folder)
        times = {f: timed(f, source, scratch / "out") for f in order}
        pairs.append(times)
    wall, processor = ([{side: times[side][k] for side in times} for times in pairs] for k in (0, 1))
    return {
        "seconds": {"copy": _column(wall, copy_folder), "ours": _column(wall, function)},
        "processor_seconds": {"copy": _column(processor, copy_folder), "ours": _column(processor, function)},
        "speed_of_a_copy": ratio(_column(wall, copy_folder), _column(wall, function)),
        "processor_time_of_a_copy": ratio(_column(processor, copy_folder), _column(processor, function)),
    }


def scaling(source: Path, scratch: Path, rounds: int, function: Any) -> dict[str, Any]:
    """Time `function` on one core and on two in turn."""
    allowed = sorted(os.sched_getaffinity(0))
    times: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    try:
        for number in range(rounds):
            for count in (1, 2) if number % 2 == 0 else (2, 1):
                os.sched_setaffinity(0, allowed[:count])
                times[count].append(timed(function, source, scratch / "out"))
    finally:
        os.sched_setaffinity(0, allowed)
    one, two = ([round(seconds, 2) for seconds, _ in times[count]] for count in (1, 2))
    processor = {str(count): [round(seconds, 2) for _, seconds in times[count]] for count in (1, 2)}
    return {"seconds": {"1": one, "2": two}, "processor_seconds": processor, "speed_of_two_cores": ratio(one, two)}


def requantizing(source: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Time importing `source` in 128x128 blocks as NVFP4, against the plain copy of `source`."""
    quantize(source, scratch / "blocks", recipe("block", use_f32_scales=True))
    export_hf(scratch / "blocks", scratch / "fp8", format="fp8")
    shutil.rmtree(scratch / "blocks")

    def requantize(_: Path, destination: Path) -> None:
        import_hf(scratch / "fp8", destination, storage="nvfp4", allow_requantize=True)

    result = measure(source, scratch, rounds, requantize)
    shutil.rmtree(scratch / "fp8")
    return result


def _column(rows: list[dict[Any, float]], side: Any) -> list[float]:
    return [round(row[side], 2) for row in rows]


def sha256_speed(function: Callable[[memoryview], object]) -> float:
    """Return GB/s of SHA-256 on one thread, of a buffer that is in the cache."""
    data, start = memoryview(bytearray(1 << 20)), time.process_time()
    for _ in range(64):
        function(data)
    return round(64 * len(data) / (time.process_time() - start) / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.5, help="size of each checkpoint")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dir", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--print-only", action="store_true", help="write no result")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "versions": versions("torch", "safetensors"),
        "load_average_before": [round(x, 2) for x in os.getloadavg()],
        "sha256_gb_per_s": {
            "hashlib": sha256_speed(lambda data: hashlib.sha256(data).digest()),
            "4 parts": sha256_speed(lambda data: sha256.digests_of_each(data, len(data) // 4)),
        },
        "cases": {},
    }
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        scratch = Path(folder)
        for label, config in (("dense", DENSE), ("moe", MOE)):
            source = scratch / label
            nbytes = make_folder(source, config, math.floor(args.gib * 2**30))
            import_hf(source, scratch / "ours")
            report = verify(source, scratch / "ours")
            if not report.equal:
                raise SystemExit(f"the import is wrong, so its speed does not matter: {report}")
            case = {"bytes": nbytes, "import": measure(source, scratch, args.rounds, import_hf)}
            case["export"] = measure(scratch / "ours", scratch, args.rounds, export_hf)
            shutil.rmtree(scratch / "ours")
            for name in RECIPES:
                function = functools.partial(quantize, recipe=name)
                case[f"quantize {name}"] = measure(source, scratch, args.rounds, function)
            case["requantize"] = requantizing(source, scratch, args.rounds)
            times = [statistics.median(case[v]["processor_seconds"]["ours"]) for v in ("requantize", "quantize nvfp4")]
            case["requantize"]["processor_time_of_quantizing"] = round(times[0] / times[1], 2)
            results["cases"][label] = case
            for verb in [key for key in case if key != "bytes"]:
                found, processor = case[verb]["speed_of_a_copy"], case[verb]["processor_time_of_a_copy"]["median"]
                spread = f"{found['min']:.2f} to {found['max']:.2f}; {processor:.2f}x in processor time"
                print(f"{label} {verb}: {found['median']:.2f}x of a copy ({spread})")
            several = {"import": import_hf, "quantize mxfp8": functools.partial(quantize, recipe="mxfp8")}
            case["scaling"] = {verb: scaling(source, scratch, args.rounds, f) for verb, f in several.items()}
            for verb, scaled in case["scaling"].items():
                print(f"{label} {verb}: {scaled['speed_of_two_cores']['median']:.2f}x on two cores of the speed on one")
            print(f"{label} requantize: {times[0] / times[1]:.1f} times the processor time of quantizing to NVFP4")
            shutil.rmtree(source)
    results["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
    if not args.print_only:
        print(f"written to {write_result('import_throughput', results)}")


if __name__ == "__main__":
    main()
