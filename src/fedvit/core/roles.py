"""Decide which weights are frozen, shared or personal, by path segment or module type."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from torch import nn

from fedvit.core.errors import UserError


class _Role(Enum):
    """What happens to a weight: never trained; trained and sent; trained and kept at the client."""

    FROZEN = "frozen"
    SHARED = "shared"
    PERSONAL = "personal"


FROZEN, SHARED, PERSONAL = _Role.FROZEN, _Role.SHARED, _Role.PERSONAL


@dataclass(frozen=True)
class Selector:
    """A named selection of weights that applies to any model."""

    label: str
    match: Callable[[nn.Module], set[str]]

    def __or__(self, other: "Selector") -> "Selector":
        return Selector(f"{self.label},{other.label}", lambda model: self.names(model) | other.names(model))

    def names(self, model: nn.Module) -> set[str]:
        """Return the selected weights; none is an error, because that is how personal layers end up being sent."""
        chosen = self.match(model)
        if not chosen:
            parts = sorted({name.split(".")[0] for name in state_names(model)})
            raise UserError(
                f"{self.label!r} matches no weight of this {type(model).__name__}; "
                f"its top-level parts are {', '.join(parts)}"
            )
        return chosen


Rules = tuple[tuple[Selector, _Role], ...]


def state_names(model: nn.Module) -> list[str]:
    """Return parameters and float buffers in model order; integer buffers are never sent or averaged."""
    parameters = [name for name, _ in model.named_parameters()]
    persistent = model.state_dict(keep_vars=True)
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and name in persistent]
    return parameters + buffers


def is_statistic(name: str) -> bool:
    """Return whether this is a running statistic of batch normalization: averaged, but never updated by a gradient."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def under(*paths: str) -> Selector:
    """Select weights whose path begins with one of these paths, compared segment by segment."""

    def match(model: nn.Module) -> set[str]:
        return {n for n in state_names(model) if any(n == p or n.startswith(p + ".") for p in paths)}

    return Selector(",".join(paths), match)


def segment(*names: str) -> Selector:
    """Select weights with one of these words as a whole segment anywhere in their path."""
    return Selector(",".join(names), lambda model: {n for n in state_names(model) if set(n.split(".")) & set(names)})


def of_type(label: str, *types: type[nn.Module]) -> Selector:
    """Select weights owned directly by modules of these types."""

    def match(model: nn.Module) -> set[str]:
        owners = {path for path, module in model.named_modules() if isinstance(module, types)}
        return {n for n in state_names(model) if n.rpartition(".")[0] in owners}

    return Selector(label, match)


everything = Selector("everything", lambda model: set(state_names(model)))
biases = Selector("bias", lambda model: {n for n in state_names(model) if n.rpartition(".")[2] == "bias"})


@dataclass(frozen=True)
class Roles:
    """The role of every weight of one model, in model order."""

    of: Mapping[str, _Role]

    def _named(self, *roles: _Role) -> tuple[str, ...]:
        return tuple(name for name, role in self.of.items() if role in roles)

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        return self._named(FROZEN)

    @cached_property
    def shared(self) -> tuple[str, ...]:
        return self._named(SHARED)

    @cached_property
    def personal(self) -> tuple[str, ...]:
        return self._named(PERSONAL)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        return self._named(SHARED, PERSONAL)


def assign(model: nn.Module, rules: Rules, trainable: Iterable[str] | None = None) -> Roles:
    """Give every weight the role of the first rule that matches it, or FROZEN if it is not in `trainable`.

    It is an error if a rule matches nothing in the model, or if no rule covers a weight.
    """
    names = state_names(model)
    of: dict[str, _Role] = {}
    for selector, role in rules:
        for name in selector.names(model):
            of.setdefault(name, role)
    uncovered = [name for name in names if name not in of]
    if uncovered:
        raise UserError(
            f"no rule covers {len(uncovered)} weights, such as {uncovered[0]!r}; "
            "end the rules with one for everything else"
        )
    if trainable is not None:
        kept = set(trainable)
        of = {name: role if name in kept else FROZEN for name, role in of.items()}
    return Roles({name: of[name] for name in names})
