"""What computes a run is a key of its configuration: in force while it trains, and never a matter of its numbers."""

from pathlib import Path

import pytest

from te_models.config import ConfigError
from te_models.kernels import backend, cpp_library
from te_models.kernels.backend import BackendError, using_backend
from te_models.training import PrecisionConfig, TrainConfig, train
from tests.training.runs import assert_same_bits, tensors_under, tiny_run


def test_a_run_has_the_backend_of_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" it has the process's; a run without C++ ends with the bits of one with it."""
    seen: list[str] = []
    choose = backend.libraries.ask

    def noted(*arguments: object) -> object:
        seen.append(backend.backend())
        return choose(*arguments)

    monkeypatch.setattr(backend.libraries, "ask", noted)
    finals = []
    for setting, outside in (("definition", "auto"), ("compiled", "auto"), ("auto", "definition")):
        precision = PrecisionConfig(dtype="bf16", recipe="mxfp8")
        run = tiny_run(tmp_path, f"{setting}-{outside}", steps=1, precision=precision, backend=setting)
        backend.forget()
        seen.clear()
        with using_backend(outside):
            train(run)
            assert backend.backend() == outside, "the process has its own setting again"
        assert set(seen) == {outside if setting == "auto" else setting}
        finals.append(tensors_under(Path(run.output_dir) / "final"))
    assert_same_bits(finals[0], finals[2])


def test_a_run_that_needs_libraries_says_which_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> object:
        raise cpp_library.CompilationError("there is no C++ compiler")

    monkeypatch.setattr(cpp_library, "_library", none)
    for op in backend.libraries.BY_NAME.values():
        monkeypatch.setattr(op, "load", none)
    backend.forget()
    with pytest.raises(BackendError, match=r"the backend is 'compiled', and .* has no library here: there is no C"):
        train(tiny_run(tmp_path, steps=1, backend="compiled"))
    backend.forget()


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend.* 'c\+\+'.*'auto', 'definition', 'compiled'"):
        TrainConfig.from_dict(tiny_run(tmp_path).to_dict() | {"backend": "c++"})
