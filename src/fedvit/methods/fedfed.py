"""FedFed (Yang et al. 2023): clients share noisy versions of the image parts that decide the class, then run FedAvg.

Stage 1 takes `distill_rounds` rounds. The cohort trains a small autoencoder, the splitter, with an auxiliary copy of
the classifier by federated averaging. The splitter's output is the robust part of an image; the rest, the residual, is
trained to suffice for the label.
In stage 2, every client uploads its residuals once, when it is first sampled, at two levels of Gaussian noise and with
labels. The server sends each client those that it lacks, and the client keeps them. The client then trains as in
FedAvg, with as many residuals of all owners, drawn evenly over the classes, added to each batch at both levels.

Privacy: residuals of single training images, and their labels, leave the client by design, and every client gets them.
The noise is fixed, no bound on what the residuals reveal is computed, and a residual may show its image. Do not use
this method where images or labels must not leave their owner. Images are sent at two noise levels, at the model's input
size in float16; every client stores everybody's, and messages for evaluation carry them too. `fedvit cost` shows a
round of stage 1 and the bytes of one image's residuals, but no memory, because it does not know how many images exist.

Departs from the paper: stage 1 takes 4 rounds, not 15, to suit short runs, and its weight on reconstruction falls with
the number of epochs trained before the round; the divergence of the code is per pixel and color; the splitter has two
convolutions; residuals are of normalized images, without augmentation, from the mean code. The classifier of stage 2
starts from the initial weights, as all do; until then the views show it untrained, so a run must be longer than
stage 1.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.optim import AdamW

from fedvit.core import tree
from fedvit.core.batches import image_batches
from fedvit.core.client import Client, Predictor
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report
from fedvit.core.server import Server
from fedvit.core.settings import Count, NotNegative
from fedvit.core.training import Loss, cross_entropy, descend
from fedvit.core.tree import Tree
from fedvit.models.plugins.modules import ImageSplitter
from fedvit.models.plugins.specs import Splitter

LEVELS = ("mild", "strong")


def parts(weights: Tree) -> tuple[Tree, Tree]:
    """Separate the splitter's weights from the classifier's."""
    splitter = {name: tensor for name, tensor in weights.items() if name.split(".")[0] == Splitter.kind}
    return splitter, {name: tensor for name, tensor in weights.items() if name not in splitter}


def _splitter_of(client: Client) -> ImageSplitter:
    return client.module.splitter  # type: ignore[return-value]


def _send(server: Server, client: str, distill_rounds: int) -> Payload:
    """Send splitter and auxiliary classifier in stage 1; in stage 2, send the classifier and what the client lacks."""
    splitter, classifier = parts(server.shared)
    if server.round < distill_rounds:
        return Payload({"shared": splitter, "auxiliary": server.memory["auxiliary"]})
    added = server.memory.get("added", {})
    since = server.memory.get("received", {}).get(client, torch.tensor(0))
    new = {owner for owner, round_ in added.items() if owner != client and round_ > since}
    features = {n: t for n, t in server.memory.get("features", {}).items() if n.rpartition(":")[0] in new}
    return Payload({"shared": classifier if client in added else server.shared, "features": features})


def _receive(client: Client, down: Payload) -> Tree:
    if "auxiliary" in down.trees:
        return tree.overlay(down.trees["shared"], down.trees["auxiliary"])
    client.memory["features"] = tree.overlay(_known(client), down.trees.get("features", {}))
    return down.trees["shared"]


def _known(client: Client) -> Tree:
    kept = client.memory.get("features", {})
    assert isinstance(kept, dict)
    return kept


def splitting_loss(client: Client, mild: float, strong: float) -> Loss:
    """Make the loss of stage 1: reconstruct, let the noisy residual suffice for the label, and keep the code small."""
    epochs = (client.round - 1) * client.settings.epochs
    emphasis = 10.0 if epochs < 10 else 5.0 if epochs < 20 else 1.0

    def loss(model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        robust, mean, log_variance = _splitter_of(client)(x)
        noisy = [x - robust + level * torch.randn_like(x) for level in (mild, strong)]
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum() / x.numel()
        guess = cross_entropy(model, torch.cat(noisy), torch.cat([y, y]))
        whole = cross_entropy(model, x, y)
        value: Tensor = emphasis * 5.0 * F.mse_loss(robust, x) + 2.0 * guess + 0.4 * whole + 0.005 * divergence
        return value

    return loss


@torch.no_grad()
def residuals(client: Client, weights: Tree, mild: float, strong: float) -> Tree:
    """Compute what this client uploads: its training images minus their robust part, with noise, and the labels."""
    data, device = client.data, client.settings.device
    splitter = _splitter_of(client).eval()
    placed = {name.partition(".")[2]: tensor.to(device) for name, tensor in weights.items()}
    rest = [
        (x - functional_call(splitter, placed, (x,))[0]).cpu()
        for x, _ in image_batches(data, data.train, client.settings.batch, client.inputs, device)
    ]
    whole, generator = torch.cat(rest), client.rng("features")
    noise = [level * torch.randn(whole.shape, generator=generator) for level in (mild, strong)]
    labels = data.labels[data.train].to(torch.int16)
    return {**{name: (whole + n).half() for name, n in zip(LEVELS, noise, strict=True)}, "labels": labels}


def balanced(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw indices so that all classes that are present are equally likely."""
    weights = 1 / torch.bincount(labels)[labels]
    return torch.multinomial(weights, count, replacement=True, generator=generator)


def _with_features(client: Client) -> Loss:
    """Make the cross-entropy of a batch together with as many residuals, at both levels."""
    features = _known(client)
    owners = sorted({name.rpartition(":")[0] for name in features})  # arrival order would not survive a resume
    joined = {kind: torch.cat([features[f"{owner}:{kind}"] for owner in owners]) for kind in (*LEVELS, "labels")}
    labels, generator = joined["labels"].long(), client.rng("balanced")

    def loss(model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        chosen = balanced(labels, len(y), generator)
        more = [joined[level][chosen].to(x) for level in LEVELS]
        classes = labels[chosen].to(y)
        return cross_entropy(model, torch.cat([x, *more]), torch.cat([y, classes, classes]))

    return loss


def train(client: Client, start: Tree, distill_rounds: int, mild: float, strong: float) -> Tree:
    if client.round <= distill_rounds:
        optimizer = lambda named: AdamW(list(named.values()), lr=1e-3)  # noqa: E731
        return descend(client, start, loss=splitting_loss(client, mild, strong), optimizer=optimizer)
    splitter, classifier = parts(start)
    if splitter:  # the server sends it to clients that have not uploaded yet
        own = {f"{client.id}:{kind}": t for kind, t in residuals(client, splitter, mild, strong).items()}
        client.memory["features"] = tree.overlay(_known(client), own)
    return descend(client, classifier, loss=_with_features(client), only=classifier)


def report(client: Client, start: Tree, end: Tree, distill_rounds: int) -> Payload:
    splitter, classifier = parts(end)
    if client.round <= distill_rounds:
        return Payload({"shared": splitter, "auxiliary": classifier})
    if not parts(start)[0]:
        return Payload({"shared": classifier})
    kept = _known(client)
    own = {kind: kept[f"{client.id}:{kind}"] for kind in (*LEVELS, "labels") if f"{client.id}:{kind}" in kept}
    return Payload({"shared": classifier, "features": own})


def _aggregate(server: Server, reports: Iterable[Report], distill_rounds: int) -> Server:
    """Take FedAvg's mean of what this stage trains, and note who has sent and received which residuals."""
    memory = {kind: dict(server.memory.get(kind, {})) for kind in ("features", "added", "received")}

    def noted() -> Iterator[tuple[float, Tree]]:
        for client, weight, payload in reports:
            trees = payload.trees
            for kind, tensor in trees.get("features", {}).items():
                memory["features"][f"{client}:{kind}"] = tensor.clone()  # not a view of the whole answer
                memory["added"][client] = torch.tensor(server.round + 1)
            memory["received"][client] = torch.tensor(server.round)
            yield weight, tree.overlay(trees["shared"], trees.get("auxiliary", {}))

    mean = tree.mean(noted())
    if server.round >= distill_rounds:
        return replace(server, shared=tree.overlay(server.shared, mean), memory=memory)
    splitter, auxiliary = parts(mean)
    return replace(server, shared=tree.overlay(server.shared, splitter), memory={"auxiliary": auxiliary})


def _nbytes_per_image(client: Client) -> int:
    """Count the bytes made of one training image, which go up once, and down once to every other client."""
    size = client.inputs.size
    image, label = torch.zeros(1, size, size, 3, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    client.data = replace(client.data, images=image, labels=label, train=label)
    return tree.nbytes(residuals(client, parts(client.initial)[0], mild=0.0, strong=0.0))


def plan(distill_rounds: Count = 4, mild: NotNegative = 0.15, strong: NotNegative = 0.25) -> Plan:
    return Plan(
        name="fedfed",
        build=(Splitter(),),
        start=lambda module, shared: {"auxiliary": parts(shared)[1]},
        dispatch=partial(_send, distill_rounds=distill_rounds),
        merge=_receive,
        local=partial(train, distill_rounds=distill_rounds, mild=mild, strong=strong),
        report=partial(report, distill_rounds=distill_rounds),
        aggregate=partial(_aggregate, distill_rounds=distill_rounds),
        views=lambda client, down: {
            "personal": tree.overlay(client.initial, {} if "auxiliary" in down.trees else down.trees["shared"])
        },
        not_between_sites="sends residuals of training images, and their labels, to all sites: run it on one machine",
        loss_terms=2,
        passes=lambda epochs: 3.0,
        costs=lambda client: {"nbytes_once_per_image": _nbytes_per_image(client)},
    )
