"""`transformers serve` on a folder of ours, and on an export of it, talked to with OpenAI's client on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import export_hf, quantize
from tests.byte_tokenizer import byte_tokenizer
from tests.ranks import free_port
from tests.training.runs import tiny_model

openai = pytest.importorskip("openai", reason="the extra serve is not installed")
for name in ("fastapi", "uvicorn"):
    pytest.importorskip(name, reason="the extra serve is not installed")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}assistant: "


def folder_of(tmp_path: Path, kind: str) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "model"
    GPTModel(tiny_model().replace(vocab_size=300), params_dtype=torch.float32).save_pretrained(folder)
    if kind == "mxfp8":
        quantize(folder, tmp_path / "served", "mxfp8")
    elif kind == "export":
        export_hf(folder, tmp_path / "served")
    served = folder if kind == "plain" else tmp_path / "served"
    tokenizer = byte_tokenizer(["user: hello assistant: "])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(served)
    return served


@contextlib.contextmanager
def server(folder: Path, tmp_path: Path) -> Iterator[openai.OpenAI]:
    """Run `python -m te_models.hf serve` on a free port until the block ends."""
    port = free_port()
    words = [sys.executable, "-m", "te_models.hf", "serve", str(folder), "--device", "cpu", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=60)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
                break
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.2)
        with client:
            yield client
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "mxfp8", "export"])
def test_a_client_talks_to_a_folder(kind: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, kind)
    with server(folder, tmp_path) as client:
        messages = [{"role": "user", "content": "hello"}]
        asked = {"model": str(folder), "messages": messages, "max_tokens": 8, "temperature": 0}
        try:
            answer = client.chat.completions.create(**asked)
        except openai.APIStatusError as error:
            raise AssertionError(f"{error}: {(tmp_path / 'log').read_text()[-3000:]}") from None
        text = answer.choices[0].message.content
        streamed = client.chat.completions.create(**asked, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    assert text and "".join(parts) == text


@pytest.mark.slow
def test_a_chat_in_the_terminal(tmp_path: Path) -> None:
    """`python -m te_models.hf chat` against the server: one question, the answer of the model, and the end."""
    folder = folder_of(tmp_path, "plain")
    with server(folder, tmp_path) as client:
        address = str(client.base_url).removesuffix("/v1/")
        asked = {"model": str(folder), "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        text = client.chat.completions.create(**asked, temperature=0).choices[0].message.content
        words = ["-m", "te_models.hf", "chat", str(folder), address, "max_new_tokens=8", "do_sample=False"]
        chat = subprocess.run(
            [sys.executable, *words],
            input="hello\nn\n!exit\n",
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            check=False,
        )
    assert chat.returncode == 0, chat.stderr
    assert "8 tokens in" in chat.stdout and text and text.split()[0] in chat.stdout
