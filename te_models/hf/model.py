"""`TEModelForCausalLM`: a `GPTModel` with the face of a transformers model.

B batch, S sequence, L keys (cached ones included), V vocabulary.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.kernels.cross_entropy import IGNORE_INDEX
from te_models.layers import QuantizedTensor, Recipe, autocast

from ..extras import require
from ..generation import positions_of
from ..generation.one_thread import short_steps
from ..model import GPTModel
from ..model.embedding import input_size
from .backbone import Backbone, output_embeddings
from .cache import CACHE, TransformersCache, one_cache
from .config import TEConfig
from .loading import find_adapter, load
from .packing import same_text
from .saving import joined_fields, save

if TYPE_CHECKING:
    import transformers
    from transformers import modeling_outputs
else:
    transformers = require("transformers", "hf", feature="te_models.hf")
    modeling_outputs = transformers.modeling_outputs


class TEModelForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A te_models model that works where transformers expects one of its models.

    gpt: the `GPTModel`. Its submodules are this module's submodules, so parameters have the same names in both, and in
    files. recipe: the active recipe of `forward`; None leaves the recipe of the surrounding `autocast` active.

    The loss is the mean over the labels of one call, router losses included. With `num_items_in_batch` (passed by
    `Trainer`) its weight is the call's share of the labels of all micro-batches of the step.

    Example:
        model = TEModelForCausalLM.from_pretrained("SmolLM2-135M")
        model.recipe = MXFP8BlockScaling()
        transformers.Trainer(model, args, train_dataset=data).train()
    """

    config_class = TEConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True

    gpt: GPTModel

    def __init__(self, config: TEConfig, *, gpt: GPTModel | None = None) -> None:
        """config: what to build, from random values; gpt: a model to use instead; it must be the configured one."""
        super().__init__(config)
        if gpt is not None and gpt.config != config.model_config:
            raise ValueError("gpt is not the model of config; allowed: TEConfig(config=gpt.config.to_dict())")
        model = GPTModel(config.model_config, expert_layout=config.expert_layout) if gpt is None else gpt  # type: ignore[arg-type]
        self.gpt = model
        self.recipe: Recipe | None = None
        self.post_init()
        self.train(model.training)

    def __setattr__(self, name: str, value: Any) -> None:
        """As in torch, but for `gpt`: not as a submodule, or parameters would have two names."""
        if name != "gpt":
            super().__setattr__(name, value)
            return
        object.__setattr__(self, name, value)
        if isinstance(value, GPTModel):
            self._modules = value._modules  # what takes the place of a part does so in both

    def _replicate_for_data_parallel(self) -> Self:
        """Return the copy that torch's DataParallel then gives copies of the parts, and a `gpt` of these parts."""
        copied = super()._replicate_for_data_parallel()
        gpt = self.gpt._replicate_for_data_parallel()
        gpt._modules = copied._modules
        copied.gpt = gpt
        return copied

    def train(self, mode: bool = True) -> Self:
        """As in torch; `gpt` follows, although it is not a submodule."""
        self.gpt.training = mode
        return super().train(mode)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: transformers.Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        *,
        past_key_values: transformers.Cache | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> modeling_outputs.CausalLMOutputWithPast | modeling_outputs.MoeCausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits, the loss of `labels`, and the cache.

        input_ids: [B, S]. attention_mask: [B, L], 0 where a token is padding. position_ids: [B or 1, S]; a position
        that is not its predecessor plus one begins another text, and texts do not see each other, a text in the cache
        included. cache (past_key_values for transformers before 5.24): extended by this call; with use_cache and
        without one, a new one. inputs_embeds: [B, S, hidden], in place of input_ids, as `get_input_embeddings()`
        returns them. labels: [B, S], usually input_ids; position s is scored on labels[s + 1], and -100 does not count.
        num_items_in_batch: how many labels the micro-batches of a step have together; the loss is then the sum over
        this call's labels divided by it, and router losses weigh as these labels do. use_cache: None follows the
        configuration, and means no in training mode and for several texts in a row. logits_to_keep: the number of last
        positions, or the positions, whose logits are returned; 0 means all. output_hidden_states: also return the
        embeddings, the output of each layer but the last, and the output of the last layer after the final norm, [B, S,
        hidden] each; None follows the configuration. Mixtures also return the router losses as `aux_loss`. Raises
        ValueError for output_attentions.
        """
        batch, length = input_size(input_ids, inputs_embeds)
        cache = one_cache(cache, past_key_values)
        if output_attentions:
            raise ValueError("output_attentions is True; allowed: False, for the attention's weights are never formed")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: [batch, keys]")
        if position_ids is not None:
            cached = 0 if cache is None else int(cache.get_seq_length())
            several = same_text(position_ids, batch, attention_mask, cached)
            attention_mask = attention_mask if several is None else several
        if use_cache is None:
            one_text = attention_mask is None or attention_mask.dim() == 2
            use_cache = self.config.use_cache and not self.training and one_text
        if cache is None and use_cache:
            cache = transformers.DynamicCache(config=self.config)
        past = None if cache is None else TransformersCache(cache, self.gpt.config)
        keys = (batch, length + (0 if past is None else past.length))
        if attention_mask is not None and attention_mask.shape == keys and not compiling():
            # transformers looks, too: attention without a mask is faster, and without padding generate gives one; a
            # training step would wait for the device
            free = attention_mask.device.type == "cpu" or not torch.is_grad_enabled()
            attention_mask = None if free and bool(attention_mask.all()) else attention_mask
        last_only = labels is None and isinstance(logits_to_keep, int) and logits_to_keep == 1
        with contextlib.ExitStack() as around:
            if self.recipe is not None:
                around.enter_context(autocast(recipe=self.recipe))
            if past is not None and not (compiling() or torch.is_grad_enabled()):
                around.enter_context(short_steps(self.gpt, batch * length))
            output = self.gpt(
                input_ids,
                labels,
                position_ids=position_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                cache=past,
                last_logits_only=last_only,
                return_hidden_states=bool(output_hidden_states),
            )
        logits = output.logits
        assert logits is not None, "no stage of a pipeline"
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        elif logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        loss = output.loss
        if loss is not None and labels is not None and num_items_in_batch is not None:
            loss = loss * ((labels[:, 1:] != IGNORE_INDEX).sum() / num_items_in_batch)
        values: dict[str, Any] = {"loss": loss, "logits": logits, CACHE: cache}
        values["hidden_states"] = output.hidden_states
        if self.gpt.config.moe is None:
            result = modeling_outputs.CausalLMOutputWithPast(**values)
        else:
            result = modeling_outputs.MoeCausalLMOutputWithPast(**values, aux_loss=output.aux_loss)
        as_tuple = not (self.config.return_dict if return_dict is None else return_dict)
        return result.to_tuple() if as_tuple else result

    @property
    def base_model(self) -> Backbone:  # type: ignore[override]
        """The model without its output layer, to call; its parameters are this module's."""
        return Backbone(self)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: transformers.Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        past_key_values: transformers.Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of the next call, as transformers does: the tokens that are not in the cache yet. Where
        the rotary frequencies change with the length of the sequence, these are all, and the cache is emptied.

        transformers lets generate take the other arguments of `forward` because these here are called kwargs. Raises
        ValueError for a prompt without tokens.
        """
        if input_ids.shape[1] == 0 and inputs_embeds is None:
            raise ValueError("the prompt has no tokens; allowed: at least one, such as bos_token_id")
        kwargs.pop("tokenizer", None)  # which `transformers serve` passes for stop strings, and generate passes on
        cache = one_cache(cache, past_key_values)
        cached = 0 if cache is None else cache.get_seq_length()
        whole = attention_mask is None or attention_mask.shape[1] == input_ids.shape[1]  # else only the new tokens
        if cache is not None and whole and self.gpt.decoder.by_length:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            before, now = (int(mask[:, :n].sum(dim=1).max()) for n in (cached, mask.shape[1]))
            # tokens that assisted generation has tried and taken back were among those that others were rotated with
            before = getattr(cache, "rotated_as", before)
            cache.rotated_as = now  # type: ignore[attr-defined]
            if cached and self.gpt.decoder.rotary_stage(before) != self.gpt.decoder.rotary_stage(now):
                cache.crop(-cached)  # a negative number of tokens is taken away
                next_sequence_length, kwargs["position_ids"] = None, positions_of(mask)
        return super().prepare_inputs_for_generation(  # type: ignore[attr-defined]
            input_ids,
            next_sequence_length=next_sequence_length,
            **{CACHE: cache},
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        config: TEConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: torch.device | str | int | dict[str, Any] | None = None,
        recipe: Recipe | None = None,
        expert_layout: str | None = None,
        dequantize: bool = False,
        verify: bool = True,
        **options: Any,
    ) -> Self:
        """Load a te_models folder, or the folder of a Hugging Face family; quantized weights stay quantized. A folder
        with an adapter of peft loads the adapter's base model with the adapter.

        Arguments:
            config: as transformers' Auto classes pass it; it must describe the model of the folder.
            dtype: dtype of the parameters; None and "auto" mean the dtype of the files.
            device_map: the one device to load to, or a mapping from "" to it.
            recipe: store the linear layers' weights in the recipe's weight format.
            expert_layout: "grouped" or "per-gemm"; None means the folder's layout.
            dequantize: store the plain values of quantized weights.
            verify: check the tensors that are read against the folder's manifest.json, if it has one.
            options: options of transformers' own from_pretrained. Options that choose a download are used, and options
                that set special tokens, use_cache, output_hidden_states or return_dict; any other option must have its
                default value. adapter_name: the name under which an adapter is loaded ("default").

        Raises ValueError for an option that cannot be honoured, CheckpointError for a folder that cannot be read.
        """
        folder, adapter = find_adapter(pretrained_model_name_or_path, options)
        gpt, folder_config, generation = load(
            folder,
            config=config,
            dtype=options.pop("torch_dtype", None) if dtype is None else dtype,
            device_map=device_map,
            recipe=recipe,
            expert_layout=expert_layout,
            dequantize=dequantize,
            verify=verify,
            options=options,
        )
        model = cls(folder_config, gpt=gpt)
        if generation is not None:
            model.generation_config = generation
        if adapter is not None:
            model.load_adapter(**adapter)
        return model.eval()

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        max_shard_size: int | str = "5GB",
        **options: Any,
    ) -> None:
        """Write a te_models folder. `from_pretrained` of this class and of `GPTModel` read it; so does
        `AutoModelForCausalLM.from_pretrained`, once this package is imported. Other files of an existing folder stay.
        Of a model with adapters from `add_adapter` or `load_adapter`, write the active adapter alone, as peft reads it.

        Arguments:
            is_main_process: False writes nothing.
            state_dict: use these tensors instead of the model's.
            max_shard_size: bytes per file, or a text such as "2GB".
        """
        if is_main_process:
            save(self, Path(save_directory), state_dict, max_shard_size, options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch; also from the tensors of our files, where weights stored quantized are several. Raises
        ValueError where the model does not store such a weight in the same format."""
        return super().load_state_dict(joined_fields(self.gpt, state_dict), strict, assign)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.gpt.embedding.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """Return a module with the `weight` [V, H] and the `bias` of the output layer; a weight that the embedding
        shares is the embedding's."""
        shared = self.gpt.shared_output_weight is not None
        return output_embeddings(self.gpt.output_layer, self.gpt.embedding.word_embeddings, shared=shared)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return how many numbers the parameters hold: all, or those that are trained, or those outside of the tables
        of tokens and positions (by which Trainer estimates its operations)."""
        tables = {id(p) for p in self.gpt.embedding.parameters()} if exclude_embeddings else set()
        counted = (p for p in self.parameters() if id(p) not in tables)
        return sum(p.numel() for p in counted if p.requires_grad or not only_trainable)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:  # type: ignore[override]
        """Return the bytes of the parameters, and buffers: of quantized weights those that are stored."""
        tensors = [*self.parameters(), *(self.buffers() if return_buffers else ())]
        stored = (t.fields.values() if isinstance(t, QuantizedTensor) else (t,) for t in tensors)
        return sum(field.numel() * field.element_size() for fields in stored for field in fields)

    def resize_token_embeddings(  # type: ignore[override]
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Give embedding and output layer another number of rows, and return the embedding; see
        `GPTModel.resize_token_embeddings`. `config` follows."""
        self.gpt.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.config = self.gpt.config.to_dict()
        return self.get_input_embeddings()

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Raise ValueError for another attention than "sdpa": there is one."""
        if attn_implementation != "sdpa":
            raise ValueError(f"attn_implementation is {attn_implementation!r}; allowed: 'sdpa', the model has no other")

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **kwargs: Any) -> None:
        """Recompute each layer in the backward pass; there is one way to do it, and no arguments."""
        self.gpt.activation_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations."""
        self.gpt.activation_checkpointing = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers are recomputed in the backward pass."""
        return self.gpt.activation_checkpointing

    @property
    def is_activation_checkpointing(self) -> bool:
        """The same under the name that newer versions of transformers ask for."""
        return self.gpt.activation_checkpointing

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: our modules are initialised when they are made."""
