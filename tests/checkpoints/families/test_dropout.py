"""What is dropped in training, where, with which probability: every family against transformers."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf
from te_models.checkpoints.families.base.text_part import text_part
from tests.checkpoints.family_cases import CASES, family_of, make
from tests.checkpoints.hf_cases import transformers

FIELDS = {
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_bigcode": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_neo": ("attention_dropout", "resid_dropout", "embed_dropout"),
    "gptj": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "codegen": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_neox": ("attention_dropout", "hidden_dropout", "hidden_dropout"),
    "phi": ("attention_dropout", "resid_pdrop", "embd_pdrop"),
    "phi3": ("attention_dropout", "resid_pdrop", None),
    "seed_oss": ("attention_dropout", "residual_dropout", None),
    "starcoder2": ("attention_dropout", "residual_dropout", "embedding_dropout"),
    "opt": ("attention_dropout", "dropout", None),
    "xglm": ("attention_dropout", "dropout", "dropout"),
    "biogpt": ("attention_probs_dropout_prob", "hidden_dropout_prob", "hidden_dropout_prob"),
    "bloom": ("attention_dropout", "hidden_dropout", None),
    "falcon": (None, None, None),
    "mpt": (None, None, None),
    "dbrx": (None, "resid_pdrop", None),
    "ernie4_5": (None, None, None),
    "lfm2": (None, None, None),
    "lfm2_moe": (None, None, None),
    "mamba": (None, None, None),
    "falcon_mamba": (None, None, None),
    "mamba2": (None, None, None),
    "ernie4_5_moe": (None, None, None),
}
"""Family -> the fields that drop attention weights, outputs of sublayers, embeddings; others have the first only."""
ALL = ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "residual_dropout")
ALL += ("resid_dropout", "embed_dropout", "dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Longer than the tokens here: we compute short ones in blocks, which draw their numbers by themselves."""
WITHOUT = ("deepseek_v32", "glm_moe_dsa")
"""Families whose sparse attention has no dropout."""
REFUSED = {
    "stablelm": ("hidden_dropout",),  # of the MLP's output alone, as in persimmon
    "persimmon": ("hidden_dropout",),
    "falcon": ("hidden_dropout", "attention_dropout"),  # of the sum of both; of weights only with ALiBi
    "mpt": ("resid_pdrop",),  # which transformers does not read
}
"""Family -> fields that it refuses but for 0."""
Masks = list[tuple[float, tuple[int, ...]]]


@contextmanager
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Masks]:
    """Make dropout draw the same numbers at its n-th place of each p and shape in both; the places are listed."""
    found: Masks = []

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if p == 0 or not training:
            return x
        shape = (math.prod(x.shape[:-1]), x.shape[-1])  # opt and xglm join the first dimensions
        number = found.count((p, shape))
        found.append((p, shape))
        generator = torch.Generator().manual_seed(1000 * number + math.prod(shape))
        return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, **options: Any) -> Any:
        p = options.get("dropout_p", 0.0)
        if not p:
            return plain(q, k, v, attn_mask, **options)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * (options.get("scale") or q.shape[-1] ** -0.5)
        if options.get("is_causal"):
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores + attn_mask if attn_mask.is_floating_point() else scores.masked_fill(~attn_mask, -math.inf)
        return dropout(scores.softmax(-1), p) @ v

    plain: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", dropout)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        yield found


def mechanism(case: str) -> object:
    """What is dropped where, and by fields of which names: the same for most families."""
    family = CASES[case][0]
    return FIELDS.get(family), REFUSED.get(family)


def with_dropout(case: str, **values: float) -> transformers.PreTrainedModel:
    """The case's model with these fields, with the same weights, in training mode."""
    theirs = make(case)
    values |= {name: 64 for name in WINDOWS if getattr(theirs.config, name, None)}
    config = type(theirs.config)(**{**theirs.config.to_dict(), **values})
    config._attn_implementation = "eager"
    again = type(theirs)(config)
    again.load_state_dict(theirs.state_dict())
    return again.train()


@pytest.mark.matrix(by={"case": mechanism})
@pytest.mark.parametrize("case", [case for case in CASES if family_of(case) not in WITHOUT])
@torch.no_grad()
def test_masks_are_where_transformers_has_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another probability for every field that any family has: the same places, and the same logits."""
    family = CASES[case][0]
    values = {name: 0.1 + 0.05 * i for i, name in enumerate((*ALL, "embedding_dropout"))}
    values |= dict.fromkeys(REFUSED.get(family, ()), 0.0)
    theirs = with_dropout(case, **values)
    ours = GPTModel.from_hf(theirs).train()
    attention, hidden, embedding = FIELDS.get(family, ("attention_dropout", None, None))
    assert ours.config.attention.attention_dropout == (values[attention] if attention else 0.0)
    assert ours.config.hidden_dropout == (values[hidden] if hidden else 0.0)
    assert ours.config.embedding_dropout == (values[embedding] if embedding else 0.0)
    ids = torch.randint(3, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    with masks(monkeypatch) as theirs_dropped:
        expected = theirs(ids).logits
    with masks(monkeypatch) as ours_dropped:
        got = ours(ids).logits
    assert ours_dropped == theirs_dropped
    assert len({p for p, _ in ours_dropped}) == len({attention, hidden, embedding} - {None})
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.sentinels("phi", "gpt2", "seed_oss")
@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "phi", "phi3", "seed_oss", "starcoder2"])
def test_the_fields_come_back(tmp_path: Path, case: str) -> None:
    family = CASES[case][0]
    names = {name: 0.1 + i / 7 for i, name in enumerate(dict.fromkeys(FIELDS[family])) if name is not None}
    for values in (names, dict.fromkeys(names, 0.0)):
        source = tmp_path / ("hf" if values is names else "none")
        with_dropout(case, **values).save_pretrained(source)
        ours, back = source.with_suffix(".ours"), source.with_suffix(".back")
        import_hf(source, ours)
        export_hf(ours, back)
        assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
        read = FAMILIES[family].read_config(json.loads((source / "config.json").read_text()))
        written = FAMILIES[family].write_config(read)
        assert {name: written[name] for name in values} == values
        embedding = json.loads((ours / "config.json").read_text())["config"]["embedding"]
        assert ("embedding_dropout" in embedding) == (values is names and family != "gpt_neox")


@pytest.mark.parametrize("family", WITHOUT)
def test_dropout_of_sparse_attention_is_refused_by_name(family: str) -> None:
    values = json.loads(make(family).config.to_json_string()) | {"attention_dropout": 0.1}
    with pytest.raises(CheckpointError, match=r"attention\.indexer is .*; allowed: null with .*attention_dropout"):
        FAMILIES[family].read_config(values)


def test_every_family_is_here() -> None:
    texts = {name for name, family in FAMILIES.items() if text_part(family) is None}
    assert {family for family, _ in CASES.values()} | {"llama", "mistral", "qwen2", "qwen3", "kimi_k2"} == texts
