"""What may leave a site: rules in a file that only the site can change, kept by the site's own process."""

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from fedvit.config.resolve import readable
from fedvit.core.errors import PublicError, UserError
from fedvit.core.metrics import CONFUSION
from fedvit.core.payload import Payload
from fedvit.core.settings import Positive, Table

MEGABYTE = 1_000_000


class PolicyError(PublicError):
    """The site's rules forbid it."""


class Policy(Table):
    """A site's rules. What is left out is allowed."""

    methods: list[str] | None = None  # by name, or METHOD+TUNE
    groups: list[str] | None = None  # of tensors, as `fedvit cost` names them: shared, control, choice, ...
    largest_message_mb: Positive | None = None  # of one report's tensors
    class_counts: bool = True  # how many test images of which class were taken for which
    largest_epsilon: Annotated[float, Field(gt=0)] | None = None  # the least privacy: no run without such a bound

    def admit(self, label: str, method: str, up: Payload, epsilon: float | None) -> None:
        """Refuse a run before its first round; `up` is what a report of it looks like."""
        if self.methods is not None and method not in self.methods and label not in self.methods:
            raise PolicyError(f"the policy allows {', '.join(self.methods) or 'no method'}, and this is {label}")
        if self.largest_epsilon is not None and (epsilon is None or epsilon > self.largest_epsilon):
            has = "has no privacy bound" if epsilon is None else f"may spend epsilon {epsilon:g}"
            raise PolicyError(f"the policy demands epsilon {self.largest_epsilon:g} or less, and this run {has}")
        self.release(up)

    def release(self, up: Payload) -> Payload:
        """A report as it may leave, or an error."""
        strange = sorted(set(up.trees) - set(self.groups)) if self.groups is not None else []
        if strange:
            raise PolicyError(f"the policy does not let the group {', '.join(strange)} leave")
        if self.largest_message_mb is not None and up.nbytes > self.largest_message_mb * MEGABYTE:
            raise PolicyError(
                f"the policy lets {self.largest_message_mb:g} MB leave in one message, and this is "
                f"{up.nbytes / MEGABYTE:.3g} MB"
            )
        if self.class_counts:
            return up
        return Payload(up.trees, {key: value for key, value in up.scalars.items() if f"_{CONFUSION}_" not in key})


def read_policy(path: Path | None) -> Policy:
    """The rules in a TOML file; without a file everything is allowed."""
    if path is None:
        return Policy()
    try:
        return Policy(**tomllib.loads(path.read_text()))
    except OSError as problem:
        raise UserError(f"the policy {path} cannot be read: {problem.strerror}") from problem
    except tomllib.TOMLDecodeError as problem:
        raise UserError(f"the policy {path} is not TOML: {problem}") from problem
    except ValidationError as problem:
        keys = ", ".join(Policy.model_fields)
        raise UserError(f"the policy {path}: {readable(problem)}; its keys are {keys}") from problem
