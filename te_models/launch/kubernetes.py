"""Kubernetes: an indexed Job, one pod a node, and the headless Service by which pods find the first one."""

import json
import re
from typing import Any

from ..config import ConfigError, check
from .job import Job, check_word

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9/_-]*")
_NOT_PLAIN = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


def manifest(
    job: Job, *, image: str, claim: str, mount: str = "/shared", namespace: str | None = None, backoff: int = 6
) -> str:
    """Return the YAML of a Service and a Job. image: with Python, torch and te_models. claim: the
    PersistentVolumeClaim, writable by many nodes, that all pods mount at `mount`, where the run's folder is. backoff:
    how many pods may fail before the job does; each starts again, and the run continues from its newest checkpoint.

    Raises ConfigError for a name that Kubernetes does not take, and a folder outside of `mount`.
    """
    check(bool(IMAGE.fullmatch(image)), "--image", image, "the name of a container image")
    check_word("--claim", claim)
    if not mount.startswith("/") or not job.folder.is_relative_to(mount):
        raise ConfigError(
            f"--folder is {str(job.folder)!r}; allowed: a folder under --mount {mount!r}, which all pods share"
        )
    metadata: dict[str, Any] = {"name": job.name}
    if namespace is not None:
        metadata["namespace"] = check_word("--namespace", namespace)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name}},
    }
    limits = {"nvidia.com/gpu": job.nproc_per_node} if job.gpus else {"cpu": job.nproc_per_node}
    variables = {"TE_MODELS_HEAD": f"{job.name}-0.{job.name}", "TE_MODELS_JOB": job.name}
    container = {
        "name": "train",
        "image": image,
        "command": ["bash", "-c", job.node_script().replace("$", "$$")],  # Kubernetes puts values in place of $(NAME)
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "shared", "mountPath": mount}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 300,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    work = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completions": job.nodes,
            "parallelism": job.nodes,
            "completionMode": "Indexed",
            "backoffLimit": backoff,
            "template": {"metadata": {"labels": {"app": job.name}}, "spec": pod},
        },
    }
    return "".join(f"---\n{_yaml(part)}" for part in (service, work))


def _yaml(value: Any, indent: str = "") -> str:
    """Return dictionaries, lists and scalars as YAML, a line each; texts in the quotes of JSON, as YAML reads them."""
    if isinstance(value, dict):
        return "".join(f"{indent}{_scalar(key)}:{_below(each, indent)}" for key, each in value.items())
    items = [_yaml(v, indent + "  ") if isinstance(v, (dict, list)) else _below(v, indent)[1:] for v in value]
    return "".join(f"{indent}- {item.lstrip(' ')}" for item in items)


def _below(value: Any, indent: str) -> str:
    if isinstance(value, (dict, list)):
        return "\n" + _yaml(value, indent + "  ")
    if isinstance(value, str) and "\n" in value and _is_block(value):
        lines = "".join(f"{indent}    {line}\n" if line else "\n" for line in value.splitlines())
        return f" |\n{lines}"
    return f" {_scalar(value)}\n"


def _is_block(text: str) -> bool:
    """Whether a text can be written line by line: YAML has other line ends than "\\n", and drops trailing ones."""
    return text.endswith("\n") and not text.startswith((" ", "\n")) and all(c.isprintable() or c == "\n" for c in text)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN:
        return value
    return re.sub(
        r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", _escaped, json.dumps(value, ensure_ascii=False)
    )


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
