"""Models whose experts are distributed over ranks: the whole model's logits and gradients, at the cost of each rank's
own experts."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from te_models import ConfigError, GPTModel, RouterConfig, generate, take_expert_load
from te_models.layers import autocast, recipe
from te_models.layers.collectives import all_to_all
from te_models.layouts import Facts, check_layout_rules
from te_models.training.ranks.data_parallel import Ranks, average_gradients
from tests.build import VARIANTS, one_layer, tiny, tiny_moe, token_ids
from tests.compare import ROUNDED, the_same
from tests.ranks import on_ranks, own_part

BATCH, LENGTH = 2, 16  # of each rank
MODELS = {
    **{
        name: VARIANTS[name]
        for name in ("moe", "moe_sigmoid_groups", "moe_shared", "moe_biases", "moe_on_input", "moe_latent")
    },
    "top3": tiny_moe(moe_router_topk=3),
    # each rank has fewer experts than a token chooses
    "two": tiny_moe(num_moe_experts=2),
    "two_on_input": tiny_moe(RouterConfig(score="sigmoid", normalize=False, apply_on_input=True), num_moe_experts=2),
}
PRECISIONS = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "mxfp8": (torch.bfloat16, "mxfp8")}
DISPATCHES = ("all_to_all", "all_gather")


def both(config, dtype: torch.dtype = torch.float32, dispatch: str = "all_to_all") -> tuple[GPTModel, GPTModel]:
    """The whole model and the distributed one, started from one seed."""
    models = []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(0)
        models.append(GPTModel(config, params_dtype=dtype, ep_group=group, expert_dispatch=dispatch))
    for model in models:
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "router" in name and "bias" in name:
                    tensor.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    return models[0], models[1]


@on_ranks(2)
@pytest.mark.sentinels(
    "moe-float32-all_to_all",
    "moe_sigmoid_groups-bfloat16-all_gather",
    "moe_shared-mxfp8-all_to_all",
    "moe_biases-float32-all_gather",
)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_distributed_experts_are_the_whole_model(name: str, precision: str, dispatch: str) -> None:
    """Logits and gradients are those of the whole model: to the last bit by all-to-all, which adds up a token's results
    where the token is; by all-gather with two experts per token, because adding two numbers has no order."""
    dtype, named = PRECISIONS[precision]
    config, ranks = MODELS[name], dist.get_world_size()
    exact = config.moe.moe_router_topk == 2 or dispatch == "all_to_all"
    whole, split = both(config, dtype, dispatch)
    for key, p in split.named_parameters():
        expected = whole.get_parameter(key)
        assert torch.equal(p, own_part(expected) if ".experts." in key else expected), f"{key} does not start the same"
    ids = token_ids(ranks * BATCH, LENGTH)
    with autocast(enabled=named is not None, recipe=recipe(named or "mxfp8")):
        together, got = whole(ids, labels=ids), split(own_part(ids), labels=own_part(ids))
        alone = whole(own_part(ids), labels=own_part(ids))
    the_same(got.logits, own_part(together.logits), exact, "logits")
    assert torch.equal(got.tokens_per_expert, alone.tokens_per_expert)
    for kind in ("loss", "aux_loss", "load_balancing_loss", "z_loss"):  # router losses are of a rank's own tokens
        the_same(getattr(got, kind), getattr(alone, kind), exact, kind)
    got.loss.backward()
    alone.loss.backward()
    gradients = {key: p.grad.clone() for key, p in whole.named_parameters()}
    for key, p in split.named_parameters():
        if ".experts." not in key:
            the_same(p.grad, gradients[key], exact, f"gradient of {key}")
    if config.moe.aux_loss_coeff or config.moe.z_loss_coeff:
        return  # whose gradients reach earlier experts, and are not those of the batch as one
    whole.zero_grad()
    together.loss.backward()
    for key, p in split.named_parameters():
        if ".experts." in key:  # the sum of the ranks' losses is so many times the mean over the batch
            the_same(p.grad, ranks * own_part(whole.get_parameter(key).grad), exact, f"gradient of {key}")


@on_ranks(2)
def test_experts_without_tokens() -> None:
    """One rank gets no token at all, and an expert of the other none either."""
    whole, split = both(tiny_moe(RouterConfig(score="sigmoid", expert_bias=True), num_moe_experts=6))
    for model in (whole, split):
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.tensor([0.0, -9.0, 0.0, -9.0, -9.0, -9.0]))
    ids = token_ids(4, LENGTH)
    together, got = whole(ids, labels=ids), split(own_part(ids), labels=own_part(ids))
    assert torch.equal(got.logits, own_part(together.logits))
    together.loss.backward()
    got.loss.backward()
    for key, p in split.named_parameters():
        if ".experts." in key:
            the_same(p.grad, 2 * own_part(whole.get_parameter(key).grad), True, key)
            used = p.grad.flatten(1).abs().amax(1) > 0
            assert used.tolist() == ([True, False, True] if dist.get_rank() == 0 else [False] * 3), key


@on_ranks(2)
@pytest.mark.slow
def test_every_rank_drops_what_one_rank_drops() -> None:
    """Every rank drops what one rank with its tokens drops; padded or not, by either way, the numbers are the same."""
    rank = dist.get_rank()
    for dispatch, pad, factor, on_input in itertools.product(DISPATCHES, (False, True), (0.6, 1.5), (False, True)):
        router = MODELS["moe_on_input"].moe.router if on_input else RouterConfig()
        values = {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": pad, "aux_loss_coeff": 0.01}
        whole, split = both(tiny_moe(router, bias=True, **values), dispatch=dispatch)
        ids, what = token_ids(BATCH, LENGTH, seed=rank), f"{dispatch} {pad} {factor} {on_input}"
        alone, got = whole(ids, labels=ids), split(ids, labels=ids)
        the_same(got.logits, alone.logits, False, what)
        alone.loss.backward()
        got.loss.backward()
        for key, p in split.named_parameters():
            expected = whole.get_parameter(key).grad
            if ".experts." in key:
                dist.all_reduce(expected)
            the_same(p.grad, own_part(expected) if ".experts." in key else expected, False, f"{what} gradient of {key}")
        loads = [take_expert_load(model).metrics() for model in (whole, split)]
        assert loads[0] == loads[1] and (sum(loads[0]["dropped_tokens"]) > 0) == (factor < 1), (what, loads)


@on_ranks(2)
def test_losses_by_sequence_and_over_the_global_batch() -> None:
    """Losses by sequence average over ranks to those of all sequences, over the global batch compare with all ranks'
    tokens: on two ranks as on one that has both their sequences."""
    for kind in ("seq_aux_loss", "global_aux_loss"):
        config = tiny_moe(aux_loss_coeff=0.1, moe_router_load_balancing_type=kind, num_moe_experts=6)
        for dispatch in DISPATCHES:
            whole, split = both(config, dispatch=dispatch)
            for seed in range(2):  # micro-batches
                ids = token_ids(2 * BATCH, LENGTH, seed=seed)
                got = split(own_part(ids), labels=own_part(ids))
                with alone():
                    together = whole(ids, labels=ids)
                mean = got.load_balancing_loss.detach().clone()
                dist.all_reduce(mean)
                the_same(mean / 2, together.load_balancing_loss.detach(), False, f"{kind} {dispatch} {seed}")
                (got.loss / 2).backward()
                together.loss.backward()
            for key, p in split.named_parameters():
                expected, gradient = whole.get_parameter(key).grad, p.grad
                if ".experts." not in key:
                    dist.all_reduce(gradient)
                the_same(
                    gradient, own_part(expected) if ".experts." in key else expected, False, f"{kind} gradient of {key}"
                )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, models count the tokens of this rank as if there were no others."""
    with mock.patch("te_models.model.moe.router.group_of_all", lambda: None):
        yield


def compiled_cells(backend: str) -> list[tuple[str, str, bool, str | None, dict[str, object]]]:
    """What is compiled by a backend: both ways to dispatch, rows that are quantized in the graph, and capacities."""
    cells: list[tuple[str, str, bool, str | None, dict[str, object]]] = []
    for dispatch in DISPATCHES:  # a training run's shapes are fixed
        cells += [
            (backend, dispatch, dynamic, None, {}) for dynamic in ((True, False) if backend == "aot_eager" else (True,))
        ]
    cells += [(backend, "all_to_all", False, named, {}) for named in ("delayed", "current", "block", "mxfp8")]
    cells += [(backend, "all_to_all_quantized", False, named, {}) for named in ("block", "mxfp8")]
    if backend != "inductor":
        by_sequence = {"moe_expert_capacity_factor": 0.75, "moe_router_load_balancing_type": "seq_aux_loss"}
        for pad in (False, True):
            changes = by_sequence | {"moe_pad_expert_input_to_capacity": pad}
            cells.append((backend, "all_to_all", True, None, changes))
    if backend == "aot_eager":
        cells.append((backend, "all_to_all", True, None, {"moe_router_load_balancing_type": "global_aux_loss"}))
    return cells


@on_ranks(2)
@pytest.mark.parametrize(
    ("backend", "dispatch", "dynamic", "named", "changes"),
    [cell for backend in ("eager", "aot_eager", "inductor") for cell in compiled_cells(backend)],
)
@pytest.mark.slow
def test_one_graph_whatever_the_router_decides(
    backend: str, dispatch: str, dynamic: bool, named: str | None, changes: dict[str, object]
) -> None:
    """One graph forward and backward, the same whatever the router decides, and for any number of tokens if dynamic.
    named: a recipe to run under."""
    config = one_layer(tiny_moe(aux_loss_coeff=0.01, shared_expert_intermediate_size=40, **changes))
    _, split = both(config, dispatch=dispatch)
    run = torch.compile(split, fullgraph=True, backend=backend, dynamic=dynamic)
    shapes = [(2, 16), (2, 16), (3, 12) if dynamic else (2, 16), (2, 16)]
    region = contextlib.nullcontext() if named is None else autocast(recipe=recipe(named))
    with torch._dynamo.config.patch(error_on_recompile=True), region:
        for seed, shape in enumerate(shapes):
            # in the last round every token is the same one, so all choose the same experts
            ids = token_ids(*shape, seed + 10 * dist.get_rank()) if seed < 3 else torch.zeros(shape, dtype=torch.int64)
            split.zero_grad()
            take_expert_load(split)
            expected = split(ids, labels=ids)
            expected.loss.backward()
            gradients = [p.grad.clone() for p in split.parameters()]
            split.zero_grad()
            take_expert_load(split)
            got = run(ids, labels=ids)
            got.loss.backward()
            # kernels that add up in another order round some numbers to their neighbours in FP8
            limit = 0.05 if named is not None and backend == "inductor" else ROUNDED
            the_same(got.logits.detach(), expected.logits.detach(), False, "logits", limit)
            for p, gradient in zip(split.parameters(), gradients, strict=True):
                the_same(p.grad, gradient, False, "gradient", limit)


@on_ranks(2)
def test_ranks_with_different_numbers_of_tokens() -> None:
    """Ranks with different numbers of tokens: by all-gather all of them say so, by all-to-all each gets its own
    right."""
    ids = token_ids(1, 4 + dist.get_rank())
    _, gathered = both(tiny_moe(), dispatch="all_gather")
    with pytest.raises(RuntimeError, match="have different numbers of tokens"):
        gathered(ids)
    whole, split = both(tiny_moe())
    the_same(split(ids).logits, whole(ids).logits, False, "logits")


@on_ranks(2)
def test_prompts_of_each_rank_are_continued() -> None:
    """Prompts of each rank are continued as the whole model does, also where one rank is done before the other."""
    whole, split = both(tiny_moe())
    prompt = own_part(token_ids(4, 5))
    expected = generate(whole, prompt, 8)
    assert torch.equal(generate(split, prompt, 8), expected)
    # the first rank's row ends at once, and is filled up while the other's goes on
    end = int(expected[0, 5]) if dist.get_rank() == 0 else None
    got, alone = (generate(model, prompt[:1], 8, eos_token_id=end) for model in (split, whole))
    assert got.shape == (1, 13) and torch.equal(got[:, : alone.shape[1]], alone)
    if dist.get_rank() == 0:
        assert alone.shape == (1, 6) and bool((got[:, 6:] == end).all())


@on_ranks(2)
@pytest.mark.slow
def test_recomputed_layers_repeat_what_ranks_tell_each_other() -> None:
    """Recomputing layers in the backward pass repeats what ranks tell each other."""
    _, split = both(tiny_moe())
    ids = own_part(token_ids(4, LENGTH))
    split(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in split.parameters()]
    split.zero_grad()
    split.activation_checkpointing = True
    split(ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(split.parameters(), expected, strict=True))


@on_ranks(2)
def test_every_ranks_experts_have_their_own_scales() -> None:
    """Every rank's experts have scales of their own, those of the whole model's experts."""
    whole, split = both(tiny_moe())
    ids = token_ids(4, LENGTH)
    for _ in range(3):
        with autocast(recipe=recipe("delayed")):
            together = whole(ids, labels=ids)
        with autocast(recipe=recipe("delayed")):
            got = split(own_part(ids), labels=own_part(ids))
        together.loss.backward()
        (got.loss / 2).backward()
    for key in ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2"):
        for i in range(2):
            name = f"decoder.layers.{i}.{key}"
            expected = whole.get_submodule(name).fp8_scale.chunk(2, dim=1)[dist.get_rank()]
            assert torch.equal(split.get_submodule(name).fp8_scale[:2], expected[:2]), name
            assert not torch.equal(expected[:2], torch.ones_like(expected[:2]))
    assert torch.equal(got.logits, own_part(together.logits))


def sent_bytes(call: Callable[[], object]) -> int:
    """Return the bytes of the rows that one all-to-all after another sends in a call, from 1 KiB on."""
    sizes = []

    def counting(x: Tensor, *args: object) -> Tensor:
        sizes.append(x.numel() * x.element_size())
        return all_to_all(x, *args)

    with mock.patch("te_models.layers.distributed.expert_parallel.all_to_all", counting):
        call()
    return sum(size for size in sizes if size >= 1024)


@on_ranks(2)
@pytest.mark.slow
def test_rows_travel_quantized() -> None:
    """Rows that travel quantized give the numbers of rows that are quantized on arrival, but for the gradients of the
    experts' own parameters, which contract rounded rows; two of the four ways are halved."""
    padded = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
    wide: dict[str, Any] = {"moe_ffn_hidden_size": 160, "num_moe_experts": 4}
    cases = [
        (f"{name} {kind}", config, kind)
        for kind in ("block", "mxfp8")
        for name, config in {
            "plain": tiny_moe(**wide),
            "biased": tiny_moe(bias=True, **wide),
            "padded": tiny_moe(**wide, **padded),
            "on input": tiny_moe(MODELS["moe_on_input"].moe.router, **wide),
        }.items()
    ]
    ids = token_ids(BATCH, LENGTH, seed=dist.get_rank())
    for what, config, kind in cases:
        config = config.replace(hidden_size=160)
        _, plain = both(config, torch.bfloat16)
        _, quantized = both(config, torch.bfloat16, "all_to_all_quantized")
        sent = []
        for model in (plain, quantized):

            def step(model: GPTModel = model, kind: str = kind) -> None:
                with autocast(recipe=recipe(kind)):
                    model(ids, labels=ids).loss.backward()

            sent.append(sent_bytes(step))
        # one byte a number and scales, of two, in two of four directions
        assert 0.74 < sent[1] / sent[0] < 0.8, (what, sent)
        with autocast(recipe=recipe(kind)):
            assert torch.equal(quantized(ids).logits, plain(ids).logits), what
        for key, p in quantized.named_parameters():
            expected = plain.get_parameter(key).grad
            if ".experts." not in key:
                assert torch.equal(p.grad, expected), f"{what}: gradient of {key}"
            elif expected.abs().amax() > 0:
                error = float((p.grad - expected).float().norm() / expected.float().norm())
                # a power-of-two scale of another block rounds alike what is not very small beside it
                limit = 0.05 if key.endswith("linear_fc2.bias") else 1e-5
                assert error < limit, f"{what}: gradient of {key} {error:.1e}"
        plain.eval(), quantized.eval()
        assert torch.equal(quantized(ids).logits, plain(ids).logits), f"{what} without a recipe"


@on_ranks(2)
@pytest.mark.slow
def test_rows_of_other_formats_do_not_travel_quantized() -> None:
    """A format with a scale for all rows would give other numbers before they travel than after."""
    _, model = both(tiny_moe(), torch.bfloat16, "all_to_all_quantized")
    for kind in ("delayed", "current", "nvfp4"):
        says = "rows cannot travel quantized as the input of the experts"
        with pytest.raises(ValueError, match=says), autocast(recipe=recipe(kind)):
            model(token_ids(1, 4))


@on_ranks(2)
@pytest.mark.slow
def test_averaged_gradients_are_those_of_the_whole_batch() -> None:
    """What the trainer does with gradients makes them those of the whole model's loss on the whole batch."""
    whole, split = both(tiny_moe())
    ids = token_ids(4, LENGTH)
    whole(ids, labels=ids).loss.backward()
    split(own_part(ids), labels=own_part(ids)).loss.backward()
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    average_gradients(split.parameters(), ranks, distributed=split.expert_parameters())
    for key, p in split.named_parameters():
        expected = whole.get_parameter(key).grad
        the_same(p.grad, own_part(expected) if ".experts." in key else expected, False, key)


@pytest.mark.parametrize(
    ("config", "ranks", "layout", "message"),
    [
        (tiny(), 2, "grouped", "moe is None: a model without experts has none to distribute"),
        (tiny_moe(), 3, "grouped", "num_moe_experts is 4, which 3 ranks cannot share equally"),
        (tiny_moe(), 2, "per-gemm", "expert_layout is 'per-gemm'; allowed where experts are distributed: 'grouped'"),
    ],
)
def test_what_cannot_be_distributed_is_refused(config, ranks: int, layout: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout_rules(Facts(model=config, ep=ranks, distributed=True, expert_layout=layout))
