"""A ViT in three parts for split learning: head and tail at the client, and the body between them at the server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from fedvit.core.errors import UserError
from fedvit.core.roles import Selector, state_names
from fedvit.core.tree import Tree

EMBEDDING = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
TAIL = ("norm", "fc_norm", "attn_pool", "head", "head_dist")
Where = Literal["client_head", "body", "client_tail"]


@dataclass(frozen=True)
class Cut:
    """Where a ViT is cut.

    B: the head is everything before the blocks, and the tail is the final norm and the classifier. A: the head is only
    the patch embedding, and the tail only the classifier. after: the head also has the first `block` blocks, and
    everything after them is the body, including the classifier. vibs: like B, but without tokens and positions, and
    the body ends in a pseudo class token after a varying number of blocks, at most `block` of them (0: half).
    """

    kind: Literal["A", "B", "after", "vibs"] = "B"
    block: int = 0

    def part_of(self, name: str) -> Where:
        """Return the part that a weight belongs to."""
        first, _, rest = name.partition(".")
        if self.kind in ("A", "vibs") and first in EMBEDDING:
            return "client_head" if first == "patch_embed" else "body"
        if first in EMBEDDING:
            return "client_head"
        if self.kind == "after":
            return "client_head" if first == "blocks" and int(rest.partition(".")[0]) < self.block else "body"
        if first in TAIL and not (self.kind == "A" and first == "norm"):
            return "client_tail"
        return "body"

    def names(self, model: nn.Module, *parts: Where) -> list[str]:
        return [name for name in state_names(model) if self.part_of(name) in parts]

    def selector(self, *parts: Where) -> Selector:
        """Select the weights of these parts, in a model that can be cut this way."""

        def match(model: nn.Module) -> set[str]:
            self.check(model)
            return set(self.names(model, *parts))

        return Selector(" and ".join(parts), match)

    def check(self, model: nn.Module) -> None:
        """Raise an error if a model cannot be cut this way."""
        if not isinstance(model, VisionTransformer):
            raise UserError(
                f"{type(model).__name__} cannot be cut for split learning: only a chain of blocks between an embedding "
                "and a classifier can; choose a timm ViT or DeiT, such as vit_tiny_patch16_224"
            )
        depth = len(model.blocks)
        if self.kind == "after" and not 0 <= self.block < depth:
            raise UserError(f"cannot cut after block {self.block} of {depth}: choose 0 to {depth - 1}")
        if self.kind == "after" and hasattr(model, "adapter"):
            raise UserError("one adapter for all blocks would lie on both sides of the cut: use tune.per_layer=true")
        if self.kind == "vibs" and (model.global_pool != "token" or hasattr(model, "head_dist")):
            raise UserError("this method needs a ViT that classifies from one class token; choose another model")
        if self.kind == "vibs" and self.block > depth:
            raise UserError(f"the body has {depth} blocks, so it cannot end after {self.block}: choose 1 to {depth}")


class Stage(nn.Module):
    """One piece of the forward pass, which keeps the weights' own names."""

    def __init__(self, module: nn.Module, run: Callable[[Tensor], Tensor], names: Sequence[str]):
        super().__init__()
        self.module, self.names = module, list(names)
        self.steps = (run,)  # in a tuple, so that it is not registered as a submodule

    def forward(self, x: Tensor) -> Tensor:
        return self.steps[0](x)

    def under(self, weights: Tree, x: Tensor) -> Tensor:
        """Run this stage with other weights; a weight that is not given is the module's own."""
        mine = {f"module.{name}": weights[name] for name in self.names if name in weights}
        out: Tensor = functional_call(self, mine, (x,), tie_weights=False)
        return out


class Parts:
    """The stages of a model that is cut; all of them run on the same module."""

    def __init__(self, model: nn.Module, cut: Cut):
        assert isinstance(model, VisionTransformer)
        self.model, self.cut = model, cut
        self.rows = needed_rows(model) if cut.kind in ("A", "B") else None
        blocks = [Stage(model, block, _under(model, f"blocks.{i}")) for i, block in enumerate(model.blocks)]
        if hasattr(model, "adapter"):
            for stage in blocks:
                stage.names += _under(model, "adapter")
        patches = Stage(model, model.patch_embed, _under(model, "patch_embed"))
        tokens = Stage(model, self.add_tokens, _under(model, *EMBEDDING[1:]))
        norm = Stage(model, model.norm, _under(model, "norm"))
        classify = Stage(model, model.forward_head, _under(model, *TAIL[1:]))
        match cut.kind:
            case "B":
                self.client_head, self.body, self.client_tail = [patches, tokens], blocks, [norm, classify]
            case "A":
                self.client_head, self.body, self.client_tail = [patches], [tokens, *blocks, norm], [classify]
            case "after":
                self.client_head = [patches, tokens, *blocks[: cut.block]]
                self.body, self.client_tail = [*blocks[cut.block :], norm, classify], []
            case "vibs":
                pseudo = Stage(model, model.get_submodule("pseudo_token"), _under(model, "pseudo_token"))
                self.client_head, self.body, self.client_tail = [patches], [*blocks, pseudo], [norm, classify]

    def add_tokens(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.model._pos_embed(x)
        return self.model.norm_pre(self.model.patch_drop(tokens))  # type: ignore[no-any-return]

    def run(self, part: Where, weights: Tree, x: Tensor, *, depth: int | None = None) -> Tensor:
        """Return a part's output; `depth` ends a varying body after this many blocks."""
        for stage in self.stages(part, depth):
            x = stage.under(weights, x)
        return self.rows_of(x) if part == "body" else x

    def stages(self, part: Where, depth: int | None = None) -> list[Stage]:
        chain = {"client_head": self.client_head, "body": self.body, "client_tail": self.client_tail}[part]
        return chain if depth is None or part != "body" else [*chain[:depth], chain[-1]]

    def rows_of(self, x: Tensor) -> Tensor:
        """Return only the tokens that the tail needs; sending the others would be a waste."""
        return x if self.rows is None else x[:, : self.rows]


def _under(model: nn.Module, *paths: str) -> list[str]:
    return [name for name in state_names(model) if any(name == p or name.startswith(p + ".") for p in paths)]


def needed_rows(model: VisionTransformer) -> int | None:
    """Return how many of the first tokens a classifier reads; None means all."""
    if model.global_pool != "token" or getattr(model, "attn_pool", None) is not None:
        return None
    return 2 if hasattr(model, "head_dist") else 1
