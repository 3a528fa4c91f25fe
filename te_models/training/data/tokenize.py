"""Tokenize files into a data set with several workers; a run that is interrupted goes on where it was.

The spans of all files are shuffled with a fixed seed, so that the tail of the data set, the validation split, is a fair
sample, and grouped into *parts*. Each part is written into the folder `.NAME.parts` beside the destination, and has
its final name only when it is complete; one that is not goes on behind its last noted row (`part`). When all are
complete, they are joined in their order: the bytes of the data set depend on neither the number of workers nor on
interruptions. A worker is a thread with its tokenizer process.
"""

import hashlib
import json
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from te_models.checkpoints.io.atomic import LOCK, locked_folder, new_folder, remove_locked, replace_text

from ...sizes import plural
from ...tokenizer import FILE, tokenizer_folder
from .dataset import TokenDataset
from .documents import DocumentSpan, matching_files, spans_of
from .encoder import Encoder, load_encoder
from .errors import DataError
from .formats import Fields
from .options import DocumentOptions
from .part import NAMED, NOTES, Work, has_begun, write_part
from .streamed import is_stream, version_of
from .writer import TokenWriter, write_meta

PART_SIZE = 64 << 20
"""Of the spans of a part, in bytes; smaller where there would be fewer parts than workers."""
_OF_MODEL = ("generation_config.json", "config.json")
Report = Callable[[int, int], None]


def build_dataset(
    out: str | Path,
    text: Sequence[str | Path],
    tokenizer: str,
    *,
    text_field: str = "text",
    messages_field: str | None = None,
    options: DocumentOptions | None = None,
    shuffle_seed: int = 0,
    workers: int = 1,
    model_vocab_size: int | None = None,
    report: Report = lambda done, total: None,
) -> TokenDataset:
    """Tokenize files into a new data set at `out`, or go on with a run of the same arguments that was interrupted.

    Args:
        text: Names or glob patterns (`**` included) of text files, `.jsonl`, `.json` (with a format of rows: a list of
            them), `.parquet` (extra `data`), and folders of `datasets.save_to_disk` (extra `data`); or
            `hf://NAME@CONFIGURATION:SPLIT`, a data set of the hub, or of a folder, that `datasets` streams (extra
            `data`).
        tokenizer: A folder with tokenizer.json, or "bytes".
        text_field: The field, or column, of a row that is its text.
        messages_field: The field that is a list of chat messages (`role`, `content`), in place of `text_field`: they
            are written with the tokenizer's chat template, and the loss counts the messages of the assistant.
        options: How rows are read, and which tokens begin and end documents; None: the defaults.
        shuffle_seed: Decides the order of the spans.
        workers: How many tokenizer processes run.
        model_vocab_size: Of the model that is to be trained: the first token that it does not have is an error.
        report: Called with the bytes that are done, and all.

    Raises:
        DataError: nothing matches, `out` exists, the tokenizer folder is incomplete, or a document cannot be used; the
            sentence names the file and the line. With `options.skip_bad_rows` such rows are counted in meta.json.
        TokenizerError, CheckpointError: the tokenizer's files are damaged, ask for too much, or leave the folder.
        MissingExtraError: the extra that reads a file is not installed.
    """
    options = options or DocumentOptions()
    out, fields = Path(out), options.reading(text_field, messages_field)
    if out.exists():
        raise DataError(f"{out} exists already")
    if fields.format == "preference":
        chosen, rejected = fields.name("chosen"), fields.name("rejected")
        warnings.warn(
            f'data.format = "preference" is supervised fine-tuning on {chosen!r}, and a run learns nothing of '
            f'{rejected!r}; "preference_pairs" (--format) keeps both, for posttraining.method = "dpo"',
            stacklevel=2,
        )
    load = partial(load_encoder, tokenizer, format=fields.format, options=options)
    encoder = load()
    files = matching_files(text)
    spans = [span for file in files for span in spans_of(file, fields)]
    random.Random(shuffle_seed).shuffle(spans)
    parts = _parts(spans, workers)
    source: dict[str, Any] = {"text": [str(t) for t in text], "tokenizer": tokenizer, "files": len(files)}
    source |= {"shuffle_seed": shuffle_seed} | _fields_of(text_field, messages_field, options)
    working = out.parent / f".{out.name}.parts"
    working.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(working, out):
        try:
            if out.exists():  # another run wrote it meanwhile
                raise DataError(f"{out} exists already")
            _same_job(working, _job(parts, source, encoder))
            work = Work(fields, options.skip_bad_rows, model_vocab_size, load)
            _write_parts(working, parts, work, encoder, workers, report)
            dataset = _join(out, [working / str(i) for i in range(len(parts))], encoder.vocab_size, fields, source)
            remove_locked(working)
        except BaseException as error:
            done = sum(1 for path in working.iterdir() if path.is_dir() and not path.suffix) if working.exists() else 0
            if not done and not has_begun(working):
                remove_locked(working)
            elif isinstance(error, (DataError, KeyboardInterrupt)):
                within = ", and some rows of another" if has_begun(working) else ""
                rest = (
                    f"{working} has {done} of {plural(len(parts), 'part')}{within}: the same command goes on from there"
                )
                raise type(error)(f"{error}; {rest}" if str(error) else rest) from None
            raise
    return dataset


def _fields_of(text_field: str, messages_field: str | None, options: DocumentOptions) -> dict[str, Any]:
    """Return what meta.json says of the fields and options: nothing of usual ones."""
    found: dict[str, Any] = {"options": options.non_defaults()} if options.non_defaults() else {}
    if messages_field is not None:
        return found | {"messages_field": messages_field}
    return found if text_field == "text" else found | {"text_field": text_field}


def _parts(spans: list[DocumentSpan], workers: int) -> list[list[DocumentSpan]]:
    """Group spans in their order."""
    limit = max(1, min(PART_SIZE, sum(span.size for span in spans) // (4 * workers)))
    parts: list[list[DocumentSpan]] = []
    room = 0
    for span in spans:
        if room <= 0:
            parts.append([])
            room = limit
        parts[-1].append(span)
        room -= max(1, span.size)
    return parts


def _job(parts: list[list[DocumentSpan]], source: dict[str, Any], encoder: Encoder) -> str:
    """Return what says whether two runs write the same parts: the spans, the sizes and times of the files, and the
    tokenizer."""
    files = sorted({span.file for part in parts for span in part})
    stats = [[str(file), *_version(file)] for file in files]
    folder = Path() if encoder.name == "bytes" else tokenizer_folder(encoder.name)
    names = (FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", *_OF_MODEL)
    digests = [hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names if (folder / n).is_file()]
    spans = [[asdict(span) | {"file": str(span.file)} for span in part] for part in parts]
    whole = json.dumps([source, stats, digests, spans])
    return hashlib.sha256(whole.encode()).hexdigest()


def _version(file: Path) -> list[Any]:
    """Return what changes where a file does."""
    if is_stream(str(file)):
        return version_of(str(file))
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _same_job(working: Path, job: str) -> None:
    """Empty the working folder unless it is of the same job."""
    note = working / "job"
    if note.is_file() and note.read_text(encoding="utf-8") == job:
        return
    for path in working.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    replace_text(note, job)


def _write_parts(
    working: Path,
    parts: list[list[DocumentSpan]],
    work: Work,
    encoder: Encoder,
    workers: int,
    report: Report,
) -> None:
    """Write the parts that are missing."""
    own, stop = threading.local(), threading.Event()
    own.encoder = encoder
    sizes = [sum(span.size for span in part) for part in parts]
    missing = [i for i in range(len(parts)) if not (working / str(i)).is_dir()]
    done, total = sum(sizes) - sum(sizes[i] for i in missing), sum(sizes)
    report(done, total)

    def write(number: int) -> None:
        if not hasattr(own, "encoder"):
            own.encoder = work.load()
        write_part(working / str(number), parts[number], work, own.encoder, stop)

    if workers == 1:
        for number in missing:
            write(number)
            report(done := done + sizes[number], total)
        return
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(write, number): number for number in missing}
        try:
            for future in as_completed(futures):
                future.result()
                report(done := done + sizes[futures[future]], total)
        except BaseException:
            stop.set()  # what has begun ends at its next document
            pool.shutdown(cancel_futures=True)
            raise


def _join(out: Path, parts: list[Path], vocab_size: int, fields: Fields, source: dict[str, Any]) -> TokenDataset:
    """Join complete parts into a data set, and say what is noted of them."""
    notes = [json.loads((part / NOTES).read_text(encoding="utf-8")) for part in parts]
    skipped, unended = (sum(note[name] for note in notes) for name in ("skipped_rows", "unended"))
    if skipped:
        first = [sentence for note in notes for sentence in note["first_skipped"]][:NAMED]
        source = source | {"skipped_rows": skipped, "first_skipped": first}
    with new_folder(out, overwrite=False) as folder:
        with TokenWriter(folder, vocab_size, masked=fields.is_chat) as writer:
            for part in parts:
                writer.append(part)
        if writer.num_tokens == 0:
            of_these = (
                f"; passed over: {plural(skipped, 'row')}, the first: {source['first_skipped'][0]}" if skipped else ""
            )
            raise DataError(f"nothing to write to {out}: the documents hold no token{of_these}")
        write_meta(folder, writer, source)
    if unended:
        warnings.warn(
            f"the chat template ends {plural(unended, 'answer')} in {out} with no token, so that a model learns no end "
            "of them; "
            "data.add_eos_token = true (--add-eos-token) adds one to each",
            stacklevel=3,
        )
    return TokenDataset.open(out)
