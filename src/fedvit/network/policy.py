"""A site's policy: what a server may ask of the site and what may leave it, in a file that only the site can change.

The site's own process enforces it.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from fedvit.config.resolve import readable
from fedvit.core.clinical_message import is_clinical
from fedvit.core.errors import PublicError, UserError
from fedvit.core.metrics import AUROC, CONFUSION
from fedvit.core.payload import Payload
from fedvit.core.settings import Count, Experiment, Positive, Table
from fedvit.network.boundary import KEPT_BACK

MEGABYTE = 1_000_000
TEST_SHARES = (0.1, 0.5)  # of data.test, unless test_share says exactly which
STEPS = {"accuracy": 5.0, "loss": 0.5, AUROC: 0.05}  # what scores = "rounded" rounds to, by the end of a score's name
LARGEST_LOSS = 10.0  # of a rounded loss: chosen weights could enlarge a difference beyond any rounding


class PolicyError(PublicError):
    """A run or a message that the site's policy forbids."""


class Policy(Table):
    """A site's rules. A rule that is left out has the value given here: None allows everything."""

    methods: list[str] | None = None  # each as METHOD or METHOD+TUNE
    tunes: list[str] | None = None
    models: list[str] | None = None
    settings_sha256: list[str] | str | None = None  # of the settings that the site has agreed to
    groups: list[str] | None = None  # names of tensor groups: shared, control, choice, ...
    largest_message_mb: Positive | None = None  # the tensors of one report
    least_images: Count = 10  # training images at this site; the weights after training on few show them
    least_batch: Count = 8
    most_rounds: Count = 1000
    most_epochs: Count = 100  # in one round
    test_share: Annotated[float, Field(gt=0, lt=1)] | Literal["any"] | None = None  # data.test; None: TEST_SHARES
    scores: Literal["full", "rounded", "none"] = "full"
    follow_links: bool = False  # whether links in the site's folder of images may lead out of it
    class_counts: bool = True  # whether counts of test images by class may leave: confusion matrix and clinical scores
    clinical: bool = True  # whether clinical scores may leave; only where class_counts and scores = "full" let them
    largest_epsilon: Annotated[float, Field(gt=0)] | None = None  # a run must guarantee a privacy bound of at most this

    def allow(self, experiment: Experiment, settings: str, epsilon: float | None = None) -> None:
        """Refuse a run with settings that the policy forbids; `settings` is the hash of what was agreed."""
        train, method, test = experiment.train, str(experiment.method["name"]), experiment.data.test
        if self.methods is not None and method not in self.methods and experiment.label not in self.methods:
            _refuse(_any_of(self.methods, "no method"), f"uses {experiment.label}")
        for what, allowed, used in (
            ("tune", self.tunes, str(experiment.tune["name"])),
            ("model", self.models, experiment.model.name),
        ):
            if allowed is not None and used not in allowed:
                _refuse(f"{_any_of(allowed, 'none')} as {what}", f"uses {used}")
        agreed = [self.settings_sha256] if isinstance(self.settings_sha256, str) else self.settings_sha256
        if agreed is not None and settings not in agreed:
            _refuse(f"only settings with the SHA-256 {_any_of(agreed, 'of none')}", f"has {settings}")
        if train.batch < self.least_batch:
            _refuse(f"batches of at least {self.least_batch} images", f"has train.batch={train.batch}")
        self.allow_round(train.rounds)
        most = epochs_of(experiment)
        if most > self.most_epochs:
            _refuse(f"at most {self.most_epochs} epochs in a round", f"asks for {most}")
        low, high = (self.test_share, self.test_share) if isinstance(self.test_share, float) else TEST_SHARES
        if self.test_share != "any" and not low <= test <= high:
            _refuse(f"data.test={low:g}" if low == high else f"data.test from {low:g} to {high:g}", f"has {test:g}")
        if self.largest_epsilon is not None and (epsilon is None or epsilon > self.largest_epsilon):
            has = "has no privacy bound" if epsilon is None else f"may spend an epsilon of {epsilon:g}"
            raise PolicyError(f"the policy requires an epsilon of at most {self.largest_epsilon:g}, but this run {has}")

    def allow_round(self, number: int) -> None:
        """Refuse a round beyond the last one that the policy allows, whatever the settings say."""
        if number > self.most_rounds:
            _refuse(f"at most {self.most_rounds} rounds", f"asks for round {number}")

    def allow_images(self, train: int) -> None:
        """Refuse to train on few images, which the trained weights would show."""
        if train < self.least_images:
            raise PolicyError(
                f"the policy requires at least {self.least_images} training images, and this run leaves this site fewer"
            )

    def check(self, up: Payload) -> Payload:
        """Return a message whose tensors may leave the site; raise PolicyError if they may not."""
        strange = sorted(set(up.trees) - set(self.groups)) if self.groups is not None else []
        if strange:
            raise PolicyError(f"the policy does not allow the tensor group {', '.join(strange)} to leave the site")
        if self.largest_message_mb is not None and up.nbytes > self.largest_message_mb * MEGABYTE:
            raise PolicyError(
                f"the policy allows at most {self.largest_message_mb:g} MB per message, but this one has "
                f"{up.nbytes / MEGABYTE:.3g} MB"
            )
        return up

    def report(self, up: Payload) -> Payload:
        """Return the part of a report after training that may leave the site; raise PolicyError if it is forbidden."""
        self.check(up)
        numbers = dict(up.scalars)
        if "loss" in numbers and self.scores != "full":
            loss = numbers.pop("loss")
            numbers |= {"loss": rounded("loss", loss)} if self.scores == "rounded" else {}
        return Payload(up.trees, numbers)

    def release(self, scores: Payload) -> Payload:
        """Return the part of an evaluation's scores that may leave the site."""
        self.check(scores)
        if self.scores == "none":
            return Payload(scalars=KEPT_BACK)
        counts = self.class_counts and self.scores == "full"
        kept = {key: value for key, value in scores.scalars.items() if counts or not _shows_counts(key)}
        if not self.clinical:
            kept = {key: value for key, value in kept.items() if not is_clinical(key)}
        if self.scores == "rounded":
            kept = {key: rounded(key, value) for key, value in kept.items() if step_of(key) is not None}
        return Payload(scores.trees, kept)


# For a trial, in which a client acts on the experiment's own images.
TRIAL = Policy(least_images=1, least_batch=1, most_rounds=10**7, most_epochs=10**7, test_share="any", follow_links=True)


def _refuse(allowed: str, run: str) -> None:
    raise PolicyError(f"the policy allows {allowed}, but this run {run}")


def _any_of(names: list[str], none: str) -> str:
    return ", ".join(names) or none


def _shows_counts(key: str) -> bool:
    """Return whether a score tells how many test images of a class there are."""
    return f"_{CONFUSION}_" in key or is_clinical(key)


def step_of(name: str) -> float | None:
    """Return to what a score is rounded, or None for one that has no rounded form and so may not leave."""
    name = name.rstrip("_0123456789")  # of the label, for several labels per image
    return next((step for end, step in STEPS.items() if name.endswith(end)), None)


def rounded(name: str, value: float) -> float:
    """Return a score without the digits from which class sizes follow."""
    step = step_of(name)
    assert step is not None
    if step == STEPS["loss"]:
        value = max(-LARGEST_LOSS, min(LARGEST_LOSS, value))
    return round(round(value / step) * step, 6)


def epochs_of(experiment: Experiment) -> int:
    """Return the most epochs that any setting asks for in one round."""
    own = [value for key, value in experiment.method.items() if "epochs" in key and type(value) is int]
    return max(experiment.train.epochs, experiment.run.finetune, *own, 0)


def read_policy(path: Path | None) -> Policy:
    """Read a policy from a TOML file; without a file, every rule has its default."""
    if path is None:
        return Policy()
    try:
        return Policy(**tomllib.loads(path.read_text()))
    except OSError as problem:
        raise UserError(f"the policy {path} cannot be read: {problem.strerror}") from problem
    except ValidationError as problem:
        keys = ", ".join(Policy.model_fields)
        raise UserError(f"the policy {path}: {readable(problem)}; the valid keys are {keys}") from problem
    except (ValueError, RecursionError) as problem:  # not TOML, or not UTF-8
        raise UserError(f"the policy {path} is not valid TOML: {problem}") from problem


def described(policy: Policy) -> str:
    """Return the rules that restrict a run, for the log of a site without a policy file."""
    low, high = TEST_SHARES
    return (
        f"there is no policy file, so the defaults hold: at least {policy.least_images} training images and "
        f"train.batch={policy.least_batch}, at most {policy.most_rounds} rounds and {policy.most_epochs} epochs in "
        f"each, data.test from {low:g} to {high:g}; any method, model and tune; all scores leave"
    )
