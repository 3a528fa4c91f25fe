"""What each process of test_expert_parallel does: this module is run with RESULTS, FOLDERS and the cases.

Every rank builds or loads the whole model and the one whose experts are distributed, gives the latter its own part of a
batch, and compares. Its outcomes, "ok" or a traceback by case, are written to RESULTS.<rank>. FOLDERS holds a model
folder for each case of FOLDER_CASES.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from te_models import GPTModel, RouterConfig, generate, take_expert_load
from te_models.checkpoints import expected_tensors, verify
from te_models.checkpoints.mapping.quantized_format import stored_fields
from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts
from te_models.layers import GroupedTensor, QuantizedTensor, autocast, recipe
from te_models.layers.collectives import all_to_all
from te_models.training.ranks.data_parallel import Ranks, average_gradients
from tests.layers.bits import raw
from tests.ranks import report_cases
from tests.te_models.configs import VARIANTS, one_layer, tiny_moe, token_ids
from tests.te_models.split_model_ranks import Reads

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
MODEL_CASES = [
    f"{model}-{precision}-{dispatch}" for model in MODELS for precision in PRECISIONS for dispatch in DISPATCHES
]
FOLDER_CASES = ("plain", "hf", "current", "block", "mxfp8", "nvfp4")
CASES = (
    *MODEL_CASES,
    "empty_experts",
    "capacity",
    "sequences_and_global_batch",
    "compiled",
    "compiled_gathered",
    "compiled_recipes",
    "compiled_quantized",
    "compiled_capacity",
    "uneven",
    "generated",
    "checkpointed",
    "delayed",
    "quantized_rows",
    "quantized_rows_refused",
    "averaged",
    *FOLDER_CASES,
    "stored_by_recipe",
)
FOUR_RANKS = ("split_and_distributed_plain", "split_and_distributed_mxfp8")
FOLDERS = Path(sys.argv[2] if len(sys.argv) > 2 else "")


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


def mine(t: Tensor) -> Tensor:
    """This rank's part along the first dimension."""
    return t.chunk(dist.get_world_size())[dist.get_rank()]


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference against the largest entry."""
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9))


ROUNDED = 64 * 2.0**-24
"""A sum of three float32 numbers in another order, passed through two layers."""


def the_same(got: Tensor, expected: Tensor, exact: bool, what: str, limit: float = ROUNDED) -> None:
    """exact: to the last bit; otherwise to `limit` of the largest entry."""
    if exact:
        assert torch.equal(got, expected), f"{what}: {distance(got, expected):.1e}"
    else:
        assert distance(got, expected) <= limit, f"{what}: {distance(got, expected):.1e}"


def model_case(name: str, precision: str, dispatch: str) -> None:
    """Logits and gradients are those of the whole model: to the last bit by all-to-all, which adds up a token's results
    where the token is; by all-gather with two experts per token, because adding two numbers has no order."""
    dtype, named = PRECISIONS[precision]
    config, ranks = MODELS[name], dist.get_world_size()
    exact = config.moe.moe_router_topk == 2 or dispatch == "all_to_all"
    whole, split = both(config, dtype, dispatch)
    for key, p in split.named_parameters():
        expected = whole.get_parameter(key)
        assert torch.equal(p, mine(expected) if ".experts." in key else expected), f"{key} does not start the same"
    ids = token_ids(ranks * BATCH, LENGTH)
    with autocast(enabled=named is not None, recipe=recipe(named or "mxfp8")):
        together, got = whole(ids, labels=ids), split(mine(ids), labels=mine(ids))
        alone = whole(mine(ids), labels=mine(ids))
    the_same(got.logits, mine(together.logits), exact, "logits")
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
            the_same(p.grad, ranks * mine(whole.get_parameter(key).grad), exact, f"gradient of {key}")


def empty_experts() -> None:
    """One rank gets no token at all, and an expert of the other none either."""
    config = tiny_moe(RouterConfig(score="sigmoid", expert_bias=True), num_moe_experts=6)
    whole, split = both(config)
    for model in (whole, split):
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.tensor([0.0, -9.0, 0.0, -9.0, -9.0, -9.0]))
    ids = token_ids(4, LENGTH)
    together, got = whole(ids, labels=ids), split(mine(ids), labels=mine(ids))
    assert torch.equal(got.logits, mine(together.logits))
    together.loss.backward()
    got.loss.backward()
    for key, p in split.named_parameters():
        if ".experts." in key:
            the_same(p.grad, 2 * mine(whole.get_parameter(key).grad), True, key)
            used = p.grad.flatten(1).abs().amax(1) > 0
            assert used.tolist() == ([True, False, True] if dist.get_rank() == 0 else [False] * 3), key


def capacity() -> None:
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
            the_same(p.grad, mine(expected) if ".experts." in key else expected, False, f"{what} gradient of {key}")
        loads = [take_expert_load(model).metrics() for model in (whole, split)]
        assert loads[0] == loads[1] and (sum(loads[0]["dropped_tokens"]) > 0) == (factor < 1), (what, loads)


def sequences_and_global_batch() -> None:
    """Losses by sequence average over ranks to those of all sequences, over the global batch compare with all ranks'
    tokens: on two ranks as on one that has both their sequences."""
    for kind in ("seq_aux_loss", "global_aux_loss"):
        config = tiny_moe(aux_loss_coeff=0.1, moe_router_load_balancing_type=kind, num_moe_experts=6)
        for dispatch in DISPATCHES:
            whole, split = both(config, dispatch=dispatch)
            for seed in range(2):  # micro-batches
                ids = token_ids(2 * BATCH, LENGTH, seed=seed)
                got = split(mine(ids), labels=mine(ids))
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
                    gradient, mine(expected) if ".experts." in key else expected, False, f"{kind} gradient of {key}"
                )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, models count the tokens of this rank as if there were no others."""
    with mock.patch("te_models.model.moe.router.group_of_all", lambda: None):
        yield


def compiled(
    backend: str = "eager",
    dispatch: str = "all_to_all",
    dynamic: bool = True,
    named: str | None = None,
    **changes: object,
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


def compiled_gathered() -> None:
    compiled(dispatch="all_gather")


def compiled_recipes(backend: str = "eager") -> None:
    """Rows that come from other ranks are quantized in one graph, however many they are."""
    for named in ("delayed", "current", "block", "mxfp8"):
        torch._dynamo.reset()
        compiled(backend, dynamic=False, named=named)


def compiled_quantized(backend: str = "eager") -> None:
    for named in ("block", "mxfp8"):
        torch._dynamo.reset()
        compiled(backend, "all_to_all_quantized", dynamic=False, named=named)


def compiled_capacity(backend: str = "eager") -> None:
    for pad in (False, True):
        torch._dynamo.reset()
        values = {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": pad}
        compiled(backend, **values, moe_router_load_balancing_type="seq_aux_loss")


def compiled_backward() -> None:
    for dispatch in DISPATCHES:
        for dynamic in (True, False):  # a training run's shapes are fixed
            torch._dynamo.reset()
            compiled("aot_eager", dispatch, dynamic)
    compiled_capacity("aot_eager")
    compiled_recipes("aot_eager")
    compiled_quantized("aot_eager")
    torch._dynamo.reset()
    compiled("aot_eager", moe_router_load_balancing_type="global_aux_loss")


def compiled_by_inductor() -> None:
    for dispatch in DISPATCHES:
        torch._dynamo.reset()
        compiled("inductor", dispatch)
    compiled_recipes("inductor")
    compiled_quantized("inductor")


def uneven() -> None:
    """Ranks with different numbers of tokens: by all-gather all of them say so, by all-to-all each gets its own
    right."""
    ids = token_ids(1, 4 + dist.get_rank())
    _, gathered = both(tiny_moe(), dispatch="all_gather")
    try:
        gathered(ids)
    except RuntimeError as error:
        assert "have different numbers of tokens" in str(error)
    else:
        raise AssertionError("different numbers of tokens were accepted")
    whole, split = both(tiny_moe())
    the_same(split(ids).logits, whole(ids).logits, False, "logits")


def generated() -> None:
    """Prompts of each rank are continued as the whole model does, also where one rank is done before the other."""
    whole, split = both(tiny_moe())
    prompt = mine(token_ids(4, 5))
    expected = generate(whole, prompt, 8)
    assert torch.equal(generate(split, prompt, 8), expected)
    # the first rank's row ends at once, and is filled up while the other's goes on
    end = int(expected[0, 5]) if dist.get_rank() == 0 else None
    got, alone = (generate(model, prompt[:1], 8, eos_token_id=end) for model in (split, whole))
    assert got.shape == (1, 13) and torch.equal(got[:, : alone.shape[1]], alone)
    if dist.get_rank() == 0:
        assert alone.shape == (1, 6) and bool((got[:, 6:] == end).all())


def checkpointed() -> None:
    """Recomputing layers in the backward pass repeats what ranks tell each other."""
    _, split = both(tiny_moe())
    ids = mine(token_ids(4, LENGTH))
    split(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in split.parameters()]
    split.zero_grad()
    split.activation_checkpointing = True
    split(ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(split.parameters(), expected, strict=True))


def delayed() -> None:
    """Every rank's experts have scales of their own, those of the whole model's experts."""
    whole, split = both(tiny_moe())
    ids = token_ids(4, LENGTH)
    for _ in range(3):
        with autocast(recipe=recipe("delayed")):
            together = whole(ids, labels=ids)
        with autocast(recipe=recipe("delayed")):
            got = split(mine(ids), labels=mine(ids))
        together.loss.backward()
        (got.loss / 2).backward()
    for key in ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2"):
        for i in range(2):
            name = f"decoder.layers.{i}.{key}"
            expected = whole.get_submodule(name).fp8_scale.chunk(2, dim=1)[dist.get_rank()]
            assert torch.equal(split.get_submodule(name).fp8_scale[:2], expected[:2]), name
            assert not torch.equal(expected[:2], torch.ones_like(expected[:2]))
    assert torch.equal(got.logits, mine(together.logits))


def sent_bytes(call: Callable[[], object]) -> int:
    """Return the bytes of the rows that one all-to-all after another sends in a call, from 1 KiB on."""
    sizes = []

    def counting(x: Tensor, *args: object) -> Tensor:
        sizes.append(x.numel() * x.element_size())
        return all_to_all(x, *args)

    with mock.patch("te_models.layers.distributed.expert_parallel.all_to_all", counting):
        call()
    return sum(size for size in sizes if size >= 1024)


def quantized_rows() -> None:
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


def quantized_rows_refused() -> None:
    """A format with a scale for all rows would give other numbers before they travel than after."""
    _, model = both(tiny_moe(), torch.bfloat16, "all_to_all_quantized")
    for kind in ("delayed", "current", "nvfp4"):
        try:
            with autocast(recipe=recipe(kind)):
                model(token_ids(1, 4))
        except ValueError as error:
            assert "rows cannot travel quantized as the input of the experts" in str(error), error
        else:
            raise AssertionError(f"{kind} was accepted")


def averaged() -> None:
    """What the trainer does with gradients makes them those of the whole model's loss on the whole batch."""
    whole, split = both(tiny_moe())
    ids = token_ids(4, LENGTH)
    whole(ids, labels=ids).loss.backward()
    split(mine(ids), labels=mine(ids)).loss.backward()
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    average_gradients(split.parameters(), ranks, distributed=split.expert_parameters())
    for key, p in split.named_parameters():
        expected = whole.get_parameter(key).grad
        the_same(p.grad, mine(expected) if ".experts." in key else expected, False, key)


def stored(model: GPTModel) -> dict[str, Tensor]:
    """What files hold of a model: its plain tensors, and the fields of quantized ones."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.stored_tensors():
        found.update(stored_fields(name, tensor) if isinstance(tensor, QuantizedTensor) else {name: tensor})
    return found


def folder_case(folder: Path, saved: Path) -> None:
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
        values = mine(expected[key]) if ".experts." in key else expected[key]
        assert torch.equal(raw(tensor), raw(values)), key
    ids = token_ids(2 * dist.get_world_size(), LENGTH)
    the_same(split(mine(ids)).logits, mine(whole(ids).logits), False, "logits")
    split.save_pretrained(saved)
    assert verify(folder, saved).equal


def stored_by_recipe() -> None:
    """Experts that are quantized while they are loaded are those of the whole model loaded so."""
    folder = FOLDERS / "plain"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    models = [GPTModel.from_pretrained(folder, recipe=recipe("mxfp8"), device_mesh=m) for m in (None, mesh)]
    expected, got = map(stored, models)
    assert any(isinstance(p, GroupedTensor) for p in models[1].parameters())
    for key, tensor in got.items():
        values = mine(expected[key]) if ".experts." in key else expected[key]
        assert torch.equal(raw(tensor), raw(values)), key


def split_and_distributed(name: str) -> None:
    """Four ranks: layers and the insides of experts are split over two, experts are distributed over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    tp, ep = mesh.get_local_rank("tp"), mesh.get_local_rank("ep")
    whole = GPTModel.from_pretrained(FOLDERS / name)
    with Reads() as reads:
        split = GPTModel.from_pretrained(FOLDERS / name, device_mesh=mesh)
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
    if name == "split":
        together.loss.backward()
        got.loss.backward()
        ranks, group = Ranks(ep, 2), mesh.get_group("ep")
        average_gradients(split.parameters(), ranks, distributed=split.expert_parameters(), group=group)
        for key, p in split.named_parameters():
            the_same(p.grad, part(key, whole.get_parameter(key).grad), False, f"gradient of {key}")
    split.save_pretrained(FOLDERS / f"{name}-saved")
    dist.barrier()
    assert verify(FOLDERS / name, FOLDERS / f"{name}-saved").equal


def split_and_distributed_plain() -> None:
    split_and_distributed("split")


def split_and_distributed_mxfp8() -> None:
    split_and_distributed("split-mxfp8")


def case_of(name: str) -> Callable[[], None]:
    """Of MODEL_CASES, of FOLDER_CASES, or a function here."""
    if name in MODEL_CASES:
        return functools.partial(model_case, *name.split("-"))
    if name in FOLDER_CASES:
        return functools.partial(folder_case, FOLDERS / name, FOLDERS / f"{name}-saved")
    return globals()[name]


if __name__ == "__main__":
    report_cases({name: case_of(name) for name in sys.argv[3:]}, sys.argv[1])
