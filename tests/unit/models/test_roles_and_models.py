"""Selection by path and type, layer groups on several backbones, and the wire format."""

import pytest
import timm
import torch
from torch import nn

from fedvit.core.errors import UserError
from fedvit.core.payload import Payload, from_bytes, to_bytes
from fedvit.core.roles import FROZEN, PERSONAL, SHARED, assign, everything, of_type, under
from fedvit.engine.client_store import memory_from_bytes, memory_to_bytes
from fedvit.models.build import ModelSettings, build, input_settings
from fedvit.models.groups import group
from fedvit.models.plugins.attach import classifier_names
from fedvit.models.plugins.specs import Adapter, Lora, Prefix, Prompt


def vit(name: str = "vit_tiny_patch16_224", **kwargs: object) -> nn.Module:
    return timm.create_model(name, num_classes=10, **kwargs)


def test_a_path_matches_whole_segments_only() -> None:
    model = vit()
    assert {name.split(".")[1] for name in under("blocks.1").match(model)} == {"1"}


def test_the_first_matching_rule_wins_and_the_rest_is_frozen() -> None:
    model = vit()
    roles = assign(model, ((under("head"), PERSONAL), (everything, SHARED)), trainable={"head.weight", "norm.bias"})
    assert roles.personal == ("head.weight",)
    assert roles.shared == ("norm.bias",)
    assert "head.bias" in roles.frozen
    assert assign(model, ((everything, FROZEN),)).trainable == ()


def test_a_rule_without_a_match_is_an_error() -> None:
    with pytest.raises(UserError, match="'nose' matches no weight"):
        assign(vit(), ((under("nose"), PERSONAL), (everything, SHARED)))
    with pytest.raises(UserError, match="matches no weight"):
        assign(vit(), ((of_type("batch norm", nn.BatchNorm2d), PERSONAL), (everything, SHARED)))


def test_a_weight_without_a_rule_is_an_error() -> None:
    with pytest.raises(UserError, match="no rule covers"):
        assign(vit(), ((under("blocks"), SHARED),))


def test_batch_norm_statistics_go_with_their_layer() -> None:
    model = timm.create_model("resnet10t", num_classes=10)
    roles = assign(model, ((group("norm"), PERSONAL), (everything, SHARED)))
    assert "bn1.running_mean" in roles.personal
    assert not any(name.endswith("num_batches_tracked") for name in roles.of)
    assert all("running" not in name for name in roles.shared)


@pytest.mark.parametrize(
    ("name", "heads", "tokens"),
    [
        ("vit_tiny_patch16_224", ["head"], 1),
        ("deit_tiny_distilled_patch16_224", ["head", "head_dist"], 2),
        ("vit_small_patch14_reg4_dinov2", ["head"], 2),
        ("vit_base_patch32_clip_224", ["head"], 1),
        ("vit_tiny_patch16_224.augreg_in21k", ["head"], 1),
    ],
)
def test_groups_and_plugins_on_other_backbones(name: str, heads: list[str], tokens: int) -> None:
    settings = ModelSettings(name=name, image_size=32, patch_size=8)
    model = build(settings, 10, (Prefix(bottleneck=8), Prompt(), Adapter(), Lora()), 0)
    assert classifier_names(model) == heads
    assert len(group("tokens").match(model)) == tokens
    x = torch.randn(2, 3, 32, 32)
    model(x).sum().backward()
    for kind in ("prefix", "prompt", "adapter", "lora"):
        names = group(kind).match(model)
        parameters = dict(model.named_parameters())
        assert names
        assert any(parameters[n].grad is not None and parameters[n].grad.abs().sum() > 0 for n in names), kind
    assert input_settings(model, settings).size == 32


def test_a_plugin_on_a_model_without_blocks_is_an_error() -> None:
    with pytest.raises(UserError, match="needs a timm ViT or DeiT"):
        build(ModelSettings(name="resnet18"), 10, (Lora(),), 0)


def test_fused_attention_stays_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    whole = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), whole(*a, **k))[1]
    )
    for combine in ("add", "concat"):
        calls.clear()
        build(ModelSettings(), 10, (Prefix(combine=combine), Lora(), Prompt()), 0)(torch.zeros(1, 3, 8, 8))
        assert len(calls) == 4, combine


def test_a_payload_survives_the_wire() -> None:
    payload = Payload({"shared": {"a.b": torch.randn(3), "c": torch.ones(2, 2)}, "choice": {"m": torch.tensor([1, 0], dtype=torch.uint8)}}, {"loss": 0.1 + 0.2})  # fmt: skip  # noqa: E501
    back = from_bytes(to_bytes(payload))
    assert back.nbytes == payload.nbytes == 4 * 7 + 2
    assert back.scalars == payload.scalars
    assert all(torch.equal(back.trees[g][n], t) for g, tree in payload.trees.items() for n, t in tree.items())


def test_a_memory_survives_the_disk() -> None:
    memory = {"personal": {"head.weight": torch.randn(4)}, "alpha": 0.1 + 0.2}
    back = memory_from_bytes(memory_to_bytes(memory))
    assert back["alpha"] == memory["alpha"]
    assert torch.equal(back["personal"]["head.weight"], memory["personal"]["head.weight"])
