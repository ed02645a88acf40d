"""What a method will cost before anything is trained: the numbers of the real payloads, not of a formula."""

from typing import Any

import torch

from fedvit.models.classifier import macs_per_example
from fedvit.payload import Payload
from fedvit.plan import Plan
from fedvit.settings import Experiment
from fedvit.worker import Net, make_net, window_of


def cost(experiment: Experiment, classes: int) -> dict[str, Any]:
    """Parameters by role, bytes of one sampled client in one round, multiply-adds, and what a client must keep.

    Where clients differ in width these are the numbers of one with the first of the method's `rates`.
    """
    net = make_net(experiment, classes, torch.device("cpu"))
    down = Payload() if net.plan.pooled else net.plan.dispatch(net.server([]), "0")
    net = net.at(window_of(down))
    return {
        "params": net.params(),
        "nbytes": {"down": down.nbytes, "up": up_nbytes(net)},
        "macs_per_example": macs_per_example(net.module, net.inputs.size),
        "memory_nbytes": net.memory_nbytes,
        "training_passes": net.plan.passes,
        "probe_passes": len(net.plan.candidates(net.module, net.roles)),
    }


def up_nbytes(net: Net) -> int:
    """The size of the report that a client would send after training nothing."""
    plan: Plan = net.plan
    if plan.pooled:
        return 0
    return plan.report(net.bare_client(), net.initial, net.initial).nbytes
