"""Sizes, batches and models that nobody means are refused or warned about, with what to do instead."""

import logging
from pathlib import Path

import pytest
import timm
import torch

import fedvit
from fedvit.core.errors import UserError
from fedvit.core.settings import ModelSettings
from fedvit.engine.net import make_net
from fedvit.engine.worker import load_data
from fedvit.models.build import backbone, is_claimed
from fedvit.runs import caution
from fedvit.runs.caution import warn_of_batch, warn_of_model
from tests.conftest import finish, tiny


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({"image_size": 10, "patch_size": 4}, "--image-size 8 or 12,"),
        ({"model": "vit_tiny_patch16_224", "image_size": 100, "patch_size": None}, "--image-size 96 or 112,"),
        ({"model": "deit_tiny_patch16_224", "image_size": 9, "patch_size": None}, "--image-size 16,"),
    ],
)
def test_an_image_that_is_no_multiple_of_the_patch_is_refused_with_the_nearest_sizes(
    flags: dict[str, object], sizes: str
) -> None:
    with pytest.raises(UserError, match=sizes):
        tiny(**flags)


def test_sizes_that_fit_and_models_without_patches_are_left_alone() -> None:
    assert tiny(image_size=12).model.image_size == 12
    assert tiny(model="resnet18", image_size=33, patch_size=None).model.image_size == 33


def test_a_batch_above_every_client_is_warned_about_with_the_largest_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        finish(tiny(rounds=1), tmp_path / "usual")
        assert "--batch" not in caplog.text
        experiment = tiny(rounds=1, batch=5000, sets={"min_samples": 20})
        _, partition = load_data(experiment)
        finish(experiment, tmp_path / "absurd")
    sizes = {name: len(part.train) for name, part in partition.clients.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    assert (
        f"--batch 5000 is more than the training images of any client ({largest} has the most, {sizes[largest]})"
        in (caplog.text)
    )


def test_a_batch_beyond_the_memory_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = tiny(batch=1000, clients=2, partition="iid")
    dataset, partition = load_data(experiment)
    net = make_net(experiment, dataset.classes, torch.device("cpu"))
    monkeypatch.setattr(caution, "free_ram", lambda: 10**6)
    warn_of_batch(experiment, net, partition, dataset.images.shape[1:])
    assert "lower --batch" in caplog.text


def test_a_convolutional_network_of_timm_is_refused_with_the_way_that_works(tmp_path: Path) -> None:
    for size in (32, None):
        with pytest.raises(UserError, match=r"convnext_atto is not supported.*fedvit\.run\(model=timm"):
            backbone(ModelSettings(name="convnext_atto", image_size=size), 10)
    module = timm.create_model("convnext_atto", num_classes=10)  # what the message says does work
    flags = {"samples": 60, "clients": 2, "rounds": 1, "epochs": 1, "cohort": 1, "batch": 16}
    run = fedvit.run(model=module, image_size=32, groups={"head": ["head.fc"]}, out=tmp_path / "r", **flags)
    assert run.summary["model"] == "python"


def test_another_transformer_is_warned_about_and_a_vit_is_not(caplog: pytest.LogCaptureFixture) -> None:
    assert is_claimed("vit_tiny_patch16_224.augreg_in21k")
    assert is_claimed("deit_tiny_distilled_patch16_224")
    for name in ("vit_micro", "vit_tiny_patch16_224", "resnet18", "python"):
        warn_of_model(name)
    assert caplog.text == ""
    warn_of_model("swin_tiny_patch4_window7_224")
    assert "swin_tiny_patch4_window7_224 is neither a ViT nor a DeiT" in caplog.text
