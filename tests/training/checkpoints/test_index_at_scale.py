"""The index of a sharded checkpoint at numbers of ranks that no test can start: joined, written, read, followed."""

from pathlib import Path

import pytest
import torch

from te_models.checkpoints import CheckpointError
from te_models.parallel.parts import LocalPart
from te_models.training.checkpoints.sharded.index import INDEX, CheckpointIndex, file_of, read_parts_index
from te_models.training.checkpoints.sharded.index_file import write_file
from te_models.training.checkpoints.sharded.join import describe_parts, join
from te_models.training.checkpoints.sharded.storage import plan_reads
from tests.fork_server import Python

HIDDEN, FFN, KEYS, VOCABULARY = 8192, 28672, 1024, 128256


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Those of a 70B model with 80 layers."""
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        own = {
            "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
            "self_attention.linear_qkv.weight": (HIDDEN + 2 * KEYS, HIDDEN),
            "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
            "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
            "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
            "mlp.linear_fc2.weight": (HIDDEN, FFN),
        }
        found |= {f"decoder.layers.{layer}.{name}": shape for name, shape in own.items()}
    return found | {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (VOCABULARY, HIDDEN)}


def parts_of(rank: int, ranks: int, layers: int, *, copies: int = 1) -> dict[str, LocalPart]:
    """Of `ranks` ranks, of which groups of `copies` have the same, AdamW with masters."""
    cut: dict[object, LocalPart] = {}

    def part(shape: tuple[int, ...], dtype: torch.dtype) -> LocalPart:
        if (shape, dtype) not in cut:
            each = -(-shape[0] // (ranks // copies))
            begin = min(rank // copies * each, shape[0])
            end = min(begin + each, shape[0])
            tensor = torch.empty((end - begin, *shape[1:]), dtype=dtype, device="meta")
            cut[shape, dtype] = LocalPart(tensor, shape, {0: ((begin, end),) if end > begin else ()})
        return cut[shape, dtype]

    found: dict[str, LocalPart] = {}
    step = LocalPart.undivided(torch.empty((), device="meta"))
    for name, shape in shapes(layers).items():
        found[f"model.{name}"] = part(shape, torch.bfloat16)
        found |= {f"optimizer.{name}.{k}": part(shape, torch.float32) for k in ("exp_avg", "exp_avg_sq", "master")}
        found[f"optimizer.{name}.step"] = step
    for name, size in (("python", 2512), ("torch", 5056)):
        found[f"rng.{rank}.{name}"] = LocalPart.undivided(torch.empty(size, dtype=torch.uint8, device="meta"))
    return found


def bytes_of_files(index: CheckpointIndex) -> list[int]:
    """Return how many bytes of tensors each file has."""
    found = torch.zeros(len(index.files), dtype=torch.float64)
    for stored in index.tensors.values():
        found.index_add_(0, stored.files.long(), stored.cutting.elements * stored.dtype.itemsize)
    return [int(nbytes) for nbytes in found.tolist()]


def write_holes(folder: Path, index: CheckpointIndex) -> None:
    """Write the files of ranks without what is in them."""
    for rank, nbytes in enumerate(bytes_of_files(index)):
        with (folder / file_of(rank)).open("wb") as file:
            file.truncate(nbytes + 1000)


def saved(folder: Path, ranks: int, layers: int, copies: int = 1) -> CheckpointIndex:
    """Do what ranks and the first of them do, but for the data."""
    index, writes = join([describe_parts(parts_of(rank, ranks, layers, copies=copies)) for rank in range(ranks)])
    assert len(writes) == ranks
    write_holes(folder, index)
    write_file(folder, index)
    found = read_parts_index(folder)
    found.check_same(index)
    found.check_names(ranks, INDEX)
    return found


def check_resume(index: CheckpointIndex, ranks: int, layers: int) -> None:
    """Check that what a rank reads in another layout is its parts, of few files."""
    for rank in (0, ranks - 1):
        parts = {name: part for name, part in parts_of(rank, ranks, layers).items() if not name.startswith("rng.")}
        reads = plan_reads(index, parts)
        found = sum(read.target.nbytes for some in reads.values() for read in some)
        assert found == sum(part.tensor.nbytes for part in parts.values())
        assert len(reads) < 2 * -(-len(index.files) // ranks) + 4


def test_an_index_of_many_ranks_is_read_as_it_was_written(tmp_path: Path) -> None:
    index = saved(tmp_path, ranks=96, layers=4)
    check_resume(index, 64, 4)
    check_resume(index, 5, 4)
    assert (tmp_path / INDEX).stat().st_size < 150_000


def test_copies_write_as_many_bytes_each(tmp_path: Path) -> None:
    sizes = bytes_of_files(saved(tmp_path, ranks=32, layers=8, copies=4))
    assert max(sizes) - min(sizes) < 0.2 * max(sizes)


def test_ranks_that_disagree_are_told() -> None:
    whole = {f"model.w{i}": LocalPart.undivided(torch.zeros(4, 4 + i, device="meta")) for i in range(3)}
    other = whole | {"model.w1": LocalPart.undivided(torch.zeros(4, 6, device="meta"))}
    with pytest.raises(CheckpointError, match=r"ranks have 'model\.w1' as F32 \[4, (5|6)\] and as F32 \[4, (5|6)\]"):
        join([describe_parts(whole), describe_parts(other)])


def test_boxes_that_do_not_cover_a_tensor_are_found_when_it_is_saved(tmp_path: Path) -> None:
    half = {"model.w": LocalPart(torch.zeros(2, 4, device="meta"), (4, 4), {0: ((0, 2),)})}
    index, _ = join([describe_parts(half), describe_parts(half)])
    write_holes(tmp_path, index)
    write_file(tmp_path, index)
    with pytest.raises(CheckpointError, match=r"boxes of 'model\.w' in parts/index\.safetensors do not cover"):
        read_parts_index(tmp_path)


@pytest.mark.slow
def test_1024_ranks_of_a_70b(tmp_path: Path) -> None:
    """Within 1 GiB, in a process of its own; it takes 20 s of processor time, most of it what 1,024 ranks do."""
    done = Python(["-m", __name__, str(tmp_path)], fresh=True).finish(400)
    assert done.returncode == 0, done.stderr
    _, mebibytes = map(float, done.stdout.split())
    assert mebibytes < 1024
