"""Folders that must be refused: what is done to a good folder, and what the one sentence about it says."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
QKV = "model.layers.0.self_attn.q_proj.weight"
Edit = Callable[[Path], Any]


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})

    return edit


def rename(old: str, new: str) -> Edit:
    return edit_tensors(lambda t: t.update({new: t.pop(old)}))


def edit_config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in values.items() if v != "DROP"}))

    return edit


def write(name: str, content: str | bytes) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return edit


def edit_raw(change: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))


def as_pickle(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(os.getcwd))


def link_out(folder: Path) -> None:
    shutil.move(folder / SINGLE, folder.parent / "elsewhere.safetensors")
    (folder / SINGLE).symlink_to("../elsewhere.safetensors")


def link_config_out(folder: Path) -> None:
    shutil.move(folder / CONFIG, folder.parent / "elsewhere.json")
    (folder / CONFIG).symlink_to(folder.parent / "elsewhere.json")


def drop_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def config_is_a_folder(folder: Path) -> None:
    drop_config(folder)
    (folder / CONFIG).mkdir()


def fifo(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


def link_to_itself(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(SINGLE)


def both_forms(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {QKV: SINGLE}}))


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Edit:
    """Change the header of the file and nothing else: the data stays where it was."""

    def edit(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        return pack(json.dumps(header).encode(), raw[8 + length :])

    return edit_raw(edit)


def pack(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def put_header(make: Callable[[], bytes]) -> Edit:
    return edit_raw(lambda raw: pack(make()))


def many_tensors(count: int, first: str = "F32", last: str = "F32") -> bytes:
    """Return a header of so many empty tensors; the dtypes of the first and the last may be others."""
    dtypes = [first, *["F32"] * (count - 2), last]
    entry = '{"dtype":"%s","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join(f'"{i}":{entry % dtype}' for i, dtype in enumerate(dtypes)) + "}").encode()


def weights_are_a_folder(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
WIDE = b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"

HF_DEFECTS: dict[str, tuple[Edit, str]] = {
    "missing tensor": (edit_tensors(lambda t: t.pop(QKV)), f"missing: '{QKV}'"),
    "extra tensor": (edit_tensors(lambda t: t.update(extra=torch.ones(3))), "not part of this model: 'extra'"),
    "renamed tensor": (
        rename(QKV, "model.layers.0.self_attn.query.weight"),
        f"renamed: .*query.weight .expected {QKV}",
    ),
    "swapped layers missing": (rename("model.norm.weight", "model.layers.7.norm.weight"), "renamed"),
    "mis-shaped tensor": (
        edit_tensors(lambda t: t.update({QKV: t[QKV].T.contiguous()[:, :-1].contiguous()})),
        rf"'{QKV}' has shape \[32, 31\] where \[32, 32\] is expected",
    ),
    "extra dimension": (edit_tensors(lambda t: t.update({QKV: t[QKV][None].clone()})), r"has shape \[1, 32, 32\]"),
    "integer tensor": (edit_tensors(lambda t: t.update({QKV: t[QKV].to(torch.int64)})), f"'{QKV}' has dtype I64"),
    "fp8 tensor": (edit_tensors(lambda t: t.update({QKV: t[QKV].to(torch.float8_e4m3fn)})), "has dtype F8_E4M3"),
    "one float32 tensor": (
        edit_tensors(lambda t: t.update({QKV: t[QKV].float()})),
        rf"would be joined from different dtypes, '{QKV} \(F32\)', .*; choose one with dtype",
    ),
    "layer too many": (edit_config(num_hidden_layers=1), "not part of this model: 'model.layers.1"),
    "layer too few": (edit_config(num_hidden_layers=3), "missing: 'model.layers.2"),
    "tied but different": (
        edit_config(tie_word_embeddings=True),
        "tie_word_embeddings is true, but 'lm_head.weight' differs",
    ),
    "wrong family": (edit_config(model_type="qwen3", head_dim=8), "missing: .*(q_norm|k_norm)"),
    "wrong family, biases": (edit_config(model_type="qwen2"), "missing: .*bias"),
    "wrong family, experts": (edit_config(model_type="mixtral", num_local_experts=2), "missing: .*block_sparse_moe"),
    "unknown family": (
        edit_config(model_type="gpt9"),
        "model_type 'gpt9' is not supported; near: gpt2, gpt_neox, gpt_oss",
    ),
    "no family": (edit_config(model_type="DROP"), "model_type None is not supported"),
    "family not a string": (edit_config(model_type=["llama"]), "is not supported"),
    "missing field": (edit_config(hidden_size="DROP"), "config.json has no 'hidden_size'"),
    "field of another type": (edit_config(hidden_size="32"), "hidden_size = '32', which is not an integer"),
    "boolean for a number": (edit_config(num_hidden_layers=True), "num_hidden_layers = True, which is not an integer"),
    "zero heads": (edit_config(num_attention_heads=0, head_dim=None), "num_attention_heads = 0"),
    "negative size": (edit_config(vocab_size=-61), "vocab_size is -61"),
    "a thousand layers of a thousand experts": (
        edit_config(model_type="mixtral", num_hidden_layers=1000, num_local_experts=1000),
        "claims 1000 experts in 1000 layers; at most 100000 in all",
    ),
    "a hundred layers of a thousand experts": (
        edit_config(model_type="mixtral", num_hidden_layers=100, num_local_experts=1000),
        r"claims 100 layers, which have 4 tensors each at least, and the files hold \d+",
    ),
    "a hundred thousand experts": (
        edit_config(model_type="mixtral", num_hidden_layers=2, num_local_experts=50_000),
        "missing: 'model.layers.0",
    ),
    "two thousand layers": (edit_config(num_hidden_layers=2000), "it claims 2000 layers, which have 4 tensors each"),
    "escaped metadata": (
        put_header(lambda: b'{"__metadata__":{"a":"' + rb"\u0041" * 10**7 + b'"}}'),
        "more than the 2000000 escapes allowed",
    ),
    "large metadata": (
        put_header(lambda: b'{"__metadata__":{"a":"' + b"x" * (60 << 20) + b'"}}'),
        "the __metadata__ of model.safetensors has 62914568 bytes, more than the 16777216 allowed",
    ),
    "large header of another form": (
        put_header(lambda: b'{"' + b"x" * (60 << 20) + b'": 1}'),
        "not written as is usual, and too long to be parsed otherwise",
    ),
    "wide metadata": (
        put_header(lambda: b'{"__metadata__":{"a":"' + b"x" * (15 << 20) + "😀".encode() + b'"}}'),
        "characters beyond ASCII; allowed with these: 8388608 bytes",
    ),
    "escaped configuration": (
        write(CONFIG, b'{"a": "' + rb"\u0041" * 5_000_000 + b'"}'),
        "more than the 2000000 escapes allowed",
    ),
    "wide configuration": (write(CONFIG, b'{"a": "' + b"x" * (31 << 20) + "😀".encode() + b'"}'), "beyond ASCII"),
    "long configuration": (write(CONFIG, b'{"a": "' + b"x" * (31 << 20) + b'"}'), "model_type None"),
    "billion layers": (edit_config(num_hidden_layers=10**9), "claims 1000000000 layers"),
    "quantized": (edit_config(quantization_config={"quant_method": "aqlm"}), "quantization by 'aqlm'; supported: fp8,"),
    "quantized by name only": (
        edit_config(quantization_config={"quant_method": "fp8"}),
        "declares the format fp8 and has no tensor in it",
    ),
    "soft-capping": (edit_config(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0"),
    "window in llama": (edit_config(sliding_window=4096), "sliding_window = 4096"),
    "unknown activation": (edit_config(hidden_act="xielu"), "hidden_act = 'xielu'; supported: silu"),
    "unknown rope": (edit_config(rope_parameters={"rope_type": "spiral"}), "rope type 'spiral'"),
    "unknown rope parameter": (
        edit_config(rope_scaling={"type": "linear", "factor": 2, "twist": 1}),
        "parameter 'twist'",
    ),
    "rope without factor": (edit_config(rope_parameters={"rope_type": "linear"}), "rope.factor"),
    "partial rotation": (edit_config(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "no config": (drop_config, "it has no config.json"),
    "config is a folder": (config_is_a_folder, "not a regular file"),
    "config leads out": (link_config_out, "symbolic link that leaves the folder"),
    "config not json": (write(CONFIG, "{'a': 1}"), "config.json is not valid JSON"),
    "config not utf-8": (write(CONFIG, b"\xff\xfe{}"), "config.json is not UTF-8"),
    "config a list": (write(CONFIG, "[]"), "holds a JSON list"),
    "config deep": (write(CONFIG, '{"a":' * 100_000), "nested too deeply|not valid JSON"),
    "config duplicate": (write(CONFIG, '{"model_type": "llama", "model_type": "qwen2"}'), "key 'model_type' twice"),
    "config infinite": (write(CONFIG, '{"model_type": "llama", "rms_norm_eps": Infinity}'), "contains Infinity"),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), f"no weights: neither {SINGLE}, nor {INDEX}"),
    "pickle only": (as_pickle, r"only pickled weights \('pytorch_model.bin'\), which can run code .* safetensors"),
    "weights lead out": (link_out, "symbolic link that leaves the folder"),
    "weights are a pipe": (fifo, "not a regular file"),
    "weights are a loop": (link_to_itself, "symbolic link to itself|does not exist"),
    "single and index": (both_forms, "holds both"),
    "truncated": (edit_raw(lambda raw: raw[:-10]), "model.safetensors is truncated"),
    "truncated header": (edit_raw(lambda raw: raw[:100]), "truncated: its header ends"),
    "zero length": (edit_raw(lambda raw: b""), "truncated: 0 bytes"),
    "trailing bytes": (edit_raw(lambda raw: raw + b"x"), "has 1 bytes after its last tensor"),
    "not safetensors": (edit_raw(lambda raw: b"PK\x03\x04" + bytes(100)), "claims a header|truncated|does not start"),
    "weights are a folder": (weights_are_a_folder, "not a regular file"),
    "oversize header": (edit_raw(lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:]), "claims a header of 1099511"),
    "overlapping offsets": (
        edit_header(lambda h: h[QKV].update(data_offsets=h["model.norm.weight"]["data_offsets"])),
        "model.safetensors: tensor .* (overlaps|leaves a hole|bytes, but)",
    ),
    "offsets beyond the file": (
        edit_header(lambda h: h[QKV].update(data_offsets=[1 << 40, (1 << 40) + 2048])),
        "leaves a hole",
    ),
    "negative offsets": (edit_header(lambda h: h[QKV].update(data_offsets=[-2048, 0])), "not a range"),
    "shape of another size": (edit_header(lambda h: h[QKV].update(shape=[32, 33])), "2048 bytes, but BF16 .* needs"),
    "huge shape": (edit_header(lambda h: h[QKV].update(shape=[1 << 62, 1 << 62])), "bytes, but BF16 .* needs"),
    "unknown dtype": (edit_header(lambda h: h[QKV].update(dtype="BF17")), "unknown dtype 'BF17'"),
    "header duplicate": (edit_raw(lambda raw: raw.replace(b"layers.1.", b"layers.0.")), "twice in one object"),
    "header deep": (put_header(lambda: DEEP), "nested too deeply"),
    "header wide": (put_header(lambda: WIDE), "holds more than the 400000 values"),
    "header of 200,000 tensors": (put_header(lambda: many_tensors(200_000)), "more than the 125000 tensors allowed"),
    "header of 125,000 strangers": (put_header(lambda: many_tensors(125_000)), "do not fit its configuration"),
    "wrong at the end": (put_header(lambda: many_tensors(125_000, last="F128")), "unknown dtype 'F128'"),
    "no usual header": (put_header(lambda: many_tensors(125_000, last="f32")), "holds more than the 400000 values"),
    "name not utf-8": (edit_raw(lambda raw: raw.replace(b"model.norm", b"model.nor\xff")), "is not UTF-8 text"),
    "name a surrogate": (edit_raw(lambda raw: raw.replace(b"model.norm", b"mo\\udc80mm")), "has an unusable name"),
    "config oversize": (lambda folder: os.truncate(folder / CONFIG, 65 << 20), "more than the 33554432 allowed"),
    "config wide": (write(CONFIG, WIDE), "holds more than the 400000 values"),
    "config huge integer": (write(CONFIG, '{"vocab_size": ' + "9" * 5000 + "}"), "config.json is not valid JSON"),
    "config out of range": (write(CONFIG, '{"rms_norm_eps": 1e999}'), "contains a number out of range"),
    "config empty": (write(CONFIG, b""), "config.json is not valid JSON"),
    "sidecar leads out": (lambda f: (f / "tokenizer.model").symlink_to("/etc/hostname"), "leaves the folder"),
}


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        values = json.loads((folder / INDEX).read_text())
        change(values)
        (folder / INDEX).write_text(json.dumps(values))

    return edit


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def point_all_to(name: str) -> Edit:
    return edit_index(lambda v: v["weight_map"].update({QKV: name}))


def duplicate_across_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: tensors[name]}, second)


def unlisted(folder: Path) -> None:
    save_file(load_file(shard(folder)) | {"stowaway": torch.ones(1)}, shard(folder))


def swap_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def shard_leads_out(folder: Path) -> None:
    target = folder.parent / "elsewhere.safetensors"
    shutil.move(shard_path := shard(folder), target)
    shard_path.symlink_to(target)


INDEX_DEFECTS: dict[str, tuple[Edit, str]] = {
    "missing shard": (lambda f: shard(f).unlink(), r"index.json names the file 'model-0.*', which does not exist"),
    "absolute path": (point_all_to("/etc/passwd"), "'/etc/passwd', which is not a plain file name"),
    "parent folder": (point_all_to("../model.safetensors"), "'../model.safetensors', which is not a plain"),
    "sub folder": (point_all_to("a/b.safetensors"), "not a plain file name"),
    "backslash": (point_all_to("..\\x.safetensors"), "not a plain file name"),
    "dot dot": (point_all_to(".."), "not a plain file name"),
    "empty name": (point_all_to(""), "not a plain file name"),
    "nul": (point_all_to("a\0b"), "not a plain file name"),
    "not a name": (edit_index(lambda v: v["weight_map"].update({QKV: 7})), "not a file name"),
    "no map": (edit_index(lambda v: v.pop("weight_map")), "has no weight_map"),
    "empty map": (edit_index(lambda v: v.update(weight_map={})), "has no weight_map"),
    "map is a list": (edit_index(lambda v: v.update(weight_map=[1])), "has no weight_map"),
    "claims an absent tensor": (
        edit_index(lambda v: v["weight_map"].update(ghost=v["weight_map"][QKV])),
        "holds 'ghost'",
    ),
    "forgets a tensor": (edit_index(lambda v: v["weight_map"].pop(QKV)), "does not list: 'model.layers.0"),
    "unlisted tensor": (unlisted, "does not list: 'stowaway'"),
    "shards swapped": (swap_shards, "and it does not"),
    "shard truncated": (lambda f: os.truncate(shard(f), shard(f).stat().st_size - 1), "is truncated"),
    "shard leads out": (shard_leads_out, "symbolic link that leaves the folder"),
    "no index, a shard missing": (lambda f: ((f / INDEX).unlink(), shard(f).unlink()), r"weight file, and .* one of"),
    "no index, a shard renamed": (
        lambda f: ((f / INDEX).unlink(), shard(f).rename(f / "x.safetensors")),
        "lacks the weight files 'model-00002-of",
    ),
    "no index, a tensor twice": (lambda f: ((f / INDEX).unlink(), duplicate_across_shards(f)), "is in two files"),
    "no index, a shard leads out": (lambda f: ((f / INDEX).unlink(), shard_leads_out(f)), "leaves the folder"),
    "index not json": (write(INDEX, "oops"), "index.json is not valid JSON"),
    "index duplicate": (write(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'), "key 'a' twice"),
    "index deep": (write(INDEX, DEEP), "nested too deeply"),
    "index wide": (write(INDEX, WIDE), "holds more than the 400000 values"),
    "index not utf-8": (write(INDEX, b'{"weight_map": {"\xff": "a"}}'), "is not UTF-8"),
    "index empty": (write(INDEX, b""), "index.json is not valid JSON"),
    "file name a surrogate": (point_all_to("\udc80.safetensors"), "not a plain file name"),
    "file name of 1000 characters": (point_all_to("x" * 1000), "not a plain file name"),
    "index names itself": (point_all_to(INDEX), "claims a header|truncated|does not start"),
    "index names the configuration": (point_all_to(CONFIG), "claims a header|truncated|does not start"),
    "index leads out": (lambda f: ((f / INDEX).unlink(), (f / INDEX).symlink_to("/etc/hostname")), "leaves the folder"),
}


TE_DEFECTS: dict[str, tuple[Edit, str]] = {
    "future version": (edit_config(format_version=2), "format_version 2; this release reads version 1"),
    "unknown layout": (edit_config(expert_layout="diagonal"), "expert layout is 'diagonal'"),
    "other layout": (edit_config(expert_layout="per-gemm"), "missing: .*linear_fc1.weight0"),
    "no layout": (edit_config(expert_layout="DROP"), "expert layout is 'missing'"),
    "unhashable layout": (edit_config(expert_layout=["grouped"]), "expert layout is"),
    "no config": (edit_config(config="DROP"), "no 'config' object"),
    "unknown config field": (edit_config(config={"flux": 1}), "ModelConfig has no field 'flux'"),
    "bad source": (edit_config(source={"family": 3, "config": {}}), "family, dtype or form is not a string"),
    "source is a list": (edit_config(source=[]), "neither null nor an object"),
    "unknown tensor": (edit_tensors(lambda t: t.update(x=torch.ones(1))), "not part of this model: 'x'"),
    "missing tensor": (edit_tensors(lambda t: t.pop("decoder.final_layernorm.weight")), "missing: 'decoder.final"),
    "integer tensor": (
        edit_tensors(lambda t: t.update({"decoder.final_layernorm.weight": torch.ones(32, dtype=torch.int32)})),
        "has dtype I32 where BF16 or F16 or F32 or F64 is expected",
    ),
    "truncated": (edit_raw(lambda raw: raw[:-1]), "is truncated"),
}


def edit_quantized(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> Edit:
    """Change the tensors and the descriptions of the quantized parameters of a folder of ours."""

    def edit(folder: Path) -> None:
        with safe_open(folder / SINGLE, "pt") as file:
            described = json.loads(file.metadata()["te_models"])
        tensors = load_file(folder / SINGLE)
        change(tensors, described["tensors"])
        save_file(tensors, folder / SINGLE, metadata={"format": "pt", "te_models": json.dumps(described)})

    return edit


def put_metadata(text: str) -> Edit:
    def edit(folder: Path) -> None:
        save_file(load_file(folder / SINGLE), folder / SINGLE, metadata={"te_models": text})

    return edit


def forget_digests(folder: Path) -> None:
    """Remove what would already say that a file is another one."""
    (folder / "manifest.json").unlink()


def poison(suffix: str, value: float) -> Edit:
    return edit_quantized(lambda t, d: t[PROJ + suffix].view(-1)[-1:].fill_(value))


PROJ = "decoder.layers.0.self_attention.linear_proj.weight"
SCALE = PROJ + "_scale_inv"

QUANTIZED_DEFECTS: dict[str, tuple[str, Edit, str]] = {
    "NaN scale": ("block", poison("_scale_inv", float("nan")), f"'{SCALE}' has a scale that is NaN or infinite"),
    "infinite scale": ("block", poison("_scale_inv", float("inf")), f"'{SCALE}' has a scale that is NaN or infinite"),
    "negative scale": ("block", poison("_scale_inv", -1.0), f"'{SCALE}' has a scale that is zero or negative"),
    "zero scale": ("block", poison("_scale_inv", 0.0), f"'{SCALE}' has a scale that is zero or negative"),
    "NaN scale of the tensor": ("current", poison("_scale_inv", float("nan")), f"'{SCALE}' has a scale that is NaN"),
    "zero scale of the tensor": ("current", poison("_scale_inv", 0.0), f"'{SCALE}' has a scale that is zero or neg"),
    "negative scale of the tensor": ("current", poison("_scale_inv", -2.0), f"'{SCALE}' has a scale that is zero or"),
    "NaN exponent": ("mxfp8", poison("_scale_inv", 255), f"'{SCALE}' has a scale that is NaN"),
    "NaN columnwise exponent": ("mxfp8", poison("_columnwise_scale_inv", 255), "_columnwise_scale_inv' has a scale"),
    "NaN fp8 scale": ("nvfp4", poison("_scale_inv", float("nan")), f"'{SCALE}' has a scale that is NaN"),
    "negative fp8 scale": ("nvfp4", poison("_scale_inv", -1.0), f"'{SCALE}' has a scale that is negative"),
    "NaN amax": ("nvfp4", poison("_amax", float("nan")), "_amax' has a scale that is NaN"),
    "negative amax": ("nvfp4", poison("_amax", -1.0), "_amax' has a scale that is negative"),
    "NaN among the numbers": ("block", poison("", float("nan")), f"'{PROJ}' holds a NaN among its quantized numbers"),
    "block too many": (
        "block",
        edit_quantized(lambda t, d: t.update({SCALE: torch.ones(2, 1)})),
        rf"'{SCALE}' has shape \[2, 1\] where \[1, 1\] is expected",
    ),
    "blocks missing": ("mxfp8", edit_quantized(lambda t, d: t.update({SCALE: t[SCALE][:-1].clone()})), "has shape"),
    "scales missing": ("block", edit_quantized(lambda t, d: t.pop(SCALE)), f"missing: '{SCALE}'"),
    "scales of another dtype": (
        "block",
        edit_quantized(lambda t, d: t.update({SCALE: t[SCALE].half()})),
        f"'{SCALE}' has dtype F16",
    ),
    "data of another dtype": (
        "block",
        edit_quantized(lambda t, d: t.update({PROJ: t[PROJ].bfloat16()})),
        f"'{PROJ}' has dtype BF16 where F8_E4M3",
    ),
    "format mislabelled": ("block", edit_quantized(lambda t, d: d[PROJ].update(format="mxfp8")), "contradicts itself"),
    "block mislabelled": ("block", edit_quantized(lambda t, d: d[PROJ].update(block=[1, 32])), "contradicts itself"),
    "unknown quantizer": (
        "block",
        edit_quantized(lambda t, d: d[PROJ].update(quantizer={"type": "int3"})),
        "describes no known quantizer",
    ),
    "a list for a flag": (
        "block",
        edit_quantized(lambda t, d: d[PROJ]["quantizer"].update(columnwise=[])),
        r"has columnwise = \[\]; allowed: a value of bool",
    ),
    "a large number for a flag": (
        "mxfp8",
        edit_quantized(lambda t, d: d[PROJ]["quantizer"].update(rowwise=2**64)),
        "has rowwise = 18446744073709551616; allowed",
    ),
    "no quantizer": ("block", edit_quantized(lambda t, d: d[PROJ].pop("quantizer")), "lacks a 'quantizer'"),
    "description missing": ("block", edit_quantized(lambda t, d: d.pop(PROJ)), "not part of this model|has dtype"),
    "description of a stranger": ("block", edit_quantized(lambda t, d: d.update(x=d[PROJ])), "'?x'?"),
    "metadata not json": ("block", put_metadata("{"), "is not valid JSON"),
    "metadata deep": ("block", put_metadata(DEEP.decode()), "nested too deeply"),
    "metadata of the future": ("block", put_metadata('{"version": 2, "tensors": {}}'), "has version 2"),
}
"""Recipe by which the folder was quantized, what is done to it, and what is said about it."""
