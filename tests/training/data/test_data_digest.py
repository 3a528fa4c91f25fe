"""A run goes on with the tokens that it began with, whose ids the model has; a file that shrinks meanwhile is told."""

import json
import shutil
from pathlib import Path

import pytest

from te_models.training import DataError, TokenDataset, Windows, latest_checkpoint, loop, train, write_dataset
from te_models.training.checkpoints.checkpoint import load_state
from te_models.training.data import digest as data_digest
from te_models.training.step import StepResult, train_step
from tests.compare import refused
from tests.fork_server import CONTEXT
from tests.training.runs import tiny_run


def change(folder: Path, token: int, data: bytes) -> None:
    """Write two bytes over a token of uint16 in place."""
    with (folder / "tokens.bin").open("r+b") as file:
        file.seek(2 * token)
        file.write(data)


def without_digest(folder: Path) -> None:
    """Make the data set one that was built before digests were recorded."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta["digest"]
    (folder / "meta.json").write_text(json.dumps(meta))


def test_every_byte_of_a_small_data_set_and_its_index_count(tmp_path: Path) -> None:
    tokens = list(range(100))
    digests = [write_dataset(tmp_path / "a", [[tokens]], 100).checked_digest()]
    assert json.loads((tmp_path / "a" / "meta.json").read_text())["digest"] == digests[0]
    digests.append(write_dataset(tmp_path / "longer", [[[*tokens, 0]]], 100).checked_digest())
    digests.append(write_dataset(tmp_path / "wider", [[tokens]], 101).checked_digest())
    without_digest(tmp_path / "a")
    for token in range(100):
        change(tmp_path / "a", token, b"\x63\0" if token != 99 else b"\0\0")
        digests.append(TokenDataset.open(tmp_path / "a").checked_digest())
    assert len(set(digests)) == len(digests)


def test_a_large_data_set_is_sampled_to_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_digest, "BLOCKS", 8)
    monkeypatch.setattr(data_digest, "BLOCK", 16)
    blocks = list(data_digest._blocks(1000, 2))
    assert blocks[0] == (0, 8) and blocks[-1] == (992, 8) and len(blocks) == 8
    dataset = write_dataset(tmp_path / "a", [[[7] * 1000]], 100)
    for token in (0, 999, blocks[3][0]):
        change(tmp_path / "a", token, b"\x08\0")
        with pytest.raises(DataError, match=r"tokens.bin is not what was built: its digest is not the one in meta"):
            dataset.checked_digest()
        change(tmp_path / "a", token, b"\x07\0")
    dataset.checked_digest()


def test_a_run_does_not_continue_on_other_data(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, steps=1)
    train(config)
    data = Path(config.data.path)
    state = load_state(latest_checkpoint(Path(config.output_dir)))
    assert state.data_digest == TokenDataset.open(data).checked_digest()

    change(data, 5, b"\x01\0")  # the same size, another content
    refused(lambda: train(config), "tokens.bin is not what was built", error=DataError)
    without_digest(data)
    with pytest.raises(DataError, match=r"cannot continue from step 1: .*data holds other tokens than the"):
        train(config)
    shutil.rmtree(data)  # built again, from the same text
    train(config)


def test_ids_beyond_the_vocabulary_are_told(tmp_path: Path) -> None:
    """At the start, and where they come later, when they are read."""
    config = tiny_run(tmp_path, steps=1)
    dataset = write_dataset(config.data.path, [[[1] * 4000]], 257)
    config = config.replace(data=config.data.replace(text=(), tokenizer=None))
    change(dataset.path, 77, b"\x01\x01")
    sentence = r"tokens.bin has the token id 257 at token 77; allowed: below its vocab_size, 257"
    with pytest.raises(DataError, match=sentence):
        train(config)
    with pytest.raises(DataError, match=sentence):
        Windows(dataset, 32, "validation", 0.999, 0).batch(1, 1)


def test_a_file_that_shrinks_while_training_is_told(tmp_path: Path) -> None:
    """In a process of its own: through a memory map it would die of SIGBUS."""
    config = tiny_run(tmp_path)
    write_dataset(config.data.path, [[[1] * 100_000]], 257)
    config = config.replace(data=config.data.replace(text=(), tokenizer=None))
    child = CONTEXT.Process(target=_train_while_it_shrinks, args=(config.to_dict(), str(tmp_path / "told")))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    told = (tmp_path / "told").read_text()
    assert told.endswith("tokens.bin shrank to 0 bytes while it was read; its tokens need 200000")


def _train_while_it_shrinks(config: dict, told: str) -> None:
    from te_models.training import TrainConfig

    run = TrainConfig.from_dict(config)

    def step(*args: object, **kwargs: object) -> StepResult:
        with (Path(run.data.path) / "tokens.bin").open("r+b") as file:
            file.truncate(0)
        return train_step(*args, **kwargs)

    loop.train_step = step
    try:
        train(run)
    except DataError as error:
        Path(told).write_text(str(error))


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    import os

    dataset = write_dataset(tmp_path / "a", [[[1, 2, 3]]], 100)
    (dataset.path / "tokens.bin").unlink()
    os.mkfifo(dataset.path / "tokens.bin")  # opening it would wait for ever
    refused(lambda: TokenDataset.open(dataset.path), "has 0 bytes, but 3 tokens of uint16 need 6", error=DataError)
