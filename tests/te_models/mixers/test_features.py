"""What attention has, every mixer has: adapters, stages, checkpoints of activations, Muon, stored weights, shards."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_models.layers as te
from te_models import GPTModel, ModelConfig
from te_models.lora import add_lora, lora_state_dict, merge_lora
from te_models.training import OptimizerConfig
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.optimizer.groups import uses_muon
from tests.build import VARIANTS, token_ids
from tests.ranks import on_ranks
from tests.te_models.mixers.test_recurrent_mixers import MIXERS, close, hybrid
from tests.te_models.model.mixers.test_index_pools import MODELS as POOLS

MODELS: dict[str, ModelConfig] = {
    **{name: hybrid(name) for name in MIXERS},
    "sparse": VARIANTS["sparse"].replace(num_layers=3, layer_types=None),
    "sparse_latent": VARIANTS["sparse_latent"].replace(num_layers=3, layer_types=None),
    "pools": POOLS["hybrid"],
}


def model_of(name: str) -> GPTModel:
    """Equal in every process, with weights with which states and choices matter."""
    torch.manual_seed(0)
    model = GPTModel(MODELS[name]).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.15)
    return model


every_model = pytest.mark.parametrize("name", MODELS)


def gradients(model: GPTModel, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(ids, labels=ids, return_logits=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.matrix
@pytest.mark.parametrize("use_dora", [False, True])
@every_model
def test_adapters(name: str, use_dora: bool) -> None:
    """Of all linear layers of a mixer and no other parameters; a new one changes no bit, merged equals unmerged."""
    model, ids = model_of(name), token_ids(2, 12)
    layers = {n.rpartition(".")[0] for n, _ in model.named_parameters() if ".linear_" in n and n.endswith("weight")}
    layers = {n for n in layers if not n.endswith("layer_norm")}
    with torch.no_grad():
        before = model(ids).logits
        add_lora(model, 4, use_dora=use_dora)
        assert torch.equal(model(ids).logits, before)
        assert {n.partition(".lora_")[0] for n in lora_state_dict(model)} >= {n for n in layers if ".mixer." in n}
        for tensor in lora_state_dict(model).values():
            tensor.add_(torch.randn_like(tensor) * 0.05)
        unmerged = model(ids).logits
    _, found = gradients(model, ids)
    assert all("lora_" in n or "dora" in n or "magnitude" in n for n in found)
    merge_lora(model)
    with torch.no_grad():
        assert (model(ids).logits - unmerged).abs().max() <= 5e-5 * unmerged.abs().max()
    assert not torch.equal(unmerged, before)


@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if config.shared_blocks is None])
def test_stages_of_a_pipeline(name: str) -> None:
    model, ids = model_of(name).train().double(), token_ids(2, 12)  # float32 loses digits where large terms cancel
    loss, wanted = gradients(model, ids)
    model.zero_grad()
    layers, at = model.config.num_layers, 2
    stages = [model.stage(0, at), model.stage(at, layers)]
    begun = stages[0](ids, return_hidden_states=True).hidden_states[-1]
    found = stages[1](inputs_embeds=begun, labels=ids).loss
    found.backward()
    close(found.detach(), loss)
    for n, p in model.named_parameters():
        assert (p.grad is None) == (n not in wanted), n
        if p.grad is not None:
            close(p.grad, wanted[n])


@every_model
def test_activation_checkpoints_change_no_bit(name: str) -> None:
    model, ids = model_of(name).train(), token_ids(2, 12)
    loss, wanted = gradients(model, ids)
    model.decoder.activation_checkpointing = True
    again, found = gradients(model, ids)
    assert torch.equal(again, loss) and found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.sentinels("by_channel", "lightning", "mamba", "mamba2", "short_convolution", "in_shared_blocks", "pools")
@every_model
def test_muon_updates_matrices_and_adamw_the_rest(name: str) -> None:
    model, ids = model_of(name).train(), token_ids(2, 12)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    by_muon = {n for n, p in trained.items() if uses_muon(n, p)}
    assert {n for n in trained if ".linear_" in n and n.endswith(".weight")} <= by_muon
    assert not {n for n in by_muon if n.endswith(("conv_weight", "A_log", "dt_bias", "norm_weight"))}
    before = {n: p.detach().clone() for n, p in trained.items()}
    optimizer = Optimizer(trained.items(), OptimizerConfig(kind="muon", lr=1e-3))
    losses = []
    for _ in range(4):
        loss, _ = gradients(model, ids)
        losses.append(loss.item())
        optimizer.step(1e-3)
    assert losses[-1] < losses[0]
    moved = {n for n, p in trained.items() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in trained.items() if p.grad is not None}
    for n in by_muon & moved:
        assert (trained[n] - before[n]).square().mean().sqrt() < 0.1, n


RECIPES: dict[str, Callable[[], te.Recipe]] = {
    "current": te.Float8CurrentScaling,
    "mxfp8": te.MXFP8BlockScaling,
    "blockwise": te.Float8BlockScaling,
    "nvfp4": te.NVFP4BlockScaling,
}


@pytest.mark.sentinels("gated_delta-nvfp4", "mamba2-current", "short_convolution-mxfp8", "pools-blockwise")
@pytest.mark.parametrize("kind", RECIPES)
@every_model
def test_stored_weights(name: str, kind: str, tmp_path: Path) -> None:
    """They compute what the recipe computes of the others, are trained, and come back from a folder."""
    recipe, ids = RECIPES[kind](), token_ids(2, 16)
    exact = model_of(name)
    exact.save_pretrained(tmp_path / "exact")
    stored = GPTModel.from_pretrained(tmp_path / "exact", recipe=recipe)
    quantized = {n for n, p in stored.named_parameters() if isinstance(p, te.QuantizedTensor)}
    assert quantized == {
        n for n, p in exact.named_parameters() if ".linear_" in n and n.endswith(".weight") and p.dim() > 1
    }
    with te.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(stored.eval()(ids).logits, exact(ids).logits)
    stored.save_pretrained(tmp_path / "stored")
    again = GPTModel.from_pretrained(tmp_path / "stored", recipe=recipe).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, stored(ids).logits)
    with te.quantized_model_init(recipe=recipe):
        fresh = GPTModel(exact.config).train()
    optimizer, losses = te.FusedAdamW(fresh.parameters(), lr=5e-3), []
    for _ in range(4):
        with te.autocast(recipe=recipe):
            loss = fresh(ids, labels=ids, return_logits=False).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


@on_ranks(2)
@pytest.mark.sentinels("by_channel", "pools")
@pytest.mark.parametrize("name", MODELS)
def test_sharded_training_is_that_of_one_process(name: str) -> None:
    """The mean over ranks of the gradients is the gradient of the mean loss, but for the order of sums."""
    whole, sharded = model_of(name).train(), model_of(name).train()
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for rank in range(2):
        ids = token_ids(2, 12, seed=rank)
        (whole(ids, labels=ids, return_logits=False).loss / 2).backward()
    ids = token_ids(2, 12, seed=dist.get_rank())
    sharded(ids, labels=ids, return_logits=False).loss.backward()
    for (key, ours), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (expected.grad is None), key
        if expected.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6, msg=key)
