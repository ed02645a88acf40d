"""Commands that use a trained model: export, predict and evaluate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvit.cli.flags import clear_errors, err, out, print_json, takes
from fedvit.core.errors import UserError

if TYPE_CHECKING:
    from fedvit.core.clinical import SiteScore

Last = Annotated[
    bool,
    typer.Option("--last", help="If the run kept its best round (run.keep=best): use the last round all the same."),
]


@takes("debug")
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    *,
    client: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Export this client's own model; you can repeat this option."),
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="Export the server's model, if the method has one.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Export every client's model, and the server's if the method has one.")
    ] = False,
    form: Annotated[
        str, typer.Option("--format", help="File format: timm (safetensors) or onnx (needs fedvit[onnx]).")
    ] = "timm",
    out_dir: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the files, or the name of a single file.")
    ],
    last: Last = False,
    license_: Annotated[
        str | None, typer.Option("--license", metavar="TEXT", help="License of the model, for its card.")
    ] = None,
    intended_use: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is meant for, for its card.")
    ] = None,
    **flags: Any,
) -> None:
    """Export trained models to files, each with a model card and checked against the run's own model."""
    with clear_errors(flags["debug"]):
        from fedvit.report.tables import exported_line
        from fedvit.runs.export import export as exported
        from fedvit.runs.folder import load_run

        if form not in ("timm", "onnx"):
            raise UserError(f"--format expects timm or onnx, found {form!r}")
        run = load_run(folder)
        wanted = {"clients": client or [], "server": server, "everything": everything, "last": last}
        said = {"license": license_, "intended_use": intended_use}
        for one in exported(run, **wanted, **said, form=form, out=out_dir):  # type: ignore[arg-type]
            out.print(exported_line(one.name, one.path, one.description), soft_wrap=True, highlight=False, markup=False)
            out.print(f"  card: {one.card}", soft_wrap=True, highlight=False, markup=False)


@takes("debug")
def predict(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="Exported model, or folder of a run.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")],
    *,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="If MODEL is a run: use the model of this client.")
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="If MODEL is a run: use the server's model.")] = False,
    last: Last = False,
    top: Annotated[
        int | None,
        typer.Option(
            help="Number of classes to name per image, most likely first; default: 1, or all labels of a model that may "
            "give an image several.",
            min=1,
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write the predictions to this CSV file instead of printing them."),
    ] = None,
    **flags: Any,
) -> None:
    """Predict class names and probabilities for images.

    Files that cannot be read are skipped and listed at the end, and the exit status is then 2.
    """
    with clear_errors(flags["debug"]):
        from fedvit.core.files import check_writable
        from fedvit.runs.predict import model_of, predict_to

        if table is not None:
            check_writable(table.parent)
        unreadable = predict_to(out, model_of(source, client, server=server, last=last), images, top, table)
        if unreadable:
            raise UserError(f"{len(unreadable)} files could not be read: " + "; ".join(unreadable))


@takes("debug")
def evaluate(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="Exported model, or folder of a run.")],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Folder with one subfolder of images per class, or a manifest for a model of several labels per image.",
        ),
    ],
    *,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="If MODEL is a run: use the model of this client.")
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="If MODEL is a run: use the server's model.")] = False,
    last: Last = False,
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER=CLASS,...", help="Class that a subfolder stands for, where its name is not the class's."
        ),
    ] = None,
    skip_unknown: Annotated[
        bool, typer.Option("--skip-unknown", help="Leave out subfolders that are no class of the model.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Also write one line per image, with every class's probability."),
    ] = None,
    clinical: Annotated[
        bool,
        typer.Option(
            "--clinical", help="Also print sensitivity, specificity, PPV, NPV, AUROC and calibration of every class."
        ),
    ] = False,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="With --clinical: probability between 0 and 1 from which an image is called positive (default: the client's own if MODEL is a run with clinical scores, otherwise 0.5)."
        ),
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="With --clinical: of two classes, the one that is called positive (default: the second).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    **flags: Any,
) -> None:
    """Score a model on a folder of labeled images: accuracy, balanced accuracy, AUROC and confusion matrix.

    A model of several labels per image is scored on a manifest, label by label.

    Files that cannot be read are skipped and listed at the end, and the exit status is then 2.
    """
    with clear_errors(flags["debug"]):
        from fedvit.core.files import write_csv
        from fedvit.report.evaluation import clinical_table, evaluation_tables, label_tables
        from fedvit.runs.clinical import class_json
        from fedvit.runs.evaluate import Evaluation, trained_on
        from fedvit.runs.evaluate import evaluate as score
        from fedvit.runs.evaluate_clinical import clinical_scores
        from fedvit.runs.evaluate_labels import LabelEvaluation, evaluate_labels
        from fedvit.runs.folder import Run
        from fedvit.runs.model_file import description_of
        from fedvit.runs.predict import model_of

        if table is not None and (table.is_dir() or not table.parent.is_dir()):
            raise UserError(f"--csv expects a file in a folder that exists, found {table}")
        names = _class_names(classes)
        if not clinical and (threshold is not None or positive is not None):
            raise UserError("--threshold and --positive belong to --clinical: add it, or leave them out")
        cut = _threshold(threshold, source, client, last=last)
        model = model_of(source, client, server=server, last=last)
        found: Evaluation | LabelEvaluation
        if description_of(model).several_labels:
            if names or skip_unknown:
                raise UserError("--classes and --skip-unknown are about folders of classes: leave them out")
            found = evaluate_labels(model, folder)
        else:
            found = score(model, folder, names, skip_unknown=skip_unknown)
        if table is not None:
            write_csv(table, found.csv_lines())
        measured = clinical_scores(found, cut, positive) if clinical else None
        if as_json:
            scores = (
                [{"class": found.classes[one.number], **class_json(one)} for one in measured.classes]
                if measured
                else None
            )
            print_json(found.to_json() | ({"clinical": scores} if scores else {}))
        else:
            for one in evaluation_tables(found) if isinstance(found, Evaluation) else label_tables(found):
                out.print(one)
            if measured:
                out.print(clinical_table(found, measured))
            if table is not None:
                out.print(f"{found.images} images: {table}", soft_wrap=True, highlight=False, markup=False)
        seen = trained_on(Run(source), found.files) if source.is_dir() else 0
        if seen:
            err.print(f"{seen} of {found.images} images were used in training: these scores flatter the model")
        for words, left in (("no images of", found.absent), ("skipped folders", found.skipped)):
            if left:
                err.print(f"{words}: {', '.join(left)}", soft_wrap=True, highlight=False, markup=False)
        if found.unreadable:
            raise UserError(f"{len(found.unreadable)} files could not be read: " + "; ".join(found.unreadable))


def _class_names(text: str | None) -> dict[str, str]:
    """Read FOLDER=CLASS pairs that are separated by commas."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    if not all(folder.strip() and equals and name.strip() for folder, equals, name in pairs):
        raise UserError(f"--classes expects FOLDER=CLASS pairs separated by commas, found {text!r}")
    return {folder.strip(): name.strip() for folder, _, name in pairs}


def _threshold(given: float | None, source: Path, client: str | None, *, last: bool) -> "float | SiteScore | None":
    """Return the threshold of clinical scores: the given one, or those that the client's run chose, or 0.5."""
    from fedvit.core.thresholds import parse_threshold
    from fedvit.runs.clinical import read_clinical
    from fedvit.runs.folder import Run

    if given is not None:
        return float(parse_threshold(str(given)))
    run = read_clinical(source) if source.is_dir() else None
    if run is None or client is None:
        return None
    kept = Run(source).summary.get("kept") if Run(source).finished and not last else None
    if kept is not None and kept["round"] != run.round:
        raise UserError(
            f"the thresholds of {source} were chosen for the models of round {run.round}, but it keeps those of round "
            f"{kept['round']}: give --threshold for these, or score those with --last"
        )
    return run.clients.get(client)
