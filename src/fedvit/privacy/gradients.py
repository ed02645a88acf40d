"""Gradients that hide every single image: one per image, clipped, summed, and noised (Abadi et al. 2016)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedvit.core.client import Client, Loss
from fedvit.core.tree import Tree
from fedvit.privacy.secret import draws

MOST_NUMBERS = 2**26  # in the gradients of the images that are computed at once: 256 MB


class _WithLoss(nn.Module):
    """A model with its loss in one module, so that a loss that looks inside the model sees the weights in question."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model, x, y)


@dataclass
class PrivateGradients:
    """What replaces a client's batches and gradients in one round, and counts how often gradients were taken.

    Attributes:
        clip: The largest L2 norm of one image's gradient.
        noise: The deviation of the noise in the sum of a batch's gradients, in multiples of `clip`.
        key: Determines the batches and the noise. None takes no gradients and only counts them.
        counted: The share of the client's images that a batch holds on average, once for each gradient taken.
    """

    clip: float
    noise: float
    key: bytes | None
    counted: list[float] = field(default_factory=list)
    passes: int = 0

    def orders(self, images: int, size: int, epochs: int) -> Iterator[Tensor]:
        """Yield which images each batch holds: each image by chance, independently of all others, `size` on average.

        An epoch has as many batches as an ordinary one. A batch may be empty.
        """
        self.passes += 1
        share = share_of(images, size)
        chance = draws(self.key or b"", "batches", self.passes)
        for _ in range(epochs * steps_in(images, size)):
            self.share = share
            yield torch.from_numpy(chance.random(images) < share).nonzero().flatten()

    def gradient(
        self, client: Client, weights: Mapping[str, Tensor], names: Sequence[str], x: Tensor, y: Tensor, loss: Loss
    ) -> tuple[Tensor, Tree]:
        """Return the mean loss of a batch, which is not private, and a private gradient for these weights, by name."""
        size = self.share * len(client.data.train)
        self.counted.append(self.share)
        device = client.settings.device
        total = {name: torch.zeros_like(weights[name], device=device) for name in names}
        if self.key is None:
            return torch.zeros(()), total
        losses = [torch.zeros((), device=device)]
        numbers = sum(tensor.numel() for tensor in total.values())
        at_once = max(1, MOST_NUMBERS // numbers)
        for some, labels in zip(torch.split(x, at_once), torch.split(y, at_once), strict=True) if len(y) else ():
            values, gradients = per_image(client, weights, names, some, labels, loss)
            losses.append(values.detach().sum())
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            scale = (self.clip / norms).clamp(max=1.0)
            for name, each in gradients.items():
                total[name] += torch.einsum("n,n...->...", scale, each)
        chance = draws(self.key, "noise", len(self.counted))
        for tensor in total.values():
            noise = torch.from_numpy(chance.standard_normal(tuple(tensor.shape), dtype="float32"))
            tensor.add_(noise.to(tensor), alpha=self.noise * self.clip).div_(size)
        return torch.stack(losses).sum() / max(1, len(y)), total


def per_image(
    client: Client, weights: Mapping[str, Tensor], names: Sequence[str], x: Tensor, y: Tensor, loss: Loss
) -> tuple[Tensor, Tree]:
    """Return the loss and the gradient of every image by itself; the first axis of each tensor is the images'."""
    wrapped = _WithLoss(client.module, loss)
    prefixed = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    learned = {f"model.{name}": prefixed.pop(f"model.{name}") for name in names}

    def value(learned: Tree, x: Tensor, y: Tensor) -> Tensor:
        with client.settings.autocast():
            found: Tensor = functional_call(wrapped, {**prefixed, **learned}, (x[None], y[None]))
        return found

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the other kernels would be called once per image
        gradients, values = vmap(grad_and_value(value), in_dims=(None, 0, 0), randomness="different")(learned, x, y)
    return values, {name: gradients[f"model.{name}"] for name in names}


def share_of(images: int, size: int) -> float:
    """Return the chance of each image to be in a batch."""
    return min(1.0, size / images)


def steps_in(images: int, size: int) -> int:
    """Return the number of batches in an epoch."""
    return -(-images // size)
