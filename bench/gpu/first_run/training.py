"""Part 6: a train step of the quickstart's model, SmolLM2-135M's shape, in bf16, FP8 and MXFP8.

Weights are random, so nothing is downloaded. First loss and gradients of a short batch against the CPU, eager, then
steps of a long one, whose blocks are compiled: TFLOP/s, tokens a second, memory, and a loss that falls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from te_models import AttentionConfig, EmbeddingConfig, GPTModel, MLPConfig, ModelConfig, layers
from te_models.training.config import OptimizerConfig, PrecisionConfig
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.step import make_loss_function

from .setting import Setting
from .subjects import BF16, Subject, compare, named
from .worker import WrongError

_RECIPES = ("bf16", "current", "mxfp8")
_CHECKED = ("embedding", "layers.0.", "final")
"""Of the parameters' names: those whose gradients are compared, which every other gradient has passed through or by."""


def smollm2(setting: Setting) -> ModelConfig:
    """Return SmolLM2-135M's configuration; in a rehearsal a small one of its proportions."""
    hidden, number, heads, vocabulary = (48, 2, 3, 512) if setting.rehearse else (576, 30, 9, 49152)
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=number,
        max_position_embeddings=2048,
        attention=AttentionConfig(num_attention_heads=heads, num_query_groups=heads // 3),
        mlp=MLPConfig(ffn_hidden_size=hidden * 8 // 3),
        embedding=EmbeddingConfig(share_embeddings_and_output_weights=True),
        init_method_std=hidden**-0.5,
    )


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the comparison and the measurement of each precision, bf16 first."""
    made = cache(partial(model, setting))
    for recipe in _RECIPES:
        yield f"loss and gradients in {recipe}, against the CPU", partial(against_cpu, setting, made, recipe)
        yield f"steps in {recipe}, compiled by block", partial(steps, setting, made, recipe, True)
    for recipe in _RECIPES:
        yield f"steps in {recipe}, eager", partial(steps, setting, made, recipe, False)


def model(setting: Setting) -> Subject:
    """Return the model on the CPU and a short batch."""
    subject = Subject.__new__(Subject)
    torch.manual_seed(0)
    subject.kind, config = "SmolLM2-135M", smollm2(setting)
    subject.module = GPTModel(config, params_dtype=BF16)
    subject.inputs = (torch.randint(config.vocab_size, (1, 32 if setting.rehearse else 128)),)
    layers.name_modules(subject.module)
    return subject


def against_cpu(setting: Setting, made: Callable[[], Subject], recipe: str) -> dict[str, Any]:
    """Compare the loss and some gradients; the CPU runs a second time with weights that are a rounding off."""
    subject = made()

    def results(module: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        module.zero_grad()
        with layers.autocast(enabled=recipe != "bf16", recipe=named(recipe)):
            loss = module(ids, labels=ids, return_logits=False).loss
        loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        return {"loss": loss.detach()} | {n: g for n, g in gradients.items() if any(part in n for part in _CHECKED)}

    module, (ids,) = subject.on(setting.device)
    with setting.on_device():
        found = results(module, ids)
        setting.synchronize()
    module, (ids,) = subject.on(torch.device("cpu"))
    want = results(module, ids)
    facts = compare(found, want, subject.moved(lambda nudged: results(nudged, ids), want))
    losses = {"loss": float(found["loss"]), "cpu_loss": float(want["loss"])}
    return facts | losses | {"says": f"loss {losses['loss']:.5f}, on the CPU {losses['cpu_loss']:.5f}"}


def flops(config: ModelConfig, parameters: int, batch: int, length: int) -> float:
    """Return what one step multiplies and adds: 6 for each weight and token, and of attention's scores and values the
    half that is not masked, forward and twice as much backward. A tied embedding multiplies once, as the output."""
    return 6.0 * parameters * batch * length + 6.0 * config.num_layers * config.hidden_size * batch * length**2


def steps(setting: Setting, made: Callable[[], Subject], recipe: str, compiled: bool) -> dict[str, Any]:
    """Train on one batch, and time it."""
    torch._dynamo.reset()
    module, _ = made().on(setting.device)
    config, device = module.config, setting.device
    batch, length = (1, 32) if setting.rehearse else (8, 2048)
    ids = torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(2)).to(device)
    precision = PrecisionConfig.from_dict({"dtype": "bf16", "recipe": "none" if recipe == "bf16" else recipe})
    compiled_here = compiled and not setting.rehearse
    loss_function = make_loss_function(module, precision, device.type, compiled=compiled_here, mode="block")
    optimizer = Optimizer(module.named_parameters(), OptimizerConfig())
    region = layers.autocast(enabled=recipe != "bf16", recipe=named(recipe))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with region:
            loss, _ = loss_function(ids)
        loss.backward()
        optimizer.step(1e-3)
        return loss.detach()

    begun = time.perf_counter()
    losses = [float(step()) for _ in range(3)]
    warm = round(time.perf_counter() - begun, 1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(2 if setting.rehearse else 10):
        setting.synchronize()
        begun = time.perf_counter()
        loss = step()
        setting.synchronize()
        seconds.append(time.perf_counter() - begun)
        losses.append(float(loss))
    if not losses[-1] < losses[0]:
        raise WrongError(f"the loss does not fall on one batch: {', '.join(f'{loss:.4f}' for loss in losses)}")
    taken, tokens = statistics.median(seconds), batch * length
    rate = flops(config, sum(p.numel() for p in module.parameters()), batch, length) / taken / 1e12
    facts = {"losses": losses, "ms": round(1e3 * taken, 2), "warm_s": warm, "tokens_per_s": round(tokens / taken)}
    facts |= {"tflop_per_s": round(rate, 2)}
    memory = ""
    if device.type == "cuda":
        facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        memory = f", peak {facts['peak_gib']} GiB"
    text = f"{facts['ms']} ms, {facts['tokens_per_s']} tokens/s, {facts['tflop_per_s']} TFLOP/s{memory}"
    return facts | {"says": f"{text}, first three steps {warm} s, loss {losses[0]:.3f} to {losses[-1]:.3f}"}
