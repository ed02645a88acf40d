"""The files of the Flower app for an experiment."""

from collections.abc import Sequence
from pathlib import Path

import tomli_w

from fedvit.config.resolve import to_tables
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset, wants_auroc
from fedvit.data.partition.records import Partition
from fedvit.engine.worker import load_data
from fedvit.network.flower.own_app import CODE, app_config
from fedvit.network.site import Federation

QUIET = {  # no telemetry and no update check, unless the user enables them
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PROFILE = "fedvit"
INSECURE = ("--insecure",)  # loopback traffic does not leave this machine


def need_flower() -> None:
    """Raise an error that says what to install if Flower is missing."""
    try:
        import flwr  # noqa: F401
    except ImportError as problem:
        raise UserError("this needs Flower, which is not installed: pip install 'fedvit[flower]'") from problem


def write_app(folder: Path, experiment: Experiment, federation: Federation, out: str) -> None:
    """Write the app that Flower runs at the server and the sites: settings and six lines of code, but no weights."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: give a new folder for the app")
    package = folder / "fedvit_app"
    package.mkdir(parents=True)
    tables = to_tables(experiment)
    tables["run"]["device"] = "auto"  # each side uses the devices it has
    for key in ("dir", "cache"):
        tables["data"].pop(key, None)
    for name, text in CODE.items():
        (folder / name).write_text(text)
    (package / "experiment.toml").write_text(tomli_w.dumps(tables))
    agreed = {"sites": list(federation.sites), "classes": list(federation.classes)}
    (package / "federation.toml").write_text(tomli_w.dumps(agreed))
    (folder / "pyproject.toml").write_text(app_config(out))


def names_of(text: str) -> list[str]:
    """Split a list of names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def for_sites(experiment: Experiment, sites: Sequence[str], classes: Sequence[str]) -> tuple[Experiment, Federation]:
    """Return the experiment as it runs at sites that each have their own folder, and the federation."""
    if len(set(sites)) < len(sites) or len(set(classes)) < len(classes):
        raise UserError("--sites and --classes expect distinct names, separated by commas")
    if len(sites) < 2 or len(classes) < 2:
        raise UserError(f"at least two sites and two classes are needed, found {len(sites)} and {len(classes)}")
    if experiment.data.samples is not None or experiment.data.unseen:
        raise UserError(
            "data.samples and data.unseen select from the images of all sites, which no one has: leave them out"
        )
    auroc = wants_auroc(experiment.data, len(classes))
    data = experiment.data.model_copy(update={"name": "sites", "class_names": ",".join(classes), "auroc": auroc})
    partition = experiment.partition.model_copy(update={"name": "site", "clients": len(sites)})
    file = experiment.model.weights  # each side has it in its own data folder
    model = experiment.model.model_copy(update={"weights": Path(file.name) if file and file.is_absolute() else file})
    cohort = min(experiment.train.cohort or len(sites), len(sites))
    train = experiment.train.model_copy(update={"cohort": cohort})
    changed = experiment.model_copy(update={"data": data, "partition": partition, "train": train, "model": model})
    return changed, Federation(tuple(sorted(sites)), tuple(classes))


def for_trial(experiment: Experiment) -> tuple[Experiment, Federation, Dataset, Partition]:
    """Return the experiment as it runs with one site per client of its own data, the federation, and that data."""
    dataset, partition = load_data(experiment)
    if partition.unseen:
        raise UserError("data.unseen needs clients that never train, but over Flower every site trains: leave it out")
    auroc = wants_auroc(experiment.data, dataset.classes)
    experiment = experiment.model_copy(update={"data": experiment.data.model_copy(update={"auroc": auroc})})
    return experiment, Federation(tuple(partition.seen), dataset.class_names), dataset, partition
