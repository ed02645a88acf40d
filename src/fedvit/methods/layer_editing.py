"""Model editing: which layers a model has, what each one changes when another model's takes its place, and the best."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedvit.core import tree
from fedvit.core.batches import Batch, image_batches
from fedvit.core.client import Client
from fedvit.core.errors import UserError
from fedvit.core.roles import state_names
from fedvit.core.training import holding, load_
from fedvit.core.tree import Tree
from fedvit.models.groups import NORMS
from fedvit.models.mlp import Mlp
from fedvit.models.replay import Replay

Rule = Literal["leaves", "norms", "main_norms", "paper", "resnet54"]
Metric = Literal["prediction_list", "te", "loss", "accuracy", "random"]
PROBE_BATCH = 32
STEM = ("conv1", "bn1", "relu", "maxpool", "avgpool")
IN_BLOCK = ("norm1", "attn", "attn.proj", "norm2", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2")


@dataclass(frozen=True)
class Layer:
    """A module and its trainable weights, including float buffers."""

    name: str
    tensors: tuple[str, ...]


def layers_of(module: nn.Module, trainable: Collection[str], rule: Rule = "leaves") -> list[Layer]:
    """List the layers that can be edited, in model order.

    `leaves`: every module below the model itself that owns trainable weights, including the classifier. `norms`: only
    the normalization layers among them, `main_norms`: only those outside a ResNet's shortcuts. `paper`: those that
    PFedEdit's paper counts, `resnet54`: those that its code counts in a ResNet; some of these have no weights, and some
    lie inside others.
    """
    if rule in ("paper", "resnet54"):
        paths = paper_layers(module) if rule == "paper" else resnet54(module)
        named = {path: [n for n in state_names(module) if n.startswith(path + ".")] for path in paths}
        found = [Layer(path, tuple(n for n in names if n in trainable)) for path, names in named.items()]
        if not any(layer.tensors for layer in found):
            count = f"{len(found)} layers that the {'paper' if rule == 'paper' else 'code'} counts"
            raise UserError(f"this tune trains none of the {count}, which leaves nothing to edit: use --tune full")
        return [layer for layer in found if layer.tensors or not named[layer.name]]
    owned: dict[str, list[str]] = {path: [] for path, _ in module.named_modules() if path}
    for name in state_names(module):
        if name in trainable and "." in name:
            owned[name.rpartition(".")[0]].append(name)
    if rule != "leaves":
        owned = {path: names for path, names in owned.items() if isinstance(module.get_submodule(path), NORMS)}
        if rule == "main_norms":
            owned = {path: names for path, names in owned.items() if "downsample" not in path.split(".")}
        if not any(owned.values()):
            raise UserError("no normalization layer is trained, which leaves nothing to edit: use layers=leaves")
    return [Layer(path, tuple(names)) for path, names in owned.items() if names]


def paper_layers(module: nn.Module) -> list[str]:
    """Name the layers that the paper counts: ResNet18 54, ResNet50 107, DenseNet121 370, ViT-B 111, its perceptron 4.

    Each network has its own rule. ResNet18 leaves the classifier out and has the ReLUs and the shortcuts as well as
    their parts; ResNet50 and Mlp have every module with weights; DenseNet121 has every module without parts, with
    weights or not, and four that consist of others; a ViT has the attention as a whole and its output projection.
    """
    from torchvision.models import DenseNet, ResNet
    from torchvision.models.resnet import Bottleneck

    parts = {path: part for path, part in module.named_modules() if path}
    match module:
        case ResNet() if not any(isinstance(part, Bottleneck) for part in parts.values()):
            return resnet54(module)
        case ResNet() | Mlp():
            return [path for path, part in parts.items() if any(True for _ in part.parameters(recurse=False))]
        case DenseNet():
            joined = [path for path in parts if path == "features" or path.split(".")[-1].startswith("transition")]
            return [path for path, part in parts.items() if path in joined or not any(part.children())]
    blocks = [path for path in parts if path.startswith("blocks.") and path.split(".", 2)[-1] in IN_BLOCK]
    if not blocks:
        kinds = "ResNet, DenseNet, ViT or mlp"
        raise UserError(f"layers=paper is for a {kinds}, found {type(module).__name__}: use layers=leaves")
    return [path for path in parts if path in (*blocks, "patch_embed.proj", "norm", "head")]


def resnet54(module: nn.Module) -> list[str]:
    """Name the layers that the authors' code counts in a ResNet."""
    paths = [path for path, _ in module.named_modules()]
    inner = [path for path in paths if path.startswith("layer") and path.count(".") >= 2]
    if not inner:
        raise UserError(f"layers=resnet54 is for ResNets, found {type(module).__name__}: use layers=leaves")
    return [path for path in paths if path in STEM] + inner


@torch.no_grad()
def edited_logits(client: Client, base: Tree, other: Tree, layers: Sequence[Layer]) -> Tensor:
    """Compute logits (layers, probe images, classes) of `base` with one layer at a time taken from `other`."""
    parts = []
    with holding(client, base) as predict:
        for x, _ in probe_batches(client):
            with Replay(client.module, partial(predict, x)).watching() as replay:
                starts = [replay.start_of(layer.name) for layer in layers]
                logits: list[Tensor] = [replay.output] * len(layers)
                for number in sorted(range(len(layers)), key=lambda i: starts[i] or (0, 0)):
                    start, names = starts[number], layers[number].tensors
                    if not names:
                        continue  # nothing to exchange
                    if start is not None:
                        # Autocast must not enclose the edits, because it would keep casts of unedited weights.
                        with client.settings.autocast():
                            replay.reach(start[0])
                    load_(client.live, tree.pick(other, names))
                    logits[number] = replay.run_from(start or (0, 0))  # None: a fused layer hid the call
                    load_(client.live, tree.pick(base, names))
                parts.append(torch.stack(logits).float().cpu())
    return torch.cat(parts, dim=1)


def probe_batches(client: Client) -> Iterator[Batch]:
    """Iterate over the probe images in their fixed order."""
    return image_batches(client.data, client.data.probe, PROBE_BATCH, client.inputs, client.settings.device)


@dataclass(frozen=True)
class Size:
    """How many layers to restore: k of them, or a share of all, rounded up."""

    k: int | None
    ratio: float

    def of(self, layers: int) -> int:
        return self.k if self.k is not None else math.ceil(self.ratio * layers - 1e-9)


def ranking(logits: Tensor, own: Tensor, y: Tensor, metric: Metric) -> list[int]:
    """Rank layers, best first, by logits (layers, images, classes) of edits and (images, classes) of the own model.

    With several labels, every label of an image is a case of its own, answered with yes or no.
    """
    if y.ndim == 2:
        logits, own = (torch.stack([torch.zeros_like(v), v], dim=-1).flatten(-3, -2) for v in (logits, own))
        y = y.flatten()
    edited, alone = (F.log_softmax(v.double(), dim=-1) for v in (logits, own))
    chance = edited.exp().gather(-1, y.expand(len(edited), -1).unsqueeze(-1)).squeeze(-1)
    before = alone.exp().gather(-1, y.unsqueeze(-1)).squeeze(-1)
    effect = chance / before.clamp(min=1e-12) - 1
    right = logits.argmax(-1) == y
    better, worse = effect > 0, effect < 0
    cases = (right & better, right & worse, ~right & better, ~right & worse)
    te = effect.mean(1)
    keys: dict[Metric, tuple[Tensor, ...]] = {
        "prediction_list": (*(case.sum(1) for case in cases), te),
        "te": (te,),
        "loss": (chance.clamp(min=1e-300).log().mean(1),),
        "accuracy": (right.sum(1),),
    }
    columns = [key.tolist() for key in keys[metric]]
    return sorted(range(len(logits)), key=lambda layer: tuple(-column[layer] for column in columns))
