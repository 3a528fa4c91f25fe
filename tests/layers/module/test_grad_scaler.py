"""Loss scaling: what is in a main gradient is divided, checked for infinities and clipped as what is in `.grad`."""

import pytest
import torch
from torch import nn

from te_models.layers import FusedAdamW, GradScaler, LayerNormLinear, gradient_of


def layer(fused: bool) -> LayerNormLinear:
    torch.manual_seed(0)
    found = LayerNormLinear(16, 8, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=fused)
    for parameter in found.parameters() if fused else ():
        parameter.main_grad = torch.zeros(parameter.shape)
    return found


def train(
    scaler: torch.amp.GradScaler, fused: bool, *, clip: bool = False, infinite_at: int | None = None
) -> list[torch.Tensor]:
    """Do three steps of two micro-batches."""
    model = layer(fused)
    optimizer = FusedAdamW(model.parameters(), lr=0.1, master_weights=True)
    for step in range(3):
        optimizer.zero_grad()
        for seed in (1, 2):
            x = torch.randn(40, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
            scaler.scale(model(x).float().square().mean()).backward()
        if infinite_at == step:
            (model.weight.main_grad if fused else model.weight.grad)[0, 0] = float("inf")
        if clip:
            scaler.unscale_(optimizer)
            gradients = [g for p in model.parameters() if (g := gradient_of(p)) is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.mul_(0.01 / norm)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_power_of_two_changes_no_bit(fused: bool, clip: bool) -> None:
    plain = train(GradScaler("cpu", enabled=False), fused)
    scaled = train(GradScaler("cpu", init_scale=2.0**16), fused, clip=clip)
    if clip:
        plain = train(GradScaler("cpu", init_scale=1.0), fused, clip=True)
    assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))


def test_without_main_gradients_it_is_torchs() -> None:
    ours = train(GradScaler("cpu", init_scale=1024.0), False)
    theirs = train(torch.amp.GradScaler("cpu", init_scale=1024.0), False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_infinity_in_a_main_gradient_skips_the_step_and_lowers_the_scale() -> None:
    scaler = GradScaler("cpu", init_scale=1024.0)
    found = train(scaler, True, infinite_at=0)
    assert scaler.get_scale() == 512.0 and all(p.isfinite().all() for p in found)
    assert not torch.equal(found[0], train(GradScaler("cpu", init_scale=1024.0), True)[0])


def test_torchs_scaler_is_refused_where_it_would_leave_main_gradients_scaled() -> None:
    with pytest.raises(ValueError, match=r"allowed: te_models.layers.GradScaler"):
        train(torch.amp.GradScaler("cpu", init_scale=1024.0), True)


def test_other_optimizers_are_scaled_as_by_torch() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert parameter.tolist() == [0.0, 0.0]
