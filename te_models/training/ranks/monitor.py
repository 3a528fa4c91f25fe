"""Heartbeats of the ranks: a rank that is stopped, killed or has failed ends the others, and they say its number.

A thread of each rank writes a heartbeat into the process group's store, at least once a second. Rank 0's thread reads
all of them and writes what it concludes, which the other threads read. A rank whose heartbeat stands still for
`timeout` is lost, and so is one whose process is gone, which the ranks of its machine see within seconds, whether they
wait for it or not. Work that takes long does not count as that: whoever waits for it, in `barrier`, waits as long as
the heartbeats go on. Collectives that never return could keep a process for ever; a process that does not leave by
itself after a rank is lost is ended by its thread.

Alternative rejected: `torch.distributed.monitored_barrier`, in which only rank 0 learns who is missing, and whose
timeout counts while rank 0 tokenizes text or writes files.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...terminal import one_line
from ..step import TrainingError

RUNNING, ASKED, WAITING, FAILED, DONE = "running", "asked", "waiting", "failed", "done"
"""What a heartbeat says: ASKED means that a signal asks the rank to end, WAITING that a collective failed there, and
not what failed."""
_ALIVE = (RUNNING, ASKED)

_ASKED_PATIENCE = 10
GRACE = 10.0
"""Seconds in which a process leaves by itself after a rank was lost."""


class LostRankError(TrainingError):
    """Another rank stopped answering or failed; the message has its number."""


class RankMonitor:
    """This rank's heartbeat, and what is known of the other ranks.

    Args:
        store: A store that nothing else uses meanwhile; every rank gives the same one.
        timeout: Seconds without a heartbeat after which a rank is lost.

    stop_asked: returns whether a signal asks this process to end. torchrun sends one where a rank of another node was
    killed, and kills this process 30 seconds later: silence of `_ASKED_PATIENCE` heartbeats then counts as lost.
    """

    def __init__(
        self,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
        rank: int,
        world_size: int,
        timeout: float,
    ) -> None:
        self.store, self.rank, self.world_size, self.timeout = store, rank, world_size, timeout
        self.interval = min(1.0, timeout / 10)
        self.lost: str | None = None
        self._barrier = self._open = 0  # how many barriers this rank, and all ranks, have reached
        self._status, self._text = RUNNING, ""
        self._seen: dict[int, tuple[Any, float]] = {}  # by rank: the last heartbeat, and when it changed
        self._suspected = time.monotonic()  # since when a rank waits in vain
        self._closing = False
        self.stop_asked: Callable[[], object] = lambda: False
        self._wake, self._news = threading.Event(), threading.Condition()
        store.set_timeout(timedelta(seconds=timeout))
        self._gone: set[int] = set()  # ranks of this machine whose processes are gone
        self._reported: set[int] = set()
        self._neighbours: dict[int, list[Any]] | None = None
        store.set(f"process {rank}", json.dumps(_process()))
        store.set(f"rank {rank}", json.dumps([0, 0, RUNNING, "", []]))  # before the first barrier: all can be read then
        self._heard = time.monotonic()  # when the store was last used with success
        self._thread = threading.Thread(target=self._run, name="rank monitor", daemon=True)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, name="rank watcher", daemon=True)
        self._watcher.start()

    def barrier(self) -> None:
        """Wait until every rank is here, however long that takes. Raises LostRankError if one is lost."""
        self._barrier += 1
        self._wake.set()
        with self._news:
            while self._open < self._barrier:
                self.check()
                self._news.wait(1.0)

    def check(self) -> None:
        """Raise LostRankError if a rank is known to be lost."""
        if self.lost is not None:
            raise LostRankError(self.lost)

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise instead of a collective's: one that has the number of the rank that caused it, if
        that becomes known; `error` itself if it is of another kind."""
        if isinstance(error, LostRankError) or not is_communication_error(error):
            return error
        self._status = WAITING
        self._wake.set()
        end = time.monotonic() + 12 * self.interval
        with self._news:
            while self.lost is None and time.monotonic() < end:
                self._news.wait(self.interval)
        return error if self.lost is None else LostRankError(self.lost)

    def close(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one leaves, and why. Rank 0 stays until all have heard what it has to say."""
        if error is None:
            self._status = DONE
        elif isinstance(error, LostRankError) or is_communication_error(error):
            self._status = WAITING
        else:
            self._status, self._text = FAILED, one_line(error)
        self._closing = True
        self._wake.set()
        self._thread.join(self.timeout if error is None else 8 * self.interval)

    def _run(self) -> None:
        pause, beats = 0.01, 0
        while True:
            beats += 1
            closing, barrier = self._closing, self._barrier
            if self._status == RUNNING and self.stop_asked():
                self._status = ASKED
            try:
                self._look_around()
                own = [beats, barrier, self._status, self._text, sorted(self._gone)]
                self._exchange(own)
                self._heard = time.monotonic()
            except Exception:  # whatever a store raises when the process that keeps it is gone
                if closing:
                    return
                self._conclude(f"{_store_keeper()} stopped answering")
            if closing and (self.rank != 0 or all(beat[2] not in _ALIVE for beat, _ in self._seen.values())):
                return
            # who waits in a barrier looks often at first
            pause = min(self.interval, pause * 1.3) if self._open < self._barrier or closing else self.interval
            if self._wake.wait(pause):
                self._wake.clear()
                pause = 0.01

    def _watch(self) -> None:
        """Notice a store that does not even fail, and end a process that stays in a collective."""
        ended = 0.0
        while not self._closing:
            now = time.monotonic()
            if now - self._heard > self._patience + self.interval:
                self._conclude(f"{_store_keeper()} stopped answering")
            if self.lost is not None:
                ended = ended or now
                if now - ended > min(GRACE, self.timeout):
                    print(f"te-models: rank {self.rank} ends: {self.lost}", file=sys.stderr, flush=True)
                    os._exit(3)
            time.sleep(min(self.interval, 0.1))

    @property
    def _patience(self) -> float:
        """Seconds of silence after which rank 0 is lost to this one: few where a collective has failed already."""
        if self._status == ASKED:
            return min(self.timeout, _ASKED_PATIENCE * self.interval)
        return 4 * self.interval if self._status == WAITING else self.timeout

    def _look_around(self) -> None:
        """Note the ranks of this machine whose processes are gone."""
        if self._neighbours is None:
            count = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or min(self.world_size, _NEIGHBOURS)
            first = self.rank - self.rank % count
            ranks = [r for r in range(first, min(first + count, self.world_size)) if r != self.rank]
            found = map(json.loads, self.store.multi_get([f"process {rank}" for rank in ranks])) if ranks else ()
            mine = _process()
            self._neighbours = {r: its for r, its in zip(ranks, found, strict=False) if mine and its[:1] == mine[:1]}
        self._gone |= {rank for rank, its in self._neighbours.items() if not _runs(*its[1:])}

    def _exchange(self, own: list[Any]) -> None:
        """Write this rank's heartbeat, read the others' (rank 0) or what rank 0 concludes from them."""
        if self.rank == 0:
            names = [f"rank {rank}" for rank in range(1, self.world_size)]
            found = [own, *map(json.loads, self.store.multi_get(names))]
            now = time.monotonic()
            for rank, beat in enumerate(found):
                if rank not in self._seen or self._seen[rank][0] != beat:
                    self._seen[rank] = beat, now
            verdict = self.lost or self._judge(now)
            everyone = min(beat[1] for beat in found)
            self.store.set("all", json.dumps([own[0], everyone, verdict, own[2]]))
            self._conclude(verdict, everyone)
            return
        self.store.set(f"rank {self.rank}", json.dumps(own))
        if self._closing:
            return
        said, now = json.loads(self.store.get("all")), time.monotonic()
        if 0 not in self._seen or self._seen[0][0] != said:
            self._seen[0] = said, now
        twice, self._reported = 0 in self._reported & self._gone, set(self._gone)
        silent = said[3] in _ALIVE and (twice or now - self._seen[0][1] > self._patience)
        self._conclude(said[2] or (self._silence(0) if silent else None), said[1])

    def _judge(self, now: float) -> str | None:
        """Return a sentence about the rank that the others cannot go on without, if there is one."""
        status = {rank: beat[2] for rank, (beat, _) in self._seen.items()}
        failed = next((rank for rank, word in status.items() if word == FAILED), None)
        if failed is not None:
            return f"rank {failed} failed: {self._seen[failed][0][3]}"
        reported = {rank for beat, _ in self._seen.values() for rank in beat[4] if status[rank] != DONE}
        gone, self._reported = reported & self._reported, reported  # twice: what it said last has been read by then
        if gone:
            return self._silence(min(gone))
        suspected = WAITING in status.values()
        if not suspected:
            self._suspected = now
        # A collective fails at once where a rank was killed, and the missing heartbeat tells which.
        asked = min(self.timeout, _ASKED_PATIENCE * self.interval) if ASKED in status.values() else self.timeout
        limit = 4 * self.interval if suspected else asked
        running = {rank: when for rank, (beat, when) in self._seen.items() if beat[2] in _ALIVE}
        for rank, when in running.items():
            if now - when > limit:
                return self._silence(rank)
        if running and now - self._suspected > 8 * self.interval:
            return (
                f"rank {min(running)} runs but does not take part in what the other ranks do; where it only needs more "
                "time, raise distributed_timeout_minutes"
            )
        return None

    def _silence(self, rank: int) -> str:
        return f"rank {rank} stopped answering"

    def _conclude(self, lost: str | None, everyone: int = 0) -> None:
        if lost is not None and self.lost is None and not self._closing and " failed: " not in lost:
            show_stacks(self.rank, lost)
        with self._news:
            self.lost = self.lost or lost
            self._open = max(self._open, everyone)
            self._news.notify_all()


_NEIGHBOURS = 8
"""Consecutive ranks that may be on one machine, where the launcher does not say."""


def _process() -> list[Any]:
    """Return what says which process this is: the machine since its start with its names of processes, the number,
    and when it began; nothing where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [f"{boot} {Path('/proc/self/ns/pid').readlink()}", os.getpid(), _begun(os.getpid())]
    except (OSError, IndexError, ValueError):
        return []


def _begun(pid: int) -> str:
    """Return when a process began, in ticks; "" for one that has ended and is not yet collected."""
    state, *values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if state in "ZX" else values[18]


def _runs(pid: int, begun: str) -> bool:
    try:
        return _begun(pid) == begun
    except OSError:
        return False


def show_stacks(rank: int, lost: str) -> None:
    """Write where each thread of this process is to standard error: every rank does, so that what a rank waits for can
    be seen beside what the others do."""
    print(f"te-models: {lost}; rank {rank} is here:", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # standard error may be no file
        faulthandler.dump_traceback(sys.stderr, all_threads=True)


def _store_keeper() -> str:
    return "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def is_communication_error(error: BaseException) -> bool:
    """Whether an error says that ranks could not reach each other, and not what went wrong in this one."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    texts = ("gloo/transport", "Connection closed by peer", "Timed out waiting", "Connection reset by peer")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
