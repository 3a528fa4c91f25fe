"""Training begins with a quantized folder in sharded layouts, as on one rank, and ends with one."""

from pathlib import Path

import pytest
import torch

from te_models.checkpoints import open_checkpoint
from te_models.config import ConfigError
from te_models.training import ModelSource, ParallelConfig, PrecisionConfig, TrainConfig, train
from te_models.training.build import build_model
from te_models.training.ranks.layout import ONE_RANK
from tests.training.processes import train_on_ranks
from tests.training.runs import rows_of, tiny_model, tiny_run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
PRECISION = PrecisionConfig(dtype="bf16", recipe="mxfp8", quantized_weights=True)
LAYOUTS = {"fsdp2": ParallelConfig(data_parallel_shard_size=2), "pp2": ParallelConfig(pipeline_model_parallel_size=2)}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of one rank that begins with a quantized folder."""
    folder = tmp_path_factory.mktemp("quantized")
    model = ModelSource(config=tiny_model(moe=True))
    first = tiny_run(folder, "first", model=model, steps=1, precision=PRECISION)
    train(first)
    run = first.replace(
        output_dir=str(folder / "one"), model=ModelSource(path=str(folder / "first" / "final")), steps=2
    )
    train(run)
    return run


@pytest.mark.sentinels("fsdp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_begins_with_a_quantized_folder(layout: str, begun: TrainConfig) -> None:
    """Its first loss is that of one rank, whose weights have the folder's bits, and it ends with a quantized folder."""
    folder = Path(begun.output_dir).parent
    run = begun.replace(output_dir=str(folder / layout), parallel=LAYOUTS[layout])
    if layout == "fsdp2":
        run = run.replace(data=run.data.replace(gradient_accumulation=run.data.gradient_accumulation // 2))
    train_on_ranks(run, folder)
    found, right = (rows_of(r)[0]["loss"] for r in (run, begun))
    assert found == pytest.approx(right, rel=1e-3)
    with open_checkpoint(Path(run.output_dir) / "final") as written, open_checkpoint(str(begun.model.path)) as read:
        assert written.formats == read.formats and written.formats


def test_another_format_is_refused(begun: TrainConfig) -> None:
    """Of a pipeline's stages, which one process can build: their weights would not have the folder's bits."""
    from te_models.parallel.parts import load_own_parts

    run = begun.replace(precision=PrecisionConfig(dtype="bf16"), model=ModelSource(config=tiny_model(moe=True)))
    model = build_model(run, "cpu", None, None, ONE_RANK)
    said = "quantized, and the sharded model stores it otherwise; allowed: "
    with open_checkpoint(str(begun.model.path)) as source, pytest.raises(ConfigError, match=said):
        load_own_parts(model, source)
