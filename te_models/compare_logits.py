"""How well two models agree on the same tokens: transformers reads one folder, we read the other.

Models are loaded one after the other, never side by side, so that the larger one decides the memory. T tokens, V
vocabulary, H hidden.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .extras import require
from .model import GPTModel
from .sizes import plural

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of logits, as a part of the largest logit, that still counts as agreement."""

_WINDOW = 64
_TOKENIZERS = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class AgreementReport:
    """What was found.

    kl_mean, kl_max: Kullback-Leibler divergence of our next-token distribution from theirs, in nats, over the tokens.
    argmax_agreement: part of the tokens at which both put the same one first. relative_error: largest difference of
    logits divided by the largest logit. stages: the same for what comes out of the embedding, each layer but the last,
    and the final norm. first_divergence: the first stage beyond `tolerance`, or "logits"; None without one.
    """

    tokens: int
    dtype: str
    tolerance: float
    kl_mean: float
    kl_max: float
    argmax_agreement: float
    relative_error: float
    stages: dict[str, float]
    first_divergence: str | None

    @property
    def agree(self) -> bool:
        """Whether the logits are within the tolerance."""
        return self.relative_error <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; errors that are no numbers are None."""
        stages = {name: _finite(error) for name, error in self.stages.items()}
        return {"agree": self.agree, **{n: _finite(v) for n, v in asdict(self).items()}, "stages": stages}

    def __str__(self) -> str:
        worst = max(self.stages, key=lambda name: self.stages[name])
        lines = [
            f"{'agree' if self.agree else 'differ'}: {plural(self.tokens, 'token')} in {self.dtype}",
            f"  logits            {self.relative_error:.2e} of the largest (tolerance {self.tolerance:.0e})",
            f"  same best token   {self.argmax_agreement:.2%}",
            f"  KL divergence     {self.kl_mean:.2e} on average, {self.kl_max:.2e} at most",
            f"  largest in        {worst}: {self.stages[worst]:.2e}",
            f"  first divergence  {self.first_divergence or 'none'}",
        ]
        return "\n".join(lines)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare_logits(
    theirs: str | os.PathLike[str],
    ours: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    tokens: int = 256,
    text: str | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    verify: bool = True,
) -> AgreementReport:
    """Run transformers on the Hugging Face folder `theirs` and our model on `ours`, a folder of either kind.

    Arguments:
        dtype: of weights and computation.
        tokens: how many tokens to look at, in windows of 64, or of the positions that the model has if they are fewer.
        text: what to look at, read with the tokenizer of `theirs`; None takes random tokens.
        tolerance: see AgreementReport; None means TOLERANCES[dtype].
        seed: of the random tokens.
        verify: whether the weights of `ours` are checked against its manifest.json.
    """
    from te_models.checkpoints import open_checkpoint
    from te_models.checkpoints.io.hub import local_folder
    from te_models.checkpoints.io.model_folder import check_model_folder
    from te_models.checkpoints.io.strict_json import read_object
    from te_models.checkpoints.io.weight_files import open_weights, plain_file

    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; allowed: 1 or more")
    limit = TOLERANCES.get(dtype) if tolerance is None else tolerance
    if limit is None:
        raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, TOLERANCES))}, or any with a tolerance")
    if not limit >= 0:
        raise ValueError(f"tolerance is {tolerance}; allowed: 0 or more")
    folder = local_folder(theirs)
    check_model_folder(folder)
    if read_object(plain_file(folder, "config.json"), f"{folder}/config.json").get("model_type") == "te_models":
        leads = f"transformers can read: te-models export {theirs} OUT writes one"
        raise ValueError(f"{theirs} is a te_models folder; allowed: a Hugging Face folder, which {leads}")
    # pickled weights, and missing files of either folder, are refused before any is loaded
    open_weights(folder).close()
    with open_checkpoint(ours, verify=verify) as checkpoint:
        longest = min(_WINDOW, checkpoint.config.max_position_embeddings)
    model = load_theirs(folder, dtype)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    windows = _windows(folder, vocabulary, tokens, text, seed, longest)
    try:
        expected = [_their_stages(model, window) for window in windows]
    except Exception as error:  # of transformers, and of the packages that read quantized weights for it
        raise _theirs_failed("run", folder, error) from error
    del model
    mine = GPTModel.from_pretrained(ours, dtype=dtype, verify=verify).eval()
    if mine.config.vocab_size != vocabulary:
        raise ValueError(f"{theirs} has {plural(vocabulary, 'token')} and {ours} {mine.config.vocab_size}")
    got = [_our_stages(mine, window) for window in windows]
    for stages in got if "final norm" not in expected[0] else ():
        del stages["final norm"]
    if expected[0].keys() != got[0].keys():
        counts = [sum(name.startswith("layer ") for name in stages[0]) + 1 for stages in (expected, got)]
        raise ValueError(f"{theirs} has {plural(counts[0], 'layer')} and {ours} {counts[1]}")
    widths = [stages[0]["embedding"].shape[-1] for stages in (expected, got)]
    if widths[0] != widths[1]:
        raise ValueError(f"{theirs} has the hidden size {widths[0]} and {ours} {widths[1]}")
    errors = {name: relative_error(_all(got, name), _all(expected, name)) for name in expected[0]}
    divergence = kl_divergence(_all(expected, "logits"), _all(got, "logits"))
    return AgreementReport(
        tokens=sum(window.numel() for window in windows),
        dtype=str(dtype).removeprefix("torch."),
        tolerance=limit,
        kl_mean=divergence.mean().item(),
        kl_max=divergence.max().item(),
        argmax_agreement=agreement(_all(got, "logits"), _all(expected, "logits")),
        relative_error=errors["logits"],
        stages={name: error for name, error in errors.items() if name != "logits"},
        first_divergence=next((name for name, error in errors.items() if not error <= limit), None),
    )


def load_theirs(folder: str | os.PathLike[str], dtype: torch.dtype) -> Any:
    """Load a folder with transformers, from the disk only, and without running code that the folder brings.

    Attention is the eager one, as the model says: the others of transformers may leave soft-capping out. So are the
    experts: the others refuse widths whose rows are not multiples of 16 bytes.
    Raises ValueError where transformers cannot read the folder, say because of its quantized format.
    """
    transformers = require("transformers", "hf", feature="the comparison")
    try:
        config = _their_config(folder)
        texts = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        auto = transformers.AutoModelForCausalLM if texts else transformers.AutoModelForImageTextToText
        how = {"attn_implementation": "eager", "experts_implementation": "eager", "use_safetensors": True, **_OPTIONS}
        model = auto.from_pretrained(folder, config=config, dtype=dtype, **how)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's; the others are transformers' own
            raise
        raise _theirs_failed("read", folder, error) from error
    for p in model.parameters():  # dequantized weights are in bfloat16, whatever was asked for
        # of FP8 there is no larger dtype: such weights stay as they are stored
        if p.is_floating_point() and p.itemsize > 1 and torch.promote_types(p.dtype, dtype) == dtype:
            p.data = p.data.to(dtype)
    return model.eval()


def _theirs_failed(what: str, folder: str | os.PathLike[str], error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    reason = reason if len(reason) <= 300 else f"{reason[:297]}..."
    return ValueError(f"transformers cannot {what} {folder}: {type(error).__name__}: {reason}")


_OPTIONS = {"local_files_only": True, "trust_remote_code": False}
_WITHOUT_EMBEDDING = ("mamba", "mamba2", "falcon_mamba")
"""Kinds whose hidden states in transformers begin with what the first layer returns, and have the last layer's, too."""
_SAME_CLASS = {"kimi_k2": "deepseek_v3"}
"""Kinds of which transformers has no class -> the one that their code is a copy of."""


def _their_config(folder: str | os.PathLike[str]) -> Any:
    transformers = require("transformers", "hf", feature="the comparison")
    values, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    kind = values.get("model_type")
    if kind in _SAME_CLASS and kind not in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(**{**values, "model_type": _SAME_CLASS[kind]})
    config = transformers.AutoConfig.from_pretrained(folder, **_OPTIONS)
    if kind == "minimax_m2" and values.get("rotary_dim"):  # which transformers 5.17 ignores: it rotates the whole head
        config.rope_parameters.setdefault("partial_rotary_factor", values["rotary_dim"] / config.head_dim)
    if kind == "gemma":  # 5.17 ignores hidden_activation, and that published files mean the tanh form by "gelu"
        written = values.get("hidden_activation")
        config.hidden_act = written or ("gelu_pytorch_tanh" if config.hidden_act == "gelu" else config.hidden_act)
    text = config.get_text_config()
    if text.model_type == "llama4_text" and text.attention_chunk_size is None:  # 5.17 needs a number
        text.attention_chunk_size = text.max_position_embeddings
    return config


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The largest difference divided by the largest reference magnitude."""
    return ((value - reference).abs().max() / reference.abs().max()).item()


def agreement(a: Tensor, b: Tensor) -> float:
    """The fraction of positions where both put the same token first."""
    return (a.argmax(-1) == b.argmax(-1)).float().mean().item()


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """[..., V], [..., V] -> [...]: sum of p log(p / q), in float64."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (p_logits, q_logits))
    return (p.exp() * (p - q)).sum(dim=-1).clamp(min=0)


Stages = dict[str, Tensor]


@torch.no_grad()
def _their_stages(model: Any, window: Tensor) -> Stages:
    output = model(window[None], output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    if model.config.model_type in _WITHOUT_EMBEDDING:
        states = (model.get_input_embeddings()(window[None]), *states[:-2], states[-1])
    first, *hidden, last = (_flat_lanes(h.float(), len(window)) for h in states)
    size = getattr(model.config.get_text_config(), "hidden_size", first.shape[-1])
    stages = {"embedding": first[..., :size]} | {f"layer {i}": h for i, h in enumerate(hidden)}
    if last.shape[-1] == size:  # else lanes that no norm has seen
        stages["final norm"] = last
    return {**stages, "logits": output.logits.float()}


def _flat_lanes(hidden: Tensor, length: int) -> Tensor:
    """A residual stream of several lanes, [L, 1, S, H] or [1, S, L, H], as our layers return it, [1, S, L * H]."""
    if hidden.dim() == 4:
        hidden = (hidden.movedim(0, 2) if hidden.shape[1:3] == (1, length) else hidden).flatten(2)
    return hidden


@torch.no_grad()
def _our_stages(model: GPTModel, window: Tensor) -> Stages:
    stages: Stages = {}
    parts: dict[str, nn.Module] = {"embedding": model.embedding}
    parts |= {f"layer {i}": layer for i, layer in enumerate(list(model.decoder.layers)[:-1])}
    with _recorded({**parts, "final norm": model.decoder.final_layernorm}, stages):
        logits = model(window[None]).logits
    assert logits is not None
    return {**stages, "logits": logits.float()}


@contextmanager
def _recorded(modules: dict[str, nn.Module], into: Stages) -> Iterator[None]:
    """Keep what each module returns."""

    def record(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            into[name] = (output[0] if isinstance(output, tuple) else output).float()

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _all(stages: list[Stages], name: str) -> Tensor:
    return torch.cat([stage[name].flatten(0, 1) for stage in stages])


def _windows(
    folder: os.PathLike[str], vocabulary: int, tokens: int, text: str | None, seed: int, longest: int
) -> list[Tensor]:
    """Return windows of up to `longest` tokens, `tokens` in all or as many as the text has."""
    if text is None:
        ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed), device="cpu")
    else:
        if not any(any(Path(folder).glob(name)) for name in _TOKENIZERS):  # transformers makes up an empty one for some
            raise ValueError(f"{folder} has no tokenizer to read the text with; allowed: a folder with tokenizer.json")
        from .tokenizer import encode_as_transformers

        ids = torch.tensor(encode_as_transformers(Path(folder), text)[:tokens], dtype=torch.int64, device="cpu")
        if ids.numel() == 0:
            raise ValueError("the text has no tokens")
        if ids.max() >= vocabulary:
            raise ValueError(f"the tokenizer of {folder} gives the token {ids.max()}, and its model has {vocabulary}")
    return list(ids.split(longest))
