"""Where the bytes of a checkpoint are: a folder, the hub, or an HTTP server. Only parts of its files are read."""

import importlib
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Protocol

from te_models.checkpoints.io.errors import CheckpointError, quote
from te_models.checkpoints.io.hub import HUB_ID, local_folder
from te_models.checkpoints.io.model_folder import check_model_folder
from te_models.checkpoints.io.weight_files import plain_file

from ..extras import require

TIMEOUT_S = 30.0
"""Of a server that sends nothing."""
DEADLINE_S = 120.0
"""Of a server that sends little by little, for one part of a file."""


class CheckpointFiles(Protocol):
    """The files of one checkpoint.

    name: as messages and certificates call it. revision: the commit of the hub that is read, "" elsewhere.
    """

    name: str
    revision: str

    def size(self, file: str) -> int | None:
        """Return the bytes of a file; None where there is no such file."""
        ...

    def read(self, file: str, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of a file, or CheckpointError."""
        ...

    def weight_files(self) -> list[str]:
        """Return the names of all `*.safetensors` files; [] where the place has no listing."""
        ...


class FolderSource:
    """A folder on this machine. Files may be sparse: their data is not read."""

    def __init__(self, folder: Path, name: str | None = None, revision: str = "") -> None:
        self.name, self.revision, self._folder = str(folder) if name is None else name, revision, folder

    def size(self, file: str) -> int | None:
        path = self._folder / file
        if not path.exists() and not path.is_symlink():
            return None
        return plain_file(self._folder, file, sparse=True).stat().st_size

    def read(self, file: str, begin: int, end: int) -> bytes:
        with plain_file(self._folder, file, sparse=True).open("rb") as opened:
            opened.seek(begin)
            return _whole(opened.read(end - begin), file, begin, end)

    def weight_files(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob("*.safetensors"))


class HTTPSource:
    """A folder of a web server, best one that answers ranges; of others the beginning of each file is read."""

    revision = ""

    def __init__(self, url: str) -> None:
        self.name = url if url.endswith("/") else url + "/"

    def size(self, file: str) -> int | None:
        try:
            with self._open(file, 0, 1) as answer:
                return _length(answer, file)
        except _MissingError:
            return None

    def read(self, file: str, begin: int, end: int) -> bytes:
        with self._open(file, begin, end) as answer:
            if answer.status == 200 and begin:
                if begin > 1 << 20:
                    raise CheckpointError(f"{self.name} does not answer ranges, and byte {begin} of {file} is needed")
                _whole(_read(answer, begin, file), file, 0, begin)
            return _whole(_read(answer, end - begin, file), file, begin, end)

    def weight_files(self) -> list[str]:
        return []

    def _open(self, file: str, begin: int, end: int) -> HTTPResponse:
        url = urllib.parse.urljoin(self.name, urllib.parse.quote(file))
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(url, headers=headers)
        try:
            answer = _OPENER.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (403, 404, 410):
                raise _MissingError(f"{url} is not there: the server says {error.code}") from None
            raise CheckpointError(f"{url} cannot be read: the server says {error.code} {error.reason}") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise CheckpointError(f"{url} cannot be read: {reason}") from None
        if answer.status == 206:
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != begin:
                answer.close()
                told = answer.headers.get("Content-Range")
                raise CheckpointError(f"{url} answers the range from byte {begin} on with {told!r}")
        return answer


class _MissingError(CheckpointError):
    """A file that a server does not have."""


class UnreachableError(CheckpointError):
    """The hub cannot be asked."""


class HubSource:
    """A model of the Hugging Face hub, one revision of it, read by range requests of huggingface_hub."""

    def __init__(self, repo: str, revision: str | None) -> None:
        hub = require("huggingface_hub", "hf", feature=f"the hub id {repo!r}")
        errors = importlib.import_module("huggingface_hub.errors")
        self.name = repo
        try:
            self.revision: str = hub.HfApi().model_info(repo, revision=revision).sha
        except (errors.HfHubHTTPError, errors.HFValidationError) as error:
            raise CheckpointError(f"the hub does not give {repo}: {str(error).splitlines()[0]}") from None
        except Exception as error:  # there is no network; its client's errors have no base class here
            raise UnreachableError(f"the hub cannot be reached for {repo}: {str(error).splitlines()[0]}") from None
        self._files: Any = hub.HfFileSystem()

    def _path(self, file: str) -> str:
        return f"{self.name}@{urllib.parse.quote(self.revision, safe='')}/{file}"

    def size(self, file: str) -> int | None:
        try:
            return int(self._files.info(self._path(file))["size"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.name} cannot be read: {error}") from None

    def read(self, file: str, begin: int, end: int) -> bytes:
        try:
            with self._files.open(self._path(file), "rb", block_size=0 if end - begin > 1 << 22 else 1 << 20) as opened:
                opened.seek(begin)
                return _whole(opened.read(end - begin), file, begin, end)
        except OSError as error:
            raise CheckpointError(f"{file} of {self.name} cannot be read: {error}") from None

    def weight_files(self) -> list[str]:
        names = self._files.glob(self._path("*.safetensors"))
        return sorted(name.rpartition("/")[2] for name in names)


def checkpoint_files(where: str | os.PathLike[str]) -> CheckpointFiles:
    """Return the source that a folder, a URL or a hub id (`org/name`, `org/name@revision`) means."""
    text = os.fspath(where)
    scheme = urllib.parse.urlsplit(text).scheme
    if scheme in ("http", "https"):
        return HTTPSource(text)
    if "://" in text:
        raise CheckpointError(f"{quote(text)} is a URL of the kind {scheme!r}; allowed: http, https")
    folder = Path(text)
    match = HUB_ID.fullmatch(text)
    if folder.exists() or match is None:
        if not folder.exists():
            raise CheckpointError(f"{text} is not a folder, a URL, nor a hub id (ORGANISATION/NAME)")
        check_model_folder(folder)
        return FolderSource(folder)
    try:
        return HubSource(match["repo"], match["revision"])
    except UnreachableError:
        cached = _cached(text, match["repo"])
        if cached is None:
            raise
        return cached


def _cached(name: str, repo: str) -> CheckpointFiles | None:
    """Return the copy of a hub id that the hub's client keeps on this machine, whole or not; None: there is none."""
    try:
        folder = local_folder(name, local_files_only=True)
    except CheckpointError:
        return None
    return FolderSource(folder, repo, folder.name) if (folder / "config.json").is_file() else None


_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class _OnlyHTTP(urllib.request.HTTPRedirectHandler):
    """Follows a redirection to another http or https address alone: urllib would go on to ftp, too."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urllib.parse.urlsplit(newurl).scheme not in ("http", "https"):
            raise CheckpointError(f"{req.full_url} leads to {quote(newurl)}, which is not allowed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_OnlyHTTP)


def _length(answer: HTTPResponse, file: str) -> int:
    """Return the bytes of the whole file that an answer is of."""
    if answer.status == 206:
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        assert found is not None, "checked when it was opened"
        return int(found[3])
    length = answer.headers.get("Content-Length", "")
    if not re.fullmatch(r"\d{1,15}", length):
        raise CheckpointError(f"the server does not say how many bytes {file} has")
    return int(length)


def _read(answer: HTTPResponse, nbytes: int, file: str) -> bytes:
    parts, start = bytearray(), time.monotonic()
    try:
        while len(parts) < nbytes and (part := answer.read1(min(nbytes - len(parts), 1 << 20))):
            parts += part
            if time.monotonic() - start > DEADLINE_S:
                raise CheckpointError(f"{file} cannot be read: {len(parts)} bytes took {DEADLINE_S:g} s")
        return bytes(parts)
    except (OSError, HTTPException) as error:
        raise CheckpointError(f"{file} cannot be read: {str(error) or type(error).__name__}") from None


def _whole(data: bytes, file: str, begin: int, end: int) -> bytes:
    if len(data) != end - begin:
        raise CheckpointError(f"{file} ends at byte {begin + len(data)}, before byte {end} that was asked for")
    return data
