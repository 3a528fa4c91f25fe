"""When the host may read what a device computes: on a CPU at any time, elsewhere once a step, at its end.

A read of a tensor on an accelerator waits for everything that was queued before it, and until the host goes on nothing
more is queued. So a step decides on the device what it does: whether it clips, and whether it changes anything.
"""

import torch


def reads_are_free(device: torch.device) -> bool:
    """Whether the host waits for nothing when it reads a tensor of this device."""
    return device.type == "cpu"
