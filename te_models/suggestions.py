"""What error messages are made of: the allowed name that a misspelt one was probably meant to be, and values in short.

A leaf module: it imports nothing of the project.
"""

import difflib
from collections.abc import Collection, Iterable

_MOST = 3
_LONGEST = 300
OF_OTHER_TRAINERS = {
    **dict.fromkeys(("base_model", "model_name_or_path", "model_name"), "model.path"),
    **dict.fromkeys(("datasets", "dataset", "train_file"), "data.text"),
    **dict.fromkeys(("max_seq_length", "max_length", "sequence_len", "seq_len", "cutoff_len"), "data.sequence_length"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "local_batch_size"), "data.micro_batch_size"),
    "gradient_accumulation_steps": "data.gradient_accumulation",
    **dict.fromkeys(("sample_packing", "packing"), "data.pack_documents"),
    "max_steps": "steps",
    "learning_rate": "optimizer.lr",
    "optim": "optimizer.kind",
    **dict.fromkeys(("max_grad_norm", "max_norm", "gradient_clipping"), "optimizer.clip_grad_norm"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "schedule.kind"),
    **dict.fromkeys(("lora_r", "lora_rank"), "lora.rank"),
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    **dict.fromkeys(("lora_target", "lora_target_modules", "target_modules"), "lora.targets"),
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluation.every",
    "report_to": "log.writers",
    "gradient_checkpointing": "model.activation_checkpointing",
    "hub_model_id": "hub.repo_id",
}
"""What other trainers call a key of a run (axolotl, unsloth, LLaMA-Factory, transformers, torchtitan) -> the key."""


def did_you_mean(word: object, allowed: Iterable[str]) -> str:
    """Return "; did you mean 'name'?" for the allowed names nearest to `word`, or "" where none is near.

    Words of other trainers come first, then of dotted names those that end in the word: "--lr" is "--optimizer.lr".
    """
    names, text = list(allowed), str(word)
    meant = OF_OTHER_TRAINERS.get(_end(text).replace("-", "_"), "?")
    known = [name for name in names if name.lstrip("-").replace("-", "_") in (meant, _end(meant))]
    same_end = [name for name in names if _end(name) == _end(text)]
    near = known[:1] or same_end or difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    if not near:
        ends = difflib.get_close_matches(_end(text), {_end(name) for name in names}, n=1, cutoff=0.6)
        near = [name for name in names if _end(name) in ends]
    return f"; did you mean {' or '.join(map(repr, near[:_MOST]))}?" if near else ""


def _end(name: str) -> str:
    """Return the last part of a dotted name, without the dashes of an option."""
    return name.lstrip("-").rpartition(".")[2]


def check_choice(option: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless an option has one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{option} is {shown(value)}; allowed: {', '.join(map(repr, allowed))}")


def shown(value: object) -> str:
    """Return a value as a message names it: its repr, but of a plain tensor its shape, dtype and device, and of
    anything long its beginning."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and not type(value).__module__.startswith("te_models."):
        device = getattr(value, "device", None)
        where = "" if device is None else f" on {device}"
        return f"a {type(value).__name__} of shape {tuple(shape)} and {dtype}{where}"
    if isinstance(value, (list, tuple)) and any(hasattr(item, "shape") for item in value):
        inner = ", ".join(map(shown, value[:_MOST])) + (", ..." if len(value) > _MOST else "")
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
