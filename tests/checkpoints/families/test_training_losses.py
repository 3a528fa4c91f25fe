"""What training adds to the cross entropy, in every family with experts, against transformers."""

import json
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, export_hf, import_hf
from te_models.config import ConfigError
from tests.checkpoints.family_cases import CASES, DENSE, WITHOUT_EXPERTS, make
from tests.checkpoints.hf_cases import transformers

COEFFICIENT = 0.0371
WITH = {name for name, family in FAMILIES.items() if "router_aux_loss_coef" in family.known} | {"llama4_text"}
"""Families whose classes have a coefficient; nothing reads Llama 4's."""
WITHOUT = (
    *("axk1", "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe"),
    *("hy_v3", "solar_open", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "gemma4_text"),
)
MIXTURES = [case for case, (f, _) in CASES.items() if f in WITH and case not in (*DENSE, *WITHOUT_EXPERTS)]


STEEP = {"flex_olmo", "qwen3_next", "qwen3_next-flags", "qwen3_5_moe_text", "jamba", "deepseek_v4"}
"""Models that make a difference in rounding ten times as large in each of these steps, by gradients and by experts that
another token chooses: each step begins with transformers' weights, and ends with them."""
WITHOUT_LEFT = {"jamba-flags", "deepseek_v4", "deepseek_v4-published-rates"}
"""Models in which transformers reads padding on the left."""


def with_loss(case: str) -> transformers.PreTrainedModel:
    """The case's model with a router loss, in training mode, without dropout."""
    theirs = make(case)
    theirs.config.output_router_logits = True
    theirs.config.router_aux_loss_coef = theirs.router_aux_loss_coef = COEFFICIENT
    return theirs.train()


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and masks: none, on the right, and on the left."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for step in range(steps):
        ids, mask = torch.randint(3, 61, (2, 12), generator=generator), torch.ones(2, 12, dtype=torch.int64)
        mask[0, : 5 * (step % 3 == 1)] = 0
        mask[1, 12 - 4 * (step % 3 == 2) :] = 0
        made.append((ids, mask))
    return made


@pytest.mark.sentinels("llama4-top2")
@pytest.mark.parametrize("case", MIXTURES)
def test_20_steps_with_a_router_loss_are_transformers(case: str) -> None:
    theirs = with_loss(case)
    ours = GPTModel.from_hf(theirs).train()
    moe = ours.config.moe
    if CASES[case][0] == "llama4_text":
        assert moe is None or moe.aux_loss_coeff == 0.0
    else:
        assert moe.aux_loss_coeff == COEFFICIENT
    momentum = 0.0 if case in STEEP else 0.9
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum) for model in (theirs, ours)]
    for ids, mask in batches(20):
        if case in WITHOUT_LEFT and not mask[0, 0]:
            continue
        labels = ids.masked_fill((mask & mask.roll(1, 1)) == 0, -100)  # what padding in front predicts, nobody says
        expected = theirs(ids, attention_mask=mask, labels=labels)
        got = ours(ids, labels, attention_mask=mask)
        aux = getattr(expected, "aux_loss", None)
        if aux is not None:
            assert got.load_balancing_loss is not None
            torch.testing.assert_close(got.load_balancing_loss, aux, rtol=1e-5, atol=0)
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)
        for loss, optimizer in ((expected.loss, optimizers[0]), (got.loss, optimizers[1])):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if case in STEEP:
            stepped = GPTModel.from_hf(theirs).train()
            bound = 0.05 * 5e-4 * max(p.grad.abs().max() for p in ours.parameters() if p.grad is not None)
            for p, q in zip(ours.parameters(), stepped.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=float(bound))
            ours = stepped
            optimizers[1] = torch.optim.SGD(ours.parameters(), lr=0.05)
    with torch.no_grad():
        expected_logits, logits = theirs.eval()(ids).logits, ours.eval()(ids).logits
    assert (logits - expected_logits).abs().max() <= 1e-3 * expected_logits.abs().max()  # rounding grows over 20 steps


@pytest.mark.sentinels("qwen3_moe", "llama4-top2")
@pytest.mark.parametrize("case", MIXTURES)
def test_the_coefficient_comes_back_exactly(tmp_path: Path, case: str) -> None:
    """Also where it does not count, which is where nobody asks for the routers' logits."""
    source = tmp_path / "hf"
    make(case).save_pretrained(source)
    values = json.loads((source / "config.json").read_text())
    for number, flag in ((0.1 + 0.2, True), (1e-3 / 3, False), (None, False), (0.0, True)):
        (source / "config.json").write_text(
            json.dumps(values | {"router_aux_loss_coef": number, "output_router_logits": flag})
        )
        import_hf(source, tmp_path / "ours", overwrite=True)
        export_hf(tmp_path / "ours", tmp_path / "back", overwrite=True)
        back = json.loads((tmp_path / "back/config.json").read_text())
        assert (back["router_aux_loss_coef"], back["output_router_logits"]) == (number, flag)
        family = FAMILIES[values["model_type"]]
        written = family.write_config(family.read_config(json.loads((source / "config.json").read_text())))
        if flag and number and family.model_type != "llama4_text":
            assert written["router_aux_loss_coef"] == number


@pytest.mark.slow
def test_transformers_computes_a_router_loss_in_no_other_family() -> None:
    for family in (*WITHOUT, "llama4_text"):
        case = next(case for case, (name, _) in CASES.items() if name == family and case != "llama4-dense")
        theirs = make(case).train()
        theirs.config.output_router_logits = True
        ids = batches(1)[0][0]
        with_logits = theirs(ids, labels=ids).loss
        theirs.config.output_router_logits = False
        assert torch.equal(theirs(ids, labels=ids).loss, with_logits)


def test_megatrons_loss_is_the_default_and_sums_layers() -> None:
    """Of configurations that say nothing of it, as those of models that were never in a Hugging Face folder."""
    theirs = with_loss("mixtral")
    config = GPTModel.from_hf(theirs).config
    assert config.moe.moe_router_load_balancing_type == "joint_aux_loss"
    assert type(config.moe)(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=8).aux_loss_coeff == 0.0
    default = type(config.moe)(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=8)
    assert default.moe_router_load_balancing_type == "aux_loss"


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", "joint_aux_loss"])
def test_an_export_says_the_loss_that_transformers_has_and_no_other(kind: str, tmp_path: Path) -> None:
    for case in ("mixtral", "dbrx"):
        model = GPTModel.from_hf(with_loss(case))
        model.config = model.config.replace(
            moe=model.config.moe.replace(aux_loss_coeff=0.02, moe_router_load_balancing_type=kind)
        )
        model.save_pretrained(tmp_path / f"ours-{case}")
        notes = export_hf(tmp_path / f"ours-{case}", tmp_path / case).notes
        written = json.loads((tmp_path / case / "config.json").read_text())
        found = (
            written.get("router_aux_loss_coef") if case == "mixtral" else written["ffn_config"].get("moe_loss_weight")
        )
        joint = kind == "joint_aux_loss"
        assert (written["output_router_logits"], found == 0.02, len(notes)) == (joint, joint, not joint)
        weight = 0.02 * model.config.num_layers / model.config.moe.moe_router_topk
        assert joint or (f"is {kind!r}, of each layer" in notes[0] and f"coefficient of {weight:.3g}, with" in notes[0])


def test_a_loss_over_all_layers_has_no_stages() -> None:
    model = GPTModel.from_hf(with_loss("mixtral"))
    with pytest.raises(ConfigError, match="'joint_aux_loss', which compares experts over all layers; allowed in a sta"):
        model.stage(0, 1)
    model.stage(0, 2)
