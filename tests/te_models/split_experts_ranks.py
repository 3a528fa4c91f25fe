"""What each of two processes of test_split_experts does: `python -m tests.te_models.split_experts_ranks RESULTS`.

Every rank builds the whole model and the one whose experts are split over other ranks than its layers, and compares.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from te_models import GPTModel, ModelConfig, generate, take_expert_load
from te_models.checkpoints import open_checkpoint
from te_models.layers.tensor.fsdp import local_part
from te_models.parallel import ParallelDims, ParallelMesh
from te_models.parallel.parts import ModelParts
from tests.ranks import report_cases
from tests.te_models.configs import VARIANTS, one_layer, tiny_moe, token_ids
from tests.te_models.expert_parallel_ranks import the_same
from tests.te_models.split_model_ranks import Reads

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
DISPATCHES = ("all_to_all", "all_gather")
BATCH, LENGTH = 3, 5  # an odd number of tokens, which ranks do not share equally


def both(config: ModelConfig, layout: str, dispatch: str = "all_to_all") -> tuple[GPTModel, GPTModel, ParallelMesh]:
    """The whole model and the split one, started from one seed."""
    mesh = ParallelDims(ranks=2, **LAYOUTS[layout]).build_mesh("cpu")
    torch.manual_seed(0)
    whole = GPTModel(config)
    torch.manual_seed(0)
    return whole, GPTModel(config, expert_dispatch=dispatch, **mesh.model_groups), mesh


def model_case(layout: str, name: str, dispatch: str) -> None:
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


def generated(layout: str, dispatch: str) -> None:
    """Token after token, of which one rank alone has the only one."""
    whole, split, mesh = both(tiny_moe(), layout, dispatch)
    ranks = mesh.dims.data_ranks
    prompt = token_ids(ranks, 5).chunk(ranks)[dist.get_rank() % ranks]
    assert torch.equal(generate(split, prompt, 6), generate(whole, prompt, 6))
    end = int(generate(whole, prompt, 1)[0, 5]) if ranks == 1 or dist.get_rank() == 0 else None
    got, alone = (generate(model, prompt, 6, eos_token_id=end) for model in (split, whole))
    assert torch.equal(got[:, : alone.shape[1]], alone)


def compiled(layout: str, dispatch: str) -> None:
    """One graph, whatever the router decides."""
    config = one_layer(tiny_moe(aux_loss_coeff=0.01))
    _, split, mesh = both(config, layout, dispatch)
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


def saved(layout: str, folder: Path) -> None:
    """Files are those of one rank, and each rank reads its own parts of them."""
    whole, split, mesh = both(MODELS["moe_biases"], layout)
    split.save_pretrained(folder / layout)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / f"{layout}-one")
        for file in (folder / f"{layout}-one").iterdir():
            assert (folder / layout / file.name).read_bytes() == file.read_bytes(), file.name
    dist.barrier()
    with Reads() as reads:
        loaded = GPTModel.from_pretrained(folder / layout, device_mesh=mesh, verify=False)
    stored = dict(split.stored_tensors())
    assert reads.bytes == sum(t.nbytes for t in stored.values())
    for key, tensor in loaded.stored_tensors():
        assert torch.equal(tensor, stored[key]), key
    with open_checkpoint(folder / layout) as checkpoint:  # every byte of which some rank checks
        assert checkpoint.config == split.config


def _cases(folder: Path) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for layout in LAYOUTS:
        for dispatch in DISPATCHES if layout != "tp2_etp1" else DISPATCHES[:1]:
            for name in MODELS:
                found[f"{layout} {name} {dispatch}"] = functools.partial(model_case, layout, name, dispatch)
            found[f"{layout} generated {dispatch}"] = functools.partial(generated, layout, dispatch)
            found[f"{layout} compiled {dispatch}"] = functools.partial(compiled, layout, dispatch)
        found[f"{layout} saved"] = functools.partial(saved, layout, folder)
    return found


CASES = tuple(_cases(Path()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    report_cases(_cases(Path(sys.argv[1]).parent), sys.argv[1])
