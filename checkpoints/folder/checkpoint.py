"""Open a checkpoint folder, a Hugging Face one or ours, and load its tensors into a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from te_models.config import ModelConfig

from ..families import FAMILIES, family_of
from ..formats import declares_quantization, without_quantization
from ..io.header import TensorInfo
from ..io.hub import local_folder
from ..io.model_folder import check_model_folder
from ..io.store import Closing, FileStore, Store
from ..io.strict_json import read_object
from ..io.weight_files import open_weights, plain_file
from ..mapping.param_shapes import ExpertLayout, check_held, check_strangers, expected_tensors
from ..mapping.parameters import StoredParameters
from ..mapping.plan import match_tensors
from ..mapping.quantized_format import SUFFIXES, Description, empty, read_metadata
from ..mapping.rank_shards import WHOLE, ShardPlace, parts
from ..mapping.te_namespace import formats_in_layout, grouped_formats, te_namespace
from ..mapping.tensor_map import Namespace
from .passthrough import passthrough_tensors
from .reading_checks import check_while_reading
from .te_folder import CONFIG, MODEL_TYPE, HFSource, TEFolder
from .tied_weights import check_tied_copies, tied_copies

if TYPE_CHECKING:
    import torch

    from te_models.layers import QuantizedTensor

    from ..formats import Declaration
    from ..formats.files import QuantizedFiles


class Checkpoint(Closing):
    """An open checkpoint. Only headers have been read, and they fit the configuration.

    Attributes:
        path: the folder.
        kind: "hf" (a Hugging Face folder) or "te_models" (ours).
        config: the model.
        family: the Hugging Face family it is of, or comes from; None for a model that was never one.
        layout: the expert layout of our files; None for a Hugging Face folder.
        source: the Hugging Face configuration that it is of, or comes from.
        formats: grouped-layout names of quantized parameters -> their format descriptions.
        files: the tensors as stored.
        store: the tensors as they are read: the tensors of `files`; of a quantized Hugging Face folder, fields of our
            storage where they take over its numbers exactly, and values elsewhere.
        quantized: what a Hugging Face folder declares about quantization, and where; None: it is not quantized.
    """

    def __init__(
        self,
        path: Path,
        storage: str | None = None,
        *,
        any_storage: bool = False,
        float32: bool = False,
        mtp: bool = False,
        verify: bool = True,
        files: FileStore | None = None,
    ) -> None:
        check_model_folder(path)
        values = read_object(plain_file(path, CONFIG), f"{path}/{CONFIG}")
        self.path = path
        self.kind: Literal["hf", "te_models"] = "te_models" if values.get("model_type") == MODEL_TYPE else "hf"
        self.layout: ExpertLayout | None = None
        self.formats: dict[str, Description] = {}
        if self.kind == "te_models":
            folder = TEFolder.from_dict(values)
            self.config, self.layout, self.source = folder.config, folder.layout, folder.source
            declaration = None
        else:
            family = family_of(values.get("model_type"))
            declaration = None
            if declares_quantization(values, path):
                from ..formats import declared

                declaration = declared(values, path)
            self.config: ModelConfig = family.read_config(without_quantization(values), mtp=mtp)
            self.source: HFSource | None = HFSource(family.model_type, values, None)
        self.files = open_weights(path) if files is None else files
        self.store: Store = self.files
        self.quantized: QuantizedFiles | None = None
        try:
            self._check(declaration, storage, any_storage, float32)
            if verify:
                check_while_reading(path, self.files, ours=self.kind == "te_models")
        except BaseException:
            self.close()
            raise

    def _check(self, declaration: Declaration | None, storage: str | None, any_storage: bool, float32: bool) -> None:
        held, where = len(self.files.tensors), str(self.path)
        if self.layout is not None:
            apart = self.layout == "per-gemm"
        else:
            apart = all(names.experts_apart for names in FAMILIES[self.family or ""].forms.values())
        check_held(self.config, held, where, experts_apart=apart)
        if self.layout is not None:
            stored: dict[str, Description] = {}
            for file, metadata in self.files.metadata.items():
                stored.update(read_metadata(metadata, file))
            self.formats = grouped_formats(self.config, self.layout, stored)
        elif self.source is not None:
            family = FAMILIES[self.family or ""]
            found: Mapping[str, TensorInfo] = self.files.tensors
            if declaration is not None:
                from ..formats.source import logical_tensors

                found = logical_tensors(self.files, declaration.format)
            form, high_precision = family.best_form(self.config, found)
            self.source = replace(self.source, form=form)
            if declaration is None:
                self.namespace = high_precision
            if declaration is not None:
                from ..formats.source import open_quantized

                self.quantized = open_quantized(
                    self.files,
                    high_precision,
                    declaration,
                    storage=storage,
                    any_storage=any_storage,
                    float32=float32,
                    where=where,
                )
                self.store, self.formats = self.quantized.store, self.quantized.found.formats
        match_tensors(self.tensors, self.namespace.stored, where=str(self.path), unused=self.unused)

    @property
    def family(self) -> str | None:
        return self.source.family if self.source is not None else None

    def empty_quantized(
        self, layout: ExpertLayout, device: torch.device | str | None = None, place: ShardPlace = WHOLE
    ) -> Iterator[tuple[str, QuantizedTensor]]:
        """Yield the name in `layout` and an uninitialised tensor of the stored format for every quantized parameter, or
        for the part of it that a rank of a split model owns.

        As parameters of a model they take over the stored bits in `load_into`.
        """
        shapes = expected_tensors(self.config, layout)
        owned = parts(self.config, shapes, place)
        for name, meta in formats_in_layout(self.config, layout, self.formats).items():
            yield name, empty(name, owned[name].shape(shapes[name]), meta, device)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor of `store`."""
        return self.store.tensors

    @property
    def names(self) -> list[str]:
        """Names of the stored tensors."""
        return list(self.files.tensors)

    @cached_property
    def namespace(self) -> Namespace:
        """How the folder stores the model."""
        if self.layout is not None:
            return te_namespace(self.config, self.layout, self.formats)
        if self.quantized is not None:
            return self.quantized.found.namespace
        return FAMILIES[self.family or ""].namespace(self.config, self.source and self.source.form)

    @cached_property
    def passthrough(self) -> Mapping[str, str]:
        """Stored tensors that the model does not use and conversions keep -> their names in Hugging Face files."""
        known = {*self.namespace.stored, *self.tied_copies} if self.config.mtp_num_layers else self.namespace.stored
        extra = [name for name in self.tensors if name not in known]
        check_strangers(extra, str(self.path))
        hf = self.source.config if self.source is not None else {}
        return passthrough_tensors(extra, self.family, hf, in_our_folder=self.layout is not None)

    @cached_property
    def unused(self) -> frozenset[str]:
        """Stored tensors that the model does not use: passthrough tensors, and copies of the embedding."""
        return frozenset((*self.passthrough, *self.tied_copies))

    @cached_property
    def tied_copies(self) -> Mapping[str, str]:
        """Stored tensors that only repeat another one -> that one."""
        return tied_copies(self.config, self.files.tensors, FAMILIES[self.family or ""]) if self.kind == "hf" else {}

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a plain parameter in the files; `name` is its name in either expert layout."""
        return self._parameters.dtype(name)

    @cached_property
    def _parameters(self) -> StoredParameters:
        return StoredParameters(self.store, self.namespace, self.config, self.formats, self.layout or "grouped")

    def check_values(self) -> None:
        """Check what headers do not show, reading the tensors concerned: that those which are left out because they
        repeat another one really do, and that the scales of quantized parameters are such numbers. From here on a NaN
        among quantized numbers is an error when it is read."""
        check_tied_copies(self.files, self.tied_copies)
        self.check_scales()
        self.check_elements()

    def check_elements(self) -> None:
        """Have the numbers of quantized parameters checked when they are read."""
        if self.quantized is not None:
            data = {name + form.data.suffix for name, form in self.quantized.formats.items()}
        elif self.layout is not None and self.formats:
            suffixes = [suffix for field, suffix in SUFFIXES.items() if field.endswith("_data")]
            data = {n + s for n in formats_in_layout(self.config, self.layout, self.formats) for s in suffixes}
        else:
            return
        from ..formats.numbers import check_elements

        floats = {n: self.files.tensors[n].dtype for n in data if n in self.files.tensors}
        floats = {name: dtype for name, dtype in floats.items() if dtype in ("F8_E4M3", "F8_E5M2")}

        def check(name: str, part: memoryview) -> None:
            if name in floats:
                check_elements(name, part, floats[name])

        self.files.check_elements(check)

    def check_scales(self) -> None:
        """Check that the scales of quantized parameters are such numbers (this reads them)."""
        if self.quantized is not None:
            self.quantized.check_scales()
        if self.layout is not None and self.formats:
            from ..formats.numbers import check_scales

            suffixes = [suffix for f, suffix in SUFFIXES.items() if not f.endswith(("_data", "_zero_point"))]
            described = formats_in_layout(self.config, self.layout, self.formats)
            integers = ("int4", "int8")
            names = ((n + s, meta["format"] in integers) for n, meta in described.items() for s in suffixes)
            check_scales(self.files, ((name, signed) for name, signed in names if name in self.tensors))

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def load_into(self, params: Mapping[str, torch.Tensor], *, place: ShardPlace = WHOLE) -> None:
        """Fill a model's tensors from the files, converting to their layout, dtype, device and quantized format.

        Arguments:
            params: every parameter of the model by name, in grouped or per-GEMM layout, as the files have it. Plain
                tensors are filled part by part; for a quantized one its values are put together first.
            place: the parameters belong to one rank of a split model (`parts.py`); nothing else is read, except the
            scales of a quantized Hugging Face folder: they are checked. Weights stored quantized are taken over
                exactly, or refused where the split would cut a block.

        Raises:
            CheckpointError: names or shapes are not exactly the model's, a tensor cannot be converted, or, after
                the model was filled, a tensor is not as manifest.json says.
        """
        if place == WHOLE or self.quantized is not None:
            self.check_values()
        else:  # a part's scales are checked as they are read
            check_tied_copies(self.files, self.tied_copies)
            self.check_elements()
        if place != WHOLE:
            self.files.take_share(place.number, place.count)
        from .load import ParameterLoad

        load = ParameterLoad(self.store, self.namespace, self.config, self.formats, params, place)
        for name in params:
            load.fill(name)
        self.files.finish_checks()


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    storage: str | None = None,
    any_storage: bool = False,
    float32: bool = False,
    mtp: bool = False,
    verify: bool = True,
    files: FileStore | None = None,
) -> Checkpoint:
    """Open a checkpoint folder, or download the model of a hub id (`org/name`, `org/name@revision`) and open that.

    Reads config.json and headers and checks that they fit each other, no tensor data (but the scales of matrices that
    have one for all of their numbers, or that are promised to be powers of two). storage: which of our forms a
    quantized Hugging Face folder is read as, or "values"; None: the first that its format has. any_storage: one that
    its format does not have is allowed, too, and read as values (`quantized.wanted` then says what to make of them).
    float32: values of quantized weights are read in it, not in the dtype of the other weights. mtp: layers of a Hugging
    Face folder that predict further tokens are a part of the model (`ModelConfig.mtp_num_layers`). verify: where the
    folder has a manifest.json, check small files and headers against it now, and tensors while they are read:
    `load_into` and conversions raise CheckpointError for one that is damaged, and who reads otherwise calls
    `files.finish_checks`. files: the weights, where they are not in the folder.
    """
    options = {"any_storage": any_storage, "float32": float32, "mtp": mtp, "verify": verify}
    return Checkpoint(local_folder(path), storage, files=files, **options)
