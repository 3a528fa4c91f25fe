"""What torch.compile makes of a model: graphs and what is in them, breaks, and what is compiled again and why.

The graphs are traced and differentiated but not lowered (as by the backend "aot_eager"): the questions are the same,
the answers come without waiting for a code generator.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.fx import GraphModule

from te_models.layers import Recipe, autocast

from ..model import GPTModel
from .compile_model import Mode, compile_part, compiled_parts

_OF_TORCH = ("aten", "prims", "prim")
CALLS = (
    ("train step", True, (2, 32)),
    ("the same again, with an equal but new recipe", True, (2, 32)),
    ("train step, another length", True, (2, 48)),
    ("train step, another batch and length", True, (3, 20)),
    ("evaluation without gradients", False, (2, 32)),
    ("evaluation, another batch and length", False, (3, 40)),
)
"""What a run does with a model: name, whether it trains, sequences and their tokens, at most as many as positions."""


def compile_report(
    model: GPTModel,
    recipe: Callable[[], Recipe] | None = None,
    *,
    mode: Mode = "whole",
    dynamic: bool | None = None,
) -> dict[str, Any]:
    """Call a compiled model in the ways that a run does and say what each made the compiler do.

    recipe: makes a new recipe for each call, as programs do; None: high precision. mode, dynamic: as for
    `compile_model`, except that a break ends a graph and is reported. Returns JSON values: "calls" in order, each with
    the number of graphs it compiled, the reasons for compiling again, and "programs": of each forward and backward pass
    compiled the number of operations, and how often each one occurs that is not torch's own; "graphs" in all; "breaks"
    by reason. The gradients of the model are dropped; afterwards nothing of it is compiled.
    """
    longest = model.config.max_position_embeddings
    programs: list[dict[str, Any]] = []
    with _compiler() as run, _kept_mode(model), _compiled(model, mode, dynamic, _recorder(programs)):
        rows = []
        for name, training, (batch, length) in CALLS:
            shape = batch, min(length, longest)
            ids = torch.randint(model.config.vocab_size, shape, device=next(model.parameters()).device)
            model.train(training)
            before, known = len(run()), len(programs)
            with (
                torch.set_grad_enabled(training),
                autocast(recipe is not None, recipe=None if recipe is None else recipe()),
            ):
                loss = model(ids, labels=ids, return_logits=False).loss
            if training:
                loss.backward()
                model.zero_grad()
            new = run()[before:]
            reasons, new_programs = [r for r in new if r], programs[known:]
            rows.append(
                {"call": name, "shape": list(shape), "graphs": len(new), "reasons": reasons, "programs": new_programs}
            )
        breaks = {str(reason): count for reason, count in counters["graph_break"].items()}
        return {"calls": rows, "graphs": counters["stats"]["unique_graphs"], "breaks": breaks}


def _recorder(programs: list[dict[str, Any]]) -> Callable[..., Any]:
    """Return a backend that notes what is in each program it is given, and runs it as it is."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # type: ignore[attr-defined]
    from torch._dynamo.backends.common import aot_autograd

    def recording(kind: str) -> Callable[..., Any]:
        def compiler(program: GraphModule, inputs: list[Any]) -> Any:
            programs.append({"pass": kind, **_contents(program)})
            return make_boxed_func(program.forward)

        return compiler

    return aot_autograd(
        fw_compiler=recording("forward"),
        bw_compiler=recording("backward"),
        inference_compiler=recording("forward without gradients"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


def _contents(program: GraphModule) -> dict[str, Any]:
    """Count the operations of a program and of those inside it."""
    graphs = [module.graph for module in program.modules() if isinstance(module, GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    operations = [t for t in targets if isinstance(t, torch._ops.OpOverload)]
    registered = Counter(t._schema.name for t in operations if t.namespace not in _OF_TORCH)
    return {"operations": len(operations), "registered": dict(sorted(registered.items()))}


@contextlib.contextmanager
def _compiled(model: GPTModel, mode: Mode, dynamic: bool | None, backend: Callable[..., Any]) -> Iterator[None]:
    parts = compiled_parts(model, mode)
    for part in parts:
        compile_part(part, dynamic=dynamic, backend=backend, fullgraph=False)
    try:
        yield
    finally:
        for part in parts:
            part._compiled_call_impl = None


@contextlib.contextmanager
def _compiler() -> Iterator[Callable[[], list[str]]]:
    """Start with an empty compiler; give a function that returns, for each frame compiled, why it was not the first."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()

    def compiled() -> list[str]:
        frames = [m for m in get_compilation_metrics() if m.is_forward is not False and m.co_name]
        return [" ".join((m.recompile_reason or "").split()) for m in frames]

    try:
        yield compiled
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def _kept_mode(model: torch.nn.Module) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}  # a part may be in another mode than the whole
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
