"""Whether a weight that is stored quantized fits the recipe in force.

GEMMs read a stored weight as it is. Another format is an error. The same format in other numbers (blocks of another
shape, scales of another kind, another FP8 dtype) runs, as a model whose weights came with float32 scales shall run
under a recipe that makes powers of two; it warns once, and `recipe_report` says what is stored.
"""

import warnings

from te_models.kernels.compiling import compiling
from te_models.kernels.torch_versions import constant_when_traced, equal_values, register_constants

from ..quantizer import Quantizer
from ..recipe.base import GemmQuantizers, refuse_transformed, refuse_two_dimensional

_FORM = (
    "fp8_dtype",
    "block_scaling_dim",
    "force_pow_2_scales",
    "two_dimensional",
    "rowwise_quantizer",
    "columnwise_quantizer",
)
"""The fields of quantizers that a stored number depends on; not those that say which copies there are."""
_FORM_OF_NVFP4 = (*_FORM, "with_2d_quantization")
"""As NVFP4 calls two_dimensional."""
_warned: set[str] = set()


def check_format(stored: Quantizer, quantizer: Quantizer) -> None:
    """Raise ValueError where a weight that is `stored` quantized is not in the format that the recipe in force wants;
    warn once where it is in another form of that format."""
    # where quantizers are no constants, a comparison traced under dynamic=True makes graph inputs of floats
    if stored is quantizer or (not (register_constants is None and compiling()) and equal_values(stored, quantizer)):
        return
    if stored.FORMAT != quantizer.FORMAT:
        raise ValueError(
            f"the weight is stored as {stored.FORMAT}, but the recipe in force wants {quantizer.FORMAT}; "
            "allowed: a recipe of the stored format, or autocast(enabled=False)"
        )
    # under delayed scaling a stored weight's scale always comes from its own amax
    names = ("fp8_dtype",) if quantizer.NEEDS_STATE else _FORM_OF_NVFP4 if stored.FORMAT == "nvfp4" else _FORM
    others = [name for name in names if getattr(stored, name, None) != getattr(quantizer, name, None)]
    if others:
        form = ", ".join([f"{name} {getattr(stored, name)}" for name in others])
        _warn_of_another_form(stored.FORMAT, form)


def check_operands(stored: Quantizer, quantizers: GemmQuantizers, needs_dgrad: bool) -> None:
    """Raise ValueError for a stored weight that a GEMM of this recipe cannot take, as `GemmQuantizers` does for those
    that the recipe makes."""
    refuse_two_dimensional(quantizers.input, stored, "input", "the stored weight", "rowwise", "rowwise")
    if needs_dgrad and quantizers.backward_override is None:
        gradient = quantizers.grad_output
        refuse_two_dimensional(gradient, stored, "grad_output", "the stored weight", "rowwise", "columnwise")
        refuse_transformed(stored, "the stored weight")


@constant_when_traced
def _warn_of_another_form(stored: str, form: str) -> bool:
    """Warn once. It runs while tracing, not in the graph."""
    message = (
        f"a weight stored as {stored} with {form} is in another form than the recipe in force gives weights; GEMMs "
        "read it as it is stored"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=2)
    return True
