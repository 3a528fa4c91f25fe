"""State dicts of Transformer Engine's modules, in files of torch's and in safetensors, to our folders and back.

The layer set here has Transformer Engine's modules, with its names: a model that a script makes of them is the
reference."""

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from te_models import GPTModel
from te_models.checkpoints import (
    CheckpointError,
    export_checkpoint,
    export_state_dict,
    import_checkpoint,
    import_state_dict,
)
from te_models.cli.main import main
from te_models.layers import GroupedLinear, RMSNorm, RotaryPositionEmbedding, TransformerLayer
from tests.build import VOCAB
from tests.checkpoints.foreign.test_round_trips import CONFIGS, saved

IDS = torch.arange(3, 15)


class Scripted(nn.Module):
    """What a script makes of Transformer Engine's layers: the dense configuration."""

    def __init__(self, *, fuse_qkv_params: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(
            TransformerLayer(
                32,
                48,
                4,
                num_gqa_groups=2,
                layernorm_epsilon=CONFIGS["dense"].norm.layernorm_epsilon,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                fuse_qkv_params=fuse_qkv_params,
                attn_input_format="bshd",
            )
            for _ in range(2)
        )
        self.norm = RMSNorm(32, eps=CONFIGS["dense"].norm.layernorm_epsilon)
        self.lm_head = nn.Linear(32, VOCAB, bias=False)
        for number, parameter in enumerate(self.parameters()):
            chance = torch.Generator().manual_seed(number)
            center = 1.0 if parameter.dim() == 1 else 0.0
            parameter.data = center + 0.2 * torch.randn(parameter.shape, generator=chance)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        angles = RotaryPositionEmbedding(8)(ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, rotary_pos_emb=angles)
        return self.lm_head(self.norm(hidden))


def with_extra_state(state: dict[str, Tensor], held: bytes = b"") -> dict[str, Any]:
    """As Transformer Engine's modules have it beside their parameters."""
    extra = torch.frombuffer(bytearray(held), dtype=torch.uint8) if held else torch.empty(0, dtype=torch.uint8)
    return {**state, "layers.0.self_attention.layernorm_qkv._extra_state": extra}


def in_three(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As Transformer Engine names q, k and v without fuse_qkv_params."""
    found = {}
    for name, value in state.items():
        if name.endswith("layernorm_qkv.weight"):
            at = name.removesuffix("weight")
            found |= {f"{at}{part}_weight": t for part, t in zip(("query", "key", "value"), value.split([32, 16, 16]))}
        else:
            found[name] = value
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "config.json"
    file.write_text(CONFIGS["dense"].to_json())
    return file


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("form", ["state.pt", "state.safetensors", "folder", "model.bin"])
def test_a_script_s_state_dict_gives_its_logits(form: str, fused: bool, config: Path, tmp_path: Path) -> None:
    script = Scripted(fuse_qkv_params=fused)
    state = script.state_dict()
    if not fused:  # the layers here have one parameter, and take three
        state = in_three(state)
    state = with_extra_state({f"model.{name}": t for name, t in state.items()})
    source = tmp_path / form
    if form == "state.pt":
        torch.save({"model": state, "step": 3}, source)
    elif form == "model.bin":
        torch.save(state, source)
    else:
        if form == "folder":
            source.mkdir()
        save_file(state, source / "model.safetensors" if form == "folder" else source)
    assert main(["import", str(source), str(tmp_path / "out"), "--config", str(config)]) == 0
    with torch.no_grad():
        found = GPTModel.from_pretrained(tmp_path / "out")(IDS[None]).logits
        expected = script(IDS[None])
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_one_parameter_may_hold_all_queries_first(config: Path, tmp_path: Path) -> None:
    """qkv_weight_interleaved=False, which names do not tell."""
    script = Scripted(fuse_qkv_params=False)
    torch.save(script.state_dict(), tmp_path / "state.pt")
    words = ["import", str(tmp_path / "state.pt"), str(tmp_path / "out"), "--config", str(config)]
    assert main([*words, "--qkv-not-interleaved"]) == 0
    model = GPTModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found, expected = model(IDS[None]).logits, script(IDS[None])
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
    export_checkpoint(tmp_path / "out", tmp_path / "again.pt", to="transformer_engine", qkv_weight_interleaved=False)
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    for name, value in script.state_dict().items():
        assert torch.equal(again[name if name.startswith("lm_head") else f"model.{name}"], value), name


@pytest.mark.parametrize("out", ["state.pt", "folder"])
def test_what_is_exported_loads_into_the_modules(out: str, tmp_path: Path) -> None:
    model = saved(CONFIGS["dense"], tmp_path / "model")
    words = ["export", str(tmp_path / "model"), str(tmp_path / out), "--to", "transformer_engine"]
    assert main(words) == 0
    assert main(words) == 2  # it exists
    file = tmp_path / out
    if out == "folder":
        state = load_file(file / "model.safetensors")
    else:
        state = torch.load(file, weights_only=True)
        assert all(torch.equal(t, torch.load(file, weights_only=True, mmap=True)[n]) for n, t in state.items())
    script = Scripted()
    script.load_state_dict({name.removeprefix("model."): t for name, t in state.items()})
    with torch.no_grad():
        found, expected = script(IDS[None]), model(IDS[None]).logits
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("layout", ["per-gemm", "grouped"])
def test_experts_are_a_grouped_linear(layout: Any, tmp_path: Path) -> None:
    model = saved(CONFIGS["moe"], tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out.pt", to="transformer_engine", layout=layout)
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    at = "model.layers.1.mlp.experts.linear_fc1."
    experts = GroupedLinear(4, 32, 96, bias=False, single_grouped_weight=layout == "grouped")
    experts.load_state_dict({name.removeprefix(at): t for name, t in state.items() if name.startswith(at)})
    held = experts.weight if layout == "grouped" else torch.stack([getattr(experts, f"weight{e}") for e in range(4)])
    assert torch.equal(held, model.decoder.layers[1].mlp.experts.linear_fc1.weight)
    import_checkpoint(tmp_path / "out.pt", tmp_path / "back", config=tmp_path / "model")
    back = GPTModel.from_pretrained(tmp_path / "back")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


class Subclass(torch.Tensor): ...


@pytest.mark.parametrize("layout", ["per-gemm", "grouped"])
def test_state_dicts_in_memory(layout: Any) -> None:
    model, other = (GPTModel(CONFIGS["moe"], expert_layout=layout) for _ in range(2))
    state = with_extra_state(export_state_dict(model.state_dict(), model.config))
    assert "model.layers.0.mlp.experts.linear_fc1.weight3" in state
    other.load_state_dict(import_state_dict(state, other.config, layout=layout))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    state["lm_head.weight"] = torch.zeros(2).as_subclass(Subclass)
    with pytest.raises(CheckpointError, match="is a Subclass; allowed: plain tensors"):
        import_state_dict(state, other.config)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("form", ["state.pt", "state.safetensors"])
def test_extra_state_is_not_opened(form: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = pickle.dumps({"recipe": Evil(tmp_path / "called")})
    state = with_extra_state(Scripted().state_dict(), held)
    if form == "state.pt":
        torch.save(state, tmp_path / form)
    else:
        save_file(state, tmp_path / form)
    assert main(["import", str(tmp_path / form), str(tmp_path / "out"), "--config", str(config)]) == 0
    assert "note: 1 module of Transformer Engine pickled a state (_extra_state)" in capsys.readouterr().out
    assert not (tmp_path / "called").exists()


def test_a_quantized_parameter_is_named(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformer Engine pickles it: a call of a function of its own."""
    module = types.ModuleType("transformer_engine.pytorch.tensor.float8_tensor")

    def _make_in_reduce_ex(*_: Any) -> None: ...

    _make_in_reduce_ex.__module__ = module.__name__
    _make_in_reduce_ex.__qualname__ = "_make_in_reduce_ex"
    module._make_in_reduce_ex = _make_in_reduce_ex
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.tensor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Float8Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            return _make_in_reduce_ex, (torch.zeros(4, dtype=torch.uint8),)

    name = "layers.0.layernorm_mlp.fc1_weight"
    torch.save({**Scripted().state_dict(), name: Float8Tensor()}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=f"holds '{name}' as _make_in_reduce_ex, which is not read"):
        import_checkpoint(tmp_path / "state.pt", tmp_path / "out", config=config)


def test_names_that_two_share_are_asked_for(tmp_path: Path) -> None:
    """Our modules are called as Megatron's; q, k and v lie in another order there."""
    model = saved(CONFIGS["dense"], tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="--from says whose they are: megatron or te_models"):
        import_checkpoint(tmp_path / "state.pt", tmp_path / "back", config=tmp_path / "model")
    for system, same in (("te_models", True), ("megatron", False)):
        back = tmp_path / system
        words = ["import", str(tmp_path / "state.pt"), str(back), "--config", str(tmp_path / "model")]
        assert main([*words, "--from", system]) == 0
        qkv = GPTModel.from_pretrained(back).decoder.layers[0].self_attention.linear_qkv.weight
        assert torch.equal(qkv, model.decoder.layers[0].self_attention.linear_qkv.weight) is same


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"layers.0.layernorm_mlp.fc1_weight": None}, "missing: .*layernorm_mlp.fc1_weight"),
        ({"embed_tokens.weight": None}, "the embedding table is not told"),
        ({"other.0.self_attention.qkv.weight": torch.ones(3)}, "begin in 2 ways"),
        ({"layers.0.layernorm_mlp.fc1_weight": torch.ones(3, 3)}, "has shape"),
    ],
)
def test_what_does_not_fit_is_told(
    changed: dict[str, Tensor | None], sentence: str, config: Path, tmp_path: Path
) -> None:
    state = {name: t for name, t in (Scripted().state_dict() | changed).items() if t is not None}
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=sentence):
        import_checkpoint(tmp_path / "state.pt", tmp_path / "out", config=config)


def test_files_without_a_state_dict_are_refused(config: Path, tmp_path: Path) -> None:
    torch.save({"model": {"a": 3}}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        import_checkpoint(tmp_path / "state.pt", tmp_path / "out", config=config)
    (tmp_path / "other.pt").write_bytes(pickle.dumps(Evil(tmp_path / "called")))
    with pytest.raises(CheckpointError):
        import_checkpoint(tmp_path / "other.pt", tmp_path / "out", config=config)
    assert not (tmp_path / "called").exists()
