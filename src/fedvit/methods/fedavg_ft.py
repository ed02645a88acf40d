"""FedAvg with fine-tuning: before its test, each client trains FedAvg's model for some epochs and then discards it.

It is `fedavg` with `run.finetune`, which does the same to any method.
Departs from the paper: there is no single paper; `epochs` defaults to the run's local epochs.
"""

from dataclasses import replace

from fedvit.core.finetune import fine_tuned
from fedvit.core.plan import Plan
from fedvit.core.settings import Count
from fedvit.methods import fedavg


def plan(epochs: Count | None = None) -> Plan:
    return replace(fine_tuned(fedavg.plan(), epochs), name="fedavg_ft")
