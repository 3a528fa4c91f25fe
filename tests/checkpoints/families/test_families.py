"""Every family beyond the first six, against transformers: weights and configuration there and back, and the logits."""

import copy
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models import GPTModel, KVCache
from te_models.checkpoints import FAMILIES, CheckpointError, export_hf, import_hf, open_checkpoint
from te_models.checkpoints.families.base.names import Fused, PerExpert
from te_models.checkpoints.families.base.text_part import text_part
from te_models.cli.main import main
from tests.checkpoints.family_cases import CASES, family_of, make
from tests.checkpoints.hf_cases import CASES as FIRST
from tests.checkpoints.hf_cases import assert_same_bits, plain, stored, there_and_back, transformers

BOUND = 1e-5
FIRST_CASES = {family: case for case, (family, _) in reversed(CASES.items())}
"""Family -> its first case."""


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(folder, **options)
    return folder


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.matrix(by={"case": family_of})
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weights_config_and_logits(tmp_path: Path, case: str) -> None:
    theirs = make(case)
    source = save(theirs, tmp_path / "hf")
    assert_same_bits(stored(there_and_back(source, tmp_path)), stored(source))
    original = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back/config.json").read_text()) == original
    check_config(original)
    ours = GPTModel.from_pretrained(tmp_path / "ours").eval()
    # One token, an odd length within a window, and one beyond every window and original length of the cases.
    for length in (1, 5, 41):
        expected, got = theirs(tokens(length)).logits, ours(tokens(length)).logits
        assert expected.std() > 0.02
        assert_close(got, expected, of=ours)
    # The first part is longer than every original length: the others are rotated as it is.
    cache = KVCache(ours.config, batch_size=2, max_length=41)
    steps = [ours(part, cache=cache).logits for part in tokens(41).split([20, 1, 20], dim=1)]
    assert_close(torch.cat(steps, dim=1), expected, of=ours)


@pytest.mark.sentinels(
    "llama4-other-chunks",
    "smollm3-windows",
    "phi3-longrope-window",
    "hy_v3-biases",
    "ernie4_5_moe-interval",
    "gemma2-no-caps",
    "gpt2-scaled-by-layer",
    "deepseek_v2-biases",
    "gpt_oss-default-rope",
)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_configuration_written_afresh_is_the_same_model_to_transformers(case: str) -> None:
    """As of a model that was never a Hugging Face one: nothing of an older config.json stands beside it."""
    theirs = make(case)
    values = json.loads(theirs.config.to_json_string())
    family = FAMILIES[values["model_type"]]
    written = json.loads(json.dumps(family.write_config(family.read_config(values))))
    config = transformers.AutoConfig.for_model(family.model_type, **{"pad_token_id": 0} | written)
    again = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    again.load_state_dict(theirs.state_dict())
    assert torch.equal(again(tokens(41)).logits, theirs(tokens(41)).logits)


@pytest.mark.sentinels("qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "gpt2", "gemma3_text")
@pytest.mark.parametrize("family", FIRST_CASES)
@torch.no_grad()
def test_every_number_of_the_configuration_counts(family: str) -> None:
    """With all of its numbers changed, those that the cases leave at the class's default, too; three families have none
    that transformers follows."""
    theirs = make(FIRST_CASES[family])
    values = json.loads(theirs.config.to_json_string())
    known = FAMILIES[family].known - OF_TRAINING
    other = {name: changed(name, value) for name, value in values.items() if name in known}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**with_infinities({**values, **other}))
        theirs_changed = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs_changed.load_state_dict(theirs.state_dict())
    expected = theirs_changed(tokens(41)).logits
    moved = (expected - theirs(tokens(41)).logits).abs().max() > 0.01 * expected.abs().max()
    assert moved == (family not in ("biogpt", "opt", "xglm"))
    assert_close(GPTModel.from_hf(theirs_changed).eval()(tokens(41)).logits, expected)


OF_TRAINING = {
    "attention_dropout",
    "attn_pdrop",
    "hidden_dropout",
    "init_std",
    "initializer_range",
    "resid_pdrop",
    "residual_dropout",
    "router_aux_loss_coef",
    "embedding_fraction",  # is always 1.0
    "moe_norm_min",  # may be no larger than what vanishes
}


ONE_VALUE = ("partial_rotary_factor", "alpha", "moe_normalize_expert_weights")


def changed(name: str, value: Any) -> Any:
    """Another value for each float, also those that describe the rotation; such an epsilon is not lost in rounding."""
    if isinstance(value, dict):
        return {key: changed(key, inner) for key, inner in value.items()}
    if not isinstance(value, float) or name in ONE_VALUE:
        return value
    return 0.07 if "eps" in name else value * 1.37


def largest_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def assert_close(got: torch.Tensor, expected: torch.Tensor, of: GPTModel | None = None) -> None:
    """of: the model of `tokens`, whose rounding in float32 may come to more than BOUND on some processors: on both
    sides, at most 2.5 times what it comes to on ours."""
    bound = BOUND
    if of is not None and not largest_error(got, expected) <= BOUND:
        ids = tokens(expected.shape[1])
        bound = 2.5 * largest_error(of(ids).logits, copy.deepcopy(of).double()(ids).logits)
    assert largest_error(got, expected) <= bound


@pytest.mark.parametrize("case", ["llama4", "deepseek_v3", "gpt_oss", "cohere2", "gemma3", "phi", "opt"])
@torch.no_grad()
def test_padding(tmp_path: Path, case: str) -> None:
    """Left and right padding, which moves the chunks of chunked attention."""
    theirs = make(case)
    ours = GPTModel.from_pretrained(save(theirs, tmp_path)).eval()
    ids, mask = tokens(23), torch.ones(2, 23, dtype=torch.int64)
    mask[0, :4] = 0
    mask[1, 18:] = 0
    kept = mask.bool()
    got = ours(ids, attention_mask=mask).logits
    assert got.isfinite().all()
    assert_close(got[kept], theirs(ids, attention_mask=mask).logits[kept])


@pytest.mark.sentinels("mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "gpt2", "gemma2")
@pytest.mark.parametrize("family", FIRST_CASES)
def test_wrong_tensors_are_named(tmp_path: Path, family: str) -> None:
    source = save(make(FIRST_CASES[family]), tmp_path / "hf")
    file = next(source.glob("*.safetensors"))
    tensors = load_file(file)
    unused, values = FAMILIES[family].unused, json.loads((source / "config.json").read_text())
    matrices = [name for name, tensor in tensors.items() if tensor.dim() > 1 and not unused.holds(name, values)]
    for name in (matrices[0], matrices[len(matrices) // 2], matrices[-1]):
        t = tensors[name]
        for changed, message in (
            ({k: v for k, v in tensors.items() if k != name}, f"missing: .*{re.escape(name)}"),
            ({**tensors, f"{name}_scale": t.clone()}, f"not part of this model: '{re.escape(name)}_scale'"),
            ({**tensors, name: t[..., :-1].contiguous()}, rf"'{re.escape(name)}' has shape .* is expected"),
            ({**tensors, name: t.mT.contiguous()}, rf"'{re.escape(name)}' has shape .* is expected"),
        ):
            if changed.get(name) is not None and t.shape == changed[name].shape and len(changed) == len(tensors):
                continue  # a square matrix: its transpose cannot be told from it, which is why orientation is declared
            save_file(changed, file, metadata={"format": "pt"})
            with pytest.raises(CheckpointError, match=message):
                open_checkpoint(source)


@pytest.mark.sentinels("qwen3_moe", "granitemoe")
@pytest.mark.parametrize("family", [f for f in FIRST_CASES if "fused" in FAMILIES[f].forms])
def test_fused_sharded_and_per_expert_files_are_the_same_model(tmp_path: Path, family: str) -> None:
    """transformers writes the form it holds in memory on request; the same bits come out of it, and go back into it."""
    theirs = make(FIRST_CASES[family])
    published = save(theirs, tmp_path / "published", max_shard_size="40KB")
    fused = save(theirs, tmp_path / "fused", save_original_format=False)
    assert len(list(published.glob("*.safetensors"))) > 1
    assert stored(published).keys() != stored(fused).keys()
    for form, folder in (("published", published), ("fused", fused)):
        import_hf(folder, tmp_path / f"{form}-ours", layout="per-gemm")
        export_hf(tmp_path / f"{form}-ours", tmp_path / f"{form}-back")
        assert_same_bits(stored(folder), stored(tmp_path / f"{form}-back"))
    assert_same_bits(stored(tmp_path / "published-ours"), stored(tmp_path / "fused-ours"))
    export_hf(tmp_path / "published-ours", tmp_path / "other", form="fused")
    assert_same_bits(stored(fused), stored(tmp_path / "other"))
    loaded(tmp_path / "other", theirs)
    with pytest.raises(CheckpointError, match=r"has no form 'split'; its forms: published, .*fused"):
        export_hf(tmp_path / "published-ours", tmp_path / "none", form="split")


def loaded(folder: Path, expected: transformers.PreTrainedModel) -> None:
    """Check that transformers reads the same model from a folder, with no tensor missing or left over."""
    got, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info
    assert_same_bits(got.state_dict(), expected.state_dict())


def missing(folder: Path) -> set[str]:
    """Return the tensors that transformers does not find in a folder; it gives them random values, with a warning."""
    with warnings.catch_warnings(action="ignore"):
        _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return set(info["missing_keys"])


@pytest.mark.sentinels("gpt_oss", "llama4_text")
@pytest.mark.parametrize("family", [f for f in FIRST_CASES if "per-expert" in FAMILIES[f].forms])
def test_families_that_publish_fused_experts_have_a_form_with_single_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    theirs = make(FIRST_CASES[family])
    source = save(theirs, tmp_path / "hf", max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    import_hf(source, tmp_path / "ours", layout="per-gemm")
    words = ["export", str(tmp_path / "ours"), str(tmp_path / "single"), "--form", "per-expert"]
    assert main([*words, "--max-shard-size", "20kB"]) == 0
    note = f"transformers does not load the form 'per-expert' of {family}; it loads --form published"
    assert capsys.readouterr().out.splitlines()[-1] == f"note: {note}"
    assert len(list((tmp_path / "single").glob("*.safetensors"))) > 1
    assert missing(tmp_path / "single")  # which is why the note is there
    rows, single = {}, stored(tmp_path / "single")
    for name, tensor in theirs.state_dict().items():
        if ".experts." not in name:
            continue
        at, _, kind = name.rpartition(".")
        kind, bias = kind.removesuffix("_bias"), kind.endswith("_bias")
        if family in ("gpt_oss", "llama4_text") and not bias:
            tensor = tensor.mT  # stored [in, out]
        if family == "dbrx":  # one matrix of all experts, w2 as [in, out]
            tensor = tensor.unflatten(0, (theirs.config.ffn_config.moe_num_experts, -1))
            tensor = tensor.mT if kind == "w2" else tensor
        for e, matrix in enumerate(tensor):
            parts = [(kind, matrix)]
            if kind == "gate_up_proj":
                gate, up = (matrix[0::2], matrix[1::2]) if family == "gpt_oss" else matrix.chunk(2)
                parts = [("gate_proj", gate), ("up_proj", up)]
            rows |= {f"{at}.{e}.{part}.{'bias' if bias else 'weight'}": rows_of for part, rows_of in parts}
    assert len(rows) > 8
    assert_same_bits(
        {n: t.contiguous() for n, t in rows.items()}, {n: t for n, t in single.items() if ".experts." in n}
    )
    import_hf(tmp_path / "single", tmp_path / "again", layout="per-gemm")
    assert_same_bits(stored(tmp_path / "ours"), stored(tmp_path / "again"))
    assert export_hf(tmp_path / "again", tmp_path / "single-again").to_dict()["notes"] == [note]
    assert_same_bits(single, stored(tmp_path / "single-again"))
    assert not export_hf(tmp_path / "again", tmp_path / "back", form="published").notes
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    loaded(tmp_path / "back", theirs)


def test_every_family_with_experts_has_fused_and_single_ones() -> None:
    for family in FAMILIES.values():
        if any("experts" in n for e in family.fields for n in e.names):
            kinds = {type(names.experts) for names in family.forms.values()}
            assert kinds == {PerExpert, Fused}, family.model_type


def test_every_family_has_a_case() -> None:
    first = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"}
    assert {getattr(transformers, config_class).model_type for config_class, _ in FIRST.values()} == first
    images = {name for name, family in FAMILIES.items() if text_part(family) is not None}  # test_text_part.py
    assert {family for family, _ in CASES.values()} | first | {"kimi_k2"} | images == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "form", "names"),
    [("gpt2", "without-prefix", {"transformer.": ""}), ("gpt_neox", "lm_head", {"embed_out": "lm_head"})],
)
def test_other_names_on_the_hub(tmp_path: Path, family: str, form: str, names: dict[str, str]) -> None:
    """Published files with other names, and with buffers that nobody needs."""
    source = save(make(FIRST_CASES[family]), tmp_path / "hf")
    import_hf(source, tmp_path / "ours")
    tensors = stored(source)
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    buffer = {"gpt2": "h.0.attn.bias", "gpt_neox": "gpt_neox.layers.0.attention.masked_bias"}[family]
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_bytes((source / "config.json").read_bytes())
    save_file({**tensors, buffer: torch.ones(1)}, tmp_path / "hub/model.safetensors", metadata={"format": "pt"})
    assert import_hf(tmp_path / "hub", tmp_path / "hub-ours").passthrough == (f"carried.{buffer}",)
    imported = stored(tmp_path / "hub-ours")
    assert torch.equal(imported.pop(f"carried.{buffer}"), torch.ones(1))
    assert_same_bits(stored(tmp_path / "ours"), imported)
    export_hf(tmp_path / "hub-ours", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), {**tensors, buffer: torch.ones(1)})
    export_hf(tmp_path / "ours", tmp_path / "asked", form=form)
    assert_same_bits(stored(tmp_path / "asked"), tensors)


def edited(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Change fields of a config.json; return what it says."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return config


@torch.no_grad()
def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: Path) -> None:
    theirs = make("deepseek_v3")
    source = save(theirs, tmp_path / "hf")
    config = edited(source, {"model_type": "kimi_k2"})
    assert_same_bits(stored(there_and_back(source, tmp_path)), stored(source))
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    assert_close(GPTModel.from_pretrained(tmp_path / "ours").eval()(tokens(41)).logits, theirs(tokens(41)).logits)


@torch.no_grad()
def test_gelu_fast_of_gpt_neox_20b_is_the_tanh_form(tmp_path: Path) -> None:
    source = save(make("gpt_neox"), tmp_path / "hf")
    config = edited(source, {"hidden_act": "gelu_fast"})
    there_and_back(source, tmp_path)
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    assert_close(GPTModel.from_pretrained(tmp_path / "ours").eval()(tokens(41)).logits, theirs(tokens(41)).logits)


@torch.no_grad()
def test_llama4_without_a_chunk_size_sees_everything(tmp_path: Path) -> None:
    """As Llama Guard 4, which transformers 5.17 does not run: to it, one chunk of 64 is the same for so few tokens."""
    theirs = make("llama4-dense")
    theirs.config.attention_chunk_size = 64
    source = save(theirs, tmp_path / "hf")
    config = edited(source, {"attention_chunk_size": None, "layer_types": None})
    there_and_back(source, tmp_path)
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    ours = GPTModel.from_pretrained(tmp_path / "ours").eval()
    assert ours.config.moe is None and ours.config.layer_types == ("full", "full")
    assert_close(ours(tokens(41)).logits, theirs(tokens(41)).logits)
    family = FAMILIES["llama4_text"]
    assert family.read_config(family.write_config(ours.config)) == ours.config


def check_config(original: dict[str, Any]) -> None:
    """What the family writes for the model means the same to us, and to transformers in every field that it knows."""
    family = FAMILIES[original["model_type"]]
    config = family.read_config(original)
    written = json.loads(json.dumps(family.write_config(config)))
    assert family.read_config(written) == config
    config_class = type(transformers.AutoConfig.for_model(original["model_type"]))
    before = config_class.from_dict(with_infinities(original)).to_dict()
    after = config_class.from_dict(with_infinities({**written, "model_type": original["model_type"]})).to_dict()
    for name in family.known & before.keys():
        if name in NOT_COMPARED or (name in ("head_dim", "intermediate_size") and before[name] is None):
            continue
        if name == "intermediate_size" and (before.get("num_local_experts") == 0 or "block_multiple_of" in before):
            continue  # shared_intermediate_size says it; of lfm2 it is written as it is, not to be adjusted
        assert plain(after[name]) == plain(before[name]), name


def with_infinities(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers reads it from a file: infinity is an object there."""
    infinite = {"__float__": "Infinity"}
    return json.loads(json.dumps(values), object_hook=lambda found: math.inf if found == infinite else found)


NOT_COMPARED = {
    "first_k_dense_replace",  # mlp_layer_types says it, where there is one; else layers are compared
    "moe_layer_start_index",  # several ranges give the same layers
    "moe_layer_end_index",
    "moe_layer_interval",
    "sliding_window_pattern",  # layer_types says it
    "full_attn_idxs",
    "attention_types",  # several lists give the same layers
    "block_auto_adjust_ff_dim",  # intermediate_size says it
    "block_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
    "attention_softmax_in_fp32",  # rounding alone
    "residual_in_fp32",
    "scale_attention_softmax_in_fp32",
    "global_attn_every_n_layers",
    "layer_group_size",
    "max_window_layers",
    "interleave_moe_layer_step",  # moe_layers says it
    "no_rope_layer_interval",  # no_rope_layers says it
    "mamba_d_ssm",  # mamba_expand says it, where it is null
    "mamba_expand",
    "router_aux_loss_coef",  # counts only with output_router_logits
}
