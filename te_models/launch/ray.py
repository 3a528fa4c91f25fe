"""Ray: a script for `ray job submit` that starts torchrun on each of several nodes."""

from .job import Job

_SCRIPT = '''\
"""Runs torchrun on each of {nodes} nodes of a Ray cluster.

ray job submit -- python THIS_FILE, on a folder that all nodes share.
"""

import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, RESOURCES = {nodes}, {resources}
NODE_SCRIPT = {script}


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def run_node(head, job):
    environment = {{**os.environ, "TE_MODELS_HEAD": head, "TE_MODELS_JOB": job}}
    return subprocess.run(["bash", "-c", NODE_SCRIPT], env=environment).returncode


def main():
    ray.init()
    group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    places = [
        PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        for index in range(NODES)
    ]
    head = ray.get(address.options(num_cpus=0, scheduling_strategy=places[0]).remote())
    needs = {{"num_cpus": RESOURCES["CPU"], "num_gpus": RESOURCES.get("GPU", 0)}}
    job = ray.get_runtime_context().get_job_id()
    waiting = [run_node.options(scheduling_strategy=place, **needs).remote(head, job) for place in places]
    codes = ray.get(waiting)
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
'''


def ray_script(job: Job) -> str:
    """Return the script; it needs `ray` on the cluster alone."""
    resources = {"CPU": job.nproc_per_node} | ({"GPU": job.nproc_per_node} if job.gpus else {})
    return _SCRIPT.format(nodes=job.nodes, resources=repr(resources), script=ascii(job.node_script()))
