"""Public norms. The reference is what runs: eager on any device, fused by Inductor under torch.compile."""

from .reference import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
