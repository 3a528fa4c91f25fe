"""The [precision] table that is written gives each layer the format that was chosen."""

import random
import tomllib

import pytest

from te_models.rehearse.formats import COSTS, FORMATS, formats_of
from te_models.rehearse.observe import Unit
from te_models.rehearse.table import numbers, precision_of, resolved, toml_of
from te_models.training import PrecisionConfig

KINDS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def units(layers: int) -> list[Unit]:
    return [Unit(f"decoder.layers.{i}.{k}", f"decoder.layers.{i}", k, 1.0) for i in range(layers) for k in KINDS]


def test_rules_are_short_where_layers_are_alike() -> None:
    them = units(14)
    base = PrecisionConfig(dtype="bf16")
    ends = ["bf16" if u.group[15:] in ("0", "12", "13") else "nvfp4" for u in them]
    found = precision_of(them, ends, base, 14)
    assert (found.recipe, found.first_layers_bf16, found.last_layers_bf16, found.overrides) == ("nvfp4", 1, 2, ())
    kinds = ["mxfp8" if u.kind == KINDS[3] else "nvfp4" for u in them]
    assert precision_of(them, kinds, base, 14).overrides == ("*.mlp.linear_fc2=mxfp8",)
    some = ["mxfp8" if u.group[15:] in ("1", "2", "3", "5", "11", "13") else "nvfp4" for u in them]
    rules = ("decoder.layers.[1-35].*=mxfp8", "decoder.layers.1[13].*=mxfp8")
    assert precision_of(them, some, base, 14).overrides == rules
    assert numbers([f"decoder.layers.{i}" for i in (0, 1, 10, 14, 15, 16, 103)]) == ["[01]", "1[04-6]", "103"]


@pytest.mark.parametrize("seed", range(20))
def test_any_assignment_is_written_and_read(seed: int) -> None:
    draw = random.Random(seed)
    them = [
        *units(13),
        Unit("mtp.layers.0.linear", "mtp.layers.0", "linear", 1.0),
        Unit("extra", "extra", "extra", 1.0),
    ]
    names = ["bf16", "mxfp8", "current", draw.choice(["nvfp4", "nvfp4-nearest"])]
    weights = [draw.random() ** 3 for _ in names]
    formats = [draw.choices(names, weights)[0] for _ in them]
    if seed % 2:  # layers whole
        of_group = {u.group: draw.choices(names, weights)[0] for u in them}
        formats = [of_group[u.group] for u in them]
    found = precision_of(them, formats, PrecisionConfig(dtype="fp32"), 13)
    text = toml_of(found, ["Evidence of one line."])
    read = PrecisionConfig.from_dict(tomllib.loads(text)["precision"])
    assert read == found and resolved(them, read, 13) == formats
    assert text.startswith("# Evidence of one line.\n[precision]\n") and '\ndtype = "fp32"\n' in text


def test_formats_have_names_costs_and_recipes() -> None:
    assert {f.cost for f in FORMATS.values()} == {0.5, 0.25} and COSTS["bf16"] == 1.0
    assert len({f.value() for f in FORMATS.values()}) == len(FORMATS)
    assert precision_of(units(1), ["bf16"] * 4, PrecisionConfig(), 1) == PrecisionConfig()
    with pytest.raises(ValueError, match=r"the format 'mxpf8' is unknown; allowed: delayed.*did you mean 'mxfp8'"):
        formats_of(["mxpf8"])
    with pytest.raises(ValueError, match="formats with options are nvfp4-rows, mxfp8-2d; allowed: one of them"):
        precision_of(units(1), ["nvfp4-rows", "mxfp8-2d", "bf16", "bf16"], PrecisionConfig(), 1)
