"""FedRolex (Alam et al. 2022): HeteroFL with a window that moves one unit per round, so that every weight is trained.

The options are those of heterofl; `clip` bounds the norm of a client's gradient.
Departs from the paper: where heterofl does. The window begins at 0 in the first round; in a ViT, it moves inside each
head and, from the same start, along the residual stream and the hidden units of the MLPs.
"""

from fedvit.core.plan import Plan
from fedvit.core.settings import Numbers, Positive
from fedvit.methods.heterofl import narrow_clients
from fedvit.models.width import Windows


def plan(rates: Numbers = "1,0.5", masking: bool = True, scaler: bool = True, clip: Positive = 1.0) -> Plan:
    windows = Windows.parse(rates, rolling=True)
    return narrow_clients("fedrolex", windows, masking=masking, scaler=scaler, clip=clip)
