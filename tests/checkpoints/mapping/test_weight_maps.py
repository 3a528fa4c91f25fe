"""Boxes, links and expressions: every map moves each element exactly once, in both directions, whatever its parts."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.boxes import Box, Range, element_count, flat_interval, full, slices, tiles
from te_models.checkpoints.io.buffers import Ring
from te_models.checkpoints.io.store import MemoryStore
from te_models.checkpoints.mapping.layout_ops import (
    At,
    Concat,
    Deinterleaved,
    Layout,
    Rows,
    Stack,
    Transpose,
    Unsqueezed,
)
from te_models.checkpoints.mapping.plan import OutputTensor, make_plan
from te_models.checkpoints.mapping.stream import fill_tensor, split_piece, stream_output
from te_models.checkpoints.mapping.tensor_map import (
    Link,
    Namespace,
    TensorSpec,
    compose,
    identity_namespace,
    split_stacks,
)
from tests.covering import examples


def namespace(shape: tuple[int, ...], layout: Layout) -> Namespace:
    """Return the namespace of one canonical tensor "w" stored as `layout` says."""
    placed = list(layout.place(shape))
    links = tuple(Link("w", p.box, p.stored, p.stored_box, p.axes) for p in placed)
    return Namespace({"w": shape}, {p.stored: TensorSpec(p.stored_shape) for p in placed}, links)


E, I, H = 3, 4, 5
EXPRESSIONS: dict[str, tuple[tuple[int, ...], Layout]] = {
    "as it is": ((I, H), At("a")),
    "scalar": ((), At("a")),
    "q, k, v": ((9, H), Concat((At("q"), 4), (At("k"), 2), (At("v"), 3))),
    "columns": ((I, 6), Concat((At("l"), 2), (At("r"), 4), dim=1)),
    "per expert": ((E, I, H), Stack(*(At(f"e{e}") for e in range(E)))),
    "per expert, gate and up": ((E, 2 * I, H), Stack(*(Concat((At(f"g{e}"), I), (At(f"u{e}"), I)) for e in range(E)))),
    "transposed": ((I, H), Transpose(At("a"))),
    "transposed halves": ((2 * I, H), Transpose(Concat((At("l"), 3), (At("r"), 2)))),
    "transposed stack": ((E, I, H), Transpose(Stack(*(At(f"e{e}") for e in range(E))))),
    "interleaved bias": ((E, 2 * I), Deinterleaved("b", 2, 1)),
    "interleaved, transposed, fused": ((E, 2 * I, H), Transpose(Deinterleaved("w", 2, 2))),
    "interleaved rows": ((2 * I, H), Deinterleaved("w", 2, 0)),
    "rows in turn": ((2 * I, H), Concat(*((Rows("w", begin, 2 * I), 2) for begin in (0, 4, 2, 6)))),
    "one more dimension": ((E,), Unsqueezed("w")),
}


def by_hand(name: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each expression stores, written out with plain torch operations."""
    match name:
        case "as it is" | "scalar":
            return {"a": w}
        case "q, k, v":
            return {"q": w[:4], "k": w[4:6], "v": w[6:]}
        case "columns":
            return {"l": w[:, :2], "r": w[:, 2:]}
        case "per expert":
            return {f"e{e}": w[e] for e in range(E)}
        case "per expert, gate and up":
            return {f"g{e}": w[e, :I] for e in range(E)} | {f"u{e}": w[e, I:] for e in range(E)}
        case "transposed":
            return {"a": w.T}
        case "transposed halves":
            return {"l": w.T[:3], "r": w.T[3:]}
        case "transposed stack":
            return {f"e{e}": w[e].T for e in range(E)}
        case "interleaved bias":
            return {"b": torch.stack([w[:, :I], w[:, I:]], dim=2).flatten(1)}
        case "interleaved, transposed, fused":
            return {"w": torch.stack([w[:, :I], w[:, I:]], dim=2).flatten(1, 2).transpose(1, 2)}
        case "interleaved rows":
            return {"w": torch.stack([w[:I], w[I:]], dim=1).flatten(0, 1)}
        case "rows in turn":
            return {"w": torch.cat([w[:2], w[4:6], w[2:4], w[6:]])}
        case "one more dimension":
            return {"w": w[None]}
    raise AssertionError(name)


def run(source: Namespace, target: Namespace, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Carry out a conversion in memory, both into tensors and as a byte stream through tiny buffers."""
    store = MemoryStore(tensors)
    plan = make_plan(store.tensors, source, target, where="here")
    results = {}
    for output in plan.outputs:
        filled = torch.full(output.shape, float("nan"))
        fill_tensor(store, output.pieces, filled, limit=3)
        parts = [bytes(b.bytes[:n]) for b, n in stream_output(store, output, Ring(2, 16))]
        assert b"".join(parts) == filled.numpy().tobytes()
        results[output.name] = filled
    return results


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression_equals_torch_and_inverts(name: str) -> None:
    shape, layout = EXPRESSIONS[name]
    w = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    there, ours = namespace(shape, layout), identity_namespace({"w": shape})
    there.check()
    exported = run(ours, there, {"w": w})
    expected = by_hand(name, w)
    assert exported.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(exported[key], value), key
    assert torch.equal(run(there, ours, {k: v.contiguous() for k, v in expected.items()})["w"], w)


@pytest.mark.parametrize("a", [n for n in EXPRESSIONS if EXPRESSIONS[n][0] == (E, 2 * I, H)])
def test_foreign_layouts_convert_directly_and_split_by_gemm(a: str) -> None:
    shape, layout = EXPRESSIONS[a]
    w = torch.randn(shape)
    per_gemm = split_stacks(identity_namespace({"w": shape}), {"w": 0})
    per_gemm.check()
    stored = {k: v.contiguous() for k, v in by_hand(a, w).items()}
    split = run(namespace(shape, layout), per_gemm, stored)
    assert torch.equal(torch.stack([split[f"w{g}"] for g in range(E)]), w)
    other = "per expert, gate and up" if a != "per expert, gate and up" else "interleaved, transposed, fused"
    direct = run(namespace(shape, layout), namespace(*EXPRESSIONS[other]), stored)
    for key, value in by_hand(other, w).items():
        assert torch.equal(direct[key], value)
    if a == "interleaved, transposed, fused":
        fused_per_gemm = split_stacks(namespace(shape, layout), {"w": 0})
        assert torch.equal(run(fused_per_gemm, per_gemm, {f"w{g}": stored["w"][g] for g in range(E)})["w1"], w[1])


def test_maps_with_wrong_sizes_are_refused() -> None:
    for shape, layout in (
        ((9, H), Concat((At("q"), 4), (At("k"), 2))),
        ((E, I), Stack(At("a"), At("b"))),
        ((3, H), Deinterleaved("w", 2, 0)),
    ):
        with pytest.raises(CheckpointError, match=r"cannot fill|not a multiple"):
            list(layout.place(shape))


def test_incomplete_overlapping_and_duplicated_maps_are_refused() -> None:
    half = (Range(0, 2), Range(0, H))
    whole = full((I, H))
    for links in (
        (Link("w", half, "a", half, (0, 1)),),
        (Link("w", whole, "a", whole, (0, 1)), Link("w", half, "b", half, (0, 1))),
        (Link("w", whole, "a", whole, (0, 1)), Link("w", whole, "a", whole, (0, 1))),
        (Link("v", whole, "a", whole, (0, 1)),),
    ):
        with pytest.raises(CheckpointError, match="exactly once"):
            Namespace({"w": (I, H)}, {"a": TensorSpec((I, H))}, links).check()


def test_models_that_differ_do_not_compose() -> None:
    with pytest.raises(CheckpointError, match="not of the same model; they differ in 'b'"):
        compose(identity_namespace({"a": (1,)}), identity_namespace({"a": (1,), "b": (2,)}))


def ranges(n: int) -> Iterator[Range]:
    for start in range(n):
        for step in (1, 2, 3):
            for size in range(1, (n - 1 - start) // step + 2):
                yield Range(start, start + size * step, step)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    return shape, tuple(draw(st.sampled_from(list(ranges(n)))) for n in shape)


@settings(max_examples=examples(300), deadline=None)
@given(boxes())
def test_flat_interval_is_right_where_it_answers(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    inside = torch.arange(math.prod(shape)).reshape(shape)[slices(box)].flatten().tolist()
    assert len(inside) == element_count(box)
    interval = flat_interval(box, shape)
    contiguous = inside == list(range(inside[0], inside[0] + len(inside)))
    if interval is not None:
        assert inside == list(range(*interval))
    elif all(r.step == 1 for r in box):
        assert not contiguous


@settings(max_examples=examples(300), deadline=None)
@given(boxes(), st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_tiles_agrees_with_counting(case: tuple[tuple[int, ...], Box], picks: list[int]) -> None:
    shape, _ = case
    every = [tuple(b) for b in _products([list(ranges(n)) for n in shape])]
    chosen = [every[p % len(every)] for p in picks]
    hits = torch.zeros(shape, dtype=torch.int64)
    for box in chosen:
        hits[slices(box)] += 1
    assert tiles(chosen, shape) == bool((hits == 1).all())


def _products(lists: list[list[Range]]) -> list[tuple[Range, ...]]:
    result: list[tuple[Range, ...]] = [()]
    for options in lists:
        result = [(*head, r) for head in result for r in options]
    return result


def test_pieces_are_cut_to_any_limit() -> None:
    shape, layout = EXPRESSIONS["interleaved, transposed, fused"]
    pieces = compose(namespace(shape, layout), identity_namespace({"w": shape}))["w"]
    for limit in (1, 2, 7, 1000):
        parts = [part for piece in pieces for part in split_piece(piece, limit)]
        assert max(element_count(part.box) for part in parts) <= limit
        assert tiles([part.box for part in parts], shape)


def test_mixed_dtypes_in_one_output_are_refused() -> None:
    shape, layout = EXPRESSIONS["q, k, v"]
    tensors = {"q": torch.zeros(4, H), "k": torch.zeros(2, H), "v": torch.zeros(3, H, dtype=torch.float16)}
    with pytest.raises(CheckpointError, match=r"joined from different dtypes.*v \(F16\)"):
        make_plan(MemoryStore(tensors).tensors, namespace(shape, layout), identity_namespace({"w": shape}), where="x")
    plan = make_plan(
        MemoryStore(tensors).tensors,
        namespace(shape, layout),
        identity_namespace({"w": shape}),
        where="x",
        dtype=torch.bfloat16,
    )
    assert plan.outputs == (OutputTensor("w", "BF16", (9, H), plan.outputs[0].pieces),)
