"""A site's policy: rules for what may leave the site, in a file that only the site can change.

The site's own process enforces them.
"""

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from fedvit.config.resolve import readable
from fedvit.core.clinical_message import is_clinical
from fedvit.core.errors import PublicError, UserError
from fedvit.core.metrics import CONFUSION
from fedvit.core.payload import Payload
from fedvit.core.settings import Positive, Table

MEGABYTE = 1_000_000


class PolicyError(PublicError):
    """A run or a message that the site's policy forbids."""


class Policy(Table):
    """A site's rules. A rule that is left out forbids nothing."""

    methods: list[str] | None = None  # each as METHOD or METHOD+TUNE
    groups: list[str] | None = None  # names of tensor groups: shared, control, choice, ...
    largest_message_mb: Positive | None = None  # the tensors of one report
    class_counts: bool = True  # whether counts of test images by class may leave: confusion matrix and clinical scores
    clinical: bool = True  # whether clinical scores may leave
    largest_epsilon: Annotated[float, Field(gt=0)] | None = None  # a run must guarantee a privacy bound of at most this

    def admit(self, label: str, method: str, up: Payload, epsilon: float | None) -> None:
        """Refuse a forbidden run before its first round; `up` has the form of the run's reports."""
        if self.methods is not None and method not in self.methods and label not in self.methods:
            raise PolicyError(f"the policy allows {', '.join(self.methods) or 'no method'}, but this run uses {label}")
        if self.largest_epsilon is not None and (epsilon is None or epsilon > self.largest_epsilon):
            has = "has no privacy bound" if epsilon is None else f"may spend an epsilon of {epsilon:g}"
            raise PolicyError(f"the policy requires an epsilon of at most {self.largest_epsilon:g}, but this run {has}")
        self.release(up)

    def release(self, up: Payload) -> Payload:
        """Return the part of a report that may leave the site; raise PolicyError if the report is forbidden."""
        strange = sorted(set(up.trees) - set(self.groups)) if self.groups is not None else []
        if strange:
            raise PolicyError(f"the policy does not allow the tensor group {', '.join(strange)} to leave the site")
        if self.largest_message_mb is not None and up.nbytes > self.largest_message_mb * MEGABYTE:
            raise PolicyError(
                f"the policy allows at most {self.largest_message_mb:g} MB per message, but this one has "
                f"{up.nbytes / MEGABYTE:.3g} MB"
            )
        return Payload(up.trees, {key: value for key, value in up.scalars.items() if self.may_leave(key)})

    def may_leave(self, score: str) -> bool:
        """Return whether a score of this name may leave; clinical scores tell the number of images of each class."""
        if is_clinical(score):
            return self.clinical and self.class_counts
        return self.class_counts or f"_{CONFUSION}_" not in score


def read_policy(path: Path | None) -> Policy:
    """Read a policy from a TOML file; without a file, everything is allowed."""
    if path is None:
        return Policy()
    try:
        return Policy(**tomllib.loads(path.read_text()))
    except OSError as problem:
        raise UserError(f"the policy {path} cannot be read: {problem.strerror}") from problem
    except tomllib.TOMLDecodeError as problem:
        raise UserError(f"the policy {path} is not valid TOML: {problem}") from problem
    except ValidationError as problem:
        keys = ", ".join(Policy.model_fields)
        raise UserError(f"the policy {path}: {readable(problem)}; the valid keys are {keys}") from problem
