"""Save a `TEModelForCausalLM` into a folder that may exist and hold other things, as transformers' tools expect,
and read state dicts as our files hold them."""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from te_models.checkpoints import save_model
from te_models.checkpoints.folder.te_folder import CONFIG, MODEL_TYPE
from te_models.checkpoints.io.errors import shorten
from te_models.checkpoints.io.manifest import MANIFEST, manifest_bytes, read_manifest
from te_models.checkpoints.io.strict_json import read_object
from te_models.checkpoints.io.weight_files import INDEX, SINGLE
from te_models.checkpoints.mapping.quantized_format import SUFFIXES, stored_fields
from te_models.checkpoints.write.shards import parse_size
from te_models.checkpoints.write.writer import write_small_file, write_tensors
from te_models.layers import QuantizedTensor
from te_models.layers.tensor.fsdp import sharded

from ..model import GPTModel

if TYPE_CHECKING:
    from .model import TEModelForCausalLM

_ADAPTER = "adapter_model.safetensors"
_GENERATION = "generation_config.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# save_function is what accelerate's examples pass along, and transformers does not call it either; token is for uploads
_WITHOUT_MEANING = ("save_peft_format", "save_original_format", "safe_serialization", "save_function", "token")


def save(
    model: TEModelForCausalLM,
    folder: Path,
    state_dict: Mapping[str, Tensor] | None,
    max_shard_size: int | str,
    options: Mapping[str, Any],
) -> None:
    """Write the model's files beside whatever else the folder holds; files of a model saved there before go.

    They are written to a temporary folder inside `folder` first, so that a full disk leaves the old model.
    """
    for name, value in options.items():
        if value not in (None, False) and name not in _WITHOUT_MEANING:
            raise ValueError(f"{name} is {value!r}, which TEModelForCausalLM.save_pretrained cannot honour")
    if model._hf_peft_config_loaded:
        _save_adapter(model, folder, state_dict)
        return
    if (folder / CONFIG).is_file():
        kind = read_object(folder / CONFIG).get("model_type")
        if kind != MODEL_TYPE:
            raise ValueError(f"{folder} holds a model of type {kind!r}; choose another folder")
    gpt = model.gpt
    tensors = dict(gpt.stored_tensors())
    if any(".base_layer." in name for name in tensors):
        raise ValueError(
            "the model has adapters of peft; allowed: save_pretrained of the PeftModel, which writes them, or "
            "merge_and_unload() first"
        )
    sizes = gpt.tp_size, gpt.expert_model_parallel_size, gpt.expert_tensor_parallel_size
    split = state_dict is None and max(sizes) > 1
    if state_dict is not None:
        missing = [name for name in tensors if name not in state_dict]
        if missing:
            raise ValueError(f"state_dict lacks parameters of the model: {shorten(missing)}")
        tensors = {name: state_dict[name] for name in tensors}
    if split or sharded(tensors.values()):
        raise ValueError(
            "the model is shared by several ranks; allowed: model.gpt.save_pretrained(folder) on all of them, or a "
            "state_dict of whole tensors"
        )
    origin = model.gpt.pretrained_folder
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        written = temporary / "model"
        save_model(
            tensors,
            model.gpt.config,
            written,
            source_dir=origin if origin is not None and origin.is_dir() else None,
            source=model.gpt.origin,
            max_shard_bytes=parse_size(max_shard_size),
        )
        if model.generation_config is not None:
            model.generation_config.save_pretrained(written)
        _narrow_manifest(written)
        _leave_tokenizer(written, folder)
        _move_in(written, folder)
    finally:
        shutil.rmtree(temporary)


def _save_adapter(model: TEModelForCausalLM, folder: Path, state_dict: Mapping[str, Tensor] | None) -> None:
    """Write the active adapter as peft does, with the names that a parameter has in a PeftModel."""
    names = model.active_adapters()
    if len(names) != 1:
        raise ValueError(f"{len(names)} adapters are active; allowed: one, chosen with set_adapter, at a time")
    tensors = model.get_adapter_state_dict(names[0], state_dict=None if state_dict is None else dict(state_dict))
    folder.mkdir(parents=True, exist_ok=True)
    in_peft = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    write_tensors(folder / _ADAPTER, in_peft, {"format": "pt"})
    config = copy.copy(model.peft_config[names[0]])  # type: ignore[attr-defined]
    config.inference_mode = True
    config.save_pretrained(folder)


def _move_in(written: Path, folder: Path) -> None:
    """Move a model's files to where an older one may be, so that the weights in `folder` belong to one of them if
    the process is killed: no file goes before others are complete that are read without it (`open_weights`). Only
    between two models in equally many shards, whose names are then the same, there is a time when both are mixed."""
    # the old digests fit none of the new files: without them, what lies there midway is read unchecked, not refused
    (folder / MANIFEST).unlink(missing_ok=True)
    new = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    first = {name for name in new if _WEIGHTS.fullmatch(name)} - {SINGLE, INDEX}
    for name in sorted(first):
        (written / name).replace(folder / name)
    for name, other in ((SINGLE, INDEX), (INDEX, SINGLE)):
        if name in new:
            (folder / other).unlink(missing_ok=True)  # shards are read without an index, too
            (written / name).replace(folder / name)
    for name in sorted(new - first - {SINGLE, INDEX}, key=lambda name: name in (CONFIG, MANIFEST)):
        (folder / name).parent.mkdir(exist_ok=True)
        (written / name).replace(folder / name)
    for old in folder.iterdir():
        if _WEIGHTS.fullmatch(old.name) and old.name not in new:
            old.unlink()


def _leave_tokenizer(written: Path, folder: Path) -> None:
    """Where `folder` has files beside the model, such as a tokenizer that was saved before the model and may have other
    tokens than the origin's tokenizer, bring none: the files of one tokenizer belong together."""
    names = [str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()]
    beside = [name for name in names if name not in (CONFIG, MANIFEST, _GENERATION) and not _WEIGHTS.fullmatch(name)]
    if any((folder / name).exists() for name in beside):
        for name in beside:
            (written / name).unlink()


def _narrow_manifest(folder: Path) -> None:
    """List what transformers' tools do not write again themselves: a tokenizer is usually saved after the model."""
    records = {n: r for n, r in read_manifest(folder).items() if n == CONFIG or _WEIGHTS.fullmatch(n)}
    if (folder / _GENERATION).is_file():
        records[_GENERATION] = write_small_file(folder / _GENERATION, (folder / _GENERATION).read_bytes())
    write_small_file(folder / MANIFEST, manifest_bytes(records, partial=True))


_MORE = [suffix for suffix in SUFFIXES.values() if suffix]


def joined_fields(gpt: GPTModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` with each quantized parameter as one tensor.

    Raises ValueError where the model does not store that parameter in the same format.
    """
    joined = dict(state)
    for name, parameter in gpt.named_parameters():
        if not any(name + suffix in state for suffix in _MORE):
            continue
        in_state = {name + suffix: state[name + suffix] for suffix in SUFFIXES.values() if name + suffix in state}
        fields = stored_fields(name, parameter) if isinstance(parameter, QuantizedTensor) else {}
        if {n: (t.shape, t.dtype) for n, t in in_state.items()} != {n: (t.shape, t.dtype) for n, t in fields.items()}:
            raise ValueError(f"{name} is stored quantized, and the model does not have it in that format")
        assert isinstance(parameter, QuantizedTensor)
        for entry in in_state:
            del joined[entry]
        values = {field: in_state[name + SUFFIXES[field]] for field in parameter.fields}
        cls: Any = type(parameter)
        joined[name] = cls(values, parameter.quantizer, parameter.shape, parameter.dtype)
    return joined
