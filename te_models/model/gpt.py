"""GPTModel: every supported family as one model class, driven by a ModelConfig.

B batch, S sequence, L keys (cached ones included), V vocabulary.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.layers import (
    Recipe,
    default_rounding_seed,
    name_modules,
    quantized_model_init,
    storage_recipe,
    store_weights,
)
from te_models.layers.distributed.context_parallel import ContextShard, own_positions
from te_models.layers.tensor.fsdp import sharded

from ..config import ModelConfig
from .build import Build, ExpertDispatch, ExpertLayout, check_supported, give_large_pages, give_memory, real_device
from .cache import Memory
from .decoder import Decoder
from .embedding import Embedding, check_masks, input_size, of_tokens, resize_words
from .mlp import store_inputs_in_fp8, stores_inputs_in_fp8
from .moe import Experts, RouterRecord, load_balancing_losses, record_call
from .mtp import MultiTokenPrediction
from .output import ModelOutput, OutputLayer, RouterLossWeights
from .parallel import (
    SharedModel,
    check_split,
    check_tokens,
    check_tokens_shared,
    process_groups,
    reset_model,
    shard_place,
)
from .pretrained.in_memory import converter_of, fill_from_hf, to_hf
from .pretrained.keep_in_fp32 import keep_dtypes
from .pretrained.split_saving import save_split
from .stage import embed_in_last_stage, size_of_parts, with_layers

if TYPE_CHECKING:
    import transformers
    from torch.distributed.device_mesh import DeviceMesh

    from te_models.checkpoints.folder.te_folder import HFSource

    from ..parallel.mesh import ParallelMesh


class GPTModel(SharedModel):
    """A decoder-only language model, dense or mixture of experts. Megatron-Core: `GPTModel`, same parameter names.

    dtype: dtype of the parameters and of compute (None: torch's default); for float32 parameters with bfloat16 compute,
    call the model under `torch.amp.autocast`. params_dtype: the same under the layers' name. device: where to create
    the parameters; "meta" creates no data, call `to_empty` and `reset_parameters` or `load_state_dict` next.
    expert_layout: "grouped" holds the experts of a layer as one parameter, "per-gemm" as one parameter per expert.
    tp_group: split attention, MLPs, embedding and output layer over these ranks; all of them call the model with the
    same tokens and get the same result, and every rank holds norms and routers in full. sequence_parallel: between
    split layers each of these ranks has its part of the tokens only, for training: such a model takes no cache.
    ep_group: give each of these ranks an equal share of the experts; all of them call the model, each with different
    tokens, and every rank holds everything else in full. etp_group: split each expert over these ranks in place of
    those of tp_group; all of them call the model, each with different tokens, or, where tp_group splits the other
    layers, with a part of its tokens. expert_dispatch: "all_to_all" sends tokens to the ranks of their experts,
    "deepep" does by the library deep_ep, "all_gather", for equally many tokens on all ranks, sends them to all. Random
    initial values come from torch's global generator; with the same seed on all ranks, a split model starts from the
    whole one's values.

    Example:
        model = GPTModel(config)
        model(input_ids, labels=input_ids, return_logits=False).loss.backward()

    Raises ConfigError if `config` asks for something that is not implemented.
    """

    pre_process = post_process = True
    """Whether the model begins with the embedding, and ends with final norm and output layer: see `stage`."""
    whole: GPTModel | None = None
    """Of a stage the model that it is a part of."""
    pipeline_stages: tuple[Any, ...] = ()
    """Of a model whose layers `te_models.parallel.parallelize` distributed: the stages that this rank has."""
    router_record: RouterRecord | None = None
    """The record that is recording this model's calls."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        expert_layout: ExpertLayout = "grouped",
        activation_checkpointing: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        ep_group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        expert_dispatch: ExpertDispatch = "all_to_all",
    ) -> None:
        super().__init__()
        check_supported(config)
        if dtype is not None and params_dtype not in (None, dtype):
            raise ValueError(f"dtype is {dtype} and params_dtype is {params_dtype}; allowed: one of them, dtype")
        build = Build(
            params_dtype=dtype or params_dtype,
            device=device,
            expert_layout=expert_layout,
            tp_group=tp_group,
            ep_group=ep_group,
            etp_group=etp_group,
            sequence_parallel=sequence_parallel,
            expert_dispatch=expert_dispatch,
        )
        check_split(config, build)
        self.tp_size = build.tp_size
        self.sequence_parallel = build.sequence_shard is not None
        self.context_shard: ContextShard | None = None
        self.expert_model_parallel_size = build.expert_model_parallel_size
        self.expert_tensor_parallel_size = build.expert_tensor_parallel_size
        self.expert_dispatch: ExpertDispatch = expert_dispatch
        self.set_groups(tp_group, ep_group, etp_group)
        self.config = config
        self.pretrained_folder: Path | None = None
        self.origin: HFSource | None = None
        self.replaced_parameters: frozenset[str] = frozenset()  # whose values an adapter brought
        self.expert_layout: ExpertLayout = expert_layout
        storage = storage_recipe()
        by_name = storage if storage is not None and storage.by_name else None
        # layers learn their names when all are built, and a recipe that chooses by name has to wait for that
        with quantized_model_init(enabled=False) if by_name else contextlib.nullcontext():
            self.embedding = Embedding(config, build)
            self.decoder = Decoder(config, build)
            self.output_layer = OutputLayer(config, build)
            self.mtp = MultiTokenPrediction(config, build) if config.mtp_num_layers else None
        name_modules(self)
        default_rounding_seed(self)
        if by_name:
            store_weights(self, by_name)
        self.router_loss_weights = None
        if config.moe is not None:
            self.router_loss_weights = RouterLossWeights(config.moe.aux_loss_coeff, config.moe.z_loss_coeff, device)
        self.activation_checkpointing = activation_checkpointing

    def expert_parameters(self) -> list[nn.Parameter]:
        """List the parameters of the experts: those that `ep_group` distributes."""
        return [p for module in self.modules() if isinstance(module, Experts) for p in module.parameters()]

    @property
    def shared_output_weight(self) -> Tensor | None:
        """The embedding's weight, [V, H], where the output layer shares it; None where that has its own."""
        tied = self.config.embedding.share_embeddings_and_output_weights
        return self.embedding.word_embeddings.weight if tied else None

    @property
    def activation_checkpointing(self) -> bool:
        """Whether the backward pass recomputes each layer from its input instead of keeping its activations."""
        return self.decoder.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, enabled: bool) -> None:
        self.decoder.activation_checkpointing = enabled

    @property
    def activation_func_fp8_input_store(self) -> bool:
        """Whether MLPs keep what their activations get as E4M3 for the backward pass: Megatron-Core's setting."""
        return stores_inputs_in_fp8(self)

    @activation_func_fp8_input_store.setter
    def activation_func_fp8_input_store(self, enabled: bool) -> None:
        store_inputs_in_fp8(self, enabled)

    def set_aux_loss_coeff(self, value: float) -> None:
        """Change the weight of the load-balancing loss; does not recompile. See RouterLossWeights.set."""
        self._router_loss_weights().set("aux_loss_coeff", value)

    def set_z_loss_coeff(self, value: float) -> None:
        """Change the weight of the router z-loss; does not recompile. See RouterLossWeights.set."""
        self._router_loss_weights().set("z_loss_coeff", value)

    def _router_loss_weights(self) -> RouterLossWeights:
        if self.router_loss_weights is None:
            raise ValueError("this model has no router losses: its config.moe is None")
        return self.router_loss_weights

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Memory | None = None,
        return_logits: bool = True,
        last_logits_only: bool = False,
        return_hidden_states: bool = False,
        return_logprobs: bool = False,
    ) -> ModelOutput:
        """Return logits and, given labels, the loss.

        input_ids: [B, S] int64. labels: [B, S] int64, usually input_ids: position s is scored on labels[s + 1], -100
        does not count. inputs_embeds: [B, S, H], in place of input_ids, as `embedding.word_embeddings` gives them.
        position_ids: [B or 1, S] (None: counting on from the cache). attention_mask: [B, L] bool or 0/1, false where a
        token is padding, L counting cached tokens; or [B, S, L], false where a token does not see another, as of
        another text in its row. document_ids: [B, S] int64 in place of it: neighbours with the same number are a
        document and see each other alone; a negative number is padding. cache: a KVCache, extended by this call.
        return_logits=False leaves the logits out: cheaper where only the loss is wanted. last_logits_only: logits
        [B, 1, V] of the last position, for generation. return_hidden_states: also what the layers compute.
        return_logprobs: the log-probabilities of the labels in place of logits and loss; see `te_models.logprobs`.

        Raises ValueError where the rotary frequencies depend on the length ("longrope", "dynamic") and the cached
        tokens were rotated for another one: their keys and values are others now, and all have to be given again.
        """
        further_ids = None  # what a last stage embeds for the layers that predict further tokens
        if self.mtp is not None and not self.pre_process and inputs_embeds is not None:
            further_ids, input_ids = input_ids, None
        batch, length = self._input_size(input_ids, inputs_embeds, position_ids)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        assert inputs is not None
        if labels is not None and last_logits_only:
            raise ValueError("labels were given with last_logits_only; a loss needs the logits of all tokens")
        if return_logprobs and (labels is None or last_logits_only):
            raise ValueError("return_logprobs is True; allowed: with labels, and without last_logits_only")
        if labels is not None and labels.shape != (batch, length):
            raise ValueError(f"labels has shape {tuple(labels.shape)}; allowed: {(batch, length)}, as input_ids")
        self.check_same_tokens(batch * length, inputs.device)
        begin = 0
        if cache is not None:
            cache.check_room(batch, length)
            begin = cache.length
        if attention_mask is not None or document_ids is not None:
            check_masks(attention_mask, document_ids, (batch, length), begin, cached=cache is not None)
            attention_mask = None if attention_mask is None else attention_mask.bool()
        if position_ids is None and attention_mask is not None and self.config.embedding.positions_from_mask:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, begin : begin + length]
        elif position_ids is None:
            position_ids = torch.arange(begin, begin + length, device=inputs.device)[None]
        elif position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}; allowed: [{batch}, {length}] or [1, {length}]"
            )
        if begin and self.decoder.by_length and not compiling():
            self.decoder.check_stage(int(position_ids.max()) + 1, begin, length)
        shard, batch_size = self.context_shard, None
        if shard is not None or self.sequence_parallel:
            asked = {"cache": cache, "last_logits_only": last_logits_only, "return_hidden_states": return_hidden_states}
            check_tokens_shared(asked)
        own_ids, tokens = position_ids, None
        if shard is not None:
            shard.check(length)
            if self.pre_process:  # a later stage gets this rank's positions
                input_ids = None if input_ids is None else own_positions(input_ids, shard)
                inputs_embeds = None if inputs_embeds is None else own_positions(inputs_embeds, shard)
            own_ids, length = own_positions(position_ids, shard), length // shard.ranks
        if self.sequence_parallel:
            check_tokens(batch * length, self.tp_size)
            batch_size = batch
        if self.pre_process:
            x = self.embedding(input_ids, own_ids, inputs_embeds)
            tokens = of_tokens(self.config, input_ids, x)
            x = self.decoder.widened(x)
        elif inputs_embeds is None:
            raise ValueError(
                "this stage was given input_ids; allowed: inputs_embeds, what the stage before it returned"
            )
        else:
            x = inputs_embeds
        embedded, states = x, ([] if return_hidden_states else None)
        index_losses: list[Tensor] = []
        arguments = (attention_mask, cache, states, batch_size, document_ids, index_losses, tokens)
        x, routed = self.decoder(x, position_ids, *arguments)
        if cache is not None:
            cache.advance(length)
        if last_logits_only:
            x = x[:, -1:]
        logits = loss = mtp_loss = z_loss = None
        logprobs = None
        if self.post_process and return_logprobs:
            assert labels is not None
            logprobs = self.output_layer.token_log_probs(x, self.shared_output_weight, labels, batch_size)
        elif self.post_process:
            weight = self.shared_output_weight
            # evaluation measures the model alone, without the terms that training adds
            with_z = self.training and labels is not None
            options: dict[str, Any] = {"return_logits": return_logits, "batch_size": batch_size, "with_z_loss": with_z}
            logits, loss, z_loss = self.output_layer(x, weight, labels, **options)
            loss = loss if loss is None or z_loss is None else loss + z_loss
            if self.mtp is not None and loss is not None and self.training:
                assert labels is not None
                if not self.pre_process:
                    embedded = embed_in_last_stage(self, further_ids, own_ids)
                options = {"batch_size": batch_size, "document_ids": document_ids}
                inputs = self.decoder.layer_inputs(embedded, position_ids, attention_mask, **options)
                layers = (self.decoder, inputs, self.output_layer, weight)
                texts = attention_mask if document_ids is None else document_ids
                mtp_loss, further, its_losses = self.mtp(x, embedded, labels, texts, *layers)
                loss, routed = loss + mtp_loss * self.config.mtp_loss_scaling_factor, routed + further
                index_losses += its_losses
        elif states is None:
            states = [x]
        hidden_states = None if states is None else tuple(states)
        terms: dict[str, Any] = {"mtp_loss": mtp_loss, "logits_z_loss": z_loss, "logprobs": logprobs}
        output = ModelOutput(logits=logits, loss=loss, hidden_states=hidden_states, **terms)
        if self.router_record is not None:
            output.router_indices = torch.stack([r.indices for r in routed if r.indices is not None])
            record_call(self, output.router_indices, begin, cache)
        if self.router_loss_weights is not None and routed:
            further = [] if self.mtp is None else [depth.transformer_layer for depth in self.mtp.layers]
            routers = [layer.mlp.router for layer in (*self.decoder.layers, *further) if layer.is_moe]  # type: ignore[union-attr]
            balance = load_balancing_losses(routed, routers, whole=self.whole is None)  # type: ignore[arg-type]
            output.set_router_losses(routed, balance, self.router_loss_weights)
        output.add_aux_losses(index_losses)
        return output

    def _input_size(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, position_ids: Tensor | None
    ) -> tuple[int, int]:
        """Return (B, S) of a call."""
        if not self.pre_process and inputs_embeds is not None and (self.sequence_parallel or self.context_shard):
            return size_of_parts(self, inputs_embeds, position_ids)
        return input_size(input_ids, inputs_embeds)

    def stage(self, first: int, last: int) -> GPTModel:
        """Return layers `first` to `last` - 1 as a pipeline stage, with the embedding if `first` is 0, and with final
        norm and output layer if `last` is the number of layers.

        Stage and model share their modules, so that names and values are the same in both; of a model on the meta
        device only the stages that a rank has need data. Call a later stage with `inputs_embeds`, the
        `hidden_states[-1]` [B, S, H] of the stage before it (a rank's part of the tokens, and position_ids, where ranks
        share them); an earlier stage than the last returns no logits and no
        loss, and `aux_loss` covers its layers only. Where embedding and output layer share their weight, the last stage
        has the embedding, too: add up the gradients that both leave. So it has where layers of the last stage predict
        further tokens; its loss in training needs the `input_ids`, too. Raises ConfigError for layers that the model
        does not have.

        Example:
            begin, end = (GPTModel(config, device="meta").stage(*layers) for layers in ((0, 2), (2, 4)))
        """
        return with_layers(self, range(first, last))

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Give embedding and output layer another number of rows, and return the embedding; transformers' method of
        this name.

        new_num_tokens: None means as many as now; pad_to_multiple_of rounds it up. The first rows stay as they are. New
        ones are the mean of all, or, without mean_resizing, random initial values. `config` has the new `vocab_size`.
        Make an optimizer afterwards, for the parameters are others. Raises ValueError for a model whose vocabulary is
        divided among ranks, and for numbers below 1.
        """
        return resize_words(self, new_num_tokens, pad_to_multiple_of, mean_resizing)

    def reset_parameters(self) -> None:
        """Initialise all parameters again, in the order of construction. After `torch.manual_seed(s)` the parameters
        equal the values of a model that is built after `torch.manual_seed(s)`; with that seed on every rank, those of a
        split, distributed or sharded model, or of a pipeline stage, equal their part of these values."""
        reset_model(self)

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of what a checkpoint holds: parameters, one that is shared between layers under each of
        its names, then buffers that are part of the state."""
        yield from self.named_parameters(remove_duplicate=False)
        stored = self.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.named_buffers() if name in stored)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        recipe: Recipe | None = None,
        expert_layout: ExpertLayout = "grouped",
        device_mesh: DeviceMesh | ParallelMesh | None = None,
        sequence_parallel: bool = False,
        expert_dispatch: ExpertDispatch = "all_to_all",
        dequantize: bool = False,
        mtp: bool = False,
        verify: bool = True,
    ) -> Self:
        """Load a folder written by `save_pretrained`, or a Hugging Face model folder or hub id (`org/name@revision`).

        dtype: dtype of the parameters, or its name, whatever the files have (None: torch's default); routers that the
        family keeps in float32 remain float32. device: None is torch's default device, or the CPU where that is meta.
        recipe: store the linear layers' weights in the recipe's weight format; None keeps the folder's format,
        quantized weights bit for bit. dequantize: store the plain values of quantized weights; they take the memory of
        `dtype` and, without FP8 hardware, compute several times as fast. device_mesh: split the layers over the
        dimension "tp", distribute the experts over the dimension "ep" and split each of them over the dimension "etp",
        if it has that, or as a ParallelMesh says; each rank reads only its own parts. sequence_parallel,
        expert_dispatch: see `GPTModel`. mtp: make the layers of a Hugging Face folder that predict further tokens a
        part of the model (`ModelConfig.mtp_num_layers`); our folders say whether they are. verify: check every tensor
        that is read against the folder's manifest.json, if it has one; ranks of a split model share the work. Tensors
        stream into the model. Raises CheckpointError for an unreadable folder, ConfigError for a configuration that is
        not implemented, ValueError for other mesh dimensions, the meta device, `recipe` with `dequantize`.
        """
        from te_models.checkpoints import open_checkpoint
        from te_models.checkpoints.folder.provenance import provenance_source
        from te_models.checkpoints.io.dtypes import as_torch_dtype
        from te_models.checkpoints.io.header import without_collections

        if dequantize and recipe is not None:
            raise ValueError("dequantize stores values, and a recipe quantized weights: choose one of them")
        dtype, storage = as_torch_dtype(dtype), "values" if dequantize else None
        opened = open_checkpoint(folder, storage=storage, float32=dequantize, mtp=mtp, verify=verify)
        with without_collections(), opened as checkpoint:  # all that is built here stays
            if mtp and not checkpoint.config.mtp_num_layers:
                raise ValueError(f"mtp is True, and {folder} has no layers that predict further tokens as parameters")
            target = real_device(device)
            split: dict[str, Any] = {**process_groups(device_mesh), "sequence_parallel": sequence_parallel}
            split |= {"expert_layout": expert_layout, "expert_dispatch": expert_dispatch}
            stored_as = contextlib.nullcontext() if recipe is None else quantized_model_init(recipe=recipe)
            with stored_as:  # without values: the files have them
                model = cls(checkpoint.config, dtype=dtype, device="meta", **split)
            model.check_dispatch_device(target)
            keep_dtypes(model, checkpoint.family, checkpoint.dtype_of)
            give_memory(model, target)
            if recipe is None:
                quantized = checkpoint.empty_quantized(expert_layout, target, shard_place(model))
                for name, value in () if dequantize else quantized:
                    owner, _, key = name.rpartition(".")
                    parameter: Any = nn.Parameter(value)  # still quantized
                    setattr(model.get_submodule(owner), key, parameter.keep_attributes(model.get_parameter(name)))
            give_large_pages(model)
            checkpoint.load_into(dict(model.stored_tensors()), place=shard_place(model))
            model.origin = provenance_source(checkpoint, () if dequantize else None)
        model.pretrained_folder = checkpoint.path
        return model

    @classmethod
    def from_catalogue(cls, name: str, **options: Any) -> Self:
        """Return a model of random weights with the configuration `ModelConfig.from_catalogue(name)`, made with further
        arguments of this class; device="meta" creates no data."""
        return cls(ModelConfig.from_catalogue(name), **options)

    @classmethod
    def from_hf(
        cls,
        model: transformers.PreTrainedModel | str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        expert_layout: ExpertLayout = "grouped",
    ) -> Self:
        """Copy a transformers model in memory; a folder or hub id is passed on to `from_pretrained`.

        Arguments as for `from_pretrained`. Raises CheckpointError if its family is not supported.
        """
        if isinstance(model, str | os.PathLike):
            return cls.from_pretrained(model, dtype=dtype, device=device, expert_layout=expert_layout)
        from te_models.checkpoints.io.dtypes import as_torch_dtype

        converter = converter_of(model)
        ours = cls(converter.config, dtype=as_torch_dtype(dtype), device="meta", expert_layout=expert_layout)
        fill_from_hf(ours, model, real_device(device))
        ours.origin = converter.source
        return ours

    def to_hf(self, family: str | None = None, *, dequantize: bool = False) -> transformers.PreTrainedModel:
        """Return a transformers model with copies of these weights, in the same dtype and on the same device.

        family: None means the family that this model came from, or the first one that can express it. For a family that
        also reads images, the result is its text model. dequantize: convert quantized weights to plain values. Raises
        CheckpointError for quantized weights without `dequantize`, and if the family cannot express the model.
        """
        return to_hf(self, family, dequantize=dequantize)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write parameters and configuration as safetensors and JSON; `from_pretrained` restores them bit for bit.

        The tokenizer and the other small files of the model's original folder are copied if the folder still exists.
        Every rank of a split model calls this (with several copies, every rank of one copy), and every rank of the mesh
        of a model that FSDP2 shards, split or not. The first rank writes the whole model, tensor after tensor.
        """
        from te_models.checkpoints import save_model

        source = self.pretrained_folder
        source = source if source and source.is_dir() else None
        if not self.shares_parameters and not sharded(self.parameters()):
            save_model(dict(self.stored_tensors()), self.config, folder, source_dir=source, source=self.origin)
        else:
            save_split(self, folder, source)
