"""Throughput of importing a Hugging Face folder, against a plain copy of the same bytes in the same run.

    python bench/import_throughput.py [--gib 1.5] [--rounds 4] [--dir FOLDER]

Both read the same files (from the page cache, after one warming read), write as many bytes to the same disk, and flush
them. The copy is `shutil.copyfile` and fsync; the import also plans, rearranges experts and q/k/v, and hashes all bytes.
Runs alternate (copy, import, import, copy, ...); each result is the median of the ratios of neighbours. The import
hashes on a second core: on a machine whose cores are busy with other work it is slower than the copy by the hash's
share of the processor time, which is therefore recorded too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors
import torch

from te_models.checkpoints import FAMILIES, export_hf, import_hf, verify
from te_models.checkpoints.plan import Output, Plan
from te_models.checkpoints.writer import header_bytes, split_shards

RESULTS = Path(__file__).parent / "results" / "import_throughput.json"
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

    def plan(layers: int) -> Plan:
        namespace = family.namespace(family.read_config(config | {"num_hidden_layers": layers}))
        return Plan(tuple(Output(n, "BF16", s.shape) for n, s in namespace.stored.items()))

    fixed, layer = plan(1).total_bytes, plan(2).total_bytes - plan(1).total_bytes
    layers = max(1, 1 + (nbytes - fixed) // layer)
    folder.mkdir()
    block = os.urandom(16 << 20)
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
    """Time `function` and the plain copy in turn."""
    timed(copy_folder, source, scratch / "out")
    pairs = []
    for number in range(rounds):
        order = (copy_folder, function) if number % 2 == 0 else (function, copy_folder)
        times = {f: timed(f, source, scratch / "out") for f in order}
        pairs.append((times[copy_folder], times[function]))
    ratios = sorted(copy[0] / ours[0] for copy, ours in pairs)
    return {
        "copy_seconds": [round(copy[0], 2) for copy, _ in pairs],
        "seconds": [round(ours[0], 2) for _, ours in pairs],
        "copy_processor_seconds": [round(copy[1], 2) for copy, _ in pairs],
        "processor_seconds": [round(ours[1], 2) for _, ours in pairs],
        "ratio_to_copy": round(statistics.median(ratios), 3),
        "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
    }


def sha256_speed() -> float:
    """Return GB/s of SHA-256 on one thread, which bounds the import from above."""
    data, start = bytes(64 << 20), time.perf_counter()
    hashlib.sha256(data).hexdigest()
    return len(data) / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.5, help="size of each checkpoint")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dir", help="where to write (default: the system's temporary folder)")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
        },
        "load_average_before": [round(x, 2) for x in os.getloadavg()],
        "sha256_gb_per_s": round(sha256_speed(), 2),
        "cases": {},
    }
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        scratch = Path(name)
        for label, config in (("dense", DENSE), ("moe", MOE)):
            source = scratch / label
            nbytes = make_folder(source, config, math.floor(args.gib * 2**30))
            import_hf(source, scratch / "ours")
            report = verify(source, scratch / "ours")
            if not report.equal:
                raise SystemExit(f"the import is wrong, so its speed does not matter: {report}")
            case = {"bytes": nbytes, "import": measure(source, scratch, args.rounds, import_hf)}
            case["import"]["gb_per_s"] = round(nbytes / statistics.median(case["import"]["seconds"]) / 1e9, 2)
            case["export"] = measure(scratch / "ours", scratch, args.rounds, export_hf)
            results["cases"][label] = case
            print(
                f"{label}: import {case['import']['ratio_to_copy']:.2f}x of a copy, export {case['export']['ratio_to_copy']:.2f}x"
            )
            shutil.rmtree(source)
            shutil.rmtree(scratch / "ours")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
