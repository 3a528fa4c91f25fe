"""`te-models adopt`: a family for a model type that only transformers knows."""

import argparse
from pathlib import Path

from ..sizes import plural
from ..terminal import TextTable, say_while_waiting
from .parser import Verbs, emit, verb

DESCRIPTION = """\
Find a declaration for a model type that te_models does not know and the installed transformers
does. SOURCE is a folder with a config.json, a hub id (config.json alone is read), or a model
type. OUT becomes a folder with a report; with the family's file and its test only where its
logits are transformers' within 1e-5 in every model that was compared. Code is imported from the
installed transformers alone, never from a folder. Exit code 0: declared; 3: a report alone;
2: bad input."""


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "adopt",
        run,
        "a declaration for a model type that only transformers knows",
        DESCRIPTION,
        "te-models adopt ./new-model ./adopted",
    )
    parser.add_argument("source", metavar="SOURCE", help="a folder, a hub id, or a model type of transformers")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--again", action="store_true", help="also for a type that te_models knows, as if it did not")


def run(args: argparse.Namespace) -> int:
    """Adopt, write, and print what was found."""
    from te_models.checkpoints.io.destination import check_destination

    from ..adopt import adopt, write_adopted
    from ..adopt.adopting import is_known, model_type_of

    model_type, _ = model_type_of(args.source)
    if is_known(model_type) and not args.again:
        raise ValueError(f"te_models knows model_type {model_type!r} already; --again adopts it as if it did not")
    check_destination(Path(args.out), overwrite=args.overwrite)
    say_while_waiting("comparing small models with transformers")
    found = adopt(args.source)
    files = write_adopted(found, Path(args.out), overwrite=args.overwrite)
    report = found.report
    rows = [("type", report.model_type), ("verdict", report.verdict)]
    rows += [("near", ", ".join(name for name, _ in report.near))]
    rows += [(f"cannot express{f' {name}' if name else ''}", why) for name, why in report.lacking.items()]
    said = f"wrote {plural(len(files), 'file')} to {args.out}: {', '.join(files)}"
    emit(args, report.to_dict() | {"files": files}, TextTable(rows), said)
    return report.exit_code
