"""Every registered operation: what it returns against its description, for real, fake and symbolic tensors."""

import importlib
import pkgutil
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from te_models import kernels
from te_models.kernels.activation.reference import ACTIVATIONS
from te_models.kernels.custom_op import Registered, like, operation, registered, registration
from te_models.kernels.gemm.operand import Kind
from tests.kernels.described import Arguments, check_description, tensors
from tests.kernels.triton.op_samples import FAMILIES, Family
from tests.kernels.triton.quantize.quantizer_samples import as_on_a_gpu

REPEATED = ("by_recipe", "quantized_outputs")
"""Families whose samples are those of other families, as recipes choose them, or have tests of their own kernels."""
LAYERS = {"linear_layer", "linear_layer_backward"}
"""Operations of layers, which tests/layers/registered calls in every combination."""
FIELD = {
    f"{rule}{pass_}" for rule in ("gated_delta_rule", "state_space_scan", "short_convolution") for pass_ in ("", "_bwd")
}
"""Operations of other packages' kernels, which tests/kernels/rules/test_field.py calls with stand-ins for these."""

SPARSE = {"select_keys", "sparse_attention_fwd", "sparse_attention_bwd", "indexer_loss"}
"""Plain torch on every device, which tests/kernels/attention/test_sparse_attention.py calls."""
RULES = {"recurrent_rule", "recurrent_rule_bwd"}
"""C++ of a CPU, which tests/kernels/rules/test_rules.py compares with the definitions of the rules."""


def everything() -> dict[str, Registered]:
    """Import every module of kernels that may register an operation; return all, but for those of other tests."""
    for module in pkgutil.walk_packages(kernels.__path__, "te_models.kernels."):
        if not module.name.rpartition(".")[2].startswith("triton"):
            importlib.import_module(module.name)
    left_out = LAYERS | FIELD | SPARSE | RULES
    found = {name: entry for name, entry in registered().items() if not name.startswith("test_")}
    return {name: entry for name, entry in found.items() if name not in left_out}


OPERATIONS = everything()


@cache
def samples(family: Family, device: torch.device) -> list[tuple[str, Arguments]]:
    torch.manual_seed(0)
    return list(family(device))


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["a sixth", "all"])
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow if f.__name__ in REPEATED else ()) for f in FAMILIES],
    ids=lambda family: family.__name__,
)
def test_results_are_as_described(device, family, every: int) -> None:
    """every: of the samples of each operation, the first, the seventh, and so on, or all."""
    by_name: dict[str, list[Arguments]] = {}
    for name, arguments in samples(family, device):
        by_name.setdefault(name, []).append(arguments)
    with as_on_a_gpu(device):
        for name, given in by_name.items():
            for arguments in given[::every]:
                check_description(OPERATIONS[name], arguments)


DIFFERENTIABLE = {"x", "weight", "bias", "probabilities", "logits", "hidden", "a", "b", "dy"}
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2)


EVERYDAY = ("activations", "norms", "embeddings", "nvfp4", "routers", "losses")
"""Families that show every kind of argument and result."""


@pytest.mark.parametrize(
    ("family", "few"),
    [
        pytest.param(family, few, marks=() if few and family.__name__ in EVERYDAY else pytest.mark.slow)
        for family in FAMILIES
        for few in (True, False)
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.14's own
def test_opcheck(device, family, few: bool) -> None:
    """torch's own checks, on one sample of each operation or three; one of them cannot compare FP8."""
    by_name: dict[str, list[Arguments]] = {}
    for name, arguments in samples(family, device):
        by_name.setdefault(name, []).append(arguments)
    places = {
        name: {len(found) - 1} if few else {0, len(found) // 2, len(found) - 1} for name, found in by_name.items()
    }
    chosen = [(name, found[at]) for name, found in by_name.items() for at in places[name]]
    for name, arguments in chosen:
        op = OPERATIONS[name].op
        schema = op._opoverload._schema.arguments
        if op._backward_fn is not None:
            arguments = tuple(
                value.detach().requires_grad_() if argument.name in DIFFERENTIABLE and value is not None else value
                for argument, value in zip(schema, arguments, strict=False)
            )
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        checks += [] if any(t.dtype in ONE_BYTE for t in tensors(arguments)) else ["test_schema"]
        with as_on_a_gpu(device):
            torch.library.opcheck(op, arguments, test_utils=checks)


KINDS = {"float32", "pow2", "e8m0"}
CHOICES: dict[str, set[str]] = {
    "name": set(ACTIVATIONS),
    "scale_kind": KINDS,
    "kind": set(get_args(Kind)),
    "left_kind": set(get_args(Kind)),
    "right_kind": set(get_args(Kind)),
}
"""What arguments that are strings may be. One of another name has to be added here."""


def missing(entry: Registered, given: list[Arguments]) -> set[str]:
    """Return what samples lack: both values of a bool, every name, None and not None, two dtypes."""
    lacks: set[str] = set()
    schema = entry.op._opoverload._schema.arguments
    for at, slot in enumerate(slot for parameter in entry.parameters for slot in parameter.slots):
        default = schema[at].default_value
        values = [arguments[at] if at < len(arguments) else default for arguments in given]
        decoded = values if slot.decode is None else [slot.decode(value) for value in values]
        if type(None) in get_args(slot.annotation) or (slot.decode is not None and slot.decode([]) is None):
            lacks |= {f"{slot.name}: {found}" for found in (None, "some") if not _occurs(found, decoded)}
        if slot.annotation is bool:
            lacks |= {f"{slot.name}: {value}" for value in {True, False} - {*values}}
        elif slot.annotation == list[bool]:
            columns = enumerate(zip(*values, strict=True))
            lacks |= {f"{slot.name}[{i}]: {value}" for i, own in columns for value in {True, False} - {*own}}
        elif slot.annotation in (str, str | None):
            lacks |= {f"{slot.name}: {value}" for value in CHOICES[slot.name] - {*values}}
        elif slot.annotation in (torch.dtype, torch.dtype | None):
            both = {*ONE_BYTE} if slot.name == "fp8_dtype" else {torch.float32, torch.bfloat16}
            lacks |= {f"{slot.name}: {value}" for value in both - {*values}}
    return lacks


def _occurs(wanted: str | None, values: list[Any]) -> bool:
    return any((value is None) == (wanted is None) for value in values)


def test_samples_cover_every_choice(device) -> None:
    by_name: dict[str, list[Arguments]] = {}
    for name, arguments in (sample for family in FAMILIES for sample in samples(family, device)):
        by_name.setdefault(name, []).append(arguments)
    assert by_name.keys() == OPERATIONS.keys()
    lacks = {name: missing(OPERATIONS[name], given) for name, given in by_name.items()}
    assert {name: sorted(found) for name, found in lacks.items() if found} == {}


def test_a_choice_without_a_sample_is_found() -> None:
    entry, logits = OPERATIONS["router_topk"], torch.ones(5, 8)
    given = [(logits, None, 2, sigmoid, True, sigmoid, 0.0, 1.0, None, None, True) for sigmoid in (True, False)]
    expected = {"expert_bias: some", "num_groups: some", "topk_groups: some"}
    assert missing(entry, given) == expected | {"score_after_topk: False", "top2_sum: False"}
    entry = OPERATIONS["activation_quantized"]
    given = [(logits, None, "silu", True, None, 1.0, 0.0, None, 32, ONE_BYTE[0], "e8m0", 0.0, True, True)]
    assert {"name: gelu", "scale_kind: pow2", "fp8_dtype: torch.float8_e5m2", "clamp: some"} <= missing(entry, given)


WRONG = {
    "dtype": (lambda x: x + 1, lambda x: like(x, dtype=torch.float64)),
    "strides": (lambda x: (x + 1).mT.contiguous().mT, lambda x: like(x)),
    "sizes": (lambda x: x.mT + 1, lambda x: like(x)),
    "constants": (lambda x: x + 1, lambda x: like(x, (int(x.shape[0]), x.shape[1]))),
    "view": (lambda x: x, lambda x: like(x)),
    "mutation": (lambda x: x.add_(1).clone(), lambda x: like(x)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_description_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_REGISTERED", {})
    compute, results = WRONG[wrong]

    @operation(f"test_wrong_{wrong}", results)
    def _(x: Tensor) -> Tensor:
        return compute(x)

    with pytest.raises((AssertionError, RuntimeError)) as error:
        check_description(registered()[f"test_wrong_{wrong}"], (torch.ones(3, 4),))
    assert error.type is AssertionError or "may not alias" in str(error.value)
