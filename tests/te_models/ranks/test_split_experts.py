"""Models whose experts are split over other ranks than their layers: the whole model's values, logits, gradients and
files; what cannot be split so is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_models import GPTModel, ModelConfig, generate, take_expert_load
from te_models.checkpoints import expected_tensors, open_checkpoint
from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts
from te_models.config import ConfigError
from te_models.layers.tensor.fsdp import local_part
from te_models.layouts import Facts, check_layout_rules
from te_models.parallel import ParallelDims, ParallelMesh
from te_models.parallel.parts import ModelParts
from tests.build import VARIANTS, one_layer, tiny, tiny_moe, token_ids
from tests.compare import Reads, the_same
from tests.ranks import on_ranks

MODELS = {
    **{name: VARIANTS[name] for name in ("moe_shared", "moe_biases", "moe_on_input", "moe_latent")},
    "top3": tiny_moe(moe_router_topk=3, aux_loss_coeff=0.01),
    "capacity": tiny_moe(moe_expert_capacity_factor=0.75),
}
LAYOUTS: dict[str, dict[str, int]] = {
    "etp2": {"expert_tensor_parallel_size": 2},
    "tp2_etp1_ep2": {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    },
    "tp2_etp1": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}
WAYS = [
    (layout, way)
    for layout in LAYOUTS
    for way in ("all_to_all", "all_gather")
    if (layout, way) != ("tp2_etp1", "all_gather")
]
BATCH, LENGTH = 3, 5  # an odd number of tokens, which ranks do not share equally


def both(config: ModelConfig, layout: str, dispatch: str = "all_to_all") -> tuple[GPTModel, GPTModel, ParallelMesh]:
    """The whole model and the split one, started from one seed."""
    mesh = ParallelDims(ranks=2, **LAYOUTS[layout]).build_mesh("cpu")
    torch.manual_seed(0)
    whole = GPTModel(config)
    torch.manual_seed(0)
    return whole, GPTModel(config, expert_dispatch=dispatch, **mesh.model_groups), mesh


@on_ranks(2)
@pytest.mark.sentinels("etp2-all_to_all-moe_biases", "tp2_etp1_ep2-all_gather-moe_shared")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("layout", "dispatch"), WAYS)
def test_split_experts_are_the_whole_model(layout: str, name: str, dispatch: str) -> None:
    """Logits, losses and gradients are those of the whole model, which has the tokens of each data rank in turn."""
    whole, split, mesh = both(MODELS[name], layout, dispatch)
    ranks = mesh.dims.data_ranks
    parts = ModelParts(split)
    for key, part in parts.stored().items():
        expected = part.of_whole(dict(whole.stored_tensors())[key].detach())
        assert torch.equal(part.tensor, expected), f"{key} does not start the same"
    ids = token_ids(ranks * BATCH, LENGTH).chunk(ranks)
    mine = ids[dist.get_rank() % ranks]
    got = split(mine, labels=mine)
    got.loss.backward()
    alone = whole(mine, labels=mine)
    alone.loss.backward()
    the_same(got.logits, alone.logits, False, "logits")
    assert torch.equal(got.tokens_per_expert, alone.tokens_per_expert)
    the_same(got.loss, alone.loss, False, "loss")
    own = {key: p.grad.clone() for key, p in whole.named_parameters()}
    for other in ids if ranks > 1 else ():
        if other is not mine:
            whole(other, labels=other).loss.backward()
    for key, p in split.named_parameters():
        expected = whole.get_parameter(key).grad if ".mlp.experts." in key else own[key]
        found = parts.like(key, p, local_part(p.grad))
        if layout == "tp2_etp1" and ".mlp.experts." in key:  # each rank has the gradient of its tokens alone
            dist.all_reduce(found.tensor)
        the_same(found.tensor, found.of_whole(expected), False, f"gradient of {key}")


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dispatch"), WAYS)
def test_tokens_are_those_of_the_whole_model(layout: str, dispatch: str) -> None:
    """Token after token, of which one rank alone has the only one."""
    whole, split, mesh = both(tiny_moe(), layout, dispatch)
    ranks = mesh.dims.data_ranks
    prompt = token_ids(ranks, 5).chunk(ranks)[dist.get_rank() % ranks]
    assert torch.equal(generate(split, prompt, 6), generate(whole, prompt, 6))
    end = int(generate(whole, prompt, 1)[0, 5]) if ranks == 1 or dist.get_rank() == 0 else None
    got, alone = (generate(model, prompt, 6, eos_token_id=end) for model in (split, whole))
    assert torch.equal(got[:, : alone.shape[1]], alone)


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dispatch"), WAYS)
def test_one_graph_whatever_the_router_decides(layout: str, dispatch: str) -> None:
    """One graph, whatever the router decides."""
    _, split, mesh = both(one_layer(tiny_moe(aux_loss_coeff=0.01)), layout, dispatch)
    run = torch.compile(split, fullgraph=True, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            first = seed + 10 * (dist.get_rank() % mesh.dims.data_ranks)
            ids = token_ids(BATCH, LENGTH, first) if seed < 2 else torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            gradients, logits = [], []
            for model in (split, run):
                split.zero_grad()
                take_expert_load(split)
                out = model(ids, labels=ids)
                out.loss.backward()
                logits.append(out.logits)
                gradients.append([p.grad.clone() for p in split.parameters()])
            the_same(logits[1], logits[0], False, "logits")
            for found, right in zip(gradients[1], gradients[0], strict=True):
                the_same(found, right, False, "gradient")


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_those_of_one_rank(layout: str, tmp_path: Path) -> None:
    """Files are those of one rank, and each rank reads its own parts of them."""
    whole, split, mesh = both(MODELS["moe_biases"], layout)
    split.save_pretrained(tmp_path / layout)
    if dist.get_rank() == 0:
        whole.save_pretrained(tmp_path / f"{layout}-one")
        for file in (tmp_path / f"{layout}-one").iterdir():
            assert (tmp_path / layout / file.name).read_bytes() == file.read_bytes(), file.name
    dist.barrier()
    with Reads() as reads:
        loaded = GPTModel.from_pretrained(tmp_path / layout, device_mesh=mesh, verify=False)
    stored = dict(split.stored_tensors())
    assert reads.bytes == sum(t.nbytes for t in stored.values())
    for key, tensor in loaded.stored_tensors():
        assert torch.equal(tensor, stored[key]), key
    with open_checkpoint(tmp_path / layout) as checkpoint:  # every byte of which some rank checks
        assert checkpoint.config == split.config


@pytest.mark.parametrize("tp", [1, 4])
def test_gate_and_up_rows_are_cut_apart(tp: int) -> None:
    """By the ranks that split experts, whatever splits the layers; they cover each stack once."""
    config = tiny_moe()
    shapes = expected_tensors(config)
    weight = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    experts, rows, _ = shapes[weight]
    seen = torch.zeros(experts, rows, dtype=torch.int64)
    for ep in range(2):
        for etp in range(2):
            changed = ShardPlace(tp_size=tp, ep_rank=ep, ep_size=2, etp_rank=etp, etp_size=2)
            part = parts(config, shapes, changed)[weight]
            assert part.ranges == (
                (etp * rows // 4, (etp + 1) * rows // 4),
                ((2 + etp) * rows // 4, (3 + etp) * rows // 4),
            )
            assert part.experts is not None
            for begin, end in part.ranges:
                seen[slice(*part.experts), begin:end] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("config", "layout", "sentence"),
    [
        (tiny(), "grouped", "moe is None: a model without experts has none to split"),
        (
            tiny_moe(moe_ffn_hidden_size=33),
            "grouped",
            "moe.moe_ffn_hidden_size is 33, which 2 ranks cannot share equally",
        ),
        (tiny_moe(), "per-gemm", "expert_layout is 'per-gemm'; allowed with expert_tensor_parallel_size: 'grouped'"),
        (
            tiny_moe(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
            "grouped",
            "moe.moe_pad_expert_input_to_capacity is True; allowed with expert_tensor_parallel_size: False",
        ),
    ],
)
def test_what_cannot_be_split_is_named(config: Any, layout: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout_rules(Facts(model=config, etp=2, apart=True, expert_layout=layout))
    assert sentence in str(raised.value)
