"""Schedule-free AdamW: the package's numbers, the average wherever a model is measured or written, exact resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import training
from te_models.config import ConfigError
from te_models.model import GPTModel
from te_models.training.optimizer.adamw import Optimizer
from tests.build import parallel
from tests.training import runs
from tests.training.optimizer.test_optimizer import make, set_gradients
from tests.training.processes import train_on_ranks

KIND: dict[str, Any] = {"kind": "schedule_free", "weight_decay": 0.1, "betas": (0.9, 0.99)}
WARM = training.ScheduleConfig(kind="constant", warmup_steps=2)


def free_run(tmp_path: Path, name: str = "whole", **changes: Any) -> Any:
    values = {"model": training.ModelSource(config=runs.tiny_model(layers=1)), "steps": 6, "schedule": WARM}
    values |= {"optimizer": training.OptimizerConfig(lr=3e-3, **KIND)}
    values |= {"evaluation": training.EvaluationConfig(every=1, batches=1)}
    return runs.tiny_run(tmp_path, name, **(values | changes))


def test_the_numbers_are_those_of_the_package() -> None:
    theirs = pytest.importorskip("schedulefree", reason="the package whose numbers are compared").AdamWScheduleFree
    ours, others = make(torch.float32), make(torch.float32)
    optimizer = Optimizer(ours.items(), training.OptimizerConfig(clip_grad_norm=None, **KIND))
    decays = [{"params": [p], "weight_decay": 0.1 if name == "fc.weight" else 0.0} for name, p in others.items()]
    reference = theirs(decays, lr=0.01, betas=(0.9, 0.99), warmup_steps=3, foreach=False)
    reference.train()
    for step in range(6):
        set_gradients(ours, step)
        set_gradients(others, step)
        optimizer.step(0.01 * min(1.0, (step + 1) / 3))
        reference.step()
        reference.eval()
        with optimizer.averaged():
            for name, p in ours.items():
                torch.testing.assert_close(p, others[name], rtol=2e-6, atol=1e-7)
        reference.train()


@pytest.mark.parametrize("dtype, masters", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_measuring_leaves_no_trace(dtype: torch.dtype, masters: bool) -> None:
    found = []
    for measured in (False, True):
        parameters = make(dtype)
        optimizer = Optimizer(parameters.items(), training.OptimizerConfig(master_weights=masters, **KIND))
        for step in range(4):
            set_gradients(parameters, step)
            optimizer.step(0.01, noop=torch.tensor(step == 2))
            if measured:
                before = {name: p.detach().clone() for name, p in parameters.items()}
                with optimizer.averaged():
                    same = all(torch.equal(p, before[name]) for name, p in parameters.items())
                assert same == (step == 0), "of one step the average is that step's weights"
        found.append(optimizer.state_tensors() | {name: p.detach() for name, p in parameters.items()})
    runs.assert_same_bits(*found)
    assert found[0]["optimizer.schedule_free"][0] == 3, "a step that is switched off does not count"


@pytest.mark.parametrize(
    "precision, masters",
    [
        (training.PrecisionConfig(dtype="fp32"), False),
        pytest.param(training.PrecisionConfig(dtype="bf16"), True, marks=pytest.mark.slow),
        pytest.param(training.PrecisionConfig(dtype="bf16"), False, marks=pytest.mark.slow),
        pytest.param(training.PrecisionConfig(dtype="bf16", qat="nvfp4"), False, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_continues_bit_for_bit(
    precision: training.PrecisionConfig, masters: bool, tmp_path: Path
) -> None:
    optimizer = training.OptimizerConfig(lr=3e-3, master_weights=masters, **KIND)
    whole = free_run(tmp_path, precision=precision, optimizer=optimizer)
    training.train(whole)
    runs.assert_continues_as(runs.cut_after(whole, "halves", 1), whole)


def test_what_is_written_is_the_average(tmp_path: Path) -> None:
    run = free_run(tmp_path, steps=3)
    training.train(run)
    final = GPTModel.from_pretrained(Path(run.output_dir) / "final").state_dict()
    state = runs.tensors_under(training.latest_checkpoint(Path(run.output_dir)))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    y, z = (state[f"training.safetensors:optimizer.{name}.{key}"] for key in "yz")
    torch.testing.assert_close(final[name], (y - 0.1 * z) / 0.9, rtol=1e-5, atol=1e-6)
    assert not torch.equal(final[name], y)


@pytest.mark.sentinels("fsdp2")
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "ep2", "pp2"])
def test_ranks_do_what_one_rank_does_and_continue_from_it(layout: str, tmp_path: Path) -> None:
    source = training.ModelSource(config=runs.tiny_model(moe=True))
    one = free_run(tmp_path, "one", steps=4, model=source, evaluation=training.EvaluationConfig(every=1, batches=2))
    training.train(one)
    two = one.replace(output_dir=str(tmp_path / "two"), parallel=one.parallel.replace(**parallel(layout)))
    if layout in ("fsdp2", "ep2"):  # two ranks with own data
        two = two.replace(data=two.data.replace(gradient_accumulation=1))
    first = training.list_checkpoints(Path(one.output_dir))[0]
    train_on_ranks(two.replace(steps=2), tmp_path)
    train_on_ranks(two, tmp_path)
    three = two.replace(output_dir=str(tmp_path / "three"), resume_from=str(first))
    train_on_ranks(three, tmp_path)
    for run in (two, three):
        for ours, theirs in zip(runs.curve(run)[::-1], runs.curve(one)[::-1], strict=False):
            assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
            assert ours[-1] == pytest.approx(theirs[-1], rel=1e-5)


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedule.kind is 'cosine'; allowed: 'constant' with optimizer.kind"):
        free_run(tmp_path, schedule=training.ScheduleConfig())
    for changes in ({"moment_dtype": "float8"}, {"ema_decay": 0.9}, {"betas": (0.0, 0.9)}):
        with pytest.raises(ConfigError, match=f"optimizer.{next(iter(changes))} is .* with optimizer.kind = 'schedule"):
            training.OptimizerConfig(**(KIND | changes))
