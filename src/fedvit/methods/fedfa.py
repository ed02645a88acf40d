"""FedFA (Zhou and Konukoglu 2023): FedAvg on features whose channel statistics are redrawn, most where clients differ.

In training, after each stage and with probability `prob`, an image's channel means and deviations are redrawn around
their own values with (1 + gamma) times the variance over the batch. gamma is large in channels whose moving averages
vary between clients: clients report these averages, and the server returns their variance, per channel.

Departs from the paper: on a ViT, the stages are quarters of the blocks, and statistics are taken over tokens. The
authors' code takes one variance over clients and channels; here it is per channel, which we believe to be the paper's
version without having read it there, over the clients that reported in the last round. Each stage adds two numbers per
channel to either direction, averages up and variances down; the paper may count four one way. Averages begin with the
client's first batch. Training before a test (of clients that never took part) is plain.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report, average, overwrite, report_shared
from fedvit.core.server import Server
from fedvit.core.settings import Fraction, Share
from fedvit.core.training import descend
from fedvit.core.tree import Tree
from fedvit.models.plugins.modules import StatisticNoise
from fedvit.models.plugins.specs import FeatureNoise


def layers(module: nn.Module) -> dict[str, StatisticNoise]:
    return {name: part for name, part in module.named_modules() if isinstance(part, StatisticNoise)}


def _nothing_seen(module: nn.Module) -> Tree:
    return {name: torch.zeros(2, layer.channels) for name, layer in layers(module).items()}


def _send_spread(server: Server, client: str) -> Payload:
    return Payload({"shared": server.shared, "spread": server.memory["spread"]})


def _hand_spread_over(client: Client, down: Payload) -> Tree:
    client.scratch["spread"] = down.trees["spread"]
    return overwrite(client, down)


def _train_augmented(client: Client, start: Tree) -> Tree:
    parts, device = layers(client.module), client.settings.device
    spread, seen = client.scratch["spread"], client.memory.get("statistics", {})
    assert isinstance(seen, dict)
    for name, layer in parts.items():
        layer.spread = spread[name].to(device)
        layer.seen = seen[name].to(device) if name in seen else None
    try:
        end = descend(client, start)
        client.memory["statistics"] = {name: x.seen.cpu() for name, x in parts.items() if x.seen is not None}
    finally:
        for layer in parts.values():
            layer.spread = layer.seen = None
    return end


def _report_statistics(client: Client, start: Tree, end: Tree) -> Payload:
    own = client.memory.get("statistics") or _nothing_seen(client.module)
    assert isinstance(own, dict)
    return Payload({**report_shared(client, start, end).trees, "statistics": own})


def _average_and_compare(server: Server, reports: Iterable[Report]) -> Server:
    """Take FedAvg's mean, and the variance of the statistics over this round's clients, which is 0 for only one."""
    statistics: list[Tree] = []

    def noted() -> Iterator[Report]:
        for report in reports:
            own = report.payload.trees["statistics"]
            statistics.append({name: tensor.clone() for name, tensor in own.items()})  # not a view of the whole answer
            yield report

    server = average(server, noted())
    spread = {name: torch.stack([s[name] for s in statistics]).var(0, correction=0) for name in statistics[0]}
    return replace(server, memory={**server.memory, "spread": spread})


def plan(prob: Fraction = 0.5, momentum: Share = 0.99) -> Plan:
    return Plan(
        name="fedfa",
        build=(FeatureNoise(prob, momentum),),
        start=lambda module, shared: {"spread": _nothing_seen(module)},
        dispatch=_send_spread,
        merge=_hand_spread_over,
        local=_train_augmented,
        report=_report_statistics,
        aggregate=_average_and_compare,
        not_private="redraws features from the statistics of a batch, so that no image has a gradient of its own",
        remembers=lambda module, trainable: {"statistics": _nothing_seen(module)},
    )
