"""Quantized Hugging Face folders, made and decoded plainly: tables and repeated scales, float64, no te_models.

A folder starts as a tiny model that transformers saved. The weights that a case chooses get random codes and random
scales, so every code occurs; what they stand for is computed here and saved as a plain folder, the reference."""

import json
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints.hf_cases import stored, transformers
from tests.checkpoints.integer_cases import AWQ_CONFIG, GPTQ_CONFIG, awq, by_name, gptq, group_of, mixed, packed

Tensors = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
_MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LATENT = (
    {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    | {"head_dim": 64, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1}
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", _MOE),
    "qwen3_moe-ragged": ("Qwen3MoeConfig", _MOE | {"moe_intermediate_size": 96}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "deepseek_v3-ragged": ("DeepseekV3Config", _LATENT | {"moe_intermediate_size": 96}),
    "llama4": ("Llama4TextConfig", {"intermediate_size": 96, "intermediate_size_mlp": 256, "num_local_experts": 3}),
    "hy_v3": (
        "HYV3Config",
        {"intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        | {"num_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96}),
}


def e4m3_table() -> list[float]:
    """Return the value of every E4M3 code: sign, four bits of exponent (bias 7), three of mantissa; 0x7f is NaN."""
    values = []
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        value = float("nan") if code & 127 == 127 else value
        values.append(-value if code > 127 else value)
    return values


E4M3 = torch.tensor(e4m3_table(), dtype=torch.float64)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def decode_fp8(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of E4M3 numbers in float64."""
    return E4M3[codes.view(torch.uint8).long()]


def decode_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the values [..., 2 n] of bytes [..., n], the even one from the low half, in float64."""
    values = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.float64)
    values[..., 0::2], values[..., 1::2] = E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]
    return values


def spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of every element of [..., rows, columns]: each as often as its block has rows and columns, in
    float64."""
    repeated = scales.double().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return repeated[..., : shape[-2], : shape[-1]]


def random_fp8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return random E4M3 numbers, every one but NaN."""
    codes = torch.randint(0, 254, shape, generator=generator)
    return torch.where(codes > 126, codes + 1, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def random_bytes(shape: tuple[int, ...], generator: torch.Generator, low: int = 0, high: int = 256) -> torch.Tensor:
    """Return random bytes low .. high - 1."""
    return torch.randint(low, high, shape, generator=generator).to(torch.uint8)


Encoder = Callable[[str, torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
"""(name, the plain weight, generator) -> the tensors stored instead, and the values [..., out, in] in float64."""


def fp8_block(scale_dtype: torch.dtype = torch.float32, pow2: bool = False, suffix: str = "_scale_inv") -> Encoder:
    """Return what makes 128x128 blocks."""

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        data = random_fp8(tuple(weight.shape), generator)
        grid = tuple(-(-n // 128) for n in weight.shape)
        scales = torch.rand(grid, generator=generator) * 4e-4 + 1e-4
        if pow2:
            scales = 2.0 ** torch.randint(-14, -10, grid, generator=generator).float()
        scales = scales.to(scale_dtype)
        values = decode_fp8(data) * spread(scales, (128, 128), tuple(weight.shape))
        return {name: data, name + suffix: scales}, values

    return encode


def shaped(encode: Encoder, reshape: Callable[[torch.Tensor], torch.Tensor]) -> Encoder:
    """Return what stores the scales of another encoder in another shape."""

    def encode_and_reshape(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        tensors, values = encode(name, weight, generator)
        return tensors | {f"{name}_scale": reshape(tensors[f"{name}_scale"])}, values

    return encode_and_reshape


def shared(name: str) -> torch.Generator:
    """Return a generator that is the same for projections that a model joins: q, k, v and gate, up."""
    key = name
    for joined in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")):
        for part in joined:
            key = key.replace(f".{part}.", f".{joined[0]}.")
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


def module_of(name: str) -> str:
    """Return the module of a weight."""
    return name.removesuffix(".weight")


def mxfp4_blocks(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """gpt-oss: the plain weight is [E, in, out], blocks are [E, out, in / 32, 16]."""
    experts, columns, rows = weight.shape
    packed = random_bytes((experts, rows, columns // 2), generator)
    scales = random_bytes((experts, rows, columns // 32), generator, 100, 123)
    values = decode_fp4(packed) * spread(2.0 ** (scales.double() - 127), (1, 32), (experts, rows, columns))
    blocks = packed.view(experts, rows, columns // 32, 16)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, values.mT


def per_tensor(
    one: bool,
    dtype: torch.dtype = torch.float32,
    *,
    suffix: str = "_scale",
    activation: str = "input_scale",
    joined: bool = True,
) -> Encoder:
    """Return what makes FP8 with one scale, of shape [1] or []; joined: projections that a model joins share it."""

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        data = random_fp8(tuple(weight.shape), generator)
        scale = torch.rand((1,) if one else (), generator=shared(name) if joined else generator) * 4e-4 + 1e-4
        scale = scale.to(dtype)
        tensors = {name: data, name + suffix: scale, f"{module_of(name)}.{activation}": scale * 7}
        return tensors, decode_fp8(data) * scale.double()

    return encode


def per_channel(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """FP8 with a bfloat16 scale per row."""
    data = random_fp8(tuple(weight.shape), generator)
    scale = (torch.rand((weight.shape[0], 1), generator=generator) * 4e-4 + 1e-4).bfloat16()
    return {name: data, f"{name}_scale": scale}, decode_fp8(data) * scale.double()


def nvfp4(data: str, whole: str, divides: bool, activation: str) -> Encoder:
    """Return what makes NVFP4: names of data and of the one number per matrix, which multiplies or divides."""

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        packed = random_bytes((rows, columns // 2), generator)
        scales = random_bytes((rows, columns // 16), generator, 0, 127).view(torch.float8_e4m3fn)
        amax = torch.rand((1,) if divides else (), generator=shared(name)) + 0.5
        number = 2688 / amax if divides else amax / 2688
        factor = 1 / number.double() if divides else number.double()
        values = decode_fp4(packed) * spread(decode_fp8(scales), (1, 16), (rows, columns)) * factor
        tensors = {name + data: packed, f"{name}_scale": scales, name + whole: number}
        return tensors | {f"{module_of(name)}.{activation}": number * 3}, values

    return encode


def mxfp8(suffix: str, dtype: torch.dtype = torch.uint8) -> Encoder:
    """Return what makes E4M3 with a scale byte per 32."""

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        data = random_fp8((rows, columns), generator)
        scales = random_bytes((rows, columns // 32), generator, 112, 116)
        values = decode_fp8(data) * spread(2.0 ** (scales.double() - 127), (1, 32), (rows, columns))
        return {name: data, name + suffix: scales.view(dtype)}, values

    return encode


def mxfp4_packed(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors: [out, in / 2] and a scale byte per 32."""
    rows, columns = weight.shape
    packed = random_bytes((rows, columns // 2), generator)
    scales = random_bytes((rows, columns // 32), generator, 118, 123)
    values = decode_fp4(packed) * spread(2.0 ** (scales.double() - 127), (1, 32), (rows, columns))
    return {f"{name}_packed": packed, f"{name}_scale": scales}, values


def fp4_experts(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """DeepSeek-V4: [out, in / 2] as signed bytes and a power of two per 32."""
    tensors, values = mxfp4_packed(name, weight, generator)
    scales = tensors[f"{name}_scale"].view(torch.float8_e8m0fnu)
    return {name: tensors[f"{name}_packed"].view(torch.int8), f"{name}_scale_inv": scales}, values


def with_stacks(encode: Encoder) -> Encoder:
    """Return what also makes stacks of experts as ModelOpt has them: [E, in, out], packed and scaled along `in`."""

    def encode_any(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        if weight.dim() == 2:
            return encode(name, weight, generator)
        experts = [encode("x.weight", matrix.mT, generator) for matrix in weight]  # one name: they share their number
        tensors: Tensors = {}
        for key, first in experts[0][0].items():
            parts = [tensors_of[key] for tensors_of, _ in experts]
            stack = first if first.dim() < 2 else torch.stack([p.view(torch.uint8) for p in parts]).view(first.dtype).mT
            tensors[name if key == "x.weight" else f"{name}_{key.removeprefix('x.')}"] = stack
        return tensors, torch.stack([values for _, values in experts]).mT

    return encode_any


def linear_or_stack(name: str) -> bool:
    """Whether a stored weight is one of a linear layer, or a stack of them."""
    return name.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj"))


@dataclass(frozen=True)
class Case:
    """One kind of folder: the model, which stored weights are quantized, how, and what the folder says about it."""

    model: str
    encode: Encoder
    config: dict[str, Any] | None = None
    separate: dict[str, Any] | None = None
    chosen: Callable[[str], bool] = field(default=lambda name: name.endswith("_proj.weight") or ".kv_a_proj" in name)


FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
STATIC_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "weight_block_size": None,
    "modules_to_not_convert": ["lm_head"],
}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return what compressed-tensors writes to config.json."""
    group = {
        "targets": ["Linear"],
        "weights": {"type": "float", "symmetric": True} | weights,
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def modelopt(algorithm: str, **fields: Any) -> dict[str, Any]:
    """Return what ModelOpt writes to hf_quant_config.json."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]} | fields
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}


_NVFP4_OPT = nvfp4("", "_scale_2", False, "input_scale")
V2 = {"bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"}
_LAYERS = {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(2)}
_ATTENTION = {f"model.layers.{i}.self_attn.{x}_proj": {"quant_algo": "FP8"} for i in range(2) for x in "qkvo"}
_MIXED_OPT = modelopt("MIXED_PRECISION", quantized_layers=_LAYERS | _ATTENTION)
_HY_LAYERS = {
    **{f"model.layers.{i}.self_attn.{x}_proj": {"quant_algo": "FP8"} for i in range(2) for x in "qkvo"},
    **{f"model.layers.1.mlp.shared_mlp.{x}_proj": {"quant_algo": "FP8"} for x in ("gate", "up", "down")},
    **{
        f"model.layers.1.mlp.experts.{e}.{x}_proj": {"quant_algo": "W4A8_NVFP4_FP8", "group_size": 16}
        for e in range(3)
        for x in ("gate", "up", "down")
    },
}
_HY_GROUPS = {
    f"group_{i}": {
        "weights": {"dynamic": False, "num_bits": bits, "type": "float", **size},
        "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        "targets": sorted(name for name, its in _HY_LAYERS.items() if ("group_size" in its) == bool(size)),
    }
    for i, (bits, size) in enumerate([(8, {}), (4, {"group_size": 16})])
}
_HY_V3 = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "ignore": ["lm_head"],
    "config_groups": _HY_GROUPS,
}


def _of_hy(name: str) -> bool:
    return name.removesuffix(".weight") in _HY_LAYERS


_NVFP4_CT = nvfp4("_packed", "_global_scale", True, "input_global_scale")
CASES: dict[str, Case] = {
    "fp8-dense": Case("qwen3", fp8_block(), FP8_CONFIG),
    "fp8-bf16-scales": Case("qwen3", fp8_block(torch.bfloat16), FP8_CONFIG),
    "fp8-ue8m0": Case("qwen3_moe", fp8_block(pow2=True), FP8_CONFIG | {"scale_fmt": "ue8m0"}),
    "fp8-moe": Case("qwen3_moe", fp8_block(), FP8_CONFIG),
    "fp8-by-torch-s-name": Case(  # the declaration of MiniMax-M2
        "qwen3_moe",
        fp8_block(),
        FP8_CONFIG | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    ),
    "fp8-latent": Case("deepseek_v3", fp8_block(), FP8_CONFIG),
    "fp8-per-tensor": Case(
        "qwen3_moe", per_tensor(False, suffix="_scale_inv", activation="activation_scale"), STATIC_CONFIG
    ),
    "mxfp4-gpt-oss": Case(
        "gpt_oss",
        mxfp4_blocks,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        chosen=lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")),
    ),
    "mxfp8": Case("qwen3", mxfp8("_scale_inv"), {"quant_method": "mxfp8"}),
    "modelopt-fp8": Case("qwen3_moe", per_tensor(False), separate=modelopt("FP8")),
    "modelopt-fp8-in-config": Case("qwen3", per_tensor(False), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-nvfp4": Case("qwen3_moe", _NVFP4_OPT, separate=modelopt("NVFP4", group_size=16)),
    "modelopt-nvfp4-latent": Case("deepseek_v3", _NVFP4_OPT, separate=modelopt("NVFP4", group_size=16)),
    "modelopt-fp8-pb-wo": Case(
        "qwen3_moe", shaped(fp8_block(suffix="_scale"), lambda s: s[:, None, :, None]), separate=modelopt("fp8_pb_wo")
    ),
    "modelopt-fp8-stacks": Case(
        "llama4", with_stacks(per_tensor(False)), separate=modelopt("FP8"), chosen=linear_or_stack
    ),
    "modelopt-nvfp4-stacks": Case(
        "gpt_oss", with_stacks(_NVFP4_OPT), separate=modelopt("NVFP4", group_size=16), chosen=linear_or_stack
    ),
    "modelopt-mxfp8": Case("qwen3_moe", mxfp8("_scale"), separate=modelopt("MXFP8", group_size=32)),
    "nvfp4-pack-quantized": Case("qwen3_moe", _NVFP4_CT, compressed("nvfp4-pack-quantized", num_bits=4)),
    "mxfp8-quantized": Case("qwen3_moe-ragged", mxfp8("_scale"), compressed("mxfp8-quantized", num_bits=8)),
    "mxfp8-quantized-e8m0": Case(
        "qwen3", mxfp8("_scale", torch.float8_e8m0fnu), compressed("mxfp8-quantized", num_bits=8)
    ),
    "mxfp4-pack-quantized": Case("qwen3_moe", mxfp4_packed, compressed("mxfp4-pack-quantized", num_bits=4)),
    "float-quantized-tensor": Case(
        "qwen3", per_tensor(True), compressed("float-quantized", num_bits=8, strategy="tensor")
    ),
    "float-quantized-block": Case(
        "qwen3_moe",
        fp8_block(suffix="_scale"),
        compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128]),
    ),
    "pack-quantized-int4": Case(  # as Kimi-K2-Thinking
        "deepseek_v3", packed(4, 32, shape=torch.int32), compressed("pack-quantized", **group_of(4, 32))
    ),
    "pack-quantized-int4-zeros": Case(
        "qwen3_moe",
        packed(4, 64, zero_points=True, dtype=torch.float16),
        compressed("pack-quantized", **group_of(4, 64, zero_points=True)),
    ),
    "pack-quantized-int8-channel": Case(
        "qwen3", packed(8, None, dtype=torch.float32), compressed("pack-quantized", **group_of(8, None))
    ),
    "pack-quantized-int8-zeros": Case(
        "qwen3_moe-ragged",
        packed(8, 32, zero_points=True),
        compressed("pack-quantized", **group_of(8, 32, zero_points=True)),
    ),
    "mixed-precision-quantized": Case(
        "qwen3_moe",
        by_name(("self_attn", fp8_block(suffix="_scale")), ("down_proj", packed(8, 64)), ("", packed(4, 32))),
        mixed(
            {
                "group_0": (["Linear"], "pack-quantized", group_of(4, 32)),
                "group_1": (["re:.*down_proj$"], "pack-quantized", group_of(8, 64)),
                "group_2": (
                    ["re:.*self_attn.*"],
                    "float-quantized",
                    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
                ),
            }
        ),
    ),
    "modelopt-mixed": Case("qwen3_moe", by_name(("experts", _NVFP4_OPT), ("", per_tensor(False))), separate=_MIXED_OPT),
    "modelopt-mixed-hy-v3": Case(  # NVFP4 experts, other layers in FP8 or not quantized
        "hy_v3",
        by_name((".experts.", _NVFP4_OPT), ("", per_tensor(False))),
        _HY_V3 | {"quantized_layers": _HY_LAYERS},
        separate=modelopt("MIXED_PRECISION", quantized_layers=_HY_LAYERS),
        chosen=_of_hy,
    ),
    "modelopt-mixed-groups": Case(
        "hy_v3", by_name((".experts.", _NVFP4_OPT), ("", per_tensor(False))), _HY_V3, chosen=_of_hy
    ),
    "modelopt-nvfp4-fp8": Case("qwen3_moe", _NVFP4_OPT, separate=modelopt("W4A8_NVFP4_FP8", group_size=16)),
    "gptq": Case("qwen3_moe", gptq(4, 64), GPTQ_CONFIG),
    "gptq-int8-v2": Case("qwen3", gptq(8, 32, less=0), GPTQ_CONFIG | V2),
    "awq": Case("qwen3_moe", awq(64), AWQ_CONFIG),
    "fp8-fp4-experts": Case(  # the experts of DeepSeek-V4
        "deepseek_v3",
        by_name((".experts.", fp4_experts), ("", fp8_block(torch.float8_e8m0fnu, pow2=True))),
        FP8_CONFIG | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    ),
}
"""Folders that are taken over number for number."""

MODELOPT_CHANNEL = Case(
    "qwen3_moe", shaped(per_channel, lambda s: s[:, 0].float()), separate=modelopt("FP8_PER_CHANNEL_PER_TOKEN")
)
CHANNEL = Case("qwen3_moe", per_channel, compressed("float-quantized", num_bits=8, strategy="channel"))


_MADE: dict[tuple[int, torch.dtype], tuple[Case, tempfile.TemporaryDirectory]] = {}
"""Folders that were made before, each with its case, so that no other one gets its id."""


def make(case: Case, root: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """Return (the quantized folder, the plain folder with the values it stands for): copies, made once in a process."""
    key = id(case), dtype
    if key not in _MADE:
        _MADE[key] = case, tempfile.TemporaryDirectory(prefix="quantized-")
        _make(case, Path(_MADE[key][1].name), dtype)
    source = Path(_MADE[key][1].name)
    for name in ("quantized", "reference"):
        shutil.copytree(source / name, root / name)
    return root / "quantized", root / "reference"


def _make(case: Case, root: Path, dtype: torch.dtype) -> None:
    config_class, options = MODELS[case.model]
    config = getattr(transformers, config_class)(**(SIZES | options))
    generator = torch.Generator().manual_seed(11)
    quantized, reference = root / "quantized", root / "reference"
    torch.manual_seed(5)
    with warnings.catch_warnings(action="ignore"):
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(reference)
    shutil.copytree(reference, quantized)
    files: Tensors = {}
    plain: Tensors = {}
    for name, tensor in stored(reference).items():
        if not case.chosen(name):
            files[name] = plain[name] = tensor
            continue
        replaced, values = case.encode(name, tensor, generator)
        files |= replaced
        plain[name] = values.float().to(dtype)
    save_file({n: t.contiguous() for n, t in files.items()}, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file({n: t.contiguous() for n, t in plain.items()}, reference / "model.safetensors", metadata={"format": "pt"})
    if case.config is not None:
        edit_config(quantized, quantization_config=case.config)
    if case.separate is not None:
        (quantized / "hf_quant_config.json").write_text(json.dumps(case.separate))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(folder: Path) -> torch.Tensor:
    """Return what transformers computes from a plain folder, in float32."""
    with warnings.catch_warnings(action="ignore"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(20)[None] % 61).logits
