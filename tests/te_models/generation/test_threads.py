"""Decoding on CPU: a step's short operations run on one thread, and its numbers are the same on any number of them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_models import DraftModel, GPTModel, generate
from te_models.config import AttentionConfig, MLPConfig, ModelConfig
from te_models.layers import Float8BlockScaling, MXFP8BlockScaling, Recipe, quantized_model_init

CONFIG = ModelConfig(
    vocab_size=16384,  # so that the output layer's product is long enough for two threads
    hidden_size=256,
    num_layers=2,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=4),
    mlp=MLPConfig(ffn_hidden_size=512),
)
ONE_RUNTIME = """
import torch
from te_models.kernels.gemm import gemv
torch.set_num_threads(2)
with torch.no_grad():
    gemv.gemv_linear(torch.ones(1, 1024), torch.ones(8192, 1024), None)
    torch.ones(1024, 1024) @ torch.ones(1024, 1024)
files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(*(file for file in files if any(name in file.rsplit("/")[-1] for name in ("gomp", "iomp", "libomp"))), sep="|")
"""


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def model_of(dtype: torch.dtype, recipe: Recipe | None = None) -> GPTModel:
    torch.manual_seed(0)
    with quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return GPTModel(CONFIG, dtype=dtype).eval()


def noted_threads(model: GPTModel) -> list[tuple[int, int]]:
    """Return a list that gets, of each call of the last layer, how many tokens it read on how many of torch's
    threads."""
    found: list[tuple[int, int]] = []
    layer = model.decoder.layers[-1]
    layer.register_forward_hook(lambda _, given, __: found.append((given[0].shape[1], torch.get_num_threads())))
    return found


@pytest.mark.sentinels("bf16", "mxfp8")
@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, MXFP8BlockScaling()),
        (torch.bfloat16, Float8BlockScaling()),
    ],
    ids=["float32", "bf16", "mxfp8", "block"],
)
@pytest.mark.usefixtures("two_threads")
def test_steps_have_the_same_bits_on_two_threads(dtype: torch.dtype, recipe: Recipe | None) -> None:
    model, ids = model_of(dtype, recipe), torch.arange(8)[None]

    def logits(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        found: list[torch.Tensor] = []
        hook = model.register_forward_hook(lambda _, __, output: found.append(output.logits[:, -1]))
        generate(model, ids, 6)
        hook.remove()
        return torch.stack(found)

    assert torch.equal(logits(1), logits(2))


@pytest.mark.usefixtures("two_threads")
def test_a_step_of_each_loop_runs_on_one_thread() -> None:
    model, draft = model_of(torch.bfloat16), model_of(torch.bfloat16)
    ids, threads = torch.arange(12)[None], [noted_threads(m) for m in (model, draft)]
    generate(model, ids, 4)
    assert threads[0] == [(12, 2), *[(1, 1)] * 3]  # the prompt is long enough for two
    threads[0].clear()
    generate(model, ids, 4, draft_model=DraftModel(draft), num_draft_tokens=2)
    assert threads[0][0][1] == threads[1][0][1] == 2
    assert {count for steps in threads for _, count in steps[1:]} == {1} and torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_step_of_transformers_loop_runs_on_one_thread(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from te_models.hf import TEModelForCausalLM

    model_of(torch.bfloat16).save_pretrained(tmp_path)
    model = TEModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    threads = noted_threads(model.gpt)
    model.generate(torch.arange(12)[None], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    assert threads == [(12, 2), *[(1, 1)] * 3]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_has_one_openmp_runtime() -> None:
    ended = subprocess.run([sys.executable, "-c", ONE_RUNTIME], check=True, stdout=subprocess.PIPE, text=True)
    assert len(ended.stdout.strip().split("|")) == 1, ended.stdout
