"""Models of timm on the Hugging Face hub by name, and how to bring weights to a machine without a network."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_model_config_from_hf

from fedvit.core.errors import UserError, one_line

HUB = "hf-hub:"  # timm's prefix, as in hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION
WEIGHTS = "model.safetensors"  # no other file is read, because others are pickled


@dataclass(frozen=True)
class HubModel:
    """What a model's config.json on the hub says: the architecture, its arguments, and how images go in."""

    architecture: str
    arguments: Mapping[str, Any]
    pretrained_cfg: Mapping[str, Any]

    @property
    def image_size(self) -> int:
        found = self.arguments.get("img_size") or self.pretrained_cfg.get("input_size", (3, 224, 224))
        return int(found if isinstance(found, int) else found[-1])


def is_on_hub(name: str) -> bool:
    return name.startswith(HUB)


def architecture_of(name: str) -> str:
    """Return the architecture of a model of timm, whose name may be one on the hub."""
    return hub_model(name).architecture if is_on_hub(name) else name


@cache
def hub_model(name: str) -> HubModel:
    """Read a model's config.json, from the hub's cache on this machine if it is there."""
    try:
        inputs, architecture, arguments = load_model_config_from_hf(name.removeprefix(HUB))
    except (KeyError, TypeError, AttributeError) as problem:
        raise UserError(
            f"{name} has no description that timm can read ({one_line(problem)}): choose another"
        ) from problem
    except Exception as problem:  # of the hub, of the network, and of names that are none
        raise UserError(_from_hub(name, problem)) from problem
    if not timm.is_model(architecture):
        raise UserError(
            f"{name} is a {one_line(architecture)}, which timm {timm.__version__} does not know: choose another"
        )
    return HubModel(architecture, {k: v for k, v in (arguments or {}).items() if k != "num_classes"}, inputs)


def hub_weights(name: str) -> Path:
    """Return the file of a model's weights, downloaded if it is not in the hub's cache."""
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return Path(hf_hub_download(repository, WEIGHTS, revision=revision or None))
    except Exception as problem:
        raise UserError(_from_hub(name, problem)) from problem


# What to do without a network.


def without_timms_weights(name: str, problem: Exception) -> str:
    """Say where the weights of one of timm's models are looked for, and how to bring them."""
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        return f"timm has no pre-trained weights of {name} on its hub ({one_line(problem)}): use --weights FILE"
    folder = config.hf_hub_id.rpartition("/")[2]
    fetch = ["hf", "download", config.hf_hub_id, WEIGHTS, "--local-dir", folder]
    return (
        f"cannot get the pre-trained weights of {name} ({one_line(problem)}). They are looked for in "
        f"{_cached(config.hf_hub_id)} and on the Hugging Face hub. On a machine with a network, run "
        f"`{shlex.join(fetch)}`, bring the folder here, and use --weights {shlex.quote(f'{folder}/{WEIGHTS}')} "
        "instead of --pretrained"
    )


def without_torchvisions_weights(name: str, problem: Exception) -> str:
    """Say where the weights of one of torchvision's models are looked for, and how to bring them."""
    import torchvision.models

    url = torchvision.models.get_model_weights(name)["DEFAULT"].url
    place = Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(url)
    return (
        f"cannot get the pre-trained weights of {name} ({one_line(problem)}). They are looked for in {place} and at "
        f"{url}. Fetch that file on a machine with a network, and bring it to that place"
    )


def _from_hub(name: str, problem: Exception) -> str:
    repository, _, revision = name.removeprefix(HUB).partition("@")
    fetch = ["hf", "download", repository, "config.json", WEIGHTS, *(["--revision", revision] if revision else [])]
    place = _cached(repository)
    return (
        f"cannot get {name} ({one_line(problem)}). It is looked for in {place} and on the Hugging Face hub. On a "
        f"machine with a network, run `{shlex.join(fetch)}`, and bring its folder {place.name} to {place.parent}"
    )


def _cached(repository: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
