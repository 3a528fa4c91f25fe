"""What each of the two processes of test_split_model does: this module is run with RESULTS, FOLDERS and the cases.

FOLDERS holds a model folder per case. Every case loads its model whole and split over the two ranks, and compares what
is read, outputs, gradients, generation and what is saved. Its outcome, "ok" or a traceback, is written to
RESULTS.<rank>.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import te_models.checkpoints.mapping.stream as move
from te_models import AttentionConfig, GPTModel, ModelConfig, compile_model, generate
from te_models.checkpoints import CheckpointError, expected_tensors, open_checkpoint, verify
from te_models.checkpoints.io.boxes import element_count
from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts
from te_models.config import MLPConfig
from te_models.layers import QuantizedTensor
from te_models.memory import return_freed_memory
from tests.checkpoints.memory_child import anonymous
from tests.layers.bits import same_bits
from tests.ranks import report_cases

RANKS = 2
CASES = (
    "qwen3",
    "gpt2",
    "gemma2",
    "qwen2_moe",
    "llama4",
    "sinks",
    "gpt_oss",
    "olmo2",
    "minimax_m2",
    "deepseek_v2-greedy-plain-q",
    "deepseek_v3",
    "phi-qk-norms",
    "deepseek_v2-biases-plain-q",
    "laguna",
    "laguna-channels",
    "mimo_v2_flash",
    "cohere",
    "axk1",
    "glm_moe_dsa",
    "jamba",
    "minimax",
    "falcon_h1-flags",
    "qwen3_next-flags",
    "kimi_linear-flags",
    "bailing_hybrid",
    "nemotron_h-latent",
    "zamba2",
    "lfm2",
)
QUANTIZED_CASES = ("current", "block", "mxfp8", "nvfp4")
LARGE = ModelConfig(
    vocab_size=64,
    hidden_size=512,
    num_layers=10,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=8),
    mlp=MLPConfig(ffn_hidden_size=2560),
)
"""190 MiB, of which no tensor has more than 10."""
SLACK = 12 << 20
"""The buffers of a file that is written take 8 MiB."""


class NoLogits(TorchDispatchMode):
    """Raises AssertionError where an operation makes a tensor of all words' logits of all tokens."""

    def __init__(self, tokens: int, words: int) -> None:
        super().__init__()
        self.sizes = {tokens, words}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            assert set(result.shape) != self.sizes, (func, result.shape)
        return result


class Reads:
    """Counts the bytes of tensors that are read while it is active."""

    def __enter__(self) -> Reads:
        self.bytes, self._read, self._in_place = 0, move.read_piece, move._read_in_place

        def read(store, piece):
            found = self._read(store, piece)
            self.bytes += found.numel() * found.element_size()
            return found

        def read_in_place(store, piece, out):
            done = self._in_place(store, piece, out)
            self.bytes += element_count(piece.box) * out.element_size() if done else 0
            return done

        move.read_piece, move._read_in_place = read, read_in_place
        return self

    def __exit__(self, *_: object) -> None:
        move.read_piece, move._read_in_place = self._read, self._in_place


def part_of(config, name: str, whole: torch.Tensor, rank: int, layout: str) -> torch.Tensor:
    """This rank's part of a parameter, cut with torch's own functions."""
    part = parts(config, expected_tensors(config, layout), ShardPlace(tp_rank=rank, tp_size=RANKS))[name]
    if part.dim is None:
        return whole
    return torch.cat([whole.narrow(part.dim, begin, end - begin) for begin, end in part.ranges], part.dim)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= 2e-5 * expected.abs().max().clamp(min=1e-3))


def check(folder: Path, saved: Path) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for layout in ("per-gemm", "grouped") if "moe" in folder.name else ("grouped",):
        whole = GPTModel.from_pretrained(folder, expert_layout=layout).eval()
        with Reads() as reads:
            split = GPTModel.from_pretrained(folder, expert_layout=layout, device_mesh=mesh).eval()
        own = sum(t.numel() * 4 for _, t in split.stored_tensors())
        everything = sum(t.numel() * 4 for _, t in whole.stored_tensors())
        assert reads.bytes == own < 0.8 * everything, (reads.bytes, own, everything)
        expected = dict(whole.stored_tensors())
        for name, tensor in split.stored_tensors():
            assert torch.equal(tensor, part_of(whole.config, name, expected[name], rank, layout)), name
        assert any(hasattr(p, "tensor_model_parallel") for p in split.parameters())
    ids = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(0))
    results = [model(ids, labels=ids) for model in (whole, split)]
    assert close(results[1].logits, results[0].logits)
    for result in results:
        result.loss.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    trained = {name: p for name, p in split.named_parameters() if p.requires_grad}
    assert trained.keys() == {name for name, gradient in gradients.items() if gradient is not None}
    for name, p in trained.items():
        assert close(p.grad, part_of(whole.config, name, gradients[name], rank, layout)), name
    for chunk in (None, 5):  # a loss without logits, of all tokens and of five at a time
        split.zero_grad()
        split.output_layer.loss_chunk_tokens = chunk
        with NoLogits(ids.numel(), whole.config.vocab_size):
            loss = split(ids, labels=ids, return_logits=False).loss
            loss.backward()
        assert close(loss, results[0].loss)
        for name, p in trained.items():
            assert close(p.grad, part_of(whole.config, name, gradients[name], rank, layout)), (chunk, name)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    tokens = [generate(model, ids, 6, attention_mask=mask) for model in (whole, split)]
    assert torch.equal(*tokens)
    torch.manual_seed(rank)  # sampled tokens are the same, too, wherever the ranks' generators stand
    sampled = generate(split, ids, 6, temperature=1.0)
    first = sampled.clone()
    dist.broadcast(first, 0)
    assert torch.equal(sampled, first)
    split.save_pretrained(saved)
    assert verify(folder, saved).equal


def check_quantized(folder: Path, saved: Path) -> None:
    """Weights stored quantized: each rank has the bits of its part, reads nothing else, and saves the whole again."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    whole = GPTModel.from_pretrained(folder).eval()
    with Reads() as reads:
        split = GPTModel.from_pretrained(folder, device_mesh=mesh).eval()
    own, expected = 0, dict(whole.stored_tensors())
    owned = parts(whole.config, expected_tensors(whole.config), ShardPlace(tp_rank=rank, tp_size=RANKS))
    kinds = set()
    for name, tensor in split.stored_tensors():
        fields = tensor.fields.values() if isinstance(tensor, QuantizedTensor) else [tensor]
        own += sum(field.numel() * field.element_size() for field in fields)
        part, offset = owned[name], 0
        if not isinstance(tensor, QuantizedTensor) or part.dim is None:
            assert torch.equal(tensor, part_of(whole.config, name, expected[name], rank, "grouped")), name
            continue
        assert tensor.tensor_model_parallel and tensor.partition_dim == part.dim, name
        for begin, end in part.ranges:
            mine = tensor.narrow(part.dim, offset, end - begin)
            assert same_bits(mine, expected[name].narrow(part.dim, begin, end - begin)), name
            offset += end - begin
            kinds.add((part.dim, tensor.dim()))
    assert kinds == {(0, 2), (1, 2), (1, 3), (2, 3)}
    assert reads.bytes == own, (reads.bytes, own)
    ids = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(0))
    assert close(split(ids).logits, whole(ids).logits)
    split.save_pretrained(saved)
    assert verify(folder, saved).equal
    # a rank that quantizes its part anew has a scale of its own, and what has two scales is no tensor of the format
    if folder.name == "current":
        weight = split.get_parameter("decoder.layers.0.mlp.linear_fc1.weight")
        with torch.no_grad():
            weight.copy_(torch.full(weight.shape, rank + 1.0))
        try:
            split.save_pretrained(saved.with_name("other"))
        except CheckpointError as error:
            assert "is split over ranks that quantized it with scales of their own" in str(error)
        else:
            raise AssertionError("different scales were saved as one")


def check_memory(saved: Path) -> None:
    """Saving takes the memory of the largest tensor and of the part that comes on the rank that writes, and nothing on
    the other one."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    split = GPTModel(LARGE, tp_group=mesh.get_group())
    shapes = expected_tensors(LARGE)
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    peak = grown(lambda: split.save_pretrained(saved))
    try:
        split.save_pretrained(saved)
    except CheckpointError as error:
        assert str(error).startswith(f"{saved} exists" if rank == 0 else f"the first rank could not write {saved}; it")
    else:
        raise AssertionError("an existing folder was written over")
    with open_checkpoint(saved) as checkpoint:
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == shapes
    assert sum(sizes) > 18 * max(sizes)
    bound = 3 * max(sizes) // 2 + SLACK if rank == 0 else SLACK
    assert peak < bound, f"{peak >> 20} MiB of {sum(sizes) >> 20}"


def grown(function: Callable[[], object]) -> int:
    """Return by how many bytes the process's own memory grew at the most while a function ran."""
    return_freed_memory()
    before, peak, done = anonymous(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    function()
    done.set()
    thread.join()
    return peak


def compiled(folder: Path) -> None:
    """One graph of a split model, on every rank."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    split = GPTModel.from_pretrained(folder, device_mesh=mesh)
    ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = split(ids, labels=ids)
    got = compile_model(split)(ids, labels=ids)
    assert close(got.logits, expected.logits) and close(got.loss, expected.loss)
    got.loss.backward()


def case_of(name: str, folders: Path) -> Callable[[], None]:
    """Of a model's name, of "compiled-" and a name, or "memory"."""
    if name.startswith("compiled-"):
        return functools.partial(compiled, folders / name.removeprefix("compiled-"))
    if name == "memory":
        return functools.partial(check_memory, folders / "memory-saved")
    function = check_quantized if name in QUANTIZED_CASES else check
    return functools.partial(function, folders / name, folders / f"{name}-saved")


if __name__ == "__main__":
    report_cases({name: case_of(name, Path(sys.argv[2])) for name in sys.argv[3:]}, sys.argv[1])
