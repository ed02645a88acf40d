"""FedViT: one vision transformer over data that cannot leave its owners, and a model of its own for every owner.

>>> run = fedvit.run(method="fedper", rounds=5, out="runs/mine")
>>> run.summary["views"]["personal"]["mean"]
>>> run.model("3")  # client 3's own model

These names are the public interface; everything else may move between versions. Importing the package is quick:
PyTorch is loaded when you first use one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fedvit.core.client import Client
    from fedvit.core.errors import UserError
    from fedvit.core.payload import Payload
    from fedvit.core.plan import Plan
    from fedvit.core.roles import FROZEN, PERSONAL, SHARED, everything
    from fedvit.core.training import descend
    from fedvit.data.dataset import Dataset
    from fedvit.models.groups import head
    from fedvit.runs.export import Exported, Format
    from fedvit.runs.folder import Run
    from fedvit.runs.predict import Prediction
    from fedvit.studies.comparison import Comparison

__all__ = [
    "FROZEN", "PERSONAL", "SHARED", "Client", "Payload", "Plan", "UserError", "compare", "descend", "everything",
    "export", "head", "load_model", "load_run", "predict", "run",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {  # public name -> the module that defines it, imported at its first use
    "Client": "core.client", "Payload": "core.payload", "Plan": "core.plan", "UserError": "core.errors",
    "PERSONAL": "core.roles", "SHARED": "core.roles", "FROZEN": "core.roles", "everything": "core.roles",
    "descend": "core.training", "head": "models.groups",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedvit' has no attribute {name!r}")
    return getattr(import_module(f"fedvit.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def run(
    experiment: str | Path | None = None,
    *,
    method: "str | Plan | None" = None,
    model: "str | nn.Module | None" = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    data: Any = None,
    class_names: Sequence[str] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int = 1,
    settings: dict[str, Any] | None = None,
    **flags: Any,
) -> "Run":
    """Run an experiment as `fedvit run` does, and return its results.

    `settings` are the command's `--set` options by path; all other keyword arguments are its flags.

    `method` is a name, or a plan of your own. `model` is a name, or a module of your own that maps images
    (batch, 3, image_size, image_size) to one number per class; `groups` then names its layer groups by the paths of
    their modules, at least the classifier: `{"head": ["fc"]}`. With `pretrained=True` the module's weights count as
    pre-trained, which changes the default learning rate.

    `data` is a name, an npz file or a folder. It may also be each client's own data by name, as (images, labels)
    arrays or a torch Dataset of (image, label), or a single such pair or Dataset, which is then partitioned.

    With `workers` above 1, call this under `if __name__ == "__main__":`, because it starts processes.
    """
    from fedvit.config.load import FLAGS
    from fedvit.core.errors import UserError, nearest
    from fedvit.report.page import write_report
    from fedvit.runs.folder import Run
    from fedvit.runs.resume import settle, start_or_resume

    known = {name for name in FLAGS if name not in ("method", "model", "data")}
    unknown = [flag for flag in flags if flag not in known]
    if unknown:
        raise TypeError(f"fedvit.run has no argument {unknown[0]!r}; {nearest(unknown[0], FLAGS)}")
    own = _own_parts(method, model)
    if workers > 1 and (own.plan is not None or own.module is not None):
        raise UserError(
            "a plan or module of your own cannot go to other processes, nothing is pickled: leave workers=1"
        )
    file = Path(experiment) if experiment is not None else None
    dataset = _own_data(data, class_names)
    flags = {
        **flags,
        "method": method if isinstance(method, str) else None,
        "model": model if isinstance(model, str) else None,
        "data": None if data is None else "python" if dataset else str(data),
    }
    sets = dict(settings or {})
    if groups is not None:
        sets["model.groups"] = {name: list(paths) for name, paths in groups.items()}
    if dataset is not None and dataset.several_labels:
        sets.setdefault("data.task", "multi")
    sites = dataset.site_names if dataset else None
    place = Path(out) if out is not None else None
    resolved, folder = settle(file, sets, flags, place, resume=resume, sites=sites, own=own)
    for _ in start_or_resume(resolved, folder, resume=resume, dataset=dataset, workers=workers):
        pass
    write_report([folder], folder / "report.html")
    return Run(folder, own, dataset)


def compare(
    *rows: str | Path,
    seeds: Sequence[int] = (0, 1, 2),
    experiment: str | Path | None = None,
    out: str | Path | None = None,
    workers: int = 1,
    settings: dict[str, Any] | None = None,
    **flags: Any,
) -> "Comparison":
    """Compare methods on the same data, partition and seeds as `fedvit compare` does, always with Local.

    A row is a METHOD, a METHOD+TUNE or an experiment file. `experiment` is the command's `--from`, the file that all
    rows start from; `settings` are its `--set` options by path; all other keyword arguments are its flags. `lr` may be
    a list of rates or "auto": each row then gets the best of them on validation images. Finished rows in the folder
    `out` are not run again.

    With `workers` above 1, call this under `if __name__ == "__main__":`, because it starts processes.
    """
    from fedvit.config.load import FLAGS
    from fedvit.core.errors import UserError, nearest
    from fedvit.studies.comparison import run_comparison

    known = [name for name in FLAGS if name not in ("method", "seed")]
    unknown = [flag for flag in flags if flag not in known]
    if unknown:
        raise TypeError(f"fedvit.compare has no argument {unknown[0]!r}; {nearest(unknown[0], known)}")
    if not rows:
        raise UserError("name at least one row to compare, such as fedvit.compare('fedavg', 'fedper+bias')")
    base = Path(experiment) if experiment is not None else None
    place = Path(out) if out is not None else None
    numbers = list(dict.fromkeys(seeds))
    return run_comparison([str(row) for row in rows], numbers, base, place, workers, settings or {}, flags)


def load_run(
    folder: str | Path,
    *,
    method: "Plan | None" = None,
    model: "nn.Module | None" = None,
    data: Any = None,
    class_names: Sequence[str] | None = None,
) -> "Run":
    """Open the folder of a run.

    If the run's plan, module or data came from Python, pass them again to use its models.
    """
    from fedvit.runs.folder import load_run as load

    return load(folder, _own_parts(method, model), _own_data(data, class_names))


def export(
    run: "Run",
    *,
    clients: Sequence[str] = (),
    server: bool = False,
    everything: bool = False,
    form: "Format" = "timm",
    out: str | Path,
    last: bool = False,
    license: str | None = None,
    intended_use: str | None = None,
) -> "list[Exported]":
    """Write models of a run to files, as `fedvit export` does, and return one entry per file.

    With run.keep=best they are those of the kept round, unless `last`. Beside each file lies its model card, which
    quotes `license` and `intended_use`. Every file is opened again and compared with the run's own model before it gets
    its name.
    """
    from fedvit.runs.export import export as write

    said = {"license": license, "intended_use": intended_use}
    wanted = {"clients": list(clients), "server": server, "everything": everything, "last": last}
    return list(write(run, **wanted, **said, form=form, out=Path(out)))  # type: ignore[arg-type]


def load_model(path: str | Path, module: "nn.Module | None" = None) -> "nn.Module":
    """Open a model that `fedvit export` wrote; pass `module` if the run's model was a module of your own."""
    from fedvit.runs.export import load_model as load

    return load(path, module)


def predict(model: "nn.Module", images: Sequence[str | Path], top: int = 1) -> "Iterator[Prediction]":
    """Predict class names and probabilities for image files and folders.

    `model` comes from `load_model` or from `run.model(client)`.
    """
    from fedvit.runs.predict import predict as predictions

    return predictions(model, images, top=top)


def _own_parts(method: Any, model: Any) -> Any:
    """Return the plan and the module among the arguments that are not names."""
    from torch import nn

    from fedvit.core.errors import UserError
    from fedvit.core.plan import Plan
    from fedvit.core.settings import FromPython

    for what, value, kind in (("method", method, Plan), ("model", model, nn.Module)):
        if value is not None and not isinstance(value, (str, kind)):
            raise UserError(f"{what} should be a name or a {kind.__name__}, found {type(value).__name__}")
    plan = method if isinstance(method, Plan) else None
    return FromPython(plan, model if isinstance(model, nn.Module) else None)


def _own_data(data: Any, class_names: Sequence[str] | None) -> "Dataset | None":
    """Return the data given from Python, or None if it was named."""
    from fedvit.data.arrays import from_arrays, from_clients

    if data is None or isinstance(data, str | Path):
        return None
    return from_clients(data, class_names) if isinstance(data, Mapping) else from_arrays(data, class_names)
