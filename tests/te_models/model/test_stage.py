"""Pipeline stages of a model: its own modules under their names, and together its losses and gradients."""

from functools import partial
from itertools import combinations, pairwise
from random import Random
from types import SimpleNamespace

import pytest
import torch

from te_models import GPTModel
from te_models.config import ConfigError
from te_models.model.flops import flops_by_layer, forward_flops_per_token
from te_models.parallel import StageLayout
from te_models.parallel.pipeline import Pipeline
from te_models.parallel.stage_layout import balanced_split
from te_models.training import ParallelConfig
from tests.build import FURTHER, VARIANTS, token_ids
from tests.compare import refused
from tests.training.runs import tiny_model


@pytest.mark.parametrize("name", ["dense", "tied", "moe_shared", "latent", *FURTHER])
def test_stages_one_after_the_other_are_the_model(name: str) -> None:
    config = (VARIANTS | FURTHER)[name]
    model, ids = GPTModel(config), token_ids(2, 12)
    expected = model(ids, labels=ids)
    expected.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    half = config.num_layers // 2
    first, last = model.stage(0, half), model.stage(half, config.num_layers)
    begun = first(ids)
    assert begun.logits is None and begun.loss is None
    told = {"input_ids": ids} if config.mtp_num_layers else {}
    found = last(inputs_embeds=begun.hidden_states[-1], labels=ids, **told)
    assert torch.equal(found.logits, expected.logits)
    loss = found.loss if begun.aux_loss is None else found.loss + begun.aux_loss
    torch.testing.assert_close(loss, expected.loss)
    loss.backward()

    names = {**dict(first.named_parameters()), **dict(last.named_parameters())}
    assert names.keys() == dict(model.named_parameters()).keys()
    for n, parameter in model.named_parameters():
        assert names[n] is parameter
        torch.testing.assert_close(parameter.grad, gradients[n], msg=n)


def test_a_stage_that_predicts_further_tokens_needs_them() -> None:
    model = GPTModel(FURTHER["moe_ahead"])
    last, x, ids = model.stage(1, 2), torch.zeros(1, 4, model.config.hidden_size), token_ids(1, 4)
    with pytest.raises(
        ValueError, match="this stage predicts further tokens, and input_ids is None; allowed: what the"
    ):
        last(inputs_embeds=x, labels=ids)
    assert last.eval()(inputs_embeds=x, labels=ids).mtp_loss is None


def test_a_stage_does_not_guess_which_ranks_balance_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may have other stages, whose experts are others."""
    config = tiny_model(moe=True)
    moe = config.moe.replace(moe_router_load_balancing_type="global_aux_loss", aux_loss_coeff=0.1)
    model, ids = GPTModel(config.replace(moe=moe)), token_ids(1, 8)
    stage = model.stage(0, 1)
    stage(ids)
    monkeypatch.setattr("te_models.model.moe.router.group_of_all", lambda: "all")
    refused(lambda: stage(ids), "which ranks have the same layers is not known", error=RuntimeError)


def test_micro_batches_of_a_pipeline_have_the_same_fields() -> None:
    """What only some have would be dropped."""
    ids = token_ids(1, 8)
    with pytest.raises(ValueError, match="some micro-batches have 'labels' and some have not"):
        Pipeline.forward_backward(
            SimpleNamespace(_run=partial(Pipeline._run, SimpleNamespace())),
            [{"input_ids": ids}, {"input_ids": ids, "labels": ids}],
        )


def test_a_middle_stage_has_layers_alone() -> None:
    stage = GPTModel(VARIANTS["dense"].replace(num_layers=3), device="meta").stage(1, 2)
    assert {name.split(".")[2] for name, _ in stage.named_parameters()} == {"1"}
    assert all(name.startswith("decoder.layers.1.") for name in stage.state_dict())
    with pytest.raises(ValueError, match="this stage was given input_ids; allowed: inputs_embeds"):
        stage(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_stage_starts_anew_as_the_whole_model(device: str) -> None:
    """It draws what the other stages get, and leaves them as they are."""
    torch.manual_seed(3)
    expected = dict(GPTModel(VARIANTS["moe_shared"]).named_parameters())
    whole = GPTModel(VARIANTS["moe_shared"], device=device)
    before = {name: parameter.clone() for name, parameter in whole.named_parameters()}
    stage = whole.stage(1, 2)
    stage.to_empty(device="cpu")
    torch.manual_seed(3)
    stage.reset_parameters()
    own = dict(stage.named_parameters())
    for name, parameter in whole.named_parameters():
        if name in own:
            assert parameter is own[name] and torch.equal(parameter, expected[name]), name
        else:
            assert parameter.is_meta if device == "meta" else torch.equal(parameter, before[name]), name


def test_layers_that_are_not_there_are_refused() -> None:
    model = GPTModel(VARIANTS["dense"], device="meta")
    refused(lambda: model.stage(1, 1), "asked for with layers []; allowed: one or more", error=ConfigError)
    refused(lambda: model.stage(0, 99), "allowed: one or more, in ascending order, of ", error=ConfigError)


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages"),
    [
        ("1F1B", 2, [(0,), (1,)]),
        ("gpipe", 2, [(0,), (1,)]),
        ("Interleaved1F1B", 2, [(0, 2), (1, 3)]),
        ("ZBVZeroBubble", 2, [(0, 3), (1, 2)]),
        ("DualPipeV", 3, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_which_stages_a_rank_has(schedule: str, ranks: int, stages: list[tuple[int, ...]]) -> None:
    layout = StageLayout(ranks, schedule)
    assert [layout.of_rank(rank) for rank in range(ranks)] == stages


def test_layers_are_shared_evenly() -> None:
    assert [len(layers) for layers in StageLayout(4).layers(10)] == [2, 3, 2, 3]
    refused(lambda: StageLayout(4).layers(3), "is 4 with 1 stages each, and the model has 3 layers", error=ConfigError)


def test_layers_are_split_as_asked() -> None:
    assert StageLayout(3, split=(1, 3, 2)).layers(6) == [range(1), range(1, 4), range(4, 6)]
    with pytest.raises(ConfigError, match=r"pipeline_split is \[1, 3, 2\], 6 layers, and the model has 7"):
        StageLayout(3, split=(1, 3, 2)).layers(7)
    for split in ((1, 2), (0, 3, 3)):
        with pytest.raises(ConfigError, match="a number of layers, 1 or more, for each of 3 stages"):
            StageLayout(3, split=split)
    for options in ({"pipeline_split": (2, 2)}, {"pipeline_balance": True}):
        with pytest.raises(ConfigError, match="with pipeline_model_parallel_size = 1"):
            ParallelConfig(**options)


@pytest.mark.parametrize("seed", range(5))
def test_the_slowest_stage_is_as_fast_as_it_can_be(seed: int) -> None:
    """Against all splits."""
    random = Random(seed)
    layers, last = [random.uniform(1, 3) for _ in range(8)], random.uniform(0, 4)

    def longest(edges: tuple[int, ...]) -> float:
        spans = pairwise((0, *edges, 8))
        return max(sum(layers[a:b]) + last * (b == 8) for a, b in spans)

    for stages in (2, 3, 4, 8):
        split = balanced_split(layers, stages, last)
        assert sum(split) == 8 and len(split) == stages and min(split) >= 1
        edges = tuple(sum(split[:i]) for i in range(1, stages))
        assert longest(edges) == pytest.approx(min(map(longest, combinations(range(1, 8), stages - 1))))


def test_flops_of_layers_are_those_of_the_model() -> None:
    for name in ("dense", "tied", "latent", "moe_shared", "mixed_layers"):
        layers, behind = flops_by_layer(VARIANTS[name], 16)
        assert sum(layers) + behind == pytest.approx(forward_flops_per_token(VARIANTS[name], 16))


@pytest.mark.parametrize(
    ("schedule", "per_rank", "sentence"),
    [
        ("2F2B", None, "pipeline_schedule is '2F2B'; allowed: a schedule that torch has, such as 1F1B, GPipe"),
        ("PipelineScheduleMulti", None, "pipeline_schedule is 'PipelineScheduleMulti'; allowed"),
        ("1F1B", 2, "virtual_pipeline_model_parallel_size is 2 with parallel.pipeline_schedule = '1F1B'; allowed: 1"),
        ("ZBVZeroBubble", 3, "is 3 with parallel.pipeline_schedule = 'ZBVZeroBubble'; allowed: 2"),
        ("Interleaved1F1B", 1, "is 1 with parallel.pipeline_schedule = 'Interleaved1F1B'; allowed: 2 or more"),
    ],
)
def test_schedules_that_cannot_be_are_named(schedule: str, per_rank: int | None, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        StageLayout(2, schedule, per_rank)
    assert sentence in str(raised.value)
