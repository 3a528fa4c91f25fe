"""The table of formats in docs/quantized.md: a row for every format that is read, and certificates say what it says."""

from pathlib import Path

import pytest
import torch

from te_models.certify import certify
from te_models.checkpoints.formats.declaration import _READERS
from tests.checkpoints.quantized.test_integer_folders import ONLY_VALUES
from tests.checkpoints.quantized_cases import CASES, CHANNEL, MODELOPT_CHANNEL, Case, make

PAGE = Path(__file__).resolve().parents[3] / "docs/quantized.md"
ROWS = [
    [cell.strip() for cell in line.strip("| ").split("|")]
    for line in PAGE.read_text(encoding="utf-8").split("| format |")[1].split("\n\n")[0].splitlines()[2:]
]
BEGINNINGS = {
    "fp8-per-tensor": "FP8, per-tensor scale",
    "fp8-fp4": "FP8 with experts in FP4",
    "fp8": "FP8, 128x128 blocks",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "modelopt-mixed": "groups with different formats",
    "mixed": "groups with different formats",
    "modelopt-nvfp4": "ModelOpt NVFP4",
    "modelopt-fp8-pb-wo": "compressed-tensors `float-quantized` by block",
    "modelopt-fp8": "ModelOpt FP8",
    "modelopt-mxfp8": "MXFP8",
    "nvfp4-pack-quantized": "compressed-tensors `nvfp4-pack-quantized`",
    "float-quantized-tensor": "ModelOpt FP8",
    "float-quantized-block": "compressed-tensors `float-quantized` by block",
    "channel": "compressed-tensors `float-quantized` by channel",
    "pack-quantized": "compressed-tensors `pack-quantized`",
    "gptq by importance": "... ordered by importance",
    "packed": "... ordered by importance",
    "gptq": "GPTQ of four or eight bits",
    "awq": "GPTQ of four or eight bits",
    "nf4": "bitsandbytes nf4",
}
"""How the name of a case begins -> the row of the table that it is of."""
LOSSY: dict[str, Case] = ONLY_VALUES | {"channel": CHANNEL, "channel of modelopt": MODELOPT_CHANNEL}


def row_of(case: str) -> list[str]:
    known = max((name for name in BEGINNINGS if case.startswith(name)), key=len)
    return next(row for row in ROWS if row[0].startswith(BEGINNINGS[known]))


def test_every_format_has_a_row() -> None:
    """And every row of a format is of some case; three say more of one that comes before them."""
    declared = {word.strip("` ") for row in ROWS for word in row[1].split(",")}
    assert set(_READERS) <= declared
    found = {row_of(case)[0] for case in (*CASES, *LOSSY)}
    others = {row[0] for row in ROWS} - found
    assert all(name.startswith(("... with scales", "... as AutoFP8", "... and the other")) for name in others)
    for case in (*CASES, *LOSSY):
        assert row_of(case)[3].startswith("the same") == (case in CASES), case


@pytest.mark.sentinels("nf4", "channel")
@pytest.mark.parametrize("case", LOSSY)
def test_what_no_form_holds_is_certified_as_values(case: str, tmp_path: Path) -> None:
    """A certificate names the option without which an import is refused, as the table does."""
    folder, _ = make(LOSSY[case], tmp_path, torch.float32)
    found = certify(folder)
    assert (found.verdict, found.exit_code, found.option) == ("convertible with loss", 3, "--dequantize")
    assert found.option in row_of(case)[3] and found.reason
