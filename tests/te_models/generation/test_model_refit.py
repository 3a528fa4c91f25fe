"""A serving copy in memory takes the weights of a model that trains: with the bits of a fresh conversion, what changed
alone, in other formats and layouts and as a part of ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from te_models import GPTModel, ModelRefit
from te_models.checkpoints import CheckpointError
from te_models.layers import Float8BlockScaling, MXFP8BlockScaling, QuantizedTensor, quantized_model_init
from tests.training.runs import assert_same_bits, tiny_model


def model_of(*, moe: bool = True, **options: object) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(tiny_model(moe=moe, hidden=128), **({"dtype": torch.float32} | options))


def train(model: GPTModel, *parts: str) -> None:
    """A step of SGD, in place, on the parameters whose names have one of these parts."""
    ids = torch.arange(32)[None]
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter -= 0.5 * parameter.grad
    model.zero_grad()


def bits_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Fields of quantized parameters, and what else the model stores."""
    found = {}
    for name, tensor in model.stored_tensors():
        fields = tensor.fields if isinstance(tensor, QuantizedTensor) else {"": tensor}
        found |= {f"{name}/{field}": value.detach() for field, value in fields.items()}
    return found


FORMS = {
    "mxfp8": {"recipe": MXFP8BlockScaling(), "dtype": torch.bfloat16},
    "block": {"recipe": Float8BlockScaling(), "dtype": torch.bfloat16},
    "bf16": {"dtype": torch.bfloat16},
    "one tensor for each expert": {"expert_layout": "per-gemm"},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_bits_are_those_of_a_fresh_conversion(form: str, tmp_path: Path) -> None:
    model = model_of()
    model.save_pretrained(tmp_path / "start")
    serving = GPTModel.from_pretrained(tmp_path / "start", **FORMS[form])
    refit = ModelRefit(serving)
    refit.push(model)
    assert_same_bits(bits_of(serving), bits_of(GPTModel.from_pretrained(tmp_path / "start", **FORMS[form])))

    train(model, "")
    model.save_pretrained(tmp_path / "later")
    fresh = GPTModel.from_pretrained(tmp_path / "later", **FORMS[form])
    assert any(
        not torch.equal(value, other)
        for value, other in zip(bits_of(serving).values(), bits_of(fresh).values(), strict=True)
    )
    assert set(refit.push(model)) == {name for name, _ in serving.stored_tensors()}
    assert_same_bits(bits_of(serving), bits_of(fresh))
    ids = torch.arange(8)[None]
    assert torch.equal(serving(ids).logits, fresh(ids).logits)


def test_quantized_weights_are_taken_over_as_they_are(tmp_path: Path) -> None:
    """Also into a model that does not store them quantized: it gets their values."""
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        model = model_of(dtype=torch.bfloat16)
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        serving = model_of(expert_layout="per-gemm", dtype=torch.bfloat16)
    train(model, "experts")
    ModelRefit(serving).push(model)
    grouped, split = bits_of(model), bits_of(serving)
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    for field in ("rowwise_data", "rowwise_scale_inv"):
        for expert in range(4):
            assert torch.equal(split[f"{name}{expert}/{field}"], grouped[f"{name}/{field}"][expert])
    plain = model_of(dtype=torch.bfloat16)
    ModelRefit(plain).push(model)
    assert torch.equal(plain.get_parameter(name), model.get_parameter(name).dequantize())


def test_what_did_not_change_is_not_written() -> None:
    model, serving = model_of(), model_of(dtype=torch.bfloat16)
    refit = ModelRefit(serving)
    assert refit.push(model) and refit.push(model) == ()
    train(model, "layers.1.")
    versions = {name: tensor._version for name, tensor in serving.stored_tensors()}
    written = refit.push(dict(model.stored_tensors()))  # a state dict is as good
    assert written and all("layers.1." in name for name in written)
    assert {n for n, tensor in serving.stored_tensors() if tensor._version != versions[n]} == set(written)


def test_a_serving_copy_that_was_written_to_is_mended() -> None:
    model, serving = model_of(), model_of(dtype=torch.bfloat16)
    refit = ModelRefit(serving)
    refit.push(model)
    with torch.no_grad():
        serving.get_parameter("decoder.final_layernorm.weight").fill_(3)
    assert refit.push(model) == ("decoder.final_layernorm.weight",)
    assert serving.get_parameter("decoder.final_layernorm.weight").max() == 1


def test_a_model_of_another_form_than_last_time() -> None:
    """The way is worked out again, and nothing counts as unchanged."""
    model, serving = model_of(), model_of(dtype=torch.bfloat16)
    refit = ModelRefit(serving)
    every = refit.push(model)
    split = model_of(expert_layout="per-gemm")
    train(split, "")
    assert refit.push(split) == every and refit.push(split) == ()
    experts = serving.get_parameter("decoder.layers.1.mlp.experts.linear_fc2.weight")
    assert torch.equal(experts[2], split.get_parameter("decoder.layers.1.mlp.experts.linear_fc2.weight2").bfloat16())


@pytest.fixture
def two_fake_ranks() -> Iterator[dist.ProcessGroup]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_part_of_the_serving_model(two_fake_ranks: dist.ProcessGroup) -> None:
    model = model_of()
    serving = model_of(tp_group=two_fake_ranks, dtype=torch.bfloat16)
    ModelRefit(serving).push(model)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    assert torch.equal(serving.get_parameter(name), model.get_parameter(name)[:, 64:].bfloat16())
    with pytest.raises(CheckpointError, match=r"the model's .* has shape"):
        ModelRefit(model).push(serving)


def test_shards_and_other_models_are_refused(two_fake_ranks: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, serving = model_of(), model_of()
    before = {name: value.clone() for name, value in bits_of(serving).items()}
    with pytest.raises(CheckpointError, match="names of the model's tensors do not match"):
        ModelRefit(serving).push(model_of(moe=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(CheckpointError, match="the model is stored in shards; allowed: whole tensors"):
        ModelRefit(serving).push(model)
    with pytest.raises(CheckpointError, match="the serving model is stored in shards"):
        ModelRefit(model)
    assert_same_bits(bits_of(serving), before)
