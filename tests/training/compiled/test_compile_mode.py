"""`compile_mode = "block"`: one graph that all equal layers share, the same numbers as eager."""

import functools
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from te_models import GPTModel
from te_models.compile import compile_model as compilation
from te_models.training import PrecisionConfig, train
from te_models.training.step import make_loss_function
from tests.training.runs import curve, tiny_model, tiny_run

# Dynamo looks at the `.grad` of every input of a graph, and a layer's input is not a leaf. It hides the warning that
# this gives by replacing `warnings.showwarning` (torch/_subclasses/meta_utils.py, safe_grad), so users never see it;
# here, where warnings are errors, it is raised before it would be shown.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_layers_share_one_graph_and_compute_what_eager_does(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    counted = functools.partial(compilation.compile_model, backend=counter)
    monkeypatch.setattr("te_models.training.step.compile_model", counted)
    torch.manual_seed(0)
    models = [GPTModel(tiny_model(moe=True, layers=4), params_dtype=torch.float32) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(0, 257, (2, 32))
    precision = PrecisionConfig(dtype="fp32", recipe=recipe)
    losses = []
    for model, compiled in zip(models, (False, True), strict=True):
        loss, _ = make_loss_function(model.train(), precision, "cpu", compiled=compiled, mode="block")(ids)
        loss.backward()
        losses.append(loss.detach())
    assert counter.frame_count == 2  # and the output layer's
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for (name, eager), compiled in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, eager.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_a_process_may_train_many_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one is a graph of the same code, of which torch expects eight; so many runs of a sweep ended in an error."""
    monkeypatch.setattr("te_models.training.step.backend_for", lambda model: "eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (8, 9, 10):
            model = GPTModel(tiny_model(layers=1))
            function = make_loss_function(model, PrecisionConfig(dtype="fp32"), "cpu", compiled=True)
            function(torch.zeros(1, length, dtype=torch.int64))
        assert torch._dynamo.config.recompile_limit == 1


@pytest.mark.slow
def test_a_run_accepts_the_mode(tmp_path: Path) -> None:
    """Really compiled: the losses are those of the eager run."""
    eager, layers = tiny_run(tmp_path, "eager", steps=2), tiny_run(tmp_path, "layers", steps=2, compile=True)
    layers = layers.replace(compile_mode="block")
    train(eager)
    train(layers)
    for a, b in zip(curve(eager), curve(layers), strict=True):
        assert b[1] == pytest.approx(a[1], rel=1e-5)
