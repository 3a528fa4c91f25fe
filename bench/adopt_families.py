"""Each known family hidden in turn, and what `adopt` finds in its place; then the types that te_models lacks.

    python bench/adopt_families.py bench/results/adopt.json [TYPE ...]

A run goes on where an earlier one ended: the file holds what was found so far. A declaration is checked once more with
other weights and other sizes than it was found with.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from te_models.adopt import AdoptError, adopt, known_type, outcome
from te_models.checkpoints import FAMILIES


def main(arguments: list[str]) -> None:
    file, names = Path(arguments[0]), arguments[1:] or list(FAMILIES)
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        if name in found:
            continue
        begun = time.process_time()
        try:
            found[name] = one(name)
        except AdoptError as error:
            found[name] = {"verdict": "not made by transformers", "why": str(error)}
        except Exception as error:
            found[name] = {"verdict": "failed", "why": f"{type(error).__name__}: {str(error)[:300]}"}
        found[name]["seconds"] = round(time.process_time() - begun, 1)
        file.write_text(json.dumps(found, indent=1) + "\n")
        print(name, found[name]["verdict"], found[name]["seconds"], flush=True)
    declared = [name for name in found if found[name]["verdict"] == "declared"]
    wrong = [name for name in declared if "wrong" in found[name]["checked"]]
    print(f"{len(declared)} of {len(found)} found; {len(wrong)} with other logits")


def one(name: str) -> dict[str, Any]:
    """Adopt one type, and check what was found."""
    adopted = adopt(name)
    report = adopted.report
    result: dict[str, Any] = {"verdict": report.verdict, "near": report.near[:3], "lacking": report.lacking}
    if adopted.family is None:
        return result | {"missing": report.missing}
    known = known_type(name)
    checked = []
    for seed, options in enumerate(list(adopted.cases.values())[:12], 100):
        built = known.build({**adopted.sizes, **options}, seed=seed)
        checked.append(outcome(adopted.family, built, seed=seed)[0])
        got, why = outcome(adopted.family, built, memory=True, seed=seed)
        checked.append(got if got != "wrong" or why.startswith("logits") else "no form as in memory")
    return result | {"begun_with": report.begun_with, "checked": sorted(set(checked)), "models": len(checked)}


if __name__ == "__main__":
    main(sys.argv[1:])
