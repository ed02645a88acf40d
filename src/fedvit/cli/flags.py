"""The flags that commands share, the consoles they print to, and how they end on an error."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedvit.core.errors import UserError

out = Console(width=None if sys.stdout.isatty() else 120)  # nothing is cut in a file or a pipe
err = Console(stderr=True)


class Flags:
    """The flags that every training command has; each stands for one key of the experiment."""

    method: Annotated[
        str | None, typer.Option(help="Who keeps which weights: see `fedvit methods` (default: fedavg).")
    ] = None
    tune: Annotated[str | None, typer.Option(help="What is trained: full, head, bias, adapter, prompt, prefix, lora, or layer groups joined by commas (default: full).")] = None  # fmt: skip
    data: Annotated[
        str | None,
        typer.Option(help="A name (see `fedvit datasets`), an npz file or a folder of images (default: digits)."),
    ] = None
    data_dir: Annotated[Path | None, typer.Option(help="Folder of data and weights (default: $FEDVIT_DATA).")] = None
    samples: Annotated[int | None, typer.Option(help="Keep so many images only, the same number of every class.")] = None  # fmt: skip
    partition: Annotated[str | None, typer.Option(help="Split over clients: iid, dirichlet, dirichlet_train, pathological, dh, domain, site (default: site for folders of sites, else dirichlet).")] = None  # fmt: skip
    model: Annotated[
        str | None,
        typer.Option(
            help="A timm ViT or DeiT, resnet18, resnet50, resnet50_gn, shufflenet_v2_x0_5 (default: vit_micro)."
        ),
    ] = None
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels (default: the model's own).")] = (
        None
    )
    patch_size: Annotated[int | None, typer.Option(help="Side of a patch in pixels (default: the model's own).")] = None
    weights: Annotated[Path | None, typer.Option(help="Pre-trained weights, a .safetensors file.")] = None
    pretrained: Annotated[bool | None, typer.Option("--pretrained", help="Pre-trained weights from timm's hub.")] = None
    clients: Annotated[int | None, typer.Option(help="Number of clients (default: the sites, else 24).")] = None
    cohort: Annotated[int | None, typer.Option(help="Clients sampled per round (default: all, at most 8).")] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds (default: 16).")] = None
    epochs: Annotated[int | None, typer.Option(help="Local epochs per round (default: 2).")] = None
    batch: Annotated[int | None, typer.Option(help="Images per step (default: 32).")] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: the tune's published one).")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of split, weights, sampling and order (default: 0).")] = None
    eval_every: Annotated[int | None, typer.Option(help="Evaluate every R rounds; 0: after the last only (default: 1 up to 100 clients, else 0).")] = None  # fmt: skip
    until_accuracy: Annotated[float | None, typer.Option(help="Stop when the mean personal accuracy reaches X percent.")] = None  # fmt: skip
    threads: Annotated[int | None, typer.Option(help="CPU threads; part of the result, since it changes float sums (default: 1).")] = None  # fmt: skip
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16 (default: fp32).")] = None
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:0, cuda:0,1 ... (default: auto).")] = None


class _Common:
    """The flags of every command that trains, beside the experiment's."""

    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the results (default: a name under runs/).")] = None  # fmt: skip
    workers: Annotated[int | None, typer.Option(envvar="FEDVIT_WORKERS", help="Processes that share the clients' work; the result is the same for any number (default: as many as cores, memory and the clients of a round allow).", min=1)] = None  # fmt: skip
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any other setting; repeatable.")] = None  # fmt: skip


class Network:
    """The certificates of a connection."""

    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="This side's certificate, a PEM file.")] = None
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of --cert, a PEM file.")] = None
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate of the authority that signs the other side's.")] = None  # fmt: skip
    insecure: Annotated[bool, typer.Option("--insecure", help="No certificates; only for trials on this machine's own addresses.")] = False  # fmt: skip


EXPERIMENT = tuple(Flags.__annotations__)
NETWORK = tuple(Network.__annotations__)
COMMON = tuple(_Common.__annotations__)


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these flags as keyword arguments; each is written once, above."""
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
    """The experiment's flags among a command's arguments."""
    return {name: values[name] for name in Flags.__annotations__ if name in values}


@contextmanager
def clear_errors(debug: bool = False, quiet: bool = False) -> Iterator[None]:
    """A user's mistake: one message on standard error, status 2. Warnings are shown there too, unless quiet."""
    import logging

    shown = logging.StreamHandler()
    shown.setLevel(logging.ERROR if quiet else logging.WARNING)
    shown.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
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
