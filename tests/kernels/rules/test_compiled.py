"""The rules in graphs: whole, forward and backward, equal to eager code, one graph for lengths and documents."""

import pytest
import torch

from .test_rules import RULES, Rule, Tensors, cast, close


def _gradients(rule: Rule, run, tensors: Tensors, **options: torch.Tensor) -> list[torch.Tensor]:
    results = run(tensors, **options)
    torch.manual_seed(1)
    grads = [torch.randn_like(x) for x in results]
    return [*results, *torch.autograd.grad(results, list(tensors.values()), grads)]


@pytest.mark.sentinels("linear_attention-eager")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", RULES)
def test_compiled_is_eager(name: str, backend: str) -> None:
    rule = RULES[name]
    compiled = torch.compile(rule.run, fullgraph=True, backend=backend)
    for tokens in (70, 130, 200):
        tensors = cast(rule.make(2, tokens), rule.rows, torch.float64)
        documents = torch.arange(tokens).expand(2, -1) // 40
        options = {"initial_state": torch.randn(2, *rule.state, dtype=torch.float64), "documents": documents}
        found, wanted = (_gradients(rule, run, tensors, **options) for run in (compiled, rule.run))
        close(found, wanted, torch.float64, tokens)
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"] == 2  # of 70 tokens, and of any number above a chunk


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_inductor_is_eager(name: str, packed: bool) -> None:
    rule, tokens = RULES[name], 130
    tensors = cast(rule.make(1, tokens), rule.rows, torch.float64)
    options = {"initial_state": torch.randn(3 if packed else 1, *rule.state, dtype=torch.float64)}
    options |= {"cu_seqlens": torch.tensor([0, 50, 70, tokens])} if packed else {}
    compiled = torch.compile(rule.run, fullgraph=True)
    found, wanted = (_gradients(rule, run, tensors, **options) for run in (compiled, rule.run))
    close(found, wanted, torch.float64, tokens)
