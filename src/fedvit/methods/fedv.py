"""FedV (split learning on a pre-trained ViT): the body stays at the server, each client has a small head and tail.

During a round the body is fixed and clients train head and tail through it; after the round it takes one step along the
mean gradient of their last batches. Every `fedround` rounds heads and tails are averaged.
Departs from the paper: cut=B puts tokens and positions with the client and the final norm in the tail, which the paper
leaves open; cut=A is FESTA's. init=pretrained keeps the pre-trained head (the paper draws it at random: init=random).
Heads and tails are averaged after rounds 1, 21, 41, ... (the paper counts from 0), and all clients get the average
(receives=sampled: only those of that round). Only the class token's row of the body's output crosses.
"""

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from fedvit.core.plan import Plan
from fedvit.core.roles import FROZEN, PERSONAL, SHARED, everything, under
from fedvit.core.settings import NotNegative, Whole
from fedvit.core.tree import Tree
from fedvit.models.cuts import Cut
from fedvit.models.plugins.specs import Plugin
from fedvit.split.plan import SplitPlan, Wire

Receives = Literal["all", "sampled"]
Init = Literal["pretrained", "random"]
Block = Annotated[int, Field(ge=0)]


def split_plan(name: str, split: SplitPlan, build: tuple[Plugin, ...] = ()) -> Plan:
    """A plan whose head and tail are the clients' own and whose body is the server's."""
    own = split.cut.selector("head", "tail")
    unused = under("cls_token", "pos_embed", "reg_token")
    return Plan(
        name=name,
        split=split,
        build=build,
        roles=(*(((unused, FROZEN),) if split.cut.kind == "vibs" else ()), (own, PERSONAL), (everything, SHARED)),
        weighting="equal",
        remembers=lambda module, trainable: {"Adam": both_moments(split, module, trainable)},
    )


def both_moments(split: SplitPlan, module: nn.Module, trainable: Tree) -> Tree:
    """What Adam keeps of a client's weights between rounds: two numbers each, and a count."""
    names = [name for name in split.cut.names(module, "head", "tail") if name in trainable]
    count = trainable[names[0]].new_zeros(1) if names else None
    moments = {f"{kind} {name}": trainable[name] for kind in ("first", "second") for name in names}
    return {**moments, **({f"count {name}": count for name in names} if count is not None else {})}


def plan(
    server_lr: NotNegative = 0.001,
    cut: Literal["A", "B"] = "B",
    fedround: Whole = 20,
    receives: Receives = "all",
    init: Init = "pretrained",
    wire: Wire = "fp32",
) -> Plan:
    split = SplitPlan(
        cut=Cut(cut), server_lr=server_lr, average_every=fedround, receives=receives, init=init, wire=wire
    )
    return split_plan("fedv", split)
