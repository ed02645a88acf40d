"""Run the last block of a ViT without the tokens that no classifier reads, which saves most of its matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.layers.drop import DropPath
from timm.layers.patch_dropout import PatchDropout
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedvit.models.cuts import needed_rows
from fedvit.models.plugins.modules import StatisticNoise


def skip_unread_tokens_(model: nn.Module) -> None:
    """Make the last block return only the tokens that the classifier reads; their values are the same up to rounding.

    Unless the block and its plugins are known to treat every token separately, the block stays as it is.
    """
    if type(model) not in (VisionTransformer, VisionTransformerDistilled):
        return
    assert isinstance(model, VisionTransformer)
    rows, block = needed_rows(model), _last_of(model)
    if rows is not None and _is_plain(block):
        block.attn.forward = partial(_attend, block.attn, rows)
        block.forward = partial(forward, block, rows)  # a partial, so that a copy of the model refers to itself


def give_all_tokens_(model: nn.Module) -> bool:
    """Undo `skip_unread_tokens_`, for models that we hand out; return whether there was anything to undo."""
    if not isinstance(model, VisionTransformer):
        return False
    block = _last_of(model)
    own = vars(block).get("forward")
    found = isinstance(own, partial) and own.func is forward
    if found:
        del block.forward, block.attn.forward
    return found


@contextmanager
def all_tokens(model: nn.Module) -> Iterator[None]:
    """Run the model as it was built, temporarily."""
    found = give_all_tokens_(model)
    try:
        yield
    finally:
        if found:
            skip_unread_tokens_(model)


def _last_of(model: VisionTransformer) -> Any:
    return model.blocks[-1]


def _is_plain(block: Any) -> bool:
    """Return whether this is timm's own block, with no random draws and no plugin that looks at all its tokens."""
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    attn, hooks = block.attn, [getattr(part, kind) for part in (block, block.attn) for kind in HOOKS]
    own = (
        attn.fused_attn
        and getattr(attn, "gate", None) is None
        and not any("forward" in vars(part) for part in (block, attn))
    )
    return own and not any(hooks) and not any(draws(part) for part in block.modules())


HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def forward(block: Any, rows: int, x: Tensor) -> Tensor:
    """Run timm's block, (batch, tokens, dim) -> (batch, rows, dim)."""
    out = x[:, :rows] + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
    return out + block.drop_path2(block.ls2(block.mlp(block.norm2(out))))  # type: ignore[no-any-return]


def _attend(attn: Any, rows: int, x: Tensor) -> Tensor:
    """Run timm's attention with the queries of the first tokens only, (batch, tokens, dim) -> (batch, rows, dim)."""
    batch, tokens, _ = x.shape
    qkv = attn.qkv(x).reshape(batch, tokens, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    out = F.scaled_dot_product_attention(attn.q_norm(q[:, :, :rows]), attn.k_norm(k), v)
    out = attn.norm(out.transpose(1, 2).reshape(batch, rows, -1))
    return attn.proj_drop(attn.proj(out))  # type: ignore[no-any-return]


def draws(part: nn.Module) -> bool:
    """Return whether a layer draws random numbers in training."""
    match part:
        case nn.modules.dropout._DropoutNd():
            return part.p > 0
        case DropPath():
            return part.drop_prob > 0
        case PatchDropout():
            return part.prob > 0
    return isinstance(part, StatisticNoise)
