"""Every verb on everything that people start from: it works, or one sentence says why not, and which command leads to
what it takes. The commands in those sentences are run."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.cli.main import build_parser, main, verbs_of
from tests.byte_tokenizer import byte_tokenizer
from tests.training.runs import tiny_model

hub = pytest.importorskip("huggingface_hub", reason="hub ids are resolved by its client")
pytest.importorskip("gguf", reason="one start is a GGUF file")
pytestmark = pytest.mark.usefixtures("shared_tokenizer_process")

STEP = "checkpoints/step-00000001"
STARTS = {
    "hf": "hf",
    "ours": "ours",
    "checkpoint": f"run/{STEP}",
    "lora-checkpoint": f"lora/{STEP}",
    "run": "run",
    "adapter": "lora/adapter",
    "peft-adapter": "lora/adapter-hf",
    "fp8": "fp8",
    "hf-fp8": "hf-fp8",
    "hf-nvfp4": "hf-nvfp4",
    "hf-int4": "hf-int4",
    "hub": "org/m",
    "gguf": "m.gguf",
    "tokens": "d",
    "nothing": "nothing",
}
MODELS = frozenset({"hf", "ours", "fp8", "hf-fp8", "hf-nvfp4", "hf-int4", "hub"})
HF = frozenset({"hf", "hf-fp8", "hf-nvfp4", "hf-int4", "hub"})
QUANTIZED = frozenset({"fp8", "hf-fp8", "hf-nvfp4", "hf-int4"})

Words = Callable[[str], list[str]]


def _train(start: str) -> list[str]:
    """A run that begins with what is named."""
    Path("start.toml").write_text(_run("started", start))
    return ["train", "start.toml"]


def _run(out: str, model: str, more: str = "") -> str:
    data = 'path = "d"\ntext = ["a.txt"]\ntokenizer = "hf"\nsequence_length = 8'
    return (
        f'output_dir = "{out}"\nsteps = 1\ndevice = "cpu"\ncompile = false\n[model]\npath = "{model}"\n[data]\n{data}\n'
        f"[checkpoint]\nevery = 1\n[log]\nprogress = false\n{more}"
    )


FEW = ["--prompt", "def", "--max-new-tokens", "2"]
VERBS: dict[str, Words] = {
    "import": lambda s: ["import", s, "out"],
    "export": lambda s: ["export", s, "out"],
    "export gguf": lambda s: ["export", s, "out.gguf", "--to", "gguf"],
    "export adapter": lambda s: ["export", s, "out", "--adapter", "lora/adapter"],
    "export torchtitan": lambda s: ["export", s, "out", "--to", "torchtitan"],
    "relayout": lambda s: ["relayout", s, "out", "--layout", "grouped"],
    "reshard": lambda s: ["reshard", s, "out", "--max-shard-size", "100KB"],
    "merge-shards": lambda s: ["merge-shards", s, "out"],
    "quantize": lambda s: ["quantize", s, "out", "--recipe", "block"],
    "dequantize": lambda s: ["dequantize", s, "out"],
    "upcycle": lambda s: ["upcycle", s, "out", "--experts", "2", "--topk", "1"],
    "toy": lambda s: ["toy", s, "out", "--layers", "1"],
    "merge": lambda s: ["merge", s, "lora/adapter", "out"],
    "merge, its adapter": lambda s: ["merge", "ours", s, "out"],
    "inspect": lambda s: ["inspect", s],
    "verify": lambda s: ["verify", s],
    "verify, against it": lambda s: ["verify", "ours", s],
    "verify --logits": lambda s: ["verify", "--logits", s, "ours", "--tokens", "8"],
    "verify --logits, against it": lambda s: ["verify", "--logits", "hf", s, "--tokens", "8"],
    "diff": lambda s: ["diff", s, "ours"],
    "certify": lambda s: ["certify", s],
    "models": lambda s: ["models", s],
    "info": lambda s: ["info", "--compile-report", s],
    "init": lambda s: ["init", "--model", s, "--task", "lora", "--output", "init.toml"],
    "tokenize": lambda s: ["tokenize", "a.txt", "--tokenizer", s, "--output", "dd"],
    "train": _train,
    "plan": lambda s: ["plan", _train(s)[1], "--ranks", "1"],
    "plan --model": lambda s: ["plan", "--model", s, "--ranks", "1"],
    "report": lambda s: ["report", s, "--output", "r.html"],
    "generate": lambda s: ["generate", s, *FEW],
    "generate --draft-model": lambda s: ["generate", "ours", *FEW, "--draft-model", s],
    "generate --adapter": lambda s: ["generate", "ours", *FEW, "--adapter", s],
    "generate --tokenizer": lambda s: ["generate", "ours", *FEW, "--tokenizer", s],
    "eval": lambda s: ["eval", s, "--text", "a.txt", "--seq-length", "16"],
}
WITHOUT = {"completion", "quickstart", "adopt", "launch", "rehearse"}
"""Verbs that begin with nothing of the user's, with the file of a run, or with a model type that te_models lacks."""

NO_MODEL = {
    "checkpoint": r"is a training checkpoint; te-models export run/\S+ OUT writes its model to OUT",
    "lora-checkpoint": r"is a training checkpoint; te-models export lora/\S+ OUT writes its model to OUT",
    "run": "run is the folder of a training run; its model is run/final",
    "adapter": r"is an adapter, and has no model; te-models merge ours lora/adapter OUT adds it to its model's weights",
    "peft-adapter": r"is an adapter, and has no model; te-models merge ours lora/adapter-hf OUT adds it",
    "gguf": "is a GGUF file and not a folder; te-models import m.gguf DIR makes a model folder of it",
    "tokens": "d is a token data set, and has no model",
    "nothing": "nothing is not a folder",
}
"""What every verb that takes a model says of what holds none."""
WITH_ADAPTER = dict.fromkeys(("adapter", "peft-adapter"), r"name its model, too: ours --adapter lora/adapter")
NO_ADAPTER = "has no adapter_config.json; allowed: a folder that training wrote as adapter/, or peft, or a hub id"
OURS_ALREADY = dict.fromkeys(("ours", "fp8"), "is already a te_models folder; relayout changes its expert layout")
TO_IMPORT = dict.fromkeys(HF, r"is a Hugging Face folder; te-models import \S+ DIR( --dequantize)?, then export DIR")
TO_EXPORT = dict.fromkeys(("ours", "fp8"), r"is a te_models folder; .*: te-models export \S+ OUT writes one")
AGAIN = dict.fromkeys(QUANTIZED, "has quantized weights .* cannot be .*; dequantize it first")

REFUSED: dict[str, dict[str, str]] = {
    "import": OURS_ALREADY,
    "export": dict.fromkeys(
        HF, r"already a Hugging Face folder; to write .* te-models import \S+ DIR, then export DIR"
    ),
    "export gguf": TO_IMPORT,
    "export adapter": WITH_ADAPTER,
    "export torchtitan": TO_IMPORT
    | {"fp8": "has quantized weights; te-models dequantize fp8 DIR, then export DIR"}
    | dict.fromkeys(("checkpoint", "lora-checkpoint"), "te-models export without --to writes the model alone"),
    "relayout": dict.fromkeys(HF, "is a Hugging Face folder; import it, with the layout that you want"),
    "quantize": AGAIN,
    "upcycle": AGAIN,
    "dequantize": dict.fromkeys(("hf", "ours", "hub"), "has no quantized weights")
    | dict.fromkeys(
        QUANTIZED - {"fp8"}, "is a Hugging Face folder; import it with --dequantize, which gives its values"
    ),
    "toy": TO_EXPORT | {"nothing": "no model of the catalogue is called 'nothing'; te-models models lists them"},
    "merge, its adapter": dict.fromkeys(STARTS, NO_ADAPTER),
    "verify --logits": TO_EXPORT | {"hf-nvfp4": "transformers cannot run hf-nvfp4: "},
    "certify": dict.fromkeys(("ours", "fp8"), "which needs no import; te-models verify checks it")
    | {"nothing": r"nothing is not a folder, a URL, nor a hub id \(ORGANISATION/NAME\)"},
    "models": {name: f"no model of the catalogue fits '{start}'" for name, start in STARTS.items()},
    "init": {"nothing": r"nothing is not a folder, nor a hub id \(ORGANISATION/NAME\), nor in the catalogue"},
    "plan": {"hub": "org/m is not a folder here, and "},  # another process plans, which the hub of this test is not in
    "plan --model": {"nothing": "no model of the catalogue is called 'nothing'; te-models models lists them"},
    "report": dict.fromkeys(STARTS, "has no metrics.jsonl with a step; allowed: the output_dir of a training run"),
    "generate": WITH_ADAPTER,
    "generate --adapter": dict.fromkeys(STARTS, NO_ADAPTER),
    "eval": WITH_ADAPTER,
}
"""Where a verb says something of its own."""
WORKS: dict[str, frozenset[str]] = {
    "import": frozenset({"gguf"}),
    "export": frozenset({"checkpoint", "lora-checkpoint"}),
    "export gguf": frozenset({"checkpoint", "lora-checkpoint"}),
    "verify": frozenset({"checkpoint", "lora-checkpoint"}),
    "merge, its adapter": frozenset({"adapter", "peft-adapter"}),
    "generate --adapter": frozenset({"adapter", "peft-adapter"}),
    "report": frozenset({"run"}),
    "models": frozenset({"hf", "tokens"}),  # parts of names of the catalogue
}
"""What a verb takes beside models."""
DIFFERENT = {"verify, against it", "verify --logits", "verify --logits, against it", "diff"}
"""Verbs that answer no with 1, of a model with other numbers."""


def sentence(verb: str, start: str) -> str | None:
    """Return the pattern of what a verb says of a start; None: it works."""
    if start in WORKS.get(verb, ()):
        return None
    return REFUSED.get(verb, {}).get(start) or (None if start in MODELS else NO_MODEL[start])


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of everything that `STARTS` names, made by the verbs."""
    root = tmp_path_factory.mktemp("starts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        Path("a.txt").write_text("def f(x):\n    return x + 1\n" * 20)
        torch.manual_seed(0)
        GPTModel(tiny_model(layers=1).replace(vocab_size=300), params_dtype=torch.bfloat16).save_pretrained("plain")
        assert main(["export", "plain", "hf"]) == 0
        byte_tokenizer([Path("a.txt").read_text()]).save_pretrained("hf")
        Path("run.toml").write_text(_run("run", "ours"))
        Path("lora.toml").write_text(_run("lora", "ours", "[lora]\nrank = 2\n"))
        for words in (
            ["import", "hf", "ours"],
            ["train", "run.toml"],
            ["train", "lora.toml"],
            ["export", "ours", "m.gguf", "--to", "gguf"],
            ["quantize", "ours", "fp8", "--recipe", "mxfp8"],
            ["export", "fp8", "hf-fp8"],
            ["quantize", "ours", "nvfp4", "--recipe", "nvfp4"],
            ["export", "nvfp4", "hf-nvfp4"],
            ["quantize", "ours", "int4", "--recipe", "int4"],
            ["export", "int4", "hf-int4"],
        ):
            assert main(words) == 0, words
        shutil.copytree("hf", "cache/snapshots/0123")
        shutil.copytree("lora/adapter", "cache/adapter/4567")
    return root


@pytest.fixture
def here(starts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the starts, where verbs write beside them, and a hub that only the cache answers for."""
    for path in starts.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)

    def download(repo: str, **options: Any) -> str:
        if repo not in ("org/m", "org/adapter"):
            raise hub.errors.LocalEntryNotFoundError("no network")
        return str(starts / "cache" / ("snapshots/0123" if repo == "org/m" else "adapter/4567"))

    def unreachable(*_: Any, **__: Any) -> None:
        raise hub.errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub.HfApi, "model_info", unreachable)
    return tmp_path


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a command line, and what it printed."""
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as error:
        code = int(error.code or 0)
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return code, told.out + told.err


COSTLY = {"info", "init", "plan", "plan --model"}
"""Verbs whose work takes seconds: `make test` has what they refuse."""


def _cells() -> list[Any]:
    """All cells; every sixth one, along diagonals of the table, is run in `make test`."""
    found = []
    for i, verb in enumerate(VERBS):
        for j, start in enumerate(STARTS):
            works = sentence(verb, start) is None
            slow = (i + j) % 6 != 0 or (verb in COSTLY and (works or start == "nothing"))
            found.append(pytest.param(verb, start, marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.mark.parametrize(("verb", "start"), _cells())
def test_a_verb_works_or_says_what_leads_there(
    verb: str, start: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = said(VERBS[verb](STARTS[start]), capsys)
    expected = sentence(verb, start)
    if expected is None:
        assert code in ((0, 1) if verb in DIFFERENT else (0,)), told
    else:
        assert code == 2, told
        assert re.search(expected, told), told
        assert STARTS[start] in told or "precision.dtype" in told, told


def test_every_verb_is_in_the_table() -> None:
    assert {words("x")[0] for name, words in VERBS.items() if name not in ("train", "plan")} | {"train", "plan"} == (
        set(verbs_of(build_parser()).choices) - WITHOUT
    )


@pytest.mark.parametrize("start", ["checkpoint", "adapter", "gguf"])
def test_the_command_of_a_sentence_leads_to_a_model(start: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the sentence says is typed, and then the verb works."""
    code, told = said(["quantize", STARTS[start], "out", "--recipe", "block"], capsys)
    command = re.search(r"te-models ((?:export|merge|import) .*?(?:OUT|DIR))\b", told)
    assert code == 2 and command, told
    assert main(re.sub("OUT|DIR", "led", command[1]).split()) == 0
    assert said(["quantize", "led", "out", "--recipe", "block"], capsys)[0] == 0


def test_an_adapter_of_the_hub_and_a_run_that_has_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["generate", "ours", *FEW, "--adapter", "org/adapter"], capsys)[0] == 0
    code, told = said(["generate", "ours", *FEW, "--adapter", "lora"], capsys)
    assert code == 2 and "the adapter of this run is lora/adapter" in told
    Path("empty").mkdir()
    code, told = said(["inspect", "empty"], capsys)
    assert code == 2 and "empty is no model folder: it has no config.json; allowed: " in told
