"""Commands that use a trained model: export and predict."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedvit.cli.flags import clear_errors, out, takes
from fedvit.core.errors import UserError


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
    **flags: Any,
) -> None:
    """Export trained models to files, each of which is checked against the run's own model."""
    with clear_errors(flags["debug"]):
        from fedvit.report.tables import exported_line
        from fedvit.runs.export import export as exported
        from fedvit.runs.folder import load_run

        if form not in ("timm", "onnx"):
            raise UserError(f"--format expects timm or onnx, found {form!r}")
        run = load_run(folder)
        wanted = {"clients": client or [], "server": server, "everything": everything}
        for one in exported(run, **wanted, form=form, out=out_dir):  # type: ignore[arg-type]
            out.print(exported_line(one.name, one.path, one.description), soft_wrap=True, highlight=False, markup=False)


@takes("debug")
def predict(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="Exported model, or folder of a run.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")],
    *,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="If MODEL is a run: use the model of this client.")
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="If MODEL is a run: use the server's model.")] = False,
    top: Annotated[int, typer.Option(help="Number of classes to name per image, most likely first.", min=1)] = 1,
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
        unreadable = predict_to(out, model_of(source, client, server=server), images, top, table)
        if unreadable:
            raise UserError(f"{len(unreadable)} files could not be read: " + "; ".join(unreadable))
