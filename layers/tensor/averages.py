"""Averages of quantized weights are float32: `torch.optim.swa_utils.AveragedModel` starts from such a copy.

An average moves by small steps, and a format of few bits rounds each of them away, so a quantized average stands still.
AveragedModel copies the model that it is given and writes averages over the copy with `copy_`, as a loaded checkpoint
is written, so it is where the copy becomes its submodule that the weights are dequantized.
"""

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from .fsdp import local_part
from .quantized_tensor import QuantizedTensor


def _keep_in_float32(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Dequantize the parameters of the copy that an AveragedModel makes; torch calls this for every new submodule."""
    if isinstance(module, AveragedModel) and name == "module" and submodule is not None:
        dequantize_parameters(submodule)


@torch.no_grad()
def dequantize_parameters(module: nn.Module) -> None:
    """Replace a module's quantized parameters by float32 ones, in place; shared ones stay shared.

    They keep what users have set on them. ValueError for sharded ones, whose averages each rank keeps by itself.
    """
    converted: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not isinstance(local_part(parameter), QuantizedTensor):
                continue
            if not isinstance(parameter, QuantizedTensor):
                raise ValueError(
                    f"{name} is sharded and quantized, so its average cannot be kept in a copy of the module; keep one "
                    "of parameter.to_local().float() on each rank, or of the master weights of FusedAdamW"
                )
            if id(parameter) not in converted:
                converted[id(parameter)] = _float32(parameter)
            part._parameters[name] = converted[id(parameter)]


def _float32(parameter: QuantizedTensor) -> nn.Parameter:
    new = nn.Parameter(parameter.dequantize(torch.float32), parameter.requires_grad)
    vars(new).update(parameter.user_attributes())
    return new


register_module_module_registration_hook(_keep_in_float32)
