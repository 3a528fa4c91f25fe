"""A training checkpoint that is not as it was written is named in one sentence, with the one to continue from."""

import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from te_models.checkpoints.io import store
from te_models.checkpoints.io.hashing import FileRecord
from te_models.checkpoints.io.header import Header, read_header
from te_models.checkpoints.io.manifest import MANIFEST, manifest_bytes, record_files
from te_models.cli.main import main
from te_models.config import ConfigError
from te_models.training import (
    CheckpointConfig,
    ModelSource,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
    TrainingCheckpointError,
    latest_checkpoint,
    list_checkpoints,
    train,
)
from te_models.training.checkpoints.checkpoint import load_state
from te_models.training.checkpoints.checks import TENSORS, VALUES, manifest_paths
from tests.training import edited
from tests.training.processes import as_toml
from tests.training.runs import assert_same_bits, curve, tensors_under, tiny_model, tiny_run


@dataclass
class Run:
    """A finished run of six steps with checkpoints at 2, 4 and 6, and copies of its first two."""

    folder: Path
    config: TrainConfig

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.output_dir) / "checkpoints"

    def copy(self, name: str, steps: Iterable[int] = (2, 4)) -> tuple[TrainConfig, Path]:
        """Return a run that will continue from step 4, and that checkpoint."""
        output_dir = self.folder / name
        shutil.rmtree(output_dir, ignore_errors=True)
        for step in steps:
            shutil.copytree(self.checkpoints / f"step-{step:08d}", output_dir / "checkpoints" / f"step-{step:08d}")
        return self.config.replace(output_dir=str(output_dir)), output_dir / "checkpoints" / f"step-{max(steps):08d}"

    def assert_equal(self, config: TrainConfig) -> None:
        one, two = (tensors_under(latest_checkpoint(Path(c.output_dir))) for c in (self.config, config))
        assert_same_bits(two, one)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    (folder / "model.json").write_text(tiny_model(hidden=16, layers=1).to_json())
    config = tiny_run(
        folder,
        model=ModelSource(config_file=str(folder / "model.json")),
        precision=PrecisionConfig(dtype="bf16", recipe="delayed", recipe_options=("amax_history_len=4",)),
        optimizer=OptimizerConfig(lr=3e-3, master_weights=True, moment_dtype="float8"),
    )
    train(config)
    return Run(folder, config)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Without a recipe, with moments in float32."""
    folder = tmp_path_factory.mktemp("plain")
    config = tiny_run(folder, model=ModelSource(config=tiny_model(hidden=16, layers=1)))
    train(config)
    return Run(folder, config)


def cases_of(run: Run) -> Iterator[edited.Case]:
    folder, other = (run.checkpoints / f"step-0000000{step}" for step in (4, 2))
    yield from edited.value_cases(json.loads((folder / VALUES).read_text()))
    yield from edited.tensor_cases(load_file(folder / TENSORS))
    yield from edited.file_cases(folder, other)


def assert_told(run: Run, case: edited.Case) -> None:
    """The edit ends in one sentence that names the checkpoint, the intact one and the option; or changes nothing."""
    config, folder = run.copy("edited")
    case(folder)
    try:
        train(config)
    except (TrainingCheckpointError, ConfigError) as error:
        sentence = str(error)
        assert "\n" not in sentence and len(sentence) < 900, (case.name, sentence)
        assert isinstance(error, ConfigError) or f"--resume-from {folder.with_name('step-00000002')}" in sentence, case
        assert not isinstance(error.__cause__, OSError), (case.name, "exit code 3")
    except BaseException as error:
        raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error
    else:
        assert case.harmless, f"{case.name} was not noticed"
        run.assert_equal(config)


def test_edits_are_told(run: Run) -> None:
    """A part of them; the next test makes all."""
    cases = list(cases_of(run))
    assert len(cases) > 500
    certain = [case for case in cases if not case.harmless]
    for case in certain[:: len(certain) // 12]:
        assert_told(run, case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_edits_are_told(run: Run, plain: Run, part: int) -> None:
    whole = edited.tensor_cases(load_file(plain.checkpoints / "step-00000004" / TENSORS))
    for its, cases in ((run, cases_of(run)), (plain, whole)):
        for case in itertools.islice(cases, part, None, 8):
            assert_told(its, case)


def flip(folder: Path, bits: int, seed: int) -> Iterator[str]:
    """Flip one bit after another, of files in turn and of places by chance; yield which, and flip it back."""
    chance, files = random.Random(seed), sorted(file for file in folder.rglob("*") if file.is_file())
    for number, file in zip(range(bits), itertools.cycle(files), strict=False):
        size = file.stat().st_size
        # headers and JSON are the small part of the data that everything depends on
        place = chance.randrange(min(size, 4096) if number % 3 == 0 else size)
        with file.open("r+b") as opened:
            opened.seek(place)
            before = opened.read(1)[0]
            for value in (before ^ 1 << chance.randrange(8), before):
                opened.seek(place)
                opened.write(bytes([value]))
                opened.flush()
                if value != before:
                    yield f"{file.relative_to(folder)}, byte {place}: {before:#x} to {value:#x}"


def assert_flips_are_noticed(folder: Path, bits: int, seed: int) -> None:
    for where in flip(folder, bits, seed):
        try:
            load_state(folder)
        except TrainingCheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 900, where
        except BaseException as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        else:
            raise AssertionError(f"{where} was not noticed")
    load_state(folder)


def test_flipped_bits_are_noticed(run: Run) -> None:
    _, folder = run.copy("flipped")
    assert_flips_are_noticed(folder, 150, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_ten_thousand_flipped_bits_are_noticed(run: Run, plain: Run, seed: int) -> None:
    for its in (run, plain):
        _, folder = its.copy(f"flipped{seed}")
        assert_flips_are_noticed(folder, 1100, seed)


def test_a_damaged_checkpoint_names_what_to_continue_from(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, too: exit code 2, one line; the option that it names continues, and is needed once."""
    config, newest = run.copy("advice")
    file = newest / TENSORS
    data = bytearray(file.read_bytes())
    data[-100] ^= 16
    file.write_bytes(data)
    toml = run.folder / "run.toml"
    toml.write_text(as_toml(config))
    assert main(["train", str(toml)]) == 2
    line = capsys.readouterr().err
    intact = newest.with_name("step-00000002")
    assert line.count("\n") == 1 and "training.safetensors does not have the SHA-256" in line and "; tensor '" in line
    assert line.endswith(f"from it with --resume-from {intact} (in the file: resume_from)\n")
    assert not (Path(config.output_dir) / "metrics.jsonl").exists()

    shorter = run.config.replace(output_dir=config.output_dir)
    assert main(["train", str(toml), "--resume-from", str(intact)]) == 0
    run.assert_equal(shorter)
    names = sorted(path.name for path in intact.parent.iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000004.set-aside", "step-00000006"]
    assert train(shorter).loss is None  # the newest one is intact again, and the run has ended


def test_verify_checks_a_training_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it: a manifest of the training state alone would call one intact whose weights are damaged."""
    _, folder = run.copy("verified")
    assert main(["verify", str(folder)]) == 0
    assert "files of a training checkpoint of step 4 as manifest.json says" in capsys.readouterr().out
    weights = folder / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert main(["verify", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["intact"] and "model.safetensors does not have the SHA-256" in found["problem"]


def test_resume_from_an_older_or_another_runs_checkpoint(run: Run) -> None:
    """The newer ones make room without being removed; an intact checkpoint of elsewhere serves as well."""
    config, newest = run.copy("older")
    older = newest.with_name("step-00000002")
    train(config.replace(resume_from=str(older), steps=6))
    run.assert_equal(config)
    assert newest.with_name("step-00000004.set-aside").is_dir()
    fork = run.config.replace(output_dir=str(run.folder / "fork"), resume_from=str(older) + "/")
    train(fork)
    run.assert_equal(fork)
    assert curve(fork) == curve(run.config)[2:]
    with pytest.raises(ConfigError, match=r"resume_from is 'nowhere', which is not a folder; .*step-00000006"):
        train(config.replace(resume_from="nowhere"))
    for folder in (older.parent, older.parent.parent):
        with pytest.raises(ConfigError, match=r"the folder of a run; allowed: one of .*/step-00000006 is the newest"):
            train(config.replace(resume_from=str(folder)))
    with pytest.raises(ConfigError, match="the folder of a model, without the optimizer's state; allowed: a "):
        train(config.replace(resume_from=str(older / "model")))
    with pytest.raises(ConfigError, match="resume_from is 'x'; allowed: null where resume is off"):
        config.replace(resume=False, resume_from="x")
    renamed = shutil.copytree(older, run.folder / "kept")
    with pytest.raises(TrainingCheckpointError, match="the folder of that step would be named step-00000002"):
        train(config.replace(resume_from=str(renamed)))


def test_without_an_intact_one_the_sentence_says_so(run: Run) -> None:
    config, newest = run.copy("none")
    for folder in list_checkpoints(Path(config.output_dir)):
        (folder / VALUES).unlink()
    with pytest.raises(TrainingCheckpointError, match="no other checkpoint of this run is intact: start anew"):
        train(config)
    assert latest_checkpoint(Path(config.output_dir)) == newest  # one that lost its files is no older run's end


def test_a_checkpoint_of_an_earlier_release_continues_with_a_warning(run: Run) -> None:
    config, folder = run.copy("earlier")
    edited.make_version_1(folder)
    with pytest.warns(UserWarning, match="is a checkpoint of an earlier release, without a manifest.json"):
        train(config)
    assert_same_bits(tensors_under(Path(config.output_dir) / "final"), tensors_under(run.checkpoints.parent / "final"))
    config, folder = run.copy("earlier")
    (folder / MANIFEST).unlink()
    with pytest.raises(TrainingCheckpointError, match=r"it has no manifest\.json; the newest intact one is"):
        train(config)


def test_files_that_systems_leave_behind_do_not_count(run: Run) -> None:
    config, folder = run.copy("hidden")
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "model" / ".nfs01").write_bytes(b"x")
    train(config)
    run.assert_equal(config)


def test_values_out_of_range_are_named(plain: Run) -> None:
    """The manifest made anew, so that only the numbers can tell."""
    config, folder = plain.copy("ranges")
    name = "optimizer.decoder.layers.0.mlp.linear_fc1.weight"
    found = load_file(folder / TENSORS)
    for key, value, allowed in (
        (f"{name}.exp_avg", float("inf"), "finite numbers"),
        (f"{name}.exp_avg_sq", -1e-9, "numbers of zero and more"),
        (f"{name}.exp_avg_sq", float("nan"), "numbers of zero and more"),
    ):
        changed = found[key].clone()
        changed.view(-1)[7] = value
        _, folder = plain.copy("ranges")
        edited.edit_tensors(folder, lambda tensors, key=key, changed=changed: tensors.update({key: changed}))
        edited.seal(folder)
        with pytest.raises(TrainingCheckpointError, match=f"{key}' has values out of range; allowed: {allowed}"):
            train(config)


@pytest.mark.parametrize(
    ("key", "told"), [("position", "position 17, but 4 steps of 4 windows reach 16"), ("step", "step 5")]
)
def test_values_that_do_not_fit_each_other_are_refused(plain: Run, key: str, told: str) -> None:
    """The manifest was made anew."""
    _, folder = plain.copy(f"one {key} more")
    edited.edit_values(folder, lambda values: values.update({key: values[key] + 1}))
    edited.seal(folder)
    with pytest.raises(TrainingCheckpointError, match=f"says {told}"):
        load_state(folder)


def test_a_manifest_of_another_release_is_refused(plain: Run) -> None:
    _, folder = plain.copy("manifest")
    original = json.loads((folder / MANIFEST).read_text())
    entry = original["files"][VALUES]
    for change, message in (
        ({"format_version": 4}, "has format_version 4; this release reads versions 1 to 3"),
        ({"format_version": 2}, "has rows_per_part, which format_version 2 has not"),
        ({"files": []}, "has no 'files'"),
        ({"files": {}}, "lists other files than there should be"),
        ({"more": 1}, "is not as te-models writes it"),
        ({"files": original["files"] | {VALUES: entry | {"more": 1}}}, "is not as te-models writes it"),
        ({"files": original["files"] | {VALUES: [1]}}, "by something other than sha256 and bytes"),
        ({"files": original["files"] | {"more": entry}}, "lists other files than there should be: 'more'"),
        ({"files": original["files"] | {"../x": entry}}, "names the file '../x', which is not a plain file name"),
    ):
        (folder / MANIFEST).write_text(json.dumps(original | change))
        with pytest.raises(TrainingCheckpointError, match=message):
            load_state(folder)


@pytest.mark.parametrize("version", [1, 2])
def test_a_manifest_of_an_earlier_release_is_checked(plain: Run, version: int) -> None:
    """Version 1 lists what `sha256sum` prints of the training state, and both the digest of all bytes of a tensor."""
    _, folder = plain.copy("whole")
    assert json.loads((folder / MANIFEST).read_text())["format_version"] == 3
    whole = {TENSORS: FileRecord("x" if version == 1 else "", 0)}
    paths = manifest_paths(folder)
    records = record_files(paths) | record_files({TENSORS: paths[TENSORS]}, like=whole)
    (folder / MANIFEST).write_bytes(manifest_bytes(records))
    manifest = json.loads((folder / MANIFEST).read_text())
    digest = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
    assert manifest["format_version"] == version
    assert manifest["files"][TENSORS].get("sha256") == (digest if version == 1 else None)
    header = read_header(folder / TENSORS)
    for name, listed in manifest["files"][TENSORS]["tensors"].items():
        info = header.tensors[name]
        data = (folder / TENSORS).read_bytes()[header.data_start + info.start : header.data_start + info.stop]
        assert listed == hashlib.sha256(data).hexdigest()
    load_state(folder)
    key, said = ("sha256", "does not have the SHA-256") if version == 1 else ("digest", "is not made of the digests")
    for change, message in (
        ({key: "0" * 64}, f"training.safetensors .*{said}"),
        ({"header": "0" * 64}, "its header was changed"),
        ({"tensors": {}}, "training.safetensors does not have the SHA-256"),
    ):
        entry = manifest["files"][TENSORS] | change
        (folder / MANIFEST).write_text(json.dumps(manifest | {"files": manifest["files"] | {TENSORS: entry}}))
        with pytest.raises(TrainingCheckpointError, match=message):
            load_state(folder)


def test_a_file_that_shrinks_while_it_is_read_is_one_sentence(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = plain.copy("shrinks")
    read_header = store.read_header

    def then_cut(path: Path, file: str) -> Header:
        header = read_header(path, file)
        os.truncate(path, header.data_start)
        return header

    monkeypatch.setattr(store, "read_header", then_cut)
    with pytest.raises(TrainingCheckpointError, match=r"training\.safetensors became shorter while it was read$"):
        load_state(folder)


def test_nothing_is_removed_beside_a_damaged_one(run: Run) -> None:
    config, newest = run.copy("kept", steps=(2, 4))
    edited.edit_values(newest, lambda values: values.update(step=3))
    edited.seal(newest)
    with pytest.raises(TrainingCheckpointError, match="says step 3, but the folder of that step would be named"):
        train(config.replace(checkpoint=CheckpointConfig(every=2, keep_last=1)))
    assert newest.exists() and newest.with_name("step-00000002").exists()
