"""Families found again as if nobody knew them, and what adopt refuses."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from te_models.adopt import AdoptError, adopt, known_type, outcome, write_adopted
from te_models.checkpoints import FAMILIES
from te_models.checkpoints.families.base.fields import Flag
from te_models.cli.main import main
from tests.checkpoints.hf_cases import transformers

FOUND = ("llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "cohere")))


def loaded(file: Path, constant: str) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, constant)


@pytest.mark.parametrize("model_type", FOUND)
def test_a_hidden_family_is_found_again(tmp_path: Path, model_type: str) -> None:
    """... as a file that reads other sizes and other weights than it was found with, too."""
    found = adopt(model_type)
    assert found.report.verdict == "declared", found.report.lacking
    files = write_adopted(found, tmp_path / "out")
    assert files == sorted([f"{model_type}.py", f"test_{model_type}.py", "report.json", "report.md"])
    family = loaded(tmp_path / "out" / f"{model_type}.py", model_type.upper())
    known = known_type(model_type)
    sizes = {"vocab_size": 83, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    heads = {"head_dim": 16} if "head_dim" in known.defaults else {}
    built = known.build({**sizes, **heads, "intermediate_size": 40, "num_hidden_layers": 3}, seed=11)
    assert outcome(family, built, seed=11)[0] == "same", outcome(family, built, seed=11)
    original = FAMILIES[model_type].read_config(built.values)
    assert family.read_config(built.values).replace(norm=original.norm) == original
    declared = loaded(tmp_path / "out" / f"test_{model_type}.py", "CASES")
    assert set(declared) == set(found.cases) and "intermediate_size = 64" in declared
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["verdict"] == "declared" and report["meanings"]["hidden_size"] == "hidden_size"
    assert "initializer_range" in report["of_training"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_found_of_any_family_has_transformers_logits(model_type: str) -> None:
    """With other weights than it was found with, and in the form that transformers holds in memory."""
    try:
        found = adopt(model_type)
    except AdoptError as error:
        pytest.skip(f"transformers makes no small model: {error}")
    if found.family is None:
        pytest.skip(f"no declaration is found: {found.report.lacking['']}")
    for seed, options in enumerate(found.cases.values(), 100):
        built = known_type(model_type).build({**found.sizes, **options}, seed=seed)
        assert outcome(found.family, built, seed=seed)[0] == "same", options
        assert outcome(found.family, built, memory=True, seed=seed)[0] in ("same", "refused"), options


def test_a_flag_sets_other_paths_where_it_is_true() -> None:
    llama = FAMILIES["llama"]
    flag = Flag("side_by_side", (("block", "parallel"),), (("block", "pre"),), default=False)
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = llama.read_config({**sizes, "intermediate_size": 8})
    for value, block in ((True, "parallel"), (False, "pre")):
        assert flag.read({"side_by_side": value}) == {"block": block}
        assert flag.write(config.replace(block=block)) == {"side_by_side": value}


def test_a_type_with_an_element_that_is_missing_gets_a_report_alone(tmp_path: Path, capsys: Any) -> None:
    assert main(["adopt", "rwkv", str(tmp_path / "out")]) == 3
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["report.json", "report.md"]
    assert "has no declaration" in (tmp_path / "out/report.md").read_text()
    assert "refused" in capsys.readouterr().out


def test_bad_input_is_named(tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "out")
    assert main(["adopt", "llama", out]) == 2
    assert "te_models knows model_type 'llama' already" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert main(["adopt", str(tmp_path / "folder"), out]) == 2
    assert "has no config.json" in capsys.readouterr().err
    with pytest.raises(AdoptError, match=f"is unknown to transformers {transformers.__version__}"):
        adopt("llamma")
    assert not Path(out).exists()
