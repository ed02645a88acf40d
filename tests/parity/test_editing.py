"""PFedEdit's quick way through all layers against the slow obvious one."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import DenseNet

from fedvit.config.load import load_experiment
from fedvit.core import tree
from fedvit.core.settings import FromPython
from fedvit.core.training import holding
from fedvit.methods.layer_editing import edited_logits, layers_of, probe_batches
from fedvit.models.replay import Replay
from tests.conftest import TINY, Bench, tiny

OWN = {"image_size": 8, "patch_size": None}


class Tokens(nn.Module):
    """Four patches of an image as tokens, something between them, and a classifier on their mean."""

    def __init__(self, between: nn.Module):
        super().__init__()
        self.patch, self.between, self.fc = nn.Conv2d(3, 16, 4, 4), between, nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        several = isinstance(self.between, nn.MultiheadAttention)
        mixed = self.between(tokens, tokens, tokens)[0] if several else self.between(tokens)
        out: torch.Tensor = self.fc(mixed.mean(1))
        return out


MODELS = {
    "ViT": ({}, {}),
    "ViT, prefix": ({"tune": "prefix"}, {}),
    "ViT, concatenated prefix": ({"tune": "prefix"}, {"tune.combine": "concat"}),
    "ViT, prompt": ({"tune": "prompt"}, {}),
    "ViT, one adapter for all blocks": ({"tune": "adapter"}, {}),
    "ViT, bias": ({"tune": "bias"}, {}),
    "ViT, lora": ({"tune": "lora"}, {}),
    "distilled DeiT": ({"model": "deit_tiny_distilled_patch16_224", "image_size": 32, "patch_size": 16}, {}),
    "ViT, bf16": ({"precision": "bf16"}, {}),
    "CaiT, whose attention blocks own weights": ({"model": "cait_xxs24_224", "image_size": 32, "patch_size": None}, {}),
    "ResNet": ({"model": "resnet18", "image_size": 32, "patch_size": None}, {}),
    "ResNet, 54 layers": ({"model": "resnet18", "image_size": 32, "patch_size": None}, {"method.layers": "resnet54"}),
    "ViT, the paper's layers": ({}, {"method.layers": "paper"}),
    "ResNet, the paper's layers": (
        {"model": "resnet18", "image_size": 32, "patch_size": None},
        {"method.layers": "paper"},
    ),
    "four linear layers": ({"model": "mlp", "image_size": 8, "patch_size": None}, {"method.layers": "paper"}),
    "a small DenseNet": (OWN, {}),
    "a small DenseNet, the paper's layers": (OWN, {"method.layers": "paper"}),
    "no blocks we know": ({"model": "shufflenet_v2_x0_5", "image_size": 32, "patch_size": None}, {}),
    "torch's encoder layer, whose parts are not called": (OWN, {}),
    "torch's attention, whose output is a pair": (OWN, {}),
}
MODULES = {  # those from Python
    "a small DenseNet": lambda: DenseNet(4, (2, 2), 8, num_classes=10),
    "a small DenseNet, the paper's layers": lambda: DenseNet(4, (2, 2), 8, num_classes=10),
    "torch's encoder layer, whose parts are not called": lambda: nn.TransformerEncoderLayer(
        16, 2, 32, batch_first=True
    ),
    "torch's attention, whose output is a pair": lambda: nn.MultiheadAttention(16, 2, batch_first=True),
}


def overridden(module: nn.Module) -> dict[str, object]:
    return {path: part.__dict__["forward"] for path, part in module.named_modules() if "forward" in part.__dict__}


@pytest.mark.parametrize("case", MODELS)
def test_sharing_activations_changes_no_prediction(case: str, tmp_path: Path) -> None:
    flags, sets = MODELS[case]
    torch.manual_seed(0)  # some weights of a small DenseNet reach no prediction under other seeds
    made = MODULES[case]() if case in MODULES else None
    own = FromPython(module=made if made is None or isinstance(made, DenseNet) else Tokens(made))
    settings = {**TINY, "method": "pfededit", **flags}
    bench = Bench(load_experiment(None, {"probe": 0.3, **sets}, settings, own=own), tmp_path)
    net, client = bench.net, bench.worker.client("0", 1, {})
    generator = torch.Generator().manual_seed(0)

    def moved(name: str, start: torch.Tensor) -> torch.Tensor:
        noise = 0.05 * torch.randn(start.shape, generator=generator)
        return start + (noise.abs() if "running_var" in name else noise)

    # Plugins start at zero, where half of their weights have no effect.
    base, other = ({name: moved(name, start) for name, start in net.initial.items()} for _ in range(2))
    layers = layers_of(net.module, net.roles.trainable, bench.experiment.method["layers"])
    before = overridden(net.module)
    quick = edited_logits(client, base, other, layers)
    rounding = (1e-2 if "precision" in flags else 2e-6) * quick.abs().max()
    for number, layer in enumerate(layers):
        weights = tree.overlay(base, tree.pick(other, layer.tensors))
        with holding(client, weights) as predict, torch.no_grad():
            slow = torch.cat([predict(x) for x, _ in probe_batches(client)])
        assert (quick[number] - slow).abs().max() <= rounding, layer.name  # a copy may lie differently in memory
    with holding(client, base) as predict, torch.no_grad():
        plain = torch.cat([predict(x) for x, _ in probe_batches(client)])
    changed = [layer.name for n, layer in enumerate(layers) if not torch.equal(quick[n], plain)]
    silent = {layer.name for layer in layers if not layer.tensors}  # of the 54: ReLUs and pooling
    assert set(changed) >= {layer.name for layer in layers} - silent - {"head_dist"}, "an edit changed nothing"
    assert overridden(net.module) == before


def test_what_lies_below_an_edit_is_not_computed_again(tmp_path: Path) -> None:
    bench = Bench(tiny("pfededit"), tmp_path)
    net, client = bench.net, bench.worker.client("0", 1, {})
    calls: list[str] = []
    for name, part in net.module.named_modules():
        if isinstance(part, torch.nn.Linear):
            whole = part.forward
            part.forward = lambda x, whole=whole, name=name: (calls.append(name), whole(x))[1]
    x = next(probe_batches(client))[0]
    with holding(client, net.initial) as predict, Replay(net.module, lambda: predict(x)).watching() as replay:
        start = replay.start_of("blocks.2.mlp.fc1")
        assert start is not None
        replay.reach(start[0])
        calls.clear()
        replay.run_from(start)
    block = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
    above = [f"blocks.3.{name}" for name in block]
    assert calls == ["blocks.2.mlp.fc1", "blocks.2.mlp.fc2", *above, "head"]
