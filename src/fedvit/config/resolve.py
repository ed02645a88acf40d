"""Check every setting, fill in every default that depends on another, and write the result as run.toml."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tomli_w
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError

from fedvit.config.tables import TABLES, Tables
from fedvit.core.errors import UserError, nearest
from fedvit.core.plan import Plan
from fedvit.core.robust import fewest_reports
from fedvit.core.settings import FOCAL_GAMMA, Experiment, FromPython, PrivacySettings, RunSettings
from fedvit.core.thresholds import parse_threshold
from fedvit.data.partition.split import DEFAULT_CLIENTS
from fedvit.data.sources import sites_of, task_of
from fedvit.methods import METHODS, find_method, method_names, plan_of
from fedvit.methods.plugins import versions_of
from fedvit.methods.tunes import SCRATCH_LR, TUNES, make_tune
from fedvit.models.build import check_patches, input_size
from fedvit.models.groups import GROUPS, check_groups
from fedvit.models.plugins.specs import KINDS
from fedvit.split.plan import SplitPlan

LARGEST_DEFAULT_COHORT = 8
MOST_CLIENTS_TO_EVALUATE_EVERY_ROUND = 100
TAIL_LR = 2.5e-2  # of sgd, for a final norm and a classifier behind a pre-trained body


def keys_of_tables(method: str, tune: str) -> dict[str, list[str]]:
    """Return every key that may be set, by table."""
    keys = {}
    for table, field in Experiment.model_fields.items():
        model = field.annotation
        if inspect.isclass(model) and issubclass(model, BaseModel):
            keys[table] = list(model.model_fields)
    for kind, name in (("method", method), ("tune", tune)):
        function: Callable[..., Any] | None = _method_of(name).get(name) if kind == "method" else TUNES.get(name)
        keys[kind] = ["name", *(inspect.signature(function).parameters if function else ())]
    return keys


def resolve(tables: Tables, sites: tuple[str, ...] | None = None, own: FromPython | None = None) -> Experiment:
    """Check every value and fill in every default that depends on another."""
    chosen = tables.get("method", {})
    known = METHODS if chosen.get("python") else _method_of(str(chosen.get("name", "fedavg")))
    method = options("method", known, chosen, "fedavg")
    tune_table = tables.get("tune", {})
    name = str(tune_table.get("name", "full"))
    named = tables.get("model", {}).get("groups") or {}
    if name in TUNES or not _is_groups(name, named):
        tune = options("tune", TUNES, tune_table, "full")
    else:
        check_groups(name, named)
        tune = {"name": name}
        _reject_unknown("tune", tune_table, ["name"])
    for table, content in tables.items():
        if table not in ("method", "tune"):
            _reject_unknown(table, content, keys_of_tables("", "")[table])
    try:
        experiment = Experiment.model_validate({**tables, "method": method, "tune": tune})
    except ValidationError as problem:
        raise UserError(readable(problem)) from problem
    return _with_defaults(experiment.with_own(own or FromPython()), sites)


def _method_of(name: str) -> Mapping[str, Callable[..., Any]]:
    """Return our methods, and the one of this name if another package has it."""
    return {**METHODS, name: find_method(name)} if name in method_names() else METHODS


def _is_groups(name: str, named: Iterable[str]) -> bool:
    """Return whether a tune's name reads as layer groups rather than as a misspelled tune."""
    parts = [part.strip() for part in name.split(",")]
    return "," in name or parts[0] in (*GROUPS, *KINDS, *named) or parts[0].startswith("blocks.")


def options(
    kind: str, known: Mapping[str, Callable[..., Any]], table: Mapping[str, Any], default: str
) -> dict[str, Any]:
    """Check a method's or tune's table against the arguments of its function, and fill in the defaults."""
    name = table.get("name", default)
    if kind == "method" and table.get("python"):
        _reject_unknown(kind, table, ["name", "python"], f" of {name}, a plan from Python")
        return {"name": str(name), "python": True}
    if name not in known:
        extra = "; a tune may also be layer groups joined by commas" if kind == "tune" else ""
        names = method_names() if kind == "method" else known
        raise UserError(f"unknown {kind} {name!r}; {nearest(str(name), names)}{extra}")
    parameters = inspect.signature(known[name], eval_str=True).parameters
    _reject_unknown(kind, table, ["name", *parameters], f" of {name}")
    result: dict[str, Any] = {"name": name}
    for key, parameter in parameters.items():
        try:
            value = table.get(key, parameter.default)
            result[key] = TypeAdapter(parameter.annotation).validate_python(value)
        except ValidationError as problem:
            raise UserError(f"{kind}.{key}: {problem.errors()[0]['msg']}, found {table[key]!r}") from problem
    return result


def _reject_unknown(table: str, content: Mapping[str, Any], valid: list[str], of: str = "") -> None:
    for key in content:
        if key not in valid:
            raise UserError(f"unknown key {table}.{key}{of}; {nearest(key, valid)}")


def readable(problem: ValidationError) -> str:
    """Format each of pydantic's errors as one short phrase."""
    lines = []
    for error in problem.errors():
        where = ".".join(str(part) for part in error["loc"] if not str(part).startswith("function"))
        lines.append(f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}, found {error['input']!r}")
    return "; ".join(lines)


def _with_defaults(experiment: Experiment, sites: tuple[str, ...] | None) -> Experiment:
    """Fill in the defaults that depend on other values."""
    check_patches(experiment.model)
    init = "random" if experiment.model.from_scratch else "zero"
    method, tune = (_resolved_init(table, init) for table in (experiment.method, experiment.tune))
    experiment = experiment.model_copy(update={"method": method, "tune": tune})
    train, run = experiment.train, experiment.run
    if sites is None:
        sites = sites_of(experiment.data)
    if experiment.data.task is None and task_of(experiment.data) == "multi":
        experiment = experiment.model_copy(update={"data": experiment.data.model_copy(update={"task": "multi"})})
    _check_several_labels(experiment)
    partition = experiment.partition.name or ("site" if sites else "dirichlet")
    clients = experiment.partition.clients
    if clients is None:
        clients = len(sites) if sites and partition in ("site", "domain") else DEFAULT_CLIENTS
    seen = clients - experiment.data.unseen
    cohort = train.cohort if train.cohort is not None else max(1, min(seen, LARGEST_DEFAULT_COHORT))
    if seen < 1:
        raise UserError(f"data.unseen={experiment.data.unseen} of {clients} clients leaves no client to train")
    if cohort > seen:
        never = f", {experiment.data.unseen} of them never trained" if experiment.data.unseen else ""
        raise UserError(
            f"a cohort of {cohort} cannot be sampled from {clients} clients{never}: use --cohort {seen} or less"
        )
    needed = fewest_reports(train.aggregate, train.byzantine)
    if cohort < needed:
        raise UserError(
            f"train.aggregate={train.aggregate} with train.byzantine={train.byzantine} needs the reports of at least "
            f"{needed} clients in a round, but train.cohort is {cohort}: sample more, or choose "
            f"{'median or trimmed_mean' if 'krum' in train.aggregate and cohort > 2 * train.byzantine else 'mean'}"
        )
    every = run.eval_every
    if every is None:
        every = 1 if clients <= MOST_CLIENTS_TO_EVALUATE_EVERY_ROUND else 0
    if train.warmup >= train.rounds:
        raise UserError(
            f"train.warmup={train.warmup} rounds leave none of train.rounds={train.rounds} at the full learning rate: "
            "choose fewer"
        )
    _check_choice(run, every)
    if run.clinical is None:
        run = run.model_copy(update={"clinical": experiment.data.several_labels})
    _check_clinical(run)
    optimizer = train.optimizer or _default_optimizer(experiment)
    if train.momentum and optimizer != "sgd":
        raise UserError(f"train.momentum is only for sgd and has no effect with {optimizer}: set train.optimizer=sgd")
    if train.focal_gamma is not None and train.loss != "focal":
        raise UserError(
            f"train.focal_gamma is only for the loss focal and has no effect with {train.loss}: set train.loss=focal"
        )
    gamma = FOCAL_GAMMA if train.loss == "focal" and train.focal_gamma is None else train.focal_gamma
    check_privacy(experiment)
    lr = train.lr or _default_lr(experiment, optimizer)
    return experiment.model_copy(
        update={
            "method": _with_split_rates(experiment, lr),
            "model": experiment.model.model_copy(update={"image_size": input_size(experiment.model)}),
            "partition": experiment.partition.model_copy(update={"name": partition, "clients": clients}),
            "train": train.model_copy(
                update={
                    "cohort": cohort,
                    "optimizer": optimizer,
                    "clip_grad": _default_clip(experiment) if train.clip_grad is None else train.clip_grad,
                    "lr": lr,
                    "focal_gamma": gamma,
                    "weighting": train.weighting or plan_of(experiment).weighting,
                }
            ),
            "run": run.model_copy(update={"eval_every": every, "device": _choose_device(run)}),
        }
    )


def check_privacy(experiment: Experiment) -> None:
    """Refuse settings of [privacy] that contradict each other or mean nothing."""
    privacy = experiment.privacy
    if privacy.epsilon is not None and privacy.noise is not None:
        raise UserError(
            f"privacy.epsilon={privacy.epsilon:g} chooses the noise, but privacy.noise={privacy.noise:g} is given: "
            "leave one of them out"
        )
    if privacy.accountant == "per_step" and privacy.noise is not None:
        raise UserError("privacy.accountant=per_step chooses the noise from privacy.epsilon: leave privacy.noise out")
    changed = sorted(
        key for key in privacy.model_fields_set if getattr(privacy, key) != PrivacySettings.model_fields[key].default
    )
    if changed and not privacy.on:
        raise UserError(
            f"privacy.{changed[0]} has no effect without --epsilon or privacy.noise: give one, or leave it out"
        )


def _check_choice(run: RunSettings, every: int) -> None:
    """Refuse to choose among rounds that are not evaluated, or by scores of models that no checkpoint holds."""
    wanted = [f"run.{key}={value}" for key, value in (("keep", run.keep), ("patience", run.patience))
              if value not in ("last", None)]  # fmt: skip
    if wanted and not every:
        raise UserError(
            f"{wanted[0]} compares evaluated rounds, but run.eval_every=0 evaluates only the last one: set "
            "--eval-every to 1 or more"
        )
    if run.keep == "best" and run.evaluate == "in_round":
        raise UserError(
            "run.keep=best needs run.evaluate=after: in_round scores models from before the aggregation, which no "
            "checkpoint holds"
        )


def _check_clinical(run: RunSettings) -> None:
    if run.predictions and not run.clinical:
        raise UserError("run.predictions belongs to the clinical scores: set run.clinical=true too, or leave it out")
    if run.threshold is not None:
        try:
            parse_threshold(run.threshold)
        except UserError as problem:
            raise UserError(f"run.threshold: {problem}") from problem


def _check_several_labels(experiment: Experiment) -> None:
    """Refuse what has no meaning where an image may have several labels."""
    if not experiment.data.several_labels:
        return
    one = plan_of(experiment)
    reason = one.one_label_only if isinstance(one, Plan) or one.labels_leave else None
    if reason is not None:
        raise UserError(
            f"{experiment.label} {reason}, but the images of {experiment.data.name} may have several labels: choose "
            "another method"
        )
    if experiment.data.auroc is False:
        raise UserError(
            "data.auroc=false would leave out the main score of a task with several labels, the mean AUROC of the "
            "labels: leave it out"
        )


def _resolved_init(table: Mapping[str, Any], init: str) -> dict[str, Any]:
    """Resolve `init = auto`, which depends on whether there are pre-trained weights to disturb."""
    return {key: init if (key, value) == ("init", "auto") else value for key, value in table.items()}


def _choose_device(run: RunSettings) -> str:
    """Resolve `auto`, which uses a GPU if there is one, and check that any other device can be used."""
    if run.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    for name in run.devices:
        try:
            torch.zeros(1, device=torch.device(name))
        except (RuntimeError, AssertionError) as problem:
            reason = str(problem).splitlines()[0]
            raise UserError(f"the device {name!r} cannot be used: {reason}; try --device cpu") from problem
    return run.device


def _default_optimizer(experiment: Experiment) -> str:
    if _split_plan(experiment) is not None:
        return "adam"
    return "adamw" if experiment.model.from_scratch else "sgd"


def _default_clip(experiment: Experiment) -> float:
    """Clip gradients on pre-trained weights, which one client that diverges would ruin for all.

    Split plans do not by default: their clients train with Adam, whose steps are bounded.
    """
    if experiment.privacy.on:  # each image's gradient is clipped, and the noise is often longer than all of them
        return 0.0
    learns_whole = _split_plan(experiment) is None
    return make_tune(experiment.tune).clip if learns_whole and not experiment.model.from_scratch else 0.0


def _default_lr(experiment: Experiment, optimizer: str) -> float:
    """Return the tune's published learning rate, which is for SGD; Adam and AdamW use a fifth of it."""
    rate = TAIL_LR if _trains_the_tail(experiment) else _tunes_lr(experiment)
    return rate if optimizer == "sgd" else rate / 5


def _tunes_lr(experiment: Experiment) -> float:
    scratch = experiment.tune["name"] == "full" and experiment.model.from_scratch
    return SCRATCH_LR if scratch else make_tune(experiment.tune).lr


def _trains_the_tail(experiment: Experiment) -> bool:
    """Return whether train.lr is by default the rate of a tail alone: a split plan's, with a pre-trained head."""
    plan = _split_plan(experiment)
    return plan is not None and plan.tail_suffices and not experiment.model.from_scratch


def _split_plan(experiment: Experiment) -> SplitPlan | None:
    """Return the plan if it is one of split learning, which a plan from Python never is."""
    plan = None if experiment.method.get("python") else plan_of(experiment)
    return plan if isinstance(plan, SplitPlan) else None


def _with_split_rates(experiment: Experiment, lr: float) -> dict[str, Any]:
    """Fill in the rates of a split plan's head and body, where they are not given."""
    table = experiment.method
    if _split_plan(experiment) is None:
        return table
    head, body = (0.0, _tunes_lr(experiment) / 5) if _trains_the_tail(experiment) else (lr, lr)
    return {key: {"client_head_lr": head, "server_lr": body}.get(key) if v is None else v for key, v in table.items()}


def to_tables(experiment: Experiment) -> Tables:
    """Convert the experiment to TOML tables; TOML has no null, so settings that are None are left out."""
    tables: Tables = experiment.model_dump(mode="json", exclude_none=True)
    for kind in ("method", "tune"):
        tables[kind] = {key: value for key, value in tables[kind].items() if value is not None}
    if not experiment.privacy.on:
        del tables["privacy"]
    return tables


def to_toml(experiment: Experiment) -> str:
    """Return the text of run.toml: every resolved setting, and the versions that the run used."""
    used = {**versions(), **versions_of(str(experiment.method["name"]))}
    return tomli_w.dumps({**to_tables(experiment), "versions": used})


def versions() -> dict[str, str]:
    """Return the versions of the software that the results may depend on."""
    import platform
    from importlib.metadata import version

    packages = ("fedvit", "torch", "timm", "torchvision", "numpy", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def changed_settings(old: Tables, new: Tables) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two experiments differ: table.key -> (old, new)."""
    difference = {}
    for table in TABLES:
        a, b = old.get(table, {}), new.get(table, {})
        for key in {**a, **b}:
            if a.get(key) != b.get(key):
                difference[f"{table}.{key}"] = (a.get(key), b.get(key))
    return difference
