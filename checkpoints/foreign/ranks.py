"""How the ranks of Megatron store a model: a file for each tensor parallel rank, pipeline stage and share of experts.

Names are Megatron-Core's, with layers and experts counted from the first that the rank has. Tensors
are split along their rows or their columns over tensor parallel ranks; every rank has a copy of what is not split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from te_models.config import ModelConfig

from ..families.base.family import HasShape
from ..io.boxes import Shape
from ..io.errors import CheckpointError
from ..mapping.blocks import split_blocks
from ..mapping.layout_ops import At, Concat, Layout, Rows, Stack
from ..mapping.param_shapes import expected_tensors
from ..mapping.tensor_map import Link, Namespace, TensorSpec
from .megatron import grouped_rows, named_norm

TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_SPLIT = re.compile(
    r"self_attention\.linear_proj\.weight|mlp\.(shared_experts\.|experts\.)?linear_fc(1\.\w+|2\.weight)"
)
"""What tensor parallel ranks split as ours do: each of the matrices that it joins (`split_blocks`)."""
_WHOLE = re.compile(r"layer_?norm|linear_(proj|fc2)\.bias|\.router\.|\.gate_weight")
"""What every tensor parallel rank has a copy of."""


@dataclass(frozen=True)
class ParallelSizes:
    """Numbers of ranks: of tensor, pipeline and expert parallelism, and how many chunks of layers a stage has.

    Experts are split over tensor parallel ranks as the other layers are. Raises CheckpointError for numbers below 1."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number < 1:
                raise CheckpointError(f"the number of {name} ranks is {number}; allowed: 1 and more")


class RankPlace(NamedTuple):
    """Which rank's file, and which chunk of layers in it."""

    tp: int
    pp: int
    ep: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        return ".".join(map(str, self)) + ":"

    @classmethod
    def of(cls, stored: str) -> tuple[RankPlace, str]:
        """Return the place that a name begins with, and the name there."""
        place, _, name = stored.partition(":")
        return cls(*map(int, place.split("."))), name


@dataclass(frozen=True)
class RankFiles:
    """What the files of ranks hold of a model.

    Attributes:
        found: the tensors that files have, by place and name; None: those to be written.
        local: write the names of Megatron's own modules, in which a norm is apart from the projection behind it and
            every expert is a module, in place of Transformer Engine's names.
        vocabulary: rows of the tables of all ranks, those that only fill up included.
    """

    config: ModelConfig
    split: ParallelSizes
    vocabulary: int
    found: Mapping[str, HasShape] | None = None
    local: bool = False

    def __post_init__(self) -> None:
        config, split = self.config, self.split
        if config.mixers or config.attention.mla is not None or config.mtp_num_layers:
            raise CheckpointError(
                "files of Megatron's ranks are read and written of models with plain attention in all layers, and no "
                "layers that predict further tokens"
            )
        a = config.attention
        sizes = {"layers": config.num_layers, "query heads": a.num_attention_heads, "key heads": a.num_query_groups}
        sizes |= {"experts": 0 if config.moe is None else config.moe.num_moe_experts}
        ways = {"layers": split.pp * split.chunks, "query heads": split.tp, "key heads": split.tp, "experts": split.ep}
        for name, size in sizes.items():
            if (size or 0) % ways[name] or (not size and ways[name] > 1):
                raise CheckpointError(f"{size} {name} do not divide over {ways[name]} ranks of Megatron's")
        if self.vocabulary < config.vocab_size or self.vocabulary % split.tp:
            raise CheckpointError(
                f"the ranks' tables have {self.vocabulary} rows; allowed: {config.vocab_size} and more, a multiple of "
                f"{split.tp}"
            )

    @property
    def rows(self) -> int:
        """Rows of the tables of a rank."""
        return self.vocabulary // self.split.tp

    def held_rows(self, rank: int) -> int:
        """Return how many of them are of tokens that the model has."""
        return max(0, min(self.config.vocab_size - rank * self.rows, self.rows))

    def namespace(self) -> Namespace:
        """Return how the files store the model, each tensor once."""
        canonical = expected_tensors(self.config)
        stored: dict[str, TensorSpec] = {}
        links: list[Link] = []
        for name, shape in canonical.items():
            for p in self._placed(name, shape).place(shape):
                stored[p.stored] = TensorSpec(p.stored_shape, convertible=not name.endswith(".expert_bias"))
                links.append(Link(name, p.box, p.stored, p.stored_box, p.axes))
        return Namespace(canonical, stored, tuple(links))

    def copies(self, stored: Mapping[str, object]) -> dict[str, str]:
        """Return what further ranks hold of tensors that are not split, by name -> the tensor that it repeats."""
        used: dict[tuple[int, int, str], set[tuple[int, int]]] = {}
        for name in stored:
            place, rest = RankPlace.of(name)
            used.setdefault((place.pp, place.chunk, rest), set()).add((place.tp, place.ep))
        copies = {}
        for (pp, chunk, rest), places in used.items():
            whole = {tp for tp, _ in places} == {0} and rest not in TABLES
            dense = {ep for _, ep in places} == {0}
            for tp in range(self.split.tp):
                for ep in range(self.split.ep):
                    at = 0 if whole else tp, 0 if dense else ep
                    if (tp, ep) not in places and at in places:
                        copies[f"{RankPlace(tp, pp, ep, chunk)}{rest}"] = f"{RankPlace(at[0], pp, at[1], chunk)}{rest}"
        if self.config.embedding.share_embeddings_and_output_weights and self.split.pp > 1:
            table, last = TABLES[0], self.split.pp - 1
            held = [n for n in (*stored, *copies) if n.endswith(f":{table}")]
            for name in held:
                place, _ = RankPlace.of(name)
                again = RankPlace(place.tp, last, place.ep, self.split.chunks - 1)
                copies[f"{again}{TABLES[1]}"] = copies.get(name, name)
        return copies

    def _placed(self, name: str, shape: Shape) -> Layout:
        config, split = self.config, self.split
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match is None:
            first = name.startswith("embedding.")
            stage, chunk = (0, 0) if first else (split.pp - 1, split.chunks - 1)
            if name not in TABLES:
                return At(f"{RankPlace(0, stage, 0, chunk)}{name}")
            held = [(At(f"{RankPlace(t, stage, 0, chunk)}{name}"), self.held_rows(t)) for t in range(split.tp)]
            return Concat(*((part, rows) for part, rows in held if rows))
        each = config.num_layers // (split.pp * split.chunks)
        number, local = divmod(int(match[1]), each)
        chunk, stage = divmod(number, split.pp)
        rest, at = match[2], f"decoder.layers.{local}."
        if rest.startswith("mlp.experts."):
            return Stack(*self._experts(name, rest, at, stage, chunk, shape))
        places = [f"{RankPlace(t, stage, 0, chunk)}" for t in range(split.tp)]
        return self._parts([self._named(place, at, rest) for place in places], name, rest, shape)

    def _named(self, place: str, at: str, rest: str) -> str:
        if self.found is None and self.local:
            for ours, theirs in (("self_attention.linear_qkv", "input"), ("mlp.linear_fc1", "pre_mlp")):
                rest = rest.replace(f"{ours}.layer_norm_", f"{theirs}_layernorm.")
        return named_norm(place + at, rest, self.found)

    def _experts(self, name: str, rest: str, at: str, stage: int, chunk: int, shape: Shape) -> Iterator[Layout]:
        """One module each, or one of all."""
        part, _, kind = rest.removeprefix("mlp.experts.").rpartition(".")
        each = shape[0] // self.split.ep
        for expert in range(shape[0]):
            ep, number = divmod(expert, each)
            places = [f"{RankPlace(t, stage, ep, chunk)}{at}mlp.experts." for t in range(self.split.tp)]
            joined = [f"{place}{part}.{kind}{number}" for place in places]
            alone = [f"{place}local_experts.{number}.{part}.{kind}" for place in places]
            is_joined = not self.local if self.found is None else joined[0] in self.found
            yield self._parts(joined if is_joined else alone, name, rest, shape[1:])

    def _parts(self, names: list[str], name: str, rest: str, shape: Shape) -> Layout:
        """Return a tensor of a layer, `rest` its name there, that ranks have parts of, by these names."""
        tp = len(names)
        if _QKV.fullmatch(rest):
            return grouped_rows(self.config.attention, *names)
        if tp == 1:
            return At(names[0])
        split = split_blocks(self.config, name, shape)
        if not (_WHOLE.search(rest) if split is None else _SPLIT.fullmatch(rest)):
            raise CheckpointError(f"how {rest} is split over Megatron's ranks is not known here")
        if split is None:
            return At(names[0])
        dim, blocks = split
        each = [_share(size, tp, rest) for size in blocks]
        if dim:
            return Concat(*((At(n), each[0]) for n in names), dim=dim)
        begins = [sum(each[:number]) for number in range(len(each))]
        return Concat(
            *((Rows(n, begin, sum(each)), rows) for begin, rows in zip(begins, each, strict=True) for n in names)
        )


def _share(size: int, ranks: int, name: str) -> int:
    if size % ranks:
        raise CheckpointError(f"{size} rows or columns of {name} do not divide over {ranks} ranks of Megatron's")
    return size // ranks
