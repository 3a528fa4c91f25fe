"""The header parser accepts what the safetensors library accepts (less duplicates) and names what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from te_models.checkpoints import CheckpointError, reshard
from te_models.checkpoints.io.header import MAX_HEADER_BYTES, parse_header, read_header
from tests.covering import examples


def entry(dtype: str = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def pack(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b.c": torch.randn(2, 2).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt"}
    assert {n: (i.shape, i.nbytes) for n, i in header.tensors.items()} == {
        n: (tuple(t.shape), t.nbytes) for n, t in tensors.items()
    }
    data = (tmp_path / "x.safetensors").read_bytes()[header.data_start :]
    for name, info in header.tensors.items():
        assert data[info.start : info.stop] == tensors[name].flatten().view(torch.uint8).numpy().tobytes()


BAD: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "truncated: 0 bytes"),
    "short prefix": (b"\x01\x02", "truncated: 2 bytes"),
    "prefix beyond the file": ((1000).to_bytes(8, "little") + b"{}", "truncated: its header ends at byte 1008"),
    "oversize": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "claims a header of"),
    "huge prefix": (b"\xff" * 8, "claims a header of 18446744073709551615 bytes"),
    "not json": (pack(b"{not json}"), "not valid JSON"),
    "leading space": (pack(b" {}"), "does not start with"),
    "list": (pack(b"[]"), "does not start with"),
    "not utf-8": (pack(b'{"\xff": 1}'), "not UTF-8"),
    "deep": (pack(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply|not valid JSON"),
    "infinite": (pack(b'{"a": 1e999}'), "number out of range, 1e999"),
    "NaN": (pack(b'{"a": NaN}'), "contains NaN"),
    "huge integer": (pack(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "duplicate tensor": (
        pack(f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}'.encode(), bytes(24)),
        "has the key 'a' twice",
    ),
    "metadata not strings": (pack({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata not object": (pack({"__metadata__": "x"}), "__metadata__"),
    "entry not object": (pack({"a": 3}), "not described by exactly"),
    "entry without dtype": (pack({"a": {"shape": [], "data_offsets": [0, 4]}}, bytes(4)), "not described by exactly"),
    "entry with extra key": (pack({"a": entry() | {"x": 1}}, bytes(24)), "not described by exactly"),
    "unknown dtype": (pack({"a": entry("F128")}, bytes(24)), "unknown dtype 'F128'"),
    "dtype not string": (pack({"a": entry(dtype=["F32"])}, bytes(24)), "unknown dtype"),
    "negative dimension": (pack({"a": entry(shape=(-2, -3))}, bytes(24)), "natural numbers"),
    "fractional dimension": (pack({"a": entry(shape=(2.0, 3))}, bytes(24)), "natural numbers"),
    "boolean dimension": (pack({"a": entry(shape=(True, 6))}, bytes(24)), "natural numbers"),
    "overflowing shape": (pack({"a": entry(shape=(2**62, 2**62))}, bytes(24)), "needs"),
    "rank": (pack({"a": entry(shape=(1,) * 99)}, bytes(24)), "at most 16"),
    "reversed offsets": (pack({"a": entry(offsets=(24, 0))}, bytes(24)), "not a range"),
    "negative offsets": (pack({"a": entry(offsets=(-24, 0))}, bytes(24)), "not a range"),
    "three offsets": (pack({"a": entry(offsets=(0, 24, 48))}, bytes(24)), "not a range"),
    "wrong byte count": (pack({"a": entry(offsets=(0, 20))}, bytes(20)), r"has 20 bytes, but F32 \[2, 3\] needs 24"),
    "overlap": (pack({"a": entry(), "b": entry(offsets=(8, 32))}, bytes(32)), "'b' overlaps"),
    "same range": (pack({"a": entry(), "b": entry()}, bytes(24)), "overlaps"),
    "hole": (pack({"a": entry(), "b": entry(offsets=(28, 52))}, bytes(52)), "'b' leaves a hole at data byte 24"),
    "hole at start": (pack({"a": entry(offsets=(4, 28))}, bytes(28)), "'a' leaves a hole at data byte 0"),
    "truncated data": (pack({"a": entry()}, bytes(23)), "truncated: its tensors need 24 data bytes and it has 23"),
    "trailing data": (pack({"a": entry()}, bytes(25)), "has 1 bytes after its last tensor"),
    "half a byte": (pack({"a": entry("F4", (3,), (0, 2))}, bytes(2)), "F4"),
    "empty name": (pack({"": entry()}, bytes(24)), "unusable name"),
    "surrogate name": (pack(b'{"\\ud800": ' + json.dumps(entry()).encode() + b"}", bytes(24)), "unusable name"),
    "newline name": (pack({"a\nb": entry()}, bytes(24)), "unusable name"),
    "long name": (pack({"a" * 5000: entry()}, bytes(24)), "unusable name"),
}


@pytest.mark.parametrize("defect", BAD)
def test_defects_are_named(tmp_path: Path, defect: str) -> None:
    content, message = BAD[defect]
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(tmp_path / "x.safetensors")
    assert "x.safetensors" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_large_hostile_header_costs_little_memory(tmp_path: Path) -> None:
    # 16 MB of empty lists would become 400 MB of Python objects
    (tmp_path / "x.safetensors").write_bytes(pack(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"))
    with pytest.raises(CheckpointError, match="holds more than the 400000 values allowed"):
        read_header(tmp_path / "x.safetensors")


def spelled(header: dict[str, Any], draw: Any) -> bytes:
    """JSON with white space, and keys of entries in another order, here and there."""
    space = st.sampled_from(["", " ", "\n", "\t  "])
    text = json.dumps({name: dict(draw(st.permutations(list(e.items())))) for name, e in header.items()})
    return "".join(c + draw(space) if c in ",:{}[]" else c for c in text).encode()


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_usual_and_unusual_spellings_mean_the_same(data: Any) -> None:
    """The scanner reads what writers of the format write, the general parser the rest; both know the same headers."""
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=4))
    names = data.draw(st.lists(st.sampled_from("abcdé"), min_size=len(sizes), max_size=len(sizes), unique=True))
    header: dict[str, Any] = {}
    position = 0
    for name, size in zip(names, sizes):
        header[name] = entry(shape=(size,), offsets=(position, position + 4 * size))
        position += 4 * size
    if data.draw(st.booleans()):
        header = {"__metadata__": {"format": "pt", "x": data.draw(st.text('ab\\"é', max_size=3))}, **header}
    expected = parse_header(json.dumps(header, indent=1).encode(), position, "x")
    assert expected.tensors.keys() == set(names) and expected.metadata == header.get("__metadata__", {})
    for text in (spelled(header, data.draw), json.dumps(header, separators=(",", ":")).encode()):
        found = parse_header(text, position, "x")
        assert (found.tensors, found.metadata) == (expected.tensors, expected.metadata)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}', "not valid JSON"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}x', "not valid JSON"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},}', "not valid JSON"),
        (b'{"a":{"dtype":"F32","shape":[1,],"data_offsets":[0,4]}}', "not valid JSON"),
        (b'{,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "not valid JSON"),
        (b'{"__metadata__":{"a":"b",},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "not valid JSON"),
        (b'{"__metadata__":{"a":"b","a":"c"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "'a' twice"),
        (b'{"__metadata__":{},"__metadata__":{}}', "'__metadata__' twice"),
        (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[9999999999999999999,9999999999999999999]}}', "not a range"),
    ],
)
def test_the_scanner_is_as_strict_as_the_parser(text: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_header(text, 4, "x")


@pytest.mark.slow
def test_a_file_of_120_000_tensors(tmp_path: Path) -> None:
    """More than the general parser may hold: one of 256 experts in 60 layers with scales has as many."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for i in range(120_000):
        name = f"model.layers.{i // 2000}.mlp.experts.{i % 2000}.down_proj.weight"
        entries[name] = {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
    text = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(120_000))
    header = read_header(tmp_path / "model.safetensors")
    assert len(header.tensors) == 120_000 and header.metadata == {"format": "pt"}


@pytest.mark.slow
def test_files_of_10_000_tensors_are_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = [f"model.layers.{i // 2000}.mlp.experts.{i % 2000}.down_proj.weight" for i in range(20_100)]
    values = torch.arange(20_100, dtype=torch.float32).view(-1, 1)
    save_file(dict(zip(names, values.unbind())), source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text('{"model_type": "of nobody"}')
    reshard(source, tmp_path / "split", max_shard_bytes=10**9)
    assert len(list((tmp_path / "split").glob("*.safetensors"))) == 3
    for file, count in ((1, 10_000), (3, 100)):
        with safe_open(tmp_path / f"split/model-0000{file}-of-00003.safetensors", "pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        assert len(found) == count
        assert all(value == values[names.index(name)] for name, value in list(found.items())[::50])


def test_not_a_file(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("absent", "cannot be opened"),
        (".", "not a regular file|cannot be"),
        ("pipe", "not a regular"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_header(tmp_path / name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
near_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F8_E4M3", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), near_entries | json_values, max_size=4)


def accepted_by_library(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
        return True
    except (SafetensorError, OSError, ValueError):
        return False


def check_one(path: Path, content: bytes) -> None:
    """Nothing but CheckpointError escapes, and what is accepted here the library accepts too."""
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert accepted_by_library(path)
    position = 0
    for info in header.tensors.values():
        assert info.start == position
        position = info.stop
    assert header.data_start + position == len(content)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=40))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, raw: bytes, data: bytes) -> None:
    check_one(tmp_path_factory.getbasetemp() / "fuzz.safetensors", raw)
    check_one(tmp_path_factory.getbasetemp() / "fuzz.safetensors", pack(b"{" + raw, data))


@settings(max_examples=examples(500), deadline=None)
@given(headers, st.integers(0, 60))
def test_any_header(tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], size: int) -> None:
    check_one(tmp_path_factory.getbasetemp() / "fuzz.safetensors", pack(header, bytes(size)))


@pytest.mark.slow
@settings(max_examples=10_000, derandomize=False, deadline=None)
@given(headers, st.integers(0, 60))
def test_any_header_thoroughly(tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], size: int) -> None:
    check_one(tmp_path_factory.getbasetemp() / "fuzz.safetensors", pack(header, bytes(size)))


valid_shapes = st.lists(st.integers(0, 3), max_size=3)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["F64", "F32", "BF16", "U8", "F8_E8M0"]), valid_shapes), max_size=5))
def test_every_valid_header_is_accepted(layout: list[tuple[str, list[int]]]) -> None:
    widths = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1, "F8_E8M0": 1}
    header, position = {}, 0
    for number, (dtype, shape) in enumerate(layout):
        nbytes = widths[dtype] * int(torch.tensor(shape).prod()) if shape else widths[dtype]
        header[f"t{number}"] = entry(dtype, shape, (position, position + nbytes))
        position += nbytes
    parsed = parse_header(json.dumps(header).encode(), position, "x")
    assert [(i.dtype, list(i.shape)) for i in parsed.tensors.values() if i.nbytes] == [
        (d, s) for d, s in layout if 0 not in s
    ]
