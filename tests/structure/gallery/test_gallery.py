"""The configurations of examples/configs/: sizes, tasks and planned memory are right, and small models train."""

import re
from pathlib import Path
from typing import Any

import pytest

from te_models.checkpoints.families import family_of
from te_models.config import ModelConfig
from te_models.parallel import ParallelDims
from te_models.plan import Hardware, Plan
from te_models.plan.process import plan_each
from te_models.sizes import format_size
from te_models.training import TrainConfig, load_config, read_metrics, train
from te_models.training.precision import build_recipe
from te_models.training.preflight import check_run_layout
from te_models.training.trained import check_globs

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}
_QWEN3 = {
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "num_key_value_heads": 8,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "head_dim": 256, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {**_LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}
    | {"tie_word_embeddings": True, "head_dim": 64, "rope_scaling": {**_LLAMA3, "factor": 32.0}},
    "llama-3.1-8b": {**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
    | {"tie_word_embeddings": False, "head_dim": 128, "rope_scaling": {**_LLAMA3, "factor": 8.0}},
    "qwen3-0.6b": {**_QWEN3, "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
    | {"intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN3, "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36}
    | {"intermediate_size": 12288, "num_attention_heads": 32, "tie_word_embeddings": False},
    "qwen3-30b-a3b": {**_QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48}
    | {"intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"tie_word_embeddings": False, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001},
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "swiglu_limit": 7.0,
        "initial_context_length": 4096,
        "router_aux_loss_coef": 0.9,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
        | {"truncate": False, "original_max_position_embeddings": 4096},
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "intermediate_size": 10944,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 102400,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "aux_loss_alpha": 0.001,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707}
        | {"mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
    },
    "gemma-3-1b": {**_GEMMA, "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26}
    | {"intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144}
    | {"sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768}
    | {"rope_theta": 1000000, "rope_local_base_freq": 10000, "query_pre_attn_scalar": 256},
    "gemma-2-9b": {**_GEMMA, "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42}
    | {"intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000}
    | {"sliding_window": 4096, "max_position_embeddings": 8192, "rope_theta": 10000.0}
    | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
_SMALL = (
    {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    | {"vocab_size": 320, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
    | {"qk_rope_head_dim": 16, "v_head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
)


def model_of(name: str, *, small: bool = False) -> ModelConfig:
    """Return a model's configuration, or that of a small one of its kind."""
    values = dict(MODELS[name])
    if small:
        values |= {key: size for key, size in _SMALL.items() if key in values}
        heads = values["num_key_value_heads"]
        values["num_key_value_heads"] = 4 if heads == MODELS[name]["num_attention_heads"] else min(heads, 2)
        if "layer_types" in values:
            values["layer_types"] = values["layer_types"][:2]
    return family_of(values["model_type"]).read_config(values)


EXAMPLES = Path(__file__).parents[3] / "examples"
GALLERY = sorted(path.stem for path in (EXAMPLES / "configs").iterdir())
ROW = re.compile(r"\| \[(.+)\]\(configs/(.+)\.toml\) \| (.+) \| (.+) \| (\d+) \| ([\d,]+) \| (.+) \|")
ROWS = {found[1]: found for found in map(ROW.fullmatch, (EXAMPLES / "README.md").read_text().splitlines()) if found}


def text_of(name: str) -> str:
    return (EXAMPLES / "configs" / f"{name}.toml").read_text()


def config_of(name: str) -> TrainConfig:
    return load_config(EXAMPLES / "configs" / f"{name}.toml")


def model_name(name: str) -> str:
    return name.rpartition("-")[0]


def with_model(name: str, *, small: bool = False) -> TrainConfig:
    """The run with the sizes of its model, or of a small one, in place of a folder of weights."""
    config = config_of(name)
    sizes = config.model.config
    model = model_of(model_name(name), small=small)
    if sizes is not None and sizes.moe is not None and model.moe is not None:
        model = model.replace(moe=model.moe.replace(aux_loss_coeff=sizes.moe.aux_loss_coeff))
    return config.replace(model=config.model.replace(path=None, config=model), compile=False)


def test_every_family_and_task_is_there_and_in_the_table() -> None:
    assert list(ROWS) == sorted(ROWS, key=list(ROWS).index) and sorted(ROWS) == GALLERY
    assert {model_name(name) for name in GALLERY} == set(MODELS)
    assert {name.rpartition("-")[2] for name in GALLERY} == {"pretrain", "sft", "lora", "qlora"}


@pytest.mark.parametrize("name", GALLERY)
def test_a_configuration_is_of_its_model_and_says_its_memory(name: str) -> None:
    config, model = config_of(name), model_of(model_name(name))
    ranks, length, memory = int(ROWS[name][5]), int(ROWS[name][6].replace(",", "")), ROWS[name][7]
    assert (config.data.sequence_length, config.output_dir) == (length, f"runs/{name}")
    assert f": {memory}." in text_of(name).splitlines()[0]
    task = ROWS[name][4]
    adapted = config.lora.rank > 0, config.precision.quantized_weights
    assert adapted == (task in ("lora", "qlora"), task == "qlora")
    assert (config.data.messages_field is not None) == (task == "sft")
    if config.model.config is not None:
        assert with_model(name).model.config == config.model.config
    check_globs(config, model)
    build_recipe(config.precision, model.num_layers)
    check_run_layout(config, model, ParallelDims.of(vars(config.parallel), ranks))


def planned(names: list[str], ranks: int) -> list[str]:
    found = plan_each([with_model(name) for name in names], ranks, Hardware())
    return [format_size(plan.memory) if isinstance(plan, Plan) else str(plan) for plan in found]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_planned_memory_of_all(ranks: int) -> None:
    names = [name for name in GALLERY if int(ROWS[name][5]) == ranks]
    assert planned(names, ranks) == [ROWS[name][7] for name in names]


@pytest.mark.sentinels("qwen3-8b-lora")
@pytest.mark.parametrize("name", GALLERY)
def test_a_small_model_of_each_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("A text of a few words. " * 400)
    config = with_model(name, small=True)
    text = {"text": ("text.txt",), "tokenizer": "bytes", "messages_field": None, "sequence_length": 32}
    config = config.replace(
        steps=2,
        device="cpu",
        data=config.data.replace(**text, validation_fraction=0.1),
        parallel=config.parallel.replace(data_parallel_shard_size=1),
        schedule=config.schedule.replace(warmup_steps=1),
        evaluation=config.evaluation.replace(batches=1),
        log=config.log.replace(progress=False),
    )
    train(config)
    assert [row["step"] for row in read_metrics(Path(config.output_dir) / "metrics.jsonl")] == [1, 2]
    assert (Path(config.output_dir) / "final/config.json").is_file()
