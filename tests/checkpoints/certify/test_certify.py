"""A certificate says, from headers alone, what an import then does: the same plan, numbers and refusals."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models import ModelConfig
from te_models.certify import certify
from te_models.certify.card import check_card, write_card
from te_models.checkpoints import CheckpointError, import_hf
from te_models.cli.main import main
from te_models.model.cache import KVCache
from tests.checkpoints import family_cases
from tests.checkpoints.hf_cases import HFFolder
from tests.checkpoints.quantized_cases import CASES, FP8_CONFIG, Case, fp8_block, make

Mode = Literal["ranges", "whole", "slow", "silent", "truncated", "other range", "no length", "to a file", "refuses"]


@contextmanager
def serving(folder: Path, mode: Mode = "ranges") -> Iterator[tuple[str, list[int]]]:
    """Serve a folder; yield its URL and the list of bytes sent by each answer."""
    sent: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            path = folder / self.path.lstrip("/")
            weights = path.suffix == ".safetensors"
            if not path.is_file():
                self.send_error(404)
                return
            if weights and mode == "refuses":
                self.send_error(500)
                return
            if weights and mode == "to a file":
                self.send_response(302)
                self.send_header("Location", "file:///etc/hostname")
                self.end_headers()
                return
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            begin, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked and mode != "whole" else (0, size)
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read(min(end - begin, 1 << 22))
            self.send_response(200 if mode == "whole" or (weights and mode == "no length") else 206)
            told = begin + 8 if weights and mode == "other range" else begin
            if mode != "whole":
                self.send_header("Content-Range", f"bytes {told}-{told + len(data) - 1}/{size}")
            if not (weights and mode == "no length"):
                self.send_header("Content-Length", str(size if mode == "whole" else len(data)))
            self.end_headers()
            if weights and mode == "silent":
                time.sleep(1.0)
                return
            if weights and mode == "truncated" and len(data) > 1:
                data = data[: len(data) // 2]
            if weights and mode == "slow":
                for number in range(len(data)):
                    self.wfile.write(data[number : number + 1])
                    time.sleep(0.05)
                return
            try:
                self.wfile.write(data)
                sent.append(len(data))
            except (BrokenPipeError, ConnectionResetError):  # the reader had enough
                sent.append(0)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # how often it looks for its end
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "qwen2-tied"])
def test_a_plain_folder_is_as_its_import(case: str, hf_folder: HFFolder, tmp_path: Path) -> None:
    folder = hf_folder(case, max_shard_size="20KB")
    found = certify(folder)
    plan = import_hf(folder, tmp_path / "ours")
    assert (found.verdict, found.exit_code, found.reason) == ("exact", 0, "")
    assert found.import_bytes == plan.total_bytes and plan.report is not None
    assert found.classes == plan.report.to_dict()
    assert found.stored_bytes == sum(t.nbytes for f in folder.glob("*.safetensors") for t in load_file(f).values())


@pytest.mark.sentinels("fp8-dense", "mxfp8")
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_quantized_folder_is_as_its_import(case: str, tmp_path: Path) -> None:
    folder, _ = make(CASES[case], tmp_path)
    found = certify(folder, scales=True)
    assert found.verdict == "exact"
    plan = import_hf(folder, tmp_path / "ours", dry_run=True)
    assert found.import_bytes == plan.total_bytes and plan.report is not None
    assert found.classes == plan.report.to_dict() and found.format
    unread = certify(folder)
    assert not unread.scales_read and "scales were not read" in unread.notes[-1]


def test_blocks_that_are_cut_are_certified_as_values(tmp_path: Path) -> None:
    """So are those of a layer that the model does not use, whose format the import no longer declares."""
    folder, _ = make(Case("deepseek_v3-ragged", fp8_block(), FP8_CONFIG), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    unused = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    save_file(tensors | unused, folder / "model.safetensors", metadata={"format": "pt"})
    found = certify(folder)
    assert (found.verdict, found.exit_code, found.option) == ("convertible with loss", 3, "--dequantize")
    with pytest.raises(CheckpointError, match=re.escape(found.reason.partition(";")[0])):
        import_hf(folder, tmp_path / "ours")
    plan = import_hf(folder, tmp_path / "ours", dequantize=True)
    assert found.import_bytes == plan.total_bytes and plan.report is not None
    assert found.classes == plan.report.to_dict() and len(plan.passthrough) > 0


def test_decoding_carries_keys_by_layer_and_states(llama: Path, tmp_path: Path) -> None:
    family_cases.make("mamba2").save_pretrained(tmp_path)
    llama, mamba = certify(llama), certify(tmp_path)
    a = ModelConfig.from_dict(llama.config).attention
    assert a.num_query_groups is not None
    assert llama.cache_bytes == 2 * 1024 * llama.config["num_layers"] * a.num_query_groups * 2 * a.key_channels
    config = ModelConfig.from_dict(mamba.config)
    with torch.device("meta"):
        assert mamba.cache_bytes == KVCache(config, 1, 1024, dtype=torch.bfloat16).nbytes > 0


def test_what_does_not_fit_is_refused_by_name(llama: Path, edit_json: Callable[..., None]) -> None:
    file = llama / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if not k.endswith("layers.1.mlp.up_proj.weight")}, file)
    found = certify(llama)
    assert found.exit_code == 2 and "missing: 'model.layers.1.mlp.up_proj.weight'" in found.reason
    save_file(tensors, file)
    edit_json(llama / "config.json", hidden_act="tanhshrink")
    found = certify(llama)
    assert found.exit_code == 2 and "hidden_act" in found.reason and found.parameters == 0
    edit_json(llama / "config.json", model_type="never_heard_of")
    assert "never_heard_of" in certify(llama).reason


def test_a_server_gives_the_same_certificate(hf_folder: HFFolder) -> None:
    folder = hf_folder("mixtral", max_shard_size="20KB")
    here = certify(folder).to_dict()
    for mode in ("ranges", "whole"):
        with serving(folder, mode) as (url, _):
            there = certify(url).to_dict()
        differs = {name for name in here if here[name] != there[name]}
        assert differs <= {"source", "import_seconds"}, differs


def test_little_of_a_file_is_read(llama: Path) -> None:
    file = llama / "model.safetensors"
    tensors = load_file(file)
    big = torch.zeros(500_000, 32, dtype=torch.bfloat16)
    save_file(tensors | {"model.embed_tokens.weight": big, "lm_head.weight": big.clone()}, file)
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"vocab_size": 500_000}))
    with serving(llama) as (url, sent):
        assert certify(url).verdict == "exact"
    assert sum(sent) < 200_000 < file.stat().st_size


BAD = {
    "truncated": "ends at byte",
    "other range": "answers the range from byte 0 on with",
    "no length": "does not say how many bytes",
    "to a file": "is not allowed",
    "refuses": "the server says 500",
    "silent": "timed out|closed connection|ends at byte",
    "slow": "took",
}


@pytest.mark.parametrize("mode", sorted(BAD))
def test_a_bad_server_is_said_in_a_sentence(mode: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_models.certify.source.TIMEOUT_S", 0.3)
    monkeypatch.setattr("te_models.certify.source.DEADLINE_S", 0.3)
    with serving(llama, mode) as (url, _), pytest.raises(CheckpointError, match=BAD[mode]) as caught:
        certify(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ((1 << 40).to_bytes(8, "little"), "claims a header of"),
        ((1 << 20).to_bytes(8, "little"), "is truncated"),
        ((4).to_bytes(8, "little") + b"[1]\n", "does not start with"),
        ((2).to_bytes(8, "little") + b"{}" + b"x" * 9, "bytes after its last tensor"),
        (b"\0\0", "is truncated"),
    ],
)
def test_hostile_headers(header: bytes, said: str, llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(header)
    with serving(llama) as (url, _), pytest.raises(CheckpointError, match=said):
        certify(url)


def test_an_index_cannot_lead_elsewhere(hf_folder: HFFolder) -> None:
    folder = hf_folder("llama", max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name = next(iter(values["weight_map"]))
    values["weight_map"][name] = "../secret.safetensors"
    index.write_text(json.dumps(values))
    with serving(folder) as (url, _), pytest.raises(CheckpointError, match="not a plain file name"):
        certify(url)


def test_a_card_is_checked_again(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    write_card(certify(llama), path)
    assert check_card(path)[1] == []
    file = llama / "model.safetensors"
    save_file(load_file(file), file, {"format": "other"})
    assert "the digest is" in check_card(path)[1][0]
    (llama / "config.json").write_text(json.dumps({"model_type": "none"}))
    assert "the verdict is 'not convertible', and was 'exact'" in check_card(path)[1]
    path.write_text("# something else")
    with pytest.raises(CheckpointError, match="is not a certificate"):
        check_card(path)


def test_the_verb(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "card.md"
    assert main(["certify", str(llama), "--card", str(path)]) == 0
    assert "exact" in capsys.readouterr().out and "| tensors |" in path.read_text()
    assert main(["certify", "--check", str(path)]) == 0
    (llama / "config.json").write_text(json.dumps({"model_type": "none"}))
    assert main(["certify", str(llama), "--json"]) == 2
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1])["verdict"] == "not convertible"
    assert main(["certify", "--check", str(path)]) == 1
    assert main(["certify"]) == 2 and main(["certify", "ftp://host/model"]) == 2
    assert "allowed: http, https" in capsys.readouterr().err


@pytest.mark.slow
def test_a_thousand_experts_without_torch(tmp_path: Path) -> None:
    """Ten layers here, a hundred under `make test-all`: files of the right size, of which only headers are stored."""
    script = (
        "import sys; from te_models.certify import certify; found = certify(sys.argv[1]);"
        "assert 'torch' not in sys.modules; print(found.verdict, found.parameters)"
    )
    sparse_mixture(tmp_path, layers=10, experts=1000)
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.split()[0] == "exact", run.stdout


def sparse_mixture(folder: Path, *, layers: int, experts: int) -> None:
    """Write a folder of qwen3_moe whose weight files are holes behind their headers."""
    from te_models.checkpoints.families import FAMILIES
    from tests.checkpoints.hf_cases import SMALL, transformers

    sizes = SMALL | {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 8, "head_dim": 128}
    config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=768).to_dict()
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 2048}))
    family = FAMILIES["qwen3_moe"]
    namespace = family.namespace(family.read_config(json.loads((folder / "config.json").read_text())))
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, stored in namespace.stored.items():
        number = int(name.split(".")[2]) + 1 if ".layers." in name else 0
        files.setdefault(f"model-{number:05d}.safetensors", {})[name] = stored.shape
    for file, tensors in files.items():
        header, position = {}, 0
        for name, shape in tensors.items():
            nbytes = 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + nbytes]}
            position += nbytes
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as written:
            written.write(len(raw).to_bytes(8, "little") + raw)
            written.truncate(8 + len(raw) + position)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
