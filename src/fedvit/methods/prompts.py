"""Personal prompts (FedPerfix, Table 6): the head and the learned tokens before every block are personal.

Departs from the paper: prompts are deep, as in its code (the text could mean shallow ones); 10 tokens, dropout 0.1.
"""

from typing import Literal

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.core.settings import Count, Share
from fedvit.models.groups import group, head
from fedvit.models.plugins.specs import Prompt


def plan(tokens: Count = 10, dropout: Share = 0.1, init: Literal["uniform", "zero"] = "uniform") -> Plan:
    return Plan(
        name="prompts",
        build=(Prompt(tokens=tokens, dropout=dropout, init=init),),
        roles=((group("prompt") | head, PERSONAL), (everything, SHARED)),
    )
