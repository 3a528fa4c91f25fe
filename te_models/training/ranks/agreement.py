"""What all ranks of a run must have alike, compared before anything is built: a difference ends all of them at once.

Ranks with other settings would wait in different collectives, or average gradients of different models.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from ...config import ConfigError
from ..config import TrainConfig
from ..one_run import LOCK
from .data_parallel import Ranks, gather_tensors, largest_over_ranks

_PATIENCE = 10.0
"""Seconds that a rank looks for a file which the first one has made."""


def check_same_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Raise ConfigError, on every rank, where ranks have other settings or versions of the code; called by all."""
    from ... import __version__

    versions = {"the version of te_models": __version__, "the version of torch": torch.__version__}
    check_agreement(versions | _flat(config.to_dict()), ranks)


def check_agreement(values: Mapping[str, object], ranks: Ranks, error: type[ValueError] = ConfigError) -> None:
    """Raise `error`, on every rank, where a rank has other values than rank 0; called by all.

    The sentence names the rank, the first value that differs, and both. What is compared is a digest; the values
    themselves are exchanged where it differs."""
    if ranks.world_size == 1:
        return
    text = json.dumps({name: str(value) for name, value in values.items()}).encode()
    digest = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8, device="cpu")
    digests = gather_tensors({"digest": digest}, ranks)
    others = [r for r in range(ranks.world_size) if not torch.equal(digests[f"{r}.digest"], digests["0.digest"])]
    if not others:
        return
    longest = int(largest_over_ranks(torch.tensor([len(text)], device="cpu"), ranks))
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device="cpu")
    texts = gather_tensors({"text": padded}, ranks)
    first, other = (json.loads(bytes(texts[f"{rank}.text"].tolist())) for rank in (0, others[0]))
    name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
    raise error(
        f"rank {others[0]} and rank 0 do not agree: {name} is {other.get(name, 'absent')} on rank {others[0]} and "
        f"{first.get(name, 'absent')} on rank 0; allowed: the same on all ranks"
    )


def _flat(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a table of tables as one, with dots in its names."""
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: repr(value)}
    return found


def check_folder_is_shared(output_dir: Path, ranks: Ranks) -> None:
    """Check that every rank sees the folder in which the first one holds the lock; called by all.

    Raises ConfigError, on every rank, that names the first rank which has another folder of that name, or none: found
    now, and not when the first checkpoint has been trained for."""
    if ranks.world_size == 1:
        return
    note = _note(output_dir) if ranks.is_main else b""
    deadline = time.monotonic() + (0.0 if ranks.is_main else _PATIENCE)
    expected = gather_tensors({"note": _digest(note)}, ranks)["0.note"]
    while not torch.equal(_digest(note), expected) and time.monotonic() < deadline:
        time.sleep(0.1)  # a network file system may not show a new file at once
        note = _note(output_dir)
    found = gather_tensors({"note": _digest(note)}, ranks)
    for rank in range(ranks.world_size):
        if not torch.equal(found[f"{rank}.note"], expected):
            raise ConfigError(
                f"output_dir is {output_dir}, and rank {rank} does not see what rank 0 writes there; allowed: a folder "
                "that all ranks share"
            )


def _note(output_dir: Path) -> bytes:
    try:
        return (output_dir / LOCK).read_bytes()
    except OSError:
        return b""


def _digest(note: bytes) -> torch.Tensor:
    return torch.tensor(list(hashlib.sha256(note).digest()), dtype=torch.uint8, device="cpu")
