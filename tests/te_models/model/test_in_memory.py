"""State dicts and transformers models in memory: the same numbers as by way of files, for every family."""

import json
import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch

from te_models import GPTModel, ModelConfig
from te_models.checkpoints import AutoConverter, CheckpointError, export_hf, import_hf, quantize
from te_models.config import AttentionConfig, MLPConfig
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.hf_cases import assert_same_bits, stored, transformers
from tests.compare import refused
from tests.te_models.hf_models import CASES as FIRST_CASES
from tests.te_models.hf_models import hf_model


def model_of(case: str) -> transformers.PreTrainedModel:
    return make(case) if case in CASES else hf_model(case)


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(folder)
    return folder


def tensors_of(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.stored_tensors()}


@pytest.mark.sentinels("gpt_oss", "deepseek_v3", "gemma2", "gpt2", "mamba2")
@pytest.mark.parametrize("case", [*CASES, *FIRST_CASES])
@torch.no_grad()
def test_there_and_back_for_every_family(tmp_path: Path, case: str) -> None:
    theirs = model_of(case)
    source = save(theirs, tmp_path / "hf")
    ours, files = GPTModel.from_hf(theirs), GPTModel.from_pretrained(source)
    assert ours.config == files.config
    assert_same_bits(tensors_of(ours), tensors_of(files))
    back = ours.to_hf()
    assert type(back) is type(theirs)
    assert_same_bits(back.state_dict(), theirs.state_dict())
    ids = torch.arange(3, 20)[None]
    back.config._attn_implementation = theirs.config._attn_implementation
    torch.testing.assert_close(back(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    converter = AutoConverter.from_pretrained(source)
    both = converter.from_hf(stored(source), layout="per-gemm", keep_unused=True)
    assert_same_bits(converter.to_hf(both), stored(source))


@pytest.mark.sentinels("llama", "qwen3_moe-mixed", "gemma3")
@pytest.mark.parametrize(
    "case", ["llama", "llama-biases", "llama-tied-head_dim", "mixtral", "qwen3_moe-mixed", "gemma3"]
)
def test_a_model_from_memory_is_saved_with_its_family(tmp_path: Path, case: str) -> None:
    theirs = model_of(case).to(torch.bfloat16)
    GPTModel.from_hf(theirs, dtype=torch.bfloat16).save_pretrained(tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(tmp_path / "back"), stored(save(theirs, tmp_path / "hf")))
    ours, original = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("back", "hf"))
    assert ours["model_type"] == original["model_type"] and ours["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert_same_bits(loaded.state_dict(), theirs.state_dict())


def test_tensors_are_shared_where_nothing_moves_and_copied_where_it_does() -> None:
    theirs = model_of("llama")
    converter = AutoConverter.from_config(theirs.config)
    same = AutoConverter.from_config(json.loads(theirs.config.to_json_string()))
    ours = converter.from_hf(theirs.state_dict())
    assert converter.config == same.config
    assert json.loads(json.dumps(converter.hf_config(ours))) == same.hf_config(ours)
    hf = theirs.state_dict()
    assert ours["output_layer.weight"].data_ptr() == hf["lm_head.weight"].data_ptr()
    qkv = ours["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert torch.equal(qkv[:32], hf["model.layers.0.self_attn.q_proj.weight"])
    back = converter.to_hf(ours)
    q = back["model.layers.0.self_attn.q_proj.weight"]
    assert q.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr(), "rows of ours, as a view"
    half = converter.from_hf(hf, dtype="bfloat16")
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    model = GPTModel.from_hf(theirs)
    assert model.output_layer.weight.data_ptr() != hf["lm_head.weight"].data_ptr(), "a model has its own"


def test_a_model_of_ours_becomes_the_family_that_fits_or_is_asked_for() -> None:
    config = ModelConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=2,
        max_position_embeddings=64,
        attention=AttentionConfig(num_attention_heads=4),
        mlp=MLPConfig(ffn_hidden_size=40),
    )
    ours = GPTModel(config, params_dtype=torch.bfloat16)
    assert ours.to_hf().config.model_type == "llama" and ours.to_hf().dtype == torch.bfloat16
    theirs = ours.to_hf("mistral")
    assert theirs.config.model_type == "mistral"
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(ids).logits, theirs(ids).logits, rtol=0.05, atol=0.02)
    refused(lambda: ours.to_hf("qwen3"), "cannot express", error=CheckpointError)
    with pytest.raises(CheckpointError, match="'unknown' is not supported"):
        AutoConverter.from_config(config, family="unknown")
    assert AutoConverter.from_config(config).family.model_type == "llama"
    for wrong in (3, transformers.LlamaConfig):
        with pytest.raises(CheckpointError, match=r"config is .*; allowed: a ModelConfig, .* of transformers"):
            AutoConverter.from_config(wrong)


def test_a_model_becomes_its_family_without_the_configurations_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports each of 400 modules for a walk over its table, which takes seconds."""

    def walk(mapping: object) -> None:
        raise AssertionError("all configurations are imported")

    monkeypatch.setattr(type(transformers.CONFIG_MAPPING), "items", walk)
    assert GPTModel.from_hf(model_of("llama")).to_hf().config.model_type == "llama"


def test_wrong_state_dicts_are_refused(tmp_path: Path) -> None:
    theirs = model_of("llama-tied-head_dim")
    hf = json.loads(theirs.config.to_json_string())
    converter, tensors = AutoConverter.from_config(hf), theirs.state_dict()
    assert "lm_head.weight" in tensors
    ours = converter.from_hf(tensors)
    assert converter.from_hf({n: t for n, t in tensors.items() if n != "lm_head.weight"}).keys() == ours.keys()
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        converter.from_hf({**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1})
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"the state dict do not fit .* missing: '{name}'"):
        converter.from_hf({n: t for n, t in tensors.items() if n != name})
    with pytest.raises(CheckpointError, match="not part of this model: 'x'"):
        converter.from_hf({**tensors, "x": torch.ones(1)})
    refused(lambda: converter.from_hf({**tensors, name: tensors[name].T}), "has shape", error=CheckpointError)
    with pytest.raises(CheckpointError, match="the names of the state dict do not match the configuration"):
        converter.to_hf(tensors)
    with pytest.raises(CheckpointError, match="is of the family 'llama', not 'qwen2'"):
        AutoConverter.from_config(hf, family="qwen2")
    quantize(save(model_of("llama"), tmp_path / "hf"), tmp_path / "fp8", "current")
    with pytest.raises(CheckpointError, match=r"has quantized tensors .*; dequantize=True returns their values"):
        GPTModel.from_pretrained(tmp_path / "fp8").to_hf()


def edit(folder: Path, **changes: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_dtype_is_that_of_the_weights_whatever_config_json_says(tmp_path: Path) -> None:
    theirs = model_of("llama")
    edit(save(theirs, tmp_path), dtype="bfloat16", torch_dtype="bfloat16")
    back = GPTModel.from_pretrained(tmp_path).to_hf()
    assert back.dtype == torch.float32
    assert_same_bits(back.state_dict(), theirs.state_dict())


def test_a_family_without_a_class_in_transformers_is_named_with_one_that_has(tmp_path: Path) -> None:
    theirs = model_of("deepseek_v3")
    edit(save(theirs, tmp_path), model_type="kimi_k2")
    ours = GPTModel.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"family 'kimi_k2'; allowed: deepseek_v3, glm4_moe_lite$"):
        ours.to_hf()
    assert_same_bits(ours.to_hf("deepseek_v3").state_dict(), theirs.state_dict())


@pytest.mark.sentinels("mxfp8-grouped", "current-per-gemm", "nvfp4-grouped")
@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
@pytest.mark.parametrize("stored_as", ["current", "mxfp8", "nvfp4"])
def test_values_of_quantized_weights_in_memory_are_those_of_files(tmp_path: Path, stored_as: str, layout: str) -> None:
    source = save(model_of("qwen3_moe").to(torch.bfloat16), tmp_path / "hf")
    import_hf(source, tmp_path / "plain", layout=layout)
    quantize(tmp_path / "plain", tmp_path / "q", stored_as)
    export_hf(tmp_path / "q", tmp_path / "values", dequantize=True)
    model = GPTModel.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, expert_layout=layout)
    theirs = model.to_hf(dequantize=True)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "values", dtype=torch.bfloat16)
    assert_same_bits(theirs.state_dict(), expected.state_dict())
    converter = AutoConverter.from_pretrained(source)
    assert_same_bits(converter.to_hf(tensors_of(model), dequantize=True), stored(tmp_path / "values"))


@pytest.mark.parametrize("layout", ["grouped", "per-gemm"])
def test_unused_tensors_in_memory_are_left_out_or_kept(layout: Literal["grouped", "per-gemm"]) -> None:
    theirs = make("exaone_moe")
    converter = AutoConverter.from_config(json.loads(theirs.config.to_json_string()))
    plain = converter.to_hf(converter.from_hf(theirs.state_dict()))
    unused = {"mtp.norm.weight": torch.ones(3), "mtp.flag": torch.tensor(7), "mtp.fc": torch.ones(2).to(torch.int8)}
    assert converter.from_hf({**plain, **unused}).keys() == converter.from_hf(plain).keys()
    kept = converter.from_hf({**plain, **unused}, layout=layout, dtype="bfloat16", keep_unused=True)
    assert kept.keys() - converter.from_hf(plain, layout=layout).keys() == {f"carried.{name}" for name in unused}
    back = converter.to_hf(kept, dtype="float32")
    assert back.keys() == plain.keys() | unused.keys()
    assert_same_bits({name: back[name] for name in unused}, unused)
    with pytest.raises(CheckpointError, match=r"unknown: 'carried\.x'"):
        converter.to_hf({**kept, "carried.x": torch.ones(1)})


def test_a_dtype_may_be_a_name_and_is_of_floating_point(tmp_path: Path) -> None:
    theirs = hf_model("llama")
    theirs.save_pretrained(tmp_path / "hf")
    for source in (theirs, tmp_path / "hf"):
        ours = GPTModel.from_hf(source, dtype="bfloat16")
        assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
        for dtype in (torch.int8, "bfloat17"):
            with pytest.raises(CheckpointError, match=f"weights cannot be converted to {dtype}; choose float64"):
                GPTModel.from_hf(source, dtype=dtype)


@torch.no_grad()
def test_a_model_with_soft_capped_scores_computes_with_them() -> None:
    """transformers' own choice of attention leaves them out."""
    theirs = make("gemma2").eval()
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(GPTModel.from_hf(theirs).to_hf()(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["qwen2", "qwen3_moe"])
def test_tensors_without_data_have_names_and_shapes(case: str) -> None:
    """Tied or not."""
    theirs = hf_model(case)
    converter = AutoConverter.from_config(theirs.config)
    ours = converter.from_hf({name: tensor.to("meta") for name, tensor in theirs.state_dict().items()})
    expected = GPTModel.from_hf(theirs).state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in expected.items()}
    assert all(tensor.is_meta for tensor in ours.values())
