"""Dense to mixture of experts: copies, routers, noise, and the family that the result exports as."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch

from te_models.checkpoints import CheckpointError, export_hf, import_hf, open_checkpoint, upcycle, verify
from tests.checkpoints.hf_cases import HFFolder, assert_same_bits, stored, transformers
from tests.compare import refused

CASES = {"llama": "mixtral", "mistral-window": "mixtral", "qwen3": "qwen3_moe", "qwen2-tied": None}


@pytest.mark.sentinels("llama", "qwen2-tied")
@pytest.mark.parametrize("case", CASES)
def test_experts_are_copies_and_the_rest_is_unchanged(hf_folder: HFFolder, tmp_path: Path, case: str) -> None:
    source = hf_folder(case)
    import_hf(source, tmp_path / "dense")
    plan = upcycle(tmp_path / "dense", tmp_path / "moe", 4, 2)
    assert len(plan.notes) == (CASES[case] is None) and all("cannot be exported" in note for note in plan.notes)
    upcycle(source, tmp_path / "from-hf", 4, 2)
    assert_same_bits(stored(tmp_path / "moe"), stored(tmp_path / "from-hf"))
    dense, moe = stored(tmp_path / "dense"), stored(tmp_path / "moe")
    for name, tensor in dense.items():
        if name.endswith("mlp.linear_fc1.layer_norm_weight"):
            assert torch.equal(moe[name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")], tensor)
        elif ".mlp." in name:
            experts = moe[name.replace(".mlp.", ".mlp.experts.")]
            assert experts.shape == (4, *tensor.shape) and all(torch.equal(e, tensor) for e in experts)
        else:
            assert torch.equal(moe[name], tensor)
    routers = [moe[f"decoder.layers.{i}.mlp.router.weight"] for i in range(2)]
    assert all(r.shape == (4, 32) and 0.01 < r.float().std() < 0.03 for r in routers)
    assert not torch.equal(routers[0], routers[1])
    with open_checkpoint(tmp_path / "moe") as ckpt:
        assert ckpt.family == CASES[case] and ckpt.config.moe is not None and ckpt.config.moe.router.normalize
    if CASES[case] is None:
        with pytest.raises(CheckpointError, match="no family can store this model; of the nearest, ") as caught:
            export_hf(tmp_path / "moe", tmp_path / "hf")
        assert len(str(caught.value)) < 600  # three of the families, not all
        return
    export_hf(tmp_path / "moe", tmp_path / "hf")
    assert verify(tmp_path / "moe", tmp_path / "hf").equal
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == CASES[case]


def test_transformers_computes_the_dense_logits_from_the_export(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("llama", dtype=torch.float32)
    upcycle(source, tmp_path / "moe", 4, 2)
    export_hf(tmp_path / "moe", tmp_path / "hf")
    load, tokens = transformers.AutoModelForCausalLM.from_pretrained, torch.arange(30)[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        dense, mixture = load(source)(tokens).logits, load(tmp_path / "hf")(tokens).logits
    assert (dense - mixture).abs().max() <= 1e-5 * dense.abs().max()


def test_seeds_layouts_noise_and_layers(llama: Path, tmp_path: Path) -> None:
    name = "decoder.layers.1.mlp.experts.linear_fc2.weight"
    upcycle(llama, tmp_path / "a", 3, 1, noise_std=0.01, seed=1)
    upcycle(llama, tmp_path / "b", 3, 1, noise_std=0.01, seed=1, max_shard_bytes=5000)
    upcycle(llama, tmp_path / "c", 3, 1, noise_std=0.01, seed=2, layers=[1])
    a, c = stored(tmp_path / "a"), stored(tmp_path / "c")
    assert_same_bits(a, stored(tmp_path / "b"))
    assert not torch.equal(a[name], c[name])
    dense = stored(llama)["model.layers.1.mlp.down_proj.weight"].float()
    assert 0.008 < (a[name].float() - dense).std() < 0.012 and not torch.equal(a[name][0], a[name][1])
    assert "decoder.layers.0.mlp.linear_fc1.weight" in c and name in c
    upcycle(llama, tmp_path / "plain", 3, 1)
    upcycle(llama, tmp_path / "split", 3, 1, layout="per-gemm")
    assert verify(tmp_path / "plain", tmp_path / "split").equal


def test_impossible_mixtures_are_refused(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("llama")
    for arguments, message in (
        ((0, 1), "num_moe_experts is 0"),
        ((4, 5), "moe_router_topk is 5"),
        ((4, 0), "moe_router_topk is 0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            upcycle(source, tmp_path / "x", *arguments)
    refused(lambda: upcycle(source, tmp_path / "x", 4, 2, layers=[7]), "layers", error=CheckpointError)
    for noise in (-1, math.nan, math.inf):
        with pytest.raises(CheckpointError, match=f"noise_std is {noise}; allowed: a finite number"):
            upcycle(source, tmp_path / "x", 4, 2, noise_std=noise)
    with pytest.raises(CheckpointError, match="claims 2000000 experts in 2 layers; at most 100000 in all"):
        upcycle(source, tmp_path / "x", 2_000_000, 2)
    refused(lambda: upcycle(hf_folder("mixtral"), tmp_path / "x", 4, 2), "already has experts", error=CheckpointError)
    assert not (tmp_path / "x").exists()
