"""The data of a run: the data sets that its configuration names, training windows, and validation batches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..config import ConfigError
from ..sizes import plural
from .config import DataConfig, TrainConfig
from .data.batch_size import BatchSize
from .data.blend import Blend, blend_digest
from .data.dataset import TokenDataset, check_vocabulary, read_meta
from .data.errors import DataError
from .data.pairs import FORMAT, Pairs, has_pairs
from .data.tokenize import build_dataset
from .data.windows import Batch, DocumentPacking, Windows, labelled_alike
from .ranks.data_parallel import Ranks


@dataclass(frozen=True)
class RunData:
    """Open data sets of a run. training: those that windows are read from; validation: of `evaluation.sets`."""

    training: tuple[TokenDataset, ...]
    validation: dict[str, TokenDataset]

    def checked_digest(self) -> str:
        """Return the digest of what is trained on. Raises DataError as `TokenDataset.checked_digest` does."""
        for dataset in self.validation.values():
            dataset.checked_digest()
        return blend_digest([dataset.checked_digest() for dataset in self.training])

    def __len__(self) -> int:
        return sum(map(len, self.training))

    @property
    def path(self) -> str:
        """What errors call the data."""
        return ", ".join(str(dataset.path) for dataset in self.training)


def open_data(config: TrainConfig, *, vocab_size: int, may_build: bool) -> RunData:
    """Open the data sets of a run, building the one at `data.path` from `data.text` first if it is absent.

    Raises DataError for one that is absent, was built from other text, or has token ids that the model does not know.
    """
    data = config.data
    if data.text and data.path is not None and may_build and not Path(data.path).exists():
        build_dataset(
            data.path,
            data.text,
            str(data.tokenizer),
            text_field=data.text_field,
            messages_field=data.messages_field,
            options=data.documents,
            workers=data.tokenizer_workers,
            model_vocab_size=vocab_size,
        )
    found = RunData(
        tuple(TokenDataset.open(path) for path in data.weights()),
        {name: TokenDataset.open(path) for name, path in config.evaluation.folders().items()},
    )
    for dataset in found.training:
        check_dataset(dataset, data, vocab_size)
    for dataset in found.validation.values():
        check_vocabulary(dataset, vocab_size)
    return found


def check_dataset(dataset: TokenDataset, config: DataConfig, vocab_size: int) -> None:
    """Raise DataError for a data set of other text, another tokenizer, or tokens that the run's model does not have."""
    if config.text:
        source = read_meta(dataset.path).get("source") or {}
        found = [source.get("text"), source.get("tokenizer"), source.get("text_field", "text")]
        found += [source.get("messages_field"), source.get("options", {})]
        field = config.text_field if config.messages_field is None else "text"
        if found != [
            list(config.text),
            config.tokenizer,
            field,
            config.messages_field,
            config.documents.non_defaults(),
        ]:
            raise DataError(
                f"{config.path} was built from other text, another tokenizer, or with other options than data.text, "
                "data.tokenizer and the keys beside them say"
            )
    check_vocabulary(dataset, vocab_size)


def packing_of(config: DataConfig) -> DocumentPacking:
    """Return what windows say of the documents in them."""
    return DocumentPacking(
        config.pack_documents, config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss
    )


def training_windows(config: TrainConfig, data: RunData, batch: BatchSize | None = None) -> Blend:
    """Return the windows that are trained on. batch: says where steps begin; None: that does not matter. Raises
    DataError where a data set has none."""
    d = config.data
    parts = [_windows(config, dataset, "train", d.validation_fraction) for dataset in data.training]
    later = [] if batch is None else [(batch.position(step), weights) for step, weights in d.later_weights()]
    return Blend(tuple(parts), tuple(d.weights().values()), tuple(later))


def validation_windows(config: TrainConfig, data: RunData) -> dict[str, list[Windows]]:
    """Return the windows of each validation set; "" is what `data.validation_fraction` holds out of all data sets."""
    fraction, found = config.data.validation_fraction, {}
    if fraction:
        own = [_windows(config, dataset, "validation", fraction) for dataset in data.training]
        found[""] = [*labelled_alike(own)]
    for name, dataset in data.validation.items():
        found[name] = [_windows(config, dataset, "all", 0.0)]
    return found


def _windows(
    config: TrainConfig, dataset: TokenDataset, split: Literal["train", "validation", "all"], fraction: float
) -> Windows:
    """Return a split of a data set as the run reads it: windows of text, or preference pairs."""
    d, pairs = config.data, config.posttraining.method == "dpo"
    if has_pairs(dataset) != pairs:
        what = "no preference pairs" if pairs else "preference pairs"
        allowed = f"a data set with data.format = {FORMAT!r}" if pairs else "posttraining.method = 'dpo'"
        raise DataError(f"{dataset.path} has {what}; allowed: {allowed}")
    shared: dict[str, Any] = {"split": split, "validation_fraction": fraction, "seed": config.seed}
    if pairs:
        return Pairs(dataset, d.sequence_length, **shared, skip_long=d.skip_bad_rows)
    return Windows(dataset, d.sequence_length, **shared, packing=packing_of(d))


class ValidationBatches(NamedTuple):
    """What a rank computes for a validation loss: as many batches on every rank, of which the first `counted` are its
    own. The others are there for what ranks do together, and count nothing."""

    batches: list[Batch]
    counted: int


def validation_batches(config: TrainConfig, parts: list[Windows], ranks: Ranks, name: str = "") -> ValidationBatches:
    """Return this rank's validation batches. All ranks together have `evaluation.batches`, full ones only: the same
    windows, however many ranks there are. Of several data sets each has its share, by the number of its windows, from
    its beginning."""
    B, total = config.data.micro_batch_size, sum(map(len, parts))
    count = min(config.evaluation.batches, total // B)
    if count == 0 and config.evaluation.every:
        split = f"validation set {name!r}" if name else "validation split"
        larger = "more text in it" if name else "a larger data.validation_fraction"
        raise ConfigError(
            f"the {split} has {plural(total, 'window')}: less than one batch of {B}; allowed: {larger}, a smaller "
            "data.micro_batch_size, or evaluation.every = 0"
        )
    where = [(part, i) for part in parts for i in range(len(part))]
    if len(parts) > 1:
        needed = count * B
        where = [where[i * len(where) // needed] for i in range(needed)] if needed else []
    own = [*range(ranks.rank, count, ranks.world_size)]
    others = [ranks.rank % count] * (-(-count // ranks.world_size) - len(own)) if count else []
    batches = [
        Batch.joined([part.examples(p, 1) for part, p in where[number * B : (number + 1) * B]])
        for number in [*own, *others]
    ]
    return ValidationBatches(batches, len(own))
