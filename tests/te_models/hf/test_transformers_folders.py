"""Folders and configurations between TEModelForCausalLM and its user."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import refused

pytest.importorskip("transformers", reason="TEModelForCausalLM is a transformers model")
import transformers

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, inspect, open_checkpoint
from te_models.hf import TEConfig, TEModelForCausalLM
from tests.checkpoints.hf_cases import assert_same_bits
from tests.te_models.hf_models import hf_model


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    """A model of transformers, and its folder `hf`."""
    model = hf_model("qwen3_moe")
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path / "hf")
    return model


def test_the_origin_is_kept_when_its_folder_is_gone(theirs: Any, tmp_path: Path) -> None:
    """As Trainer removes the older checkpoints."""
    ours = TEModelForCausalLM.from_pretrained(tmp_path / "hf")
    shutil.rmtree(tmp_path / "hf")
    ours.save_pretrained(tmp_path / "saved")
    assert inspect(tmp_path / "saved").family == "qwen3_moe"
    with open_checkpoint(tmp_path / "saved") as checkpoint:
        assert checkpoint.source.config["moe_intermediate_size"] == 24
    assert transformers.AutoConfig.from_pretrained(tmp_path / "saved").eos_token_id == 2


def test_a_tokenizer_that_is_there_stays(theirs: Any, tmp_path: Path) -> None:
    (tmp_path / "hf/tokenizer.json").write_text("the origin's")
    (tmp_path / "hf/merges.txt").write_text("the origin's")
    ours = TEModelForCausalLM.from_pretrained(tmp_path / "hf")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "tokenizer.json").write_text("mine")
    ours.save_pretrained(mine)
    ours.save_pretrained(tmp_path / "new")
    assert (mine / "tokenizer.json").read_text() == "mine" and not (mine / "merges.txt").exists()
    assert {(tmp_path / "new" / name).read_text() for name in ("tokenizer.json", "merges.txt")} == {"the origin's"}


def test_a_configuration_that_is_given_counts(theirs: Any, tmp_path: Path) -> None:
    """Options that are no part of the model, through the Auto classes or in a configuration."""
    folder, auto = tmp_path / "ours", transformers.AutoModelForCausalLM
    TEModelForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(folder)
    loaded = auto.from_pretrained(folder, output_hidden_states=True, pad_token_id=7)
    assert loaded.config.pad_token_id == 7 and len(loaded(torch.arange(3, 8)[None]).hidden_states) == 4
    loaded = TEModelForCausalLM.from_pretrained(tmp_path / "hf", output_hidden_states=True, pad_token_id=7)
    assert loaded.config.pad_token_id == 7 and len(loaded(torch.arange(3, 8)[None]).hidden_states) == 4
    with pytest.raises(ValueError, match=r"state_dict is .{,120}, which TEModelForCausalLM\.from_pretrained cannot"):
        TEModelForCausalLM.from_pretrained(tmp_path / "hf", state_dict=loaded.state_dict())
    config = transformers.AutoConfig.from_pretrained(folder)
    config.use_cache, config.expert_layout = False, "per-gemm"
    loaded = TEModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16)
    assert loaded.config.use_cache is False and loaded.gpt.expert_layout == "per-gemm"
    assert loaded.config.dtype == torch.bfloat16 and config.dtype != torch.bfloat16
    with pytest.raises(ValueError, match="config is a Qwen3MoeConfig; allowed: a TEConfig"):
        TEModelForCausalLM.from_pretrained(tmp_path / "hf", config=theirs.config)


def test_parameters_are_counted_as_transformers_does(theirs: Any, tmp_path: Path) -> None:
    ours = TEModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert ours.num_parameters() == theirs.num_parameters()
    assert ours.num_parameters(exclude_embeddings=True) == theirs.num_parameters(exclude_embeddings=True)
    ours.get_input_embeddings().requires_grad_(False)
    assert ours.num_parameters(only_trainable=True) == ours.num_parameters() - 97 * 32
    assert ours.num_parameters(True, True) == ours.num_parameters(exclude_embeddings=True)


def test_options_at_their_defaults_ask_for_nothing(theirs: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    TEModelForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(folder)
    defaults = {"subfolder": "", "output_loading_info": False, "ignore_mismatched_sizes": False, "weights_only": True}
    for use_cache in (True, False):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=use_cache, **defaults)
        assert type(loaded) is TEModelForCausalLM
    assert type(TEModelForCausalLM.from_pretrained(folder, trust_remote_code=True)) is TEModelForCausalLM
    for name, other in (("subfolder", "a"), ("output_loading_info", True), ("weights_only", False)):
        with pytest.raises(ValueError, match=f"{name} is {other!r}, which .* cannot honour"):
            TEModelForCausalLM.from_pretrained(folder, **{name: other})


def test_models_that_are_made_and_asked_for_tuples(theirs: Any, tmp_path: Path) -> None:
    ours = TEModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(ours.config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert empty.state_dict().keys() == ours.state_dict().keys()
    with pytest.raises(ValueError, match="gpt is not the model of config"):
        TEModelForCausalLM(TEConfig(config=ours.gpt.config.replace(max_position_embeddings=7).to_dict()), gpt=ours.gpt)
    refused(lambda: ours.set_attn_implementation("eager"), "attn_implementation is 'eager'; allowed: 'sdpa'")
    ours.set_attn_implementation("sdpa")
    ours.config.return_dict = False
    assert type(ours(torch.arange(3, 8)[None])) is tuple
    assert type(ours(torch.arange(3, 8)[None], return_dict=True)) is not tuple


def test_a_vocabulary_of_the_same_size_is_no_other_one(theirs: Any, tmp_path: Path) -> None:
    """As scripts ask for without looking: `resize_token_embeddings(len(tokenizer))`."""
    ours = TEModelForCausalLM.from_pretrained(tmp_path / "hf")
    for arguments in ((), (97,), (None, 97), (90, 97)):
        assert ours.resize_token_embeddings(*arguments) is ours.get_input_embeddings()


def test_a_vocabulary_of_another_size(theirs: Any, tmp_path: Path) -> None:
    ours, ids = TEModelForCausalLM.from_pretrained(tmp_path / "hf").eval(), torch.arange(3, 9)[None]
    before = ours(ids).logits
    table = ours.resize_token_embeddings(98, pad_to_multiple_of=8)
    assert table is ours.get_input_embeddings() and table.weight.shape[0] == ours.config.vocab_size == 104
    torch.testing.assert_close(ours(ids).logits[..., :97], before)
    ours.save_pretrained(tmp_path / "resized")
    again = TEModelForCausalLM.from_pretrained(tmp_path / "resized").eval()
    assert torch.equal(again(ids).logits, ours(ids).logits)


def test_saving_as_the_examples_of_accelerate_do(theirs: Any, tmp_path: Path) -> None:
    ours = TEModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours.save_pretrained(
        tmp_path / "saved", is_main_process=True, save_function=torch.save, state_dict=ours.state_dict()
    )
    ours.save_pretrained(tmp_path / "saved", token="hf_x", safe_serialization=True, push_to_hub=False)
    assert_same_bits(GPTModel.from_pretrained(tmp_path / "saved").state_dict(), ours.state_dict())


def test_a_configuration_of_a_familys_folder(theirs: Any, tmp_path: Path) -> None:
    """Which peft reads, too, when it saves an adapter of a model that comes from such a folder."""
    ours = TEModelForCausalLM.from_pretrained(tmp_path / "hf")
    config = TEConfig.from_pretrained(tmp_path / "hf", pad_token_id=7)
    assert config.model_config == ours.gpt.config and (config.eos_token_id, config.pad_token_id) == (2, 7)
    assert TEModelForCausalLM(config).state_dict().keys() == ours.state_dict().keys()
    loaded = TEModelForCausalLM.from_pretrained(tmp_path / "hf", config=config)
    assert_same_bits(loaded.state_dict(), ours.state_dict())
    loaded.save_pretrained(tmp_path / "saved")
    assert TEConfig.from_pretrained(tmp_path / "saved").source["config"]["moe_intermediate_size"] == 24
    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    refused(lambda: TEConfig.from_pretrained(tmp_path / "bert"), "'bert'", error=CheckpointError)
