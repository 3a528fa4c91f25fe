"""Tasks of lm-evaluation-harness see our model: a task of our own has the numbers that its definition gives."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from te_models import GPTModel
from te_models.cli.main import main
from te_models.extras import installed
from te_models.training import EvaluationConfig, ModelSource, read_metrics, train
from tests.byte_tokenizer import byte_tokenizer
from tests.training.runs import tiny_model, tiny_run

TASK = """
task: te_models_choice
dataset_path: json
dataset_kwargs: {{ data_files: {{ test: "{data}" }} }}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{ metric: acc, aggregation: mean, higher_is_better: true }}]
"""
ROWS = [
    {"question": f"def f{n}(x):", "choices": [" return x", " import json", " class"], "label": n % 3} for n in range(6)
]


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    GPTModel(tiny_model(), params_dtype=torch.float32).save_pretrained(tmp_path / "m")
    assert main(["eval", str(tmp_path / "m"), "--task", "a"]) == 2
    assert "eval --task needs the package 'lm_eval': pip install 'te_models[eval]'" in capsys.readouterr().err


@pytest.mark.costs(60)  # importing the harness takes ten seconds
@pytest.mark.skipif(not installed("eval"), reason="needs lm-evaluation-harness (extra eval)")
@pytest.mark.filterwarnings("default")
def test_a_task_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPTModel(tiny_model().replace(vocab_size=300), params_dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer = byte_tokenizer(["def f(x):\n    return x + 1\n"])
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choice.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    words = ["eval", str(tmp_path / "model"), "--task-folder", str(tmp_path / "tasks"), "--dtype", "float32", "--json"]
    assert main([*words, "--task", "te_models_choice"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]["te_models_choice"]
    right = 0
    for row in ROWS:
        before = tokenizer(row["question"]).input_ids
        scores = []
        for choice in row["choices"]:
            ids = torch.tensor([tokenizer(row["question"] + " " + choice.strip()).input_ids])
            with torch.no_grad():
                log_p = F.log_softmax(model(ids).logits[0].double(), -1)
            places = range(len(before), ids.shape[1])
            scores.append(sum(float(log_p[place - 1, ids[0, place]]) for place in places))
        right += scores.index(max(scores)) == row["label"]
    assert found["acc,none"] == right / len(ROWS) and main([*words, "--task", "no_such_task"]) == 2
    assert "--task 'no_such_task' is no task of lm-evaluation-harness" in capsys.readouterr().err


@pytest.mark.costs(60)
@pytest.mark.slow
@pytest.mark.skipif(not installed("eval"), reason="needs lm-evaluation-harness (extra eval)")
@pytest.mark.filterwarnings("default")
def test_a_run_measures_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the model in memory, while it is trained: the numbers of `eval` on the exported one."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choice.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    torch.manual_seed(0)
    GPTModel(tiny_model().replace(vocab_size=300), params_dtype=torch.float32).save_pretrained(tmp_path / "model")
    byte_tokenizer(["def f(x):\n    return x + 1\n"]).save_pretrained(tmp_path / "model")
    asked = EvaluationConfig(
        every=2, batches=1, tasks=("te_models_choice",), task_folder=str(tmp_path / "tasks"), task_limit=4
    )
    result = train(tiny_run(tmp_path, steps=2, model=ModelSource(path=str(tmp_path / "model")), evaluation=asked))
    found = read_metrics(result.metrics_file)[-1]["evaluations"]
    words = ["eval", str(result.model_dir), "--task-folder", str(tmp_path / "tasks"), "--dtype", "float32", "--json"]
    assert main([*words, "--task", "te_models_choice", "--limit", "4"]) == 0
    expected = json.loads(capsys.readouterr().out)["tasks"]["te_models_choice"]
    assert found == {f"tasks/te_models_choice/{name}": value for name, value in expected.items()}
