"""Weight maps of decoders: a family says how its files call and store each part, the configuration says which exist.

`Names` is the whole description of one way to store a family; a family whose files come in several ways has several.
A name may hold `{i}`, the number of the layer, and in experts `{e}`, the number of the expert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from te_models.config import AttentionConfig, ModelConfig

from ...io.errors import CheckpointError
from ...mapping.blocks import joined
from ...mapping.layout_ops import At, Concat, Deinterleaved, Folded, Layout, Rows, Stack, Transpose, Unsqueezed
from ...mapping.param_shapes import XIELU_NUMBERS, expected_tensors, head_sizes
from .additions import layer_additions, model_additions
from .compressed import CompressedNames
from .indexer import indexer_weights
from .latent import latent_attention

Weights = Iterator[tuple[str, Layout]]
Norms = tuple[str | None, str | None, str | None, str | None]
GATE_UP_DOWN = ("gate", "up", "down")

PRE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
POST: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH: Norms = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True)
class PerExpert:
    """Each expert's projections are separate tensors."""

    gate: str = "mlp.experts.{e}.gate_proj"
    up: str = "mlp.experts.{e}.up_proj"
    down: str = "mlp.experts.{e}.down_proj"

    def weights(self, config: ModelConfig, ours: str, at: str) -> Weights:
        moe = config.moe
        assert moe is not None, "called for MoE layers only"
        experts, fc1 = range(moe.num_moe_experts), f"{ours}linear_fc1"
        for kind in ("weight", "bias") if moe.bias else ("weight",):
            gate, up, down = (
                [At(f"{at}{name.format(e=e)}.{kind}") for e in experts] for name in (self.gate, self.up, self.down)
            )
            first = zip(gate, up) if config.mlp.gated else zip(up)
            yield f"{fc1}.{kind}", Stack(*(joined(config, f"{fc1}.{kind}", *parts) for parts in first))
            yield f"{ours}linear_fc2.{kind}", Stack(*down)


@dataclass(frozen=True)
class Fused:
    """All experts of a layer in one tensor each: fc1 holds the gate rows, then the up rows.

    transposed: stored [E, in, out]. interleaved: gate and up rows in turn instead. The biases' names end in `_bias`.
    """

    fc1: str = "mlp.experts.gate_up_proj"
    fc2: str = "mlp.experts.down_proj"
    transposed: bool = False
    interleaved: bool = False

    def weights(self, config: ModelConfig, ours: str, at: str) -> Weights:
        fc1, fc2 = at + self.fc1, at + self.fc2
        columns: Layout = Deinterleaved(fc1, 2, 2 if self.transposed else 1) if self.interleaved else At(fc1)
        yield f"{ours}linear_fc1.weight", Transpose(columns) if self.transposed else columns
        yield f"{ours}linear_fc2.weight", Transpose(At(fc2)) if self.transposed else At(fc2)
        if config.moe is not None and config.moe.bias:
            bias = f"{fc1}_bias"
            yield f"{ours}linear_fc1.bias", Deinterleaved(bias, 2, 1) if self.interleaved else At(bias)
            yield f"{ours}linear_fc2.bias", At(f"{fc2}_bias")


class ExpertNames(Protocol):
    """How files store the experts of a layer."""

    def weights(self, config: ModelConfig, ours: str, at: str) -> Weights:
        """Yield canonical parameter name -> where its parts are stored: `at` begins the names of files."""
        ...


class MixerNames(Protocol):
    """How files store a mixer of one kind."""

    def weights(self, config: ModelConfig, mixer: Any, at: str, ours: str) -> Weights:
        """Yield canonical parameter name -> where its parts are stored, of one layer, without the norm before it: `at`
        begins the names of files, `ours` names of parameters. mixer: the configuration of the layer's mixer."""
        ...


@dataclass(frozen=True)
class MTPNames:
    """What layers that predict further tokens (multi-token prediction) have beside the parts of a layer: two norms, the
    projection [H, 2 H] of embedding and hidden state joined in this order, and the norm of the result; and what only
    repeats the model's own embedding and output layer. The defaults are the names that deepseek_v3 introduced."""

    enorm: str = "enorm"
    hnorm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    embedding: str = "embed_tokens"
    output: str = "shared_head.head"


@dataclass(frozen=True)
class SharedNames:
    """Blocks that layers share, as zamba2 stores them: in the first layer that uses one, with the adapters of all uses,
    `{use}` in a name being the number of the use. inner: what the names of the layer's own mixer begin with."""

    block: str = "shared_transformer."
    inner: str = "mamba_decoder."
    norms: tuple[str, str] = ("input_layernorm", "pre_ff_layernorm")
    qkv_adapters: tuple[str, ...] = tuple(f"self_attn.linear_{x}_adapter_list.{{use}}" for x in "qkv")
    fc1_adapter: str = "feed_forward.gate_up_proj_adapter_list.{use}"
    output: str = "linear"


@dataclass(frozen=True, kw_only=True)
class Names:
    """How one kind of file stores a decoder. The defaults are the names that llama and qwen3_moe introduced.

    Arguments:
        form: what this kind of file is called; "published" is what transformers writes.
        loadable: whether transformers loads such files.
        norms: before attention, after it, before the MLP, after it; None where the family has none. recurrent_norms: in
            layers without attention, where these are others; parallel_norms: where attention and MLP have one each
            and lie side by side.
        qkv, fc1, shared_fc1: the projections that ours holds one after the other; one name: fused in that order.
        qk_norms: of q and of k; with `{h}`, the number of a head, one for each.
        gate: the projection of attention's output gate. gate_in_q: the projection of q holds, head by head, the rows
            of q and of the gate.
        heads_in_turn: the fused projection holds the queries, key and value of the first head of keys, then of the
            second, and so on.
        halves_swapped: each head of q and k has its second half first, as where the rotation turns the other way.
        qkv_blocks: the fused projection lies in this many blocks, each with q, v and k, in this order, of its heads.
        transposed: linear weights are stored [in, out].
        selection_bias: the bias that only selects experts; None: the family has none.
        selection_bias_unsqueezed: it is stored as [1, E].
        mtp: of the layers behind the last one that predict further tokens; None: they cannot be parameters.
        hyper_connection: the parameters of hyper-connections, of a sublayer, attn or ffn, the part fn, base or scale;
            final_hyper_connection: of the one that the final norm reads, of the whole name.
        mixers: how they store mixers that are no attention, by kind.
        shared: how they store blocks that layers share; None: the family has none.
        compressed: how they store attention to compressed keys, and what belongs to it.
        scales: what they call the scales of blocks beside a module's weight; None: as the format says.
    """

    form: str = "published"
    loadable: bool = True
    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    embedding_norm: str = "model.embed_norm"
    final_norm: str = "model.norm"
    output: str = "lm_head"
    layer: str = "model.layers.{i}"
    norms: Norms = PRE
    parallel_norms: Norms | None = None
    recurrent_norms: Norms | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    heads_in_turn: bool = False
    halves_swapped: bool = False
    qkv_blocks: int | None = None
    transposed: bool = False
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    sinks: str = "self_attn.sinks"
    gate: str = "self_attn.gate_proj"
    gate_in_q: bool = False
    proj: str = "self_attn.o_proj"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    fc2: str = "mlp.down_proj"
    router: str = "mlp.gate"
    selection_bias: str | None = None
    selection_bias_unsqueezed: bool = False
    experts: ExpertNames = PerExpert()
    shared_fc1: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_fc2: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    latent: str = "mlp."
    """What the names of the projections around experts begin with, where there are any."""
    mtp: MTPNames | None = None
    hyper_connection: str = "hc_{sublayer}_{part}"
    final_hyper_connection: str = "hc_head_{part}"
    mixers: Mapping[str, MixerNames] = field(default_factory=dict)
    shared: SharedNames | None = None
    compressed: CompressedNames | None = None
    scales: str | None = None

    @property
    def experts_apart(self) -> bool:
        """Whether every expert has separate tensors."""
        return isinstance(self.experts, PerExpert)

    def weights(self, config: ModelConfig) -> Weights:
        """Yield canonical parameter name -> where its parts are stored, for a configuration."""
        embedding = config.embedding
        yield "embedding.word_embeddings.weight", At(f"{self.embedding}.weight")
        if embedding.position_embedding_type == "learned_absolute":
            yield "embedding.position_embeddings.weight", At(f"{self.positions}.weight")
        if embedding.layernorm:
            yield from _norm(config, "embedding.layernorm.", self.embedding_norm)
        for i in range(config.num_layers):
            yield from self._layer(config, i, f"{self.layer.format(i=i)}.", f"decoder.layers.{i}.")
        for first, ours in self._shared_blocks(config):
            yield from self._shared_block(config, first, f"{self.layer.format(i=first)}.", ours)
        yield from _norm(config, "decoder.final_layernorm.", self.final_norm)
        yield from model_additions(config, self._root)
        if config.hyper_connections is not None and config.hyper_connections.output == "weighted":
            yield from _hyper_connection("decoder.final_hyper_connection.", self.final_hyper_connection)
        if not embedding.share_embeddings_and_output_weights:
            yield "output_layer.weight", At(f"{self.output}.weight")
        if embedding.output_bias:
            yield "output_layer.bias", At(f"{self.output}.bias")
        if (mtp := self.mtp) is None:
            return
        for k in range(config.mtp_num_layers):
            at, ours = f"{self.layer.format(i=config.num_layers + k)}.", f"mtp.layers.{k}."
            yield from _norm(config, f"{ours}enorm.", at + mtp.enorm)
            yield from _norm(config, f"{ours}hnorm.", at + mtp.hnorm)
            yield f"{ours}eh_proj.weight", At(f"{at}{mtp.projection}.weight")
            yield from self._layer(config, config.num_layers - 1, at, f"{ours}transformer_layer.")
            yield from _norm(config, f"{ours}final_layernorm.", at + mtp.norm)

    def copies(self, config: ModelConfig) -> list[tuple[str, str]]:
        """List (name, original) of tensors that files may hold and that only repeat another one: the output layer that
        shares the embedding's weight, and what layers that predict further tokens share with the model."""
        embedding, output = f"{self.embedding}.weight", f"{self.output}.weight"
        tied = config.embedding.share_embeddings_and_output_weights
        pairs = [(output, embedding)] if tied else []
        pairs += self.shared_copies(config)
        if (mtp := self.mtp) is None:
            return pairs
        for k in range(config.mtp_num_layers):
            at = f"{self.layer.format(i=config.num_layers + k)}."
            pairs.append((f"{at}{mtp.embedding}.weight", embedding))
            pairs.append((f"{at}{mtp.output}.weight", embedding if tied else output))
        return pairs

    def tied_output(self, config: ModelConfig) -> tuple[str, ...]:
        """Return the output layer's weight where it is the embedding's, so that files need not hold it."""
        return (f"{self.output}.weight",) if config.embedding.share_embeddings_and_output_weights else ()

    def _shared_blocks(self, config: ModelConfig) -> list[tuple[int, str]]:
        """Return the first layer that uses each shared block, and what begins the names of its parameters."""
        shared = config.shared_blocks
        layers = () if shared is None else shared.layers[: shared.num_blocks]
        return [(layer, f"decoder.shared_blocks.{b}.") for b, layer in enumerate(layers)]

    def _shared_block(self, config: ModelConfig, layer: int, at: str, ours: str) -> Weights:
        attention, its = config.attention_of(layer), self.shared
        if its is None or attention is None:
            raise CheckpointError("these files have no names for blocks that layers share")
        at += its.block
        yield from _norm(config, f"{ours}input_layernorm.", at + its.norms[0])
        yield from self._attention(config, attention, at, f"{ours}self_attention.", own_keys=True)
        yield from _norm(config, f"{ours}pre_mlp_layernorm.", at + its.norms[1])
        yield from self._mlp(config, layer, at, f"{ours}mlp.")

    def _shared_use(self, config: ModelConfig, i: int, ours: str) -> Weights:
        """What layer number `i` adds to use a shared block. Files have adapters where they have the block."""
        shared, its = config.shared_blocks, self.shared
        if shared is None or its is None:
            raise CheckpointError("these files have no names for blocks that layers share")
        use, first = shared.layers.index(i), shared.layers[shared.layers.index(i) % shared.num_blocks]
        at = f"{self.layer.format(i=first)}.{its.block}"
        if shared.attention_lora:
            downs = [At(f"{at}{name.format(use=use)}.0.weight") for name in its.qkv_adapters]
            yield f"{ours}qkv_down.weight", joined(config, f"{ours}qkv_down.weight", *downs)
            for number, name in enumerate(its.qkv_adapters):
                yield f"{ours}qkv_up.{number}.weight", At(f"{at}{name.format(use=use)}.1.weight")
        fc1 = its.fc1_adapter.format(use=use)
        yield f"{ours}fc1_down.weight", At(f"{at}{fc1}.0.weight")
        yield f"{ours}fc1_up.weight", At(f"{at}{fc1}.1.weight")
        yield f"{ours}linear_out.weight", At(f"{self.layer.format(i=i)}.{its.output}.weight")

    def shared_copies(self, config: ModelConfig) -> list[tuple[str, str]]:
        """List (name, original) of a block's tensors; files may repeat them in each layer that uses the block."""
        shared, its, pairs = config.shared_blocks, self.shared, []
        if shared is None or its is None:
            return []
        for use, layer in enumerate(shared.layers[shared.num_blocks :], shared.num_blocks):
            first = shared.layers[use % shared.num_blocks]
            here, there = (f"{self.layer.format(i=i)}." for i in (layer, first))
            for ours, layout in self.weights(config):
                block, b = ours.split("."), use % shared.num_blocks
                uses = ours.startswith("decoder.layers.") and "shared_use" in block
                if ours.startswith(f"decoder.shared_blocks.{b}.") or uses:
                    names = {p.stored for p in layout.place(expected_tensors(config)[ours])}
                    pairs += [(here + n[len(there) :], n) for n in names if n.startswith(there + its.block)]
        return pairs

    def _layer(self, config: ModelConfig, i: int, at: str, ours: str) -> Weights:
        """A layer of the kind of number `i`: `at` begins the names of files, `ours` names of parameters."""
        if config.shared_block_of(i) is not None and self.shared is not None:
            yield from self._shared_use(config, i, f"{ours}shared_use.")
            at += self.shared.inner
        yield from self._norms(config, i, at, ours)
        attention, mixer = config.attention_of(i), config.mixer_of(i)
        if attention is not None and attention.compressed is not None and self.compressed is not None:
            yield from self.compressed.attention(config, attention, at, f"{ours}self_attention.")
        elif attention is not None and attention.mla is not None:
            yield from latent_attention(config, attention, at, f"{ours}self_attention.", self.gate, self.proj)
        elif attention is not None and config.shared_block_of(i) is None:
            own_keys = config.kv_source(i) is None
            yield from self._attention(config, attention, at, f"{ours}self_attention.", own_keys=own_keys)
        if mixer is not None:
            if mixer.kind not in self.mixers:
                raise CheckpointError(f"these files have no names for the parameters of a {mixer.kind!r} mixer")
            yield from self.mixers[mixer.kind].weights(config, mixer, at, f"{ours}mixer.")
        if config.hyper_connections is not None:
            for name, theirs in (("self_attention", "attn"), ("mlp", "ffn")):
                if config.has_mlp(i) if name == "mlp" else attention or mixer:
                    stored = at + self.hyper_connection.format(sublayer=theirs, part="{part}")
                    yield from _hyper_connection(f"{ours}{name}_hyper_connection.", stored)
        if config.has_mlp(i):
            yield from (self._moe if config.is_moe_layer(i) else self._mlp)(config, i, at, f"{ours}mlp.")
        yield from layer_additions(config, i, self._root, at, ours)

    @property
    def _root(self) -> str:
        """What the names of the model begin with."""
        return self.embedding.rpartition(".")[0]

    def _norms(self, config: ModelConfig, i: int, at: str, ours: str) -> Weights:
        attention, mixes, mlp = config.attention_of(i), bool(config.mixer_names(i)), config.has_mlp(i)
        qkv = "linear_qkv_down" if attention is not None and attention.mla is not None else "linear_qkv"
        apart, after = config.has_input_layernorm(i), config.norms_after(i)
        moe = config.moe if config.is_moe_layer(i) else None
        post_moe, own = moe is not None and moe.post_layernorm, moe is not None and moe.own_norms
        places = (
            (mixes, "input_layernorm." if apart else f"self_attention.{qkv}.layer_norm_"),
            (mixes and after, "post_self_attn_layernorm."),
            (
                mlp and not own and config.norms_before(i),
                "pre_mlp_layernorm." if config.is_moe_layer(i) else "mlp.linear_fc1.layer_norm_",
            ),
            (mlp and (after or post_moe), "post_mlp_layernorm."),
        )
        norms = self.norms if attention is not None or self.recurrent_norms is None else self.recurrent_norms
        norms = self.parallel_norms or norms if config.block == "parallel" else norms
        for (there, place), name in zip(places, norms):
            if name is not None and there:
                yield from _norm(config, ours + place, at + name)

    def _attention(self, config: ModelConfig, a: AttentionConfig, at: str, ours: str, *, own_keys: bool) -> Weights:
        yield from indexer_weights(a, at, ours)
        heads, groups, size = head_sizes(a)
        for kind in ("weight", "bias") if a.add_qkv_bias else ("weight",):
            sizes, names = a.qkv_rows(own_keys=own_keys), [at + name for name in self.qkv]
            names = names[: 1 if not own_keys else 2 if a.key_is_value else 3]
            if kind == "bias" and a.has_bias_apart:
                yield f"{ours}qkv_bias", Concat(*((At(f"{name}.bias"), size) for name, size in zip(names, sizes)))
                continue
            names += [at + self.gate] if a.gate_rows and not self.gate_in_q else []
            if a.gate_rows and self.gate_in_q:
                q, total = f"{names[0]}.{kind}", 2 * a.gate_rows
                rows = [[(Rows(q, (2 * h + part) * size, total), size) for h in range(heads)] for part in (0, 1)]
                others = [(At(f"{name}.{kind}"), its) for name, its in zip(names[1:], sizes[1:-1], strict=True)]
                yield f"{ours}linear_qkv.{kind}", Concat(*rows[0], *others, *rows[1])
                continue
            layout = self._joined(config, f"{ours}linear_qkv", names, kind)
            if self.heads_in_turn and groups > 1:
                name, total, each = f"{at}{self.qkv[0]}.{kind}", sum(sizes), heads // groups
                order = [head // each * (each + 2) + head % each for head in range(heads)]
                order += [group * (each + 2) + each + part for part in (0, 1) for group in range(groups)]
                layout = Concat(*((Rows(name, place * size, total), size) for place in order))
            if self.halves_swapped:
                half = [
                    (Rows(f"{name}.{kind}", head * size + begin, rows), size // 2)
                    for name, rows in zip(names[:2], sizes)
                    for head in range(rows // size)
                    for begin in (size // 2, 0)
                ]
                layout = Concat(*half, (At(f"{names[2]}.{kind}"), sizes[2]))
            if self.qkv_blocks is not None:
                name, total, part = f"{at}{self.qkv[0]}.{kind}", sum(sizes), heads * size // self.qkv_blocks
                order = [3 * block + place for place in (0, 2, 1) for block in range(self.qkv_blocks)]
                layout = Concat(*((Rows(name, place * part, total), part) for place in order))
            yield f"{ours}linear_qkv.{kind}", layout
        if a.qk_layernorm in ("head", "each_head", "full"):
            for ours_name, name in list(zip(("q_layernorm", "k_layernorm"), self.qk_norms))[: 1 + own_keys]:
                for kind in ("weight", "bias") if a.qk_layernorm_bias else ("weight",):
                    stored = f"{at}{name}.{kind}"
                    rows = heads if ours_name == "q_layernorm" else groups
                    each = a.qk_layernorm == "each_head"
                    if each and "{h}" in name:
                        apart = [(At(f"{at}{name.format(h=h)}.{kind}"), size) for h in range(rows)]
                        yield f"{ours}{ours_name}.{kind}", Concat(*apart)
                        continue
                    yield f"{ours}{ours_name}.{kind}", Folded(stored, rows) if each else At(stored)
        if a.sinks:
            yield f"{ours}core_attention.softmax_offset", At(at + self.sinks)
        if a.has_head_gate:
            yield f"{ours}head_gate.weight", At(f"{at}{self.gate}.weight")
        yield from self._linear(config, f"{ours}linear_proj", [at + self.proj], a.add_output_bias)

    def _mlp(self, config: ModelConfig, i: int, at: str, ours: str) -> Weights:
        m = config.mlp
        yield from self._linear(config, f"{ours}linear_fc1", [at + name for name in self.fc1], m.bias)
        yield from self._linear(config, f"{ours}linear_fc2", [at + self.fc2], m.bias)
        for name in XIELU_NUMBERS if m.activation == "xielu" else ():
            yield f"{ours}xielu.{name}", At(f"{at}mlp.act_fn.{name}")

    def _moe(self, config: ModelConfig, i: int, at: str, ours: str) -> Weights:
        moe = config.moe
        assert moe is not None, "called for MoE layers only"
        yield from self._linear(config, f"{ours}router", [at + self.router], moe.router.linear_bias)
        if i in moe.hash_layers and self.compressed is not None:
            yield f"{ours}router.expert_of_token", At(at + self.compressed.hash_table)
        elif moe.router.expert_bias and self.selection_bias is not None:
            name = at + self.selection_bias
            yield f"{ours}router.expert_bias", Unsqueezed(name) if self.selection_bias_unsqueezed else At(name)
        if moe.moe_latent_size is not None:
            for name in ("fc1_latent_proj", "fc2_latent_proj"):
                yield from self._linear(config, ours + name, [f"{at}{self.latent}{name}"], config.mlp.bias)
        yield from self.experts.weights(config, f"{ours}experts.", at)
        if moe.shared_expert_intermediate_size is not None:
            bias = config.mlp.bias
            fc1, fc2 = [at + name for name in self.shared_fc1], [at + self.shared_fc2]
            yield from self._linear(config, f"{ours}shared_experts.linear_fc1", fc1, bias)
            yield from self._linear(config, f"{ours}shared_experts.linear_fc2", fc2, bias)
            if moe.shared_expert_gate:
                yield f"{ours}shared_experts.gate_weight", At(f"{at}{self.shared_gate}.weight")

    def _linear(self, config: ModelConfig, ours: str, theirs: list[str], bias: bool) -> Weights:
        for kind in ("weight", "bias") if bias else ("weight",):
            yield f"{ours}.{kind}", self._joined(config, ours, theirs, kind)

    def _joined(self, config: ModelConfig, ours: str, theirs: list[str], kind: str) -> Layout:
        if len(theirs) == 1:
            layout: Layout = At(f"{theirs[0]}.{kind}")
            return Transpose(layout) if self.transposed and kind == "weight" else layout
        return joined(config, f"{ours}.{kind}", *(At(f"{name}.{kind}") for name in theirs))


def per_expert(names: Names, experts: str) -> Names:
    """Return the form of a family with fused experts in which each has separate weights, [out, in]: what tools that
    quantize linear layers write. experts: what the experts of a layer are called."""
    single = PerExpert(*(f"{experts}.{{e}}.{x}_proj" for x in GATE_UP_DOWN))
    return replace(names, form="per-expert", loadable=False, experts=single)


COMMON = Names()
"""The names that llama and qwen3_moe introduced."""


def _hyper_connection(ours: str, stored: str) -> Weights:
    for kind, part in (("weight", "fn"), ("bias", "base"), ("scale", "scale")):
        yield f"{ours}{kind}", At(stored.format(part=part))


def _norm(config: ModelConfig, ours: str, theirs: str) -> Weights:
    if config.norm.has_weight:
        yield f"{ours}weight", At(f"{theirs}.weight")
    if config.norm.bias:
        yield f"{ours}bias", At(f"{theirs}.bias")


def form_within(names: Names, prefix: str) -> Names:
    """Return the form of files that hold the model within alone, so that their names do not begin with `prefix`."""
    own = ("embedding", "positions", "embedding_norm", "final_norm", "layer")
    return replace(names, form="without-prefix", **{name: getattr(names, name).removeprefix(prefix) for name in own})
