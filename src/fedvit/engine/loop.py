"""The federated loop, the same for every plan and every transport."""

import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedvit.core.cases import CASES, Cases
from fedvit.core.errors import one_line
from fedvit.core.metrics import AUROC, METRICS, over_clients
from fedvit.core.payload import CLAIMED, Failure, Payload
from fedvit.core.plan import Plan, Report
from fedvit.core.robust import TooFewReportsError, combine_by
from fedvit.core.server import Server, sample
from fedvit.core.settings import Experiment
from fedvit.core.tree import Tree
from fedvit.engine.ledger import Ledger, per_client
from fedvit.engine.net import POOLED
from fedvit.engine.transport import Task, Transport
from fedvit.engine.updates import Updates

log = logging.getLogger(__name__)
NOT_AGGREGATED = "not_aggregated"  # in rounds.jsonl: why the server kept its weights
WITHHELD = "keeps its scores"  # why a client that answered has none
_LONGEST_REASON = 200  # characters in rounds.jsonl
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/]+[^\s\\/:'\"]+){2,}")
_KEY = re.compile(r"\b[0-9a-f]{16,}\b")  # an ID or hash, which differs from run to run
Scores = Mapping[str, Mapping[str, float]]  # client -> "<view>_<metric>" -> value


@dataclass(frozen=True)
class Round:
    """A finished round: the server after it, its line in rounds.jsonl, and the clients' scores if evaluated."""

    server: Server
    row: dict[str, Any]
    scores: Scores | None
    ledger: Ledger
    cases: Mapping[str, Cases] = field(default_factory=dict)  # test images one by one, of clients on this machine

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        return self.ledger.seconds


def federate(
    plan: Plan,
    server: Server,
    transport: Transport,
    experiment: Experiment,
    evaluate_server: Callable[[Tree, int, Scores], Mapping[str, float] | None] | None,
    test_samples: Mapping[str, int],
) -> Iterator[Round]:
    """Run the rounds after `server.round`, one at a time."""
    train, run = experiment.train, experiment.run
    clients = list(transport.clients())
    server = replace(server, combine=combine_by(train.aggregate, train.byzantine))
    for number in range(server.round + 1, train.rounds + 1):
        ledger = Ledger()
        before = server
        cohort = choose(plan, clients, experiment, number)
        answers: dict[str, Payload] = {}  # the parts that are needed after aggregation
        with ledger.phase("aggregate"):
            server, loss, failures = train_round(plan, before, transport, experiment, cohort, number, ledger, answers)
        with ledger.phase("store"):
            transport.commit(number)
        scores, views, absences, cases = None, None, dict[str, str](), dict[str, Cases]()
        if is_evaluated(number, experiment):
            with ledger.phase("evaluate"):
                inside = run.evaluate == "in_round" and not plan.pooled
                tested = dict.fromkeys(clients, before if inside else server)
                scores = evaluate(plan, tested, transport, number, ledger, answers if inside else {}, absences, cases)
                views = summarize(scores, test_samples) if scores else None
                found = evaluate_server(server.shared, number, scores) if evaluate_server and scores else None
                if found is not None and views is not None:
                    views["server"] = _server_view(found)
        row = {
            "round": number,
            "cohort": cohort,
            "failed": list(failures),
            "loss": loss,
            "losses": ledger.losses,
            "nbytes_down": 0 if plan.pooled else per_client(ledger.down),
            "nbytes_up": 0 if plan.pooled else per_client(ledger.up),
            "nbytes_evaluation": ledger.evaluation,
            "views": views,
        }
        row |= ledger.noted | reasons_for_row(failures, absences)
        choices = {
            name: answer.trees["choice"]["layers"] for name, answer in answers.items() if "choice" in answer.trees
        }
        if choices:
            row["choice"] = {name: mask.nonzero().flatten().tolist() for name, mask in choices.items()}
        yield Round(server, row, scores or None, ledger, cases)


def reasons_for_row(failures: Mapping[str, str], absences: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the fields of rounds.jsonl that say why clients were missing, in training and evaluation, if any were."""
    told = {"failures": failures, "failures_evaluation": absences}
    return {key: {name: short_reason(text) for name, text in found.items()} for key, found in told.items() if found}


def short_reason(text: str) -> str:
    """Return a reason from outside as one short line of printable text, without paths, IDs and hashes."""
    return one_line(_PATH.sub("…", _KEY.sub("…", one_line(text, 10 * _LONGEST_REASON))), _LONGEST_REASON)


def is_evaluated(number: int, experiment: Experiment) -> bool:
    """Return whether this round is evaluated: every `eval_every` rounds, and always the last."""
    every = experiment.run.eval_every
    return number == experiment.train.rounds or bool(every and number % every == 0)


def choose(plan: Plan, clients: list[str], experiment: Experiment, number: int) -> list[str]:
    """Return the clients that train in this round."""
    if plan.pooled:
        return [POOLED]
    return clients if plan.trains == "everyone" else sample_cohort(clients, experiment, number)


def sample_cohort(clients: list[str], experiment: Experiment, number: int) -> list[str]:
    """Return the sampled clients of this round."""
    assert experiment.train.cohort is not None
    return sample(clients, experiment.train.cohort, experiment.run.seed, number)


def train_round(
    plan: Plan,
    server: Server,
    transport: Transport,
    experiment: Experiment,
    cohort: list[str],
    number: int,
    ledger: Ledger,
    answers: dict[str, Payload],
) -> tuple[Server, float | None, dict[str, str]]:
    """Dispatch, train, and aggregate the answers as a stream. If too many clients fail, the server stays as it was.

    Also return the clients that failed, each with its reason.
    """
    failures: dict[str, str] = {}
    losses: list[tuple[float, float]] = []
    equal = (experiment.train.weighting or plan.weighting) == "equal"
    messages = {name: for_round(plan.dispatch(server, name), number) for name in cohort}
    updates = Updates(plan, experiment.train.clip_update, server.norms)
    claimed: dict[str, float] = {}
    if not plan.pooled:  # the pooled client is at the server, so nothing is sent
        ledger.down = [message.nbytes for message in messages.values()]

    def reports() -> Iterator[Report]:
        arriving = ledger.awaited("train", transport.exchange("train", messages))
        for name, answer in arriving if plan.pooled else updates.bounded(arriving, messages, ledger):
            if isinstance(answer, Failure):
                log.warning("round %d: client %s %s", number, name, answer.reason)
                failures[name] = answer.reason
                continue
            if not plan.pooled:
                ledger.up.append(answer.nbytes)
            examples = answer.scalars["examples"]
            if CLAIMED in answer.scalars:
                claimed[name] = answer.scalars[CLAIMED]
            if "loss" in answer.scalars:
                losses.append((examples, answer.scalars["loss"]))
                ledger.losses[name] = answer.scalars["loss"]
            if experiment.run.evaluate == "in_round":  # clients are tested with the shared weights that they trained
                answers[name] = Payload(answer.trees)
            elif "choice" in answer.trees:  # copied, because a view would keep the whole answer in memory
                answers[name] = Payload({"choice": {key: t.clone() for key, t in answer.trees["choice"].items()}})
            yield Report(name, 1.0 if equal else examples, answer)

    stream = reports()
    first = next(stream, None)
    if first is not None:
        try:
            server = plan.aggregate(server, itertools.chain([first], stream))
        except TooFewReportsError as problem:
            log.warning("round %d: %s: the server keeps its weights", number, problem)
            ledger.noted[NOT_AGGREGATED] = str(problem)
    with ledger.phase("updates"):
        ledger.noted |= updates.row()
    if claimed:
        ledger.noted[CLAIMED] = claimed
    examples = sum(count for count, _ in losses)
    loss = sum(count * value for count, value in losses) / examples if examples else None
    return replace(server, round=number, norms=updates.lengths()), loss, failures


def evaluate(
    plan: Plan,
    servers: Mapping[str, Server],
    transport: Transport,
    number: int,
    ledger: Ledger,
    answers: Mapping[str, Payload] = {},
    absences: dict[str, str] | None = None,
    cases: dict[str, Cases] | None = None,
) -> dict[str, dict[str, float]]:
    """Score all clients' views, sampled or not; those in `answers` get back what they reported, not the server's.

    The clients that were not evaluated are added to `absences`, each with its reason. What clients on this machine
    tell about their test images one by one is added to `cases`.
    """
    messages = {name: for_round(plan.dispatch(server, name), number) for name, server in servers.items()}
    for name, reported in answers.items():
        trees = {key: reported.trees.get(key, group) for key, group in messages[name].trees.items()}
        messages[name] = replace(messages[name], trees=trees)
    task: Task = "evaluate"
    scores = {}
    for name, answer in transport.exchange(task, messages):
        if isinstance(answer, Failure):
            log.warning("round %d: client %s was not evaluated: %s", number, name, answer.reason)
            if absences is not None:
                absences[name] = answer.reason
            continue
        if not answer.scalars:
            if absences is not None:
                absences[name] = WITHHELD
            continue
        scores[name] = dict(answer.scalars)
        if cases is not None and CASES in answer.trees:
            cases[name] = Cases.from_tree(answer.trees[CASES])
    if not plan.pooled:
        ledger.evaluation = sum(message.nbytes for message in messages.values())
    return scores


def for_round(payload: Payload, number: int) -> Payload:
    """Return the payload with its round number added."""
    return replace(payload, scalars={**payload.scalars, "round": number})


def view_names(scores: Scores) -> list[str]:
    """Return the views for which all clients were scored, in order of appearance."""
    keys = [key for key in next(iter(scores.values())) if key.endswith("_balanced_accuracy")]
    return [key.removesuffix("_balanced_accuracy") for key in keys if all(key in score for score in scores.values())]


def _server_view(score: Mapping[str, float]) -> dict[str, float | None]:
    """Return the view of one model on one test set, where there are no clients to compute a deviation over."""
    spread = dict.fromkeys(("std", "worst_decile", "best_decile"))
    return {
        "mean": score["accuracy"],
        "micro": score["accuracy"],
        **spread,
        **{m: score[m] for m in (*METRICS[1:], AUROC) if m in score},
        **_label_areas(AUROC, {"server": score}),
    }


def summarize(scores: Scores, test_samples: Mapping[str, int]) -> dict[str, dict[str, float | None]]:
    """Summarize every view over all clients."""
    sizes = [test_samples[name] for name in scores]
    views: dict[str, dict[str, float | None]] = {}
    for view in view_names(scores):
        columns = {m: [score[f"{view}_{m}"] for score in scores.values()] for m in METRICS}
        views[view] = {**over_clients(columns["accuracy"], sizes)}
        for metric in METRICS[1:]:
            views[view][metric] = sum(columns[metric]) / len(sizes)
        val = [score[f"{view}_val_accuracy"] for score in scores.values() if f"{view}_val_accuracy" in score]
        if val:
            views[view]["val"] = sum(val) / len(val)
        areas = [score[f"{view}_{AUROC}"] for score in scores.values() if f"{view}_{AUROC}" in score]
        if areas:  # averaged over the clients for which it is defined
            views[view] |= {AUROC: sum(areas) / len(areas), f"{AUROC}_clients": len(areas)}
        views[view] |= _label_areas(f"{view}_{AUROC}", scores)
        ranked = [100 * score[f"{view}_val_{AUROC}"] for score in scores.values() if f"{view}_val_{AUROC}" in score]
        if ranked:
            views[view]["val"] = sum(ranked) / len(ranked)
    return views


def _label_areas(start: str, scores: Scores) -> dict[str, Any]:
    """Return the AUROC of several labels: of each, the mean over the clients that can test it, and their mean.

    So all methods are compared over the same labels, however many of them a client has.
    """
    by_label: dict[str, list[float]] = {}
    for score in scores.values():
        for key, value in score.items():
            label = key.removeprefix(f"{start}_")
            if label != key and label.isdecimal():
                by_label.setdefault(label, []).append(value)
    means = {label: sum(own) / len(own) for label, own in sorted(by_label.items(), key=lambda item: int(item[0]))}
    return {AUROC: sum(means.values()) / len(means), f"{AUROC}_labels": means} if means else {}
