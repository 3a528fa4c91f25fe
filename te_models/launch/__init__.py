"""Launching a run on a cluster: a script for Slurm, a manifest for Kubernetes, a job for Ray, and what submits each.

job          what all of them run on a node: torchrun with a rendezvous, in a shared folder
slurm, kubernetes, ray    the file of each scheduler

May import the configuration of runs and the layout's sizes. Nothing else imports this package but the command line.
No scheduler of our own, and no torch: a login node may have neither a GPU nor memory.
"""

from .job import Job, job_name
from .kubernetes import manifest
from .ray import ray_script
from .slurm import sbatch_script

__all__ = ["Job", "job_name", "manifest", "ray_script", "sbatch_script"]
