"""Methods from other packages: functions under the entry point group `fedvit.methods`, loaded when they are used."""

import inspect
import logging
from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fedvit.core.errors import UserError

GROUP = "fedvit.methods"
log = logging.getLogger(__name__)


@cache
def found() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of all installed packages, by the method's name; nothing is imported."""
    points: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        if point not in points.get(point.name, ()):
            points[point.name] = (*points.get(point.name, ()), point)
    return dict(sorted(points.items()))


def package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value.partition(":")[0]


def versions_of(name: str) -> dict[str, str]:
    """Return the version of the package that a method comes from, if it is not ours."""
    return {package_of(point): point.dist.version for point in found().get(name, ()) if point.dist is not None}


def clash(name: str, built_in: Collection[str]) -> str | None:
    """Say which packages claim a name that is taken; our own names win."""
    packages = " and ".join(package_of(point) for point in found().get(name, ()))
    if name in built_in and packages:
        return f"the package {packages} has a method {name!r}, but fedvit's own method of this name is used: rename it"
    if len(found().get(name, ())) > 1:
        return f"the packages {packages} both have a method {name!r}: remove one of them"
    return None


def load(name: str) -> Callable[..., Any]:
    """Import a method's function; raise an error that names its package if that fails."""
    (point,) = found()[name]
    where = f"the method {name!r} of the package {package_of(point)}"
    try:
        function: Callable[..., Any] = point.load()
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except Exception as problem:  # another package may raise anything
        raise UserError(
            f"{where} cannot be loaded ({type(problem).__name__}: {problem}): repair or remove it"
        ) from problem
    wrong = [p.name for p in parameters if p.default is p.empty or p.annotation is p.empty]
    if wrong:
        raise UserError(f"{where} cannot be used: its option {wrong[0]} has no type or no default")
    return function
