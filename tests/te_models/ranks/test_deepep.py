"""Tokens that travel by deep_ep: the logits and gradients of all-to-all, on two ranks and on four, with a stand-in for
the library; what it cannot do is refused in a sentence."""

import contextlib
import functools
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from te_models import GPTModel, ModelConfig, RouterConfig, generate, take_expert_load
from te_models.compile.compile_model import compile_model
from te_models.layers import autocast, recipe
from te_models.layers.distributed import deepep
from te_models.layers.tensor.fsdp import local_part
from te_models.parallel import ParallelDims, parallelize
from te_models.parallel.sharding import shards_experts_apart
from tests.build import VARIANTS, heads, one_layer, tiny_moe, token_ids
from tests.compare import refused
from tests.ranks import on_ranks
from tests.te_models.ranks import deep_ep_stand_in as stand_in

BATCH, LENGTH = 2, 16  # of each rank
MODELS = {
    **{name: VARIANTS[name] for name in ("moe", "moe_sigmoid_groups", "moe_shared", "moe_biases", "moe_on_input")},
    # each rank has fewer experts than a token chooses
    "top3": tiny_moe(moe_router_topk=3),
    "dropping": tiny_moe(moe_router_topk=3, num_moe_experts=8, moe_expert_capacity_factor=0.75),
    "dropping_on_input": tiny_moe(
        RouterConfig(score="sigmoid", normalize=False, apply_on_input=True), moe_expert_capacity_factor=0.6
    ),
}
BFLOAT16_BOUND = 4 * 2.0**-8
"""Four roundings to bfloat16, of all entries the same way."""


@contextlib.contextmanager
def with_stand_in() -> Iterator[None]:
    """Inside, deep_ep is the stand-in, which works on a CPU."""
    with mock.patch.dict(sys.modules), mock.patch.object(deepep, "DEVICE", "cpu"):
        stand_in.install()
        yield


on_ranks_with_deep_ep = functools.partial(on_ranks, within=with_stand_in)


@contextlib.contextmanager
def sending(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tokens travel in this dtype."""
    with mock.patch.object(deepep, "DTYPE", dtype), mock.patch.object(stand_in, "SENT", dtype):
        yield


def both(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, **groups: object) -> tuple[GPTModel, GPTModel]:
    """The model by all-to-all and the one by deep_ep, started from one seed."""
    models = []
    for dispatch in ("all_to_all", "deepep"):
        torch.manual_seed(0)
        models.append(
            GPTModel(config, dtype=dtype, expert_dispatch=dispatch, **(groups or {"ep_group": dist.group.WORLD}))
        )
    return models[0], models[1]


def distance(got: Tensor, expected: Tensor) -> float:
    """The length of the difference against the length of what is expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def compare(
    models: tuple[GPTModel, GPTModel], ids: Tensor, bound: float, *, named: str | None = None, mixed: bool = False
) -> None:
    """Logits, losses, loads and every gradient, of one step."""
    outputs = []
    for model in models:
        with autocast(enabled=named is not None, recipe=recipe(named or "mxfp8")), torch.autocast("cpu", enabled=mixed):
            outputs.append(model(ids, labels=ids))
        outputs[-1].loss.backward()
    loads = [take_expert_load(model).metrics() for model in models]  # all ranks', before one may fail
    expected, got = outputs
    assert loads[0] == loads[1] and torch.equal(got.tokens_per_expert, expected.tokens_per_expert)
    assert distance(got.logits, expected.logits) <= bound, f"logits: {distance(got.logits, expected.logits):.1e}"
    assert distance(got.loss, expected.loss) <= bound
    for key, p in models[0].named_parameters():
        gradient = models[1].get_parameter(key).grad
        assert p.grad is not None and gradient is not None, key
        if p.grad.any():
            assert distance(gradient, p.grad) <= bound, f"gradient of {key}: {distance(gradient, p.grad):.1e}"
        else:
            assert not gradient.any(), f"gradient of {key}"


def own_ids(seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return token_ids(batch, length, seed=100 * seed + dist.get_rank())


@on_ranks_with_deep_ep(2)
@pytest.mark.sentinels("moe_shared-float32", "moe_biases-bfloat16", "top3-bfloat16", "dropping_on_input-float32")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_all_to_all(name: str, precision: str) -> None:
    """In float32, to the order of sums of K terms; in bf16, but for one more rounding of each rank's part of a sum, and
    in one layer, because the next one's router may decide otherwise."""
    if precision == "float32":
        with sending(torch.float32):
            compare(both(MODELS[name], torch.float32), own_ids(), 1e-6)
    else:
        compare(both(one_layer(MODELS[name])), own_ids(), BFLOAT16_BOUND)


@on_ranks_with_deep_ep(2)
def test_ranks_whose_experts_get_no_token() -> None:
    """The second rank's experts get no token at all, and one of the first's neither."""
    config = tiny_moe(RouterConfig(score="sigmoid", expert_bias=True), num_moe_experts=6)
    with sending(torch.float32):
        models = both(config, torch.float32)
        for model in models:
            for name, buffer in model.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.copy_(torch.tensor([0.0, -9.0, 0.0, -9.0, -9.0, -9.0]))
        compare(models, own_ids(), 1e-6)


@on_ranks_with_deep_ep(2)
def test_each_rank_has_another_number_of_tokens() -> None:
    """Each rank has a number of tokens of its own, over several steps."""
    with sending(torch.float32):
        for seed in range(3):
            compare(both(MODELS["top3"], torch.float32), own_ids(seed, 1, 3 + 4 * dist.get_rank() + seed), 1e-6)


@on_ranks_with_deep_ep(2)
def test_rows_are_quantized_after_they_arrive() -> None:
    """Rows are quantized after they arrive."""
    for name in ("mxfp8", "current"):
        compare(both(one_layer(tiny_moe())), own_ids(), 0.12, named=name)


@on_ranks_with_deep_ep(2)
def test_tokens_travel_in_bfloat16_under_autocast() -> None:
    """float32 parameters under torch's autocast: tokens travel in bfloat16, in which the experts compute."""
    compare(both(one_layer(tiny_moe()), torch.float32), own_ids(), BFLOAT16_BOUND, mixed=True)


@on_ranks_with_deep_ep(2)
def test_what_is_computed_again_travels_again() -> None:
    """What is computed again in the backward pass travels again."""
    _, model = both(MODELS["moe_shared"])
    ids, gradients = own_ids(), []
    for again in (False, True):
        model.zero_grad()
        model.activation_checkpointing = again
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(got, expected)


@on_ranks_with_deep_ep(2)
def test_generation_is_that_of_all_to_all() -> None:
    """Token after token; one rank is done before the other."""
    with sending(torch.float32):
        models = both(tiny_moe(), torch.float32)
        prompt = own_ids(batch=1, length=5)
        expected, got = (generate(model, prompt, 6) for model in models)
        assert torch.equal(got, expected)
        end = int(expected[0, 5]) if dist.get_rank() == 0 else None
        expected, got = (generate(model, prompt, 6, eos_token_id=end) for model in models)
        assert torch.equal(got, expected)


@on_ranks_with_deep_ep(2)
def test_a_layer_sends_its_tokens_once_in_either_pass() -> None:
    """A layer sends its tokens once and their sums once in either pass, with the weights' gradients on the way back."""
    _, model = both(one_layer(tiny_moe()))
    stand_in.Buffer.calls.clear()
    ids = own_ids()
    loss = model(ids, labels=ids).loss
    assert stand_in.Buffer.calls == ["dispatch", "combine"]
    loss.backward()
    assert stand_in.Buffer.calls == ["dispatch", "combine", "dispatch again", "combine weights"]
    received = deepep.dispatch_tokens(
        torch.ones(3, 32, dtype=torch.bfloat16),
        torch.ones(3, 2),
        torch.tensor([[0, 1], [0, 2], [4, 3]]),  # twice the first rank; each once; no expert, and the second rank
        4,
        dist.group.WORLD.group_name,
    )
    assert received.x.shape[0] == 2 * dist.get_world_size()
    assert received.rows == (3, 2)[dist.get_rank()] * dist.get_world_size()
    assert received.chosen.tolist() == [2, 1, 1, 1]
    mine = ([[0, 1], [0, -1]], [[-1, 0], [-1, 1]])[dist.get_rank()]
    assert received.experts.tolist() == mine * dist.get_world_size()


@on_ranks_with_deep_ep(2)
def test_layers_share_a_buffer_that_grows() -> None:
    """All layers and models share a group's buffer; larger tokens, or settings that ask for more, make a larger one."""
    made = stand_in.Buffer.made
    ids = own_ids()
    for model in (*both(tiny_moe()), both(one_layer(tiny_moe()))[1]):
        model(ids)
    before = len(made)
    both(tiny_moe())[1](ids)
    assert len(made) == before
    both(tiny_moe().replace(hidden_size=256))[1](ids)
    hint = stand_in.Buffer.get_combine_config(2).get_nvl_buffer_size_hint(256 * 2, 2)  # the larger of the two
    assert len(made) == before + 1 and made[-1].num_nvl_bytes == hint
    more = stand_in.Config(20, 12)
    with mock.patch.object(stand_in.Buffer, "get_dispatch_config", staticmethod(lambda ranks: more)):
        both(tiny_moe())[1](ids)
    hint = more.get_nvl_buffer_size_hint(32 * 2, 2)
    assert len(made) == before + 2 and (made[-1].num_nvl_bytes, made[-1].num_rdma_bytes) == (hint, 0)


@on_ranks_with_deep_ep(2)
def test_whole_experts_beside_split_layers() -> None:
    """Whole experts beside split layers: each rank sends its share of the tokens, of which there is an odd number."""
    dims = ParallelDims(
        ranks=dist.get_world_size(),
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        expert_model_parallel_size=dist.get_world_size(),
    )
    with sending(torch.float32):
        models = both(tiny_moe(), torch.float32, **dims.build_mesh("cpu").model_groups)
        compare(models, token_ids(3, 5, seed=dist.get_rank() // 2), 1e-6)


@on_ranks_with_deep_ep(2)
def test_layers_that_fsdp2_shards() -> None:
    """Layers that FSDP2 shards over the ranks, over which the experts are distributed."""
    mesh = ParallelDims(ranks=2, data_parallel_shard_size=2, expert_model_parallel_size=2).build_mesh("cpu")
    if not shards_experts_apart():
        models = both(one_layer(tiny_moe()), **mesh.model_groups)
        refused(lambda: parallelize(models[0], mesh, device="cpu"), "data_parallel_shard_size = 1, or torch 2.13")
        return
    models = [parallelize(model, mesh, device="cpu") for model in both(one_layer(tiny_moe()), **mesh.model_groups)]
    ids = own_ids()
    for model in models:
        model(ids, labels=ids).loss.backward()
    for expected, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
        expected, got = local_part(expected.grad), local_part(got.grad)
        assert distance(got, expected) <= BFLOAT16_BOUND or not expected.any()


@on_ranks_with_deep_ep(4)
@pytest.mark.slow
def test_four_ranks_split_layers_and_experts() -> None:
    """Layers and the insides of experts split over two, experts distributed over two; then whole experts over four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    groups = {f"{name}_group": mesh.get_group(name) for name in ("ep", "tp")}
    with sending(torch.float32):
        models = both(MODELS["top3"], torch.float32, **groups)
        compare(models, token_ids(BATCH, LENGTH, seed=mesh.get_local_rank("ep")), 1e-6)
    test_whole_experts_beside_split_layers.__wrapped__()


@on_ranks_with_deep_ep(2)
def test_a_graph_ends_before_each_call_or_says_why_not() -> None:
    """A graph ends before each call where it may, and says why where it may not; our own ways to compile refuse."""
    _, model = both(one_layer(tiny_moe()))
    experts, results = model.decoder.layers[0].mlp, []
    x = torch.randn(BATCH, LENGTH, model.config.hidden_size, dtype=torch.bfloat16)
    for run in (experts, torch.compile(experts, backend="eager")):
        experts.zero_grad()
        y, _ = run(x)
        y.float().square().mean().backward()
        results.append([y, *(p.grad.clone() for p in experts.parameters())])
    for got, expected in zip(results[1], results[0], strict=True):
        assert distance(got, expected) <= BFLOAT16_BOUND
    torch._dynamo.reset()
    refused(lambda: torch.compile(experts, backend="eager", fullgraph=True)(x), deepep.UNTRACEABLE, error=Exception)
    for mode in ("whole", "block"):
        refused(lambda mode=mode: compile_model(model, mode), deepep.UNTRACEABLE, error=Exception)


@on_ranks_with_deep_ep(2)
def test_what_deep_ep_cannot_do_is_refused() -> None:
    """Each in one sentence: at construction, or, what a call decides, by the call."""

    def new(config: ModelConfig = tiny_moe(), **options: object) -> GPTModel:  # noqa: B008 (a constant)
        groups = {"ep_group": dist.group.WORLD, "expert_dispatch": "deepep"}
        return GPTModel(config, **{"dtype": torch.bfloat16, **groups, **options})

    def mesh(**sizes: int) -> dict[str, object]:
        return ParallelDims(ranks=2, **sizes).build_mesh("cpu").model_groups

    allowed = "allowed with expert_dispatch 'deepep'"
    padding = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    cases = {
        f"moe.moe_pad_expert_input_to_capacity is True; {allowed}: False": lambda: new(tiny_moe(**padding)),
        f"hidden_size is 36; {allowed}: a multiple of 8": lambda: new(
            tiny_moe().replace(hidden_size=36, attention=heads(None, kv_channels=8))
        ),
        f"expert_tensor_parallel_size is 2; {allowed}: 1 or": lambda: new(
            **{"ep_group": None, **mesh(expert_tensor_parallel_size=2)}
        ),
        "the compute dtype torch.float32; allowed: torch.bfloat16": lambda: new(dtype=torch.float32)(own_ids()),
    }
    for sentence, call in cases.items():
        refused(call, sentence, error=Exception)
    with mock.patch.object(deepep, "DEVICE", "cuda"):
        refused(
            new,
            "expert_dispatch is 'deepep' on the device cpu; allowed: a CUDA device, or 'all_to_all'",
            error=Exception,
        )
        later = new(device="meta")
        refused(
            lambda: later.to_empty(device="cpu").eval()(own_ids()),
            "expert_dispatch is 'deepep' on the device cpu",
            error=Exception,
        )
    with mock.patch.object(stand_in.Buffer, "get_dispatch_config", side_effect=AssertionError("no settings")):
        refused(
            new,
            "expert_dispatch is 'deepep' for 2 ranks; allowed: the numbers of ranks that deep_ep has",
            error=Exception,
        )
    with mock.patch.dict(sys.modules, {"deep_ep": None}):
        refused(
            new,
            "expert_dispatch 'deepep' needs the package 'deep_ep', which is built from https://github",
            error=Exception,
        )
        new(ep_group=None)  # a model that sends nothing needs no library
        new(tiny_moe(), expert_dispatch="all_to_all")


@on_ranks_with_deep_ep(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"), [("moe", "float32"), ("top3", "float32"), ("top3", "bfloat16"), ("dropping", "float32")]
)
def test_four_ranks_are_those_of_all_to_all(name: str, precision: str) -> None:
    test_a_model_is_that_of_all_to_all.__wrapped__(name, precision)
