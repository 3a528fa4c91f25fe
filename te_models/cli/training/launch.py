"""`te-models launch`: the file that starts a run on a cluster, and, when asked, its submission."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ...child_process import run_program
from ..parser import Verbs, emit, integer, positive_count, verb
from .train import Keys

if TYPE_CHECKING:
    from ...launch import Job
    from ...training.config import TrainConfig

DESCRIPTION = """\
Write what starts a training run on a cluster: a script for sbatch, a Service and an indexed Job for
Kubernetes, or a script for `ray job submit`. Each node runs torchrun, which starts all processes
again when one fails; the run then continues from its newest checkpoint. Nothing is submitted
without --submit. --dry-run prints the file and the command. Every key of the file is also an
option, as of `te-models train`. docs/tutorials/cluster.md goes through it."""

SCHEDULERS = {"slurm": ".sbatch", "kubernetes": ".yaml", "ray": ".ray.py"}
SECONDS = 600.0
"""How long a submission may take."""
PROGRAMS = {"slurm": "sbatch", "kubernetes": "kubectl", "ray": "ray"}


def add(verbs: Verbs, *, keys: Keys) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "launch",
        run,
        "start a run on a cluster: Slurm, Kubernetes or Ray",
        DESCRIPTION,
        "te-models launch train.toml --slurm --nnodes 4 --nproc-per-node 8 --dry-run",
    )
    parser.usage = "te-models launch CONFIG.toml --slurm | --kubernetes | --ray [options] [--KEY VALUE ...]"
    parser.add_argument("config", metavar="CONFIG.toml", help="the training configuration, on the shared folder")
    which = parser.add_mutually_exclusive_group(required=True)
    for name in SCHEDULERS:
        which.add_argument(f"--{name}", dest="scheduler", action="store_const", const=name, help=f"for {name.title()}")
    parser.add_argument("--nnodes", metavar="N", default="1", help="nodes, or MIN:MAX to go on with fewer (1)")
    parser.add_argument("--nproc-per-node", type=positive_count, metavar="N", default=8, help="processes of a node (8)")
    parser.add_argument("--max-restarts", type=integer, metavar="N", default=3, help="of torchrun (3)")
    parser.add_argument("--name", help="of the job (the name of CONFIG.toml)")
    parser.add_argument("--folder", metavar="DIR", help="shared folder in which the run starts (this one)")
    parser.add_argument("--output", metavar="FILE", help="the file to write (NAME.sbatch, NAME.yaml or NAME.ray.py)")
    parser.add_argument("--port", type=integer, metavar="N", default=29500, help="of the rendezvous (29500)")
    parser.add_argument("--interface", metavar="NAME", help="network interface of NCCL and gloo")
    parser.add_argument("--env", metavar="NAME=VALUE", nargs="+", action="extend", default=[], help="further variables")
    parser.add_argument("--python", metavar="PROGRAM", default="python", help="the interpreter on the nodes (python)")
    parser.add_argument("--no-gpus", action="store_true", help="processes have no GPU each")
    for option, what in {
        "partition": "Slurm: where the job runs",
        "account": "Slurm: who pays",
        "qos": "Slurm: quality of service",
        "time": "Slurm: limit, such as 24:00:00",
        "cpus-per-task": "Slurm: cores of a node",
        "mem": "Slurm: memory of a node",
        "image": "Kubernetes: the container image",
        "claim": "Kubernetes: the PersistentVolumeClaim that all pods mount",
        "mount": "Kubernetes: where they mount it (/shared)",
        "namespace": "Kubernetes: of the job",
        "address": "Ray: of the cluster's dashboard",
    }.items():
        parser.add_argument(f"--{option}", metavar="NAME" if option != "time" else "TIME", help=what)
    parser.add_argument("--dry-run", action="store_true", help="print the file and the command, write nothing")
    parser.add_argument("--submit", action="store_true", help="submit the file after it was written")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.set_defaults(overrides=[])
    if keys != "none":
        from ...training.config.overrides import add_key_options

        add_key_options(parser, shown=keys == "shown")


def run(args: argparse.Namespace) -> int:
    """Write the file, and submit it where asked."""
    from te_models.checkpoints.io.atomic import replace_text

    from ...training.config.file import read_config

    if args.dry_run and args.submit:
        raise ValueError("--submit cannot be used with --dry-run")
    job = _job(args)
    text = _file_of(args, job)
    here = job.folder / job.config  # of Kubernetes the folder may be another one here
    config = read_config(here if here.exists() else Path(args.config), args.overrides)
    check_ranks(config, job)
    output = Path(args.output or f"{job.name}{SCHEDULERS[args.scheduler]}").absolute()
    command = _submission(args, output)
    result = {"output": str(output), "command": command, "submitted": bool(args.submit)}
    if args.dry_run:
        emit(args, result | {"text": text}, text, f"would be submitted by: {shlex.join(command)}")
        return 0
    if output.exists() and not args.force:
        raise FileExistsError(17, "is there already; --force replaces it", str(output))
    program = shutil.which(command[0]) or ""
    if args.submit and not program:
        raise ValueError(f"--submit needs {command[0]!r}, which is not on PATH; without it the file is written alone")
    replace_text(output, text)
    if args.submit:
        code, said = run_program([program, *command[1:]], Path.cwd(), SECONDS, os.environ)
        if code:
            raise RuntimeError(f"{shlex.join(command)} ended with {code}; {output} is written: {said.strip()}")
        result["said"] = said.strip()
    then = result.get("said") or "submitted" if args.submit else f"submit it by: {shlex.join(command)}"
    emit(args, result, f"{output}: {then}")
    return 0


def _job(args: argparse.Namespace) -> Job:
    from ...launch import Job, job_name

    environment = {}
    for pair in args.env:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--env is {pair!r}; allowed: NAME=VALUE")
        environment[name] = value
    folder, config = Path(args.folder or ".").absolute(), Path(args.config)
    return Job(
        name=args.name or job_name(config),
        config=config,
        folder=folder,
        nnodes=args.nnodes,
        nproc_per_node=args.nproc_per_node,
        keys=tuple(word for override in args.overrides for word in override.words),
        max_restarts=args.max_restarts,
        port=args.port,
        interface=args.interface,
        environment=environment,
        python=args.python,
        gpus=not args.no_gpus,
    )


OF_SLURM = ("partition", "account", "qos", "time", "cpus-per-task", "mem")
OF_KUBERNETES = ("image", "claim", "mount", "namespace")
OPTIONS = {"slurm": OF_SLURM, "kubernetes": OF_KUBERNETES, "ray": ("address",)}


def _file_of(args: argparse.Namespace, job: Job) -> str:
    """Return the text of the file. Raises ValueError for an option of another scheduler, and one that is missing."""
    from ...launch import manifest, ray_script, sbatch_script

    values = {name: getattr(args, name.replace("-", "_")) for names in OPTIONS.values() for name in names}
    own = {name: value for name, value in values.items() if value is not None}
    if others := own.keys() - set(OPTIONS[args.scheduler]):
        raise ValueError(f"--{min(others)} is no option of --{args.scheduler}")
    if args.scheduler == "slurm":
        return sbatch_script(job, own)
    if args.scheduler == "ray":
        return ray_script(job)
    if missing := [name for name in ("image", "claim") if name not in own]:
        raise ValueError(f"--kubernetes needs --{missing[0]}")
    return manifest(job, **own)


def _submission(args: argparse.Namespace, output: Path) -> list[str]:
    program = PROGRAMS[args.scheduler]
    if args.scheduler == "slurm":
        return [program, str(output)]
    if args.scheduler == "kubernetes":
        return [program, "apply", "-f", str(output)]
    where = [] if args.address is None else ["--address", args.address]
    return [program, "job", "submit", "--no-wait", *where, "--", args.python, str(output)]


def check_ranks(config: TrainConfig, job: Job) -> None:
    """Raise ConfigError where the run's layout does not divide the ranks of the job, at most or at least."""
    from ...parallel.dims import ParallelDims

    for nodes in sorted({job.fewest_nodes, job.nodes}):
        ParallelDims.of(config.parallel.to_dict(), nodes * job.nproc_per_node)
