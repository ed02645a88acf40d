"""FedAvg with fine-tuning: before its test, each client trains FedAvg's model for some epochs and then discards it.

Departs from the paper: there is no single paper; `epochs` defaults to the run's local epochs.
"""

from collections.abc import Mapping
from functools import partial

from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, overwrite
from fedvit.core.settings import Count
from fedvit.core.training import descend
from fedvit.core.tree import Tree


def _after_epochs(client: Client, down: Payload, epochs: int | None) -> Mapping[str, Tree]:
    return {"personal": descend(client, overwrite(client, down), epochs=epochs, tag="finetune")}


def plan(epochs: Count | None = None) -> Plan:
    return Plan(name="fedavg_ft", views=partial(_after_epochs, epochs=epochs))
