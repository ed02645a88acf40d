"""Centralized: one owner trains on all data, which is an upper bound that no federation can have.

Departs from the paper: there is no single paper. A round is `epochs` passes over the pooled data, so with full
participation it sees as many images as FedAvg. No weights are sent; the data itself would have to be.
"""

from fedvit.core.plan import Plan


def plan() -> Plan:
    return Plan(
        name="centralized",
        trains="pooled",
        not_between_sites="pools all images in one place, which sites cannot do: choose another method",
    )
