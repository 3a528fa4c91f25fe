"""Routers that files and transformers hold in float32 stay so in models of another dtype."""

import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="makes the models that hold such routers")

from te_models import GPTModel
from te_models.checkpoints import export_hf
from te_models.hf import TEModelForCausalLM
from te_models.layers import MXFP8BlockScaling
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import assert_same_bits, stored


@pytest.mark.parametrize("case", ["ernie4_5_moe", "hunyuan_v1_moe"])
@torch.no_grad()
def test_routers_in_float32_stay_so_in_every_dtype(tmp_path: Path, case: str) -> None:
    theirs = make(case, dtype=torch.bfloat16)
    routers = {name: p for name, p in theirs.named_parameters() if name.endswith(("mlp.gate.weight", "gate.wg.weight"))}
    for router in routers.values():
        router.data = router.data.float() * (1 + 2.0**-20)
    with warnings.catch_warnings(action="ignore"):
        theirs.save_pretrained(tmp_path / "hf")
    exact = stored(tmp_path / "hf")
    assert len(routers) > 0 and all(exact[name].dtype == torch.float32 for name in routers)
    ids = torch.arange(3, 40).view(1, -1)
    models = {
        "files": TEModelForCausalLM.from_pretrained(tmp_path / "hf").gpt,
        "bfloat16": GPTModel.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16),
        "recipe": GPTModel.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16, recipe=MXFP8BlockScaling()),
        "memory": GPTModel.from_hf(theirs, dtype=torch.bfloat16),
    }
    for name, model in models.items():
        kept = {n: p for n, p in model.named_parameters() if p.dtype == torch.float32}
        assert len(kept) == len(routers) and all(n.endswith("mlp.router.weight") for n in kept), name
        assert all(any(torch.equal(p, exact[n]) for n in routers) for p in kept.values()), name
    expected = models["files"](ids).logits
    assert expected.dtype == torch.bfloat16 and torch.equal(models["memory"](ids).logits, expected)
    given = {name: p for name, p in models["memory"].to_hf().named_parameters() if name in routers}
    assert all(torch.equal(p, exact[name]) for name, p in given.items()) and given.keys() == routers.keys()
    models["bfloat16"].save_pretrained(tmp_path / "ours")
    again = GPTModel.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    assert torch.equal(again(ids).logits, expected)
    export_hf(tmp_path / "ours", tmp_path / "back")
    back = stored(tmp_path / "back")
    assert_same_bits({name: back[name] for name in routers}, {name: exact[name] for name in routers})
    assert {p.dtype for p in GPTModel.from_pretrained(tmp_path / "hf", dtype=torch.float64).parameters()} == {
        torch.float64
    }


@pytest.mark.slow
@torch.no_grad()
def test_a_model_with_a_router_in_float32_compiles_to_one_graph(tmp_path: Path) -> None:
    theirs = make("ernie4_5_moe", dtype=torch.bfloat16)
    model = GPTModel.from_hf(theirs, dtype=torch.bfloat16)
    router = model.get_parameter("decoder.layers.1.mlp.router.weight")
    router.data = router.data.float() * (1 + 2.0**-20)
    ids = torch.arange(3, 40).view(1, -1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids).logits, model(ids).logits)
