"""Layers that predict further tokens as parameters: imported on request, equal to transformers' own layers, exported
bit for bit."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, export_hf, import_hf, relayout, verify
from tests.checkpoints.folder.test_passthrough import add_tensors, edit_config, passthrough_in, save
from tests.checkpoints.hf_cases import assert_same_bits, stored, transformers

FAMILIES = ["deepseek_v3", "glm4_moe", "glm4_moe_lite"]


def with_mtp(family: str, folder: Path, *, copies: bool = True) -> tuple[Path, str]:
    """Save a model with a layer behind the last one; return the folder and how the layer's names begin."""
    source = save(family, folder)
    tensors = stored(source)
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    prefix, hidden = f"model.layers.{last + 1}.", tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(1)

    def random(like: torch.Tensor) -> torch.Tensor:
        return (torch.randn(like.shape, generator=generator) * 0.3).to(like.dtype)

    ours = {n.replace(f".{last}.", f".{last + 1}.", 1): random(t) for n, t in tensors.items() if f"layers.{last}." in n}
    norm = tensors["model.norm.weight"]
    ours |= {f"{prefix}{name}.weight": random(norm) for name in ("enorm", "hnorm", "shared_head.norm")}
    ours[f"{prefix}eh_proj.weight"] = random(torch.empty(hidden, 2 * hidden, dtype=norm.dtype))
    if copies:
        ours[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        ours[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    add_tensors(source, ours)
    edit_config(source, num_nextn_predict_layers=1)
    return source, prefix


@pytest.mark.parametrize("family", ["deepseek_v3", *(pytest.param(f, marks=pytest.mark.matrix) for f in FAMILIES[1:])])
@torch.no_grad()
def test_import_train_export(tmp_path: Path, family: str) -> None:
    source, prefix = with_mtp(family, tmp_path / "hf", copies=family != "glm4_moe")
    plan = import_hf(source, tmp_path / "ours", mtp=True)
    assert not plan.passthrough and not passthrough_in(tmp_path / "ours")
    relayout(tmp_path / "ours", tmp_path / "per-gemm", "per-gemm")
    export_hf(tmp_path / "per-gemm", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), stored(source))
    back, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", source))
    assert back == original
    assert verify(source, tmp_path / "ours").equal and verify(tmp_path / "per-gemm", source).equal
    model = GPTModel.from_pretrained(source, dtype=torch.bfloat16, mtp=True)
    model.save_pretrained(tmp_path / "saved")
    saved, ours = stored(tmp_path / "saved"), stored(tmp_path / "ours")
    for name in (name for name in ours if name.endswith("expert_bias")):  # a model has these in float32
        ours[name] = ours[name].float()
    assert_same_bits(saved, ours)
    assert GPTModel.from_pretrained(tmp_path / "saved").config.mtp_num_layers == 1
    assert GPTModel.from_pretrained(source).config.mtp_num_layers == 0, "unless they are asked for"
    model.embedding.word_embeddings.weight.mul_(2)  # as training does: what repeats it is written anew
    model.save_pretrained(tmp_path / "trained")
    export_hf(tmp_path / "trained", tmp_path / "trained-hf")
    trained = stored(tmp_path / "trained-hf")
    if family != "glm4_moe":
        table = trained["model.embed_tokens.weight"]
        assert torch.equal(trained[f"{prefix}embed_tokens.weight"], table)
        assert torch.equal(table, 2 * stored(source)["model.embed_tokens.weight"])


@torch.no_grad()
def test_values_are_those_of_transformers_modules(tmp_path: Path) -> None:
    source, prefix = with_mtp("glm4_moe", tmp_path / "hf")
    tensors = {name: t.float() for name, t in stored(source).items()}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).model
    layer = theirs.layers[-1]  # of the same kind
    ids = torch.arange(3, 15)[None]
    hidden, embedded = theirs(ids).last_hidden_state, theirs.embed_tokens(ids)
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    per_expert = {n: own[n] for n in own if n.startswith("mlp.experts.")}
    state = {n: own[n] for n in layer.state_dict() if n in own}
    for name, parts in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
        experts = range(layer.mlp.experts.num_experts)
        state[f"mlp.experts.{name}"] = torch.stack(
            [torch.cat([per_expert[f"mlp.experts.{e}.{part}.weight"] for part in parts]) for e in experts]
        )
    layer.load_state_dict(state)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], own[f"{name}.weight"], theirs.config.rms_norm_eps)

    joined = torch.cat([norm(embedded[:, 1:], "enorm"), norm(hidden[:, :-1], "hnorm")], -1)
    positions = torch.arange(11)[None]
    mask = torch.full((1, 1, 11, 11), float("-inf")).triu(1)
    x = layer(
        joined @ own["eh_proj.weight"].T,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=theirs.rotary_emb(joined, positions),
    )
    x = norm(x[0] if isinstance(x, tuple) else x, "shared_head.norm")
    expected = F.cross_entropy((x @ tensors["lm_head.weight"].T)[0, :-1], ids[0, 2:])
    model = GPTModel.from_pretrained(source, dtype=torch.float32, mtp=True).train()
    assert model(ids, labels=ids).mtp_loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    source, prefix = with_mtp("glm4_moe", tmp_path / "hf")
    add_tensors(source, {f"{prefix}shared_head.head.weight": torch.zeros(61, 32, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"layers share weights, but .*head.weight' differs"):
        import_hf(source, tmp_path / "x", mtp=True)
    import_hf(source, tmp_path / "without")
    with pytest.raises(ValueError, match=r"mtp is True, and .*without has no layers that predict further tokens"):
        GPTModel.from_pretrained(tmp_path / "without", mtp=True)
    with pytest.raises(CheckpointError, match="'exaone_moe' has no layers that predict further tokens as parameters"):
        import_hf(save("exaone_moe", tmp_path / "exaone"), tmp_path / "x", mtp=True)
    edit_config(source, num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match=r"missing: 'model.layers.3"):
        import_hf(source, tmp_path / "x", mtp=True)
    edit_config(source, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"config.json says that there are no layers that predict"):
        import_hf(source, tmp_path / "x", mtp=True)
