"""`te_models.extras.require`: a missing package is one sentence, a broken one is its own error."""

from pathlib import Path

import pytest

from te_models.extras import MissingExtraError, installed, require


def test_require_returns_the_module() -> None:
    import json.decoder

    assert require("json.decoder", "train") is json.decoder


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_package_anywhere.part", "train", feature="training")
    assert str(caught.value) == (
        "training needs the package 'no_such_package_anywhere': pip install 'te_models[train]'"
    )


def test_an_error_inside_an_installed_package_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package_of_this_test.py").write_text("import missing_dependency_of_this_test\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="missing_dependency_of_this_test") as caught:
        require("broken_package_of_this_test", "train")
    assert not isinstance(caught.value, MissingExtraError)


def test_installed_looks_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed("hf")
    monkeypatch.setitem(__import__("te_models.extras", fromlist=["EXTRAS"]).EXTRAS, "hf", ("no_such_package_anywhere",))
    assert not installed("hf")
