"""Values of quantized files, read a region at a time: any region is that part of the whole, wherever blocks end."""

import random
from pathlib import Path

import pytest
import torch

from te_models.checkpoints.folder.checkpoint import open_checkpoint
from te_models.checkpoints.formats import VALUES
from te_models.checkpoints.io.boxes import Range, slices
from tests.checkpoints.quantized_cases import CASES, CHANNEL, make


@pytest.mark.sentinels("fp8-moe", "channel", "mxfp4-gpt-oss")
@pytest.mark.parametrize("case", ["fp8-moe", "modelopt-fp8", "modelopt-nvfp4", "mxfp4-gpt-oss", "channel"])
def test_any_region_is_a_part_of_the_whole(tmp_path: Path, case: str) -> None:
    source, _ = make(CASES.get(case, CHANNEL), tmp_path, torch.float32)
    chance, checked = random.Random(0), 0
    with open_checkpoint(source, storage=VALUES) as ckpt:
        for name, info in ckpt.store.tensors.items():
            if ckpt.store.can_read_bytes(name):
                continue
            whole = ckpt.store.read(name, tuple(Range(0, size) for size in info.shape))
            assert whole.isfinite().all() and tuple(whole.shape) == info.shape
            for _ in range(20):
                box = tuple(Range(*sorted(chance.sample(range(size + 1), 2))) for size in info.shape)
                if box[-2].size % 2 == 0:  # rows may be interleaved, columns never are
                    box = (*box[:-2], box[-2]._replace(step=2), box[-1])
                assert torch.equal(ckpt.store.read(name, box), whole[slices(box)])
                checked += 1
    assert checked
