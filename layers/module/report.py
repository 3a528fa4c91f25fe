"""What quantization did to a model: which recipe each layer ran under, and the statistics of its operands."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn

from ..quantizer.delayed import ROLES, STATISTICS
from ..tensor.quantized_tensor import QuantizedTensor
from .model_state import quantized_modules

HIGH_PRECISION_NAME = "bf16"


@dataclass(frozen=True)
class RecipeReport:
    """asked, ran: layer -> recipe name, for every layer that has run; "bf16" is high precision, "none" no recipe asked.
    stored: layer -> the quantizer of its weights where they are stored quantized.

    The names differ where a PerModuleRecipe or a calibration says so, and nowhere else: a layer never leaves its recipe
    on its own. But GEMMs read a stored weight as it is, also where the recipe would have made it with other scales or
    blocks (which warns once): `stored` says what they are. Which kernels ran is counted by
    `te_models.kernels.gemm.gemm_counts`.
    """

    asked: dict[str, str]
    ran: dict[str, str]
    stored: dict[str, str] = field(default_factory=dict)

    def layers_asked(self) -> Counter[str]:
        """Return how many layers were asked to run under each recipe."""
        return Counter(self.asked.values())

    def layers_run(self) -> Counter[str]:
        """Return how many layers ran under each recipe."""
        return Counter(self.ran.values())


def recipe_report(model: nn.Module) -> RecipeReport:
    """Return what recipes the layers of a model were asked for and ran under in their last forward pass, eager or
    compiled."""
    asked, ran, stored = {}, {}, {}
    for name, module in quantized_modules(model):
        use = module.recipe_use
        if use.asked is not None:
            asked[name], ran[name] = use.asked, use.ran or HIGH_PRECISION_NAME
            weights = (getattr(module, weight) for weight in module.weight_names())
            forms = dict.fromkeys(str(w.quantizer) for w in weights if isinstance(w, QuantizedTensor))
            if forms:
                stored[name] = ", ".join(forms)
    return RecipeReport(asked, ran, stored)


@torch.no_grad()
def quantization_statistics(model: nn.Module) -> dict[str, dict[str, float]]:
    """Return what `collect_statistics` noted last, by `layer.role` (`layer.fc1.role` where a layer has several GEMMs).

    Each has amax, scale_min, scale_max, underflow (fraction of nonzero values that became zero) and saturation
    (fraction that was clamped); amax is infinite or NaN where a value was. Of a grouped layer they are over all experts
    and their scales. Roles are input, weight and grad_output; those never noted are absent, such as weights that are
    stored quantized and inputs that come so, whose other values nobody has. One copy from the device for the whole
    model.
    """
    names, tensors = [], []
    for name, module in quantized_modules(model):
        prefix = f"{name}." if name else ""
        for slot in module.STATISTICS_SLOTS:
            names += [f"{prefix}{slot}.{role}" if slot else f"{prefix}{role}" for role in ROLES]
        tensors.append(torch.cat((module.fp8_statistics, module.fp8_grad_statistics[:, None]), 1).flatten(0, 1))
    if not tensors:
        return {}
    rows = torch.cat(tensors).cpu()
    recorded = (rows[:, STATISTICS.index("scale_max")] != 0).tolist()
    return {
        name: dict(zip(STATISTICS, row, strict=True))
        for name, row, there in zip(names, rows.tolist(), recorded, strict=True)
        if there
    }
