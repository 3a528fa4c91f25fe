"""TEModelForCausalLM against transformers' own models: logits, generation, the Auto classes, pipeline, saving."""

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import refused

pytest.importorskip("transformers", reason="TEModelForCausalLM is a transformers model")
import transformers

from te_models import GPTModel, generate
from te_models.checkpoints import check_manifest, import_hf, quantize, verify
from te_models.hf import TEConfig, TEModelForCausalLM
from te_models.hf.cache import CACHE
from te_models.layers import Float8CurrentScaling, MXFP8BlockScaling, QuantizedTensor, autocast
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.hf_cases import assert_same_bits
from tests.te_models.hf_models import hf_model

FAMILIES = ("llama", "mistral-window", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3", "gpt2", "llama4")
VOCABULARY = 61


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """Return a function: family case -> (transformers' model, ours from its folder, the folder)."""

    def load(case: str) -> tuple[Any, TEModelForCausalLM, Path]:
        theirs = make(case) if case in CASES else hf_model(case)
        with warnings.catch_warnings(action="ignore"):
            theirs.save_pretrained(tmp_path / case)
        return theirs, TEModelForCausalLM.from_pretrained(tmp_path / case), tmp_path / case

    return load


def prompt(batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def padded(ids: torch.Tensor, pads: int) -> dict[str, torch.Tensor]:
    """Left padding in the first row."""
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.sentinels("gpt_oss")
@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_generate_gives_the_tokens_of_transformers(pair: Any, case: str) -> None:
    theirs, ours, _ = pair(case)
    settings = {"max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 0}
    for options in (
        {"do_sample": False},
        {"do_sample": False, "use_cache": False},
        {"do_sample": True, "top_k": 20, "temperature": 1.3},
        {"do_sample": False, "num_beams": 3},
    ):
        for inputs in ({"input_ids": prompt()}, padded(prompt(), 4)):
            results = []
            for model in (theirs, ours):
                torch.manual_seed(5)
                results.append(model.generate(**inputs, **settings, **options))
            assert torch.equal(*results), options
            assert results[0].shape == (2, 25)


@torch.no_grad()
def test_logits_loss_and_outputs(pair: Any) -> None:
    theirs, ours, _ = pair("llama")
    ids = prompt()
    expected, got = theirs(ids, labels=ids), ours(ids, labels=ids)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours(ids, logits_to_keep=1).logits, got.logits[:, -1:], rtol=1e-5, atol=1e-6)
    assert torch.equal(ours(ids, logits_to_keep=3).logits, got.logits[:, -3:])
    assert torch.equal(ours(ids, logits_to_keep=torch.tensor([0, 4])).logits, got.logits[:, [0, 4]])
    loss, logits, cache = ours(ids, labels=ids, return_dict=False)
    assert torch.equal(loss, got.loss) and torch.equal(logits, got.logits) and cache.get_seq_length() == 11
    cached = ours(ids[:, :7], use_cache=True)
    assert cached.past_key_values.get_seq_length() == 7
    rest = ours(ids[:, 7:], past_key_values=cached.past_key_values).logits
    torch.testing.assert_close(rest, got.logits[:, 7:], rtol=1e-4, atol=1e-5)
    assert ours(ids, use_cache=False).past_key_values is ours.train()(ids).past_key_values is None


@torch.no_grad()
def test_a_cache_has_the_name_of_every_version_of_transformers(pair: Any) -> None:
    """`cache` from 5.24 on, `past_key_values` before; both are arguments under every version."""
    _, ours, _ = pair("llama")
    ids, logits = prompt(), []
    for name in ("cache", "past_key_values"):
        first = ours(ids[:, :7], use_cache=True)
        logits.append(ours(ids[:, 7:], **{name: first[CACHE]}).logits)
    assert torch.equal(*logits)
    with pytest.raises(ValueError, match="cache and past_key_values are two names of one argument"):
        ours(ids[:, 7:], cache=first[CACHE], past_key_values=first[CACHE])


@torch.no_grad()
def test_what_takes_the_place_of_a_part_is_used(pair: Any) -> None:
    """As peft does, with `modules_to_save`."""

    class Doubled(torch.nn.Module):
        def __init__(self, part: torch.nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, *args: Any, **named: Any) -> Any:
            logits, *losses = self.part(*args, **named)
            return 2 * logits, *losses

    _, ours, _ = pair("llama")
    expected = 2 * ours(prompt()).logits
    ours.output_layer = Doubled(ours.output_layer)
    for model in (ours, copy.deepcopy(ours)):
        assert torch.equal(model(prompt()).logits, expected)


@pytest.mark.slow
@torch.no_grad()
def test_the_gpt_model_may_be_compiled_or_another_one(pair: Any, tmp_path: Path) -> None:
    _, ours, folder = pair("llama")
    expected, names = ours(prompt()).logits, list(ours.state_dict())
    ours.gpt = torch.compile(ours.gpt, backend="eager")
    assert torch.equal(ours(prompt()).logits, expected) and list(ours.state_dict()) == names
    ours.save_pretrained(tmp_path / "saved")
    other = GPTModel.from_pretrained(folder).double()
    ours.gpt = other
    assert ours.dtype == torch.float64 and next(ours.parameters()) is next(other.parameters())
    torch.testing.assert_close(ours(prompt()).logits.float(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_copies_for_data_parallel_compute_with_their_own_parts(pair: Any) -> None:
    """`torch.nn.parallel.replicate` puts copies of the parts into what the model returns; here without devices."""
    _, ours, _ = pair("llama")
    other = copy.deepcopy(ours)
    other.get_input_embeddings().weight.mul_(2)
    copied = ours._replicate_for_data_parallel()
    for name in ours._modules:
        copied._modules[name] = other._modules[name]
    assert torch.equal(copied(prompt()).logits, other(prompt()).logits)
    assert not torch.equal(copied(prompt()).logits, ours(prompt()).logits)


@torch.no_grad()
def test_the_gpt_model_is_in_the_same_mode(pair: Any) -> None:
    """Or generation with it, which goes back to the mode that it found, would leave dropout on in evaluation."""
    theirs, ours, _ = pair("gpt2")
    assert theirs.config.resid_pdrop > 0 and not ours.training and not ours.gpt.training
    expected = ours(prompt()).logits
    generate(ours.gpt, prompt(), 2)
    assert torch.equal(ours(prompt()).logits, expected)
    assert ours.train().gpt.training and not ours.eval().gpt.training
    config = TEConfig(config=ours.gpt.config.to_dict())
    assert not TEModelForCausalLM(config, gpt=ours.gpt.eval()).training
    assert TEModelForCausalLM(config, gpt=ours.gpt.train()).training


@torch.no_grad()
def test_mixtures_return_their_router_loss(pair: Any) -> None:
    theirs, ours, _ = pair("qwen3_moe")
    assert theirs(prompt()).aux_loss is None
    output = ours(prompt(), labels=prompt())
    assert isinstance(output, transformers.modeling_outputs.MoeCausalLMOutputWithPast)
    assert output.aux_loss.shape == ()


def test_parameters_are_those_of_the_gpt_model(pair: Any) -> None:
    _, ours, _ = pair("qwen3_moe")
    assert ours.state_dict().keys() == ours.gpt.state_dict().keys()
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in ours.gpt.named_parameters()]
    ours.to(torch.float64)
    assert {p.dtype for p in ours.gpt.parameters()} == {torch.float64} and ours.dtype == torch.float64
    twin = copy.deepcopy(ours)
    assert next(twin.parameters()) is next(twin.gpt.parameters()) is not next(ours.parameters())
    assert ours.get_input_embeddings().weight is ours.gpt.embedding.word_embeddings.weight
    assert not ours.gpt.decoder.training and ours.train().gpt.decoder.training


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "hy_v3"])
def test_saving_and_every_way_of_loading(pair: Any, tmp_path: Path, case: str) -> None:
    _, ours, source = pair(case)
    ours.generation_config.update(max_length=33, eos_token_id=[2, 5])
    ours.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    check_manifest(tmp_path / "saved")
    assert verify(source, tmp_path / "saved").equal
    expected = ours(prompt()).logits
    for loaded in (
        TEModelForCausalLM.from_pretrained(tmp_path / "saved"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
    ):
        assert type(loaded) is TEModelForCausalLM and not loaded.training
        assert torch.equal(loaded(prompt()).logits, expected)
        assert (loaded.generation_config.max_length, loaded.generation_config.eos_token_id) == (33, [2, 5])
        assert type(loaded.config) is TEConfig and loaded.config.vocab_size == ours.gpt.config.vocab_size
    assert torch.equal(GPTModel.from_pretrained(tmp_path / "saved").eval()(prompt()).logits, expected)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert config.model_config == ours.gpt.config
    assert TEConfig.from_dict(json.loads(config.to_json_string())).model_config == ours.gpt.config
    fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert type(fresh) is TEModelForCausalLM and fresh.dtype == torch.bfloat16
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.config.dtype == torch.bfloat16


def test_saving_into_a_folder_keeps_what_is_not_the_model(pair: Any, tmp_path: Path) -> None:
    _, ours, source = pair("llama")
    folder = tmp_path / "saved"
    ours.save_pretrained(folder, max_shard_size="20KB")
    (folder / "checkpoint-5").mkdir()
    (folder / "notes.txt").write_text("mine")
    ours.save_pretrained(folder)
    names = {path.name for path in folder.iterdir()}
    expected = {"model.safetensors", "config.json", "generation_config.json", "manifest.json"}
    assert names == expected | {"checkpoint-5", "notes.txt"}
    check_manifest(folder)
    ours.save_pretrained(tmp_path / "nothing", is_main_process=False)
    assert not (tmp_path / "nothing").exists()
    changed = {name: torch.zeros_like(t) for name, t in ours.state_dict().items()}
    ours.save_pretrained(folder, state_dict=changed)
    assert not any(p.any() for p in TEModelForCausalLM.from_pretrained(folder).parameters())
    refused(lambda: ours.save_pretrained(source), "holds a model of type 'llama'; choose another folder")
    for size, message in (("many", "max_shard_size is 'many'"), ("5XB", "max_shard_size is '5XB'")):
        with pytest.raises(ValueError, match=message):
            ours.save_pretrained(folder, max_shard_size=size)
    with pytest.raises(ValueError, match=r"push_to_hub is True, which .* cannot honour"):
        ours.save_pretrained(folder, push_to_hub=True)
    assert verify(folder, folder).equal


@pytest.mark.sentinels("sizes1")
@pytest.mark.parametrize("sizes", [("5GB", "20KB"), ("20KB", "5GB"), ("20KB", "40KB")])
@torch.no_grad()
def test_a_save_that_stops_leaves_one_of_both_models(pair: Any, tmp_path: Path, monkeypatch: Any, sizes: Any) -> None:
    _, ours, source = pair("llama")
    name, folder = "decoder.final_layernorm.weight", tmp_path / "saved"
    after = TEModelForCausalLM.from_pretrained(source)
    for parameter in after.parameters():
        parameter.add_(1.0)
    old, new = (model.state_dict()[name].clone() for model in (ours, after))
    steps = 0

    def stopping(method: Any, countdown: list[int]) -> Any:
        def step(path: Path, *arguments: Any, **options: Any) -> Any:
            if folder in (path.parent, *(Path(to).parent for to in arguments)):
                if countdown[0] == 0:
                    raise KeyboardInterrupt
                countdown[0] -= 1
            return method(path, *arguments, **options)

        return step

    while True:
        shutil.rmtree(folder, ignore_errors=True)
        ours.save_pretrained(folder, max_shard_size=sizes[0])
        with monkeypatch.context() as patched:
            countdown = [steps]
            for method in ("replace", "unlink"):
                patched.setattr(Path, method, stopping(getattr(Path, method), countdown))
            try:
                after.save_pretrained(folder, max_shard_size=sizes[1])
                break
            except KeyboardInterrupt:
                pass
        found = GPTModel.from_pretrained(folder).state_dict()[name]
        assert torch.equal(found, old) or torch.equal(found, new), steps
        steps += 1
    assert steps > 4 and check_manifest(folder) > 2
    assert torch.equal(GPTModel.from_pretrained(folder).state_dict()[name], new)


def test_quantized_folders_stay_quantized(pair: Any, tmp_path: Path) -> None:
    _, _, source = pair("llama")
    quantize(source, tmp_path / "fp8", "current")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8")
    assert any(isinstance(p, QuantizedTensor) for p in ours.parameters())
    ours.save_pretrained(tmp_path / "again")
    assert verify(tmp_path / "fp8", tmp_path / "again").equal
    stored = TEModelForCausalLM.from_pretrained(source, recipe=Float8CurrentScaling())
    fields = [f for p in stored.parameters() for f in (p.fields.values() if isinstance(p, QuantizedTensor) else (p,))]
    assert stored.get_memory_footprint(return_buffers=False) == sum(field.nbytes for field in fields)
    assert stored.get_memory_footprint() < TEModelForCausalLM.from_pretrained(source).get_memory_footprint()
    assert torch.equal(stored(prompt()).logits, ours(prompt()).logits)


@torch.no_grad()
def test_a_recipe_is_what_autocast_does(pair: Any) -> None:
    _, ours, _ = pair("llama")
    ids = prompt(2, 16)
    plain = ours(ids).logits
    with autocast(recipe=MXFP8BlockScaling()):
        expected = ours(ids).logits
    ours.recipe = MXFP8BlockScaling()
    assert torch.equal(ours(ids).logits, expected) and not torch.equal(expected, plain)


def test_recomputing_layers_gives_the_same_gradients(pair: Any) -> None:
    _, ours, _ = pair("llama")
    ours.train()
    gradients = []
    for enable in (False, True):
        ours.zero_grad()
        (ours.gradient_checkpointing_enable if enable else ours.gradient_checkpointing_disable)()
        assert ours.is_gradient_checkpointing is ours.gpt.activation_checkpointing is enable
        ours(prompt(), labels=prompt()).loss.backward()
        gradients.append([p.grad.clone() for p in ours.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_what_cannot_be_honoured_is_refused(pair: Any, tmp_path: Path) -> None:
    _, ours, source = pair("llama")
    refused(lambda: ours(attention_mask=torch.ones(1, 3)), "input_ids is None")
    refused(lambda: ours(prompt(1, 3), attention_mask=torch.ones(1, 1, 3, 3)), "attention_mask has shape (1, 1, 3, 3)")
    with pytest.raises(ValueError, match="new_num_tokens is 0 and pad_to_multiple_of None; allowed: 1 or more"):
        ours.resize_token_embeddings(0)
    with pytest.raises(ValueError, match="StaticCache has a fixed size; allowed: caches that grow"):
        ours.generate(prompt(), max_new_tokens=3, cache_implementation="static")
    for options, message in (
        ({"quantization_config": {"bits": 4}}, "quantization_config is .* cannot honour"),
        ({"device_map": "auto"}, "device_map is 'auto'; allowed: one device"),
        ({"device_map": {"": "disk"}}, "device_map is {'': 'disk'}; allowed: one device"),
        ({"device_map": {"decoder": "cpu", "": "cpu"}}, "device_map is {'decoder': 'cpu', '': 'cpu'}; allowed: one"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation is 'flash_attention_2'"),
    ):
        with pytest.raises(ValueError, match=message):
            TEModelForCausalLM.from_pretrained(source, **options)
    import_hf(source, tmp_path / "ours")
    auto = transformers.AutoModelForCausalLM
    for name in ("flash_attention_2", "eager"):
        with pytest.raises(ValueError, match=f"attn_implementation is '{name}', which .* cannot honour"):
            auto.from_pretrained(tmp_path / "ours", attn_implementation=name)
    loaded = auto.from_pretrained(tmp_path / "ours", attn_implementation="sdpa", device_map={"": "cpu"})
    assert_same_bits(auto.from_pretrained(tmp_path / "ours", config=loaded.config).state_dict(), ours.state_dict())
    values = loaded.state_dict()
    del values["decoder.final_layernorm.weight"]
    with pytest.raises(ValueError, match=r"state_dict lacks .*: 'decoder\.final_layernorm\.weight'"):
        loaded.save_pretrained(tmp_path / "part", state_dict=values)
    assert not (tmp_path / "part").exists()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    config.config["vocab_size"] += 1
    with pytest.raises(ValueError, match="config does not describe the model"):
        TEModelForCausalLM.from_pretrained(tmp_path / "ours", config=config)
    refused(lambda: TEConfig().vocab_size, "describes no model", error=AttributeError)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gemma3", "gpt2", "granite"])
@torch.no_grad()
def test_hidden_states_are_those_of_transformers(pair: Any, case: str) -> None:
    theirs, ours, _ = pair(case)
    for inputs in ({"input_ids": prompt()}, padded(prompt(), 4)):
        expected, got = (model(**inputs, output_hidden_states=True).hidden_states for model in (theirs, ours))
        seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        assert len(got) == len(expected) > 1
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a[seen], b[seen], rtol=1e-4, atol=2e-5)
    assert ours(prompt()).hidden_states is None
    plain = ours(prompt(), return_dict=False)
    assert len(ours(prompt(), return_dict=False, output_hidden_states=True)) == len(plain) + 1
    refused(lambda: ours(prompt(), output_attentions=True), "output_attentions is True; allowed: False")
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"output_hidden_states": True, "return_dict_in_generate": True}
    a, b = (model.generate(prompt(), **settings).hidden_states for model in (ours, theirs))
    assert [[s.shape for s in step] for step in a] == [[s.shape for s in step] for step in b]


@torch.no_grad()
def test_assisted_generation_and_arguments_of_forward(pair: Any) -> None:
    theirs, ours, folder = pair("llama")
    assistant = TEModelForCausalLM.from_pretrained(folder)
    assistant.gpt.output_layer.weight.add_(torch.randn_like(assistant.gpt.output_layer.weight) * 0.1)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(prompt(1), **settings)
    for model in (ours, theirs):
        assert torch.equal(model.generate(prompt(1), assistant_model=assistant, **settings), expected)
    assert torch.equal(ours.generate(prompt(1), logits_to_keep=1, **settings), expected)
    refused(lambda: ours.generate(prompt(1), no_such_argument=1, **settings), "not used by the model")


@torch.no_grad()
def test_a_mask_that_hides_nothing_is_none(pair: Any) -> None:
    """generate gives one; attention without a mask is faster. A mask of another shape is refused, whatever it says."""
    _, ours, _ = pair("llama")
    given: list[Any] = []
    ours.gpt.register_forward_pre_hook(lambda _, args, named: given.append(named["attention_mask"]), with_kwargs=True)
    ours.generate(prompt(), max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert given == [None] * 3
    ours(**padded(prompt(), 4))
    assert given[-1] is not None
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 5\); allowed: \[2, 11\]"):
        ours(prompt(), attention_mask=torch.ones(2, 5))
