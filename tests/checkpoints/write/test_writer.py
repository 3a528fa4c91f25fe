"""What the writer does not do: write a file that is not as its header says."""

from pathlib import Path

import pytest
import torch

from te_models.checkpoints.io.store import MemoryStore
from te_models.checkpoints.mapping.plan import OutputTensor
from te_models.checkpoints.write.shards import Shard
from te_models.checkpoints.write.writer import write_weights


@pytest.mark.parametrize("elements", [3, 5])
def test_a_computed_tensor_of_another_size_is_an_error(elements: int, tmp_path: Path) -> None:
    output = OutputTensor("a", "F32", (4,), compute=lambda: [torch.zeros(elements)])
    with pytest.raises(RuntimeError, match=f"^a has {4 * elements} bytes, planned 16$"):
        write_weights(tmp_path, [Shard("model.safetensors", (output,), {})], MemoryStore({}))
