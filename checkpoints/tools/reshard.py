"""Distribute the tensors of a folder over other files: split large ones, or merge many into few."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from ..folder.reading_checks import check_while_reading
from ..folder.te_folder import CONFIG, MODEL_TYPE
from ..formats import SEPARATE
from ..io.errors import CheckpointError, shorten
from ..io.hub import local_folder
from ..io.model_folder import check_model_folder
from ..io.store import FileStore
from ..io.strict_json import read_object
from ..io.weight_files import open_weights, plain_file
from ..mapping.plan import ConversionPlan, copy_of
from ..mapping.quantized_format import METADATA_KEY, SUFFIXES, Description, quantizer_from_metadata, read_metadata
from ..mapping.report import moved_report
from ..write.output_folder import write_folder
from .conversion import ConversionKeywords, PathLike, split_options


def reshard(
    src: PathLike,
    dst: PathLike,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Write the same tensors, bit for bit and with the same names, to files of at most `max_shard_bytes` of data each.

    Works on any folder with a config.json and safetensors files, of a known family or not. A result that fits one file
    has no index; the configuration and the tokenizer files are copied unchanged. Raises CheckpointError for a folder
    that cannot be read.
    """
    check, writing = split_options(options)
    folder = local_folder(src)
    check_model_folder(folder)
    config = plain_file(folder, CONFIG)
    values = read_object(config, f"{folder}/{CONFIG}")
    with open_weights(folder) as store:
        if check:
            check_while_reading(folder, store, ours=values.get("model_type") == MODEL_TYPE)
        formats: dict[str, Description] = {}
        metadata: dict[str, str] = {}
        for file, entries in store.metadata.items():
            formats |= read_metadata(entries, file)
            for key, value in entries.items():
                if key != METADATA_KEY and metadata.setdefault(key, value) != value:
                    raise CheckpointError(f"the files of {folder} have different values of the metadata {key!r}")
        strangers = [name for name in formats if name not in store.tensors]
        if strangers:
            raise CheckpointError(
                f"the metadata of {folder} describes tensors that are not there: {shorten(strangers)}"
            )
        for name, meta in formats.items():
            quantizer_from_metadata(name, meta)
        outputs = tuple(copy_of(store.tensors[name], name, name) for name in _in_order(store, formats))
        plan = ConversionPlan(outputs, formats=formats, metadata=metadata)
        plan = replace(plan, report=moved_report(plan, store.tensors))
        return write_folder(
            Path(dst),
            plan,
            store,
            config.read_bytes(),
            sidecars_from=folder,
            files=store,
            extra=_about_quantization(folder),
            **writing,
        )


def _about_quantization(folder: Path) -> dict[str, bytes]:
    """Return the small file that says how the weights are quantized, where there is one."""
    there = (folder / SEPARATE).exists() or (folder / SEPARATE).is_symlink()
    return {SEPARATE: plain_file(folder, SEPARATE).read_bytes()} if there else {}


def _in_order(store: FileStore, formats: dict[str, Description]) -> Iterator[str]:
    """Tensor names in file order, but the entries of a quantized parameter together, as one file must have them."""
    entries = {n: [n + s for s in SUFFIXES.values() if n + s in store.tensors] for n in formats}
    of_another = {entry for n, found in entries.items() for entry in found if entry != n}
    for name in store.tensors:
        if name not in of_another:
            yield from entries.get(name, [name])
