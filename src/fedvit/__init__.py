"""FedViT: one vision transformer over data that cannot leave its owners, and a model of its own for every owner.

>>> run = fedvit.run(method="fedper", rounds=5, out="runs/mine")
>>> run.summary["views"]["personal"]["mean"]
>>> run.model("3")  # client 3's own model
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fedvit.core.plan import Plan
    from fedvit.data.dataset import Dataset
    from fedvit.runs.folder import Run
    from fedvit.runs.predict import Prediction

__version__ = "0.1.0"


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
    """Run an experiment as `fedvit run` does; `settings` are its `--set`s, other arguments its flags.

    `method` is a name, or a plan of your own. `model` is a name, or a module of your own, from images
    (batch, 3, image_size, image_size) to a number for every class; `groups` names its layer groups by the paths of
    their modules, at least its classifier: {"head": ["fc"]}. With pretrained=True its weights count as pre-trained,
    which matters to default rates. `data` is a name, an npz file or a folder; or each client's own data by its name,
    (images, labels) arrays or a torch Dataset of (image, label); or one such pair or Dataset, to be divided.
    With `workers` above 1 the call must stand under `if __name__ == "__main__":`, since processes are started.
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
    own = own_parts(method, model)
    if workers > 1 and (own.plan is not None or own.module is not None):
        raise UserError(
            "a plan or module of your own cannot go to other processes, nothing is pickled: leave workers=1"
        )
    file = Path(experiment) if experiment is not None else None
    dataset = own_data(data, class_names)
    flags = {
        **flags,
        "method": method if isinstance(method, str) else None,
        "model": model if isinstance(model, str) else None,
        "data": None if data is None else "python" if dataset else str(data),
    }
    sets = dict(settings or {})
    if groups is not None:
        sets["model.groups"] = {name: list(paths) for name, paths in groups.items()}
    sites = dataset.group_names if dataset else None
    place = Path(out) if out is not None else None
    resolved, folder = settle(file, sets, flags, place, resume=resume, groups=sites, own=own)
    for _ in start_or_resume(resolved, folder, resume=resume, dataset=dataset, workers=workers):
        pass
    write_report([folder], folder / "report.html")
    return Run(folder, own, dataset)


def own_parts(method: Any, model: Any) -> Any:
    """The plan and the module among the arguments, if they are not names."""
    from torch import nn

    from fedvit.core.errors import UserError
    from fedvit.core.plan import Plan
    from fedvit.core.settings import FromPython

    for what, value, kind in (("method", method, Plan), ("model", model, nn.Module)):
        if value is not None and not isinstance(value, (str, kind)):
            raise UserError(f"{what} should be a name or a {kind.__name__}, found {type(value).__name__}")
    plan = method if isinstance(method, Plan) else None
    return FromPython(plan, model if isinstance(model, nn.Module) else None)


def own_data(data: Any, class_names: Sequence[str] | None) -> "Dataset | None":
    """Data that was given from Python, or None where it was named."""
    from fedvit.data.arrays import from_arrays, from_clients

    if data is None or isinstance(data, str | Path):
        return None
    return from_clients(data, class_names) if isinstance(data, Mapping) else from_arrays(data, class_names)


def load_run(
    folder: str | Path,
    *,
    method: "Plan | None" = None,
    model: "nn.Module | None" = None,
    data: Any = None,
    class_names: Sequence[str] | None = None,
) -> "Run":
    """A run from its folder. What of it came from Python is given again, if its models are wanted."""
    from fedvit.core.errors import UserError
    from fedvit.runs.folder import Run

    place = Path(folder)
    if not (place / "run.toml").is_file():
        inside = sorted(str(path.parent) for path in [*place.glob("*/run.toml"), *place.glob("*/*/run.toml")])
        there = "it does not exist" if not place.exists() else "it has none"
        more = (
            f"; there are runs inside it: {', '.join(inside[:8])}{' ...' if len(inside) > 8 else ''}" if inside else ""
        )
        raise UserError(f"{folder} is not a run: expected a folder with run.toml in it, {there}{more}")
    return Run(place, own_parts(method, model), own_data(data, class_names))


def load_model(path: str | Path, module: "nn.Module | None" = None) -> "nn.Module":
    """A model that `fedvit export` wrote; `module` is needed where the run's model was a module of your own."""
    from fedvit.runs.export import load_model as load

    return load(path, module)


def predict(model: "nn.Module", images: Sequence[str | Path], top: int = 1) -> "Iterator[Prediction]":
    """Class names and probabilities of image files and folders, by a model of `load_model` or `run.model`."""
    from fedvit.runs.predict import predict as predictions

    return predictions(model, images, top=top)
