"""Small files of a Hugging Face folder may be edited: every verb reads it, and says so; what decides numbers is not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints.io.manifest import MANIFEST
from te_models.cli.main import build_parser, main, verbs_of
from te_models.lora import add_lora, save_adapter
from tests.byte_tokenizer import byte_tokenizer
from tests.training.runs import tiny_model

pytestmark = pytest.mark.usefixtures("shared_tokenizer_process")
TEXT = "def main(): return 0\n" * 20


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that te-models exported, with its manifest, and a tokenizer that was there before."""
    folder = tmp_path_factory.mktemp("edited")
    torch.manual_seed(0)
    model = GPTModel(tiny_model().replace(vocab_size=300), params_dtype=torch.float32)
    model.save_pretrained(folder / "plain")
    assert main(["export", str(folder / "plain"), str(folder / "first")]) == 0
    byte_tokenizer([TEXT]).save_pretrained(folder / "first")
    assert main(["import", str(folder / "first"), str(folder / "ours")]) == 0
    assert main(["export", str(folder / "ours"), str(folder / "hf")]) == 0
    assert "tokenizer.json" in json.loads((folder / "hf" / MANIFEST).read_text())["files"]
    return folder


@pytest.fixture
def hf(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written / "hf", tmp_path / "hf")
    return tmp_path / "hf"


def edit(folder: Path) -> None:
    """Save another tokenizer, as people do, write a README, and remove a file."""
    byte_tokenizer([TEXT * 2, "other words"]).save_pretrained(folder)
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(values | {"chat_template": "{{ messages }}"}))
    (folder / "README.md").write_text("# A model")


VERBS: dict[str, Callable[[Path, Path], list[str]]] = {
    "inspect": lambda hf, out: ["inspect", str(hf)],
    "verify": lambda hf, out: ["verify", str(hf)],
    "import": lambda hf, out: ["import", str(hf), str(out / "model")],
    "generate": lambda hf, out: ["generate", str(hf), "--prompt", "def", "--max-new-tokens", "2"],
    "eval": lambda hf, out: ["eval", str(hf), "--text", str(out / "a.txt"), "--seq-length", "16", "--stride", "8"],
    "toy": lambda hf, out: ["toy", str(hf), str(out / "toy"), "--layers", "1"],
}


@pytest.mark.parametrize("name", VERBS)
def test_an_edited_tokenizer_is_a_note(name: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(hf)
    (tmp_path / "a.txt").write_text(TEXT)
    assert main([*VERBS[name](hf, tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    sentence = f"{hf}: 'tokenizer_config.json' is not as manifest.json lists it; a file that decides no number may be"
    assert told.err.count(f"te-models: note: {sentence}") == 1
    notes = json.loads(told.out[told.out.index("{") :])["notes"]
    assert any(note.startswith(sentence) for note in notes)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_decides_numbers_is_strict(
    name: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray((hf / name).read_bytes())
    if name == "config.json":
        data = bytearray(data.replace(b"{", b"{ ", 1))
    else:
        data[-1] ^= 1
    (hf / name).write_bytes(data)
    assert main(["verify", str(hf)]) == 1 and "manifest.json says" in capsys.readouterr().out
    assert main(["import", str(hf), str(tmp_path / "model")]) == 2
    assert "--no-verify" in capsys.readouterr().err
    assert main(["import", str(hf), str(tmp_path / "model"), "--no-verify"]) == 0


def test_our_own_folders_are_strict(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(written / "ours", tmp_path / "ours")
    (tmp_path / "ours/tokenizer_config.json").write_text("{}")
    assert main(["inspect", str(tmp_path / "ours")]) == 2
    assert "tokenizer_config.json has 2 bytes" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "ours"), "--no-verify"]) == 0


def test_removed_and_added_files_are_notes_and_added_weights_are_not(
    hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((hf / MANIFEST).read_text())
    (hf / MANIFEST).write_text(json.dumps({k: v for k, v in values.items() if k != "partial"}))
    (hf / "README.md").write_text("# A model")
    (hf / "tokenizer.json").unlink()
    assert main(["verify", str(hf)]) == 0
    assert {*re.findall(r"note: \S+: '(\S+)' is not as", capsys.readouterr().err)} == {"README.md", "tokenizer.json"}
    (hf / "more.safetensors").write_bytes(b"")
    assert main(["verify", str(hf)]) == 1 and "does not list: 'more.safetensors'" in capsys.readouterr().out


def test_every_verb_that_says_no_verify_has_it(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each verb gets a folder whose header is damaged: one whose sentence names the option takes it."""
    monkeypatch.chdir(tmp_path)
    for kind in ("hf", "ours"):
        shutil.copytree(written / kind, kind)
        values = json.loads(Path(kind, MANIFEST).read_text())
        for record in values["files"].values():
            record |= {"header": "0" * 64} if "header" in record else {}
        Path(kind, MANIFEST).write_text(json.dumps(values))
    model = GPTModel.from_pretrained("hf", verify=False)
    add_lora(model, 2)
    save_adapter(model, Path("adapter"))
    Path("a.txt").write_text(TEXT)
    Path("run.toml").write_text(
        'output_dir = "run"\nsteps = 1\ndevice = "cpu"\ncompile = false\n[model]\npath = "hf"\n'
        '[data]\npath = "d"\ntext = ["a.txt"]\ntokenizer = "bytes"\nsequence_length = 8\n[log]\nprogress = false\n'
    )
    words = {
        **{name: make(Path("hf"), tmp_path) for name, make in VERBS.items() if name != "verify"},
        "verify": ["verify", "--logits", "hf", "ours", "--tokens", "8"],
        "diff": ["diff", "hf", "ours"],
        "info": ["info", "--compile-report", "hf"],
        "train": ["train", "run.toml"],
        "rehearse": ["rehearse", "run.toml"],
        "export": ["export", "ours", "e"],
        "relayout": ["relayout", "ours", "r", "--layout", "grouped"],
        "reshard": ["reshard", "ours", "s", "--max-shard-size", "100KB"],
        "merge-shards": ["merge-shards", "ours", "m"],
        "quantize": ["quantize", "ours", "q", "--recipe", "block"],
        "dequantize": ["dequantize", "ours", "v"],
        "upcycle": ["upcycle", "ours", "u", "--experts", "2", "--topk", "1"],
        "merge": ["merge", "hf", "adapter", "x"],
        "plan": ["plan", "run.toml", "--ranks", "1"],
        "init": ["init", "--model", "hf", "--task", "lora"],
    }
    # read no model, or its headers alone
    without = {"completion", "quickstart", "report", "tokenize", "certify", "models", "adopt", "launch"}
    assert {*words, *without} == set(verbs_of(build_parser()).choices)
    for name in sorted(words.keys() - {"plan", "init"}):  # these two read configurations and headers alone
        code = main(words[name])
        told = capsys.readouterr()
        if "--no-verify" in told.err + told.out:
            assert code in (1, 2), name
            assert "--no-verify" in verbs_of(build_parser()).choices[name]._option_string_actions, name
        else:
            assert name == "diff", (name, told)  # which reads no manifest
    assert main(["train", "run.toml", "--no-verify"]) == 0 and main(["inspect", "hf", "--no-verify"]) == 0
