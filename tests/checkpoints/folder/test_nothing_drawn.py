"""A model that is read from files is built without drawing values first."""

import gc
import importlib
import mmap
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import te_models.layers as te
from te_models import GPTModel
from te_models.checkpoints import FAMILIES, expected_tensors, export_hf, families
from te_models.checkpoints.families import Family
from te_models.checkpoints.mapping import param_shapes
from te_models.config import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from te_models.layers.module.base import GemmModule
from te_models.layers.quantizer.encoding import NumberFormat
from te_models.memory import ask_for_large_pages
from te_models.model import build, gpt

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=1,
    max_position_embeddings=32,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=64),
)


@pytest.mark.parametrize("recipe", [None, te.MXFP8BlockScaling()], ids=["plain", "mxfp8"])
def test_from_pretrained_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: te.Recipe | None
) -> None:
    model = GPTModel(CONFIG)
    model.save_pretrained(tmp_path / "model")

    def draw(*_: object, **__: object) -> Tensor:
        raise AssertionError("random values are drawn for a model that is read")

    monkeypatch.setattr(torch.nn.init, "normal_", draw)
    monkeypatch.setattr(Tensor, "normal_", draw)
    generator = torch.get_rng_state()
    read = GPTModel.from_pretrained(tmp_path / "model", recipe=recipe)
    assert torch.equal(torch.get_rng_state(), generator)
    if recipe is None:
        assert all(torch.equal(a, b) for a, b in zip(read.parameters(), model.parameters(), strict=True))


def test_from_pretrained_imports_one_family(tmp_path: Path) -> None:
    GPTModel(CONFIG).save_pretrained(tmp_path / "model")
    export_hf(tmp_path / "model", tmp_path / "hf", family="llama")
    code = "import sys; from te_models import GPTModel; GPTModel.from_pretrained(sys.argv[1]); print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hf")], check=True, stdout=subprocess.PIPE, text=True
    )
    loaded = set(ended.stdout.split())
    folder = "te_models.checkpoints.families."
    families = {name.removeprefix(folder) for name in loaded if name.startswith(folder)} & {*FAMILIES}
    assert families == {"llama"}


def test_every_family_is_in_the_file_that_is_imported_for_it() -> None:
    assert all(family.model_type == name for name, family in FAMILIES.items())
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__", "missing"}
    of_files = {
        value.model_type
        for file in files
        for name, value in vars(importlib.import_module(f"{families.__name__}.{file}")).items()
        if isinstance(value, Family) and not name.startswith("_")
    }
    assert of_files - {"glm5_next_text"} == {*FAMILIES}  # it is inside glm5_next alone


def test_what_is_asked_of_a_configuration_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    checked, named = build.unsupported, param_shapes._tensors
    monkeypatch.setattr(build, "unsupported", lambda config: asked.append("checked") or checked(config))
    monkeypatch.setattr(param_shapes, "_tensors", lambda config: asked.append("named") or named(config))
    several = CONFIG.replace(num_layers=3)
    GPTModel(several, device="meta")
    first, second = expected_tensors(several), expected_tensors(several)
    assert asked == ["checked", "named"]
    assert first == second and first is not second, "callers may change what they get"
    GPTModel(CONFIG, device="meta")
    assert asked == ["checked", "named", "checked"]


def large_bytes() -> int:
    """Return the bytes of this process that lie in large pages."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["AnonHugePages"].split()[0]) << 10


def large_pages_collapse() -> bool:
    """Whether the system makes one large page of small ones when it is asked: Linux 6.1, unless it is told never to."""
    place = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place[::4096] = bytes(1024)
    try:
        place.madvise(25)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("recipe", [None, te.MXFP8BlockScaling()], ids=["plain", "quantized"])
def test_weights_lie_in_large_pages_and_have_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: te.Recipe | None
) -> None:
    """Also weights that are smaller than a large page, and lie one after another."""
    config = CONFIG.replace(num_layers=12, vocab_size=2**10, hidden_size=512, mlp=MLPConfig(ffn_hidden_size=512))
    with te.quantized_model_init(recipe is not None, recipe=recipe):
        model = GPTModel(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    asked: list[tuple[int, int]] = []

    def ask(blocks: Iterable[tuple[int, int]]) -> None:
        asked.extend(blocks)
        ask_for_large_pages(asked)

    monkeypatch.setattr(build, "ask_for_large_pages", ask)
    read = GPTModel.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    asked_bytes = sum(nbytes for _, nbytes in asked)
    assert asked_bytes > (18 << 20 if recipe is None else 9 << 20)
    assert max(nbytes for _, nbytes in asked) < 2 << 20
    if large_pages_collapse():
        assert large_bytes() > 0.5 * asked_bytes
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), model.parameters(), strict=True))


def test_the_collector_of_cycles_waits_until_a_model_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look at every object of the process, a tenth of a second, and find nothing; an error lets it go on."""
    GPTModel(CONFIG).save_pretrained(tmp_path / "model")
    running, give = [], gpt.give_memory
    monkeypatch.setattr(gpt, "give_memory", lambda *arguments: (running.append(gc.isenabled()), give(*arguments)))
    GPTModel.from_pretrained(tmp_path / "model")
    assert running == [False] and gc.isenabled()
    monkeypatch.setattr(gpt, "give_memory", lambda *_: pytest.fail("no memory"))
    with pytest.raises(pytest.fail.Exception, match="no memory"):
        GPTModel.from_pretrained(tmp_path / "model")
    assert gc.isenabled()


RECIPES = [te.MXFP8BlockScaling(), te.NVFP4BlockScaling(), te.DelayedScaling()]
MIXTURE = CONFIG.replace(moe=MoEConfig(num_moe_experts=2, moe_router_topk=1, moe_ffn_hidden_size=64))


@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.NAME)
def test_weights_of_a_recipe_are_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: te.Recipe, config: ModelConfig
) -> None:
    """What a model is built with has no values; those of the files are encoded, and equal what storing the plain
    model's weights gives."""
    GPTModel(config).save_pretrained(tmp_path / "model")
    plain = GPTModel.from_pretrained(tmp_path / "model")
    layers = [module for module in plain.modules() if isinstance(module, GemmModule)]
    encoded: list[str] = []
    quantize_fields = NumberFormat.quantize_fields

    def noted(self: NumberFormat, x: Tensor, *rest: Any) -> Any:
        encoded.append(x.device.type)
        return quantize_fields(self, x, *rest)

    monkeypatch.setattr(NumberFormat, "quantize_fields", noted)
    read = GPTModel.from_pretrained(tmp_path / "model", recipe=recipe)
    if config is CONFIG:
        assert encoded == ["cpu"] * len(layers)
    te.store_weights(plain, recipe)
    for name, parameter in plain.named_parameters():
        other = read.get_parameter(name)
        assert type(other) is type(parameter)
        if isinstance(parameter, te.QuantizedTensor) and isinstance(other, te.QuantizedTensor):
            assert parameter.quantizer == other.quantizer and parameter.shares_scale is other.shares_scale
            assert parameter.user_attributes() == other.user_attributes()
            for field, values in parameter.fields.items():
                both = (t.reshape(-1).view(torch.uint8) for t in (values, other.fields[field]))
                assert torch.equal(*both)
        else:
            assert torch.equal(other, parameter)
