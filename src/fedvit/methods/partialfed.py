"""PartialFed-Fix (Sun et al. 2021): everything is sent and averaged, but a client adopts only part of it.

Departs from the paper: written from its abstract and two summaries. A client keeps the normalization layers and the
classifier (`keep`, layer groups) of its model after its last training. The adaptive variant, whose policy could not be
verified, is not implemented.
"""

from functools import partial

from torch import nn

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, overwrite
from fedvit.core.roles import Selector
from fedvit.core.training import descend
from fedvit.core.tree import Tree
from fedvit.models.groups import groups


def _load_part(client: Client, down: Payload) -> Tree:
    return tree.overlay(overwrite(client, down), client.recall("kept", {}))


def _train_and_keep(client: Client, start: Tree, keep: Selector) -> Tree:
    end = descend(client, start)
    client.memory["kept"] = _kept_part(client.module, end, keep)
    return end


def _kept_part(module: nn.Module, weights: Tree, keep: Selector) -> Tree:
    names = keep.names(module)
    return {name: tensor for name, tensor in weights.items() if name in names}


def plan(keep: str = "norm,head") -> Plan:
    own = groups(keep)
    return Plan(
        name="partialfed",
        merge=_load_part,
        local=partial(_train_and_keep, keep=own),
        views=lambda client, down: {"personal": _load_part(client, down)},
        remembers=lambda module, trainable: {"kept": _kept_part(module, trainable, own)},
    )
