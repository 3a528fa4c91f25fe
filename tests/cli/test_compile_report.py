"""`te-models info --compile-report`: what it says of a dense and a sparse model, of a break, and in JSON."""

import json
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.cli.main import main
from te_models.compile import report as compile_report
from tests.build import VARIANTS, one_layer

SLOW = pytest.mark.slow
# from inside the compiler
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of each kind."""
    found = {}
    for kind in ("dense", "moe"):
        torch.manual_seed(0)
        found[kind] = tmp_path_factory.mktemp("report") / kind
        GPTModel(one_layer(VARIANTS[kind])).save_pretrained(found[kind])
    return found


def report(capsys: pytest.CaptureFixture[str], folder: Path, *words: str, code: int = 0) -> dict:
    assert main(["info", "--compile-report", str(folder), *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("kind", "recipe", "mode", "dynamic", "graphs"),
    [
        pytest.param("moe", None, "block", "always", [2, 0, 0, 0, 2, 0], marks=SLOW),
        pytest.param("dense", "mxfp8", "whole", "auto", [1, 0, 1, 1, 1, 0], marks=SLOW),
        pytest.param("dense", None, "block", "never", [2, 0, 2, 2, 2, 2], marks=SLOW),
        pytest.param("moe", "delayed", "whole", "always", [1, 0, 0, 0, 1, 0], marks=SLOW),
    ],
)
def test_what_each_call_compiles(
    kind: str, recipe: str | None, mode: str, dynamic: str, graphs: list[int], folders: dict, capsys
) -> None:
    """block: the layer and the output layer; auto: length and batch become dynamic one after the other."""
    options = ["--mode", mode, "--dynamic", dynamic, *(["--recipe", recipe] if recipe else [])]
    found = report(capsys, folders[kind], *options)
    assert [call["graphs"] for call in found["calls"]] == graphs
    assert found["graphs"] == sum(graphs) and found["breaks"] == {}
    for call, count in zip(found["calls"], graphs, strict=True):
        training = call["call"].startswith("train")
        passes = [program["pass"] for program in call["programs"]]
        expected = ["forward", "backward"] if training else ["forward without gradients"]
        assert sorted(passes) == sorted(expected * count)
        assert all(program["operations"] > 0 for program in call["programs"])
    again = [reason for call in found["calls"] for reason in call["reasons"]]
    assert len(again) == sum(graphs) - graphs[0]


@pytest.mark.slow
@pytest.mark.costs(40)
def test_an_evaluation_is_one_graph_without_gradients(folders: dict, capsys, monkeypatch) -> None:
    monkeypatch.setattr(compile_report, "CALLS", [call for call in compile_report.CALLS if not call[1]])
    found = report(capsys, folders["dense"], "--dynamic", "always")
    assert (found["graphs"], found["breaks"]) == (1, {})
    assert [call["graphs"] for call in found["calls"]] == [1, 0]
    (program,) = found["calls"][0]["programs"]
    assert program["pass"] == "forward without gradients" and program["operations"] > 10


@pytest.mark.slow
def test_the_text_names_what_is_in_the_graphs(folders: dict, capsys) -> None:
    assert main(["info", "--compile-report", str(folders["dense"]), "--dynamic", "always"]) == 0
    text = capsys.readouterr().out
    assert "2 graphs, 0 breaks" in text
    (line,) = [line for line in text.splitlines() if line.startswith("backward, ")]
    assert line.endswith("of: train step") and int(line.split()[1]) > 10


def test_every_part_keeps_its_mode() -> None:
    model = GPTModel(one_layer(VARIANTS["dense"]))
    model.decoder.layers[0].eval()
    before = [module.training for module in model.modules()]
    with compile_report._kept_mode(model):
        model.eval()
    assert [module.training for module in model.modules()] == before


def test_options_reach_the_report(folders: dict, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(model: GPTModel, recipe: object, **options: object) -> dict:
        seen.append((model.activation_checkpointing, recipe is None, options))
        return {"calls": [], "graphs": 0, "breaks": {}}

    monkeypatch.setattr(compile_report, "compile_report", note)
    words = ["--activation-checkpointing", "--mode", "block", "--dynamic", "never", "--recipe", "mxfp8"]
    report(capsys, folders["dense"], *words)
    report(capsys, folders["dense"])
    block, whole = {"mode": "block", "dynamic": False}, {"mode": "whole", "dynamic": None}
    assert seen == [(True, False, block), (False, True, whole)]


@pytest.mark.slow
def test_a_break_is_told_and_fails(folders: dict, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    load = GPTModel.from_pretrained

    def with_a_break(folder: str) -> GPTModel:
        model = load(folder)
        mlp = model.decoder.layers[0].mlp
        forward = mlp.forward

        def broken(*args: object) -> object:
            torch._dynamo.graph_break(msg="planted here")
            return forward(*args)

        mlp.forward = broken
        return model

    monkeypatch.setattr(GPTModel, "from_pretrained", with_a_break)
    found = report(capsys, folders["dense"], "--dynamic", "always", code=1)
    assert any("planted here" in reason for reason in found["breaks"])
    assert main(["info", "--compile-report", str(folders["dense"]), "--dynamic", "always"]) == 1
    text = capsys.readouterr().out
    assert "planted here" in text and " 0 breaks" not in text


@pytest.mark.parametrize(
    "option", [["--recipe", "mxfp8"], ["--mode", "block"], ["--dynamic", "never"], ["--activation-checkpointing"]]
)
def test_options_of_the_report_need_a_model(option: list[str], capsys) -> None:
    assert main(["info", *option]) != 0
    assert f"{option[0]} needs --compile-report DIR" in capsys.readouterr().err
