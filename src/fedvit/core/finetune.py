"""Any plan with a local fine-tuning before each client's model is used; nothing of it is kept or sent."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Views
from fedvit.core.training import descend
from fedvit.core.tree import Tree

BEFORE = "before_finetune"  # the view of what a client's model was


def fine_tuned(plan: Plan, epochs: int | None = None) -> Plan:
    """Return the plan whose clients train their model before they use it, by default for the run's local epochs.

    The training is FedAvg's: everything trainable, on the cross-entropy, with a fresh optimizer.
    """
    return replace(plan, views=partial(_trained, views=plan.views, epochs=epochs))


def _trained(client: Client, down: Payload, views: Views, epochs: int | None) -> Mapping[str, Tree]:
    found = views(client, down)
    before = found["personal"]
    return {**found, "personal": descend(client, before, epochs=epochs, tag="finetune"), BEFORE: before}


def is_fine_tuned(plan: Plan) -> bool:
    return isinstance(plan.views, partial) and plan.views.func is _trained


def not_fine_tuned(plan: Plan) -> Plan:
    """Return the plan without the fine-tuning, to look at the rest."""
    return replace(plan, views=plan.views.keywords["views"]) if is_fine_tuned(plan) else plan  # type: ignore[attr-defined]


def finetune_epochs(plan: Plan, epochs: int) -> int:
    """Return the epochs of fine-tuning before each use, in a run with so many local epochs; 0 for most plans."""
    return (plan.views.keywords["epochs"] or epochs) if is_fine_tuned(plan) else 0  # type: ignore[attr-defined]
