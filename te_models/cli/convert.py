"""The verbs that make one folder of another and their options; `run_conversion` does the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from .parser import Verbs, count, dtype, integer, number, verb
from .run_conversion import (
    run_dequantize,
    run_export,
    run_import,
    run_quantize,
    run_relayout,
    run_reshard,
    run_toy,
    run_upcycle,
)

LAYOUTS = ("grouped", "per-gemm")
DTYPES = ("float32", "bfloat16", "float16")
SYSTEMS = ("torchtitan", "torch_dist", "fsdp_dtensor", "te_models", "transformers", "megatron", "transformer_engine")
"""Whose names checkpoints have: distributed ones, where torch_dist is Megatron-Core and fsdp_dtensor Megatron-FSDP;
those of Megatron's ranks; state dicts of Transformer Engine's modules."""
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
"""Those that a word says; `te_models.layers` knows them, but imports torch."""
STORED = (*RECIPES, "int4", "int8", "mxfp4")
"""What weights are stored as: by a recipe, or as integers, in which no GEMM computes."""

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")


def add(verbs: Verbs) -> None:
    """Add the verbs."""
    parser = _converter(
        verbs,
        "import",
        run_import,
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
    )
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="grouped", help="experts as one tensor, or one each (grouped)"
    )
    parser.add_argument("--dtype", type=dtype, choices=DTYPES, help="convert the weights (default: keep)")
    parser.add_argument("--storage", help="form of quantized weights, e.g. mxfp8 (default: the format's own)")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="quantize anew what no exact form holds, and columnwise copies"
    )
    parser.add_argument("--dequantize", action="store_true", help="store the values of quantized weights")
    parser.add_argument(
        "--mtp", action="store_true", help="layers that predict further tokens become parameters (default: kept unused)"
    )

    parser.add_argument(
        "--config", metavar="FILE", help="of a training system's checkpoint: the model's config.json, or folder"
    )
    parser.add_argument(
        "--run",
        dest="run_file",
        metavar="RUN.toml",
        help="of one with AdamW: make OUT the folder of a run that goes on",
    )
    parser.add_argument(
        "--step", type=count, metavar="N", help="with --run: how many steps are done (default: as counted)"
    )
    parser.add_argument(
        "--qkv-not-interleaved",
        action="store_true",
        help="Transformer Engine's modules had qkv_weight_interleaved=False",
    )
    parser.add_argument("--from", dest="system", choices=SYSTEMS, help="what wrote it (default: told by its names)")

    parser = _converter(
        verbs,
        "export",
        run_export,
        ("DIR", "HF_OUT"),
        "te_models folder to Hugging Face folder",
        "Write a folder that transformers loads with from_pretrained. Quantized weights stay quantized.\n"
        "DIR may also be a training checkpoint of ours. --to gguf writes one file for llama.cpp; --to with a\n"
        "training system writes its checkpoint: a distributed one, of a training checkpoint with AdamW's\n"
        "moments; files of Megatron's ranks; or a state dict of Transformer Engine's modules.",
        "te-models export ./moe ./moe-hf --family mixtral",
    )
    parser.add_argument(
        "--to",
        choices=("hf", "gguf", *SYSTEMS),
        default="hf",
        help="a folder, a GGUF file, or the checkpoint of a training system (hf)",
    )
    parser.add_argument(
        "--layout", choices=LAYOUTS, help="experts in --to transformer_engine: one weight each, or one (per-gemm)"
    )
    for name, what in (
        ("tensor", "tensor parallel ranks"),
        ("pipeline", "pipeline stages"),
        ("expert", "ranks that share the experts"),
    ):
        parser.add_argument(f"--{name}-model-parallel-size", type=count, metavar="N", help=f"--to megatron: {what} (1)")
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=count,
        metavar="N",
        help="--to megatron: rows of the vocabulary's tables are a multiple of N x tensor parallel ranks (128)",
    )
    parser.add_argument(
        "--local-modules",
        dest="local",
        action="store_true",
        help="--to megatron: names of its own modules, not Transformer Engine's",
    )
    parser.add_argument(
        "--adapter", metavar="ADAPTER", help="write this adapter alone, with the names of transformers' model, for peft"
    )
    parser.add_argument(
        "--base-model", metavar="NAME", help="with --adapter: transformers' model, folder or hub id (default: DIR)"
    )
    parser.add_argument("--type", choices=GGUF_TYPES, help="of the matrices of a GGUF file (f16)")
    parser.add_argument("--family", help="architecture to write (default: the one that fits the configuration)")
    parser.add_argument("--format", help="format of quantized weights, e.g. fp8 (default: as in the original)")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="quantize anew what the format cannot take over"
    )
    parser.add_argument("--dequantize", action="store_true", help="write the values of quantized weights")
    parser.add_argument("--form", help="kind of file to write, e.g. fused experts (default: as in the original)")
    parser.add_argument("--dtype", type=dtype, choices=DTYPES, help="convert the weights (default: keep)")

    parser = _converter(
        verbs,
        "relayout",
        run_relayout,
        ("DIR", "OUT"),
        "experts as one tensor or one each",
        "Rewrite the experts' weights between the grouped and the per-GEMM layout, bit for bit;\n"
        "quantized weights stay quantized.",
        "te-models relayout ./moe ./moe-per-gemm --layout per-gemm",
    )
    parser.add_argument("--layout", choices=LAYOUTS, required=True, help="the layout to write")

    _converter(
        verbs,
        "reshard",
        run_reshard,
        ("IN", "OUT"),
        "the same tensors in files of another size",
        "Distribute the tensors of a model folder of either kind over other files: the same tensors, bit\n"
        "for bit, in as few files of --max-shard-size as hold them.",
        "te-models reshard ./moe ./moe-small-files --max-shard-size 500MB",
    )

    _converter(
        verbs,
        "merge-shards",
        run_reshard,
        ("IN", "OUT"),
        "the same tensors in one file",
        "Merge the weight files of a model folder of either kind: the same tensors, bit for bit, in one\n"
        "file (or several of 10,000 tensors, the most that a file may have). reshard splits them again.",
        "te-models merge-shards ./moe ./moe-one-file",
        shard_size=False,
    )

    parser = _converter(
        verbs,
        "quantize",
        run_quantize,
        ("DIR", "OUT"),
        "store the linear weights in FP8",
        "Store the weights of linear layers as a recipe quantizes them: the numbers that its GEMMs\n"
        "compute from bf16 weights. current and block halve the files; mxfp8 does not, because it\n"
        "scales the rows and the columns separately and keeps both.",
        "te-models quantize ./moe ./moe-fp8 --recipe mxfp8",
    )
    parser.add_argument(
        "--recipe",
        choices=STORED,
        required=True,
        metavar="RECIPE",
        help="delayed, current, block, mxfp8 or nvfp4; int4, int8 or mxfp4, which no run computes in",
    )

    parser = _converter(
        verbs,
        "dequantize",
        run_dequantize,
        ("DIR", "OUT"),
        "quantized weights as plain numbers",
        "Write the values that the quantized weights of a folder stand for.",
        "te-models dequantize ./moe-fp8 ./moe-bf16",
    )
    parser.add_argument("--dtype", type=dtype, choices=DTYPES, help="of the weights (default: what they were before)")

    parser = _converter(
        verbs,
        "upcycle",
        run_upcycle,
        ("DIR", "OUT"),
        "dense model to mixture of experts",
        "Copy the MLP of each layer into experts and add a router. With the top-k weights\n"
        "normalised, the new model computes what the dense one did.",
        "te-models upcycle ./smollm2 ./smollm2-moe --experts 4 --topk 2",
    )
    parser.add_argument("--experts", type=count, required=True, metavar="E", help="experts in each layer")
    parser.add_argument("--topk", type=count, required=True, metavar="K", help="experts that each token uses")
    parser.add_argument("--layers", type=integer, nargs="+", metavar="I", help="layers that get experts (default: all)")
    parser.add_argument(
        "--noise-std", type=number, default=0.0, metavar="S", help="noise added to each expert (0: none)"
    )
    parser.add_argument("--seed", type=integer, default=0, help="seed of the router and the noise (0)")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="grouped", help="experts as one tensor, or one each (grouped)"
    )

    parser = _converter(
        verbs,
        "toy",
        run_toy,
        ("MODEL", "OUT"),
        "a few layers and experts of a model, for tests",
        "Write a Hugging Face folder with the first layers of another and their first experts, byte for\n"
        "byte: a small model with the real names, dtypes, forms and values, quantized ones included.\n"
        "Layers that predict further tokens are kept, with so many experts. Where MODEL is the name of\n"
        "a published model (te-models models) and no folder, the layers are narrower and random.",
        "te-models toy ./Qwen3-30B-A3B ./toy --layers 2 --experts 4",
    )
    parser.add_argument("--layers", type=count, metavar="N", help="layers to keep (2)")
    parser.add_argument("--experts", type=integer, metavar="E", help="experts to keep in each layer (default: all)")


def _converter(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int],
    folders: tuple[str, str],
    summary: str,
    description: str,
    example: str,
    *,
    shard_size: bool = True,
) -> argparse.ArgumentParser:
    parser = verb(verbs, name, run, summary, description, example)
    parser.add_argument("source", metavar=folders[0], help="the folder to read")
    parser.add_argument("out", metavar=folders[1], help="the folder to write")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    parser.add_argument("--force", action="store_true", help="replace an existing model folder at the output")
    parser.add_argument("--no-verify", action="store_true", help="do not check what is read against manifest.json")
    parser.add_argument(
        "--file-digests", action="store_true", help="list the weight files' digests that sha256sum prints"
    )
    if shard_size:
        parser.add_argument(
            "--max-shard-size", metavar="SIZE", type=_size, default="5GB", help="of a weight file, e.g. 500MB (5GB)"
        )
    else:
        parser.set_defaults(max_shard_size=sys.maxsize)
    return parser


def _size(text: str) -> int:
    from te_models.checkpoints.write.shards import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
