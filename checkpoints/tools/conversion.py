"""What all conversions between folders have in common: their options, the folder that is read, the result."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypedDict

from ..folder.checkpoint import open_checkpoint
from ..folder.te_folder import HFSource, TEFolder
from ..io.errors import CheckpointError, shorten
from ..io.store import Store
from ..io.threads import Progress
from ..mapping.param_shapes import ExpertLayout
from ..mapping.plan import ConversionPlan
from ..mapping.report import moved_report
from ..write.output_folder import write_folder

PathLike = str | os.PathLike[str]


class ConversionKeywords(TypedDict, total=False):
    """Options of every conversion: `te_models.checkpoints.tools.options.ShardedOptions` says what they mean.

    progress: called with (bytes done, bytes in total). max_shard_bytes (5 GB): a number. A source that is damaged, or
    was edited, raises CheckpointError with `verify`, and nothing is written.
    """

    overwrite: bool
    max_shard_bytes: int
    progress: Progress | None
    dry_run: bool
    verify: bool
    file_digests: bool


def split_options(options: ConversionKeywords) -> tuple[bool, dict[str, Any]]:
    """Return `verify`, and the options of `write_folder`; TypeError for a name that is none of Options."""
    unknown = options.keys() - ConversionKeywords.__annotations__.keys()
    if unknown:
        raise TypeError(f"{min(unknown)!r} is no option; allowed: {', '.join(ConversionKeywords.__annotations__)}")
    rest: dict[str, Any] = dict(options)
    return bool(rest.pop("verify", True)), rest


class Conversion:
    """A folder that is converted: `ckpt` is open in a with statement. how: arguments of `open_checkpoint`."""

    def __init__(self, src: PathLike, dst: PathLike, options: ConversionKeywords, **how: Any) -> None:
        verify, self._options = split_options(options)
        self._dst = Path(dst)
        self.ckpt = open_checkpoint(src, verify=verify, **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()

    def refuse_quantized(self, verb: str) -> None:
        """Raise CheckpointError if the folder has quantized parameters."""
        if self.ckpt.formats:
            names = shorten(self.ckpt.formats, 2)
            raise CheckpointError(
                f"{self.ckpt.path} has quantized weights ({names}) and cannot be {verb}; dequantize it first"
            )

    def refuse_mtp(self, verb: str) -> None:
        """Raise CheckpointError if layers that predict further tokens are parameters of the model."""
        if self.ckpt.config.mtp_num_layers:
            raise CheckpointError(
                f"{self.ckpt.path} has layers that predict further tokens as parameters and cannot be {verb}; import "
                "the model without mtp"
            )

    def write(
        self,
        plan: ConversionPlan,
        config: bytes,
        *,
        store: Store | None = None,
        extra: Mapping[str, bytes] | None = None,
    ) -> ConversionPlan:
        """Carry out a plan; the tokenizer files travel along. Returns the plan with its report.

        config: the content of config.json. store: what the plan reads; None: the checkpoint's own. extra: further small
        files.
        """
        ckpt = self.ckpt
        if plan.report is None:
            plan = replace(plan, report=moved_report(plan, ckpt.tensors))
        ckpt.check_values()
        return write_folder(
            self._dst,
            plan,
            store or ckpt.store,
            config,
            sidecars_from=ckpt.path,
            files=ckpt.files,
            extra=extra,
            **self._options,
        )

    def write_te_folder(self, plan: ConversionPlan, layout: ExpertLayout, source: HFSource | None) -> ConversionPlan:
        """Carry out a plan of a folder of ours with the model of the source; see `write`."""
        return self.write(plan, TEFolder(layout, self.ckpt.config, source).to_bytes())
