"""All plugins, as plain records of their settings."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Init = Literal["zero", "random", "auto"]  # auto: random if trained from scratch, zero on pre-trained weights


@dataclass(frozen=True)
class Prefix:
    """Add s * P(z) to the keys and values of every block, where z is the block's normalized input (FedPerfix).

    With a bottleneck, P is down, tanh, up; without one it is a single linear map (the vanilla prefix).
    `combine="concat"` puts the prefix next to the keys and values instead of adding it to them; without a
    bottleneck it is then a free matrix of `tokens` rows.
    """

    kind: ClassVar[str] = "prefix"
    bottleneck: int | None = 256
    s: float = 1.5
    init: Init = "auto"
    combine: Literal["add", "concat"] = "add"
    tokens: int = 10


@dataclass(frozen=True)
class Prompt:
    """Free tokens appended before every block and removed after it (VPT-deep)."""

    kind: ClassVar[str] = "prompt"
    tokens: int = 10
    dropout: float = 0.0
    init: Literal["uniform", "zero"] = "uniform"


@dataclass(frozen=True)
class Adapter:
    """Turn the output m of every MLP into m + up(act(down(m))); one adapter for all blocks, or one per block."""

    kind: ClassVar[str] = "adapter"
    width: int | None = None  # None: an eighth of the model's width
    activation: Literal["gelu", "tanh"] = "gelu"
    per_layer: bool = False
    init: Literal["zero", "random"] = "zero"  # of the up-projection


@dataclass(frozen=True)
class Lora:
    """A low-rank change of the joint query, key and value projection."""

    kind: ClassVar[str] = "lora"
    rank: int = 8
    alpha: float = 16.0


@dataclass(frozen=True)
class SecondHead:
    """A second linear classifier, zero at the start; the model's output is the sum of both (Fed-RoD)."""

    kind: ClassVar[str] = "second_head"


@dataclass(frozen=True)
class HeadMaker:
    """A small network from class frequencies to all weights of the second classifier; it is not used in predictions."""

    kind: ClassVar[str] = "head_maker"
    width: int = 32


@dataclass(frozen=True)
class Projection:
    """Two layers between the features and a fresh classifier (MOON)."""

    kind: ClassVar[str] = "projection"
    width: int = 256


@dataclass(frozen=True)
class Offset:
    """Two mixtures of every image with one learned image; a fresh classifier sees the features of both (DisTrans)."""

    kind: ClassVar[str] = "offset"
    a: float = 0.2


@dataclass(frozen=True)
class FeatureNoise:
    """While training, channel statistics after each of four stages are resampled around their values (FedFA)."""

    kind: ClassVar[str] = "feature_noise"
    prob: float = 0.5
    momentum: float = 0.99


@dataclass(frozen=True)
class Splitter:
    """A small variational autoencoder beside the classifier, which does not use it (FedFed)."""

    kind: ClassVar[str] = "splitter"
    width: int = 32
    latent: int = 8


@dataclass(frozen=True)
class Pseudo:
    """A class token made from patch tokens by convolutions, for a body that has none (FeSViBS)."""

    kind: ClassVar[str] = "pseudo_token"


HeadPlugin = SecondHead | HeadMaker | Projection | Offset
PLUGINS: dict[str, Any] = {
    plugin.kind: plugin
    for plugin in (
        Prefix,
        Prompt,
        Adapter,
        Lora,
        SecondHead,
        HeadMaker,
        Projection,
        Offset,
        FeatureNoise,
        Splitter,
        Pseudo,
    )
}
KINDS = tuple(PLUGINS)
