"""How large functions and classes are: at most ten parameters outside of layers/te, a hundred lines, thirty methods.

What was larger when this was written is named with its size, and may only shrink; what is small by now leaves the list.
"""

import ast
from collections.abc import Iterator
from functools import cache

from tests.structure.tree import ROOT, modules, parsed

MOST_PARAMETERS, MOST_LINES, MOST_METHODS = 10, 100, 30
PORCH = "layers/te/"
"""Has the parameters that Transformer Engine has."""
PARAMETERS: dict[str, int] = {
    "checkpoints/families/base/common.py:decoder_fields": 13,
    "checkpoints/tools/foreign_export.py:export_checkpoint": 11,
    "checkpoints/write/output_folder.py:write_folder": 12,
    "kernels/cross_entropy/kl.py:linear_kl_bwd": 13,
    "kernels/cross_entropy/log_probs.py:label_log_prob_gradients": 11,
    "kernels/flash_attention/library.py:attention_backward": 11,
    "kernels/packed_attention/op.py:packed_attention_bwd": 11,
    "kernels/recurrent/op.py:rule_bwd": 12,
    "kernels/rope/op.py:rope_frequencies": 20,
    "kernels/router/op.py:router_topk": 11,
    "kernels/router/op.py:router_topk_fwd": 11,
    "kernels/router/reference.py:router_topk": 11,
    "kernels/router/triton.py:router_topk_fwd": 11,
    "layers/distributed/vocab_parallel.py:_LinearLoss.forward": 12,
    "layers/gemm/registered.py:linear_layer_backward": 17,
    "layers/gemm/registered.py:linear_layer_forward": 12,
    "te_models/generation/decoding.py:generate": 13,
    "te_models/generation/decoding.py:stream": 13,
    "te_models/hf/model.py:TEModelForCausalLM.forward": 13,
    "te_models/model/gpt.py:GPTModel.__init__": 11,
    "te_models/model/gpt.py:GPTModel.forward": 11,
    "te_models/model/gpt.py:GPTModel.from_pretrained": 11,
    "te_models/model/layer.py:DecoderLayer._run": 12,
    "te_models/model/layer.py:DecoderLayer.forward": 13,
    "te_models/training/optimizer/adamw.py:Optimizer.__init__": 13,
    "te_models/training/step.py:train_step": 11,
}
LINES: dict[str, int] = {
    "checkpoints/quantized/export_plan.py:plan_quantized_export": 111,
    "kernels/quantize/nvfp4/triton.py:quantize_nvfp4_kernel": 134,
    "layers/te/attention/transformer_layer.py:TransformerLayer.__init__": 133,
    "te_models/model/gpt.py:GPTModel.forward": 133,
    "te_models/training/loop.py:_run": 112,
    "te_models/training/setup.py:set_up": 118,
}
METHODS: dict[str, int] = {
    "layers/quantizer/base.py:Quantizer": 45,
    "layers/quantizer/nvfp4.py:NVFP4Quantizer": 35,
    "layers/tensor/quantized_tensor.py:QuantizedTensor": 46,
    "te_models/config/model.py:ModelConfig": 38,
}


@cache
def functions_and_classes() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield "file:Class.function" and the definition, nested ones included."""

    def visit(node: ast.AST, path: str, around: str) -> Iterator:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"{path}:{around}{child.name}", child
                yield from visit(child, path, f"{around}{child.name}.")
            else:
                yield from visit(child, path, around)

    files = modules().values()
    return [found for file in files for found in visit(parsed(file), file.relative_to(ROOT).as_posix(), "")]


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments with a name a caller may pass. A Triton kernel takes no values but numbers and pointers, so
    that it has none here."""
    if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return 0
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def beyond(sizes: dict[str, int], most: int, listed: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what is larger than it may be, and what is listed and need not be: (found, allowed)."""
    large = {name: size for name, size in sizes.items() if size > listed.get(name, most)}
    small = {name: sizes.get(name, 0) for name in listed if sizes.get(name, 0) <= most}
    return {name: (size, listed.get(name, most)) for name, size in (large | small).items()}


def test_a_function_has_at_most_ten_parameters_and_a_hundred_lines() -> None:
    functions = {name: node for name, node in functions_and_classes() if not isinstance(node, ast.ClassDef)}
    counts = {name: parameters_of(node) for name, node in functions.items() if not name.startswith(PORCH)}
    assert beyond(counts, MOST_PARAMETERS, PARAMETERS) == {}
    lines = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in functions.items()}
    assert beyond(lines, MOST_LINES, LINES) == {}


def test_a_class_has_at_most_thirty_methods() -> None:
    classes = {name: node for name, node in functions_and_classes() if isinstance(node, ast.ClassDef)}
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    methods = {name: sum(isinstance(item, functions) for item in node.body) for name, node in classes.items()}
    assert beyond(methods, MOST_METHODS, METHODS) == {}


def test_what_is_too_large_or_listed_for_nothing_is_found() -> None:
    assert beyond({"a": 11, "b": 10}, 10, {}) == {"a": (11, 10)}
    assert beyond({"a": 12}, 10, {"a": 11}) == {"a": (12, 11)} and beyond({"a": 11}, 10, {"a": 12}) == {}
    assert beyond({"b": 10}, 10, {"a": 12, "b": 11}) == {"a": (0, 12), "b": (10, 11)}
