"""The commands that use a trained model: export and predict."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedvit.cli.flags import clear_errors, out, takes
from fedvit.core.errors import UserError


@takes("debug")
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    *,
    client: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This client's own model; repeatable.")
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="The server's model, where the method has one.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every client's model, and the server's.")] = False,
    form: Annotated[str, typer.Option("--format", help="timm (safetensors) or onnx (needs fedvit[onnx]).")] = "timm",
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files, or one file's name.")],
    **flags: Any,
) -> None:
    """Write models to take home; every file is checked against the run's own model."""
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
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="An exported model, or the folder of a run.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, and folders of them.")],
    *,
    client: Annotated[str | None, typer.Option(metavar="NAME", help="Of a run: whose model.")] = None,
    server: Annotated[bool, typer.Option("--server", help="Of a run: the server's model.")] = False,
    top: Annotated[int, typer.Option(help="How many classes to name, likeliest first.", min=1)] = 1,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write a CSV instead of printing.")
    ] = None,
    **flags: Any,
) -> None:
    """Class names and probabilities for images. Files that cannot be read are named and passed over; status 2 then."""
    with clear_errors(flags["debug"]):
        from fedvit.runs.predict import model_of, predict_to

        unreadable = predict_to(out, model_of(source, client, server=server), images, top, table)
        if unreadable:
            raise UserError(f"{len(unreadable)} files could not be read: " + "; ".join(unreadable))
