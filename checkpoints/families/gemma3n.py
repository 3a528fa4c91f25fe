"""gemma3n_text: alternating updates of a residual stream of several lanes (AltUp), a learned residual beside attention
(LAuReL), sparse gates, embeddings of each layer, keys of earlier layers; gemma3n holds one beside others that see and
hear."""

from te_models.config import ModelConfig

from ..io.errors import CheckpointError
from .base.additions import PerLayerEmbeddingSizes, shared_layers, shared_sources
from .base.attentions import Nested, read_list
from .base.family import Family
from .base.fields import REQUIRED, Field, HFConfig, Nullable, OwnEntry, Values, read_typed, shorten_value
from .base.layer_fields import LayerPattern
from .base.names import SANDWICH, Names
from .base.rope import RopePerLayerType
from .base.text_part import TextPart, with_images
from .base.unused import Unused
from .gemma import gemma_fields
from .gemma4 import GEMMA_FIXED, with_sight_and_hearing

_SPARSE_LAYERS, _SPARSITY = 10, 0.95


class GatesPerLayer(OwnEntry):
    """`intermediate_size`, one number or one of each layer, and `activation_sparsity_pattern`, as many fractions;
    without it the gates of the first layers of deep models are sparse."""

    names = ("intermediate_size", "activation_sparsity_pattern")

    def read(self, hf: HFConfig) -> Values:
        layers, values = read_typed(hf, "num_hidden_layers", int, REQUIRED), {}
        if isinstance(hf.get("intermediate_size"), list):
            sizes = read_list(hf, "intermediate_size", int) or []
            if not sizes or len(set(sizes)) == 1:
                values["mlp.ffn_hidden_size"] = sizes[0] if sizes else None
            else:
                values |= {"mlp.ffn_hidden_size": sizes[0], "ffn_hidden_sizes": sizes}
        else:
            values["mlp.ffn_hidden_size"] = read_typed(hf, "intermediate_size", int, 16384)
        pattern = hf.get("activation_sparsity_pattern")
        if isinstance(pattern, (int, float)) and not isinstance(pattern, bool):
            raise CheckpointError(
                f"config.json has activation_sparsity_pattern = {shorten_value(pattern)}; supported: a number for each "
                "layer, or null"
            )
        sparse = read_list(hf, "activation_sparsity_pattern", float)
        if sparse is None:
            some = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
            sparse = [_SPARSITY] * some + [0.0] * (layers - some)
        return values | ({"activation_sparsity": sparse} if any(sparse) else {})

    def write(self, config: ModelConfig) -> Values:
        layers = range(config.num_layers)
        return {
            "intermediate_size": [config.ffn_hidden_size(i) for i in layers],
            "activation_sparsity_pattern": [config.sparsity(i) for i in layers],
        }


class SharedKeys(OwnEntry):
    """`num_kv_shared_layers`."""

    names = ("num_kv_shared_layers",)

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        sources = shared_sources(hf, nested["layer_types"], 15)
        return {} if sources is None else {"kv_source_layers": sources}

    def write(self, config: ModelConfig) -> Values:
        return {"num_kv_shared_layers": shared_layers(config)}


GEMMA3N_TEXT = Family(
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    fields=(
        *gemma_fields(max_positions=32768, kv_heads=2, without=("intermediate_size",)),
        *GEMMA_FIXED,
        GatesPerLayer(),
        LayerPattern(window=512, period=5),
        Nullable("final_logit_softcapping", "embedding.logits_softcap", 30.0),
        PerLayerEmbeddingSizes(optional=False),
        Field("laurel_rank", "laurel_rank", int, 64),
        Field("altup_num_inputs", "alternating_updates.lanes", int, 4),
        Field("altup_active_idx", "alternating_updates.active", int, 0),
        Field("altup_coef_clip", "alternating_updates.coef_clip", float, 120.0),
        Field("altup_correct_scale", "alternating_updates.correct_scale", bool, True),
        RopePerLayerType(theta=1e6, sliding_theta=1e4, local="rope_local_base_freq"),
    ),
    mixers=SharedKeys(),
    names=Names(norms=SANDWICH),
    unused=Unused(shared_keys=True),
)

_SIZES = {"vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8}

GEMMA3N = with_sight_and_hearing(
    with_images("gemma3n", "Gemma3nForConditionalGeneration", TextPart((GEMMA3N_TEXT,), _SIZES), prefix=None)
)
