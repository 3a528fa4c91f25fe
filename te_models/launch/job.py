"""What a scheduler starts on each node: torchrun, whose processes find each other and start again after a failure."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ..config import ConfigError, check

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,43}[a-z0-9])?")
"""What Kubernetes takes as the name of a job, with room for the numbers of its pods."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/=,@+-]*")
"""What a scheduler's own options may be: nothing that a shell or a comment of a script would read otherwise."""

ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # files beside the run are no modules
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a rank whose collective failed ends in place of waiting
    "OMP_NUM_THREADS": "1",
}
"""Variables of each process, where the environment of the job does not say something else."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a cluster.

    config: the TOML file. keys: options of `te-models train` behind it. folder: where the run starts, to which its
    paths are relative; all nodes share it. nnodes: how many nodes there are, "N", or "MIN:MAX" where torchrun goes on
    with fewer. nproc_per_node: processes, and GPUs, of each. max_restarts: how often torchrun starts all processes
    again after one has failed; each time the run continues from its newest checkpoint. interface: the network interface
    for NCCL and gloo; None: their own choice. environment: further variables. python: the interpreter on the nodes.
    port: of the rendezvous, on the first node. gpus: whether the processes have a GPU each.

    Raises ConfigError naming the value that cannot be.
    """

    name: str
    config: Path
    folder: Path
    nnodes: str = "1"
    nproc_per_node: int = 8
    keys: tuple[str, ...] = ()
    max_restarts: int = 3
    port: int = 29500
    interface: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    python: str = "python"
    gpus: bool = True

    def __post_init__(self) -> None:
        check(bool(NAME.fullmatch(self.name)), "--name", self.name, "up to 45 lowercase letters, digits and dashes")
        found = re.fullmatch(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", self.nnodes)
        if found is None or (found[2] is not None and int(found[1]) > int(found[2])):
            raise ConfigError(f"--nnodes is {self.nnodes!r}; allowed: a number of nodes, or MIN:MAX")
        check(0 < self.port < 65536, "--port", self.port, "1 to 65535")
        check(self.max_restarts >= 0, "--max-restarts", self.max_restarts, "0 or more")
        for name in self.environment:
            check(bool(VARIABLE.fullmatch(name)), "--env", name, "a variable's name, as in NAME=VALUE")
        texts = [("CONFIG.toml", self.config), ("--folder", self.folder), ("--interface", self.interface or "")]
        texts += [("--python", self.python), *(("--env", value) for value in self.environment.values())]
        option = ""
        for word in self.keys:
            option = word.partition("=")[0] if word.startswith("--") else option
            texts.append((option, word.removeprefix(f"{option}=")))
        for what, text in texts:
            check(str(text).isprintable(), what, str(text), "text without line breaks and control characters")

    @property
    def nodes(self) -> int:
        """How many nodes are asked for: the most that there may be."""
        return int(self.nnodes.rpartition(":")[2])

    @property
    def fewest_nodes(self) -> int:
        """With how many nodes the run still goes on."""
        return int(self.nnodes.partition(":")[0])

    def variables(self) -> dict[str, str]:
        """Return the variables of each process."""
        own = (
            {}
            if self.interface is None
            else dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), self.interface)
        )
        return {**ENVIRONMENT, **own, **self.environment}

    def node_script(self) -> str:
        """Return what bash runs on each node. It reads TE_MODELS_HEAD, the address of the first node, and
        TE_MODELS_JOB, an identifier that no other job has."""
        quoted = {name: shlex.quote(str(path)) for name, path in {"folder": self.folder, "config": self.config}.items()}
        words = [self.python, "-m", "torch.distributed.run", "--nnodes", self.nnodes]
        words += ["--nproc-per-node", str(self.nproc_per_node), "--max-restarts", str(self.max_restarts)]
        train = ["-m", "te_models", "train", str(self.config), *self.keys]
        exports = "".join(
            f'[ -n "${{{name}+x}}" ] || export {name}={shlex.quote(value)}\n'
            for name, value in self.variables().items()
        )
        return (
            "set -euo pipefail\n"
            f"{exports}"
            f"cd -- {quoted['folder']}\n"
            f"if [ ! -r {quoted['config']} ]; then\n"
            f"    printf 'te-models: node %s does not see %s; allowed: a folder that all nodes share\\n' "
            f'"$(hostname)" {quoted["config"]} >&2\n'
            "    exit 2\n"
            "fi\n"
            f"exec {shlex.join(words)} \\\n"
            f'    --rdzv-backend c10d --rdzv-id "$TE_MODELS_JOB" --rdzv-endpoint "$TE_MODELS_HEAD:{self.port}" \\\n'
            f"    {shlex.join(train)}\n"
        )


def job_name(config: Path) -> str:
    """Return the name of a job that runs a file: the file's, in the letters that schedulers take."""
    letters = re.sub(r"[^a-z0-9]+", "-", config.stem.lower()).strip("-")[:45].strip("-")
    return letters or "te-models"


def check_word(option: str, text: str) -> str:
    """Return a value of a scheduler's own option. Raises ConfigError where a script could read it otherwise."""
    check(bool(WORD.fullmatch(text)), option, text, "letters, digits and . _ : / = , @ + -")
    return text
