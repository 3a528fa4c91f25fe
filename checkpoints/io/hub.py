"""Hub ids, `org/name` or `org/name@revision`, where a folder is expected.

huggingface_hub downloads them, keeps them in its cache and resumes what was interrupted. A folder of that
name always wins. Only files that are read or copied here are asked for: weights as safetensors, JSON, tokenizers, the
code that comes with them (which is never run), licences; never a pickle.
"""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from te_models.extras import require

from .errors import CheckpointError, quote

_TYPES = ("*.safetensors", "*.json", "*.model", "*.tiktoken", "*.py")
ALLOWED = (*_TYPES, "*.jinja", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*")
IGNORED = (*(f"*/{name}" for name in _TYPES), "consolidated*")
"""Files in subfolders, chat templates aside, and the same weights once more under other names."""

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")


def local_folder(name: str | os.PathLike[str], revision: str | None = None, **options: Any) -> Path:
    """Return the folder that `name` means: a path, or a hub id that is downloaded if need be.

    Arguments:
        revision: branch, tag or commit; instead of one behind the `@`.
        options: further arguments of `huggingface_hub.snapshot_download`, such as cache_dir, token, local_files_only;
            allow_patterns in place of `ALLOWED`.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        CheckpointError: the name is too long for a path; or the hub has no such model or revision, refuses it, or
            cannot be reached and the cache has none.
    """
    folder = Path(name)
    try:
        there = folder.exists()
    except OSError as error:
        raise CheckpointError(f"{quote(str(name))} cannot be read: {error.strerror}") from None
    match = HUB_ID.fullmatch(name) if isinstance(name, str) else None
    if match is None or there:
        return folder.resolve() if folder.name in ("", "..") else folder  # "." would say nothing in a message
    if revision is not None and match["revision"] is not None:
        raise CheckpointError(f"{name} names a revision, and revision is {revision!r}; give one of them")
    return Path(_download(match["repo"], revision or match["revision"], name, options))


def _download(repo: str, revision: str | None, name: object, options: dict[str, Any]) -> str:
    hub = require("huggingface_hub", "hf", feature=f"the hub id {name!r} (there is no such folder)")
    errors = importlib.import_module("huggingface_hub.errors")  # its lazy module has it only once somebody imported it
    options = {"allow_patterns": list(ALLOWED), "ignore_patterns": list(IGNORED)} | options
    try:
        return hub.snapshot_download(repo, revision=revision, **options)
    except errors.GatedRepoError:
        reason = "the hub grants access to it only on request: log in with an account that has it"
    except errors.RevisionNotFoundError:
        reason = f"the hub has no revision {revision!r} of it"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such model, or not for you"
    except errors.LocalEntryNotFoundError:
        reason = "it is not in the cache of the hub, which cannot be reached"
    except errors.HFValidationError as error:
        reason = str(error)
    except OSError as error:
        reason = f"downloading it failed: {error}"
    raise CheckpointError(f"{name} is not a folder here, and {reason}")
