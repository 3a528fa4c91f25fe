"""Entries of mixtures of experts: sizes, routing, and which layers have experts."""

from collections.abc import Collection
from dataclasses import dataclass

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from .fields import REQUIRED, Entry, Field, Fixed, HFConfig, OfOneField, OneOf, Values, fixed, read_typed
from .layer_fields import check_names

NUM_EXPERTS = ("num_experts", "num_local_experts")
ROUTED_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""What releases call the number of experts; the first name is written."""


def expert_sizes(
    names: str | tuple[str, ...],
    experts: int,
    topk: int,
    width: int | None = None,
    shared: int | None = None,
    normalize: bool | None = None,
) -> tuple[Entry, ...]:
    """Return the fields of a mixture's sizes, with the class's defaults: the number of experts, under one of `names`,
    `num_experts_per_tok`, `moe_intermediate_size`, `shared_expert_intermediate_size` and `norm_topk_prob`. None: the
    family has no such field, or another one."""
    count = "moe.num_moe_experts"
    entries: list[Entry] = [
        Field(names, count, int, experts) if isinstance(names, str) else OneOf(names, count, int, experts)
    ]
    entries.append(Field("num_experts_per_tok", "moe.moe_router_topk", int, topk))
    for name, path, kind, default in (
        ("moe_intermediate_size", "moe.moe_ffn_hidden_size", int, width),
        ("shared_expert_intermediate_size", "moe.shared_expert_intermediate_size", int, shared),
        ("norm_topk_prob", "moe.router.normalize", bool, normalize),
    ):
        entries += [] if default is None else [Field(name, path, kind, default)]
    return tuple(entries)


@dataclass(frozen=True)
class RouterLoss:
    """`router_aux_loss_coef` counts only with `output_router_logits`, as in transformers' loss; the second one may be
    null and then counts as false; the first may be null where it does not matter."""

    default: float = 0.001
    names: tuple[str, ...] = ("router_aux_loss_coef", "output_router_logits")

    def read(self, hf: HFConfig) -> Values:
        used = hf.get("output_router_logits") is not None and read_typed(hf, "output_router_logits", bool, False)
        if not used and hf.get("router_aux_loss_coef") is None:
            return {"moe.aux_loss_coeff": 0.0}
        coefficient = read_typed(hf, "router_aux_loss_coef", float, self.default)
        kind = {"moe.moe_router_load_balancing_type": "joint_aux_loss"} if used and coefficient else {}
        return {"moe.aux_loss_coeff": coefficient if used else 0.0, **kind}

    def write(self, config: ModelConfig) -> Values:
        coefficient = joint_coefficient(config)
        return (
            {"output_router_logits": True, "router_aux_loss_coef": coefficient}
            if coefficient
            else {"output_router_logits": False}
        )


def joint_coefficient(config: ModelConfig) -> float:
    """Return the coefficient of transformers' load-balancing loss, of all layers together; 0 for a model without one,
    and for one whose layers have a loss each."""
    moe = config.moe
    return moe.aux_loss_coeff if moe is not None and moe.moe_router_load_balancing_type == "joint_aux_loss" else 0.0


def left_out_loss(config: ModelConfig, known: Collection[str]) -> str | None:
    """Return a note on the load-balancing loss that config.json does not say, in a family whose fields `known` say
    transformers'; None where it says the model's."""
    moe = config.moe
    if moe is None or not moe.aux_loss_coeff or joint_coefficient(config) or "output_router_logits" not in known:
        return None
    layers = sum(config.is_moe_layer(i) and i not in moe.hash_layers for i in range(config.num_layers))
    return (
        f"config.json has no load-balancing loss: this model's is {moe.moe_router_load_balancing_type!r}, of each "
        "layer, and transformers' is 'joint_aux_loss', of all layers together; about as strong there is a "
        f"coefficient of {moe.aux_loss_coeff * layers / moe.moe_router_topk:.3g}, with output_router_logits"
    )


@dataclass(frozen=True)
class ExpertSize:
    """`intermediate_size`, or a field of another name, is the experts' width, with `shared` also the shared expert's
    width; there is no dense MLP, or one of the same width, or one with a separate field. dense: there is no field
    that says a dense MLP's width."""

    shared: bool = False
    name: str = "intermediate_size"
    default: int = REQUIRED
    dense: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, hf: HFConfig) -> Values:
        size = read_typed(hf, self.name, int, self.default)
        shared = {"moe.shared_expert_intermediate_size": size} if self.shared else {}
        return {"moe.moe_ffn_hidden_size": size} | shared | ({"mlp.ffn_hidden_size": size} if self.dense else {})

    def write(self, config: ModelConfig) -> Values:
        return {self.name: config.mlp.ffn_hidden_size} if self.dense else {}


@dataclass(frozen=True)
class ExpertWidth:
    """The width of a dense MLP where no layer has one: the experts', so that the model has a number."""

    default: int
    names: tuple[str, ...] = ()

    def read(self, hf: HFConfig) -> Values:
        return {"mlp.ffn_hidden_size": read_typed(hf, "moe_intermediate_size", int, self.default)}

    def write(self, config: ModelConfig) -> Values:
        return {}


@dataclass(frozen=True)
class SharedExpertCount(OfOneField):
    """The number of shared experts, which are one MLP so many times as wide as one of the others; 0 or null: none."""

    default: int | None
    size: str = "moe_intermediate_size"
    default_size: int = REQUIRED

    def read(self, hf: HFConfig) -> Values:
        if hf.get(self.hf, self.default) is None:
            return {}
        number = read_typed(hf, self.hf, int, self.default)
        size = read_typed(hf, self.size, int, self.default_size)
        return {"moe.shared_expert_intermediate_size": number * size} if number else {}

    def write(self, config: ModelConfig) -> Values:
        moe = config.moe
        return {self.hf: (moe.shared_expert_intermediate_size or 0) // moe.moe_ffn_hidden_size if moe else 0}


@dataclass(frozen=True)
class ExpertGroups:
    """`n_group` and `topk_group`: choose among the experts of the best groups; one group, or null, is no choice."""

    default: int | None = 1
    default_topk: int | None = 1
    names: tuple[str, ...] = ("n_group", "topk_group")

    def read(self, hf: HFConfig) -> Values:
        defaults = dict(zip(self.names, (self.default, self.default_topk)))
        groups, topk = (
            None if hf.get(name, default) is None else read_typed(hf, name, int, default)
            for name, default in defaults.items()
        )
        if groups in (None, 1) and topk in (None, 1):
            return {}
        return {"moe.router.num_groups": groups, "moe.router.topk_groups": topk}

    def write(self, config: ModelConfig) -> Values:
        router = config.moe.router if config.moe is not None else None
        if router is None or router.num_groups is None:
            return {"n_group": 1, "topk_group": 1}
        return {"n_group": router.num_groups, "topk_group": router.topk_groups}


def sigmoid_router(*, default_scale: float = 1.0, normalize: bool = True) -> tuple[Entry, ...]:
    """Return the entries of DeepSeek-V3's router: sigmoid scores, a bias for the choice, groups, a scale."""
    return (
        *fixed({"moe.router.score": "sigmoid", "moe.router.expert_bias": True, "moe.router.normalize_eps": 1e-20}),
        Fixed("moe.router.dtype", "float32"),
        Field("norm_topk_prob", "moe.router.normalize", bool, normalize),
        Field("routed_scaling_factor", "moe.router.scaling_factor", float, default_scale),
    )


@dataclass(frozen=True)
class ExpertEntries:
    """What experts need; a model without experts does not write it."""

    entries: tuple[Entry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for entry in self.entries for name in entry.names)

    def read(self, hf: HFConfig) -> Values:
        return {path: value for entry in self.entries for path, value in entry.read(hf).items()}

    def write(self, config: ModelConfig) -> Values:
        if config.moe is None:
            return {}
        return {name: value for entry in self.entries for name, value in entry.write(config).items()}


@dataclass(frozen=True)
class SparseLayers:
    """A layer has experts if its number from 1 is a multiple of `decoder_sparse_step` and not in `mlp_only_layers`.
    dense: the latter where the file does not say."""

    names: tuple[str, ...] = ("decoder_sparse_step", "mlp_only_layers")
    dense: tuple[int, ...] = ()

    def read(self, hf: HFConfig) -> Values:
        step = read_typed(hf, "decoder_sparse_step", int, 1)
        dense = read_typed(hf, "mlp_only_layers", list, None)
        dense = self.dense if dense is None else dense
        layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
        if step < 1:
            raise CheckpointError(f"config.json has decoder_sparse_step = {step}; allowed: a positive integer")
        return {"moe.layers": [i for i in range(layers) if (i + 1) % step == 0 and i not in dense]}

    def write(self, config: ModelConfig) -> Values:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(config.num_layers) if not config.is_moe_layer(i)],
        }


@dataclass(frozen=True)
class FirstDense:
    """`first_k_dense_replace`, or a field of another name: this many layers come before the first with experts."""

    default: int
    names: tuple[str, ...] = ("first_k_dense_replace",)

    def read(self, hf: HFConfig) -> Values:
        dense = read_typed(hf, self.names[0], int, self.default)
        return {"moe.layers": list(range(max(dense, 0), read_typed(hf, "num_hidden_layers", int, REQUIRED)))}

    def write(self, config: ModelConfig) -> Values:
        return {self.names[0]: leading_dense(config)}


@dataclass(frozen=True)
class LayerKinds:
    """`mlp_layer_types`, "dense" or "sparse" for each layer; without it, all but the first ones are sparse, `dense` of
    them where `first_k_dense_replace` is absent, too."""

    dense: int = 1
    names: tuple[str, ...] = ("mlp_layer_types", "first_k_dense_replace")

    def read(self, hf: HFConfig) -> Values:
        kinds = read_typed(hf, "mlp_layer_types", list, None)
        if kinds is None:
            return FirstDense(self.dense).read(hf)
        return {"moe.layers": [i for i, kind in enumerate(check_names(kinds, "MLP kind", _MLPS)) if kind == "sparse"]}

    def write(self, config: ModelConfig) -> Values:
        kinds = ["sparse" if config.is_moe_layer(i) else "dense" for i in range(config.num_layers)]
        return {"mlp_layer_types": kinds, "first_k_dense_replace": leading_dense(config)}


_MLPS = ("dense", "sparse")


def leading_dense(config: ModelConfig) -> int:
    """Return how many layers come before the first with experts."""
    return next((i for i in range(config.num_layers) if config.is_moe_layer(i)), config.num_layers)
