"""Read {name: [verb, folder]}, try each conversion, print {name: what was raised, processor seconds, MiB at the peak}.

The peak is that of the resident set (VmHWM, which writing 5 to clear_refs sets back) above its value before.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

import te_models.checkpoints as checkpoints
from te_models.layers import MXFP8Quantizer

# torch loads its formulas for the meta device (1 s, 40 MiB) when the first of them is asked for
MXFP8Quantizer().quantize_fields(torch.empty(1, 1, device="meta"))


def status(key: str) -> int:
    """Return an entry of /proc/self/status in KiB."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def attempt(verb: str, folder: str) -> dict[str, Any]:
    """Convert the folder and describe the failure."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS"), time.process_time()
    error, text = "", ""
    try:
        getattr(checkpoints, verb)(folder, Path(folder).parent / "new" / "out")
    except Exception as caught:
        error, text = type(caught).__name__, str(caught)
    seconds = time.process_time() - start
    return {"error": error, "text": text, "seconds": seconds, "mib": (status("VmHWM") - before) / 1024}


if __name__ == "__main__":
    print(json.dumps({name: attempt(*work) for name, work in json.load(sys.stdin).items()}))
