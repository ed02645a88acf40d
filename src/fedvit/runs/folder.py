"""The folder of a run: its settings, rounds, clients and summary, read from its files."""

import csv
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedvit.config.load import read_tables
from fedvit.config.resolve import resolve
from fedvit.core.errors import UserError
from fedvit.core.files import as_written, read_json, read_lines
from fedvit.core.settings import Experiment, FromPython
from fedvit.data.dataset import Dataset

STARTED = "started by:"  # in log.txt, before the command


@dataclass(frozen=True)
class Run:
    """A run's folder, finished or not, and the parts of the run that came from Python."""

    folder: Path
    own: FromPython = field(default_factory=FromPython)
    dataset: Dataset | None = None

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return (self.folder / "summary.json").is_file()

    @property
    def experiment(self) -> Experiment:
        """The settings as the engine uses them, checked and complete."""
        tables = read_tables(self.folder / "run.toml")
        if not torch.cuda.is_available():  # the run may come from another machine
            tables["run"]["device"] = "cpu"
        sites = self.dataset.site_names if self.dataset else None
        return resolve(tables, sites, self.own)

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """run.toml as it was written: every table, and the versions the run was made with."""
        return tomllib.loads((self.folder / "run.toml").read_text())

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json, which is there once the run has finished."""
        result: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return result

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """rounds.jsonl, one dictionary per round."""
        return read_lines(self.folder / "rounds.jsonl")

    @property
    def timings(self) -> list[dict[str, Any]]:
        """timings.jsonl, one dictionary per round."""
        return read_lines(self.folder / "timings.jsonl")

    @property
    def clients(self) -> list[dict[str, Any]]:
        """clients.csv, one dictionary per client; empty before the first evaluation."""
        path = self.folder / "clients.csv"
        return read_clients(path) if path.is_file() else []

    @property
    def kept_clients(self) -> list[dict[str, Any]]:
        """kept.csv, clients.csv of the round that run.keep=best has kept; empty without that setting."""
        path = self.folder / "kept.csv"
        return read_clients(path) if path.is_file() else []

    @property
    def split(self) -> dict[str, Any]:
        """split.json: which client owns which images, and the names of the classes."""
        found: dict[str, Any] = read_json(self.folder / "split.json", {})
        return found

    @property
    def confusion(self) -> dict[str, list[list[int]]]:
        """confusion.json: for each client, [class, predicted class, images]; empty if the run did not write it."""
        found: dict[str, list[list[int]]] = read_json(self.folder / "confusion.json", {})
        return found

    @property
    def commands(self) -> list[str]:
        """The commands that started and continued the run, from its log, each once."""
        path = self.folder / "log.txt"
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        return list(dict.fromkeys(line.split(STARTED, 1)[1].strip() for line in lines if STARTED in line))

    def model(self, client: str, *, last: bool = False) -> nn.Module:
        """Return the client's own model after the last round, plugins included, ready to predict.

        With run.keep=best it is the model after the best round on validation images, unless `last`.
        It is the model of view `personal`: a method that fine-tunes before its test does so here, on the client's
        images. `model.description` says what goes in and what comes out.
        """
        from fedvit.runs.models import client_model, open_run

        return client_model(open_run(self, last=last), client)

    def server_model(self, *, last: bool = False) -> nn.Module:
        """Return the model of view `server`, if the server's weights alone make a model."""
        from fedvit.runs.models import open_run, server_model

        return server_model(open_run(self, last=last))


def load_run(folder: str | Path, own: FromPython | None = None, dataset: Dataset | None = None) -> Run:
    """Open the run in this folder; if it is not a run, the error names the runs inside it."""
    place = Path(folder)
    if not (place / "run.toml").is_file():
        inside = sorted(str(path.parent) for path in [*place.glob("*/run.toml"), *place.glob("*/*/run.toml")])
        there = "it does not exist" if not place.exists() else "it has none"
        more = (
            f"; there are runs inside it: {', '.join(inside[:8])}{' ...' if len(inside) > 8 else ''}" if inside else ""
        )
        raise UserError(f"{folder} is not a run: expected a folder with run.toml in it, {there}{more}")
    return Run(place, own or FromPython(), dataset)


@dataclass(frozen=True)
class LocalBaseline:
    """Local's accuracy per client, to compute gains, and its schedule."""

    accuracy: Mapping[str, float]
    schedule: str

    @staticmethod
    def of(run: Run) -> "LocalBaseline":
        accuracy = {row["client"]: row["personal_accuracy"] for row in run.clients}
        return LocalBaseline(accuracy, run.experiment.method["schedule"])


def read_clients(path: Path) -> list[dict[str, Any]]:
    """Read clients.csv, with numbers as numbers and empty cells as None."""
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as stream:
        return [
            {key: as_written(value) if key == "client" else _parse_number(value) for key, value in row.items()}
            for row in csv.DictReader(stream)
        ]


def _parse_number(text: str) -> int | float | None:
    if not text:
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)
