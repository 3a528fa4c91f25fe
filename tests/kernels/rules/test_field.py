"""The kernels of other packages on CUDA, by stand-ins: what is passed and comes back, both ways, in graphs too."""

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels import field
from te_models.kernels.gated_delta import chunked as delta
from te_models.kernels.gated_delta import library as delta_library
from te_models.kernels.gated_delta import op as delta_op
from te_models.kernels.short_convolution import library as convolution_library
from te_models.kernels.state_space import chunked as spaces
from te_models.kernels.state_space import library as space_library

from .test_rules import RULES, cast, close


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    scale, state, ends = options["scale"], options["initial_state"], options["cu_seqlens"]
    if ends is not None:
        return delta_op._of_documents(q, k, v, g, beta, scale, state, ends)
    out, states = delta.gated_delta_rule(q, k, v, g, beta, scale, state)
    return out.to(v.dtype), states[-1]


def _scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int, **options: Any) -> tuple[Tensor, Tensor]:
    return spaces.state_space_scan(x, dt, A, B, C, options["D"], options["initial_states"], None, None)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *, seq_idx: Tensor | None, activation: str) -> Tensor:
    taps = torch.zeros_like(x)
    for back in range(weight.shape[1]):
        earlier = F.pad(x, (back, 0))[..., : x.shape[2]]
        if seq_idx is not None:
            earlier = earlier * (F.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[2]] == seq_idx)[:, None]
        taps = taps + earlier * weight[:, -1 - back, None]
    return F.silu(taps if bias is None else taps + bias[:, None])


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in {
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule": _delta,
        "fla.ops.kda.chunk_kda": _delta,
        "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": _scan,
        "causal_conv1d.causal_conv1d_fn": _convolve,
    }.items():
        module, _, attribute = name.rpartition(".")
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or ModuleType(path))
        setattr(sys.modules[module], attribute, function)
    for library in (delta_library, space_library, convolution_library):
        monkeypatch.setattr(library, "served_by", lambda *_: True)


NAMES = ("gated_delta", "gated_delta_by_channel", "state_space", "short_convolution")


@pytest.mark.parametrize("documents", ["none", "numbers", "ends"])
@pytest.mark.parametrize("name", NAMES)
def test_the_library_is_the_definition(name: str, documents: str) -> None:
    rule, tokens = RULES[name], 70
    tensors = cast(rule.make(1, tokens), rule.rows, torch.float32)
    options: dict[str, Tensor] = {}
    if documents == "numbers":
        options["documents"] = torch.arange(tokens)[None] // 30
    elif documents == "ends":
        options["cu_seqlens"] = torch.tensor([0, 30, 60, 70], dtype=torch.int32)
    found = list(rule.run(tensors, **options))
    ends = [0, 30, 60, 70] if options else [0, 70]
    parts = ({n: x[:, b:e] if n in rule.rows else x for n, x in tensors.items()} for b, e in itertools.pairwise(ends))
    pieces = [rule.define(own, None) for own in parts]
    states = [s for _, s in pieces]
    wanted = [torch.cat([y for y, _ in pieces], 1), torch.cat(states) if documents == "ends" else states[-1]]
    grads = [torch.randn_like(x) for x in wanted]
    leaves = list(tensors.values())
    found += torch.autograd.grad(found, leaves, grads, materialize_grads=True)
    wanted += torch.autograd.grad(wanted, leaves, grads, materialize_grads=True)
    close(found, wanted, torch.float32, tokens)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_is_eager(name: str) -> None:
    rule = RULES[name]
    tensors = cast(rule.make(1, 20), rule.rows, torch.float32)
    options = {"documents": torch.arange(20)[None] // 6}
    results = []
    for run in (rule.run, torch.compile(rule.run, fullgraph=True, backend="aot_eager")):
        y, state = run(tensors, **options)
        results.append([y, state, *torch.autograd.grad(y.sum() + state.sum(), list(tensors.values()))])
    close(results[1], results[0], torch.float32, 20)


def test_without_the_package_a_fallback_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_models.kernels.gemm import gemm_counts, reset_gemm_counts

    class OnCuda:
        device, dtype = torch.device("cuda"), torch.float32

    monkeypatch.setattr(field, "_installed", lambda module: False)
    reset_gemm_counts()
    with pytest.warns(RuntimeWarning, match=r"not fla-core: fla-core is not installed .the extra te_models.linear"):
        assert not field.served_by("gated_delta_rule", "fla", "fla-core", OnCuda())
    assert gemm_counts()["gated_delta_rule", "chunked"] == 1
    reset_gemm_counts()
