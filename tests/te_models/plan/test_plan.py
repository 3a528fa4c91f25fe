"""A plan says, without the machines, what real ranks send to the byte and hold to a tenth, and what they compute."""

import dataclasses
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from te_models import GPTModel
from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.param_shapes import is_linear_weight
from te_models.cli.main import main
from te_models.config import ConfigError, ModelConfig
from te_models.kernels.torch_versions import TORCH_2_11
from te_models.layers.attention.core import attend
from te_models.lora import add_lora
from te_models.model.flops import forward_flops_per_token, training_flops_per_token
from te_models.plan import Estimated, Hardware, Plan, Refused, layouts, plan_layouts, plan_run
from te_models.plan.cost import recomputed_share
from te_models.plan.layouts import changed, dispatches_of, layouts_of, recomputations_of, updates_of
from te_models.plan.micro_batch import as_few_operations, of_layers
from te_models.plan.process import of_pipeline, plan_each
from te_models.plan.result import Traffic
from te_models.plan.simulation import Recorder, fake_tensors
from te_models.training import LoRAConfig, ModelSource, PrecisionConfig, TrainConfig
from te_models.training.config.precision import RecipePhase
from te_models.training.trained import step_flops_per_token
from tests.build import VARIANTS, token_ids
from tests.covering import selected
from tests.fork_server import run_python
from tests.ranks import run_on_ranks
from tests.te_models.plan.plan_ranks import LAYOUTS, STAGES
from tests.training.processes import as_toml
from tests.training.runs import balanced_model, tiny_model, tiny_run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
MODULE = "tests.te_models.plan.plan_ranks"


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[dict[int, Any], dict[int, Any]]:
    """What two ranks took, and what two took that do not exist; the second of them with pipeline stages only, where it
    is another one. By layout, and rank."""
    folder, layouts = tmp_path_factory.mktemp("plan"), selected(request, "layout")
    run_on_ranks(["-m", MODULE, str(folder / "real"), "real", *layouts], timeout=600)
    found: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for rank, some in enumerate((layouts, [layout for layout in layouts if layout in STAGES])):
        if some:
            done = run_python(["-m", MODULE, str(folder / "fake"), f"fake{rank or ''}", *some], timeout=600)
            assert done.returncode == 0, done.stderr
        for values, name in zip(found, ("real", "fake"), strict=True):
            file = folder / f"{name}.{rank}"
            values[rank] = json.loads(file.read_text()) if some else {}
    return found


def of_ranks(recorded: tuple[dict[int, Any], dict[int, Any]], layout: str) -> Iterator[tuple[Any, Any, Any]]:
    """Of each rank that differs: what it took, what one took that does not exist, and what its few layers tell."""
    for rank in (0, 1) if layout in STAGES else (0,):
        real, fake = (values[rank] for values in recorded)
        yield real[layout], fake[layout], fake[f"{layout} predicted"]


@pytest.mark.costs(60)
@pytest.mark.sentinels("fsdp2", "pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_says_what_two_ranks_send_and_hold(layout: str, recorded: tuple[dict[int, Any], dict[int, Any]]) -> None:
    for real, fake, _ in of_ranks(recorded, layout):
        assert fake["traffic"] == real["traffic"] and real["traffic"]
        assert (fake["parameters"], fake["optimizer"]) == (real["parameters"], real["optimizer"])
        # the CPU decodes what a recipe quantized, 0.106 of the peak with AVX2
        assert fake["peak"] == pytest.approx(real["peak"], rel=0.12 if "mxfp8" in layout else 0.1)


@pytest.mark.sentinels("fsdp2", "pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_layers_tell_of_many(layout: str, recorded: tuple[dict[int, Any], dict[int, Any]]) -> None:
    for _, whole, predicted in of_ranks(recorded, layout):
        assert predicted["traffic"] == whole["traffic"]
        for name in ("parameters", "optimizer", "peak"):
            assert predicted[name] == pytest.approx(whole[name], rel=0.02), name


def attention_flops(config: ModelConfig, length: int) -> float:
    """The products of all queries with the keys that they see, and of the scores with values, counted one by one."""
    a, total = config.attention, 0.0
    channels = a.kv_channels + (a.v_head_dim or a.kv_channels)
    if a.mla is not None:
        channels = a.mla.qk_head_dim + a.mla.qk_pos_emb_head_dim + a.mla.v_head_dim
    for layer in range(config.num_layers):
        window = config.window_size(layer) or length
        total += sum(2.0 * a.num_attention_heads * channels * min(s + 1, window) for s in range(length))
    return total


@pytest.mark.parametrize("name", ["dense", "tied", "latent", "biases", "mixed_layers"])
def test_flops_are_those_of_the_gemms(name: str) -> None:
    """torch counts what a forward pass multiplies; of attention it would count hidden keys, too."""
    config, length = VARIANTS[name], 16
    model, ids = GPTModel(config), token_ids(1, length)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    gemms = counted.get("aten.mm", 0) + counted.get("aten.addmm", 0)
    assert length * forward_flops_per_token(config, length) == gemms + attention_flops(config, length)
    assert training_flops_per_token(config, length) == 3 * forward_flops_per_token(config, length)


def test_attention_in_a_plan_writes_no_scores() -> None:
    """Of latent attention, neither, whose values are narrower than its keys."""
    with fake_tensors(), as_few_operations(), Recorder({}) as recorder:
        query, key, value = (
            torch.empty(1, 4, 512, channels, dtype=torch.bfloat16, device="cpu", requires_grad=True)
            for channels in (192, 192, 128)
        )
        options = {"causal": True, "scale": 1.0, "softcap": None, "dropout": 0.0}
        attend(query, key, value, None, None, None, **options).sum().backward()
        assert recorder.peak < 10 * query.nbytes < 4 * 512 * 512 * 2 * 4


@pytest.mark.parametrize("targets", [("all-linear",), ("linear_qkv", "*.1.*.linear_fc2")])
def test_flops_of_adapters_are_those_of_a_step(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Of frozen weights no gradients, and what reaches the embedding, which nobody needs, is not computed, either."""
    model, length, lora = VARIANTS["dense"], 16, LoRAConfig(rank=4, targets=targets)
    run = tiny_run(tmp_path, model=ModelSource(config=model), lora=lora)
    run = run.replace(data=run.data.replace(sequence_length=length))
    gpt, ids = GPTModel(model), token_ids(1, length)
    add_lora(gpt, 4, targets=targets)
    with FlopCounterMode(display=False) as counter:
        gpt(ids, labels=ids).loss.backward()
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    gemms = counted.get("aten.mm", 0) + counted.get("aten.addmm", 0)
    rows, columns = expected_tensors(model)["decoder.layers.0.self_attention.linear_qkv.weight"]
    to_embedding = 2.0 * length * (rows * columns + 4 * columns)
    flops = length * step_flops_per_token(run, model) - 3 * attention_flops(model, length)
    assert flops == gemms + to_embedding
    assert step_flops_per_token(run.replace(lora=LoRAConfig()), model) == training_flops_per_token(model, length)


def test_a_token_is_multiplied_by_its_own_experts() -> None:
    one, two = (
        VARIANTS["moe_shared"].replace(moe=VARIANTS["moe_shared"].moe.replace(moe_router_topk=k)) for k in (1, 2)
    )
    (layers,) = (len(one.moe.layers),)
    of_an_expert = 2 * 3 * one.hidden_size * one.moe.moe_ffn_hidden_size
    assert forward_flops_per_token(two, 8) - forward_flops_per_token(one, 8) == layers * of_an_expert


def test_layers_that_are_left_out_leave_the_others_as_they_were() -> None:
    model = tiny_model(moe=True, layers=5)
    model = model.replace(moe=model.moe.replace(layers=(1, 3)))
    part = of_layers(model, [0, 3, 4])
    assert part.num_layers == 3 and part.moe.layers == (1,)
    assert of_layers(model, [0, 2]).moe is None


def test_layouts_are_those_that_divide_the_ranks_and_the_experts() -> None:
    """In order: tensor, pipeline, context and expert parallelism, split experts, sequence parallelism, and how ranks
    that share sequences reach keys."""

    def found(model: ModelConfig, ranks: int, **options: int) -> list[tuple[int | str, ...]]:
        return [tuple(sizes.values()) for sizes in layouts_of(model, ranks, **options)]

    moe = [(tp, 1, 1, ep, etp, tp - 1, "all_gather") for tp, etp in ((1, 1), (2, 2), (2, 1)) for ep in (1, 2, 4)]
    assert found(tiny_model(moe=True), 8, node_ranks=2) == moe  # four experts
    assert found(tiny_model(), 2, node_ranks=8, tokens=33) == [
        (1, 1, 1, 1, 1, 0, "all_gather"),
        (2, 1, 1, 1, 2, 0, "all_gather"),
    ]
    staged = [(tp, pp, 1, 1, tp, tp - 1, "all_gather") for tp in (1, 2) for pp in (1, 2, 4)]
    assert found(tiny_model(layers=8), 8, node_ranks=2, micro_batches=4) == staged
    long = [(1, 1, 1, 1, 1, 0, "all_gather"), *((1, 1, 4, 1, 1, 0, way) for way in ("all_gather", "p2p", "a2a"))]
    assert found(tiny_model(), 8, node_ranks=1, sequence_length=40960) == long
    assert found(tiny_model().replace(hidden_dropout=0.1), 2, node_ranks=2)[-1][-2] == 0


def test_layouts_have_choices_beside_their_sizes(tmp_path: Path) -> None:
    model = tiny_model(moe=True, layers=8)
    run = tiny_run(tmp_path, model=ModelSource(config=model)).replace(compile=False)
    run = run.replace(precision=run.precision.replace(dtype="bf16"))
    whole = run.replace(parallel=run.parallel.replace(data_parallel_shard_size=-1, expert_model_parallel_size=4))
    staged = run.replace(parallel=run.parallel.replace(pipeline_model_parallel_size=2, data_parallel_shard_size=-1))

    def found(start: TrainConfig, choices: Any) -> list[dict[str, Any]]:
        default = start.parallel.to_dict() | start.model.to_dict()
        tried = [its.parallel.to_dict() | its.model.to_dict() for its in changed(start, choices(start, model))]
        return [{name: its[name] for name in its if its[name] != default[name]} for its in tried]

    zero = {"data_parallel_shard_size": 1, "use_distributed_optimizer": True}
    assert found(whole, updates_of) == [{}, {"reduce_gradients": "step"}, zero]

    def virtual(name: str) -> list[dict[str, Any]]:
        return [{"pipeline_schedule": name, "virtual_pipeline_model_parallel_size": stages} for stages in (2, 4)]

    earlier = [each | its for its in ({}, *virtual("Interleaved1F1B")) for each in ({}, zero)]
    v_shaped = [{"pipeline_schedule": name} for name in ("ZBVZeroBubble", "DualPipeV")]
    assert found(staged, updates_of) == [
        *earlier,
        *(zero | its for its in (*virtual("InterleavedZeroBubble"), *v_shaped)),
    ]
    parts = [{"recompute_modules": [f"decoder.layers.*.{part}"]} for part in ("mlp", "self_attention")]
    assert found(run, recomputations_of) == [{}, *parts, {"activation_checkpointing": True}]
    assert found(whole, dispatches_of) == [{}, {"expert_dispatch": "deepep"}] and not found(staged, dispatches_of)
    model = balanced_model()  # with a shared expert
    beside = whole.replace(model=ModelSource(config=model))
    assert found(beside, dispatches_of) == [{}, {"expert_dispatch": "deepep"}, {"moe_shared_expert_overlap": True}]


PUBLISHED = {"deepseek-v3": (1024, 64, "block", 1297), "qwen3-235b-a22b": (256, 32, "current", 1575)}
"""Ranks, expert parallelism and recipe of published runs on H100s: TP2, PP8 of four stages each, 128 micro-batches of
one sequence of 4,096 tokens, and the tokens a second of each rank (Megatron-Bridge, 25.09 and 25.11)."""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_are_modelled_within_a_quarter(name: str, tmp_path: Path) -> None:
    """Without what a report of theirs cannot tell: the plan says each term by itself."""
    ranks, ep, recipe, published = PUBLISHED[name]
    values = published_run(name, ep, recipe, tmp_path)
    plan = plan_run(TrainConfig.from_dict(values), ranks)
    assert plan.tokens_per_second == pytest.approx(published, rel=0.25)
    assert sum(plan.waits.values()) == pytest.approx(plan.step_s)
    assert {"compute", "all_to_all over ep", "send over pp"} <= {*plan.waits}


def published_run(name: str, ep: int, recipe: str, folder: Path) -> dict[str, Any]:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 8}
    parallel |= {"pipeline_schedule": "Interleaved1F1B", "virtual_pipeline_model_parallel_size": 4}
    parallel |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1, "use_distributed_optimizer": True}
    data = {"path": "tokens", "sequence_length": 4096, "micro_batch_size": 1, "gradient_accumulation": 128}
    values: dict[str, Any] = {"output_dir": str(folder), "steps": 1, "compile": False, "model": {"name": name}}
    values |= {"data": data, "parallel": parallel, "precision": {"dtype": "bf16", "recipe": recipe}}
    return values | {"optimizer": {"lr": 1e-4, "master_weights": True}}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_search_finds_a_layout_as_fast_as_the_published_one(name: str, tmp_path: Path) -> None:
    """On 1,024 ranks, with as many tokens a step, of those that fit into their memory, which the published layout does
    not without recomputation; its speed is the modelled one."""
    _, ep, recipe, _ = PUBLISHED[name]
    values = published_run(name, ep, recipe, tmp_path)
    values["data"] |= {"global_batch_size": 128 * 64, "gradient_accumulation": 1}
    config = TrainConfig.from_dict(values)
    published = plan_run(config, 1024)
    told: list[tuple[int, int]] = []
    best = plan_layouts(config, 1024, Hardware(), told=lambda *numbers: told.append(numbers))[0]
    assert isinstance(best, Plan) and best.fits
    assert best.tokens == published.tokens and best.tokens_per_second >= published.tokens_per_second
    assert told == sorted(told) and told[-1][0] == told[-1][1] <= 30


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_plans_that_share_stages_are_those_of_each_alone(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, model=ModelSource(config=tiny_model(moe=True, layers=8)))
    ranks = run.parallel.replace(pipeline_model_parallel_size=2, use_distributed_optimizer=True)
    virtual = ranks.replace(pipeline_schedule="Interleaved1F1B", virtual_pipeline_model_parallel_size=2)
    runs = [run.replace(parallel=each) for each in (ranks, virtual, virtual.replace(pipeline_schedule="LoopedBFS"))]
    assert plan_each(runs, 4, Hardware()) == [plan_run(each, 4) for each in runs]


def test_what_is_computed_again_takes_time_by_its_flops(tmp_path: Path) -> None:
    """Whole layers: all but the output layer."""
    model = tiny_model(moe=True)
    run = tiny_run(tmp_path, model=ModelSource(config=model))

    def share(**keys: Any) -> float:
        return recomputed_share(run.replace(model=run.model.replace(**keys)), model)

    parts = [share(recompute_modules=(f"decoder.layers.*.{part}",)) for part in ("mlp", "self_attention")]
    whole = share(activation_checkpointing=True)
    logits = 2 * model.vocab_size * model.hidden_size / forward_flops_per_token(model, run.data.sequence_length)
    assert share() == 0 and whole == pytest.approx(1 - logits) == pytest.approx(sum(parts)) and min(parts) > 0
    assert share(recompute_modules=("decoder.layers.0.*",)) == pytest.approx(whole / model.num_layers, rel=0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_offloading_moves_what_a_plan_counts(tmp_path: Path) -> None:
    """Parameters and moments, or activations, are main memory's, and copies take time where compute takes less."""
    config = tiny_run(tmp_path)
    config = config.replace(
        parallel=config.parallel.replace(data_parallel_shard_size=2),
        data=config.data.replace(sequence_length=32, micro_batch_size=64),
    )
    whole = plan_run(config, 2)
    host = plan_run(config.replace(parallel=config.parallel.replace(cpu_offload=True)), 2)
    moved = whole.parameters + whole.optimizer
    assert host.host > moved and host.optimizer == 0 and whole.memory - host.memory == host.host
    config = config.replace(compile=False, model=config.model.replace(activation_offloading=True))
    waiting = plan_run(config, 2)
    assert waiting.host > 0 and waiting.memory < whole.memory
    assert plan_run(config, 2, Hardware(host_gbps=1e-6)).step_s > waiting.step_s


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_ranks_that_share_an_update_hold_a_part_of_the_optimizer(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    whole = plan_run(config, 4)
    shared = plan_run(config.replace(parallel=config.parallel.replace(use_distributed_optimizer=True)), 4)
    assert shared.optimizer < 0.3 * whole.optimizer and shared.parameters == whole.parameters
    assert ("all_gather", "dp") in shared.traffic


@pytest.mark.parametrize("name", ["memory_gib", "efficiency"])
def test_hardware_is_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0; allowed: "):
        Hardware(**{name: 0})
    with pytest.raises(ConfigError, match=r"efficiency is 1\.5; allowed: a number above 0 and at most 1"):
        Hardware(efficiency=1.5)


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a plan is a fork, which has imported torch. (docs/planning.md starts interpreters.)"""

    def run(module: str, text: str, told: Any = None) -> subprocess.CompletedProcess[str]:
        assert module == "te_models.plan.process"
        (tmp_path / "asked").write_text(text)
        code = "import sys; sys.stdin = open(sys.argv[1]); from te_models.plan.process import main; main()"
        done = run_python(["-c", code, str(tmp_path / "asked")], timeout=600)
        for line in done.stderr.split("\x1e")[1:] if told is not None else ():  # what it says by `tell`
            told(line.partition("\n")[0])
        return done

    monkeypatch.setattr("te_models.plan.process.run_module", run)


@pytest.mark.usefixtures("forked")
def test_the_command_says_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(as_toml(tiny_run(tmp_path)))
    assert main(["plan", str(file), "--ranks", "2", "--json", "--memory-gib", "0.0001"]) == 1
    values = json.loads(capsys.readouterr().out)
    plan = Plan.from_dict(values)
    assert not plan.fits and plan.to_dict() == values
    assert plan.memory == plan.parameters + plan.optimizer + plan.activations > 0.0001 * 2**30
    assert plan.options["cp_comm_type"] == "all_gather" and "cp_comm_type" not in plan.sizes


KILLED = """
import os
from te_models.plan.process import in_forks

def work(task):
    if "signal" in task:
        os.kill(os.getpid(), task["signal"])
    if "exit" in task:
        os._exit(task["exit"])
    return {"seen": 1 / task["number"]}

found = in_forks([{"number": 2}, {"signal": 9}, {"exit": 3}, {"number": 0}, {"number": 4}], work, 2)
print([answer.get("seen", answer.get("failed")) for answer in found])
"""


def test_a_process_that_is_killed_is_one_sentence() -> None:
    done = run_python(["-c", KILLED], timeout=600)
    assert done.returncode == 0, done.stderr
    killed, ended = (
        f"its process {how} before it had an answer" for how in ("was killed by signal 9", "ended with exit code 3")
    )
    assert done.stdout == f"{[0.5, killed, ended, 'ZeroDivisionError: division by zero', 0.25]}\n"


def normed(config: TrainConfig) -> TrainConfig:
    """With norms over all heads of keys, which more ranks than such heads cannot share."""
    model = config.model.config
    attention = model.attention.replace(qk_layernorm="full")
    return config.replace(model=config.model.replace(config=model.replace(attention=attention)))


@pytest.mark.usefixtures("forked")
def test_options_of_the_layout_that_a_run_has_do_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "ENOUGH", 0)
    config = tiny_run(tmp_path).replace(model=ModelSource(config=tiny_model(moe=True, layers=4)))
    own = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "Interleaved1F1B", "use_distributed_optimizer": True}
    own |= {"virtual_pipeline_model_parallel_size": 2}
    asked = config.replace(parallel=config.parallel.replace(**own))
    assert plan_layouts(asked, 4, Hardware()) == plan_layouts(config, 4, Hardware())


@pytest.mark.usefixtures("forked")
def test_layouts_are_planned_by_utilization_and_refused_ones_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are estimated to be slower than enough that fit stand between, with the estimate."""
    monkeypatch.setattr(layouts, "ENOUGH", 2)
    config = normed(tiny_run(tmp_path, moe=True))
    found = plan_layouts(config, 4, Hardware())
    names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    sizes = {tuple(plan.sizes[name] for name in names) for plan in found}
    assert sizes == {(1, n, 1) for n in (1, 2, 4)} | {(tp, n, 1) for tp in (2, 4) for n in (1, 2, 4)} | {
        *((2, 1, 2), (2, 2, 2), (4, 1, 4))
    }
    plans = [plan for plan in found if isinstance(plan, Plan)]
    estimated = [its for its in found if isinstance(its, Estimated)]
    assert found[: len(plans)] == plans and found[len(plans) :][: len(estimated)] == estimated
    assert estimated and [its.mfu for its in estimated] == sorted((its.mfu for its in estimated), reverse=True)
    assert sum(plan.fits for plan in plans) >= 2
    assert any(plan.options["use_distributed_optimizer"] for plan in plans)
    why = (
        "'full'; allowed where 4 ranks share 2 num_query_groups",
        "allowed with expert_model_parallel_size: data_parallel_shard_size = 1",
    )
    refused = [its for its in found if isinstance(its, Refused)]
    assert refused == found[len(plans) + len(estimated) :]
    assert all(any(reason in its.reason for reason in why) for its in refused)
    assert all("cp_comm_type" in plan.options and "cp_comm_type" not in plan.sizes for plan in found)
    assert [plan.mfu for plan in plans] == sorted((plan.mfu for plan in plans), reverse=True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_travels_while_a_rank_computes(tmp_path: Path) -> None:
    """A ring's keys behind attention; results of experts behind shared ones."""
    run, slow = tiny_run(tmp_path), Hardware(tflops=1e-3)
    waits = {}
    for way in ("p2p", "a2a"):
        ranks = run.parallel.replace(context_parallel_size=2, cp_comm_type=way)
        waits[way] = plan_run(run.replace(parallel=ranks), 2, slow).waits
    assert not any("over cp" in name and "send" in name for name in waits["p2p"])
    assert waits["a2a"]["all_to_all over cp"] > 0
    model = balanced_model()
    run = run.replace(model=run.model.replace(config=model), compile=False)
    for beside in (False, True):
        ranks = run.parallel.replace(expert_model_parallel_size=2, moe_shared_expert_overlap=beside)
        waits[beside] = plan_run(run.replace(parallel=ranks), 2, slow).waits["all_to_all over ep"]
    assert waits[True] == pytest.approx(waits[False] / 2)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_pipeline_waits_while_it_fills_and_empties(tmp_path: Path) -> None:
    """Its plan is of the first rank, with its embedding and two micro-batches in flight, or of the last."""
    config = tiny_run(tmp_path)
    config = config.replace(data=config.data.replace(gradient_accumulation=4))
    staged = config.replace(parallel=config.parallel.replace(pipeline_model_parallel_size=2))
    whole, plan = plan_run(config, 2), plan_run(staged, 2)
    assert plan.flops == whole.flops / 2 and plan.parameters < whole.parameters
    assert plan.compute_s == pytest.approx(whole.compute_s / 2 * (1 + 1 / 4))
    sent = plan.traffic["send", "pp"]
    size = config.data.micro_batch_size * config.data.sequence_length * config.model.config.hidden_size * 4
    ahead = int(TORCH_2_11)  # its first step sends a number first
    assert (sent.calls, sent.payload) == (4 + ahead, 4 * (size + ahead)), "hidden states or gradients"


def test_a_pipeline_takes_the_memory_of_one_end_and_the_time_of_the_other() -> None:
    moved, waits = {("send", "pp"): Traffic(1, 2, 2.0)}, {"compute": 1.0, "send over pp": 1.0}
    seconds = {"compute_s": 1.0, "communication_s": 1.0, "step_s": 2.0, "memory_limit": 9.0, "peak_flops": 1.0}
    slow = Plan({}, 2, 1, 1, 1, tokens=4, flops=1.0, traffic=moved, waits=waits, **seconds)
    large = dataclasses.replace(slow, activations=5, step_s=1.0, traffic={}, waits={"compute": 1.0})
    for ends in ([slow, large], [large, slow]):
        assert of_pipeline(ends) == dataclasses.replace(slow, activations=5)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_tokens_that_travel_by_deep_ep_do_so_once_per_rank(tmp_path: Path) -> None:
    """No library is needed. Both of a token's experts, of four, are on the other rank with probability 1/6."""
    config = tiny_run(tmp_path, moe=True)
    sent, plans = {}, {}
    for dispatch in ("all_to_all", "deepep"):
        parallel = config.parallel.replace(expert_model_parallel_size=2, expert_dispatch=dispatch)
        precision = config.precision.replace(dtype="bf16")
        plans[dispatch] = plan_run(config.replace(parallel=parallel, precision=precision), 2)
        (sent[dispatch],) = (t for (kind, _), t in plans[dispatch].traffic.items() if kind == "all_to_all")
    tokens, micro_batches = (
        config.data.micro_batch_size * config.data.sequence_length,
        config.data.gradient_accumulation,
    )
    ways = 4 * config.model.config.num_layers * micro_batches  # to the experts and back, in either pass
    received = 2 * -(-tokens * 5 // 6)
    assert sent["deepep"].calls == ways
    assert sent["deepep"].payload == ways * received * config.model.config.hidden_size * 2 < sent["all_to_all"].payload
    # rows of the experts are as many
    assert plans["deepep"].activations == pytest.approx(plans["all_to_all"].activations, rel=0.1)
    assert plans["deepep"].flops == plans["all_to_all"].flops


@pytest.mark.usefixtures("forked")
def test_what_training_refuses_is_refused(tmp_path: Path) -> None:
    model = normed(tiny_run(tmp_path)).model.config
    (tmp_path / "model.json").write_text(json.dumps(model.to_dict()))  # which a configuration does not read
    config = tiny_run(tmp_path, model=ModelSource(config_file=str(tmp_path / "model.json")))
    config = config.replace(parallel=config.parallel.replace(tensor_model_parallel_size=4))
    with pytest.raises(ConfigError, match="qk_layernorm is 'full'; allowed where 4 ranks share 2 num_query"):
        plan_run(config, 4)


@pytest.mark.usefixtures("forked")
def test_each_stretch_of_a_schedule_of_recipes_is_planned(tmp_path: Path) -> None:
    """Rules by layer count, also in the models of few layers; a forward pass is a third of a step."""
    config = tiny_run(tmp_path, steps=100, model=ModelSource(config=tiny_model(layers=6)))

    def planned(recipe: str, **keys: Any) -> Plan:
        return plan_run(config.replace(precision=PrecisionConfig(recipe=recipe, **keys)), ranks=1)

    later = (RecipePhase(from_share=0.5, recipe="mxfp8", passes="forward"), RecipePhase(from_step=91, recipe="mxfp8"))
    whole = planned("none", schedule=later)
    plain, quantized = planned("none"), planned("mxfp8")
    assert [(s.recipe, s.first_step, s.steps) for s in whole.stretches] == [
        ("none", 1, 50),
        ("mxfp8 (forward)", 51, 40),
        ("mxfp8", 91, 10),
    ]
    first, forward, last = whole.stretches
    assert (first.memory, first.step_s) == (plain.memory, plain.step_s) and plain.stretches == ()
    assert (last.memory, last.step_s) == (quantized.memory, quantized.step_s) and last.step_s < first.step_s
    assert first.step_s - forward.step_s == pytest.approx((first.step_s - last.step_s) / 3)
    assert whole.memory == max(s.memory for s in whole.stretches)
    assert Plan.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
    some = planned("mxfp8", first_layers_bf16=2, last_layers_bf16=2)  # of models of three layers it would be refused
    assert first.step_s - some.step_s == pytest.approx((first.step_s - last.step_s) / 3)
    by_rule = planned("mxfp8", overrides=tuple(f"decoder.layers.{i}.*=bf16" for i in (0, 1, 4, 5)))
    assert (by_rule.memory, by_rule.step_s) == (some.memory, some.step_s)
    assert min(plain.memory, quantized.memory) <= some.memory <= max(plain.memory, quantized.memory)


@pytest.mark.usefixtures("forked")
def test_weights_that_qat_rounds_are_there_twice(tmp_path: Path) -> None:
    """The linear ones, for the micro-batches of a step."""
    config = tiny_run(tmp_path, model=ModelSource(config=tiny_model(layers=6)))
    qat = config.replace(precision=PrecisionConfig(qat="nvfp4"))
    plain, rounded = (plan_run(run, 1) for run in (config.replace(precision=PrecisionConfig()), qat))
    shapes = expected_tensors(tiny_model(layers=6), "grouped")
    linear = sum(math.prod(shape) for name, shape in shapes.items() if is_linear_weight(name))
    assert rounded.memory - plain.memory == pytest.approx(2 * linear, rel=0.05)  # bytes of bfloat16
