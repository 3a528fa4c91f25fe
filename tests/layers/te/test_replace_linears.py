"""`replace_linears` puts our layers into any model: names and bits stay, and what was left is told with its reason."""

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Two blocks, the first of them under two names, and an output layer with the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.again = self.blocks[0]
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in (*self.blocks, self.again):
            x = block(x)
        return self.lm_head(x)


IDS = torch.arange(64).view(4, 16)


def model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_names_and_high_precision_stay(dtype: torch.dtype) -> None:
    own = model(dtype).eval()
    own.blocks[0].up.weight.requires_grad_(False)
    expected, names = own(IDS), list(own.state_dict())
    parameters = dict(own.named_parameters())
    random = torch.get_rng_state()
    report = te.replace_linears(own, exclude=())
    assert torch.equal(torch.get_rng_state(), random), "nothing is drawn"
    blocks = {f"{b}.{n}" for b in ("blocks.0", "blocks.1", "again") for n in ("up", "down")}
    assert set(report.replaced) == blocks | {"lm_head"}
    assert report.left == {} and not any(type(m) is nn.Linear for m in own.modules())
    after = dict(own.named_parameters())
    assert after.keys() == parameters.keys() and all(after[name] is p for name, p in parameters.items())
    assert own.again is own.blocks[0] and own.lm_head.weight is own.embedding.weight
    assert list(own.state_dict()) == names and torch.equal(own(IDS), expected)
    assert not own.blocks[0].up.training and own.blocks[1].up.name == "blocks.1.up"


def test_a_recipe_changes_the_numbers_and_never_the_state_dict() -> None:
    own = model()
    optimizer, names = torch.optim.SGD(own.parameters(), lr=0.1), list(own.state_dict())  # built before, used after
    te.replace_linears(own)
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        assert not torch.equal(own(IDS), model()(IDS))
    losses = []
    for _ in range(4):
        with te.autocast(recipe=te.DelayedScaling()):
            loss = nn.functional.cross_entropy(own(IDS).flatten(0, 1), IDS.roll(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
    assert "blocks.1.up.fp8_scale" in te.recipe_state(own), "the state of the recipe is there, and in no state dict"
    assert list(own.state_dict()) == names
    again = model()
    again.load_state_dict(own.state_dict())
    assert torch.equal(again(IDS), own(IDS)), "what was trained is an ordinary model of torch"


def test_weights_may_be_stored_quantized_afterwards() -> None:
    own = model()
    te.replace_linears(own)
    te.store_weights(own, te.MXFP8BlockScaling())
    assert isinstance(own.blocks[0].up.weight, te.QuantizedTensor) and own.again.up.weight is own.blocks[0].up.weight
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        own(IDS).sum().backward()


class Another(nn.Linear):
    pass


def test_what_is_left_and_why() -> None:
    own = model()
    own.again = Another(8, 8)
    own.blocks[0].up.register_forward_hook(lambda *_: None)
    own.blocks[0].down = nn.utils.parametrizations.weight_norm(own.blocks[0].down)
    rules = te.PerModuleRecipe(default=te.MXFP8BlockScaling(), rules=(("blocks.1.down", "bf16"),))
    report = te.replace_linears(own, rules)
    assert report.replaced == ("blocks.1.up",) and type(own.blocks[1].up) is te.Linear
    assert report.left == {
        "again": "its class is Another, derived from nn.Linear",
        "blocks.0.up": "it has hooks, or a forward of its own",
        "blocks.0.down": "its class is ParametrizedLinear, derived from nn.Linear",
        "blocks.1.down": "PerModuleRecipe leaves it in high precision",
        "lm_head": "it is the output layer",
    }
    assert str(report).splitlines()[::5] == ["1 replaced, 5 left as they are", "  lm_head: it is the output layer"]


def test_patterns_choose() -> None:
    own = model()
    report = te.replace_linears(own, include=["blocks.*", "lm_head"], exclude="*.down")
    assert set(report.replaced) == {"blocks.0.up", "blocks.1.up", "lm_head"}
    excluded = dict.fromkeys(("blocks.0.down", "blocks.1.down"), "exclude names it")
    assert report.left == excluded | dict.fromkeys(("again.up", "again.down"), "include does not name it")
    assert own.again is own.blocks[0]


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exclude has the pattern 'layers\.\*', which matches no nn\.Linear"):
        te.replace_linears(model(), exclude=("layers.*",))
    with pytest.raises(ValueError, match=r"the model is itself an nn\.Linear; allowed: a module around it"):
        te.replace_linears(nn.Linear(4, 4))
