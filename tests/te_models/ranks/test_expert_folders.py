"""Folders of models whose experts are distributed over ranks: each rank reads its own experts, and together they save
the whole model."""

import contextlib
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, expected_tensors, open_checkpoint, quantize, verify
from te_models.checkpoints.mapping.quantized_format import stored_fields
from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts
from te_models.layers import GroupedTensor, QuantizedTensor, recipe
from te_models.training.ranks.data_parallel import Ranks, average_gradients
from tests.build import heads, tiny_moe, token_ids
from tests.compare import Reads, raw, the_same
from tests.ranks import on_ranks, own_part
from tests.te_models.hf_models import hf_model

BATCH, LENGTH = 2, 16  # of each rank


@pytest.fixture
def folder(case: str, tmp_path: Path) -> Path:
    """Where the model of a case was saved."""
    torch.manual_seed(0)
    if case == "hf":
        with warnings.catch_warnings(action="ignore"):
            hf_model("qwen3_moe").save_pretrained(tmp_path / "hf")
        return tmp_path / "hf"
    # enough columns for blocks of 32 and of 16, rows that no block of 128 divides
    config = tiny_moe(num_moe_experts=4, moe_ffn_hidden_size=160, shared_expert_intermediate_size=48)
    if case.startswith("split"):  # every part is whole blocks of 32, with two ranks
        attention = heads(kv_channels=32)
        config = tiny_moe(moe_ffn_hidden_size=128, shared_expert_intermediate_size=64).replace(attention=attention)
    GPTModel(config).save_pretrained(tmp_path / "plain")
    if case not in ("plain", "split"):
        quantize(tmp_path / "plain", tmp_path / case, case.removeprefix("split-"))
        return tmp_path / case
    return tmp_path / "plain"


def stored(model: GPTModel) -> dict[str, Tensor]:
    """What files hold of a model: its plain tensors, and the fields of quantized ones."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.stored_tensors():
        found.update(stored_fields(name, tensor) if isinstance(tensor, QuantizedTensor) else {name: tensor})
    return found


@on_ranks(2)
@pytest.mark.sentinels("hf", "mxfp8")
@pytest.mark.parametrize("case", ["plain", "hf", "current", "block", "mxfp8", "nvfp4"])
def test_each_rank_reads_its_experts_and_all_save_the_whole_model(case: str, folder: Path) -> None:
    """Each rank reads its experts and what every rank has, bit for bit, and nothing else; what is saved is the whole
    model again."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    whole = GPTModel.from_pretrained(folder).eval()
    with Reads() as reads:
        split = GPTModel.from_pretrained(folder, device_mesh=mesh).eval()
    expected, got = stored(whole), stored(split)
    sizes = [sum(t.numel() * t.element_size() for t in tensors.values()) for tensors in (got, expected)]
    assert reads.bytes == sizes[0] < 0.8 * sizes[1], (reads.bytes, sizes)
    for key, tensor in got.items():
        values = own_part(expected[key]) if ".experts." in key else expected[key]
        assert torch.equal(raw(tensor), raw(values)), key
    ids = token_ids(2 * dist.get_world_size(), LENGTH)
    the_same(split(own_part(ids)).logits, own_part(whole(ids).logits), False, "logits")
    split.save_pretrained(folder.with_name("saved"))
    assert verify(folder, folder.with_name("saved")).equal


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain"])
def test_experts_are_quantized_while_they_are_loaded(case: str, folder: Path) -> None:
    """Experts that are quantized while they are loaded are those of the whole model loaded so."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    models = [GPTModel.from_pretrained(folder, recipe=recipe("mxfp8"), device_mesh=m) for m in (None, mesh)]
    expected, got = map(stored, models)
    assert any(isinstance(p, GroupedTensor) for p in models[1].parameters())
    for key, tensor in got.items():
        values = own_part(expected[key]) if ".experts." in key else expected[key]
        assert torch.equal(raw(tensor), raw(values)), key


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["split", "split-mxfp8"])
def test_four_ranks_also_split_layers(case: str, folder: Path) -> None:
    """Four ranks: layers and the insides of experts are split over two, experts are distributed over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    tp, ep = mesh.get_local_rank("tp"), mesh.get_local_rank("ep")
    whole = GPTModel.from_pretrained(folder)
    with Reads() as reads:
        split = GPTModel.from_pretrained(folder, device_mesh=mesh)
    assert reads.bytes == sum(t.numel() * t.element_size() for t in stored(split).values())
    shapes = expected_tensors(whole.config)
    owned = parts(whole.config, shapes, ShardPlace(tp_rank=tp, tp_size=2, ep_rank=ep, ep_size=2))
    experts = split.get_parameter("decoder.layers.0.mlp.experts.linear_fc1.weight")
    assert experts.shape == (2, 128, 32) and shapes["decoder.layers.0.mlp.experts.linear_fc1.weight"] == (4, 256, 32)

    def part(key: str, t: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        for d, ranges in owned[key].cuts().items():
            t = torch.cat([t.narrow(d, begin, end - begin) for begin, end in ranges], d)
        return t

    def values(t: Tensor) -> Tensor:
        return t.detach().dequantize(torch.float32) if isinstance(t, QuantizedTensor) else t.detach()

    for key, p in split.named_parameters():
        assert torch.equal(values(p), part(key, values(whole.get_parameter(key)))), key
    ids = token_ids(4, LENGTH)
    own = ids.chunk(2)[ep]
    together, got = whole(ids, labels=ids), split(own, labels=own)
    the_same(got.logits, together.logits.chunk(2)[ep], False, "logits")
    if case == "split":
        together.loss.backward()
        got.loss.backward()
        ranks, group = Ranks(ep, 2), mesh.get_group("ep")
        average_gradients(split.parameters(), ranks, distributed=split.expert_parameters(), group=group)
        for key, p in split.named_parameters():
            the_same(p.grad, part(key, whole.get_parameter(key).grad), False, f"gradient of {key}")
    split.save_pretrained(folder.with_name("saved"))
    dist.barrier()
    assert verify(folder, folder.with_name("saved")).equal


def test_a_scale_that_is_no_number_is_found_by_the_rank_that_owns_it(tmp_path: Path) -> None:
    GPTModel(tiny_moe()).save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "fp8", "mxfp8")
    scale = "decoder.layers.1.mlp.experts.linear_fc1.weight_scale_inv"
    file = tmp_path / "fp8" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        metadata = opened.metadata()
    tensors[scale][3, 0, 0] = 255
    save_file(tensors, file, metadata)
    (tmp_path / "fp8/manifest.json").unlink()
    with open_checkpoint(tmp_path / "fp8") as checkpoint:
        shapes = expected_tensors(checkpoint.config)
        for rank in range(2):
            place = ShardPlace(ep_rank=rank, ep_size=2)
            owned = parts(checkpoint.config, shapes, place)
            params = {name: torch.empty(owned[name].shape(shape)) for name, shape in shapes.items()}
            with pytest.raises(CheckpointError, match=scale) if rank == 1 else contextlib.nullcontext():
                checkpoint.load_into(params, place=place)
