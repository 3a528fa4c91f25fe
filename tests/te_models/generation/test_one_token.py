"""Sublayers of one token without their modules: the same bits, and left to the modules where these do more."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from te_models import GPTModel, KVCache, MLPConfig, ModelConfig
from te_models.kernels.decode_attention import op as decode
from te_models.kernels.gemm import gemv
from te_models.kernels.gemm.few_rows import op as few_rows
from te_models.layers import autocast, quantized_model_init, recipe
from te_models.lora import add_lora
from te_models.model import layer, one_token
from tests.build import VARIANTS, heads, tiny, token_ids

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the products are for x86 CPUs with AVX2")


@pytest.fixture(autouse=True)
def small_weights() -> Iterator[None]:
    """Weights and caches of any size are for the libraries."""
    with (
        mock.patch.object(gemv, "LEAST", 16),
        mock.patch.object(few_rows, "LEAST", 16),
        mock.patch.object(decode, "LEAST", 1),
    ):
        yield


def wide(**attention: Any) -> ModelConfig:
    """With heads that our attention serves."""
    return tiny(attention=heads(kv_channels=16, **attention))


CONFIGS = VARIANTS | {"wide": wide(), "wide, normed heads": wide(qk_layernorm="head", add_qkv_bias=True)}
CONFIGS["wide, windows"] = wide(window_size=5).replace(layer_types=("sliding", "full"))
CONFIGS["wide, one MLP"] = wide().replace(mlp_layers=(0,))
CONFIGS["wide, no gate"] = wide().replace(mlp=MLPConfig(ffn_hidden_size=48, activation="gelu", gated=False))


def model_of(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(config, params_dtype=dtype).eval()


def decoded(model: GPTModel, rows: int, tokens: int = 6) -> Tensor:
    """Return the logits of a prompt and of tokens behind it, one at a time: [B, 3 + tokens, V]."""
    dtype = model.embedding.word_embeddings.weight.dtype
    cache, ids, found = KVCache(model.config, rows, 16, dtype=dtype), token_ids(rows, 3 + tokens), []
    with torch.no_grad():
        for part in ids.split((3,) + (1,) * tokens, dim=1):
            found.append(model(part, cache=cache).logits)
    return torch.cat(found, dim=1)


def by_modules(run: Callable[[], Tensor]) -> Tensor:
    with mock.patch.object(layer, "is_one_token", lambda x: False):
        return run()


def count(run: Callable[[], Any], name: str) -> int:
    """Return how many sublayers did without their modules."""
    with mock.patch.object(one_token, name, side_effect=getattr(one_token, name)) as function:
        results: list[Any] = []
        inner = function.side_effect
        function.side_effect = lambda *args: results.append(found := inner(*args)) or found
        run()
    return sum(result is not None for result in results)


EVERY_DAY = {"moe", "mixed_layers", *(name for name in CONFIGS if name.startswith("wide"))}
MARKED = [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", MARKED)
def test_the_bits_are_those_of_the_modules(name: str) -> None:
    for dtype, rows in ((torch.bfloat16, 1), (torch.float32, 3)):
        model = model_of(CONFIGS[name], dtype)
        if model.decoder.recurrent:
            pytest.skip("its cache is of other kinds")
        found = decoded(model, rows)
        assert torch.equal(found, by_modules(lambda model=model, rows=rows: decoded(model, rows)))


@pytest.mark.parametrize("name", ["wide", "wide, normed heads", "wide, windows", "wide, no gate"])
def test_a_plain_layer_does_without_its_modules(name: str) -> None:
    model = model_of(CONFIGS[name])
    assert count(lambda: decoded(model, 1), "attention") == count(lambda: decoded(model, 2), "mlp") == 2 * 6


@pytest.mark.parametrize("name", ["mxfp8", "block", "nvfp4"])
def test_stored_weights_are_multiplied_as_by_the_modules(name: str) -> None:
    config = wide().replace(hidden_size=128, mlp=MLPConfig(ffn_hidden_size=256))
    with quantized_model_init(recipe=recipe(name)):
        model = model_of(config)
    assert torch.equal(decoded(model, 1), by_modules(lambda: decoded(model, 1)))
    assert count(lambda: decoded(model, 1), "mlp") == 2 * 6


@pytest.mark.parametrize(
    "name", ["linear_qkv", "core_attention", "linear_proj", "linear_fc1", "linear_fc2", "mlp", "all"]
)
def test_hooks_see_every_token(name: str) -> None:
    model, seen = model_of(CONFIGS["wide"]), []
    with torch.no_grad():
        decoded(model, 1)
    hook = lambda module, *_: seen.append(module)  # noqa: E731
    if name == "all":
        handle: Any = torch.nn.modules.module.register_module_forward_hook(hook)
    else:
        block = model.decoder.layers[1]
        owner = block.mlp if "fc" in name else block if name == "mlp" else block.self_attention
        handle = getattr(owner, name).register_forward_pre_hook(hook)
    try:
        decoded(model, 1)
    finally:
        handle.remove()
    assert len(seen) > 7 if name == "all" else len(seen) == 7


def test_what_does_more_than_a_plain_layer_is_left_to_the_modules() -> None:
    model = model_of(CONFIGS["wide"])

    def under_a_recipe() -> None:
        with autocast(recipe=recipe("mxfp8")):
            decoded(model, 1)

    def with_gradients() -> None:
        model(token_ids(1, 1), cache=KVCache(model.config, 1, 4, dtype=torch.bfloat16))

    def in_autocast() -> None:
        with torch.autocast("cpu", torch.float16):
            model(token_ids(1, 1))

    for run in (under_a_recipe, with_gradients, in_autocast):
        assert count(run, "attention") == count(run, "mlp") == 0


def test_adapters_are_part_of_the_result() -> None:
    model = model_of(CONFIGS["wide"])
    before = decoded(model, 1)
    add_lora(model, rank=2, targets=["linear_qkv", "linear_fc1", "linear_fc2"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    found = decoded(model, 1)
    assert not torch.equal(found, before) and torch.equal(found, by_modules(lambda: decoded(model, 1)))
