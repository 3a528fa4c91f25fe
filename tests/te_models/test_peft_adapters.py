"""Adapters that peft wrote over transformers' models: our models with them compute what peft's do, merged, too, and
write them again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from te_models import GPTModel
from te_models.checkpoints import CheckpointError
from te_models.cli.main import main
from te_models.lora import add_lora, export_adapter, load_adapter, lora_state_dict, merge_lora, save_adapter
from tests.te_models.test_lora import FAMILIES, SIZES, moved

peft: Any = pytest.importorskip("peft", reason="peft is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
# what peft warns of: a name of transformers, embeddings that it saves, patterns of parameters that it does use
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]
IDS = torch.arange(12)[None] * 5 % 96
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MODELS = {
    **FAMILIES,
    "deepseek_v3": {**FAMILIES["glm4_moe"], **LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "qwen3_next": {
        **FAMILIES["qwen3_moe"],
        **DELTA,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
SOME = ["q_proj", "v_proj", "down_proj"]
LINEARS: dict[str, Any] = {"target_modules": "all-linear"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, own ranks and scales": (
        "llama",
        {
            "target_modules": SOME,
            "rank_pattern": {"v_proj": 2, r"layers\.1.*down_proj": 3},
            "alpha_pattern": {"q_proj": 5},
            "use_rslora": True,
        },
    ),
    "llama, DoRA": ("llama", {"target_modules": ["q_proj", "v_proj", "up_proj", "gate_proj"], "use_dora": True}),
    "llama, whole weights": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
    ),
    "llama, embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "qwen3_moe, experts and router": (
        "qwen3_moe",
        {
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": [*EXPERTS, "gate.weight"],
            "rank_pattern": {"experts.down_proj": 2},
        },
    ),
    "llama, all": ("llama", LINEARS),
    "gpt2, stored [in, out], tied": ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
    "phi3, joined there, too": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "qwen3_moe, one of two": ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[1:]}),
    "mixtral, experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "gpt_oss, experts [in, out]": ("gpt_oss", {**LINEARS, "target_parameters": EXPERTS}),
    "deepseek_v3, latent attention": ("deepseek_v3", {"target_modules": r".*self_attn.*_proj(_with_mqa)?"}),
    "qwen3_next, recurrent": (
        "qwen3_next",
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "shared_expert_gate"]},
    ),
}
EVERYDAY = 5
OTHERS = {"llama, own ranks and scales", "llama, DoRA", "llama, embeddings", "qwen3_next, recurrent"}
"""Those that come back in other factors: scales that layers share, rows of DoRA without adapter, copies of base
weights, parameters with the adapter in them."""


def transformers_model(family: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **MODELS[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def write_with_peft(family: str, folder: Path, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Write an adapter far from zero; return the logits without and with it."""
    theirs = transformers_model(family)
    with torch.no_grad():
        before = theirs(IDS).logits
        adapted = peft.get_peft_model(theirs, peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, **options})).eval()
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        after = adapted(IDS).logits
    adapted.save_pretrained(folder)
    return before, after


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if i >= EVERYDAY else []) for i, c in enumerate(CASES)]
)
def test_adapters_of_peft_over_our_model(case: str, tmp_path: Path) -> None:
    """The same logits as peft's in float32, to 1e-5 of the largest; so have the merged model and peft with what we
    write of it, which is the same file where nothing had to be put together in another way."""
    family, options = CASES[case]
    before, after = write_with_peft(family, tmp_path / "peft", options)
    scale = before.abs().max()
    assert (after - before).abs().max() > 0.05 * scale
    model, other = (GPTModel.from_hf(transformers_model(family)).eval() for _ in range(2))
    load_adapter(model, tmp_path / "peft")
    found = logits_of(model)
    assert (found - after).abs().max() < 1e-5 * scale
    save_adapter(model, tmp_path / "ours")
    load_adapter(other, tmp_path / "ours")
    assert torch.equal(logits_of(other), found)
    export_adapter(model, tmp_path / "back", base_model="org/name")
    again = peft.PeftModel.from_pretrained(transformers_model(family), tmp_path / "back").eval()
    assert (logits_of(again) - after).abs().max() < 1e-5 * scale
    theirs, back = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "back"))
    same = theirs.keys() == back.keys() and all(torch.equal(back[name], tensor) for name, tensor in theirs.items())
    assert same == (case not in OTHERS)
    if "tied" in case:
        with pytest.raises(ValueError, match="has an adapter, and its weight is the output layer's, too"):
            merge_lora(model)
        return
    merge_lora(model)
    assert (logits_of(model) - after).abs().max() < 1e-5 * scale


def test_experts_as_modules_of_their_own(tmp_path: Path) -> None:
    """Folders from before transformers joined the experts: peft reads them into its joined parameters, we into ours."""
    hidden, width, moe = SIZES["hidden_size"], SIZES["intermediate_size"], "block_sparse_moe.experts"
    sizes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
    tensors = {
        f"base_model.model.model.layers.{layer}.{moe}.{expert}.{name}.lora_{factor}.weight": torch.randn(shape) * 0.2
        for layer in range(2)
        for expert in range(4)
        for name, (rows, columns) in sizes.items()
        for factor, shape in (("A", (4, columns)), ("B", (rows, 4)))
    }
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": list(sizes)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "x"}))
    save_file(tensors, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    model = GPTModel.from_hf(transformers_model("mixtral")).eval()
    load_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(transformers_model("mixtral"), tmp_path).eval()
    before = logits_of(transformers_model("mixtral"))
    assert (logits_of(model) - before).abs().max() > 0.05 * before.abs().max()
    assert (logits_of(model) - logits_of(theirs)).abs().max() < 1e-5 * before.abs().max()


def test_our_adapters_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Written for transformers' model and read again: q, k and v share A again."""
    model, other = (GPTModel.from_hf(transformers_model("qwen3_moe")).eval() for _ in range(2))
    add_lora(model, 4, alpha=8)
    moved(model)
    export_adapter(model, tmp_path / "peft", base_model="org/name")
    load_adapter(other, tmp_path / "peft")
    ours, theirs = lora_state_dict(model), lora_state_dict(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"peft_type": "LOHA"}, "is of the method 'LOHA'; allowed: 'LORA'"),
        ({"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights 'pissa_niter_4', which also changes the base"),
        ({"trainable_token_indices": [1]}, "has trainable_token_indices, which no layer here can do"),
        ({"layer_replication": [[0, 1]]}, "has layer_replication"),
        ({"use_dora": True}, "has no lengths of model.layers.0.self_attn.q_proj.weight, and use_dora says otherwise"),
        ({"r": 3}, "gives model.layers.0.self_attn.q_proj rank 3, and adapter_model.safetensors has 4"),
        ({"r": 0}, "has r 0; allowed: a positive number"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern has '(', which is no regular expression"),
    ],
)
def test_what_no_layer_can_do_is_named(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = GPTModel.from_hf(transformers_model("llama"))
    add_lora(model, 4, targets=("linear_qkv",))
    export_adapter(model, tmp_path / "peft")
    other = GPTModel.from_hf(transformers_model("llama"))

    with pytest.raises(CheckpointError, match=re.escape(says)):
        load_adapter(other, _changed(tmp_path / "peft", **fields))
    assert not lora_state_dict(other)


def test_another_models_adapters_are_named(tmp_path: Path) -> None:
    write_with_peft("gpt2", tmp_path / "gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True})
    model = GPTModel.from_hf(transformers_model("llama"))
    with pytest.raises(CheckpointError, match=r"has an adapter of transformer.h.0.attn.c_attn, which is no layer here"):
        load_adapter(model, tmp_path / "gpt2")
    export = transformers_model("llama")
    adapted = peft.get_peft_model(export, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    adapted.save_pretrained(tmp_path / "llama")
    file = tmp_path / "llama/adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(99, 32)}, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"output_layer.weight of shape \[99, 32\], which is \[96, 32\] in the model"
    ):
        load_adapter(model, tmp_path / "llama")


def test_the_verbs_take_adapters_of_peft(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """merge computes what peft does; export --adapter writes an adapter of ours for transformers' model."""
    options = {"target_modules": [*SOME, "lm_head"], "modules_to_save": ["input_layernorm"]}
    _, after = write_with_peft("llama", tmp_path / "peft", options)
    transformers_model("llama").save_pretrained(tmp_path / "base")
    words = [str(tmp_path / name) for name in ("base", "peft", "merged")]
    assert main(["merge", *words, "--dtype", "float32"]) == 0
    merged = logits_of(GPTModel.from_pretrained(tmp_path / "merged", dtype="float32").eval())
    assert (merged - after).abs().max() < 1e-5 * after.abs().max()
    capsys.readouterr()
    options = ["--prompt", "AB", "--tokenizer", "bytes", "--json", "--dtype", "float32", "--max-new-tokens", "4"]
    said = []
    for model in ([words[0], "--adapter", words[1]], [words[2]], [words[0]]):
        assert main(["generate", *model, *options]) == 0
        said.append(json.loads(capsys.readouterr().out)["tokens"])
    assert said[0] == said[1] != said[2]
    assert main(["import", str(tmp_path / "base"), str(tmp_path / "ours")]) == 0
    model = GPTModel.from_pretrained(tmp_path / "ours", dtype="float32").eval()
    load_adapter(model, tmp_path / "peft")
    save_adapter(model, tmp_path / "adapter", base_model=str(tmp_path / "ours"))
    words = [str(tmp_path / name) for name in ("ours", "back")]
    export = ["export", *words, "--adapter", str(tmp_path / "adapter")]
    assert main([*export, "--base-model", str(tmp_path / "base")]) == 0
    config = json.loads((tmp_path / "back/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(theirs, tmp_path / "back").eval()
    assert (logits_of(again) - after).abs().max() < 1e-5 * after.abs().max()
    capsys.readouterr()
    assert main(export) == 2 and "exists; --force replaces it" in capsys.readouterr().err
    assert main([*export, "--force"]) == 0
    assert "note: transformers reads no te_models folder; --base-model names" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "base"), *export[2:], "--force"]) == 0
    config = json.loads((tmp_path / "back/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert main([*export, "--to", "gguf"]) == 2
    assert "--to is of models; allowed with --adapter" in capsys.readouterr().err
