"""Table lookup: values, gradient against a one-hot matrix in float64, repeated and missing ids, compiled."""

import pytest
import torch

from te_models.kernels.embedding import embedding

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "rows", "channels"), [((3, 21), 7, 33), ((1, 1), 1, 1), ((2, 0), 5, 4), ((64,), 1000, 8)]
)
def test_values_and_gradient(shape: tuple[int, ...], rows: int, channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, rows, shape, generator=generator)
    weight = torch.randn(channels, rows, generator=generator).to(dtype).t().requires_grad_()  # not contiguous
    out = embedding(ids, weight)
    assert torch.equal(out, weight[ids])
    grad = torch.randn(*shape, 2 * channels, generator=generator).to(dtype)[..., ::2]
    out.backward(grad)
    one_hot = torch.nn.functional.one_hot(ids.flatten(), rows).double().t()
    terms = grad.flatten(0, -2).double()
    bound = (UNIT[dtype] + ids.numel() * UNIT[torch.float32]) * (one_hot @ terms.abs())
    assert weight.grad.dtype == dtype and ((weight.grad.double() - one_hot @ terms).abs() <= bound).all()


def test_many_uses_of_one_token_are_summed_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256: adding one by one would stop there."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.zeros(1, 1024, dtype=torch.int64), weight).sum().backward()
    assert weight.grad.tolist() == [[1024.0], [0.0]]


def test_an_id_outside_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        embedding(torch.tensor([3]), torch.zeros(3, 2))


def test_compiled_equals_eager_for_any_number_of_tokens() -> None:
    compiled = torch.compile(embedding, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        ids = torch.randint(0, 4, (2, tokens), generator=torch.Generator().manual_seed(tokens))
        gradients = []
        for function in (embedding, compiled):
            weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
            out = function(ids, weight)
            out.square().sum().backward()
            gradients.append((out.detach(), weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_main_gradient_gets_the_unrounded_sum(backend: str | None) -> None:
    ids = torch.tensor([[1, 3, 3], [0, 3, 1]])
    weight = torch.randn(5, 8).bfloat16().requires_grad_()
    grad, main_grad = torch.randn(2, 3, 8).bfloat16(), torch.ones(5, 8)
    run = embedding if backend is None else torch.compile(embedding, fullgraph=True, backend=backend)
    out = run(ids, weight, main_grad)
    assert torch.equal(out, weight[ids])
    for _ in range(2):
        out.backward(grad, retain_graph=True)
    expected = torch.ones(5, 8).double().index_add_(0, ids.flatten(), 2 * grad.flatten(0, 1).double())
    assert weight.grad is None
    torch.testing.assert_close(main_grad.double(), expected, rtol=0, atol=1e-5)
