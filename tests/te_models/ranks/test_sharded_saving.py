"""Models that FSDP2 shards are saved whole, on two ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from te_models import GPTModel, MLPConfig
from te_models.checkpoints import CheckpointError
from te_models.layers import FusedAdamW, QuantizedTensor, quantized_model_init, recipe
from tests.build import tiny, tiny_moe, token_ids
from tests.compare import same_bits
from tests.ranks import on_ranks

WIDE = {"hidden_size": 64, "mlp": MLPConfig(ffn_hidden_size=64)}
"""Every weight's rows are a multiple of 64: two shards of whole 32-blocks. Those of the 61 tokens are not equal."""
CONFIGS = {"dense": tiny(**WIDE), "moe": tiny_moe(moe_ffn_hidden_size=32).replace(**WIDE)}
CASES = {
    "dense-plain": (2,),
    "moe-plain": (1, 2),
    "moe-plain-copies": (2, 1),
    "dense-mxfp8": (2,),
    "moe-mxfp8": (2,),
    "dense-current": (2,),
    "moe-nvfp4": (1, 2),
}
"""KIND-STORAGE: the shape of the mesh; one of two dimensions holds copies along the first."""


def build(kind: str, storage: str) -> GPTModel:
    """Equal in every process."""
    torch.manual_seed(0)
    stored = storage != "plain"
    with quantized_model_init(enabled=stored, recipe=recipe(storage) if stored else None):
        return GPTModel(CONFIGS[kind])


def sharded(kind: str, storage: str, shape: tuple[int, ...]) -> GPTModel:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    model = build(kind, storage)
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@on_ranks(2)
@pytest.mark.sentinels("dense-plain", "dense-mxfp8", "moe-plain-copies")
@pytest.mark.parametrize("case", CASES)
def test_a_model_is_saved_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Before a step it is the unsharded model; after one, what the ranks compute is what a new model reads."""
    (kind, storage, *_), shape = case.split("-"), CASES[case]
    model, ids = sharded(kind, storage, shape), token_ids(2, 7)
    model.save_pretrained(tmp_path / "saved")
    dist.barrier()
    saved, whole = GPTModel.from_pretrained(tmp_path / "saved"), build(kind, storage)
    for (name, a), b in zip(whole.stored_tensors(), dict(saved.stored_tensors()).values(), strict=True):
        assert type(a) is type(b), name
        assert same_bits(a, b) if isinstance(a, QuantizedTensor) else torch.equal(a, b), name
    assert any(isinstance(p, QuantizedTensor) for p in saved.parameters()) is (storage != "plain")
    optimizer = FusedAdamW(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "trained")
    dist.barrier()
    with torch.no_grad():
        assert torch.equal(GPTModel.from_pretrained(tmp_path / "trained")(ids).logits, model(ids).logits)


@on_ranks(2)
def test_every_rank_says_that_it_cannot_write() -> None:
    model = sharded("dense", "plain", (2,))
    with pytest.raises((CheckpointError, OSError)):
        model.save_pretrained("/proc/no/such/folder")


@on_ranks(2)
@pytest.mark.slow
def test_a_transformers_model_says_what_to_do(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from te_models.hf import TEConfig, TEModelForCausalLM

    gpt = sharded("dense", "plain", (2,))
    model = TEModelForCausalLM(TEConfig(config=gpt.config.to_dict()), gpt=gpt)
    assert isinstance(model, transformers.PreTrainedModel)
    for state_dict in (None, model.state_dict()):
        with pytest.raises(ValueError, match=r"shared by several ranks; allowed: model\.gpt\.save_pretrained"):
            model.save_pretrained(tmp_path / "refused", state_dict=state_dict)
