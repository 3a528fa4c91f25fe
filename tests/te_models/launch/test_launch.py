"""What `te-models launch` writes starts the processes of a run on every node, whatever its names are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_models.cli.main import main
from te_models.config import ConfigError
from te_models.launch import Job, job_name, manifest
from te_models.training import read_metrics
from tests.ranks import free_port
from tests.training.processes import as_toml
from tests.training.runs import tiny_run

SRUN = """#!/bin/bash
# srun: the command once for each of $NODES nodes, at the same time; the first failure's code
shift
pids=()
for ((node = 0; node < NODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
# the names come one after the other, so that a reader which leaves after the first ends a command behind it in a pipe
SCONTROL = "#!/bin/bash\nfor ((node = 0; node < NODES; node++)); do echo localhost; sleep 0.05; done\n"
SBATCH = '#!/bin/bash\nSLURM_JOB_ID=7 SLURM_JOB_NODELIST="n[0-1]" exec bash "$1"\n'
RAY = """
import threading
class _Group:
    def ready(self): return None
class _Method:
    def __init__(self, call): self.call = call
    def options(self, **_): return self
    def remote(self, *arguments):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.call(*arguments)))
        thread.start()
        return thread, found
class util:
    get_node_ip_address = staticmethod(lambda: "localhost")
def remote(**_): return _Method
def init(): pass
def get(what):
    if what is None: return None
    if isinstance(what, list): return [get(each) for each in what]
    thread, found = what
    thread.join()
    return found[0]
class _Context:
    def get_job_id(self): return "job"
def get_runtime_context(): return _Context()
"""


def cluster(folder: Path, nodes: int) -> dict[str, str]:
    """Write the programs into a folder; return the environment in which they are found."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "sbatch": SBATCH}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    package = folder / "ray"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text(RAY)
    (package / "util" / "__init__.py").write_text("get_node_ip_address = lambda: 'localhost'\n")
    (package / "util" / "placement_group.py").write_text(
        "import ray\ndef placement_group(bundles, strategy): return ray._Group()\n"
    )
    (package / "util" / "scheduling_strategies.py").write_text(
        "class PlacementGroupSchedulingStrategy:\n    def __init__(self, **_): pass\n"
    )
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(folder), "NODES": str(nodes), "PYTHONSAFEPATH": ""}


RECORDER = """#!/bin/bash
# python: one line for each call, of its words and a variable, as this shell quotes them
printf -v line '%q ' "${HOSTILE-unset}" "$PWD" "$@"
printf '%s\\n' "$line" >> {log}
"""


def recorder(folder: Path) -> tuple[Path, Path]:
    """Return a program that notes how it is called, and the file of its notes."""
    log, program = folder / "calls", folder / "py thon's"
    program.write_text(RECORDER.replace("{log}", f"'{log}'"))
    program.chmod(0o755)
    return program, log


HOSTILE = "a 'b' \"c\" $(touch hacked) `touch hacked` ${HOME} \\ } ; # é"
CONFIG = "it's $(touch hacked) & so on.toml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration, in which the process is."""
    folder = tmp_path / "sha red's"
    folder.mkdir()
    (folder / CONFIG).write_text(as_toml(tiny_run(tmp_path)))
    monkeypatch.chdir(folder)
    return folder


def words(scheduler: str, *more: str) -> list[str]:
    extra = ["--image", "team/image:1", "--claim", "data", "--mount", "/"] if scheduler == "kubernetes" else []
    return ["launch", CONFIG, f"--{scheduler}", "--nnodes", "2", "--nproc-per-node", "1", *extra, *more]


def node_script_of_pod(file: Path) -> str:
    """The script as a pod gets it, behind Kubernetes's own substitution."""
    yaml = pytest.importorskip("yaml", reason="reads what Kubernetes would")
    service, job = yaml.safe_load_all(file.read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    (container,) = pod["containers"]
    bash, option, script = container["command"]
    assert (bash, option) == ("bash", "-c") and {v["name"] for v in container["env"]} >= {"TE_MODELS_HEAD"}
    return script.replace("$$", "$")


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes", "ray"])
def test_every_node_starts_torchrun_with_the_words_that_were_asked_for(scheduler: str, folder: Path) -> None:
    program, log = recorder(folder.parent)
    environment = cluster(folder.parent, 2)
    more = ["--env", f"HOSTILE={HOSTILE}", "--python", str(program), "--data.path", HOSTILE]
    output = folder.parent / "job"
    assert main(words(scheduler, "--output", str(output), *more)) == 0
    if scheduler == "slurm":
        subprocess.run(["sbatch", str(output)], env=environment, check=True, cwd=folder.parent)
    elif scheduler == "ray":
        subprocess.run([sys.executable, str(output)], env=environment, check=True, cwd=folder.parent)
    else:
        environment |= {"TE_MODELS_HEAD": "pod-0.pod", "TE_MODELS_JOB": "pod"}
        for _ in range(2):
            subprocess.run(["bash", "-c", node_script_of_pod(output)], env=environment, check=True)
    calls = log.read_text().splitlines()
    assert len(calls) == 2
    for call in calls:
        run = subprocess.run(["bash", "-c", f"printf '%s\\0' {call}"], capture_output=True, check=True)
        hostile, place, *called = run.stdout.decode().rstrip("\0").split("\0")
        assert hostile == HOSTILE and place == str(folder)
        assert called[:6] == ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        train = called.index("te_models")
        assert called[train:] == ["te_models", "train", CONFIG, "--data.path", HOSTILE]
        assert called[train - 2].endswith(":29500")
    assert not [*folder.parent.rglob("hacked")]


def test_nothing_is_written_or_submitted_unless_asked(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.iterdir())
    assert main(words("slurm", "--dry-run", "--time", "1:00:00")) == 0
    told = capsys.readouterr().out
    assert "#SBATCH --time=1:00:00\n" in told and "would be submitted by: sbatch" in told
    assert sorted(folder.iterdir()) == before

    environment = cluster(folder.parent, 2)
    monkeypatch.setenv("PATH", environment["PATH"])
    (folder.parent / "sbatch").write_text('#!/bin/bash\ntouch "$1.submitted"\n')
    assert main(words("slurm")) == 0
    (script,) = folder.glob("*.sbatch")
    assert not (folder / f"{script.name}.submitted").exists()
    assert main(words("slurm")) == 2 and "--force replaces it" in capsys.readouterr().err
    assert main(words("slurm", "--force", "--submit", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["submitted"] and (folder / f"{script.name}.submitted").exists()
    (folder.parent / "sbatch").write_text("#!/bin/bash\nexit 4\n")
    assert main(words("slurm", "--force", "--submit")) == 3 and "ended with 4" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(folder))
    assert main(words("slurm", "--force", "--submit")) == 2 and "'sbatch'" in capsys.readouterr().err


def test_a_file_is_replaced_in_one_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the old file, and no part of the new one."""
    output = folder / "job.sbatch"
    output.write_text("old")

    def fail(self: Path, text: str, **_: Any) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", fail)
    assert main(words("slurm", "--force", "--output", str(output))) == 3
    assert output.read_text() == "old" and not [*folder.glob("*.partial")]


def test_a_node_that_does_not_see_the_folder_says_so(folder: Path) -> None:
    job = Job(name="a", config=Path("missing.toml"), folder=folder)
    run = subprocess.run(["bash", "-c", job.node_script()], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "does not see missing.toml; allowed: a folder that all nodes share" in run.stderr


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--nnodes", "3:2"], "--nnodes is '3:2'"),
        (["--name", "A_b"], "--name is 'A_b'"),
        (["--partition", "a\n#SBATCH --uid=0"], "--partition is"),
        (["--env", "A-B=1"], "--env is 'A-B'"),
        (["--env", "A"], "allowed: NAME=VALUE"),
        (["--env", "A=b\nc"], "without line breaks"),
        (["--data.path", "a\nb"], "--data.path is 'a\\nb'; allowed: text without line breaks"),
        (["--data.path=a\nb"], "--data.path is 'a\\nb'; allowed: text without line breaks"),
        (["--port", "0"], "--port is 0"),
        (["--max-restarts", "-1"], "--max-restarts is -1"),
        (["--image", "x"], "--image is no option of --slurm"),
        (["--parallel.tensor-model-parallel-size", "3"], "mlp.ffn_hidden_size is 128, which 3 ranks cannot"),
        (["--parallel.data-parallel-replicate-size", "3"], "data_parallel_replicate_size is 3; allowed: 2, which"),
        (["--optimizer.lrr", "3"], "launch has no option '--optimizer.lrr'"),
        (["--submit", "--dry-run"], "--submit cannot be used with --dry-run"),
    ],
)
def test_what_cannot_be_is_refused(
    more: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words("slurm", *more))
    except SystemExit as usage:
        code = usage.code
    told = capsys.readouterr().err
    assert code == 2 and sentence in " ".join(told.split())
    assert not [*folder.glob("*.sbatch")]


def test_pods_start_in_the_folder_that_they_share(tmp_path: Path) -> None:
    job = Job(name="a", config=Path("a.toml"), folder=tmp_path)
    with pytest.raises(ConfigError, match="allowed: a folder under --mount '/shared', which all pods share"):
        manifest(job, image="x", claim="y")
    assert [job_name(Path(name)) for name in ("My Run.toml", "..toml", "é" * 90)] == [
        "my-run",
        "te-models",
        "te-models",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["slurm", "ray"])
def test_two_nodes_train_as_one_process(scheduler: str, folder: Path) -> None:
    """Two agents of torchrun on this machine, over gloo, in a folder that they share."""
    run = tiny_run(folder, steps=2)
    (folder / CONFIG).write_text(as_toml(run))
    output = folder.parent / "job"
    more = ["--output", str(output), "--port", str(free_port()), "--python", sys.executable, "--no-gpus"]
    assert main(words(scheduler, *more, "--data.gradient-accumulation", "1")) == 0
    start = ["sbatch", str(output)] if scheduler == "slurm" else [sys.executable, str(output)]
    environment = cluster(folder.parent, 2) | {"PYTHONPATH": f"{folder.parent}:{Path(__file__).parents[3]}"}
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(Path(run.output_dir) / "metrics.jsonl")) == 2
    assert main(["train", CONFIG, "--output-dir", "alone"]) == 0
    rows, right = (read_metrics(Path(d) / "metrics.jsonl") for d in (run.output_dir, "alone"))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in right], rel=1e-5)
