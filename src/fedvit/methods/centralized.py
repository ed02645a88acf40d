"""Centralized: one owner of all training data; the upper bound that federation cannot ask for.

Departs from the paper: no single paper. A round is `epochs` passes over the pooled data, so with full participation
it sees as many images as FedAvg; no weights cross, the data itself would have to.
"""

from fedvit.core.plan import Plan


def plan() -> Plan:
    return Plan(
        name="centralized",
        trains="pooled",
        not_between_sites="pools all images in one place, which sites cannot: choose another method",
    )
