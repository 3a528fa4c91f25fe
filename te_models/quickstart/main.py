"""The quickstart from beginning to end: prepare the model and the text, run the steps, print the table."""

import json
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from ..extras import require
from ..sizes import plural
from ..training.one_run import LOCK, alone_in
from . import steps
from .pace import gemm_gflops, pace_line, paced
from .report import QuickstartReport, peak_rss_gib
from .run import REAL, TINY, QuickstartSizes, Run, steps_done
from .smollm import smollm_folder
from .text import library_files, middle_windows
from .tiny import tiny_folder

REPORT = "report.json"
"""The results; also the mark of a folder that the quickstart wrote and may replace."""


def run_quickstart(
    out: Path, *, offline_tiny: bool = False, epochs: int | None = None, recipe: str = "mxfp8", verbose: bool = True
) -> QuickstartReport:
    """Run the main job and return its report; `out` receives models, curves.png and report.json.

    Args:
        out: A new folder, or one that an earlier quickstart wrote (it is replaced).
        offline_tiny: Train a small model and its tokenizer here instead of using SmolLM2-135M.
        epochs: How often each training run reads its batches.
        recipe: The FP8 recipe to train with: "current", "block" or "mxfp8".

    Raises:
        MissingExtraError: A package of the extra `demo`, or the one with the real weights, is absent.
        ValueError: `out` is something else's folder.
    """
    transformers = require("transformers", "demo", feature="the quickstart")
    require("matplotlib", "demo", feature="the quickstart")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _check(out)
    with alone_in(out, "--out"):
        _fresh(out)
        report = QuickstartReport(verbose=verbose)
        with report.heartbeat():
            return _run(out, offline_tiny, epochs, recipe, report)


def _run(out: Path, offline_tiny: bool, epochs: int | None, recipe: str, report: QuickstartReport) -> QuickstartReport:
    scratch = out / "scratch"
    scratch.mkdir()
    try:
        sizes = TINY if offline_tiny else REAL
        sizes = sizes if epochs is None else replace(sizes, epochs=epochs)
        run = _prepare(out, scratch, sizes, recipe, offline_tiny, report)
        report.begin("1 import")
        dense = steps.import_model(run)
        report.begin("2 quantize")
        steps.quantize_and_compare(run)
        report.begin("3 experts")
        steps.experts(run, dense)
        del dense
        report.begin("4 train")
        trained = steps.train_experts(run)
        report.begin("5 export")
        steps.export_and_compare(run, trained)
        report.end()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    (out / REPORT).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    report.say(_summary(report, out))
    report.say(_where(out, None if offline_tiny else run.hf))
    return report


def _prepare(
    out: Path, scratch: Path, sizes: QuickstartSizes, recipe: str, offline_tiny: bool, report: QuickstartReport
) -> Run:
    report.begin("0 prepare")
    full, gflops = sizes, gemm_gflops()
    sizes = paced(full, gflops)
    report.numbers |= {"gemm_gflops": gflops, "train_batches": sizes.train_batches}
    report.say(f"  {pace_line(full, sizes, gflops)}")
    training_files, held_out = library_files()
    report.say(f"  text: {len(training_files)} training files, {len(held_out)} held out, from the standard library")
    if offline_tiny:
        report.say("  training a small tokenizer and model")
        with report.working(lambda: f"training the small model: {steps_done(scratch / 'tiny')}"):
            hf = tiny_folder(scratch, training_files)
    else:
        hf = smollm_folder(lambda message: report.say(f"  {message}"))
    report.say(f"  model: {hf}")
    tokenizer = require("transformers", "hf").AutoTokenizer.from_pretrained(hf, local_files_only=True)
    windows = middle_windows(tokenizer, held_out, sizes.windows, sizes.length)
    return Run(
        out=out,
        scratch=scratch,
        hf=hf,
        sizes=sizes,
        recipe=recipe,
        tokenizer=tokenizer,
        windows=windows,
        training_files=training_files,
        report=report,
    )


def _check(out: Path) -> None:
    """Raise ValueError for a folder with something in it that the quickstart did not write."""
    there = {path.name for path in out.iterdir()} - {LOCK} if out.is_dir() else set()
    if (out.exists() and not out.is_dir()) or (there and not (out / REPORT).is_file()):
        raise ValueError(f"{out} exists and is not the output of an earlier quickstart; choose another --out")


def _fresh(out: Path) -> None:
    """Empty a folder that is locked, and mark it as the quickstart's."""
    _check(out)
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (LOCK, REPORT):
            path.unlink()
    (out / REPORT).write_text("{}\n", encoding="utf-8")


NEXT = """\
te-models inspect {out}/model
te-models quantize {out}/model {out}/model-mxfp8 --recipe mxfp8
te-models generate {out}/model-mxfp8 --prompt "def main():" --max-new-tokens 8
te-models export {out}/model {out}/hf-model
te-models verify {out}/model {out}/hf-model"""
"""Commands that run on what the quickstart leaves."""


def _where(out: Path, source: Path | None) -> str:
    """Say where the models are and what can be done with them. source: the folder that was imported, if it stays."""
    lines = [f"models: {out / 'model'}, {out / 'moe'}, {out / 'hf-moe'}"]
    lines += [f"imported from: {source} (kept there for the next time)"] if source is not None else []
    lines += ["", "next:"]
    if shutil.which("te-models") is None and sys.prefix != sys.base_prefix:
        lines.append(f"  source {Path(sys.prefix, 'bin', 'activate')}")
    lines += [f"  {line}" for line in NEXT.format(out=shlex.quote(str(out))).splitlines()]
    return "\n".join(lines)


def _summary(report: QuickstartReport, out: Path) -> str:
    times = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in report.seconds.items())
    failed = sum(not check.passed for check in report.checks)
    verdict = (
        f"all {plural(len(report.checks), 'check')} passed"
        if report.passed
        else f"{failed} of {plural(len(report.checks), 'check')} FAILED"
    )
    return (
        f"\n{report.table()}\n\n{verdict} in {report.wall_seconds():.0f} s ({times}), "
        f"peak memory {peak_rss_gib():.2f} GiB\ncurves: {out / 'curves.png'}   numbers: {out / REPORT}"
    )
