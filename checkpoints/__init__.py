"""Checkpoints: Hugging Face families, expert layouts, quantized serialization, streaming conversion, verification.

May import: `te_models.layers`, `te_models.config`. Nothing here unpickles, and nothing imports transformers.

How it fits together: a family (`families/`) or one of our layouts (`mapping/te_namespace.py`) is a namespace, a set of
links between stored tensors and the model's canonical ones (`mapping/tensor_map.py`). Two namespaces compose into a
plan (`mapping/plan.py`); it is complete and bijective, or an error. `mapping/stream.py` moves its bytes from a store
(`io/store.py`) into a live model (`folder/load.py`) or a new folder (`write/writer.py`, `io/atomic.py`). Quantized
parameters take a route through it (`quantized/route.py`).
"""

from typing import TYPE_CHECKING

from te_models.lazy import lazy_names

if TYPE_CHECKING:
    from .families import FAMILIES
    from .folder.checkpoint import Checkpoint, open_checkpoint
    from .io.errors import CheckpointError
    from .io.manifest import check_manifest
    from .mapping.param_shapes import ExpertLayout, expected_tensors
    from .mapping.plan import ConversionPlan
    from .quantized.plain_state_dicts import from_plain_state_dict, plain_state_dict
    from .tools.convert import export_hf, import_hf, relayout
    from .tools.converter import AutoConverter
    from .tools.diff import DiffReport, diff
    from .tools.foreign import import_checkpoint
    from .tools.foreign_export import export_checkpoint
    from .tools.foreign_memory import export_state_dict, import_state_dict
    from .tools.inspect import Inspection, inspect
    from .tools.quantize import dequantize, quantize
    from .tools.refit import Refit, refit
    from .tools.reshard import reshard
    from .tools.save import save_model
    from .tools.toy import toy
    from .tools.upcycle import upcycle
    from .tools.verify import VerifyReport, verify

__all__ = [
    "FAMILIES",
    "AutoConverter",
    "Checkpoint",
    "CheckpointError",
    "ConversionPlan",
    "DiffReport",
    "ExpertLayout",
    "Inspection",
    "Refit",
    "VerifyReport",
    "check_manifest",
    "dequantize",
    "diff",
    "expected_tensors",
    "export_checkpoint",
    "export_hf",
    "export_state_dict",
    "from_plain_state_dict",
    "import_checkpoint",
    "import_hf",
    "import_state_dict",
    "inspect",
    "open_checkpoint",
    "plain_state_dict",
    "quantize",
    "refit",
    "relayout",
    "reshard",
    "save_model",
    "toy",
    "upcycle",
    "verify",
]

# te_models.plan.Plan is what a run takes
__getattr__, __dir__ = lazy_names(__name__, renamed={"Plan": "ConversionPlan"})
