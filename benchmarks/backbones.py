"""FedV's Table 1, measured here: a ResNet-50 beside a DeiT-Small: python -m benchmarks backbones

Size and multiply-adds are counted, and the seconds of a forward pass are taken in turns, with one thread. The ratio is
DeiT-Small's time to ResNet-50's. The paper's accuracies are of models trained on ImageNet, and are not repeated.
"""

import timm
import torch

from benchmarks.common import Result, alternate, seconds_of
from fedvit.models.build import macs_per_example

MODELS = {"deit_small_patch16_224": "22 M, 4.6 G, 940", "resnet50": "25.6 M, 4.1 G, 1226"}


def results(repeats: int = 5, batch: int = 8, size: int = 224, models: dict[str, str] = MODELS) -> list[Result]:
    torch.set_num_threads(1)
    x = torch.zeros(batch, 3, size, size)
    built = {name: timm.create_model(name).eval() for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}

    def forward(name: str) -> None:
        with torch.no_grad():
            built[name](x)

    def timed(name: str) -> None:
        seconds[name].append(seconds_of(forward, name))

    ours, theirs = models
    ratios = alternate(lambda repeat: timed(ours), lambda repeat: timed(theirs), repeats)
    said = []
    for name, published in models.items():
        numbers = sum(p.numel() for p in built[name].parameters())
        speed = batch / sorted(seconds[name][1:])[(len(seconds[name]) - 1) // 2]
        macs = macs_per_example(built[name], size)
        said.append(f"{name}: {numbers:,} numbers, {macs:,} MACs, {speed:.1f} images/s (paper: {published})")
    return [Result("forward pass, DeiT-Small / ResNet-50", ratios, None, beside="; ".join(said))]
