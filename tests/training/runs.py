"""What the training tests share: tiny models, a data set of this Python's own source files, and exact comparison."""

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import te_models.training as training
from te_models.config import AttentionConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig, RouterConfig

TEXT = str(Path(sysconfig.get_paths()["stdlib"]) / "json" / "*.py")
SIZES = {"sequence_length": 32, "micro_batch_size": 2, "gradient_accumulation": 2}


def tiny_model(*, moe: bool = False, hidden: int = 64, layers: int = 2) -> ModelConfig:
    """A llama-shaped (or mixtral-shaped) model over bytes."""
    experts = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=hidden, aux_loss_coeff=0.01)
    return ModelConfig(
        vocab_size=257,
        hidden_size=hidden,
        num_layers=layers,
        max_position_embeddings=64,
        attention=AttentionConfig(num_attention_heads=4, num_query_groups=2),
        mlp=MLPConfig(ffn_hidden_size=2 * hidden),
        moe=experts if moe else None,
    )


def balanced_model(**router: Any) -> ModelConfig:
    """A deepseek_v3-shaped model over bytes: a dense layer, then two of experts that a bias balances."""
    values = {"score": "sigmoid", "expert_bias": True, "num_groups": 4, "topk_groups": 2, "scaling_factor": 2.5}
    latent = MLAConfig(q_lora_rank=12, kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6)
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_layers": 3, "max_position_embeddings": 64}
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "layers": (1, 2)}
    return ModelConfig(
        attention=AttentionConfig(num_attention_heads=4, mla=latent),
        mlp=MLPConfig(ffn_hidden_size=64),
        moe=MoEConfig(shared_expert_intermediate_size=16, router=RouterConfig(**{**values, **router}), **experts),
        **sizes,
    )


def tiny_run(tmp_path: Path, name: str = "run", *, moe: bool = False, **changes: Any) -> training.TrainConfig:
    """A short run on real text; `changes` replace fields of TrainConfig. The data set is shared under `tmp_path`."""
    values: dict[str, Any] = {
        "output_dir": str(tmp_path / name),
        "steps": 6,
        "device": "cpu",  # also where there is a GPU, which ranks could not share; tests of that ask for it
        "compile": False,
        "model": training.ModelSource(config=tiny_model(moe=moe)),
        "data": training.DataConfig(path=str(tmp_path / "data"), text=(TEXT,), tokenizer="bytes", **SIZES),
        "optimizer": training.OptimizerConfig(lr=3e-3),
        "precision": training.PrecisionConfig(dtype="fp32"),
        "checkpoint": training.CheckpointConfig(every=2, keep_last=0),
        "log": training.LogConfig(progress=False),
    }
    return training.TrainConfig(**(values | changes))


def curve(config: training.TrainConfig) -> list[tuple[Any, ...]]:
    """The numbers of each step that must repeat exactly (times are left out)."""
    rows = training.read_metrics(Path(config.output_dir) / "metrics.jsonl")
    names = ("step", "loss", "aux_loss", "lr", "grad_norm", "tokens")
    return [(*(row[name] for name in names), row.get("validation_loss")) for row in rows]


def rows_of(config: training.TrainConfig) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return training.read_metrics(Path(config.output_dir) / "metrics.jsonl")


def cut_after(whole: training.TrainConfig, name: str, checkpoints: int) -> training.TrainConfig:
    """A copy of a finished run as a kill behind so many checkpoints leaves it."""
    copy = whole.replace(output_dir=str(Path(whole.output_dir).with_name(name)))
    shutil.copytree(whole.output_dir, copy.output_dir)
    for later in training.list_checkpoints(Path(copy.output_dir))[checkpoints:]:
        shutil.rmtree(later)
    shutil.rmtree(Path(copy.output_dir) / "final")
    return copy


def assert_continues_as(cut: training.TrainConfig, whole: training.TrainConfig) -> None:
    """Train to the end, and assert that every step, the result and the last checkpoint are those of another run."""
    training.train(cut)
    assert curve(cut) == curve(whole)
    one, two = Path(whole.output_dir), Path(cut.output_dir)
    assert_same_bits(tensors_under(two / "final"), tensors_under(one / "final"))
    assert_same_bits(*(tensors_under(training.latest_checkpoint(folder)) for folder in (two, one)))


def tensors_under(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every safetensors file under a folder, keyed by relative file and name."""
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found |= {f"{file.relative_to(folder)}:{name}": t for name, t in load_file(file).items()}
    assert found, f"no tensors under {folder}"
    return found


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Equal names, dtypes, shapes and bytes."""
    assert left.keys() == right.keys()
    for name, a in left.items():
        b = right[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        same = torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
        assert same, f"{name} differs"
