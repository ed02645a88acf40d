"""Build a model from its settings: a timm or torchvision backbone of the right size, with its plugins attached."""

import copy
import re
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

from fedvit.core import randomness
from fedvit.core.batches import InputSettings
from fedvit.core.errors import UserError, hint
from fedvit.core.plan import Plugin
from fedvit.core.settings import ModelSettings
from fedvit.core.tree import fingerprint
from fedvit.models.groups import name_groups_
from fedvit.models.hub import (
    architecture_of,
    hub_model,
    hub_weights,
    is_on_hub,
    without_timms_weights,
    without_torchvisions_weights,
)
from fedvit.models.mlp import IMAGE_SIZE, Mlp
from fedvit.models.plugins.attach import attach, classifier_names
from fedvit.models.token_skipping import all_tokens
from fedvit.models.weights import load_weights_

# A ViT for 8-pixel digits: small enough for a laptop, deep enough that it matters which layers are personal.
MICRO = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 4, "num_heads": 3, "mlp_ratio": 2}

PYTHON = "python"  # the name of a module that was passed from Python
TORCHVISION = ("resnet18", "resnet50", "resnet50_gn", "densenet121", "shufflenet_v2_x0_5")
WITHOUT_PATCHES = (*TORCHVISION, "mlp")
CLAIMED = ("vision_transformer", "vision_transformer_hybrid", "deit")  # timm's modules of the models that are tested


def build(
    settings: ModelSettings, classes: int, plugins: tuple[Plugin, ...], seed: int, own: nn.Module | None = None
) -> nn.Module:
    """Build the model with its plugins, every initial value keyed by the seed; `own` is a module from Python.

    The backbone does not depend on the plugins, so the rows of one comparison start from the same weights.
    """
    with randomness.seeded(seed, "model"):
        model = backbone(settings, classes) if settings.name != PYTHON else _copy_of(own, settings, classes)
    name_groups_(model, settings.groups or {})
    for plugin in plugins:
        with randomness.seeded(seed, "plugin", plugin.kind):
            attach(model, plugin, from_scratch=settings.from_scratch, size=input_size(settings))
    return model


def backbone(settings: ModelSettings, classes: int) -> nn.Module:
    """Build the plain timm or torchvision model."""
    sizes = sizes_of(settings)
    if settings.name in ("vit_micro", "mlp") and (settings.weights is not None or settings.pretrained):
        raise UserError(
            f"{settings.name} has no pre-trained weights: choose a timm model, such as vit_tiny_patch16_224"
        )
    if settings.name == "vit_micro":
        return _checked_create(
            lambda: timm.models.vision_transformer.VisionTransformer(**(MICRO | sizes), num_classes=classes),
            settings,
        )
    check_name(settings.name)
    if is_on_hub(settings.name):
        return _from_hub(settings, classes, sizes)
    if settings.name in WITHOUT_PATCHES and settings.patch_size is not None:
        raise UserError(f"{settings.name} has no patches: leave --patch-size out")
    if settings.name == "mlp":
        return Mlp(input_size(settings), classes)
    if settings.name in TORCHVISION:
        model = _checked_create(lambda: _convolutional(settings, classes), settings)
    else:
        if not is_claimed(settings.name):
            sizes = {"img_size": input_size(settings), **sizes}  # a convolutional network refuses it, see below
        model = _checked_create(
            lambda: timm.create_model(settings.name, pretrained=settings.pretrained, num_classes=classes, **sizes),
            settings,
        )
    if settings.weights is not None:
        load_weights_(model, settings.weights)
    return model


def _from_hub(settings: ModelSettings, classes: int, sizes: dict[str, Any]) -> nn.Module:
    """Build the model that the hub describes; its weights come from its safetensors file, and nothing is unpickled."""
    found = hub_model(settings.name)
    options = {**found.arguments, **sizes, "pretrained_cfg": dict(found.pretrained_cfg), "num_classes": classes}
    model = _checked_create(lambda: timm.create_model(found.architecture, **options), settings)
    weights = hub_weights(settings.name) if settings.pretrained else settings.weights
    if weights is not None:
        load_weights_(model, weights)
    return model


def portable(settings: ModelSettings) -> ModelSettings:
    """Return settings from which a model is rebuilt without its initial weights, and without a network.

    A model on the hub becomes the architecture that it is or, if the hub gives it other arguments than sizes, a module
    that its user must bring.
    """
    settings = settings.model_copy(update={"weights": None, "pretrained": False, "fingerprint": None})
    if not is_on_hub(settings.name):
        return settings
    found = hub_model(settings.name)
    if set(found.arguments) - {"img_size", "patch_size"}:
        return settings.model_copy(update={"name": PYTHON})
    patch = settings.patch_size or found.arguments.get("patch_size")
    return settings.model_copy(update={"name": found.architecture, "patch_size": patch})


def sizes_of(settings: ModelSettings) -> dict[str, Any]:
    """Return the sizes that differ from the model's own, by timm's names."""
    sizes: dict[str, Any] = {}
    if settings.image_size not in (None, input_size(settings.model_copy(update={"image_size": None}))):
        sizes["img_size"] = settings.image_size
    if settings.patch_size is not None:
        sizes["patch_size"] = settings.patch_size
    return sizes


def _copy_of(own: nn.Module | None, settings: ModelSettings, classes: int) -> nn.Module:
    """Copy a module from Python, and check that it accepts our images and returns one number per class."""
    if own is None:
        raise UserError(
            "the model was a module from Python and no file holds it: pass it again, built in the same way, to "
            "fedvit.load_run(FOLDER, model=module) or fedvit.run(model=module, ...)"
        )
    if settings.fingerprint not in (None, fingerprint(own.state_dict())):
        raise UserError(
            "this module's weights are not those that the run began with: build it in the same way, with the same "
            "seed, before anything trains it"
        )
    model = copy.deepcopy(own)
    if settings.weights is not None:
        load_weights_(model, settings.weights)
    size = input_size(settings)
    was_training = model.training
    try:
        with torch.no_grad():
            found = tuple(model.eval()(torch.zeros(2, 3, size, size)).shape)
    except Exception as problem:  # a user's module may raise anything
        raise UserError(f"your module cannot take images of shape (2, 3, {size}, {size}): {problem}") from problem
    if found != (2, classes):
        raise UserError(
            f"your module should return one number for each of the {classes} classes, shape (2, {classes}) for two "
            f"images; found {found}"
        )
    return model.train(was_training)


def check_name(name: str) -> None:
    """Raise an error if we cannot build a model of this name."""
    if name == "vit_micro" or name in WITHOUT_PATCHES or timm.is_model(name):
        return
    if is_on_hub(name):
        hub_model(name)
        return
    known = [*timm.list_models("vit_*"), *timm.list_models("deit*"), *WITHOUT_PATCHES, "vit_micro"]
    raise UserError(
        f"unknown model {name!r}; {hint(name, known)}any ViT in timm.list_models() works, or "
        f"{', '.join(WITHOUT_PATCHES)}"
    )


def is_claimed(name: str) -> bool:
    """Return whether a model is of a kind that we test; a module from Python is its owner's to judge."""
    if name in ("vit_micro", PYTHON) or name in WITHOUT_PATCHES:
        return True
    name = architecture_of(name)
    return timm.is_model(name) and timm.models.model_entrypoint(name).__module__.rpartition(".")[2] in CLAIMED


def patch_size_of(settings: ModelSettings) -> int | None:
    """Return the side of a patch, or None if only the built model knows it."""
    if settings.patch_size is not None:
        return settings.patch_size
    if settings.name == "vit_micro":
        return int(MICRO["patch_size"])
    if is_on_hub(settings.name) and "patch_size" in hub_model(settings.name).arguments:
        return int(hub_model(settings.name).arguments["patch_size"])
    found = re.search(r"patch(\d+)", architecture_of(settings.name))
    return int(found[1]) if found and is_claimed(settings.name) else None


def check_patches(settings: ModelSettings) -> None:
    """Refuse an image size that is no multiple of the patch size: the rest of every image would be cut off."""
    size, patch = input_size(settings), patch_size_of(settings)
    if patch is None or settings.name in WITHOUT_PATCHES or size % patch == 0:
        return
    fits = [number for number in (size // patch * patch, (size // patch + 1) * patch) if number]
    raise UserError(
        f"images of {size} pixels do not consist of whole patches of {patch}: use --image-size "
        f"{' or '.join(map(str, fits))}, or another --patch-size"
    )


def _convolutional(settings: ModelSettings, classes: int) -> nn.Module:
    """Build one of torchvision's networks, to which the papers compare; a pre-trained one gets a fresh classifier."""
    import torchvision.models

    name, groups = settings.name.removesuffix("_gn"), settings.name.endswith("_gn")
    options = {"norm_layer": _group_norm} if groups else {}
    if not settings.pretrained:
        model: nn.Module = torchvision.models.get_model(name, num_classes=classes, **options)
        return model
    if groups:
        raise UserError(f"torchvision has no weights for {settings.name}: give --weights, or train from scratch")
    model = torchvision.models.get_model(name, weights="DEFAULT")
    (path,) = classifier_names(model)
    model.set_submodule(path, nn.Linear(model.get_submodule(path).in_features, classes))  # type: ignore[arg-type]
    return model


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


def _checked_create(create: Callable[[], nn.Module], settings: ModelSettings) -> nn.Module:
    """Create a model, and report timm's own errors about names and sizes as a user's mistake."""
    try:
        return create()
    except (RuntimeError, AssertionError, TypeError, ValueError, OSError) as problem:
        if not is_claimed(settings.name) and isinstance(problem, TypeError):
            raise UserError(
                f"{settings.name} is not supported: expected a ViT or DeiT of timm, such as vit_tiny_patch16_224, or "
                f"{', '.join(WITHOUT_PATCHES)}. From Python, any module works: fedvit.run(model=timm.create_model("
                f"{settings.name!r}, num_classes=N), image_size={input_size(settings)}, groups={{'head': [PATH]}}), "
                "where PATH is that of its classifier"
            ) from problem
        if settings.pretrained and isinstance(problem, OSError):
            explain = without_torchvisions_weights if settings.name in TORCHVISION else without_timms_weights
            raise UserError(explain(settings.name, problem)) from problem
        sizes = f"image size {settings.image_size}, patch size {settings.patch_size}"
        source = ", pre-trained weights from timm's hub" if settings.pretrained else ""
        raise UserError(f"cannot build {settings.name} with {sizes}{source}: {problem}") from problem


def input_size(settings: ModelSettings) -> int:
    """Return the side of the model's images in pixels, without building the model."""
    if settings.image_size is not None:
        return settings.image_size
    if settings.name == "vit_micro":
        return int(MICRO["img_size"])
    if settings.name == PYTHON:
        raise UserError("a module from Python does not say how large its images are: give image_size, in pixels")
    check_name(settings.name)
    if settings.name == "mlp":
        return IMAGE_SIZE
    if is_on_hub(settings.name):
        return hub_model(settings.name).image_size
    config = None if settings.name in TORCHVISION else timm.get_pretrained_cfg(settings.name)
    return int(config.input_size[-1]) if config is not None else 224


def input_settings(model: nn.Module, settings: ModelSettings) -> InputSettings:
    """Take the size from the settings, and mean and standard deviation from the model's own configuration."""
    half, imagenet = (0.5, 0.5, 0.5), {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    config = imagenet if settings.name in TORCHVISION else getattr(model, "pretrained_cfg", None) or {}
    return InputSettings(input_size(settings), tuple(config.get("mean", half)), tuple(config.get("std", half)))


def macs_per_example(model: nn.Module, size: int) -> int:
    """Count the multiply-adds of one image's forward pass, including plugins, as torch itself counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad(), all_tokens(model), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, size, size, device=device))
    model.train(was_training)
    return int(counter.get_total_flops()) // 2
