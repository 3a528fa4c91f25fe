"""Optional dependencies: import one, or say in one sentence which extra brings it.

The core needs only torch and safetensors. Everything else (transformers, rich, matplotlib, ...) is imported where it
is used through `require`, so that a missing package is an instruction to the user and not a traceback, and so that
`import te_models` stays light.

A leaf module: it imports nothing of the project.
"""

import importlib
import importlib.util
from types import ModuleType

EXTRAS: dict[str, tuple[str, ...]] = {
    "hf": ("transformers", "tokenizers", "huggingface_hub"),
    "trainer": ("accelerate",),
    "trl": ("trl", "datasets"),
    "serve": ("accelerate", "fastapi", "uvicorn", "openai", "typer"),
    "peft": ("peft", "transformers"),
    "gpu": ("triton",),
    "quantized": ("accelerate", "compressed_tensors"),
    "data": ("datasets", "pyarrow"),
    "train": ("rich",),
    "completion": ("shtab",),
    "plot": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "eval": ("lm_eval",),
    "gguf": ("gguf",),
    "demo": ("gguf",),
}
"""The top-level modules that each extra of pyproject.toml brings (a test compares the two)."""


class MissingExtraError(ImportError):
    """A package of an optional extra is not installed; the message says how to install it."""


class UnsupportedTorchError(ImportError):
    """The installed torch is older than te_models supports; the message says which is needed."""


def require(module: str, extra: str, *, feature: str = "this") -> ModuleType:
    """Import `module` and return it.

    Args:
        module: Dotted name to import, for example "matplotlib.pyplot".
        extra: The te_models extra that brings it, for example "plot".
        feature: What the user asked for; it begins the sentence of the error.

    Raises:
        MissingExtraError: The package is absent. An installed package that fails inside its own import is that
            package's error and passes unchanged.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        sentence = f"{feature} needs the package {package!r}: pip install 'te_models[{extra}]'"
        raise MissingExtraError(sentence, name=package) from None


def installed(extra: str) -> bool:
    """Whether every package of `extra` is installed. Looks for them without importing them."""
    return all(importlib.util.find_spec(module) is not None for module in EXTRAS[extra])
