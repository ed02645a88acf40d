"""The model card of an exported model, in Markdown: what it is, what it learned from, how it scored, and its limits.

Everything in it comes from the run's own files. What nobody has stated is "not stated".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvit.core.plan import Plan
from fedvit.runs.description import Description
from fedvit.runs.models import OpenedRun

Card = Callable[[Description], str]
KEY = "model_card"  # of the text in a file's metadata
UNSTATED = "not stated"
_COUNTS = {"train": "training", "val": "validation", "test": "test"}
_METRICS = {  # columns of clients.csv that a card shows, with their decimals and units
    "personal_accuracy": ("accuracy", 1, " %"),
    "personal_balanced_accuracy": ("balanced accuracy", 1, " %"),
    "personal_auroc": ("AUROC", 3, ""),
    "personal_loss": ("loss", 3, ""),
    "local_accuracy": ("accuracy of training alone", 1, " %"),
}


@dataclass(frozen=True)
class Statements:
    """What only the exporting person can say."""

    license: str | None = None
    intended_use: str | None = None


def path_of(file: Path) -> Path:
    """Return where the card of an exported file is written: beside it."""
    return file.with_name(f"{file.stem}.card.md")


def model_card(opened: OpenedRun, description: Description, said: Statements) -> str:
    """Return the card of one model of a run."""
    whose = "the server's model" if description.client is None else f"the model of client {_text(description.client)}"
    sections = {
        f"Model card: {whose} of a {_text(opened.experiment.label)} run": _about(opened, description),
        "Intended use": [_text(said.intended_use or UNSTATED)],
        "Limits": _limits(opened, description),
        "Data": _data(opened, description),
        "Method": _method(opened, description),
        "Scores": _scores(opened, description),
        "Privacy": _privacy(opened),
        "License": [
            f"- Of this model: {_text(said.license or UNSTATED)}.",
            f"- Of the data: {UNSTATED}. Of the initial weights: {UNSTATED}. FedViT itself has the MIT license, which "
            "says nothing about models trained with it.",
        ],
    }
    parts = (
        f"{'#' if number == 0 else '##'} {title}\n\n" + "\n".join(lines)
        for number, (title, lines) in enumerate(sections.items())
    )
    return "\n\n".join(parts) + "\n"


def _about(opened: OpenedRun, description: Description) -> list[str]:
    classes = ", ".join(map(_text, description.classes))
    kept = "the best on validation images" if opened.kept_best else "the last one"
    if not opened.run.finished:
        kept += f" so far, of {opened.experiment.train.rounds} planned"
    sizes = description.input
    return [
        f"- Architecture: {_text(description.model.name)}, input {sizes.size} x {sizes.size} pixels, mean "
        f"{_numbers(sizes.mean)}, standard deviation {_numbers(sizes.std)}",
        f"- Output: one number for each of {len(description.classes)} classes: {classes}",
        f"- State: after round {description.round}, {kept}",
        f"- Made with: FedViT {description.fedvit}",
    ]


def _limits(opened: OpenedRun, description: Description) -> list[str]:
    lines = [
        "- The scores below are from held-out images of the same sites. They say nothing about other sites, devices or "
        "patients; score the model on labelled images of your own before you rely on it (`fedvit evaluate`).",
        "- The model answers with one of its classes to every image, also to one that shows none of them. Its "
        "probabilities have not been calibrated by the export.",
        "- It is not a medical device, and nobody has approved it for diagnosis or treatment.",
    ]
    if description.client is not None:
        lines.append("- It was made for one client's images and may do worse on those of others.")
    if not opened.split.get("patients"):
        lines.append(
            "- The run did not know whose its images are: one person's images may be among both training and test "
            "images, and then the scores flatter the model."
        )
    return lines


def _data(opened: OpenedRun, description: Description) -> list[str]:
    data, split = opened.experiment.data, opened.split
    height, width, channels = description.image
    lines = [
        f"- Dataset: {_text(Path(data.name).name)}, images of {width} x {height} pixels, "
        f"{'gray' if channels == 1 else 'color'}",
        f"- Partition: {_text(str(opened.experiment.partition.name))} over {len(split['clients'])} clients, "
        f"seed {opened.experiment.run.seed}",
    ]
    counts = _counts(split)
    if not counts:
        return [*lines, "- Images: their owners keep the numbers"]
    total = ", ".join(f"{sum(own[part] for own in counts.values())} {word}" for part, word in _COUNTS.items())
    lines.append(f"- Images: {total}")
    patients = split.get("patient_counts")
    if patients:
        people = ", ".join(f"{sum(own[part] for own in patients.values())} {word}" for part, word in _COUNTS.items())
        lines.append(f"- Patients: {people}; no patient is in two of them")
    return lines


def _method(opened: OpenedRun, description: Description) -> list[str]:
    experiment, train = opened.experiment, opened.experiment.train
    model = experiment.model
    start = "pre-trained, from timm's hub" if model.pretrained else "random"
    if model.weights is not None:
        start = f"pre-trained, from the file {_text(model.weights.name)}"
    lines = [
        f"- Method: {_options(description.method)}",
        f"- Tune: {_options(description.tune)}",
        f"- Initial weights: {start}",
        f"- Training: round {description.round} of {train.rounds}, {train.cohort} clients per round, {train.epochs} "
        f"local epochs, batch {train.batch}, {train.optimizer} at a learning rate of {train.lr:g}",
    ]
    if isinstance(opened.net.plan, Plan) and opened.net.roles.personal:
        lines.append(f"- Weights that never leave a client: {len(opened.net.roles.personal)} tensors")
    return lines


def _scores(opened: OpenedRun, description: Description) -> list[str]:
    rows = opened.run.kept_clients if opened.kept_best else opened.run.clients
    views = opened.scores.get(description.view)
    if not rows or not opened.run.finished or not views:
        return [f"{UNSTATED.capitalize()}: the folder of this run has no scores of this model."]
    about = "each client's own model on its own test images" if description.client else "the server's model"
    lines = [f"Round {description.round}; {about}. Chosen on validation images, if at all, never on these.", ""]
    spread = "" if views.get("std") is None else f" ± {views['std']:.1f} over clients"
    lines += [f"- Mean accuracy: {views['mean']:.1f} %{spread}"]
    if description.client is None:
        lines += ["- By client, of the clients' own models:"]
    shown = {key: told for key, told in _METRICS.items() if any(row.get(key) is not None for row in rows)}
    head = ["client", "training images", "test images", *(name for name, _, _ in shown.values())]
    table = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        cells = [_number(row.get(key), places, unit) for key, (_, places, unit) in shown.items()]
        mark = "**" if row["client"] == description.client else ""
        table.append(
            [f"{mark}{_text(row['client'])}{mark}", str(row["train_samples"]), str(row["test_samples"]), *cells]
        )
    return [*lines, "", *("| " + " | ".join(cells) + " |" for cells in table)]


def _privacy(opened: OpenedRun) -> list[str]:
    epsilon = opened.run.summary.get("epsilon") if opened.run.finished else None
    spent = "none spent; the run was not differentially private" if epsilon is None else f"epsilon {epsilon}"
    return [f"- Privacy budget: {spent}.", f"- {_what_left(opened)}"]


def _what_left(opened: OpenedRun) -> str:
    """Say what left the clients in training, as the method has it."""
    plan = opened.net.plan
    if not isinstance(plan, Plan):
        return "Activations of images and their gradients left the clients at every step, and can reveal the images."
    if plan.not_between_sites is not None:
        return f"Images, or what is made of them, left their clients: {plan.name} {plan.not_between_sites}."
    if opened.experiment.method.get("python"):
        return "What left the clients is what this method, a plan of its author's own, sends."
    return (
        "Images and labels did not leave their clients in training. Weights can still reveal something about the "
        "images that they were trained on, unless a budget above says how little."
    )


def _counts(split: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return every client's numbers of images by part, as far as split.json lists them."""
    parts = {name: {part: own.get(part) for part in _COUNTS} for name, own in split["clients"].items()}
    if any(own["train"] is None for own in parts.values()):
        return {}
    return {name: {part: len(found or ()) for part, found in own.items()} for name, own in parts.items()}


def _options(table: Mapping[str, Any]) -> str:
    more = ", ".join(f"{key} = {value}" for key, value in table.items() if key != "name" and value is not None)
    return _text(f"{table['name']} ({more})" if more else str(table["name"]))


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _number(value: float | None, places: int, unit: str) -> str:
    return "-" if value is None else f"{value:.{places}f}{unit}"


def _text(text: str) -> str:
    """Return a name or a statement from outside as one line that cannot change the Markdown around it."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in " ".join(text.split()))
