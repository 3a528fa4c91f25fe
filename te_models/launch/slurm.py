"""Slurm: a script for `sbatch`, one task a node."""

from collections.abc import Mapping

from .job import Job, check_word

_END = "END_OF_NODE_SCRIPT"


def sbatch_script(job: Job, options: Mapping[str, str] | None = None, *, grace_s: int = 300) -> str:
    """Return the script. options: of sbatch, such as {"partition": "gpu", "time": "24:00:00"}; grace_s: how many
    seconds before its time is over a run gets SIGTERM, saves and ends.

    A job that Slurm starts again, because a node failed or somebody asked, continues from its newest checkpoint.
    Raises ConfigError for an option that a script would read otherwise.
    """
    directives = {"job-name": job.name, "nodes": f"{job.fewest_nodes}-{job.nodes}", "ntasks-per-node": "1"}
    if job.gpus:
        directives["gpus-per-node"] = str(job.nproc_per_node)
    directives |= {"output": "%x-%j.log", "open-mode": "append", "signal": f"TERM@{grace_s}"}
    directives |= {name: check_word(f"--{name}", value) for name, value in (options or {}).items()}
    lines = "".join(f"#SBATCH --{name}={value}\n" for name, value in directives.items())
    return (
        "#!/bin/bash\n"
        f"{lines}"
        "#SBATCH --requeue\n"
        "\n"
        "set -euo pipefail\n"
        'TE_MODELS_HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"\n'
        "TE_MODELS_HEAD=\"${TE_MODELS_HEAD%%$'\\n'*}\"\n"
        'TE_MODELS_JOB="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"\n'
        "export TE_MODELS_HEAD TE_MODELS_JOB\n"
        f"node_script=$(cat <<'{_END}'\n{job.node_script()}{_END}\n)\n"
        f'srun --kill-on-bad-exit={int(job.fewest_nodes == job.nodes)} bash -c "$node_script"\n'
    )
