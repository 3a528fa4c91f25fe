"""gpt_neo: gpt2 with weights stored [out, in], scores that are not scaled, and windows in every other layer."""

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.common import ACTIVATIONS, Dropouts, layer_norm_entries
from .base.family import Family
from .base.fields import REQUIRED, Choice, Field, HFConfig, OneOf, OwnEntry, Values, fixed, read_typed, shorten_value
from .base.names import Names
from .base.nested import TimesHidden
from .base.unused import Unused


class AttentionTypes(OwnEntry):
    """`attention_types`: lists of "global" and "local", each with how often it is repeated; local layers see
    `window_size` positions."""

    names = ("attention_types", "window_size", "attention_layers")

    def read(self, hf: HFConfig) -> Values:
        types = read_typed(hf, "attention_types", list, None)
        types = [[["global", "local"], 12]] if types is None else types
        layers = read_typed(hf, "num_layers" if "num_layers" in hf else "num_hidden_layers", int, REQUIRED)
        try:
            kinds = [kind for pattern, times in types for _ in range(min(times, layers)) for kind in pattern]
        except (TypeError, ValueError):
            kinds = []
        if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
            raise CheckpointError(
                f"config.json has attention_types = {shorten_value(types)} and {layers} layers; allowed: lists of "
                "'global' and 'local', each with a number of times, that make so many layers"
            )
        found: Values = {"layer_types": ["sliding" if kind == "local" else "full" for kind in kinds]}
        if "local" in kinds or "window_size" in hf:
            found["attention.window_size"] = read_typed(hf, "window_size", int, 256)
        return found

    def write(self, config: ModelConfig) -> Values:
        kinds = ["local" if kind == "sliding" else "global" for kind in config.layer_types or ()]
        window = config.attention.window_size
        types = {"attention_types": [[kinds, 1]], "attention_layers": kinds}  # transformers writes both, and compares
        return types | ({} if window is None else {"window_size": window})


GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    fields=(
        Field("vocab_size", "vocab_size", int),
        Field("hidden_size", "hidden_size", int),
        OneOf(("num_layers", "num_hidden_layers"), "num_layers", int),
        OneOf(("num_heads", "num_attention_heads"), "attention.num_attention_heads", int),
        Field("max_position_embeddings", "max_position_embeddings", int, 2048),
        TimesHidden("intermediate_size", default_hidden=2048),
        AttentionTypes(),
        Choice("activation_function", "mlp.activation", ACTIVATIONS, "gelu_new"),
        Field("layer_norm_epsilon", "norm.layernorm_epsilon", float, 1e-5),
        Field("tie_word_embeddings", "embedding.share_embeddings_and_output_weights", bool, True),
        Field("attention_dropout", "attention.attention_dropout", float, 0.0),
        Dropouts("resid_dropout", "embed_dropout"),
        Field("initializer_range", "init_method_std", float, 0.02),
        *layer_norm_entries(bias=True),
        *fixed({"mlp.gated": False, "mlp.bias": True, "attention.add_output_bias": True}),
        *fixed({"attention.softmax_scale": 1.0, "embedding.position_embedding_type": "learned_absolute"}),
    ),
    names=Names(
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        layer="transformer.h.{i}",
        norms=("ln_1", None, "ln_2", None),
        qkv=tuple(f"attn.attention.{x}_proj" for x in "qkv"),
        proj="attn.attention.out_proj",
        fc1=("mlp.c_fc",),
        fc2="mlp.c_proj",
    ),
    unused=Unused(("*.attn.attention.bias", "*.attn.attention.masked_bias")),
)
