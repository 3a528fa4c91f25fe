"""A model that is split and sharded over four ranks has the values of the whole one, and each rank its own parts."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from te_models import GPTModel, MLPConfig
from te_models.checkpoints import open_checkpoint
from te_models.config import ConfigError
from te_models.layers import QuantizedTensor, quantized_model_init, recipe
from te_models.layers.tensor.fsdp import local_part
from te_models.model.parallel import process_groups
from te_models.parallel import ParallelDims, ParallelMesh, parallelize
from te_models.parallel.parts import ModelParts, load_own_parts
from te_models.parallel.sharding import shards_experts_apart
from te_models.training.config import OptimizerConfig
from te_models.training.optimizer.adamw import Optimizer, norm_over
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.ranks.experts import expert_ranks
from te_models.training.ranks.reduction import reduce_gradients
from tests.build import VARIANTS, parallel, tiny, token_ids
from tests.compare import Reads, raw, refused
from tests.ranks import on_ranks

NAMES = (
    *("hsdp", "tp2_fsdp2", "ep2_fsdp4", "ep2_tp2_fsdp2", "tp2", "etp2", "ep2_etp2_fsdp4", "tp2_etp1_ep2_fsdp2"),
    *("tp2_etp1_ep4", "tp2_etp4", "tp2_etp1"),
)
LAYOUTS = {name: parallel(name.replace("_", " ")) for name in NAMES}
LAYOUTS["hsdp"]["data_parallel_shard_size"] = 2
LAYOUTS["tp2_fsdp2"]["data_parallel_shard_size"] = -1
MODELS = ("dense", "tied", "biases", "qk_full", "latent", "moe_shared", "moe_biases", "moe_latent")
CONFIGS = {name: VARIANTS[name] for name in MODELS}
SIX_EXPERTS = VARIANTS["moe_shared"].replace(moe=VARIANTS["moe_shared"].moe.replace(num_moe_experts=6))
DENSE = {"hsdp", "tp2_fsdp2", "tp2"}
LAYOUTS_OF_SIX = {"fsdp4": {"data_parallel_shard_size": 4}}


def of_experts(test: Callable[..., None]) -> Callable[..., None]:
    """With a torch that cannot shard experts apart from the other layers, a layout that has to is refused."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        layout = arguments.get("layout", "ep2_fsdp4")
        if shards_experts_apart() or not ("ep2" in layout and "fsdp" in layout):
            test(**arguments)
        else:
            refused(lambda: test(**arguments), "data_parallel_shard_size = 1, or torch 2.13")

    return run


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    """Where the model of a name was saved."""
    torch.manual_seed(3)
    GPTModel(CONFIGS[name]).save_pretrained(tmp_path / name)
    return tmp_path / name


def mesh_of(layout: str) -> ParallelMesh:
    sizes = (LAYOUTS | LAYOUTS_OF_SIX)[layout]
    return ParallelDims(ranks=dist.get_world_size(), **sizes).build_mesh("cpu")


@on_ranks(4)
def test_a_layout_has_one_mesh() -> None:
    """Each has process groups, with their threads and connections."""
    assert mesh_of("ep2_fsdp4") is mesh_of("ep2_fsdp4") is not mesh_of("hsdp")


def split(config: Any, mesh: ParallelMesh, dtype: torch.dtype = torch.float32) -> GPTModel:
    """A model without data over the ranks that build it together."""
    return GPTModel(config, dtype=dtype, device="meta", **process_groups(mesh))


def has_the_values_of(model: GPTModel, whole: GPTModel) -> None:
    """Every part is the one that a checkpoint would look for in the whole model's tensor, bit for bit."""
    expected = dict(whole.stored_tensors())
    for name, part in ModelParts(model).stored().items():
        right = part.of_whole(expected[name].detach())
        assert part.tensor.shape == right.shape, (name, part.tensor.shape, right.shape)
        assert torch.equal(raw(part.tensor), raw(right)), name


@on_ranks(4)
@of_experts
@pytest.mark.sentinels("tied-tp2_fsdp2")
@pytest.mark.parametrize(
    ("name", "layout"), [(n, its) for n in MODELS for its in LAYOUTS if CONFIGS[n].moe or its in DENSE]
)
def test_a_model_starts_as_the_whole_one(name: str, layout: str) -> None:
    """From one seed."""
    config, mesh = CONFIGS[name], mesh_of(layout)
    torch.manual_seed(5)
    whole = GPTModel(config)
    torch.manual_seed(5)
    model = split(config, mesh)
    assert parallelize(model, mesh, device="cpu") is model
    has_the_values_of(model, whole)


@on_ranks(4)
@of_experts
@pytest.mark.sentinels("moe_biases-ep2_fsdp4-None", "moe_shared-hsdp-current")
@pytest.mark.parametrize(
    ("name", "layout", "weights"),
    [
        ("moe_biases", "ep2_fsdp4", None),
        ("moe_shared", "ep2_tp2_fsdp2", None),
        ("moe_shared", "ep2_fsdp4", "mxfp8"),
        ("moe_shared", "hsdp", "current"),
    ],
)
def test_a_model_starts_again(name: str, layout: str, weights: str | None) -> None:
    """With the bits that it was built with, from the same seed, after steps and with gathered parameters."""
    mesh, options = mesh_of(layout), {} if weights is None else {"weights": recipe(weights)}
    torch.manual_seed(5)
    model = split(CONFIGS[name], mesh)
    parallelize(model, mesh, device="cpu", reshard_after_forward="never", **options)
    if weights is not None:
        assert any(isinstance(local_part(p), QuantizedTensor) for p in model.parameters())

    def bits() -> dict[str, torch.Tensor]:
        return {key: raw(part.tensor).clone() for key, part in ModelParts(model).stored().items()}

    built, ids = bits(), token_ids(2, 16)
    for seed in (6, 5):
        model(ids, labels=ids, return_logits=False).loss.backward()
        torch.manual_seed(seed)
        model.reset_parameters()
        same = [key for key, found in bits().items() if torch.equal(found, built[key])]
        assert (len(same) == len(built)) == (seed == 5), (seed, same)


@on_ranks(4)
@of_experts
def test_one_layer_at_a_time_is_filled() -> None:
    """When a layer is filled, those before it are shards, and those after it have no data."""
    config, mesh = CONFIGS["moe_shared"], mesh_of("ep2_fsdp4")
    model, seen = split(config, mesh), 0

    def fill(part: torch.nn.Module) -> None:
        nonlocal seen
        seen += 1
        for layer in (layer for layer in model.decoder.layers if layer is not part):
            for parameter in layer.parameters():
                assert parameter.is_meta or local_part(parameter) is not parameter

    parallelize(model, mesh, device="cpu", fill=fill)
    assert seen == config.num_layers + 3  # embedding, final norm, output layer


@on_ranks(4)
@of_experts
@pytest.mark.sentinels("moe_shared-ep2_tp2_fsdp2")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (n, its)
        for n in ("dense", "moe_shared")
        for its in ("hsdp", "tp2_fsdp2", "ep2_tp2_fsdp2", "ep2_etp2_fsdp4", "tp2_etp1_ep2_fsdp2")
        if CONFIGS[n].moe or its in DENSE
    ],
)
def test_a_rank_loads_its_own_parts(name: str, layout: str, folder: Path) -> None:
    """Each rank reads as many bytes as its parts have."""
    config, mesh = CONFIGS[name], mesh_of(layout)
    whole = GPTModel.from_pretrained(folder, dtype=torch.float32)
    model = split(config, mesh)
    parallelize(model, mesh, device="cpu", fill=lambda part: None)
    with open_checkpoint(folder, verify=False) as checkpoint, Reads() as reads:
        load_own_parts(model, checkpoint)
    has_the_values_of(model, whole)
    own = sum(part.tensor.nbytes for part in ModelParts(model).stored().values())
    assert reads.bytes == own < 0.75 * sum(t.nbytes for _, t in whole.stored_tensors()), (reads.bytes, own)


@on_ranks(4)
@of_experts
@pytest.mark.sentinels("moe_shared-tp2_etp1_ep2_fsdp2")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("six", "fsdp4"),
        *(("moe_shared", its) for its in LAYOUTS if "etp" in its or its in ("hsdp", "ep2_fsdp4", "ep2_tp2_fsdp2")),
    ],
)
def test_gradients_are_those_of_one_rank(name: str, layout: str) -> None:
    """Also their norm, over whatever the parts are divided; a router in float32 is not sharded.

    Split layers round bfloat16 sums elsewhere, and a token near a tie would go to another expert: there, tokens go to
    all experts, by weight."""
    config, mesh = (CONFIGS | {"six": SIX_EXPERTS})[name], mesh_of(layout)
    if mesh.dims.tensor_model_parallel_size > 1:
        config = config.replace(moe=config.moe.replace(moe_router_topk=config.moe.num_moe_experts))
    torch.manual_seed(5)
    whole = GPTModel(config, dtype=torch.bfloat16)
    torch.manual_seed(5)
    model = split(config, mesh, torch.bfloat16)
    routers = [key for key, _ in model.named_parameters() if key.endswith("router.weight")]
    for each in (whole, model):
        for key in routers:
            each.get_parameter(key).data = each.get_parameter(key).data.float()
    parallelize(model, mesh, device="cpu")
    for key in routers:
        parameter = model.get_parameter(key)
        assert parameter.dtype is torch.float32 and local_part(parameter) is parameter
        parameter.data.copy_(whole.get_parameter(key))
    group, ranks = mesh.data_group, mesh.dims.data_ranks
    ids = token_ids(2 * ranks, 16).chunk(ranks)
    for its in ids:
        (whole(its, labels=its, return_logits=False).loss / ranks).backward()
    mine = ids[group.rank()]
    model(mine, labels=mine, return_logits=False).loss.backward()
    parts = ModelParts(model)
    optimizer = Optimizer(
        model.named_parameters(),
        OptimizerConfig(clip_grad_norm=None),
        experts=expert_ranks(model.expert_parameters(), mesh),
        groups=parts.groups(),
    )
    reduce_gradients(optimizer, Ranks(group.rank(), ranks, group=group))
    for key, parameter in model.named_parameters():
        expected = whole.get_parameter(key).grad
        found = parts.like(key, parameter, local_part(parameter.grad))
        right = found.of_whole(expected)
        distance = (found.tensor.float() - right.float()).norm() / expected.float().norm()
        assert distance < 0.05, (key, distance)
    norm, whole_norm = optimizer.clip_gradients(), torch.stack([p.grad.float().norm() for p in whole.parameters()])
    torch.testing.assert_close(norm, whole_norm.norm(), rtol=0.02, atol=0)


def stored_whole_and_sharded(width: int, mesh: Any) -> tuple[GPTModel, GPTModel]:
    """Return a model whose weights are stored in MXFP8, whole, and the same one in shards."""
    config = tiny(hidden_size=64, mlp=MLPConfig(ffn_hidden_size=width))
    torch.manual_seed(5)
    with quantized_model_init(recipe=recipe("mxfp8")):
        whole = GPTModel(config)
    torch.manual_seed(5)
    return whole, parallelize(split(config, mesh), mesh, device="cpu", weights=recipe("mxfp8"))


@on_ranks(4)
def test_stored_weights_are_shards_of_the_whole() -> None:
    """Weights with blocks are quantized before they are cut: the bytes of one rank's weights."""
    mesh = mesh_of("hsdp")
    whole, model = stored_whole_and_sharded(64, mesh)
    found = 0
    for name, parameter in model.named_parameters():
        local, expected = local_part(parameter), whole.get_parameter(name)
        if isinstance(local, QuantizedTensor):
            rank, rows = mesh.fsdp.get_local_rank("dp_shard"), local.shape[0]
            found += 1
            right = expected.dequantize()[rank * rows : (rank + 1) * rows]
            assert torch.equal(local.dequantize(), right), name
    assert found


@on_ranks(4)
def test_unequal_shards_are_saved(tmp_path: Path) -> None:
    """Of 64 rows in blocks of 32 two of four ranks have none; files have the whole model's bits."""
    whole, model = stored_whole_and_sharded(96, mesh_of("fsdp4"))
    weight = local_part(model.get_parameter("decoder.layers.0.self_attention.linear_proj.weight"))
    assert isinstance(weight, QuantizedTensor) and weight.shape[0] == (32 if dist.get_rank() < 2 else 0)
    model.save_pretrained(tmp_path / "unequal")
    if dist.get_rank() == 0:
        found = dict(GPTModel.from_pretrained(tmp_path / "unequal").stored_tensors())
        for name, right in whole.stored_tensors():
            left = found[name].detach()
            fields = right.fields if isinstance(right, QuantizedTensor) else {"": right.detach()}
            for field, value in fields.items():
                assert torch.equal(raw(left.fields[field] if field else left), raw(value)), (name, field)


@on_ranks(4)
@pytest.mark.slow
def test_experts_are_not_padded() -> None:
    """Four ranks share six experts equally, along another dimension than the experts'."""
    mesh = mesh_of("fsdp4")
    torch.manual_seed(5)
    whole = GPTModel(SIX_EXPERTS)
    torch.manual_seed(5)
    model = split(SIX_EXPERTS, mesh)
    parallelize(model, mesh, device="cpu")
    has_the_values_of(model, whole)
    for shard, expert in zip(model.expert_parameters(), whole.expert_parameters(), strict=True):
        assert local_part(shard).untyped_storage().nbytes() * 4 == expert.untyped_storage().nbytes()


@on_ranks(4)
@of_experts
def test_shards_stay_in_main_memory() -> None:
    """Every sharded parameter is one that FSDP2 copies to the device for a pass; without shards there is none."""
    mesh = mesh_of("ep2_fsdp4")
    config = CONFIGS["moe_shared"]
    with mock.patch("torch.distributed.fsdp.fully_shard", wraps=fully_shard) as calls:
        model = parallelize(split(config, mesh), mesh, device="cpu", cpu_offload=True)
    policies = [call.kwargs.get("offload_policy") for call in calls.call_args_list]
    assert policies and all(isinstance(policy, CPUOffloadPolicy) for policy in policies)
    ids = token_ids(2, 8)
    model(ids, labels=ids).loss.backward()
    with pytest.raises(ValueError, match=r"^cpu_offload is True, and no parameter is sharded; allowed: "):
        parallelize(split(config, mesh_of("tp2")), mesh_of("tp2"), cpu_offload=True)


@on_ranks(4)
def test_a_rank_without_a_part_takes_part_in_a_norm() -> None:
    """A rank without a part of a vector takes part in its norm all the same."""
    mine = [torch.tensor(3.0)] if dist.get_rank() == 1 else []
    group = dist.group.WORLD
    assert group is not None and float(norm_over((group,), mine, torch.device("cpu"))) == 3.0


@on_ranks(4)
def test_other_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^the layout has 2 ranks, and the default process group 4; allowed: as many$"
    ):
        ParallelDims(ranks=2).build_mesh("cpu")


@pytest.mark.parametrize(
    ("sizes", "filled"),
    [
        ({}, (8, 1)),
        ({"data_parallel_shard_size": -1}, (1, 8)),
        ({"data_parallel_shard_size": 4}, (2, 4)),
        ({"data_parallel_shard_size": -1, "data_parallel_replicate_size": 2}, (2, 4)),
        ({"data_parallel_shard_size": -1, "tensor_model_parallel_size": 2}, (1, 4)),
        ({"tensor_model_parallel_size": 8, "expert_tensor_parallel_size": 8}, (1, 1)),
    ],
)
def test_sizes_that_are_left_open_are_filled(sizes: dict[str, int], filled: tuple[int, int]) -> None:
    dims = ParallelDims(ranks=8, **sizes)
    assert (dims.data_parallel_replicate_size, dims.data_parallel_shard_size) == filled
    assert dims.data_ranks == filled[0] * filled[1]
    assert dims == ParallelDims.of(dims.sizes() | {"another": 3}, 8)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"data_parallel_shard_size": 3},
            "data_parallel_shard_size is 3; allowed: a divisor of the number of ranks, 8",
        ),
        ({"data_parallel_shard_size": 0}, "is 0; allowed: a positive integer, or -1 for all ranks that are left"),
        ({"tensor_model_parallel_size": -1}, "tensor_model_parallel_size is -1; allowed: a positive integer"),
        (
            {"tensor_model_parallel_size": 5},
            "tensor_model_parallel_size is 5; allowed: a divisor of the number of ranks",
        ),
        (
            {"data_parallel_shard_size": 4, "tensor_model_parallel_size": 4},
            "data_parallel_shard_size is 4; allowed: a divisor of the number of ranks, 2",
        ),
        (
            {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2},
            "data_parallel_replicate_size is 2; allowed: 4, which the other sizes leave of 8 ranks",
        ),
        (
            {"data_parallel_shard_size": 2, "expert_model_parallel_size": 4},
            "expert_model_parallel_size is 4; allowed: a divisor of data_parallel_shard_size, 2",
        ),
        ({"pipeline_model_parallel_size": 3}, "pipeline_model_parallel_size is 3; allowed: a divisor of the number"),
        ({"context_parallel_size": 3}, "context_parallel_size is 3; allowed: a divisor of the number of ranks, 8"),
        (
            {"data_parallel_shard_size": 2, "expert_tensor_parallel_size": 4},
            "expert_tensor_parallel_size is 4; allowed: a divisor of data_parallel_shard_size, 2",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4, "expert_model_parallel_size": 4},
            "expert_model_parallel_size is 4; allowed: a divisor of data_parallel_replicate_size x "
            "tensor_model_parallel_size / expert_tensor_parallel_size, 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ParallelDims(ranks=8, **sizes)
    assert sentence in str(raised.value)
