"""Split layers that exchange rows while they multiply: asynchronous tensor parallelism.

With sequence parallelism a layer's rows are gathered before one matrix product and summed and scattered after another.
torch can cut such a pair into one piece per rank, so that a piece travels, through memory that the devices share, while
another is multiplied (`torch.ops.symm_mem`). Its pass over the graphs of Inductor finds the pairs. Here is what
switches the pass on for one compilation, what prepares the ranks, and what says where nothing overlaps.
"""

import functools
import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from te_models.layers.distributed.tensor_parallel import TensorParallelModule

from .cache import inductor, keeps_whole_graphs

DEVICES = ("cuda",)
"""Where torch has memory that ranks share."""
OVERLAPPED, ALONE, QUANTIZED = "te_models_overlapped", "te_models_not_overlapped", "te_models_quantized_gemms"
"""Counters, in `torch._dynamo.utils.counters["inductor"]`, of what compiled graphs hold: gathers and scatters that
overlap with a matrix product and those that do not, and products of quantized matrices, whose never do. What torch
keeps on disk with a graph includes them, so that a graph that was compiled before is counted, too."""
_warned: set[str] = set()


def share_memory_of_ranks(model: nn.Module) -> None:
    """Let the ranks of a model's split layers share memory. Every rank calls this before it compiles.

    Raises ValueError where that cannot be: without sequence parallelism, on another device, and without NCCL.
    """
    split = [part for part in model.modules() if isinstance(part, TensorParallelModule) and part.sequence_parallel]
    if not split:
        raise ValueError("async_tensor_parallel is True; allowed for a model without sequence_parallel layers: False")
    found = {parameter.device.type for parameter in model.parameters()}
    if not found <= set(DEVICES):
        names = " and ".join(sorted(found))
        raise ValueError(f"async_tensor_parallel is True; allowed on {names}: False, or a model on {DEVICES[0]}")
    if not dist.is_nccl_available():  # torch's pass would leave every graph as it is
        raise ValueError("async_tensor_parallel is True; allowed with a torch without NCCL: False")
    symmetric_memory = _symmetric_memory()
    for group in sorted({part.tp_group_name for part in split}):
        if not symmetric_memory.is_symm_mem_enabled_for_group(group):
            with warnings.catch_warnings():
                # torch 2.13 says that nobody needs to call it, and its pass skips groups for which nobody did
                warnings.simplefilter("ignore", FutureWarning)
                symmetric_memory.enable_symm_mem_for_group(group)


def _symmetric_memory() -> Any:
    import torch.distributed._symmetric_memory as found  # which needs a torch with distributed

    return found


def overlapping_backend_for(module: nn.Module) -> Callable[..., Any]:
    """Return torch.compile's backend for functions of a module whose layers overlap: `backend_for`, and the pass.

    One object for all modules that may share graphs, because torch compiles again for another backend.
    """
    return _overlapping_backend(keeps_whole_graphs(module))


@functools.cache
def _overlapping_backend(keep_whole: bool) -> Callable[..., Any]:
    def overlapping(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.utils import counters
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx

        config: Any = torch.compiler.config  # whose `patch` no type checker sees
        found = counters["inductor"]
        before = {name: found[name] for name in (OVERLAPPED, ALONE, QUANTIZED)}
        passes, others = graph_pass(), inductor_config.post_grad_custom_post_pass
        if others is not None:
            passes = [*(others if isinstance(others, (list, tuple)) else [others]), passes]
        compiler: Callable[..., Any] = inductor if keep_whole else compile_fx
        with config.patch(cache_key_tag=f"{config.cache_key_tag}async_tensor_parallel "):
            # not config.patch of Inductor: torch compiles the backward graph when it is called first
            compiled = compiler(graph, inputs, config_patches={"post_grad_custom_post_pass": passes})
        warn_of_what_waits(*(found[name] - count for name, count in before.items()))
        return compiled

    return overlapping


def warn_of_what_waits(overlapped: int, alone: int, quantized: int) -> None:
    """Warn, once for the same numbers, where nothing in a graph overlaps though ranks exchange rows, or where some
    layers multiply quantized matrices. The forward graph decides: the backward graph, compiled later, has the
    same pairs."""
    if not alone or (overlapped and not quantized):
        return
    message = (
        f"async_tensor_parallel: {overlapped} of the {overlapped + alone} gathers and scatters of a graph overlap with "
        "a matrix product"
    )
    if quantized:
        message += "; under a recipe they do not, because what is multiplied is quantized between the two"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=2)


@functools.cache
def graph_pass() -> Any:
    """Return the pass over a graph of Inductor that fuses pairs and counts them."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Overlap(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            overlap(graph)

        def uuid(self) -> str:
            return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    return Overlap()


def overlap(graph: fx.Graph) -> None:
    """Fuse, in place, gathers with the matrix products after them and scatters with those before them; count all."""
    from torch._dynamo.utils import counters
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    if not _collectives(graph):
        return
    separate_biases(graph)
    # as torch's option `_micro_pipeline_tp` does; that has no place for what comes before
    micro_pipeline_tp_pass(graph)
    fused = (torch.ops.symm_mem.fused_all_gather_matmul.default, torch.ops.symm_mem.fused_matmul_reduce_scatter.default)
    found = counters["inductor"]
    found[OVERLAPPED] += sum(node.target in fused for node in graph.nodes)
    found[ALONE] += len(_collectives(graph))
    found[QUANTIZED] += len(graph.find_nodes(op="call_function", target=torch.ops.te_models.scaled_gemm.default))


def _collectives(graph: fx.Graph) -> list[fx.Node]:
    """Return a graph's gathers and scatters over ranks that share memory. The group's name is their last argument."""
    enabled = _symmetric_memory().is_symm_mem_enabled_for_group
    ops = torch.ops._c10d_functional
    targets = (ops.all_gather_into_tensor.default, ops.reduce_scatter_tensor.default)
    found = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    return [node for node in found if enabled(str(node.args[-1]))]


def separate_biases(graph: fx.Graph) -> None:
    """Turn `addmm(bias, x, w)` of gathered rows x into a product that torch's pass knows, and a sum.

    In 16 bits the product is then rounded once more, before the bias is added."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        arguments: Any = node.args
        bias, rows, weight = arguments
        shaped = rows.target is aten.reshape.default
        source = rows.args[0] if shaped else rows
        if node.kwargs or bias.meta["val"].dim() != 1 or not _is_gathered(source):
            continue
        with graph.inserting_before(node):
            found = _call(graph, aten.mm.default, rows, weight)
            if shaped:  # the pass wants the shape of the rows right behind the product
                found = _call(
                    graph, aten.reshape.default, found, [*source.meta["val"].shape[:-1], weight.meta["val"].shape[1]]
                )
            found = _call(graph, aten.add.Tensor, found, bias)
            if shaped:
                found = _call(graph, aten.reshape.default, found, [*node.meta["val"].shape])
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, *arguments: Any) -> fx.Node:
    """Add a call to a graph, with the value that says its shape and dtype."""
    node = graph.call_function(target, arguments)
    values = fx.map_arg(arguments, lambda argument: argument.meta["val"])
    node.meta["val"] = target(*values)
    return node


def _is_gathered(node: Any) -> bool:
    ops = torch.ops._c10d_functional
    return node.target is ops.wait_tensor.default and node.args[0].target is ops.all_gather_into_tensor.default
