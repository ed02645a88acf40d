"""Every method by name, in one dictionary; each method has a file of its own. Other packages may add methods."""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fedvit.core.errors import UserError, nearest
from fedvit.core.finetune import fine_tuned, is_fine_tuned
from fedvit.core.plan import Plan
from fedvit.core.settings import Experiment
from fedvit.methods import (
    adapters,
    apfl,
    cd2_pfed,
    centralized,
    custom,
    distrans,
    ditto,
    fed_lamb,
    fed_rod,
    fedadam,
    fedala,
    fedavg,
    fedavg_ft,
    fedavgm,
    fedbabu,
    fedbn,
    fedfa,
    fedfed,
    fedper,
    fedperfix,
    fedprox,
    fedrep,
    fedrolex,
    fedv,
    fedvz,
    festa,
    fesvibs,
    heterofl,
    local,
    minibatch_sfl,
    moon,
    partialfed,
    per_fedavg,
    pfededit,
    plugins,
    prefix_r,
    prefix_z,
    prompts,
    scaffold,
    splitfed_v1,
    splitfed_v2,
    vanilla_attention,
)
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)
Method = Plan | SplitPlan
METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": fedavg.plan,
    "local": local.plan,
    "fedper": fedper.plan,
    "fedrep": fedrep.plan,
    "fedbn": fedbn.plan,
    "fedbabu": fedbabu.plan,
    "vanilla_attention": vanilla_attention.plan,
    "fedperfix": fedperfix.plan,
    "prefix_z": prefix_z.plan,
    "prefix_r": prefix_r.plan,
    "prompts": prompts.plan,
    "adapters": adapters.plan,
    "custom": custom.plan,
    "fedavg_ft": fedavg_ft.plan,
    "centralized": centralized.plan,
    "fedprox": fedprox.plan,
    "scaffold": scaffold.plan,
    "fedavgm": fedavgm.plan,
    "fedadam": fedadam.plan,
    "apfl": apfl.plan,
    "per_fedavg": per_fedavg.plan,
    "ditto": ditto.plan,
    "fed_rod": fed_rod.plan,
    "moon": moon.plan,
    "fedala": fedala.plan,
    "pfededit": pfededit.plan,
    "distrans": distrans.plan,
    "fed_lamb": fed_lamb.plan,
    "partialfed": partialfed.plan,
    "heterofl": heterofl.plan,
    "fedrolex": fedrolex.plan,
    "fedfa": fedfa.plan,
    "cd2_pfed": cd2_pfed.plan,
    "fedfed": fedfed.plan,
    "fedv": fedv.plan,
    "fedvz": fedvz.plan,
    "festa": festa.plan,
    "splitfed_v1": splitfed_v1.plan,
    "splitfed_v2": splitfed_v2.plan,
    "minibatch_sfl": minibatch_sfl.plan,
    "fesvibs": fesvibs.plan,
}


def method_names() -> list[str]:
    """Return the names of our methods, and then those of other packages."""
    return list(dict.fromkeys([*METHODS, *plugins.found()]))


def find_method(name: str) -> Callable[..., Method]:
    """Return the function that makes a method's plan: ours, or that of another package."""
    problem = plugins.clash(name, METHODS)
    if name in METHODS:
        if problem is not None:
            _tell_once(problem)
        return METHODS[name]
    if problem is not None:
        raise UserError(problem)
    if name not in plugins.found():
        raise UserError(f"unknown method {name!r}; {nearest(name, method_names())}")
    return plugins.load(name)


@cache
def _tell_once(problem: str) -> None:
    log.error("%s", problem)


def make_plan(table: Mapping[str, Any]) -> Method:
    """Make the plan of a [method] table, which holds the method's name and the arguments of its function."""
    name = str(table["name"])
    plan = find_method(name)(**{key: value for key, value in table.items() if key != "name"})
    if not isinstance(plan, Plan | SplitPlan):
        raise UserError(f"the function of the method {name!r} should return a fedvit.Plan, found {type(plan).__name__}")
    return plan


def plan_of(experiment: Experiment) -> Method:
    """Return the experiment's plan with its fine-tuning, if it has one (run.finetune)."""
    plan, epochs = _bare_plan(experiment), experiment.run.finetune
    if not epochs or isinstance(plan, SplitPlan):
        return plan
    if is_fine_tuned(plan):
        raise UserError(
            f"{plan.name} fine-tunes as it is: leave run.finetune out, and set method.epochs={epochs} if it should be "
            "so many epochs"
        )
    return fine_tuned(plan, epochs)


def _bare_plan(experiment: Experiment) -> Method:
    """Return the plan of [method]: one of ours, which is made only once, or the one that was given from Python."""
    if not experiment.method.get("python"):
        made: Method = experiment.keep_plan(make_plan)
        return made
    plan = experiment.own.plan
    if plan is None:
        raise UserError(
            f"the plan {experiment.method['name']!r} was written in Python and no file holds it: give it again, "
            "fedvit.load_run(FOLDER, method=plan) or fedvit.run(method=plan, ...)"
        )
    assert isinstance(plan, Plan)
    return plan
