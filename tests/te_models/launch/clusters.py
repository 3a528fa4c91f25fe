"""Clusters that are this machine: programs of Slurm and a module of Ray that run every node's part here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
