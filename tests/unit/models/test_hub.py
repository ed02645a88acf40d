"""Models by their names on the Hugging Face hub, from a cache on this machine, and what is said where nothing is."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import fedvit
from fedvit.core.errors import UserError
from fedvit.core.settings import ModelSettings
from fedvit.models.build import build, check_patches, input_settings, input_size, is_claimed
from fedvit.models.hub import hub_model
from fedvit.runs.folder import Run
from tests.conftest import finish, same_trees, tiny
from tests.unit.cli.test_command_line import call

ARCHITECTURE = "vit_tiny_patch16_224"
SMALL = {"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2}
REVISION = "0" * 40


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    hub_model.cache_clear()


def cached(name: str, arguments: dict[str, Any], *, architecture: str = ARCHITECTURE) -> torch.nn.Module:
    """Put a model where `hf download` would, and return it."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    inputs = {"input_size": [3, 16, 16], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "classifier": "head"}
    config = {"architecture": architecture, "num_classes": 7, "model_args": arguments, "pretrained_cfg": inputs}
    (snapshot / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model: torch.nn.Module = timm.create_model(ARCHITECTURE, num_classes=7, **SMALL)
    save_file(model.state_dict(), snapshot / "model.safetensors")
    return model


def test_a_model_on_the_hub_has_its_own_sizes_inputs_and_weights() -> None:
    there = cached("clinic/xray", SMALL)
    settings = ModelSettings(name="hf-hub:clinic/xray", pretrained=True)
    model = build(settings, 4, (), seed=0)
    expected = {name: tensor for name, tensor in there.state_dict().items() if not name.startswith("head.")}
    found = model.state_dict()
    assert same_trees({name: found[name] for name in expected}, expected)
    assert found["head.weight"].shape == (4, 24)  # our classes, so a fresh classifier
    assert (input_size(settings), is_claimed(settings.name)) == (16, True)
    inputs = input_settings(model, settings)
    assert (inputs.mean, inputs.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    scratch = build(settings.model_copy(update={"pretrained": False}), 4, (), seed=0).state_dict()
    assert not torch.equal(scratch["blocks.0.attn.qkv.weight"], expected["blocks.0.attn.qkv.weight"])
    with pytest.raises(UserError, match="whole patches of 8"):
        check_patches(settings.model_copy(update={"image_size": 20}))
    at = ModelSettings(name=f"hf-hub:clinic/xray@{REVISION}", pretrained=True)
    assert same_trees(build(at, 4, (), seed=0).state_dict(), found)


def test_a_run_trains_it_and_its_exports_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached("clinic/xray", SMALL)
    flags = {"model": "hf-hub:clinic/xray", "pretrained": True, "patch_size": None, "clients": 2, "samples": 80}
    run = Run(finish(tiny("fedper+bias", **flags), tmp_path / "r"))
    assert run.settings["model"]["name"] == "hf-hub:clinic/xray"
    (file,) = fedvit.export(run, clients=["1"], out=tmp_path / "out")
    found = {name: tensor.clone() for name, tensor in run.model("1").state_dict().items()}
    hub_model.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    if file.description.timm is not None:
        again = fedvit.load_model(file.path)
    else:
        with pytest.raises(UserError, match="module"):
            fedvit.load_model(file.path)
        again = fedvit.load_model(file.path, timm.create_model(ARCHITECTURE, num_classes=10, **SMALL))
    assert same_trees(again.state_dict(), found)


def test_with_sizes_alone_the_export_is_plain_timm(tmp_path: Path) -> None:
    sizes = {"img_size": 32, "patch_size": 16}
    cached("clinic/plain", sizes)
    folder = Path(constants.HF_HUB_CACHE) / "models--clinic--plain" / "snapshots" / REVISION
    save_file(timm.create_model(ARCHITECTURE, num_classes=7, **sizes).state_dict(), folder / "model.safetensors")
    flags = {"model": "hf-hub:clinic/plain", "pretrained": True, "patch_size": None, "clients": 2, "samples": 40}
    run = Run(finish(tiny("fedavg+head", rounds=1, **flags), tmp_path / "r"))
    (file,) = fedvit.export(run, clients=["1"], out=tmp_path / "out")
    assert file.description.timm is not None
    assert file.description.timm.model_name == ARCHITECTURE
    assert fedvit.load_model(file.path) is not None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--model", ARCHITECTURE, "--pretrained"],
            [
                "hf download timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k model.safetensors --local-dir",
                "models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k",
                "--weights vit_tiny_patch16_224.augreg_in21k_ft_in1k/model.safetensors instead of --pretrained",
            ],
        ),
        (
            ["--model", "hf-hub:clinic/gone@v2"],
            [
                "hf download clinic/gone config.json model.safetensors --revision v2",
                "bring its folder models--clinic--gone to",
            ],
        ),
        (["--model", "hf-hub:no name"], ["cannot get hf-hub:no name"]),
    ],
)
def test_without_a_network_it_says_where_it_looked_and_how_to_bring_the_file(
    flags: list[str], words: list[str], tmp_path: Path
) -> None:
    status, _, message = call("run", *flags, "--samples", "40", "--clients", "2", "--out", tmp_path / "r")
    assert status == 2
    text = " ".join(message.split())
    for word in words:
        assert word in text
    assert str(tmp_path / "hub") in message.replace("\n", "") or str(tmp_path / "hub") in text
    assert not (tmp_path / "r").exists()


def test_torchvisions_weights_are_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("Name or service not known")  # what a machine without a network says

    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    with pytest.raises(UserError, match=r"checkpoints/resnet18-\w+\.pth and at https://.*resnet18.*bring it to that"):
        build(ModelSettings(name="resnet18", pretrained=True), 4, (), seed=0)


def test_a_file_that_describes_no_model_of_timm_is_named() -> None:
    cached("clinic/other", {}, architecture="not_a_model")
    with pytest.raises(UserError, match="not_a_model, which timm"):
        input_size(ModelSettings(name="hf-hub:clinic/other"))
    config = Path(constants.HF_HUB_CACHE) / "models--clinic--other" / "snapshots" / REVISION / "config.json"
    config.write_text("{}")
    hub_model.cache_clear()
    with pytest.raises(UserError, match="no description that timm can read"):
        input_size(ModelSettings(name="hf-hub:clinic/other"))
