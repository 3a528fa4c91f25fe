"""The model of `--offline-tiny`: a Llama of a million parameters and its tokenizer, trained here on the same text.

For machines that cannot get the packaged model. It goes through the ordinary trainer and the ordinary export, so what
the quickstart then imports is a Hugging Face folder like any other.
"""

from pathlib import Path
from typing import Any

from te_models.checkpoints import export_hf

from ..config import AttentionConfig, EmbeddingConfig, MLPConfig, ModelConfig
from ..extras import require
from ..training import TrainConfig, train, write_dataset

VOCABULARY = 2048
END = "<|endoftext|>"
_CHARACTERS = 12_000  # of each file: three times as many tokens as the steps read

CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    num_layers=4,
    max_position_embeddings=512,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2),
    mlp=MLPConfig(ffn_hidden_size=384),
    embedding=EmbeddingConfig(share_embeddings_and_output_weights=True),
)


def tiny_folder(scratch: Path, files: list[Path], steps: int = 300) -> Path:
    """Train tokenizer and model on `files`; return the Hugging Face folder, `scratch`/hf.

    Raises:
        MissingExtraError: transformers or tokenizers is not installed.
    """
    folder, wrapped = scratch / "hf", train_tokenizer(files)
    texts = [file.read_text(encoding="utf-8")[:_CHARACTERS] for file in files]
    documents = wrapped(texts, add_special_tokens=False, verbose=False).input_ids
    write_dataset(scratch / "tiny-tokens", [[ids, [wrapped.eos_token_id]] for ids in documents], len(wrapped))
    train(
        TrainConfig.from_dict(
            {
                "output_dir": str(scratch / "tiny"),
                "steps": steps,
                "model": {"config": CONFIG.to_dict()},
                "data": {
                    "path": str(scratch / "tiny-tokens"),
                    "sequence_length": 128,
                    "micro_batch_size": 8,
                    "validation_fraction": 0.0,
                },
                "optimizer": {"lr": 3e-3},
                "schedule": {"kind": "cosine", "warmup_steps": 20},
                # Without the compiler and in float32 (every processor multiplies it at full speed): the steps of so
                # small a model take less time than compiling them.
                "precision": {"dtype": "fp32"},
                "compile": False,
                "log": {"progress": False},
            }
        )
    )
    export_hf(scratch / "tiny" / "final", folder, family="llama", dtype="bfloat16")
    wrapped.save_pretrained(folder)
    return folder


def train_tokenizer(files: list[Path]) -> Any:
    """Train a byte-level BPE tokenizer: any text round-trips, digits are single tokens."""
    tokenizers = require("tokenizers", "hf", feature="training a tokenizer")
    transformers = require("transformers", "hf", feature="training a tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=split.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
