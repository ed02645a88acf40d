"""FedBABU (Oh et al. 2022): only the body is trained, under a random head that stays fixed.

For evaluation, each client fine-tunes the head, is tested, and then discards it.
Departs from the paper: fine-tuning takes `steps` mini-batches (in FedPerfix's text: one, and only the head);
finetune=all trains the whole network, as FedPerfix's code does. FedBABU's authors fine-tune everything for 5 epochs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, overwrite
from fedvit.core.roles import FROZEN, SHARED, everything
from fedvit.core.settings import Count
from fedvit.core.training import descend
from fedvit.core.tree import Tree
from fedvit.models.groups import head


def _after_finetuning(
    client: Client, down: Payload, finetune: Literal["head", "all"], steps: int
) -> Mapping[str, Tree]:
    heads = head.match(client.module)
    start = tree.overlay(overwrite(client, down), tree.pick(client.frozen, sorted(heads)))
    only = heads if finetune == "head" else start.keys()
    epochs = -(-steps * client.settings.batch // len(client.data.train))  # enough epochs for this many batches
    return {"personal": descend(client, start, only=only, epochs=epochs, steps=steps, tag="finetune")}


def plan(finetune: Literal["head", "all"] = "head", steps: Count = 1) -> Plan:
    views = partial(_after_finetuning, finetune=finetune, steps=steps)
    return Plan(name="fedbabu", roles=((head, FROZEN), (everything, SHARED)), views=views)
