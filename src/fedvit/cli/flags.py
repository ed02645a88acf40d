"""Flags that commands share, the consoles that they print to, and how they end after an error."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedvit.core.errors import UserError

out = Console(width=None if sys.stdout.isatty() else 120)  # wide enough that nothing is cut off in a file or a pipe
err = Console(stderr=True)


class Flags:
    """Flags of every training command, each of which sets one key of the experiment."""

    method: Annotated[
        str | None,
        typer.Option(help="Method that decides who keeps which weights; see `fedvit methods` (default: fedavg)."),
    ] = None
    tune: Annotated[str | None, typer.Option(help="Weights to train: full, head, bias, adapter, prompt, prefix, lora, or layer groups separated by commas (default: full).")] = None  # fmt: skip
    data: Annotated[
        str | None,
        typer.Option(
            help="Dataset: a name (see `fedvit datasets`), an npz file, a folder of images or a manifest (default: digits)."
        ),
    ] = None
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder that holds datasets and weights (default: $FEDVIT_DATA).")
    ] = None
    samples: Annotated[int | None, typer.Option(help="Keep only this many images, evenly over the classes (default: all).")] = None  # fmt: skip
    partition: Annotated[str | None, typer.Option(help="Partition of the data over clients: iid, dirichlet, dirichlet_train, pathological, dh, domain or site (default: site for folders of sites, otherwise dirichlet).")] = None  # fmt: skip
    model: Annotated[
        str | None,
        typer.Option(
            help="Model: a timm ViT or DeiT, resnet18, resnet50, resnet50_gn, densenet121, shufflenet_v2_x0_5 or mlp (default: vit_micro)."
        ),
    ] = None
    image_size: Annotated[
        int | None, typer.Option(help="Height and width of the input images in pixels (default: the model's own).")
    ] = None
    patch_size: Annotated[
        int | None, typer.Option(help="Height and width of a patch in pixels (default: the model's own).")
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(help="Start from the pre-trained weights in this .safetensors file (default: random weights)."),
    ] = None
    pretrained: Annotated[
        bool | None,
        typer.Option("--pretrained", help="Start from the pre-trained weights on the hub (default: random weights)."),
    ] = None
    clients: Annotated[
        int | None, typer.Option(help="Number of clients (default: one per site or domain, otherwise 24).")
    ] = None
    cohort: Annotated[
        int | None, typer.Option(help="Number of clients sampled per round (default: all, but at most 8).")
    ] = None
    rounds: Annotated[int | None, typer.Option(help="Number of rounds (default: 16).")] = None
    epochs: Annotated[int | None, typer.Option(help="Number of local epochs per round (default: 2).")] = None
    batch: Annotated[int | None, typer.Option(help="Batch size (default: 32).")] = None
    lr: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Learning rate (default: the tune's published rate, or a fifth of it for Adam and AdamW). In `run` and `compare`, several rates separated by commas, or `auto`, are searched on validation images, for each row by itself.",
        ),
    ] = None
    epsilon: Annotated[float | None, typer.Option(help="Hide every training image by differential privacy: the whole run may spend this much of each client's (default: no such privacy). See also --set privacy.delta.")] = None  # fmt: skip
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed of the partition, the initial weights, the client sampling and the order of images (default: 0)."
        ),
    ] = None
    eval_every: Annotated[int | None, typer.Option(help="Number of rounds between evaluations; 0 evaluates only after the last round (default: 1 for up to 100 clients, otherwise 0).")] = None  # fmt: skip
    until_accuracy: Annotated[float | None, typer.Option(help="Stop once the mean personal accuracy reaches this many percent (default: run all rounds).")] = None  # fmt: skip
    threads: Annotated[int | None, typer.Option(help="CPU threads per process; their number affects the result, because it changes the order of floating-point sums (default: 1).")] = None  # fmt: skip
    precision: Annotated[str | None, typer.Option(help="Floating-point precision: fp32 or bf16 (default: fp32).")] = (
        None
    )
    device: Annotated[
        str | None, typer.Option(help="Device: auto, cpu, cuda, cuda:0, or several, such as cuda:0,1 (default: auto).")
    ] = None


class _Common:
    """Flags of every training command that set no key of the experiment, and --set."""

    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the results (default: a folder under runs/ that is named after the settings).")] = None  # fmt: skip
    workers: Annotated[int | None, typer.Option(envvar="FEDVIT_WORKERS", help="Number of processes that share the clients' work; it does not affect the result (default: as many as the cores, the memory and the clients per round allow).", min=1)] = None  # fmt: skip
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress, warnings or tables.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any other setting; you can repeat this option.")] = None  # fmt: skip


class Network:
    """Flags for the certificates of a connection."""

    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file with the certificate of this side.")] = (
        None
    )
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file with the private key of --cert.")] = None
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file with the certificate of the authority that signed the other side's certificate.")] = None  # fmt: skip
    insecure: Annotated[bool, typer.Option("--insecure", help="Use no certificates; allowed only for trials on this machine's own addresses.")] = False  # fmt: skip


EXPERIMENT = tuple(Flags.__annotations__)
NETWORK = tuple(Network.__annotations__)
COMMON = tuple(_Common.__annotations__)


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these flags as keyword arguments; each flag is written once, above."""
    groups = {name: group for group in (Flags, _Common, Network) for name in group.__annotations__}

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(groups[name], name),
                annotation=groups[name].__annotations__[name],
            )
            for name in names
        ]
        command.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        return command

    return extend


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Pick the experiment's flags out of a command's arguments."""
    found = {name: values[name] for name in Flags.__annotations__ if name in values}
    if found.get("lr") is not None:
        try:
            found["lr"] = float(found["lr"])
        except ValueError as problem:
            raise UserError(
                f"--lr expects a number here, found {found['lr']!r}; `fedvit search`, `fedvit compare` and `fedvit run` "
                "search for a rate"
            ) from problem
    return found


def parse_seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as problem:
        raise UserError(f"--seeds expects whole numbers separated by commas, found {text!r}") from problem


@contextmanager
def clear_errors(debug: bool = False, quiet: bool = False) -> Iterator[None]:
    """Report a user's mistake as one message on standard error and exit with status 2.

    Warnings go to standard error too, unless `quiet` is set.
    """
    import logging

    shown = logging.StreamHandler()
    shown.setLevel(logging.ERROR if quiet else logging.WARNING)
    shown.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    shown.addFilter(lambda record: not hasattr(record, "after_the_table"))
    package = logging.getLogger("fedvit")
    package.addHandler(shown)
    try:
        yield
    except UserError as problem:
        if debug:
            import traceback

            traceback.print_exc()
        err.print(f"[bold red]error:[/] {_escaped(str(problem))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    except OSError as problem:
        from fedvit.core.files import DISK, cannot_write

        if debug or problem.errno not in DISK:
            raise
        told = cannot_write(problem.filename or "a file", problem)
        err.print(f"[bold red]error:[/] {_escaped(str(told))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print("interrupted; --resume continues after the last finished round")
        raise typer.Exit(1) from None
    finally:
        package.removeHandler(shown)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def print_json(content: Any) -> None:
    import json

    sys.stdout.write(json.dumps(content) + "\n")
