"""One way to compile a model, and what it sets.

Models compile as they are: `torch.compile(model, fullgraph=True)` gives one graph. This helper names the choices that
matter and makes them explicit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from te_models.kernels.compiling import compiling
from te_models.layers.collectives import check_member

from ..model import GPTModel
from ..model.moe import DeepEPDispatcher, MoELayer
from .async_tensor_parallel import overlapping_backend_for, share_memory_of_ranks
from .cache import backend_for

if TYPE_CHECKING:  # a torch without distributed has none
    from torch.distributed import ProcessGroup

Mode = Literal["whole", "block"]
M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T")


def compile_model(
    model: M,
    mode: Mode = "whole",
    *,
    dynamic: bool | None = None,
    backend: str = "inductor",
    timeout_s: float = 1800.0,
    process_group: ProcessGroup | None = None,
    async_tensor_parallel: bool = False,
) -> M:
    """Compile `model` in place and return it; parameter names do not change.

    mode: "whole" compiles one graph per call; steps are fastest, and compile time grows with the number of layers.
    "block" compiles one transformer layer that all equal layers share, and the output layer; compile time does not
    depend on the depth, and embedding and final norm stay eager. A single layer, or any other module, is compiled
    whole. A second call of compile_model compiles again, in the new mode. dynamic: None compiles for the first shape
    and once more, for all shapes, when the shape changes; True compiles for all shapes at once; False compiles for each
    shape. Compilation is always fullgraph: a graph break is an error, not a slow path.

    With several ranks in the default process group, every rank must call this function, and must call the model equally
    often. Ranks then compile together and for the same shapes; with dynamic=False each rank compiles for its own
    shapes. process_group: the ranks to which this applies, for example one pipeline stage (None: the default group).
    timeout_s: how long a rank waits for the others before it raises an error that names the missing ranks.

    async_tensor_parallel: split layers with sequence parallelism exchange rows while they multiply, on CUDA, with
    dynamic=False. A graph in which nothing overlaps warns.

    Raises ValueError for an unknown mode, for "block" of a module that is no GPTModel, for "whole" of a model that
    FSDP2 shards (its gathers run between the graphs of its blocks), for a group without this rank, for a model whose
    tokens reach their experts by deep_ep, and for async_tensor_parallel of a model without sequence parallelism, on
    another device, with another backend or dynamic.

    Example:
        model = compile_model(GPTModel(config), mode="block")
        model(input_ids, labels=input_ids).loss.backward()
    """
    if process_group is not None:
        check_member("process_group", process_group)
    modules = compiled_parts(model, mode)
    if async_tensor_parallel:
        if backend != "inductor":
            raise ValueError(f"async_tensor_parallel is True and backend {backend!r}; allowed: backend='inductor'")
        if dynamic is not False:  # where a size is a variable, torch's pass does not know the gather
            raise ValueError(f"async_tensor_parallel is True and dynamic {dynamic}; allowed: dynamic=False")
        share_memory_of_ranks(model)
    # what was compiled as a whole before would go on as one graph, with its blocks in it
    model._compiled_call_impl = None
    for module in modules:
        used = overlapping_backend_for(module) if async_tensor_parallel else backend
        compile_part(module, dynamic=dynamic, backend=used)
    if dynamic is not False and _several_ranks(process_group):
        from .ranks import synchronized  # imports the compiler, and start-up need not

        together = synchronized(timeout_s, process_group)
        for module in modules:
            module._compiled_call_impl = together(module._compiled_call_impl)  # type: ignore[arg-type]
    return model


def compiled_parts(model: torch.nn.Module, mode: Mode) -> list[torch.nn.Module]:
    """Return the modules that are compiled, each by itself. Errors: see `compile_model`."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}; allowed: {', '.join(map(repr, get_args(Mode)))}")
    check_traceable(model)
    if mode == "block":
        if not isinstance(model, GPTModel):
            raise ValueError(
                f'mode is "block" and the model a {type(model).__name__}; allowed: a GPTModel, or mode="whole"'
            )
        depths = [] if model.mtp is None else [*model.mtp.layers]
        further = [depth.get_submodule("transformer_layer") for depth in depths]
        return [*model.decoder.layers, *further, *([model.output_layer] if model.post_process else [])]
    if _is_sharded(model):
        raise ValueError('mode is "whole" and the model is sharded by FSDP2; allowed: mode="block"')
    return [model]


def check_traceable(model: torch.nn.Module) -> None:
    """Raise ValueError for a model that torch cannot trace as one graph."""
    layers = (module for module in model.modules() if isinstance(module, MoELayer))
    if any(isinstance(layer.dispatcher, DeepEPDispatcher) for layer in layers):
        from te_models.layers.distributed.deepep import UNTRACEABLE

        raise ValueError(UNTRACEABLE)


def compile_part(
    module: torch.nn.Module, *, dynamic: bool | None, backend: str | Callable[..., Any], fullgraph: bool = True
) -> None:
    """Compile a module in place. Where sizes may change, each is a separate symbol: two that are equal in the call that
    compiles are one size to torch otherwise, so that a number of tokens that equals a layer's width, a constant, or a
    batch as large as its length, had one more graph for other calls."""
    call: Callable[..., Any] = module._call_impl
    if type(module).__module__.startswith("torch.nn."):
        call = _one_frame_more(call)
    if backend == "inductor":
        backend = backend_for(module)
    compiled = torch.compile(call, fullgraph=fullgraph, dynamic=dynamic, backend=backend)
    module._compiled_call_impl = with_room(compiled if dynamic is False else _sizes_apart(compiled))


GRAPHS = 64
"""How many graphs torch may make of one piece of code. It expects eight, and layers of four kinds (with windows and
without, in FP8 and in bf16, dense and of experts) have as many in training and evaluation alone."""


def with_room(function: Callable[..., T]) -> Callable[..., T]:
    """Return a compiled function that may have `GRAPHS` graphs, where one more than torch expects is an error."""
    import torch._dynamo.config as config

    return _compiled_under(config, "recompile_limit", lambda before: max(before, GRAPHS), function)


def _one_frame_more(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls one: of torch's own modules, torch compiles only what is called in another frame."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return outer


def _sizes_apart(function: Callable[..., T]) -> Callable[..., T]:
    import torch.fx.experimental._config as config

    return _compiled_under(config, "use_duck_shape", lambda before: False, function)


def _compiled_under(
    config: Any, name: str, changed: Callable[[Any], Any], function: Callable[..., T]
) -> Callable[..., T]:
    """Return a compiled function that finds another value of a setting that torch reads when it traces a call."""

    def call(*args: Any, **kwargs: Any) -> T:
        if compiling():  # inlined into a graph whose caller decides
            return function(*args, **kwargs)
        before = getattr(config, name)
        setattr(config, name, changed(before))  # config.patch takes 100 us more
        try:
            return function(*args, **kwargs)
        finally:
            setattr(config, name, before)

    return call


def _several_ranks(group: ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 shards a part of the model."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
