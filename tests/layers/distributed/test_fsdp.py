"""FSDP2 over quantized primary weights, on two ranks: gathered weights, steps and states are those of one process."""

import copy
import functools
import io
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import te_models.layers as te
from te_models.layers.quantizer.schema import cut_multiple
from te_models.layers.tensor.fsdp import shards_of_blocks
from tests.build import weight_quantizers
from tests.compare import refused, same_bits
from tests.ranks import on_ranks, own_part

U = 2.0**-24  # unit roundoff of float32
RANKS, EXPERTS, OUT, IN, TOKENS = 2, 4, 256, 128, 256
LR, EPS = 0.01, 0.02
FORMATS = weight_quantizers()
KINDS = [(name, grouped) for name in FORMATS for grouped in (False, True)]


def build(quantizer: te.Quantizer, grouped: bool, seed: int = 0) -> nn.Module:
    """A layer with a quantized primary weight, the same in every process."""
    torch.manual_seed(seed)
    module = te.GroupedLinear(EXPERTS, IN, OUT, bias=False) if grouped else te.Linear(IN, OUT, bias=False)
    value = torch.randn(module.weight.shape) / 8
    module.weight = nn.Parameter(quantizer.quantize_grouped(value) if grouped else quantizer.quantize(value))
    return module


def run(module: nn.Module, x: Tensor) -> Tensor:
    """Apply the layer; the experts take equal shares of the tokens, interleaved so that each rank has them all."""
    if not isinstance(module, te.GroupedLinear):
        return module(x)
    rows = x.view(-1, EXPERTS, IN).transpose(0, 1).reshape(-1, IN)
    y = module(rows, torch.full((EXPERTS,), len(x) // EXPERTS))
    return y.view(EXPERTS, -1, OUT).transpose(0, 1).reshape(-1, OUT)


def gathered(module: nn.Module) -> te.QuantizedTensor:
    """The weight as FSDP2 gathers it for a forward pass, copied."""
    assert isinstance(module, FSDPModule)
    module.unshard()
    weight = module.weight.detach().clone()
    module.reshard()
    return weight


@on_ranks(2)
@pytest.mark.sentinels("float8-False")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_shards_are_gathered_bit_for_bit(name: str, grouped: bool) -> None:
    whole, module = (build(FORMATS[name], grouped) for _ in range(2))
    sharded = fully_shard(module, mesh=mesh())
    local = sharded.weight._local_tensor
    assert isinstance(sharded.weight, DTensor) and isinstance(local, te.QuantizedTensor)
    assert isinstance(local, te.GroupedTensor) == grouped and local.shape[0] == whole.weight.shape[0] // RANKS
    for _ in range(2):  # the second gather refills the buffers of the first
        weight = gathered(sharded)
        assert type(weight) is type(whole.weight) and weight.shape == whole.weight.shape
        assert weight.quantizer == whole.weight.quantizer and same_bits(weight, whole.weight)
    assert torch.equal(weight.dequantize(), whole.weight.dequantize())


@on_ranks(2)
@pytest.mark.sentinels("float8_block-True")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_a_step_equals_that_of_one_process(name: str, grouped: bool) -> None:
    """Mean square error, computed in float32 from the quantized weights, and FusedAdamW."""
    whole, module = (build(FORMATS[name], grouped) for _ in range(2))
    fully_shard(module, mesh=mesh())
    torch.manual_seed(1)
    x, target = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    w = whole.weight.detach().dequantize(torch.float64)

    optimizers = [te.FusedAdamW(m.parameters(), lr=LR, eps=EPS) for m in (whole, module)]
    (run(whole, x) - target).square().mean().backward()
    (run(module, own_part(x)) - own_part(target)).square().mean().backward()
    assert type(whole.weight.grad) is Tensor
    gradient = module.weight.grad.full_tensor()

    # |dy| is 2 |y - target| / N, and its error is that of y, a sum over IN; a gradient is a sum over tokens
    tokens = x.double().view(-1, EXPERTS, IN).transpose(0, 1) if grouped else x.double()
    size, magnitude = TOKENS * OUT, tokens.abs()
    goal = target.double().view(-1, EXPERTS, OUT).transpose(0, 1) if grouped else target.double()
    y = tokens @ w.mT
    y_error = 2 * (IN + 2) * U * (magnitude @ w.mT.abs())
    dy, dy_error = 2 * (y - goal).abs() / size, 2 * y_error / size
    bound = 2 * (tokens.shape[-2] + 4) * U * (dy.mT @ magnitude) + dy_error.mT @ magnitude * (1 + 1e-3)
    error = (gradient - whole.weight.grad).double().abs()
    assert (error <= bound).all(), f"gradient: {(error / bound).max():.3g} of the bound"

    for optimizer in optimizers:
        optimizer.step()
    masters = [optimizer.state[m.weight]["master"] for optimizer, m in zip(optimizers, (whole, module), strict=True)]
    full = masters[1].full_tensor()
    # the first update is lr * g / (|g| + eps), whose slope is at most lr / eps; a few float32 roundings beside it
    bound = LR / EPS * bound + 8 * U * (w.abs() + LR)
    error = (full - masters[0]).double().abs()
    assert (error <= bound).all(), f"master: {(error / bound).max():.3g} of the bound"
    assert (full - w).abs().mean() > LR / 100, "the masters have not moved"
    assert same_bits(gathered(module), FORMATS[name].quantize_fields(full)), "not the quantization of the masters"


@on_ranks(2)
@pytest.mark.sentinels("block-False")
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_a_recipe_uses_the_gathered_numbers(name: str, grouped: bool) -> None:
    """Each rank's tokens being whole blocks, operands are those of one process; gradients differ by sums alone."""
    quantizer = te.recipe(name).weight_quantizer()
    whole, module = (build(quantizer, grouped) for _ in range(2))
    fully_shard(module, mesh=mesh())
    torch.manual_seed(2)
    tokens = TOKENS * EXPERTS if grouped else TOKENS
    x, slope = torch.randn(tokens, IN), torch.randn(tokens, OUT)
    with te.autocast(recipe=te.recipe(name)):
        y = run(whole, x)
        half = run(module, own_part(x))
        (y * slope).mean().backward()
        (half * own_part(slope)).mean().backward()
    torch.testing.assert_close(half, own_part(y), rtol=2 * IN * U, atol=2 * IN * U * 16)
    gradient, expected = module.weight.grad.full_tensor(), whole.weight.grad
    # quantizing changes a magnitude by at most 1/8 with these formats, but for what is tiny within its block
    magnitude = slope.abs() / slope.numel()
    if grouped:
        magnitude = magnitude.view(-1, EXPERTS, OUT).transpose(0, 1)
        bound = magnitude.mT @ x.abs().view(-1, EXPERTS, IN).transpose(0, 1)
    else:
        bound = magnitude.mT @ x.abs()
    assert ((gradient - expected).abs() <= 2 * tokens * U * 1.3 * bound).all()
    assert gradient.abs().mean() > 1e-6


@on_ranks(2)
@pytest.mark.sentinels("float8_block_1d-False")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_torch_adamw_steps_on_shards(name: str, grouped: bool) -> None:
    whole, module = (build(FORMATS[name], grouped) for _ in range(2))
    fully_shard(module, mesh=mesh())
    te.share_scales(module)
    before = gathered(module)
    torch.manual_seed(3)
    run(module, own_part(torch.randn(TOKENS, IN))).square().mean().backward()
    whole.weight.grad = module.weight.grad.full_tensor()
    for m in (module, whole):
        torch.optim.AdamW(m.parameters(), lr=0.05, foreach=False).step()
    weight = gathered(module)
    assert same_bits(weight, whole.weight)
    assert (weight.dequantize() - before.dequantize()).abs().mean() > 0.01


@on_ranks(2)
@pytest.mark.sentinels("mxfp8-False")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_values_written_into_shards_share_the_scale(name: str, grouped: bool) -> None:
    module, other = build(FORMATS[name], grouped), build(FORMATS[name], grouped, seed=9)
    fully_shard(module, mesh=mesh())
    te.share_scales(module)
    value = other.weight.detach().dequantize()
    value[0] *= 30  # what is largest is in one shard
    with torch.no_grad():
        module.weight._local_tensor.copy_(own_part(value))
    assert same_bits(gathered(module), FORMATS[name].quantize_fields(value))


@on_ranks(2)
@pytest.mark.sentinels("float8")
@pytest.mark.parametrize("name", ["float8", "nvfp4", "nvfp4_1d"])
def test_shards_with_different_scales_are_refused(name: str) -> None:
    module = fully_shard(build(FORMATS[name], grouped=False), mesh=mesh())
    with torch.no_grad():
        module.weight._local_tensor.copy_(torch.full((OUT // RANKS, IN), 1.0 + dist.get_rank()))
    refused(lambda: gathered(module), "have different scales", "share_scales(module)")


@on_ranks(2)
@pytest.mark.sentinels("mxfp8_2d-False")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_state_dicts_load_shard_by_shard(name: str, grouped: bool) -> None:
    source, target = (fully_shard(build(FORMATS[name], grouped, seed), mesh=mesh()) for seed in (4, 5))
    te.share_scales(target)
    state = source.state_dict()
    assert isinstance(state["weight"], DTensor) and isinstance(state["weight"]._local_tensor, te.QuantizedTensor)
    local = target.weight._local_tensor
    places = [field.data_ptr() for field in local.fields.values()]
    target.load_state_dict(state)
    assert same_bits(target.weight._local_tensor, source.weight._local_tensor)
    assert [field.data_ptr() for field in target.weight._local_tensor.fields.values()] == places
    assert same_bits(gathered(target), gathered(source))


@on_ranks(2)
@pytest.mark.sentinels("nvfp4-False")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_mixed_precision_changes_no_stored_number(name: str, grouped: bool) -> None:
    """Compute and gradients in bfloat16: the weight's logical dtype follows, its bytes stay."""
    whole, module = (build(FORMATS[name], grouped) for _ in range(2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module, mesh=mesh(), mp_policy=policy)
    weight = gathered(module)
    assert weight.dtype is torch.bfloat16 and same_bits(weight, whole.weight)
    y = run(module, own_part(torch.randn(TOKENS, IN)))
    y.square().mean().backward()
    assert y.dtype is torch.bfloat16 and module.weight.grad.dtype is torch.float32
    assert module.weight.grad.full_tensor().abs().sum() > 0


@on_ranks(2)
@pytest.mark.sentinels("current-first forward pass", "current-init_state", "current-after a write")
@pytest.mark.parametrize("when", ["first forward pass", "init_state", "after a write"])
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_masters_of_shards_start_from_the_preserved_values(name: str, when: str) -> None:
    """Each rank's master is its rows of the value before quantization; a value written into shards wins over it."""
    torch.manual_seed(6)
    with te.quantized_model_init(recipe=te.recipe(name), preserve_high_precision_init_val=True):
        modules = [te.Linear(IN, OUT, bias=False), te.GroupedLinear(EXPERTS, IN, OUT, bias=False)]
    for module in modules:
        value = module.weight.get_high_precision_init_val().clone()
        fully_shard(module, mesh=mesh())
        if when == "first forward pass":
            run(module, own_part(torch.randn(TOKENS, IN))).square().mean().backward()
        else:
            te.share_scales(module)
        if when == "after a write":
            value = value.flip(0)
            with torch.no_grad():
                module.weight._local_tensor.copy_(own_part(value))
            value = gathered(module).dequantize(torch.float32)
        optimizer = te.FusedAdamW(module.parameters())
        optimizer.init_state()
        assert torch.equal(optimizer.state[module.weight]["master"]._local_tensor, own_part(value))
        assert module.weight.get_high_precision_init_val() is None


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


@functools.cache
def copies() -> DeviceMesh:
    """Shards over one rank, copies over two."""
    return init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("copies", "shards"))


@on_ranks(2)
@pytest.mark.sentinels("nvfp4_1d-False")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_copies_hold_the_whole(name: str, grouped: bool) -> None:
    """Where one rank has all shards nothing is gathered, and torch reads one tensor of a parameter."""
    whole, module = (build(FORMATS[name], grouped) for _ in range(2))
    fully_shard(module, mesh=copies())
    x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(7))
    for _ in range(2):  # the second time refills the buffers of the first
        assert same_bits(gathered(module), whole.weight)
        run(whole, x).square().mean().backward()
        run(module, own_part(x)).square().mean().backward()
    torch.testing.assert_close(module.weight.grad.full_tensor(), whole.weight.grad, rtol=1e-4, atol=1e-6)


@on_ranks(2)
@pytest.mark.sentinels("False")
@pytest.mark.parametrize("grouped", [False, True])
def test_other_dimensions_are_refused(grouped: bool) -> None:
    module = fully_shard(build(FORMATS["mxfp8"], grouped), mesh=mesh(), shard_placement_fn=lambda parameter: Shard(1))
    refused(lambda: gathered(module), "allowed: shards along the first dimension, Shard(0)")


@on_ranks(2)
def test_a_shard_in_main_memory_learns_its_group() -> None:
    """With CPUOffloadPolicy a copy of it is gathered, but the shard itself is what an optimizer writes to."""
    module = fully_shard(build(FORMATS["float8"], False), mesh=mesh())
    shard = module.weight._local_tensor
    copied = shard.to("cpu", copy=True)
    copied.fsdp_pre_all_gather(mesh(), module.weight.shape, module.weight.stride(), module, None)
    assert shard.amax_group == copied.amax_group == mesh().get_group().group_name


@on_ranks(2)
def test_a_shard_that_knows_its_group_can_be_copied() -> None:
    """With all that it holds, as an asynchronous checkpoint copies it."""
    module = fully_shard(build(FORMATS["nvfp4"], False), mesh=mesh())
    te.share_scales(module)
    shard = module.weight._local_tensor
    copied = copy.deepcopy(shard)
    assert same_bits(copied, shard) and copied.amax_group == mesh().get_group().group_name


@on_ranks(2)
def test_weight_gradients_that_come_later_are_refused() -> None:
    """They would be those of a tensor that nobody looks at any more."""
    module = fully_shard(te.Linear(IN, OUT, bias=False, delay_wgrad_compute=True), mesh=mesh())
    module(torch.randn(8, IN)).sum().backward()
    refused(module.backward_dw, "allowed: layers built without delay_wgrad_compute", error=RuntimeError)


@on_ranks(2)
def test_weights_are_kept_for_micro_batches() -> None:
    """By the first one, in which they are whole; not before."""
    torch.manual_seed(0)
    whole = te.Linear(IN, OUT, bias=False)
    module = fully_shard(copy.deepcopy(whole), mesh=mesh())
    x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(8))
    for layer in (whole, module):
        for first in (True, False):
            with te.autocast(recipe=te.recipe("mxfp8")), te.microbatch(first=first):
                layer(x).square().mean().backward()
    torch.testing.assert_close(module.weight.grad.full_tensor(), whole.weight.grad, rtol=1e-6, atol=0)
    with te.autocast(recipe=te.recipe("mxfp8")):
        refused(lambda: te.cache_weights(module), "are sharded by FSDP2 here", "microbatch(first=True)")


@on_ranks(2)
def test_recipes_know_the_class_of_a_sharded_layer() -> None:
    """And not the one that `fully_shard` makes of it."""
    seen: set[str] = set()

    def factory(role: te.QuantizerRole) -> te.Quantizer:
        seen.add(role.module)
        return te.MXFP8Quantizer()

    module = fully_shard(te.Linear(IN, OUT, bias=False), mesh=mesh())
    with te.autocast(recipe=te.CustomRecipe(qfactory=factory)):
        module(torch.randn(TOKENS, IN))
    assert "Linear" in seen and "FSDPLinear" not in seen, seen


@on_ranks(2)
@pytest.mark.sentinels("identity-False")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_data_parallel_copies_average_gradients(name: str, grouped: bool) -> None:
    """DistributedDataParallel leaves stored weights alone where it is told that all ranks have the same."""
    whole, module = (build(FORMATS[name], grouped) for _ in range(2))
    x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(9))
    run(whole, x).square().mean().backward()
    copy_of = nn.parallel.DistributedDataParallel(Runs(module), init_sync=False)
    assert same_bits(module.weight, whole.weight)
    copy_of(own_part(x)).square().mean().backward()
    torch.testing.assert_close(module.weight.grad, whole.weight.grad, rtol=1e-4, atol=1e-6)


class Runs(nn.Module):
    """`run` as a module's forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return run(self.layer, x)


@on_ranks(2)
def test_cuts_through_blocks_are_refused() -> None:
    for name, rows in (("float8_block", 128), ("mxfp8", 32), ("nvfp4", 16)):
        module = te.Linear(128, rows, bias=False)
        module.weight = nn.Parameter(FORMATS[name].quantize(torch.randn(rows, 128)))
        refused(lambda module=module: fully_shard(module, mesh=mesh()), "its blocks span")


@on_ranks(2)
def test_unequal_shards_are_refused() -> None:
    for experts in (3, 1):
        module = te.GroupedLinear(experts, 32, 32, bias=False)
        module.weight = nn.Parameter(FORMATS["mxfp8"].quantize_grouped(torch.randn(experts, 32, 32)))
        refused(lambda module=module: gathered(fully_shard(module, mesh=mesh())), "must be a multiple of 2")


@on_ranks(2)
@pytest.mark.sentinels("True")
@pytest.mark.parametrize("grouped", [False, True])
def test_functions_of_torch_on_unequal_shards_are_refused(grouped: bool) -> None:
    """They suppose 20 and 20 rows where there are 32 and 8: a checkpoint would hold others under their names."""
    module = te.GroupedLinear(3, IN, 32, bias=False) if grouped else te.Linear(IN, 40, bias=False)
    value, quantizer = torch.randn(module.weight.shape), FORMATS["mxfp8"]
    module.weight = nn.Parameter(quantizer.quantize_grouped(value) if grouped else quantizer.quantize(value))
    with shards_of_blocks(module):
        fully_shard(module, mesh=mesh())
    weight, words = module.weight, ("is one of shards that were cut between blocks", "save_pretrained")
    refused(weight.full_tensor, *words)
    refused(lambda: weight.redistribute(placements=[Replicate()]).to_local(), *words)
    refused(lambda: weight.detach().clone().full_tensor(), *words)
    refused(lambda: torch.save(weight.detach(), io.BytesIO()), *words)
    with tempfile.TemporaryDirectory() as folder:
        refused(lambda: dcp.save({"w": weight}, checkpoint_id=folder), "save_pretrained", error=CheckpointException)


@on_ranks(2)
@pytest.mark.sentinels("hybrid-False")
@pytest.mark.parametrize(("name", "grouped"), KINDS)
def test_any_number_of_rows_is_shared(name: str, grouped: bool) -> None:
    """Of blocks the last rank has fewer: a part of one, one expert, nothing. Gathered bits and steps are one rank's."""
    quantizer = FORMATS[name]
    block = 1 if grouped else cut_multiple(quantizer, -2)
    for rows in (3, 1) if grouped else (3 * block + 16, 16 if block == 1 else block):
        torch.manual_seed(0)
        value = torch.randn((rows, 32, IN) if grouped else (rows, IN)) / 8
        modules = [
            te.GroupedLinear(rows, IN, 32, bias=False) if grouped else te.Linear(IN, rows, bias=False) for _ in "ab"
        ]
        for module in modules:
            module.weight = nn.Parameter(quantizer.quantize_grouped(value) if grouped else quantizer.quantize(value))
        whole, module = modules
        with shards_of_blocks(module):
            fully_shard(module, mesh=mesh())
        te.share_scales(module)
        each = -(-rows // (RANKS * block)) * block
        own = module.weight._local_tensor.shape[0]
        assert own == min(each, max(0, rows - dist.get_rank() * each)), (rows, own)
        optimizers = [te.FusedAdamW(m.parameters(), lr=LR) for m in modules]
        x = torch.randn(8 * rows if grouped else 8, IN)  # the same on both ranks
        splits = (torch.full((rows,), 8),) if grouped else ()
        for _ in range(2):
            assert same_bits(gathered(module), whole.weight), rows
            for m, optimizer in zip(modules, optimizers, strict=True):
                m(x, *splits).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()})
        assert same_bits(gathered(module), whole.weight), rows


@on_ranks(2)
def test_fewer_bytes_are_sent() -> None:
    """A gather sends the fields and nothing else: for 128-block weights a byte a value and a scale per block."""
    local = build(FORMATS["float8_block"], False).weight.detach()[: OUT // RANKS]
    (sent, _) = local.fsdp_pre_all_gather(mesh(), torch.Size((OUT, IN)), (IN, 1), None, None)
    assert sum(t.numel() * t.itemsize for t in sent) == OUT // RANKS * IN + 4 * (OUT // RANKS // 128) * (IN // 128)
