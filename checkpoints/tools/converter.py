"""`AutoConverter`: the maps of one model, for state dicts in memory and for the configuration."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

import torch

from te_models.config import ModelConfig
from te_models.layers import QuantizedTensor

from ..families import Family, family_of
from ..folder.checkpoint import open_checkpoint
from ..folder.hf_config import choose_family, export_config
from ..folder.load import layout_of_names
from ..folder.passthrough import our_names, passthrough_tensors
from ..folder.provenance import provenance_source
from ..folder.te_folder import HFSource
from ..folder.tied_weights import tied_copies
from ..io.dtypes import as_torch_dtype, dtype_name
from ..io.errors import CheckpointError, shorten
from ..io.store import MemoryStore
from ..io.strict_json import parse_object
from ..mapping.param_shapes import ExpertLayout, check_layout
from ..mapping.plan import make_plan
from ..mapping.stream import carry_out
from ..mapping.te_namespace import te_namespace
from .conversion import PathLike


@runtime_checkable
class WritesConfig(Protocol):
    """A configuration of transformers, as far as it is used here."""

    def to_json_string(self) -> str:
        """Return the content of config.json."""
        ...


class AutoConverter:
    """Converts between the names and shapes of a Hugging Face family and ours; nothing is read or written.

    Attributes:
        config: the model.
        family: the Hugging Face family.
        source: the Hugging Face configuration that the model comes from; None for a model that was never one.

    Example:
        converter = AutoConverter.from_pretrained("SmolLM2-135M")
        ours = converter.from_hf(hf_model.state_dict())
        theirs = converter.to_hf(gpt_model.state_dict())
    """

    def __init__(self, config: ModelConfig, family: Family, source: HFSource | None = None) -> None:
        self.config = config
        self.family = family
        self.source = source

    @classmethod
    def from_pretrained(cls, folder: PathLike, *, family: str | None = None) -> Self:
        """Return the converter of a folder of either kind, or of a hub id. family: instead of the recorded one."""
        with open_checkpoint(folder) as checkpoint:
            source = provenance_source(checkpoint)
            return cls(checkpoint.config, choose_family(checkpoint.config, source, family), source)

    @classmethod
    def from_config(cls, config: ModelConfig | Mapping[str, Any] | WritesConfig, *, family: str | None = None) -> Self:
        """Return the converter of a model of ours, or of a Hugging Face one.

        Arguments:
            config: a configuration of ours, the content of a config.json, or transformers' configuration of a model.
            family: of a model of ours; None means the first that can express it.
        """
        if isinstance(config, ModelConfig):
            chosen = choose_family(config, None, family)
            chosen.write_config(config)  # raises if the family cannot express the model
            return cls(config, chosen)
        if not isinstance(config, Mapping):
            if isinstance(config, type) or not isinstance(config, WritesConfig):
                allowed = "a ModelConfig, the content of a config.json, or a configuration of transformers"
                raise CheckpointError(f"config is of type {type(config).__name__}; allowed: {allowed}")
            config = parse_object(config.to_json_string().encode(), "the configuration")
        found = family_of(config.get("model_type"))
        if family not in (None, found.model_type):
            raise CheckpointError(f"the configuration is of the family {found.model_type!r}, not {family!r}")
        return cls(found.read_config(config), found, HFSource(found.model_type, dict(config), None))

    def from_hf(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        layout: ExpertLayout = "grouped",
        dtype: torch.dtype | str | None = None,
        keep_unused: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return our tensors from a Hugging Face model's, in any form in which they exist, in memory or in files.

        What needs no rearrangement shares memory with `tensors`.

        Arguments:
            dtype: convert the weights to it; None keeps them.
            keep_unused: return what the family's files may hold and the model does not use as well, under names that
                begin with "carried.", for `to_hf`; otherwise it is left out. No model of ours loads them.

        Raises CheckpointError where the tensors are not exactly the model's.
        """
        form, _ = self.family.best_form(self.config, tensors)
        namespace = self.family.namespace(self.config, form)
        extra = [name for name in tensors if name not in namespace.stored]
        unused = passthrough_tensors(extra, self.family.model_type, self._hf, in_our_folder=False)
        store = MemoryStore(tensors)
        copies = tied_copies(self.config, store.tensors, self.family)
        for copy, original in copies.items():
            without_data = tensors[copy].is_meta or tensors[original].is_meta
            if not without_data and not torch.equal(tensors[copy], tensors[original]):
                raise CheckpointError(f"tie_word_embeddings is true, but {copy!r} differs from {original!r}")
        plan = make_plan(
            store.tensors,
            namespace,
            te_namespace(self.config, check_layout(layout)),
            where="the state dict",
            dtype=as_torch_dtype(dtype),
            unused={*unused, *copies},
            passthrough=our_names(unused) if keep_unused else {},
        )
        return carry_out(plan, store)

    def to_hf(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        form: str | None = None,
        dtype: torch.dtype | str | None = None,
        dequantize: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return a Hugging Face model's tensors from ours, in either layout.

        What `from_hf` kept of tensors that the model does not use is given back. Otherwise as `from_hf`.

        Arguments:
            form: which of the family's forms; None means the form of the files that the model came from, or the
                published one.
            dequantize: return the values of quantized tensors, in their logical dtype; otherwise they are refused.
        """
        passthrough = passthrough_tensors(tensors, self.family.model_type, self._hf, in_our_folder=True)
        own = {name: tensor for name, tensor in tensors.items() if name not in passthrough}
        layout = layout_of_names(own, self.config, "the names of the state dict")
        quantized = {name: tensor for name, tensor in own.items() if isinstance(tensor, QuantizedTensor)}
        if quantized and not dequantize:
            raise CheckpointError(
                f"the state dict has quantized tensors ({shorten(quantized, 2)}); dequantize=True returns their values"
            )
        values = {name: tensor.dequantize() for name, tensor in quantized.items()}
        if form is None and self.source is not None and self.source.family == self.family.model_type:
            form = self.source.form
        store = MemoryStore({**tensors, **values})
        plan = make_plan(
            store.tensors,
            te_namespace(self.config, layout),
            self.family.namespace(self.config, form),
            where="the state dict",
            dtype=as_torch_dtype(dtype),
            unused=passthrough,
            passthrough=passthrough,
        )
        return carry_out(plan, store)

    @property
    def _hf(self) -> Mapping[str, Any]:
        return self.source.config if self.source is not None else {}

    def hf_config(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the content of config.json for a model with these tensors, of which it takes the dtype."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in tensors.values():
            sizes[tensor.dtype] += tensor.numel()
        return export_config(self.config, self.source, self.family, dtype_name(sizes.most_common(1)[0][0]))
