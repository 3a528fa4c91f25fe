"""The verbs that make one folder of another and their options; `run_conversion` does the work."""

import argparse
from collections.abc import Callable

from .parser import Verbs, verb
from .run_conversion import run_export, run_import, run_named, run_toy

VERBS: tuple[tuple[str, Callable[[argparse.Namespace], int], str, tuple[str, str], str, str, str], ...] = (
    (
        "import",
        run_import,
        "ImportOptions",
        ("HF_DIR", "OUT"),
        "Hugging Face folder to te_models folder",
        "Read a Hugging Face model folder and write it with te_models' parameter names. Every tensor\n"
        "must be expected and present; anything else is an error and nothing is written. Quantized\n"
        "weights stay quantized, number for number; what cannot is refused, or as the options say.\n"
        "HF_DIR may also be a GGUF file, read as values with its tokenizer, or what a training system wrote:\n"
        "a distributed checkpoint of torch, torchtitan, Megatron-Core or Megatron-FSDP, files of Megatron's\n"
        "ranks, a state dict of Transformer Engine's modules (.pt or safetensors); nothing is unpickled.\n"
        "--config then says which model it is of; with --run the moments of a distributed checkpoint travel,\n"
        "and te-models train RUN.toml --output-dir OUT goes on.",
        "te-models import ./SmolLM2-135M ./smollm2",
    ),
    (
        "export",
        run_export,
        "ExportOptions",
        ("DIR", "HF_OUT"),
        "te_models folder to Hugging Face folder",
        "Write a folder that transformers loads with from_pretrained. Quantized weights stay quantized,\n"
        "and --recipe quantizes plain ones. DIR may also be a training checkpoint of ours, of any layout\n"
        "over ranks, which one process reads, a tensor at a time. --to gguf writes one file for llama.cpp;\n"
        "--to with a training system writes its checkpoint: a distributed one, of a training checkpoint\n"
        "with AdamW's moments; files of Megatron's ranks; or a state dict of Transformer Engine's modules.",
        "te-models export ./moe ./moe-hf --family mixtral",
    ),
    (
        "relayout",
        run_named,
        "RelayoutOptions",
        ("DIR", "OUT"),
        "experts as one tensor or one each",
        "Rewrite the experts' weights between the grouped and the per-GEMM layout, bit for bit;\n"
        "quantized weights stay quantized.",
        "te-models relayout ./moe ./moe-per-gemm --layout per-gemm",
    ),
    (
        "reshard",
        run_named,
        "ShardedOptions",
        ("IN", "OUT"),
        "the same tensors in files of another size",
        "Distribute the tensors of a model folder of either kind over other files: the same tensors, bit\n"
        "for bit, in as few files of --max-shard-size as hold them.",
        "te-models reshard ./moe ./moe-small-files --max-shard-size 500MB",
    ),
    (
        "merge-shards",
        run_named,
        "ConversionOptions",
        ("IN", "OUT"),
        "the same tensors in one file",
        "Merge the weight files of a model folder of either kind: the same tensors, bit for bit, in one\n"
        "file (or several of 10,000 tensors, the most that a file may have). reshard splits them again.",
        "te-models merge-shards ./moe ./moe-one-file",
    ),
    (
        "quantize",
        run_named,
        "QuantizeOptions",
        ("DIR", "OUT"),
        "store the linear weights in FP8",
        "Store the weights of linear layers as a recipe quantizes them: the numbers that its GEMMs\n"
        "compute from bf16 weights. current and block halve the files; mxfp8 does not, because it\n"
        "scales the rows and the columns separately and keeps both.",
        "te-models quantize ./moe ./moe-fp8 --recipe mxfp8",
    ),
    (
        "dequantize",
        run_named,
        "DequantizeOptions",
        ("DIR", "OUT"),
        "quantized weights as plain numbers",
        "Write the values that the quantized weights of a folder stand for.",
        "te-models dequantize ./moe-fp8 ./moe-bf16",
    ),
    (
        "upcycle",
        run_named,
        "UpcycleOptions",
        ("DIR", "OUT"),
        "dense model to mixture of experts",
        "Copy the MLP of each layer into experts and add a router. With the top-k weights\n"
        "normalised, the new model computes what the dense one did.",
        "te-models upcycle ./smollm2 ./smollm2-moe --experts 4 --topk 2",
    ),
    (
        "toy",
        run_toy,
        "ToyOptions",
        ("MODEL", "OUT"),
        "a few layers and experts of a model, for tests",
        "Write a Hugging Face folder with the first layers of another and their first experts, byte for\n"
        "byte: a small model with the real names, dtypes, forms and values, quantized ones included.\n"
        "Layers that predict further tokens are kept, with so many experts. Where MODEL is the name of\n"
        "a published model (te-models models) and no folder, the layers are narrower and random.",
        "te-models toy ./Qwen3-30B-A3B ./toy --layers 2 --experts 4",
    ),
)
"""Name, what runs it, its options, what its folders are called, a summary, a description and an example of each."""


def add(verbs: Verbs) -> None:
    """Add the verbs."""
    for name, run, options, folders, summary, description, example in VERBS:
        parser = verb(verbs, name, run, summary, description, example)
        parser.add_argument("source", metavar=folders[0], help="the folder to read")
        parser.add_argument("out", metavar=folders[1], help="the folder to write")
        if verbs.asked in (None, name):  # the classes take a part of a second to import
            from te_models.checkpoints.tools import options as parts

            from .options import add_options

            add_options(parser, getattr(parts, options))
