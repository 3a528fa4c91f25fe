"""Verbs that look at bytes or move them never import torch, which takes seconds: a process in which it cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

WITHOUT_TORCH = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch is imported")

sys.meta_path.insert(0, Refuses())
from te_models.cli.main import main
for verb in VERBS:
    assert main([*verb, "--debug"]) == 0, verb
assert "torch" not in sys.modules
"""


def mixtral(folder: Path) -> None:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)


def test_verbs_that_look_at_bytes_or_move_them(tmp_path: Path) -> None:
    hf, ours, back, apart = (str(tmp_path / name) for name in ("hf", "ours", "back", "apart"))
    mixtral(tmp_path / "hf")
    verbs = [
        ["inspect", hf],
        ["import", hf, ours],
        ["inspect", ours, "--tensors"],
        ["verify", ours],
        ["verify", hf, ours],
        ["diff", hf, ours],
        ["export", ours, back],
        ["verify", hf, back],
        ["relayout", ours, apart, "--layout", "per-gemm"],
        ["verify", ours, apart],
        ["reshard", apart, str(tmp_path / "many"), "--max-shard-size", "20KB"],
        ["merge-shards", str(tmp_path / "many"), str(tmp_path / "one")],
        ["verify", str(tmp_path / "one"), hf],
    ]
    run = subprocess.run(
        [sys.executable, "-c", f"VERBS = {verbs!r}\n{WITHOUT_TORCH}"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("verb", [["inspect"], ["inspect", "--no-such"], ["no-verb"], ["quantize", "a"]])
def test_usage_errors(verb: list[str]) -> None:
    script = f"VERBS = []\n{WITHOUT_TORCH}\nmain({verb!r})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "torch is imported" not in run.stderr, run.stderr


def test_what_differs_is_named_as_before(tmp_path: Path) -> None:
    """The first element that differs, by its index in the parameter and its two values."""
    from safetensors.torch import load_file, save_file

    from te_models.checkpoints import import_hf, verify

    mixtral(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = 7.0
    save_file(tensors, file, metadata={"format": "pt"})
    (difference,) = verify(tmp_path / "hf", tmp_path / "ours").differences
    assert difference.startswith("decoder.layers.1.self_attention.linear_proj.weight[3, 5]: 7.0 and ")
