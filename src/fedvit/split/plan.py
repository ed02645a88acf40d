"""A split-learning method as data: where the model is cut, and when and how the body is trained."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn

from fedvit.core.plan import Plugin
from fedvit.core.roles import FROZEN, PERSONAL, SHARED, Rules, everything, under
from fedvit.core.tree import Tree
from fedvit.models.cuts import Cut, Parts

Wire = Literal["fp32", "bf16", "int8"]
Average = Literal["both", "head", "tail", "none"]
BodyRule = Literal["round", "step", "copies", "turns"]


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """A split-learning method. The defaults are FedV's.

    Each client has its own head and tail of the model, and the server has the body; they exchange activations and
    gradients.
    """

    name: str
    build: tuple[Plugin, ...] = ()
    weighting: ClassVar[Literal["equal"]] = "equal"
    one_label_only: ClassVar[str] = "sends class numbers to the server, which computes the loss"  # if labels leave
    cut: Cut = field(default_factory=Cut)
    # When the body is trained: "round", once per round from each client's last batch; "step", at every step from the
    # mean over clients; "copies", at every step in one copy per client, and the copies are averaged after the round;
    # "turns", at every step, one client after another.
    body: BodyRule = "round"
    gradient: Literal["exact", "spsa"] = "exact"
    epsilon: float = 1e-4
    draws: int = 1
    black_box: bool = False  # no gradient passes through the body, so the head learns by SPSA as well
    client_head_lr: float | None = None  # 0: the head is frozen; None: the rate of the tail, train.lr
    server_lr: float | None = None  # None: the clients' learning rate
    server_decay: float = 1.0  # the factor of the body's rate after every `decay_every` rounds
    decay_every: int = 100
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    average_every: int = 20  # rounds between averages of the clients' parts; 0: never
    average: Average = "both"  # which of the parts
    perturb: float = 0.0  # noise on a client's parts before they are averaged, relative to each tensor's own size
    receives: Literal["all", "sampled"] = "all"
    init: Literal["pretrained", "random"] = "pretrained"  # of the clients' parts
    wire: Wire = "fp32"

    @property
    def roles(self) -> Rules:
        own = self.cut.selector("client_head", "client_tail")
        unused = under("cls_token", "pos_embed", "reg_token")
        still = self.cut.selector("client_head")
        return (
            *(((unused, FROZEN),) if self.cut.kind == "vibs" else ()),
            *(((still, FROZEN),) if self.client_head_lr == 0 else ()),
            (own, PERSONAL),
            (everything, SHARED),
        )

    def averaged(self, names: Iterable[str]) -> list[str]:
        """Return those of a client's own weights that are averaged with the other clients'."""
        part = {"head": "client_head", "tail": "client_tail"}.get(self.average)
        if self.average == "none" or not self.average_every:
            return []
        return [name for name in names if part is None or self.cut.part_of(name) == part]

    def remembers(self, module: nn.Module, trainable: Tree) -> Mapping[str, Tree]:
        """Return what Adam keeps for a client between rounds: two numbers per weight, and one step count per tensor."""
        names = [name for name in self.cut.names(module, "client_head", "client_tail") if name in trainable]
        count = trainable[names[0]].new_zeros(1) if names else None
        moments = {f"{kind} {name}": trainable[name] for kind in ("first", "second") for name in names}
        return {"Adam": {**moments, **({f"count {name}": count for name in names} if count is not None else {})}}

    def deepest(self, parts: Parts) -> int | None:
        """Return the largest depth of a body whose depth varies, in blocks; None if the depth is fixed."""
        return (self.cut.block or max(1, len(parts.model.blocks) // 2)) if self.cut.kind == "vibs" else None

    @property
    def labels_leave(self) -> bool:
        """Whether clients send their labels, because the classifier is at the server."""
        return self.cut.kind == "after"

    @property
    def tail_suffices(self) -> bool:
        """Whether a head that starts from pre-trained weights is best left alone, unless a rate is given for it."""
        return self.cut.kind in ("A", "B") and self.init == "pretrained"

    @property
    def lockstep(self) -> bool:
        """Whether clients must wait for each other at every step."""
        return self.body == "step"


def newer_average(split: SplitPlan, memory: Mapping[str, Tree], updated: float) -> Tree:
    """Return the server's mean of the clients' parts for a client that last trained its own in round `updated`.

    The result is empty if the server has no mean that is new to this client.
    """
    newer = split.receives == "all" and "averaged" in memory and int(memory["averaged"]["round"]) >= updated
    return memory["average"] if newer else {}
