"""The modules that plugins add to a model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


class Bottleneck(nn.Module):
    """Compute up(act(down(x))), scaled."""

    def __init__(self, dim: int, width: int, out: int, act: nn.Module, scale: float, *, bias: bool, zero: bool):
        super().__init__()
        self.down = nn.Linear(dim, width, bias=bias)
        self.act = act
        self.up = nn.Linear(width, out, bias=bias)
        self.scale = scale
        if zero:
            # Only the up-projection: if both were zero, nothing but its bias would ever get a gradient.
            zero_(self.up)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim) -> (batch, tokens, out)
        out: Tensor = self.up(self.act(self.down(x)))
        return out if self.scale == 1 else out * self.scale


class LinearPrefix(nn.Module):
    """The vanilla prefix in its additive form: one linear map of the block's input."""

    def __init__(self, dim: int, out: int, scale: float, *, zero: bool):
        super().__init__()
        self.proj = nn.Linear(dim, out)
        self.scale = scale
        if zero:
            zero_(self.proj)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim) -> (batch, tokens, out)
        return self.scale * self.proj(x)  # type: ignore[no-any-return]


class FreePrefix(nn.Module):
    """The vanilla prefix in its concatenated form: learned rows that do not depend on the input."""

    def __init__(self, tokens: int, out: int, scale: float, *, zero: bool):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(tokens, out) if zero else torch.randn(tokens, out) * 0.02)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:  # (batch, _, _) -> (batch, rows, out)
        return (self.scale * self.rows).expand(x.shape[0], -1, -1)  # len() would fix the batch size of an ONNX graph


class PromptTokens(nn.Module):
    """The prompt of one block; dropout draws a mask of its own for every image."""

    def __init__(self, tokens: int, dim: int, bound: float, dropout: float):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(tokens, dim).uniform_(-bound, bound))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, n, dim) -> (batch, n + tokens, dim)
        each = self.tokens.expand(x.shape[0], -1, -1).clone()  # PyTorch's counter of operations stumbles over a view
        return torch.cat([x, self.drop(each)], dim=1)


class OffsetImage(nn.Module):
    """A learned image in normalized pixels, and its two mixtures with every image of a batch."""

    def __init__(self, size: int, a: float):
        super().__init__()
        self.image = nn.Parameter(torch.empty(3, size, size).uniform_(-1, 1))
        self.a = a

    def forward(self, x: Tensor) -> Tensor:  # (batch, 3, h, w) -> (2 batch, 3, h, w)
        return torch.cat([(1 - self.a) * x + self.a * self.image, (1 + self.a) * x - self.a * self.image])


class StatisticNoise(nn.Module):
    """FedFA's layer after one stage. It has no weights, and returns features unchanged unless `spread` is set.

    `seen` (2, channels) is the moving average of channel means and deviations, `spread` its variance across clients.
    """

    def __init__(self, channels: int, over: tuple[int, ...], prob: float, momentum: float):
        super().__init__()
        self.channels, self.over, self.prob, self.momentum = channels, over, prob, momentum
        self.seen: Tensor | None = None
        self.spread: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, channels) or (batch, channels, height, width)
        if self.spread is None or not self.training:
            return x
        values = x.float()
        mean = values.mean(self.over, keepdim=True)
        std = (values.var(self.over, correction=0, keepdim=True) + EPS).sqrt()
        now = torch.stack([mean, std]).detach().flatten(2).mean(1)
        self.seen = now if self.seen is None else self.momentum * self.seen + (1 - self.momentum) * now
        if torch.rand(()) >= self.prob:
            return x
        shape = mean.shape[1:]
        new = []
        for statistic, spread in zip((mean, std), self.spread, strict=True):
            variance = (1 + _sharing_factor(spread).view(shape)) * statistic.var(0, correction=0)
            noise = torch.randn(statistic.shape).to(x.device)
            new.append(statistic + noise * (variance + EPS).sqrt())
        return (new[1] * (values - mean) / std + new[0]).to(x.dtype)


def _sharing_factor(spread: Tensor) -> Tensor:
    """Return FedFA's gamma: more noise in the channels whose statistics differ more between clients; its mean is 1."""
    weight = 1 / (1 + 1 / (spread + EPS))
    return len(spread) * weight / weight.sum()


class ImageSplitter(nn.Module):
    """Map images to what a small latent code can express of them, and to the code's mean and log-variance.

    The code is a map with a quarter of the image's side; it is sampled in training and is its mean otherwise.
    """

    def __init__(self, width: int, latent: int):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * latent, 1),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.Conv2d(latent, 2 * width, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(width, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (batch, 3, size, size) -> same, code, code
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        out = self.decode(code)
        return F.interpolate(out, x.shape[-2:]) if out.shape != x.shape else out, mean, log_variance


class PseudoToken(nn.Module):
    """FeSViBS's block: two convolutions with a residual over the map of patch tokens, averaged to a class token."""

    def __init__(self, dim: int, dropout: float = 0.5):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.conv2, self.norm2 = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, patches, dim) -> (batch, 1, dim)
        side = int(x.shape[1] ** 0.5)
        grid = x.transpose(1, 2).reshape(x.shape[0], -1, side, side)
        out = torch.relu(self.norm1(self.conv1(grid)))
        out = torch.relu(self.norm2(self.conv2(self.drop(out))) + grid)
        return out.mean((2, 3)).unsqueeze(1)


def zero_(linear: nn.Linear) -> None:
    nn.init.zeros_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
