"""FedViT: one vision transformer over data that cannot leave its owners, and a model of its own for every owner.

>>> run = fedvit.run(method="fedper", rounds=5, out="runs/mine")
>>> run.summary["views"]["personal"]["mean"]
>>> run.model("3")  # client 3's own model
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedvit.experiment import Run

__version__ = "0.1.0"


def run(
    experiment: str | Path | None = None,
    *,
    data: Any = None,
    class_names: Sequence[str] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int = 1,
    settings: dict[str, Any] | None = None,
    **flags: Any,
) -> "Run":
    """Run an experiment as `fedvit run` does; `settings` are its `--set`s, other arguments its flags.

    With `workers` above 1 the call must stand under `if __name__ == "__main__":`, since processes are started.
    `data` is a name, an npz file or a folder, or each client's own data by its name: (images, labels) arrays, or a
    torch Dataset of (image, label).
    """
    from fedvit import config, running
    from fedvit.data.datasets import from_clients
    from fedvit.errors import nearest
    from fedvit.experiment import Run

    unknown = [flag for flag in flags if flag not in config.FLAGS]
    if unknown:
        raise TypeError(f"fedvit.run has no argument {unknown[0]!r}; {nearest(unknown[0], config.FLAGS)}")
    file = Path(experiment) if experiment is not None else None
    dataset = from_clients(data, class_names) if isinstance(data, Mapping) else None
    name = None if data is None else "python" if dataset else str(data)
    groups = dataset.group_names if dataset else None
    place = Path(out) if out is not None else None
    flags = {**flags, "data": name}
    resolved, folder = running.settle(file, settings or {}, flags, place, resume=resume, groups=groups)
    for _ in running.start_or_resume(resolved, folder, resume=resume, dataset=dataset, workers=workers):
        pass
    return Run(folder)


def load_run(folder: str | Path) -> "Run":
    """A run from its folder."""
    from fedvit.errors import UserError
    from fedvit.experiment import Run

    if not (Path(folder) / "run.toml").is_file():
        raise UserError(f"{folder} is not a run: expected a folder with run.toml in it")
    return Run(Path(folder))
