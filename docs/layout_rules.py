"""The rules of layouts over ranks as the lists of docs/parallel.md, which `docs/generate.py` puts there.

The rules are asked about layouts of N ranks, where N is a number that nothing else of a sentence is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

from te_models.config import AttentionConfig, IndexerConfig, MLPConfig, ModelConfig, MoEConfig
from te_models.layouts import GROUPS, Facts, Rule
from te_models.parallel import ParallelDims, StageLayout
from te_models.training.config import DataConfig, ModelSource, ParallelConfig, PrecisionConfig, TrainConfig

N = 97
HEADINGS = {
    "parallel": "The table `[parallel]`",
    "run": "A run",
    "run model dims": "A run",
    "run model": "A run",
    "dims": "A number of ranks",
    "dims filled": "A number of ranks",
    "model": "A model and the ranks that share it",
    "dims built": "A model and the ranks that share it",
    "stages": "Pipeline stages",
    "run stages": "Pipeline stages",
    "stages num_layers": "Pipeline stages",
    "stages model": "Pipeline stages",
    "model layers": "Pipeline stages",
}


def layouts() -> Iterator[Facts]:
    """Layouts of which each rule can be asked about one or another."""
    sizes = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    dims, stages = (
        ParallelDims(ranks=N, data_parallel_shard_size=N),
        StageLayout(N, "ZBVZeroBubble", split=(1,) * 2 * N),
    )
    indexer = IndexerConfig(n_heads=2, head_dim=16, topk=4)
    plain = AttentionConfig(num_attention_heads=4, kv_channels=16)
    chooses, shares = plain.replace(indexer=indexer), plain.replace(indexer=indexer.replace(shared=True))
    shared = {"mixers": {"shares": shares}, "layer_mixers": ("attention", "shares")}
    for way, attention, changes in (("p2p", plain, {"kv_source_layers": (0, 0)}), ("a2a", chooses, shared)):
        model = ModelConfig(
            vocab_size=N,
            hidden_size=64,
            num_layers=2,
            max_position_embeddings=2 * N,
            attention=attention,
            mlp=MLPConfig(ffn_hidden_size=N),
            moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=N),
            **changes,
        )
        data = DataConfig(path="data", sequence_length=2 * N)
        parallel = ParallelConfig(data_parallel_shard_size=N, reduce_dtype="bfloat16")
        options = {"precision": PrecisionConfig(recipe="current"), "model": ModelSource(config=model)}
        run = TrainConfig(output_dir="run", steps=N, compile=False, data=data, parallel=parallel, **options)
        known = Facts.of_run(run, model, dims=dims, stages=stages, layers=(1,), built=sizes)
        pairs = SimpleNamespace(**vars(run) | {"posttraining": SimpleNamespace(method="dpo")})
        yield replace(known, run=pairs, tp=N, ep=N, etp=N, cp=N, cp_comm_type=way)


def rows() -> dict[str, list[tuple[str, str]]]:
    """Heading -> the keys of a rule, and what it allows, or says."""
    found: dict[str, dict[str, list[str]]] = {heading: {} for heading in HEADINGS.values()}
    for facts in layouts():
        for needs, group in GROUPS:
            skipped = ("mixers.", "parallel.") if needs == "dims" else "mixers."
            for rule in group(facts) if needs else ():
                keys = found[HEADINGS[needs]].setdefault(_text(rule), [])
                if rule.key not in keys and not rule.key.startswith(skipped):
                    keys.append(rule.key)
    return {
        heading: [(", ".join(f"`{k}`" for k in keys), text) for text, keys in texts.items() if keys]
        for heading, texts in found.items()
    }


def _text(rule: Rule) -> str:
    """What a rule allows, in the words of its sentence."""
    text = f"{rule.where}: {rule.allowed}" if rule.where else rule.allowed
    if rule.says:
        text = re.sub(r"^( is (\[.*\]|\S+)( and the model|(?=[,;: ]))|:)[,;:]? ?", "", rule.says)
        text = re.sub(r"^ and .*?; |^which |^(\d+ on each of|than) .*?; ", "", text)
        text = text.replace("but the model has", "at most the model's")
        text = text.replace(f"{N} ranks cannot", f"what {N} ranks can").replace("compares", "without what compares")
        text = text.removeprefix("allowed").replace("; allowed: ", ": ") if text[:4] in ("allo", "with") else text
    words = {str(2 * N): "2 N", str(N): "N", "null": "unset"}
    return re.sub("|".join(words), lambda found: words[found[0]], text.strip(" :"))
