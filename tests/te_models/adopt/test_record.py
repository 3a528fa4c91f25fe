"""What docs/adopting.md says of the known types that adopt found again is what the recorded results say."""

import json
import re
from pathlib import Path

from te_models.checkpoints import FAMILIES
from te_models.checkpoints.families.base.text_part import text_part

ROOT = Path(__file__).parents[3]
NO_CODE = re.compile(r"is unknown to transformers|has no decoder|No module named 'transformers\.models\.")


def test_the_paragraph_agrees_with_the_results() -> None:
    results = json.loads((ROOT / "bench/results/adopt.json").read_text())
    text = " ".join((ROOT / "docs/adopting.md").read_text().split())
    assert set(results) == set(FAMILIES)
    found = [name for name, its in results.items() if its["verdict"] == "declared"]
    refused = [name for name, its in results.items() if its["verdict"] == "refused"]
    without_code = [name for name, its in results.items() if NO_CODE.search(its.get("why", ""))]
    not_small = [n for n in results if n not in (*found, *refused, *without_code)]
    code = len(results) - len(without_code)
    last = sum(its["search"] == "fifth" for its in results.values())
    assert "none of them has other logits" in text and not any("wrong" in results[name]["checked"] for name in found)
    assert (
        f"All {len(results)} families were hidden so. {len(found)} were found again: {len(found) / code:.0%} of the "
        f"{code} of which transformers has the code, and {len(found) / len(results):.0%} of all".replace("%", " %")
    ) in text
    assert f"the last one in {last} of them" in text
    earlier = sum(results[name]["search"] != "fifth" for name in found)
    assert f"{earlier} of those found are known from earlier versions alone" in text
    around = sum(text_part(FAMILIES[name]) is not None for name in found)
    assert f"{around} of those found hold a text model, whose own family was not hidden." in text
    for what, names in (
        ("Found: ", found),
        ("Refused with a report: ", refused),
        ("No small model was made of ", not_small),
        ("transformers has no code of ", without_code),
    ):
        assert f"{what}{', '.join(names[:-1])} and {names[-1]}." in text, what
