"""A checkpoint of any layout becomes by one command the quantized Hugging Face folder of one rank's result."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.checkpoints import export_hf, open_checkpoint
from te_models.cli.main import main
from te_models.config import ModelConfig
from te_models.training import LoRAConfig, ModelSource, OptimizerConfig, ParallelConfig, PrecisionConfig, train
from te_models.training.exporting import export_alone
from tests.training.processes import train_on_ranks
from tests.training.runs import assert_same_bits, tensors_under, tiny_model, tiny_run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"data_parallel_shard_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
}
FORMATS = {"block": "fp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4-pack-quantized", "int4": "pack-quantized"}
"""Recipe -> the format of the files."""


def _model() -> ModelConfig:
    """A qwen3_moe, whose matrices have whole blocks of 128 rows and columns in files."""
    model = tiny_model(moe=True, hidden=128)
    return model.replace(attention=model.attention.replace(num_query_groups=4, qk_layernorm="head"))


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.sentinels("fsdp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_becomes_a_quantized_folder(layout: str, tmp_path: Path) -> None:
    """File by file what one rank writes that takes the checkpoint over, and whose result is exported."""
    run = tiny_run(tmp_path, steps=1, model=ModelSource(config=_model()))
    data = run.data.replace(gradient_accumulation=1, global_batch_size=4)
    run = run.replace(data=data, parallel=ParallelConfig(**LAYOUTS[layout]))
    train_on_ranks(run, tmp_path)
    saved = tmp_path / "run" / "checkpoints" / "step-00000001"
    train(run.replace(output_dir=str(tmp_path / "one"), parallel=ParallelConfig(), resume_from=str(saved)))
    for recipe, format in FORMATS.items():
        out, expected = tmp_path / recipe, tmp_path / f"{recipe}-one"
        assert main(["export", str(saved), str(out), "--recipe", recipe, "--format", format]) == 0
        export_hf(tmp_path / "one" / "final", expected, recipe=recipe, format=format)
        assert digests(out) == digests(expected) and len(digests(out)) > 1, recipe
        with open_checkpoint(out) as written:
            assert written.formats, recipe
    assert not list(tmp_path.glob(".*"))


@pytest.mark.sentinels("pp2")
@pytest.mark.parametrize("layout", ["fsdp2", "pp2"])
def test_a_quantized_folder_comes_back_from_a_sharded_run(layout: str, tmp_path: Path) -> None:
    """A run that trains norms alone keeps every bit of the weights that it began with, as on one rank."""
    precision = PrecisionConfig(dtype="bf16", recipe="mxfp8", quantized_weights=True)
    first = tiny_run(tmp_path, "first", steps=1, model=ModelSource(config=_model()), precision=precision)
    train(first)
    source = ModelSource(path=str(tmp_path / "first" / "final"))
    frozen = OptimizerConfig(lr=1e-3, freeze=("*.weight",))
    data = first.data.replace(gradient_accumulation=1, global_batch_size=4)
    one = first.replace(output_dir=str(tmp_path / "one"), model=source, optimizer=frozen, data=data)
    train(one)
    run = one.replace(output_dir=str(tmp_path / "run"), parallel=ParallelConfig(**LAYOUTS[layout]))
    train_on_ranks(run, tmp_path)
    for name in ("one", "run"):
        saved = tmp_path / name / "checkpoints" / "step-00000001"
        assert main(["export", str(saved), str(tmp_path / f"{name}-hf")]) == 0
    found, right = (tensors_under(tmp_path / f"{name}-hf") for name in ("run", "one"))
    for name in [name for name in found if "layernorm" in name]:
        assert not torch.equal(found.pop(name), torch.ones(())) and name in right
        del right[name]
    assert any(tensor.dtype is torch.float8_e4m3fn for tensor in found.values())
    assert_same_bits(found, right)


@pytest.mark.parametrize("lora", [0, 4])
def test_a_checkpoint_of_one_rank_keeps_its_dtypes(lora: int, tmp_path: Path) -> None:
    """What the run itself wrote, which trained in bf16."""
    train(tiny_run(tmp_path, steps=1, precision=PrecisionConfig(dtype="bf16"), lora=LoRAConfig(rank=lora)))
    export_alone(tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "alone")
    assert_same_bits(tensors_under(tmp_path / "alone"), tensors_under(tmp_path / "run" / "final"))


def test_a_recipe_of_what_is_quantized_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a sentence about the folder that the user named."""
    run = tiny_run(tmp_path, steps=1, model=ModelSource(config=_model()))
    train(run)
    final, stored = Path(run.output_dir) / "final", tmp_path / "stored"
    assert main(["quantize", str(final), str(stored), "--recipe", "block"]) == 0
    assert main(["export", str(stored), str(tmp_path / "hf"), "--recipe", "block"]) == 2
    assert f"{stored} has quantized weights" in capsys.readouterr().err
    assert main(["export", str(final), str(tmp_path / "hf"), "--recipe", "int4", "--format", "mxfp4"]) == 2
    said = capsys.readouterr().err
    assert "weights stored as int4 cannot be written as mxfp4" in said and ".quantized" not in said
    assert main(["export", str(final), str(tmp_path / "hf"), "--recipe", "int4", "--dequantize"]) == 2
    assert "allowed with dequantize: no recipe" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".*"))
