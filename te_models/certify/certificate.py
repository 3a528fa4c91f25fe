"""The certificate of a checkpoint: understood or not, bijective or not, exact or not, and what it takes."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from te_models.checkpoints import Checkpoint, CheckpointError, ConversionPlan
from te_models.checkpoints.io.header import without_collections
from te_models.checkpoints.io.strict_json import read_object
from te_models.checkpoints.mapping.report import moved_report
from te_models.checkpoints.tools.convert import plan_import
from te_models.checkpoints.tools.statistics import count_parameters

from ..config import ConfigError
from ..sizes import plural
from .estimates import cache_bytes, copy_speed, memory
from .headers import HeaderStore, digest_of, read_headers, small_files
from .source import CheckpointFiles, checkpoint_files

Verdict = Literal["exact", "convertible with loss", "not convertible"]
EXIT_CODES: dict[Verdict, int] = {"exact": 0, "convertible with loss": 3, "not convertible": 2}


@dataclass
class Certificate:
    """What an import would do, proven from headers.

    Attributes:
        source, revision: what was read; the commit of a hub id.
        digest: SHA-256 of the configuration, the index and all headers.
        verdict: whether an import is exact.
        reason: why not; "".
        model_type, family: as the configuration says, and ours.
        tensors, files, stored_bytes: in the checkpoint.
        parameters, active_parameters: of the model; the latter are used by one token.
        format: of quantized weights, as declared.
        classes: what happens to the numbers of each class of tensors, as a conversion reports it.
        inexact: quantized parameter -> why our storage cannot take over its numbers.
        option: of `te-models import`, without which it is refused.
        import_bytes: what an import writes.
        memory: bytes by use; cache_bytes: of what decoding carries after 1,024 positions.
        import_seconds: at the speed with which this machine copies files; 0 if not measured.
        scales_read: False where exactness supposes that scales are positive numbers, of MXFP8 powers of two.
        notes: what a user should know besides.
        config: the model, as `ModelConfig.to_dict` writes it.
    """

    source: str
    revision: str
    digest: str
    verdict: Verdict
    reason: str = ""
    model_type: str = ""
    family: str = ""
    tensors: int = 0
    files: int = 0
    stored_bytes: int = 0
    parameters: int = 0
    active_parameters: int = 0
    format: str = ""
    classes: list[dict[str, Any]] = field(default_factory=list)
    inexact: dict[str, str] = field(default_factory=dict)
    option: str = ""
    import_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    cache_bytes: int = 0
    import_seconds: float = 0.0
    scales_read: bool = False
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0: exact; 3: convertible with loss; 2: not."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON values."""
        return asdict(self)

    def refuse(self, reason: str) -> Self:
        """Say that nothing can be converted, and why."""
        self.verdict, self.reason = "not convertible", reason
        return self


def certify(
    where: str | os.PathLike[str],
    *,
    scales: bool = False,
    seconds: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Return what an import of a checkpoint would do, from its configuration, its index and the headers of its files.

    Arguments:
        where: a Hugging Face folder, the URL of one on a web server, or a hub id (`org/name`, `org/name@revision`).
        scales: read the scales of quantized weights, too, on whose values exactness can depend.
        seconds: measure how fast this machine copies files.
        progress: called with (files whose header was read, files in total).

    Raises CheckpointError where the checkpoint cannot be read at all; what can be read and cannot be converted is the
    certificate's verdict.
    """
    source = checkpoint_files(where)
    with without_collections(), tempfile.TemporaryDirectory(prefix="te-models-certify-") as scratch:
        folder = Path(scratch)
        small_files(source, folder)
        store = read_headers(source, folder, scales=scales, progress=progress)
        found = _certificate(source, folder, store, scales)
    if seconds and found.import_bytes:
        found.import_seconds = found.import_bytes / copy_speed()
    return found


def _certificate(source: CheckpointFiles, folder: Path, store: HeaderStore, scales: bool) -> Certificate:
    config = read_object(folder / "config.json", f"config.json of {source.name}")
    found = Certificate(
        source.name,
        source.revision,
        digest_of(folder, store),
        "exact",
        model_type=str(config.get("model_type")),
        tensors=len(store.tensors),
        files=len(store.header_digests),
        stored_bytes=sum(info.nbytes for info in store.tensors.values()),
        scales_read=scales,
    )
    try:
        plan, ckpt = _exact_plan(folder, store, found)
    except (CheckpointError, ConfigError) as error:
        exact_reason = " ".join(str(error).replace(str(folder), source.name).split())
        found.verdict, found.reason = "convertible with loss", exact_reason
        try:
            plan, ckpt = _plan_of_values(folder, store)
            found.option = "--dequantize"
        except (CheckpointError, ConfigError):
            return found.refuse(exact_reason)
    found.family, found.config = ckpt.family or "", ckpt.config.to_dict()
    found.parameters, found.active_parameters = count_parameters(ckpt.config)
    found.import_bytes = plan.total_bytes
    found.classes = (plan.report or moved_report(plan, ckpt.tensors)).to_dict()
    found.memory = memory(ckpt.config, plan.total_bytes)
    found.cache_bytes = cache_bytes(ckpt.config)
    found.notes = list(plan.notes)
    if found.format and not scales:
        found.notes.append("scales were not read; they are taken for positive numbers, as the format declares them")
    if ckpt.passthrough:
        found.notes.append(f"{plural(len(ckpt.passthrough), 'tensor')} that the model does not use would travel along")
    return found


def _exact_plan(folder: Path, store: HeaderStore, found: Certificate) -> tuple[ConversionPlan, Checkpoint]:
    """Return the plan of an import that takes over every number; CheckpointError where there is none."""
    ckpt = Checkpoint(folder, files=store, verify=False)
    if ckpt.kind != "hf":
        raise CheckpointError("this is a te_models folder, which needs no import; te-models verify checks it")
    if ckpt.quantized is not None:
        found.format, found.inexact = ckpt.quantized.format.name, dict(ckpt.quantized.found.inexact)
        unordered = store.first_out_of_order()
        if unordered is not None:
            raise CheckpointError(f"{unordered}: groups are not runs of columns, which no form of ours has")
    return plan_import(ckpt), ckpt


def _plan_of_values(folder: Path, store: HeaderStore) -> tuple[ConversionPlan, Checkpoint]:
    """Return the plan of an import with --dequantize."""
    ckpt = Checkpoint(folder, "values", files=store, verify=False)
    if ckpt.quantized is None:
        raise CheckpointError("nothing is quantized")
    return plan_import(ckpt, dequantize=True), ckpt
