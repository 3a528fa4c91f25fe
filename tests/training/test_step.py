"""One step: accumulation, precision, activation checkpointing, and what happens to a loss that is not finite."""

import math
from pathlib import Path

import pytest
import torch

import te_models
from te_models import GPTModel
from te_models.layers import QuantizedTensor
from te_models.training import ModelSource, OptimizerConfig, PrecisionConfig, TrainingError, train
from te_models.training.build import build_model, build_optimizer
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.step import make_loss_function, train_step
from tests.training.runs import assert_same_bits, rows_of, tiny_model, tiny_run


def batches(count: int, size: int, length: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(257, (size, length), generator=generator) for _ in range(count)]


def one_step(tmp_path: Path, micro_batches: list[torch.Tensor]):
    """Do one float32 step of a fresh model; return its loss and the gradients before the update."""
    config = tiny_run(tmp_path, optimizer=OptimizerConfig(clip_grad_norm=None))
    model = build_model(config, "cpu", None)
    optimizer = build_optimizer(config, model)
    function = make_loss_function(model.train(), config.precision, "cpu", compiled=False)
    result = train_step(function, optimizer, micro_batches, 1e-3, step=1, ranks=Ranks())
    return result, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_accumulation_is_the_mean_over_the_whole_batch(tmp_path: Path) -> None:
    parts = batches(3, 2)
    split, gradients = one_step(tmp_path, parts)
    whole, expected = one_step(tmp_path, [torch.cat(parts)])
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6 * whole.grad_norm)


def test_mixed_precision_computes_in_bf16_and_keeps_float32_parameters(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, precision=PrecisionConfig(dtype="bf16-mixed"))
    model = build_model(config, "cpu", None)
    seen: list[torch.dtype] = []
    projection = model.decoder.layers[0].self_attention.linear_qkv
    projection.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    function = make_loss_function(model, config.precision, "cpu", compiled=False)
    ids = batches(1, 2)[0]
    loss, _ = function(ids)
    loss.backward()
    assert all(p.dtype is p.grad.dtype is torch.float32 for p in model.parameters())
    exact, _ = make_loss_function(model, PrecisionConfig(dtype="fp32"), "cpu", compiled=False)(ids)
    assert (loss.dtype, seen) == (torch.float32, [torch.bfloat16, torch.float32])
    assert loss.item() != exact.item() and loss.item() == pytest.approx(exact.item(), rel=2**-8)


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    model = build_model(config, "cpu", None)
    optimizer = build_optimizer(config, model)
    with torch.no_grad():
        model.decoder.final_layernorm.weight[0] = float("inf")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    function = make_loss_function(model, config.precision, "cpu", compiled=False)
    with pytest.raises(TrainingError, match="step 7: the loss is nan"):
        train_step(function, optimizer, batches(1, 2), 1e-3, step=7, ranks=Ranks())
    assert_same_bits({name: p.detach() for name, p in model.named_parameters()}, before)


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
def test_quantized_weights_move_and_stay_quantized(tmp_path: Path, recipe: str) -> None:
    precision = PrecisionConfig(dtype="bf16", recipe=recipe, quantized_weights=True)
    config = tiny_run(tmp_path, model=ModelSource(config=tiny_model(moe=True)), precision=precision)
    model = build_model(config, "cpu", None)
    assert isinstance(model, te_models.GPTModel)
    optimizer = build_optimizer(config, model)
    quantized = {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    assert quantized and quantized.keys() <= optimizer.masters.keys()
    before = {name: p.dequantize(torch.float32).clone() for name, p in quantized.items()}
    function = make_loss_function(model.train(), config.precision, "cpu", compiled=False)
    for step in range(3):
        train_step(function, optimizer, batches(1, 2), 1e-2, step=step, ranks=Ranks())
    for name, p in quantized.items():
        assert isinstance(dict(model.named_parameters())[name], QuantizedTensor)
        assert not torch.equal(p.dequantize(torch.float32), before[name]), f"{name} did not move"
        fresh = p.quantizer.quantize if p.ndim == 2 else p.quantizer.quantize_grouped
        expected = fresh(optimizer.masters[name].detach())
        for field, value in p.fields.items():
            assert torch.equal(value.float(), expected.fields[field].float()), (name, field)


@pytest.mark.parametrize("precision", [PrecisionConfig(dtype="bf16", recipe="mxfp8", quantized_weights=True), None])
def test_an_infinite_gradient_is_skipped_on_request(tmp_path: Path, precision: PrecisionConfig | None) -> None:
    changes = {} if precision is None else {"precision": precision}
    optimizer_config = OptimizerConfig(skip_nonfinite=True, moment_dtype="float8")
    config = tiny_run(tmp_path, optimizer=optimizer_config, **changes)
    model = build_model(config, "cpu", None)
    optimizer = build_optimizer(config, model)
    function = make_loss_function(model.train(), config.precision, "cpu", compiled=False)

    def state() -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in optimizer.state_tensors().items()}
        for name, p in model.named_parameters():
            fields = p.fields if isinstance(p, QuantizedTensor) else {"": p.detach()}
            found |= {f"{name}.{field}": value.clone() for field, value in fields.items()}
        return found

    assert not train_step(function, optimizer, batches(1, 2), 1e-3, step=1, ranks=Ranks()).skipped
    before = state()
    hook = model.decoder.final_layernorm.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = train_step(function, optimizer, batches(1, 2), 1e-3, step=2, ranks=Ranks())
    assert result.skipped and not math.isfinite(result.grad_norm) and math.isfinite(result.loss)
    assert_same_bits(state(), before)
    hook.remove()
    assert not train_step(function, optimizer, batches(1, 2), 1e-3, step=3, ranks=Ranks()).skipped
    assert any(not torch.equal(value.float(), before[name].float()) for name, value in state().items())


def test_a_run_goes_on_after_a_skipped_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run(tmp_path, steps=3, optimizer=OptimizerConfig(skip_nonfinite=True))
    real, count = Optimizer.clip_gradients, iter(range(3))

    def clip(self: Optimizer) -> torch.Tensor:
        if next(count) == 1:
            next(iter(self.parameters.values())).grad[0] = float("inf")
        return real(self)

    monkeypatch.setattr(Optimizer, "clip_gradients", clip)
    assert train(config).step == 3
    rows = rows_of(config)
    assert [row.get("skipped") for row in rows] == [None, True, None]
    assert [row["grad_norm"] is None for row in rows] == [False, True, False]


def test_the_weight_of_a_batch_is_not_that_of_the_routers_term() -> None:
    """It stands for how many predictions are scored, and every token is routed."""
    model = GPTModel(tiny_model(moe=True), dtype=torch.float32)
    loss_function = make_loss_function(model, PrecisionConfig(dtype="fp32"), "cpu", compiled=False)
    ids = torch.randint(257, (2, 16))
    (whole, terms), (half, same) = loss_function(ids), loss_function(ids, torch.tensor(0.5))
    aux_loss = terms[0]
    assert aux_loss > 1e-3 and torch.equal(same[0], aux_loss)
    torch.testing.assert_close(half, 0.5 * (whole - aux_loss) + aux_loss)
