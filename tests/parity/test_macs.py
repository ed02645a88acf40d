"""Multiply-adds against the formula written by hand."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from fedvit.models.build import ModelSettings, build, macs_per_example
from fedvit.models.plugins.attach import prefix_share
from fedvit.models.plugins.specs import Prefix


def by_hand(depth: int, tokens: int, dim: int, patch: int, classes: int) -> int:
    linear = depth * tokens * 12 * dim**2
    attention = 2 * depth * tokens**2 * dim
    return linear + attention + (tokens - 1) * 3 * patch**2 * dim + dim * classes


def test_macs_equal_the_formula() -> None:
    settings = ModelSettings(name="vit_tiny_patch16_224", image_size=32, patch_size=4)
    plain, plugged = build(settings, 10, (), 0), build(settings, 10, (Prefix(bottleneck=64),), 0)
    expected = by_hand(12, 65, 192, 4, 10)
    assert macs_per_example(plain, 32) == expected
    assert macs_per_example(plugged, 32) == expected + 12 * 65 * (192 * 64 + 2 * 64 * 192)


def test_concatenated_prefixes_are_attended_to() -> None:
    settings = ModelSettings()
    plain, plugged = build(settings, 10, (), 0), build(settings, 10, (Prefix(combine="concat"),), 0)
    x = torch.randn(2, 3, 8, 8)
    assert not torch.allclose(plain(x), plugged(x))
    extra = macs_per_example(plugged, 8) - macs_per_example(plain, 8)
    dim = plain.embed_dim
    assert extra == 4 * (17 * (dim * 256 + 256 * 2 * dim) + 2 * 17 * 17 * dim)  # adapters, and 17 more keys a query


def test_concat_equals_attention_written_out() -> None:
    model = build(ModelSettings(), 10, (Prefix(combine="concat"),), 0).eval()
    block = model.blocks[0]
    dim, heads = model.embed_dim, block.attn.num_heads
    width = dim // heads
    x = torch.randn(2, 17, dim)
    q, k, v = block.attn.qkv(x).split(dim, dim=-1)
    pk, pv = block.prefix(x).split(dim, dim=-1)
    keys, values = torch.cat([pk, k], 1), torch.cat([pv, v], 1)
    out = []
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        weights = (q[..., part] @ keys[..., part].transpose(1, 2) / width**0.5).softmax(-1)
        out.append(weights @ values[..., part])
    assert torch.allclose(block.attn(x), block.attn.proj(torch.cat(out, -1)), atol=1e-5)


def test_a_concatenated_prefix_mixes_two_attentions() -> None:
    """Equation 6 of FedPerfix: (1 - lambda(x)) of the tokens' own attention and lambda(x) of the prefix's."""
    model = build(ModelSettings(), 10, (Prefix(combine="concat"),), 0).eval()
    block = model.blocks[0]
    attn, x = block.attn, torch.randn(3, 17, model.embed_dim)
    share = prefix_share(attn, block.prefix, x)
    assert share.shape == (3, attn.num_heads, 17)
    assert 0 < share.min() < share.max() < 1
    heads = (3, 17, -1, attn.num_heads, attn.head_dim)
    q, k, v = attn.qkv(x).reshape(heads).permute(2, 0, 3, 1, 4)
    prefix_k, prefix_v = block.prefix(x).reshape(heads).permute(2, 0, 3, 1, 4)
    own, other = scaled_dot_product_attention(q, k, v), scaled_dot_product_attention(q, prefix_k, prefix_v)
    mixed = (1 - share[..., None]) * own + share[..., None] * other
    assert torch.allclose(block.attn(x), attn.proj(mixed.transpose(1, 2).reshape(3, 17, -1)), atol=1e-6)
