"""The cost of a method before anything is trained, measured on the real payloads rather than computed by a formula."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedvit.core.finetune import finetune_epochs
from fedvit.core.payload import Payload
from fedvit.core.settings import Experiment
from fedvit.engine.net import Net, make_net, window_of
from fedvit.engine.split_loop import Loopback, one_step
from fedvit.models.build import macs_per_example
from fedvit.models.cuts import Parts, Where
from fedvit.split.client import ClientSide
from fedvit.split.plan import SplitPlan
from fedvit.split.server import ServerSide


def cost(experiment: Experiment, classes: int) -> dict[str, Any]:
    """Return parameters by role, bytes per sampled client and round, multiply-adds, and what a client must keep.

    Where clients differ in width, the numbers are those of a client with the first of the method's `rates`.
    """
    net = make_net(experiment, classes, torch.device("cpu"))
    if isinstance(net.plan, SplitPlan):
        return _split_cost(net, experiment)
    plan = net.plan
    down = Payload() if plan.pooled else plan.dispatch(net.server([]), "0")
    net = net.at(window_of(down))
    return {
        "params": net.params(),
        "nbytes": {"down": down.nbytes, "up": _up_nbytes(net)},
        "macs_per_example": macs_per_example(net.module, net.inputs.size),
        "memory_nbytes": net.memory_nbytes,
        "training_passes": plan.passes(experiment.train.epochs),
        "finetune_epochs": finetune_epochs(plan, experiment.train.epochs),
        "probe_passes": 0,
        **_variations(experiment, classes, net),
        **plan.costs(net.bare_client()),
    }


def _variations(experiment: Experiment, classes: int, net: Net) -> dict[str, Any]:
    """Return the costs that differ from those of the first round, or of a client with the first rate."""
    found: dict[str, Any] = {}
    rates = sorted({rate.rpartition("=")[2] for rate in str(experiment.method.get("rates", "")).split(",") if rate})
    if len(rates) > 1:
        each = [experiment.model_copy(update={"method": {**experiment.method, "rates": rate}}) for rate in rates]
        found["by_rate"] = {rate: cost(one, classes) for rate, one in zip(rates, each, strict=True)}
    elif not net.federated.pooled and net.window.rate == 1:
        last = experiment.train.rounds
        late = net.federated.dispatch(replace(net.server([]), round=last - 1), "0").nbytes
        if late != net.federated.dispatch(net.server([]), "0").nbytes:
            found["nbytes_last_round"] = {"down": late, "up": _up_nbytes(net, last)}
    return found


def _split_cost(net: Net, experiment: Experiment) -> dict[str, Any]:
    """Return the same for split learning, where bytes grow with the steps: they are those of one step of one client."""
    costs = split_costs(net, experiment.train.batch)
    return {
        "params": net.params(),
        "nbytes": costs["step_nbytes"],
        "macs_per_example": macs_per_example(net.module, net.inputs.size),
        "memory_nbytes": net.memory_nbytes,
        "training_passes": 1.0,
        "finetune_epochs": 0,
        "probe_passes": 0,
        **costs,
    }


def split_costs(net: Net, batch: int) -> dict[str, Any]:
    """Return what each side computes and keeps, and the bytes of a step, measured by taking one on black images."""
    if not isinstance(net.plan, SplitPlan):
        return {}
    split = net.plan
    parts = Parts(net.module, split.cut)
    x = torch.zeros(1, 3, net.inputs.size, net.inputs.size, device=next(net.module.parameters()).device)
    net.module.eval()
    macs = {}
    with torch.no_grad():
        for part in get_args(Where):
            with FlopCounterMode(display=False) as counter:
                x = parts.run(part, {}, x, depth=split.deepest(parts))
            macs[part] = int(counter.get_total_flops()) // 2
    weights = dict(net.module.named_parameters())
    own = [weights[name] for name in split.cut.names(net.module, "client_head", "client_tail") if name in weights]
    return {
        "client_macs_per_example": macs["client_head"] + macs["client_tail"],
        "server_macs_per_example": macs["body"],
        "client_weight_nbytes": sum(w.numel() * w.element_size() for w in own),
        "step_nbytes": step_nbytes(net, split, parts, batch),
    }


def step_nbytes(net: Net, split: SplitPlan, parts: Parts, batch: int) -> dict[str, int]:
    """Return the tensor bytes of one client's step by direction, without the start of a round and averages.

    Everything that is sent in a step grows with the batch, so measuring one image is enough.
    """
    client = net.bare_client()
    client.settings = replace(client.settings, batch=1, device=next(net.module.parameters()).device)
    size, everything = net.inputs.size, torch.arange(2)
    images = torch.zeros(2, size, size, 3, dtype=torch.uint8)
    client.data = replace(client.data, images=images, labels=torch.zeros_like(everything), train=everything)
    side = ServerSide(split, parts, net.shared, {}, 1, 0, 1.0, client.settings.device, autocast=nullcontext)
    channel = Loopback(side)
    one_step(ClientSide(split, parts, client).requests(average=False), channel)  # the first of two steps
    return {"down": batch * channel.down["0"], "up": batch * channel.up["0"]}


def _up_nbytes(net: Net, round_: int = 1) -> int:
    """Return the size of the report that a client would send after training nothing."""
    plan = net.federated
    if plan.pooled:
        return 0
    return plan.report(replace(net.bare_client(), round=round_), net.initial, net.initial).nbytes
