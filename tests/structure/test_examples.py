"""Every public name has an example that runs, or a stated reason why it needs none.

The examples lie in docs/examples, a file for each package. A cell begins with `# %%` and the names that it shows, runs
in a namespace of its own, and is printed under its names in the reference."""

import importlib
import os
from pathlib import Path

import pytest

from docs.examples_of import EXAMPLES, examples
from tests.fork_server import run_python
from tests.structure.test_documented_code import WITHOUT_COMPILER, reader  # noqa: F401  a folder with small models

EXEMPT = {
    "TrainingError": "raised by train; not to be called",
    "TrainingCheckpointError": "raised by train; not to be called",
    "MetricsError": "raised by read_metrics; not to be called",
    "LostRankError": "raised by train when another process is gone",
    "AutoConverter": "docs/transformers.md, models and state dicts in memory",
    "plain_state_dict": "docs/quantized-weights.md, save and load",
    "from_plain_state_dict": "docs/quantized-weights.md, save and load",
    "TEConfig": "its docstring",
    "TEModelForCausalLM": "its docstring, and docs/transformers.md",
    "ExpertBiasCallback": "its docstring",
    "RecipeStateCallback": "its docstring",
}
"""Public names without a cell: why."""
RUNNER = (
    WITHOUT_COMPILER
    + """
import os, sys
from docs.examples_of import examples
os.chdir(sys.argv[2])
for example in examples(sys.argv[1]):
    try:
        exec(compile(example.code, ", ".join(example.names), "exec"), {"__name__": "example"})
    except BaseException as error:
        sys.exit(f"{', '.join(example.names)}: {type(error).__name__}: {error}")
"""
)


@pytest.mark.parametrize("package", EXAMPLES)
def test_every_public_name_has_an_example(package: str) -> None:
    public = importlib.import_module(package).__all__
    shown = [name for example in examples(package) for name in example.names]
    assert sorted(set(shown)) == sorted(shown), "a name has two cells"
    assert set(shown) <= set(public)
    assert [name for name in public if name not in shown and name not in EXEMPT] == []
    assert [name for name in shown if name in EXEMPT] == []


@pytest.mark.parametrize("package", EXAMPLES)
def test_a_cell_uses_its_names(package: str) -> None:
    unused = [(e.names, name) for e in examples(package) for name in e.names if e.code.count(name) < 1]
    assert unused == []


@pytest.mark.parametrize(
    "package", [pytest.param(p, marks=pytest.mark.slow if p == "te_models.plan" else ()) for p in EXAMPLES]
)
def test_the_examples_run(package: str, reader: Path) -> None:  # noqa: F811
    root = Path(__file__).parents[2]
    # what compiled code computes is tested elsewhere, and takes minutes
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = run_python(["-c", RUNNER, package, str(reader)], env=environment, cwd=root)
    assert result.returncode == 0, result.stderr[-2000:]
