"""Checkpoints that Megatron-Core itself wrote, on one rank and on two, give its logits; it loads what we export."""

import argparse
import contextlib
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, MoEConfig
from te_models.checkpoints import export_checkpoint, import_checkpoint
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)

VOCABULARY, LENGTH = 64, 10
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}


def without_a_gpu() -> None:
    """Megatron-Core asks for the current GPU, and waits for it."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_: None
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # a name that is missing without Transformer Engine
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def megatron(tp: int, vocabulary: int, experts: dict[str, Any], **options: Any) -> Any:
    """A model of Megatron-Core's, with equal numbers for every number of ranks: the values follow from the names."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **options,
        **experts,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        **({"moe_token_dispatcher_type": "allgather"} if experts else {}),
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts.get("num_moe_experts"), moe_grouped_gemm=False, normalization="RMSNorm"
    )
    torch.manual_seed(1)
    return GPTModel(
        config,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def build(kind: str, tp: int) -> Any:
    return megatron(tp, VOCABULARY, EXPERTS if kind == "moe" else {}, init_method_std=0.3, **SIZES).eval()


def main(folder: Path, kind: str, tp: int, loaded: Path | None = None) -> None:
    """Save, and on the first rank write what it computed."""
    warnings.simplefilter("ignore")
    without_a_gpu()
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model = build(kind, tp)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" in name:
            values = torch.Generator().manual_seed(number)
            parameter.data.copy_(1 + torch.rand(parameter.shape, generator=values) / 4)
    if loaded is not None:
        file = loaded / f"mp_rank_{dist.get_rank():02d}" / "model_optim_rng.pt"
        model.load_state_dict(torch.load(file, weights_only=True)["model"])
    ids = torch.arange(3, 3 + LENGTH)[None]
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()
    with torch.no_grad():
        logits = model(ids, torch.arange(LENGTH)[None], mask)
    pieces = [torch.empty_like(logits) for _ in range(tp)]
    dist.all_gather(pieces, logits.contiguous())
    if loaded is not None:
        if dist.get_rank() == 0:
            torch.save(torch.cat(pieces, -1), loaded / "logits.pt")
        dist.destroy_process_group()
        return
    legacy = folder / "legacy" / f"mp_rank_{dist.get_rank():02d}"
    legacy.mkdir(parents=True)
    saved = {"model": model.state_dict(), "iteration": 7, "checkpoint_version": 3.0}
    saved["args"] = argparse.Namespace(tensor_model_parallel_size=tp, activation="silu")
    torch.save(saved, legacy / "model_optim_rng.pt")
    if dist.get_rank() == 0:
        (folder / "saved").mkdir()
        torch.save(torch.cat(pieces, -1), folder / "logits.pt")
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder / "saved"))
    dist.destroy_process_group()


PARAMS = ("dense 2", "dense 1", "moe 1")
"""Model, and number of ranks of tensor parallelism."""


def config_of(kind: str) -> ModelConfig:
    moe = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=EXPERTS["moe_ffn_hidden_size"])
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=SIZES["hidden_size"],
        num_layers=SIZES["num_layers"],
        max_position_embeddings=64,
        attention=AttentionConfig(num_attention_heads=4, num_query_groups=2),
        mlp=MLPConfig(ffn_hidden_size=SIZES["ffn_hidden_size"]),
        moe=moe if kind == "moe" else None,
    )


@pytest.fixture(
    scope="module", params=[pytest.param(p, marks=pytest.mark.slow if p != "dense 2" else ()) for p in PARAMS]
)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kind, tp = request.param.split()
    folder = tmp_path_factory.mktemp("megatron")
    arguments = ["-m", "tests.checkpoints.foreign.test_megatron", str(folder), kind, tp]
    run_on_ranks(arguments, ranks=int(tp), timeout=120, fresh=True)
    (folder / "config.json").write_text(json.dumps(config_of(kind).to_dict()))
    return kind, folder


def assert_same_logits(model: GPTModel, folder: Path) -> None:
    expected = torch.load(folder / "logits.pt", weights_only=True)
    with torch.no_grad():
        found = model(torch.arange(3, 3 + LENGTH)[None]).logits
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_a_distributed_checkpoint_gives_its_logits(written: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = written
    import_checkpoint(folder / "saved", tmp_path / "model", config=folder / "config.json")
    assert_same_logits(GPTModel.from_pretrained(tmp_path / "model"), folder)


def test_the_files_of_ranks_give_its_logits(written: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = written
    import_checkpoint(folder / "legacy", tmp_path / "model", config=folder / "config.json")
    assert_same_logits(GPTModel.from_pretrained(tmp_path / "model"), folder)


def test_megatron_loads_the_files_of_ranks(written: tuple[str, Path], tmp_path: Path) -> None:
    """What it saved, by way of our folder, on the other number of ranks."""
    kind, folder = written
    import_checkpoint(folder / "saved", tmp_path / "model", config=folder / "config.json")
    tp = 1 if kind == "moe" or (folder / "legacy" / "mp_rank_01").exists() else 2
    options = {"make_vocab_size_divisible_by": 1, "tensor_model_parallel_size": tp}
    export_checkpoint(tmp_path / "model", tmp_path / "ranks", to="megatron", local_modules=True, **options)
    release = tmp_path / "ranks" / "release"
    arguments = ["-m", "tests.checkpoints.foreign.test_megatron", str(tmp_path), kind, str(tp), str(release)]
    run_on_ranks(arguments, ranks=tp, timeout=120, fresh=True)
    found, expected = (torch.load(f / "logits.pt", weights_only=True) for f in (release, folder))
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *map(Path, sys.argv[4:]))
