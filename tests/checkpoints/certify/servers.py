"""A web server on loopback that serves a folder well or badly: without ranges, slowly, cut off, with wrong lengths."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

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
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
