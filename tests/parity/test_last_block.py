"""The last block without the tokens that nobody reads gives what the whole one gives."""

import copy
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedvit
from fedvit.core.plan import Plugin
from fedvit.core.settings import ModelSettings
from fedvit.models.build import build
from fedvit.models.plugins.specs import Adapter, FeatureNoise, Lora, Prefix, Prompt
from fedvit.models.token_skipping import all_tokens, forward, give_all_tokens_, skip_unread_tokens_
from fedvit.runs.models import client_model, open_run
from tests.conftest import Bench, same_trees, tiny

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
MODELS = {
    "plain": ("vit_tiny_patch16_224", {}),
    "two tokens are read": ("deit_tiny_distilled_patch16_224", {}),
    "scales, norms and registers": ("vit_tiny_patch16_224", {"init_values": 0.1, "qk_norm": True, "reg_tokens": 2}),
}


def small(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **{**SMALL, **options})
    shaken_(model)
    return model


def shaken_(model: nn.Module) -> None:
    """No weight is zero, so that a plugin or a class token that is left out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))


def is_skipping(model: nn.Module) -> bool:
    own = vars(model.blocks[-1]).get("forward")  # type: ignore[index,union-attr]
    return own is not None and own.func is forward


def learned(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    logits = model.train()(x)
    F.cross_entropy(logits, torch.arange(6) % 5).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_as_whole(model: nn.Module) -> None:
    whole = copy.deepcopy(model)
    skip_unread_tokens_(model)
    assert is_skipping(model)
    assert not is_skipping(whole)
    (a, gradients), (b, expected) = learned(model), learned(whole)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_gradients_are_those_of_the_whole_block(kind: str) -> None:
    name, options = MODELS[kind]
    same_as_whole(small(name, **options))


@pytest.mark.parametrize("plugin", [Prefix(bottleneck=4), Adapter(), Adapter(per_layer=True), Lora()])
def test_plugins_that_treat_every_token_alone_go_with_it(plugin: Plugin) -> None:
    model = build(ModelSettings(name="vit_micro", image_size=16, patch_size=4), 5, (plugin,), 0)
    shaken_(model)
    same_as_whole(model)


@pytest.mark.parametrize(
    "plugin", [Prompt(), Prefix(combine="concat"), Prefix(combine="concat", bottleneck=None), FeatureNoise()]
)
def test_plugins_that_look_at_all_tokens_keep_the_whole_block(plugin: Plugin) -> None:
    model = build(ModelSettings(name="vit_micro", image_size=16, patch_size=4), 5, (plugin,), 0)
    skip_unread_tokens_(model)
    assert not is_skipping(model)


@pytest.mark.parametrize("options", [{"global_pool": "avg"}, {"drop_path_rate": 0.1}, {"proj_drop_rate": 0.1}])
def test_other_poolings_and_random_blocks_stay_whole(options: dict[str, object]) -> None:
    model = small("vit_tiny_patch16_224", **options)
    skip_unread_tokens_(model)
    assert not is_skipping(model)


def test_other_models_stay_as_they_are() -> None:
    for name in ("resnet18", "eva02_tiny_patch14_224"):
        model = timm.create_model(name, num_classes=5)
        before = model(torch.zeros(2, 3, 224, 224)).shape
        skip_unread_tokens_(model)
        assert model(torch.zeros(2, 3, 224, 224)).shape == before
        assert not give_all_tokens_(model)


def test_a_copy_means_itself_and_the_whole_block_comes_back() -> None:
    model = small("vit_tiny_patch16_224")
    skip_unread_tokens_(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.ones(2, 3, 16, 16)
    assert model(x).any()
    assert not other(x).any()
    assert model.forward_features(x).shape[1] == 1  # type: ignore[operator]
    with all_tokens(model):
        assert model.forward_features(x).shape[1] == 17  # type: ignore[operator]
    assert is_skipping(model)
    assert give_all_tokens_(model)
    assert not is_skipping(model)


@pytest.mark.parametrize(
    ("label", "skips"),
    [
        ("fedavg", True), ("fedperfix", True), ("pfededit+bias", True), ("fedavg+blocks.3", True), ("fedfa", False),
        ("fedavg+norm,head", True), ("fedv", False), ("fesvibs", False), ("fedavg+head", False),
    ],
)  # fmt: skip
def test_methods_use_it_where_something_is_learned_before_it(label: str, skips: bool, tmp_path: Path) -> None:
    assert is_skipping(Bench(tiny(label), tmp_path).net.module) == skips


def test_a_model_that_is_handed_out_gives_all_tokens(tmp_path: Path) -> None:
    run = fedvit.run(method="fedbabu", rounds=1, epochs=1, clients=4, cohort=2, out=tmp_path / "run")
    model = run.model("0")
    assert model.forward_features(torch.zeros(2, 3, 8, 8)).shape[1] == 17  # type: ignore[operator]
    assert not is_skipping(model)


def test_every_model_of_one_run_is_made_as_in_the_run(tmp_path: Path) -> None:
    run = fedvit.run(method="fedbabu", rounds=1, epochs=1, clients=4, cohort=2, out=tmp_path / "run")
    opened = open_run(run)
    for name in ("0", "1"):  # both fine-tune before they are handed out
        together = {key: tensor.clone() for key, tensor in client_model(opened, name).state_dict().items()}
        assert same_trees(together, dict(run.model(name).state_dict()))
