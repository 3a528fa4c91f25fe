"""The tables [model] and [data]: where a model and its tokens come from.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Literal

from ...config import ConfigPart, ModelConfig, check
from ..data.formats import Format
from ..data.options import DocumentOptions

_LARGE_VOCABULARY, _LOGIT_BYTES, _CHUNK = 32_768, 1 << 30, 1024
"""When a loss is computed in chunks by itself, and of how many tokens: each chunk adds a gradient to the whole weight;
that costs little where a chunk has more tokens than a hidden state has channels."""


@dataclass(frozen=True, kw_only=True)
class ModelSource(ConfigPart):
    """Where the model comes from: exactly one of `path`, `name`, `config` and `config_file`. The last three are random
    initialisations."""

    path: str | None = None
    """Folder of a trained model, te_models' or Hugging Face's."""
    name: str | None = None
    """Name of a published model in the catalogue (`te-models models`), for its configuration with random weights; a
    mixture that has neither a router loss nor expert_bias gets aux_loss_coeff = 0.01."""
    config: ModelConfig | None = None
    """Configuration of a model with random weights. A mixture that says nothing of its experts' balance (aux_loss_coeff
    of moe, or expert_bias of its router) gets aux_loss_coeff = 0.01."""
    config_file: str | None = None
    """JSON file of a ModelConfig, for a model with random weights."""
    expert_layout: Literal["grouped", "per-gemm"] = "grouped"
    """Whether the experts of a layer are one tensor (grouped) or one each."""
    activation_checkpointing: bool = False
    """Whether only the input of each layer is kept, and the backward pass computes the rest again."""
    recompute_modules: tuple[str, ...] = ()
    """Modules of which the same holds in place of whole layers: patterns of names such as "decoder.layers.*.mlp"."""
    recompute_save_ops: tuple[str, ...] = ()
    """Operations whose results are kept and not computed again: gemm, attention, all_to_all, or torch's names such as
    "aten.mm"."""
    activation_offloading: bool = False
    """Whether what layers keep for the backward pass waits in main memory; on a device, and without a graph of the
    whole loss."""
    activation_func_fp8_input_store: bool = False
    """Whether the inputs of the MLPs' activations are kept in FP8 (E4M3) for the backward pass, whose derivatives are
    then at rounded values: half the memory of the largest tensors that are kept."""
    loss_chunk_tokens: int | Literal["auto"] | None = "auto"
    """Tokens whose logits the loss is computed from at a time, which bounds its memory: this number, or 1024 where the
    vocabulary has 32,768 entries or more and a micro-batch's logits would take more than 1 GiB in float32, else all
    (auto); a run keeps its choice when it continues."""
    logits_z_loss_coeff: float = 0.0
    """Weight of the mean of logsumexp(logits)^2 in the loss that training minimises (z-loss of the logits); 0 means
    none."""
    mtp: bool = False
    """Whether layers of a Hugging Face folder that predict further tokens become a part of the model and are trained;
    false: an export gives them back as they were."""
    verify: bool = True
    """Whether the weights in path are checked against the digests of its manifest.json."""

    def _validate(self) -> None:
        present = [name for name in ("path", "name", "config", "config_file") if getattr(self, name) is not None]
        check(len(present) == 1, "model", " and ".join(present) or "empty", "one of path, name, config and config_file")
        check(self.path is not None or not self.mtp, "model.mtp", self.mtp, "false without path; see mtp_num_layers")
        names, whole = list(self.recompute_modules), self.activation_checkpointing
        check(not (names and whole), "model.recompute_modules", names, "none with activation_checkpointing = true")
        saved, some = list(self.recompute_save_ops), bool(names) or whole
        allowed = "none without recompute_modules or activation_checkpointing"
        check(some or not saved, "model.recompute_save_ops", saved, allowed)
        z = self.logits_z_loss_coeff
        check(z >= 0, "model.logits_z_loss_coeff", z, "zero or a positive number")
        chunk = self.loss_chunk_tokens
        allowed = 'a positive integer, "auto" or null'
        check(chunk is None or chunk == "auto" or chunk > 0, "model.loss_chunk_tokens", chunk, allowed)

    def loss_chunk(self, vocab_size: int, tokens: int) -> int | None:
        """Return the tokens of a chunk of the loss for micro-batches of `tokens`; None: all of them at once."""
        if self.loss_chunk_tokens != "auto":
            return self.loss_chunk_tokens
        large = vocab_size >= _LARGE_VOCABULARY and 4 * vocab_size * tokens > _LOGIT_BYTES
        return _CHUNK if large else None


@dataclass(frozen=True, kw_only=True)
class DataConfig(ConfigPart):
    """The token data set and the shape of a batch.

    One optimizer step consumes `micro_batch_size * gradient_accumulation * ranks` windows of `sequence_length` tokens.
    """

    path: str | None = None
    """Folder of the token data set; built from text where it does not exist."""
    blend: tuple[str, ...] = ()
    """Folders of several token data sets in place of path, as "folder=weight": windows are read by weight."""
    blend_steps: tuple[str, ...] = ()
    """Other weights of the blend from a step on (a curriculum), as "1000: folder=weight, folder=weight", in ascending
    order: folders of blend, 0 for those that a stage leaves out; every folder goes on where it was."""
    text: tuple[str, ...] = ()
    """Files, folders of files or glob patterns to build the data set from: text, .jsonl, .parquet, saved data sets,
    hf:// names."""
    text_field: str = "text"
    """Field of .jsonl, or column of a table, that is the text of a document."""
    messages_field: str | None = None
    """Field that is a list of chat messages with role and content, in place of text_field: they are written with the
    tokenizer's chat template, and the loss counts the assistant's messages alone."""
    format: Format | None = None
    """What a row is: text, or a chat in a format of the field, of which the loss counts the answers (of a preference
    pair, the chosen one; preference_pairs: both, for posttraining.method = "dpo"); unset: text, or messages with
    messages_field."""
    fields: tuple[str, ...] = ()
    """What files call the fields of the format, where they have other names, as "messages=conversation"."""
    roles: tuple[str, ...] = ()
    """What files call who speaks in a chat, as "human=user"."""
    join_parts: bool = False
    """Whether content that is a list of parts of text is joined into text, for templates that write text alone."""
    rewritten_chats: Literal["rows", "final"] = "rows"
    """Where a template writes earlier answers otherwise when a chat goes on (reasoning that is left out): a row for
    each answer, as it was asked for (rows), or one, as the chat is written at its end (final)."""
    add_bos_token: bool | Literal["auto"] = "auto"
    """Whether documents begin with the token that begins a text: as the tokenizer does (auto), always, or never."""
    add_eos_token: bool | Literal["auto"] = "auto"
    """Whether documents, and answers of chats, end with the token that ends a text: documents do and answers end as the
    chat template ends them (auto); answers that it ends with no token do, too (true); or documents do not (false)."""
    eos_token: str | None = None
    """The token that ends documents and answers; unset: what the files of the tokenizer, or else of its model, say."""
    skip_bad_rows: bool = False
    """Whether rows that cannot be used are passed over and counted, instead of ending the run."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json, or "bytes"; set exactly when text is."""
    tokenizer_workers: int = 1
    """Tokenizer processes that build the data set."""
    pack_documents: bool = False
    """Whether windows are rows of whole documents, filled up with padding that does not count, instead of consecutive
    tokens; it implies the next three keys."""
    reset_position_ids: bool = False
    """Whether positions begin at 0 in each document."""
    reset_attention_mask: bool = False
    """Whether tokens see their own document alone."""
    eod_mask_loss: bool = False
    """Whether the first token of a document is left out of the loss: the end of another document predicts it."""
    sequence_length: int = 1024
    """Tokens in a window."""
    micro_batch_size: int = 1
    """Windows in a micro-batch."""
    gradient_accumulation: int = 1
    """Micro-batches of each rank in an optimizer step."""
    global_batch_size: int | None = None
    """Windows of an optimizer step on all ranks, from which gradient_accumulation follows for as many ranks as a run
    has: it goes on with fewer or more of them; unset means what gradient_accumulation makes."""
    rampup_batch_size: tuple[int, ...] = ()
    """Growing batches, as [start, increment, samples]: steps of all ranks begin with `start` windows, which grow by
    increment up to the full batch after `samples` windows; unset means full batches from the beginning."""
    validation_fraction: float = 0.01
    """Part of the windows that is held out for validation, 0 to 1."""
    prefetch: int = 2
    """Steps whose batches a thread reads ahead while a step runs; 0: none; it changes no batch."""

    def _validate(self) -> None:
        check(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2 tokens")
        for name in ("micro_batch_size", "gradient_accumulation"):
            check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a positive integer")
        batch, count = self.global_batch_size, self.gradient_accumulation
        check(batch is None or batch > 0, "data.global_batch_size", batch, "a positive integer")
        follows = "1, or unset, with data.global_batch_size, from which it follows"
        check(batch is None or count == 1, "data.gradient_accumulation", count, follows)
        ramp = self.rampup_batch_size
        known = len(ramp) in (0, 3) and all(number > 0 for number in ramp)
        check(known, "data.rampup_batch_size", list(ramp), "three positive integers: start, increment and samples")
        check(0 <= self.validation_fraction < 1, "data.validation_fraction", self.validation_fraction, "0 <= f < 1")
        both = bool(self.text) == (self.tokenizer is not None)
        check(both, "data.tokenizer", self.tokenizer, "set exactly when data.text is set")
        check(self.prefetch >= 0, "data.prefetch", self.prefetch, "zero or a positive integer")
        check(self.tokenizer_workers > 0, "data.tokenizer_workers", self.tokenizer_workers, "a positive integer")
        check((self.path is None) == bool(self.blend), "data.path", self.path, "a folder, or data.blend, and not both")
        check(not (self.blend and self.text), "data.text", list(self.text), "empty with data.blend")
        check(
            bool(self.blend) or not self.blend_steps, "data.blend_steps", list(self.blend_steps), "empty without blend"
        )
        self.weights()
        self.later_weights()
        self.documents.reading(self.text_field, self.messages_field)

    @property
    def documents(self) -> DocumentOptions:
        """How documents are read and tokenized."""
        return DocumentOptions(**{f.name: getattr(self, f.name) for f in fields(DocumentOptions)})

    @property
    def by_document(self) -> bool:
        """Whether attention or positions depend on where documents begin."""
        return self.pack_documents or self.reset_position_ids or self.reset_attention_mask

    def weights(self) -> dict[str, Fraction]:
        """Return the folders that windows are read from, with their weights."""
        if self.path is not None:
            return {self.path: Fraction(1)}
        return _weights("data.blend", self.blend, self.blend, least=0 if self.blend_steps else None)

    def later_weights(self) -> list[tuple[int, tuple[Fraction, ...]]]:
        """Return the steps from which the blend has other weights, with the weights in the order of `blend`."""
        found: list[tuple[int, tuple[Fraction, ...]]] = []
        for text in self.blend_steps:
            step, colon, weights = text.partition(":")
            known = bool(colon) and step.strip().isascii() and step.strip().isdigit()
            check(known, "data.blend_steps", text, '"step: folder=weight, folder=weight"')
            last = found[-1][0] if found else 0
            check(int(step) > last, "data.blend_steps", text, f"a step after {last}, in ascending order")
            entries = tuple(entry.strip() for entry in weights.split(","))
            stage = _weights("data.blend_steps", entries, (text,), least=0)
            other = sorted(stage.keys() ^ self.weights().keys())
            allowed = f"each folder of data.blend, and no other; not so: {', '.join(other)}"
            check(not other, "data.blend_steps", text, allowed)
            found.append((int(step), tuple(stage[path] for path in self.weights())))
        return found


def _weights(key: str, entries: tuple[str, ...], said: tuple[str, ...], *, least: int | None) -> dict[str, Fraction]:
    """Return folders with their weights of texts "folder=weight". least: 0 allows a weight of 0, if not all are."""
    found: dict[str, Fraction] = {}
    for i, text in enumerate(entries):
        path, _, weight = text.rpartition("=")
        try:
            value = Fraction(weight)
        except (ValueError, ZeroDivisionError):
            value = Fraction(-1)
        enough = value > 0 or value == least
        shown = said[i] if len(said) == len(entries) else said[0]
        check(bool(path) and enough, key, shown, '"folder=weight" with a positive number')
        check(path not in found, key, shown, "each folder once")
        found[path] = value
    check(any(found.values()), key, list(said), "a weight above 0")
    return found
