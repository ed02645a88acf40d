"""Compare our batches with torchvision's image-by-image pipeline: python -m benchmarks.images [--repeats 5]

Both turn uint8 arrays into normalized 224 px float batches of 32, with padded crop and flip, on one thread. For
torchvision, this is the usual pipeline over PIL images: RandomCrop, Resize, RandomHorizontalFlip, ToTensor, Normalize,
and then a stack.
"""

import argparse

import torch
import torchvision.transforms as T
from PIL import Image

from benchmarks.common import CPU, Result, alternate, generated, show
from fedvit.core.batches import InputSettings, image_batches
from fedvit.engine.worker import client_data, image_tensors

INPUTS = InputSettings(224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def measure(size: int, bar: float, images: int, repeats: int) -> Result:
    dataset, split = generated(1, images, size=size)
    pixels, labels = image_tensors(dataset)
    data = client_data(pixels, labels, dataset.classes, split.clients["0"])
    steps = T.Compose(
        [
            T.RandomCrop(size, padding=size // 8), T.Resize((224, 224)), T.RandomHorizontalFlip(), T.ToTensor(),
            T.Normalize(INPUTS.mean, INPUTS.std),
        ]
    )  # fmt: skip

    def ours(repeat: int) -> None:
        generator = torch.Generator().manual_seed(repeat)
        for _ in image_batches(data, data.train, 32, INPUTS, CPU, "crop", generator):
            pass

    def theirs(repeat: int) -> None:
        torch.manual_seed(repeat)
        for chosen in data.train.split(32):
            torch.stack([steps(Image.fromarray(dataset.images[int(i)])) for i in chosen])

    ratios = [1 / ratio for ratio in alternate(ours, theirs, repeats)]
    return Result(f"images from {size} px to 224: torchvision / ours", ratios, bar, at_least=True)


def results(images: int = 256, repeats: int = 5) -> list[Result]:
    torch.set_num_threads(1)
    return [measure(size, bar, images, repeats) for size, bar in ((32, 2.5), (128, 2.0))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=256)
    show(results(**vars(parser.parse_args())))
