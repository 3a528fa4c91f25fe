"""Run by test_optional_packages in a process of its own: what works with these optional packages, and without others.

Arguments: the packages that there are, a folder of ours with a tokenizer, and an empty folder. A package that is not
named is hidden from imports. bitsandbytes, where it is named and not installed, is a package with the classes that peft
looks for."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("accelerate", "peft", "bitsandbytes")
STUB = """
from types import SimpleNamespace
import torch
__version__ = "0.50.2"
names = ("Linear8bitLt", "Linear4bit", "Params4bit", "Int8Params")
nn = SimpleNamespace(**{name: type(name, (torch.nn.Module,), {}) for name in names})
"""


def arrange(present: set[str], empty: Path) -> None:
    """Hide the packages that are not to be there, and make up bitsandbytes."""
    if "bitsandbytes" in present and importlib.util.find_spec("bitsandbytes") is None:
        (empty / "bitsandbytes").mkdir()
        (empty / "bitsandbytes/__init__.py").write_text(STUB)
        (empty / "bitsandbytes-0.50.2.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.50.2\n"
        (empty / "bitsandbytes-0.50.2.dist-info/METADATA").write_text(metadata)
        sys.path.append(str(empty))
    hidden = set(PACKAGES) - present
    find = importlib.machinery.PathFinder.find_spec

    def find_spec(name: str, *args: Any) -> Any:
        return None if name.partition(".")[0] in hidden else find(name, *args)

    importlib.machinery.PathFinder.find_spec = find_spec
    assert {name for name in PACKAGES if importlib.util.find_spec(name)} == present


def main(present: set[str], folder: Path, empty: Path) -> None:
    """Load, generate, save, and adapt or train where there are the packages for it."""
    import torch
    import transformers

    import te_models.hf

    loaded = {
        "auto": transformers.AutoModelForCausalLM.from_pretrained(folder),
        "pipeline": transformers.pipeline("text-generation", model=str(folder)).model,
        "own": te_models.hf.TEModelForCausalLM.from_pretrained(folder),
    }
    ids = torch.arange(3, 11)[None]
    expected = loaded["own"](ids).logits
    for name, model in loaded.items():
        assert type(model) is te_models.hf.TEModelForCausalLM, name
        assert torch.equal(model(ids).logits, expected), name
    model = loaded["auto"]
    assert model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape == (1, 11)
    model.save_pretrained(empty / "saved")
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(empty / "saved")(ids).logits, expected)
    if "peft" in present:
        import peft

        adapted = peft.get_peft_model(
            loaded["pipeline"], peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        )
        other = adapted(ids).logits
        assert not torch.allclose(other, expected)
        adapted.save_pretrained(empty / "adapter")
        assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(empty / "adapter")(ids).logits, other)
    else:
        (empty / "adapter").mkdir()
        (empty / "adapter/adapter_config.json").write_text(f'{{"base_model_name_or_path": "{folder}"}}')
        try:
            te_models.hf.TEModelForCausalLM.from_pretrained(empty / "adapter")
        except ImportError as error:
            assert "needs the package 'peft': pip install 'te_models[peft]'" in str(error), error
        else:
            raise AssertionError("an adapter was left out")
    if "accelerate" in present:
        arguments = transformers.TrainingArguments(output_dir=str(empty), max_steps=1, use_cpu=True, report_to=[])
        data = [{"input_ids": ids[0], "labels": ids[0]}] * 2
        transformers.Trainer(loaded["own"], arguments, train_dataset=data).train()


if __name__ == "__main__":
    packages, *folders = sys.argv[1:]
    given = set(packages.split(",")) - {""}
    arrange(given, Path(folders[1]))
    main(given, *map(Path, folders))
