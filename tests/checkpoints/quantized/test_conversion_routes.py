"""Which way a parameter takes through a conversion, and the options that all conversions share."""

from pathlib import Path

import pytest

from te_models.checkpoints import (
    CheckpointError,
    dequantize,
    export_hf,
    import_hf,
    quantize,
    relayout,
    reshard,
    upcycle,
)
from te_models.checkpoints.quantized.route import VALUES, StoredForm, choose_route
from te_models.layers import Float8BlockQuantizer, MXFP8Quantizer
from tests.checkpoints.quantized_cases import CASES, make

WEIGHT, TABLE = "decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"
MXFP8, BLOCKS = MXFP8Quantizer(), Float8BlockQuantizer()
CUT = StoredForm(inexact="it cuts blocks")


@pytest.mark.parametrize(
    ("source", "target", "allowed", "way"),
    [
        (VALUES, VALUES, (), "move"),
        (VALUES, StoredForm(MXFP8), (), "requantize"),
        (StoredForm(MXFP8), VALUES, (), "dequantize"),
        (StoredForm(MXFP8), StoredForm(MXFP8), (), "move"),
        (StoredForm(MXFP8), StoredForm(MXFP8), ("requantize",), "move"),
        (StoredForm(MXFP8, encoded=True), StoredForm(MXFP8), (), "re-encode"),
        (StoredForm(MXFP8), StoredForm(BLOCKS), (), "re-encode"),
        (CUT, StoredForm(MXFP8), (), "refuse"),
        (CUT, StoredForm(MXFP8), ("requantize", "dequantize"), "requantize"),
        (CUT, StoredForm(MXFP8), ("dequantize",), "dequantize"),
        (StoredForm(MXFP8), StoredForm(BLOCKS, inexact=""), ("requantize",), "requantize"),
        (StoredForm(MXFP8), StoredForm(BLOCKS, inexact=""), (), "refuse"),
    ],
)
def test_the_route_of_a_linear_weight(
    source: StoredForm, target: StoredForm, allowed: tuple[str, ...], way: str
) -> None:
    route = choose_route(WEIGHT, source, target, allowed)
    assert route.way == way and route.parameter == WEIGHT
    assert route.quantizer == (target.quantizer if way in ("move", "re-encode", "requantize") else None)
    assert route.is_exact == (way in ("move", "re-encode") and target.quantizer is not None)
    assert route.why == (source.inexact or target.inexact or "")


def test_only_weights_of_linear_layers_are_requantized() -> None:
    assert choose_route(TABLE, CUT, StoredForm(MXFP8), ("requantize", "dequantize")).way == "dequantize"
    assert choose_route(TABLE, CUT, StoredForm(MXFP8), ("requantize",)).way == "refuse"


def test_stacks_of_experts_have_no_scales_of_single_matrices(tmp_path: Path) -> None:
    source, _ = make(CASES["modelopt-nvfp4-stacks"], tmp_path)
    import_hf(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"gate_up_proj is a stack of experts .* modelopt-fp8-pb-wo.*per-expert"):
        export_hf(tmp_path / "ours", tmp_path / "hf", format="modelopt-fp8-pb-wo", allow_requantize=True)
    assert not (tmp_path / "hf").exists()
    export_hf(tmp_path / "ours", tmp_path / "hf", format="modelopt-fp8-pb-wo", form="per-expert", allow_requantize=True)
    import_hf(tmp_path / "hf", tmp_path / "again", dequantize=True)


@pytest.mark.parametrize("conversion", [import_hf, export_hf, relayout, reshard, quantize, dequantize, upcycle])
def test_an_unknown_option_is_named_before_anything_is_read(conversion: object, tmp_path: Path) -> None:
    needed = {relayout: ("grouped",), quantize: ("mxfp8",), upcycle: (4, 2)}.get(conversion, ())
    with pytest.raises(TypeError, match=r"'overwite' is no option; allowed: overwrite, .*verify"):
        conversion(tmp_path / "missing", tmp_path / "out", *needed, overwite=True)


def test_the_error_of_a_stack_is_the_largest_of_its_experts(tmp_path: Path) -> None:
    """The files' factors of single experts are rounded differently by our decoding, whatever form the export has."""
    source, _ = make(CASES["modelopt-nvfp4"], tmp_path)
    import_hf(source, tmp_path / "ours")
    lines = {}
    for form in ("published", "fused"):
        plan = export_hf(tmp_path / "ours", tmp_path / form, form=form)
        experts = [line for line in plan.report.to_dict() if "experts" in line["tensors"]]
        lines[form] = [(x["tensors"], x["kind"], x["count"], x.get("max_relative_error")) for x in experts]
    assert lines["published"] == lines["fused"] and any(kind == "re-encoded" for _, kind, *_ in lines["fused"])
