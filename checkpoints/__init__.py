"""Checkpoints: Hugging Face families, expert layouts, quantized serialization, streaming conversion, verification.

May import: `te_models.layers`, `te_models.config`. Nothing here unpickles, and nothing imports transformers.

How it fits together: a family (`families/`) or one of our layouts (`te_namespace.py`) is a namespace, a set of links
between stored tensors and the model's canonical ones (`links.py`, `ops.py`). Two namespaces compose into a plan
(`plan.py`), which is complete and bijective or an error; `move.py` carries it out on a store (`store.py`), into a live
model (`load.py`) or a new folder (`writer.py`, `atomic.py`).
"""

from .checkpoint import Checkpoint, open_checkpoint
from .convert import export_hf, import_hf, relayout
from .converter import AutoConverter
from .difference import DiffReport, diff
from .errors import CheckpointError
from .families import FAMILIES
from .inspection import Inspection, inspect
from .manifest import check_manifest
from .naming import ExpertLayout, expected_tensors
from .plain_state_dicts import from_plain_state_dict, plain_state_dict
from .plan import Plan
from .quantize import dequantize, quantize
from .reshard import reshard
from .save import save_model
from .toy import toy
from .upcycle import upcycle
from .verify import VerifyReport, verify

__all__ = [
    "FAMILIES",
    "AutoConverter",
    "Checkpoint",
    "CheckpointError",
    "DiffReport",
    "ExpertLayout",
    "Inspection",
    "Plan",
    "VerifyReport",
    "check_manifest",
    "dequantize",
    "diff",
    "expected_tensors",
    "export_hf",
    "from_plain_state_dict",
    "import_hf",
    "inspect",
    "open_checkpoint",
    "plain_state_dict",
    "quantize",
    "relayout",
    "reshard",
    "save_model",
    "toy",
    "upcycle",
    "verify",
]
