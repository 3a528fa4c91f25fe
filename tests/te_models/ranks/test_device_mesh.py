"""What a device mesh says: only dimensions whose name is documented mean something, and every other one is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel, RouterConfig, compile_model, update_expert_bias
from te_models.layers import DotProductAttention, GroupedLinear, LayerNormMLP, Linear, MultiheadAttention, ops
from te_models.model.parallel import process_groups
from te_models.parallel import ParallelDims, parallelize
from te_models.training.ranks.data_parallel import Ranks, average_gradients
from tests.build import tiny, tiny_moe

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Callable[..., Any]]:
    """Make meshes of four ranks, of which this process is the first and the others do not exist."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield lambda *names, shape=None: init_device_mesh(
        "cpu", shape or {1: (4,), 2: (2, 2)}[len(names)], mesh_dim_names=names or None
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh") / "model"
    GPTModel(tiny_moe()).save_pretrained(folder)
    return folder


UNKNOWN = ("dp", "pp", "dp_replicate", "dp_shard", "fsdp", "cp", "copies", "tensor", "TP", "tp ", "")


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_dimension_of_another_name_is_refused(name: str, mesh: Callable[..., Any], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"device_mesh has the dimension .* splits nothing; allowed: 'tp'") as error:
        GPTModel.from_pretrained(folder, device_mesh=mesh(name))
    assert repr(name) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"has the dimension .*; pass the part .*, device_mesh\['ep'\]$"):
        GPTModel.from_pretrained(folder, device_mesh=mesh(name, "ep"))


def test_dimensions_without_names_are_refused(mesh: Callable[..., Any], folder: Path) -> None:
    for shape in ((4,), (2, 2)):
        with pytest.raises(ValueError, match=f"device_mesh has {len(shape)} dimensions without names; allowed: "):
            GPTModel.from_pretrained(folder, device_mesh=mesh(shape=shape))


def test_documented_names_mean_what_they_say(mesh: Callable[..., Any], folder: Path) -> None:
    assert process_groups(None) == {}
    both = mesh("ep", "tp")
    assert process_groups(both) == {"ep_group": both.get_group("ep"), "tp_group": both.get_group("tp")}
    assert process_groups(mesh("tp")).keys() == {"tp_group"}
    assert process_groups(mesh("ep", "etp")).keys() == {"ep_group", "etp_group"}
    part = mesh("dp_replicate", "ep")["ep"]
    model = GPTModel.from_pretrained(folder, device_mesh=part)
    assert model.tp_group is None and model.ep_group.size() == 2
    assert model.get_parameter("decoder.layers.0.mlp.experts.linear_fc1.weight").shape[0] == 2


BIASED = RouterConfig(expert_bias=True)
CALLS: dict[str, Callable[[Any], object]] = {
    "GPTModel tp": lambda mesh: GPTModel(tiny(), tp_group=mesh),
    "GPTModel ep": lambda mesh: GPTModel(tiny_moe(), ep_group=mesh),
    "GPTModel cp": lambda mesh: GPTModel(tiny()).set_context_parallel_group(mesh),
    "Linear": lambda mesh: Linear(32, 32, parallel_mode="column", tp_group=mesh),
    "LayerNormMLP": lambda mesh: LayerNormMLP(32, 64, set_parallel_mode=True, tp_group=mesh),
    "GroupedLinear": lambda mesh: GroupedLinear(2, 32, 32, parallel_mode="column", tp_group=mesh),
    "MultiheadAttention": lambda mesh: MultiheadAttention(32, 4, set_parallel_mode=True, tp_group=mesh),
    "DotProductAttention": lambda mesh: DotProductAttention(4, 8, tp_group=mesh),
    "set_tensor_parallel_group": lambda mesh: Linear(32, 32).set_tensor_parallel_group(mesh),
    "ops.AllReduce": ops.AllReduce,
    "compile_model": lambda mesh: compile_model(GPTModel(tiny()), process_group=mesh),
    "update_expert_bias": lambda mesh: update_expert_bias(GPTModel(tiny_moe(BIASED)), process_group=mesh),
    "average_gradients": lambda mesh: average_gradients([], Ranks(0, 4), group=mesh),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_mesh_is_no_process_group(call: str, mesh: Callable[..., Any]) -> None:
    """Where one group is asked for, no dimension of a mesh is chosen."""
    with pytest.raises(ValueError, match=r"group is a DeviceMesh; allowed: a process group, such as get_group\('tp'\)"):
        CALLS[call](mesh("tp"))


def test_parallelize_takes_no_other_mesh(mesh: Callable[..., Any]) -> None:
    """Neither one whose dimensions may mean anything, nor one of other ranks than the model was built over."""
    with pytest.raises(
        TypeError, match=r"mesh is a DeviceMesh with the dimensions \('anything',\); allowed: a Parallel"
    ):
        parallelize(GPTModel(tiny()), mesh("anything"))
    dims = ParallelDims(ranks=4, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_model_parallel_size of the mesh is 2, and the model was built over 1"):
        parallelize(GPTModel(tiny()), dims.build_mesh("cpu"))
