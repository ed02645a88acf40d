"""Whether a plan can combine its reports by `train.aggregate`, which is found out before anything is trained."""

from collections.abc import Sequence
from dataclasses import replace

from fedvit.core import tree
from fedvit.core.errors import UserError
from fedvit.core.plan import Plan, Report
from fedvit.core.robust import Weighted
from fedvit.core.settings import Experiment
from fedvit.core.tree import Tree
from fedvit.engine.net import Net


def check_aggregate(experiment: Experiment, net: Net, clients: Sequence[str]) -> None:
    """Refuse, by name, a method with which a robust aggregate would not protect, or not everything.

    The plan combines the reports of clients that trained nothing, and everything in them has to come by `combine`.
    """
    aggregate = experiment.train.aggregate
    if aggregate == "mean" or not isinstance(net.plan, Plan):
        return
    if net.plan.pooled or not net.roles.shared:
        raise UserError(f"{experiment.label} sends nothing to combine: leave train.aggregate={aggregate} out")
    alone = uncombined(net, clients)
    if alone:
        raise UserError(
            f"{experiment.label} does not combine the {' and the '.join(alone)} of its clients by a mean of whole "
            f"tensors, so train.aggregate={aggregate} would not protect it: leave it out, or choose another method"
        )


def uncombined(net: Net, clients: Sequence[str]) -> list[str]:
    """Return the groups of a report whose numbers the plan uses in another way than by `Server.combine`."""
    combined: set[int] = set()

    def combine(weighted: Weighted) -> Tree:
        kept = list(weighted)
        combined.update(tensor.data_ptr() for _, one in kept for tensor in one.values())
        return tree.mean(kept)

    server = replace(net.server(clients), combine=combine)
    reports = [
        Report(name, 1.0, net.bare_report(net.federated.dispatch(server, name), 1)) for name in server.clients[:2]
    ]
    net.federated.aggregate(server, iter(reports))
    return [
        group
        for group, members in reports[0].payload.trees.items()
        if any(t.is_floating_point() and t.numel() and t.data_ptr() not in combined for t in members.values())
    ]
