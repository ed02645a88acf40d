"""FedAvg and fine-tuning: FedAvg's model, trained at each client for some epochs before its test, then forgotten.

Departs from the paper: no single paper; `epochs` defaults to the run's local epochs.
"""

from collections.abc import Mapping
from functools import partial

from fedvit.client import Client, Predictor
from fedvit.payload import Payload
from fedvit.plan import Plan, overwrite
from fedvit.training import descend


def after_epochs(client: Client, down: Payload, epochs: int | None) -> Mapping[str, Predictor]:
    return {"personal": client.net(descend(client, overwrite(client, down), epochs=epochs, tag="finetune"))}


def plan(epochs: int | None = None) -> Plan:
    return Plan(name="fedavg_ft", views=partial(after_epochs, epochs=epochs))
