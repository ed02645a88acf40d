"""Every method and every tune leaves the run as a file that predicts as the run did, or says why it cannot."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fedvit
from fedvit.core.errors import UserError
from fedvit.core.metrics import score
from fedvit.core.settings import ModelSettings
from fedvit.data.dataset import Dataset
from fedvit.data.sources import load_digits
from fedvit.engine.worker import client_data, image_tensors, load_data
from fedvit.methods import METHODS
from fedvit.methods.tunes import TUNES
from fedvit.models.build import build
from fedvit.models.folding import CannotFoldError
from fedvit.models.plugins.specs import FeatureNoise, HeadMaker, Lora, Prefix, SecondHead, Splitter
from fedvit.models.width import narrow
from fedvit.runs.description import Description, Inputs
from fedvit.runs.execute import run_rounds
from fedvit.runs.export import export, load_model, save
from fedvit.runs.folder import Run
from fedvit.runs.model_file import TOLERANCE, inputs_of, plain_model
from fedvit.runs.model_file import write_checked as compare_and_keep
from fedvit.runs.models import describe, open_run, plugin_table
from tests.conftest import finish, tiny
from tests.unit.cli.test_command_line import call

SETTINGS: dict[str, dict[str, Any]] = {"cd2_pfed": {"ramp": 2}, "fedfed": {"distill_rounds": 1}}
NOT_PLAIN = {  # method or tune -> why its model is more than the plain one
    "fedperfix": "tanh", "prefix": "tanh", "prompts": "additional tokens", "prompt": "additional tokens",
    "adapters": "activation", "adapter": "activation", "moon": "projection", "distrans": "twice",
    "fesvibs": "leave the body early",
}  # fmt: skip
NO_SERVER = {
    "local", "fedper", "fedrep", "fedbn", "vanilla_attention", "fedperfix", "prefix_z", "prefix_r", "prompts",
    "adapters", "custom", "distrans", "fedv", "fedvz", "festa", "splitfed_v1", "splitfed_v2", "minibatch_sfl",
    "fesvibs",
}  # fmt: skip
CROSSED = [
    "fedper+head", "fedper+lora", "fedper+prompt", "fed_rod+lora", "heterofl+lora", "prefix_z+lora", "fedrolex+prompt",
    "fedv+lora", "ditto+bias", "fedbabu+adapter", "fedavg+norm,blocks.1",
]  # fmt: skip
LABELS = [*METHODS, *(f"fedavg+{tune}" for tune in TUNES), *CROSSED]


def small(label: str, sets: dict[str, Any] | None = None, **flags: Any) -> Any:
    sets = {**SETTINGS.get(label, {}), "min_samples": 20, **(sets or {})}
    return tiny(label, sets, **{"clients": 4, "samples": 320, "eval_every": 0, **flags})


@cache
def digits() -> Dataset:
    return load_digits()


def scored(model: nn.Module, run: Run, client: str | None) -> dict[str, float]:
    """The run's own metrics of a model on a client's test images, or on everybody's."""
    dataset, split = load_data(run.experiment, digits())
    inputs = inputs_of(model.description)  # type: ignore[arg-type]
    test = split.global_test if client is None else split.clients[client].test
    images, labels = image_tensors(dataset)
    part = next(iter(split.clients.values()))
    data = client_data(images, labels, dataset.classes, part)
    return score(model, data, torch.from_numpy(test), inputs, torch.device("cpu"))


def written(run: Run, out: Path, *clients: str, server: bool = False, form: Any = "timm") -> list[Any]:
    return list(export(run, clients=list(clients), server=server, everything=False, form=form, out=out))


def opened_by_timm(path: Path) -> nn.Module:
    """What a user without fedvit does."""
    with safe_open(path, "pt") as file:
        description = json.loads(file.metadata()["fedvit"])
    model = timm.create_model(**description["timm"])
    model.load_state_dict(load_file(path), strict=True)
    assert type(model).__module__.startswith("timm.")
    assert len(description["classes"]) == 10
    as_is = {"interpolation": "bilinear", "antialias": False}
    assert description["input"] == {"size": 8, "mean": [0.5] * 3, "std": [0.5] * 3, **as_is}
    model.description = fedvit.load_model(path).description  # type: ignore[assignment]
    return model.eval()


@pytest.mark.parametrize("label", LABELS)
def test_every_export_predicts_as_the_run_did(label: str, tmp_path: Path) -> None:
    run = Run(finish(small(label), tmp_path / "run", dataset=digits()))
    trained = next(row for row in run.clients if row["rounds_trained"])
    untrained = next((row for row in run.clients if not row["rounds_trained"]), run.clients[-1])
    method, _, tune = label.partition("+")
    why = NOT_PLAIN.get(method) or NOT_PLAIN.get(tune)
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    rows = {row["client"]: row for row in (trained, untrained)}
    for one in written(run, tmp_path / "out", *rows):
        description, row = one.description, rows[one.description.client]
        assert (description.timm is None) == bool(why), description.not_timm
        assert not why or why in description.not_timm
        model = fedvit.load_model(one.path) if why else opened_by_timm(one.path)
        found = scored(model, run, row["client"])
        assert found["accuracy"] == row["personal_accuracy"]
        assert found["loss"] == pytest.approx(row["personal_loss"], abs=1e-5)
        assert description.checked.difference <= description.checked.tolerance
    assert before == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}, "the run changed"
    if method in NO_SERVER:
        with pytest.raises(UserError, match=r"no model of its own.*--client NAME"):
            written(run, tmp_path / "out", server=True)
        return
    (one,) = written(run, tmp_path / "out", server=True)
    assert one.path.name == "server.safetensors"
    found = scored(fedvit.load_model(one.path), run, None)
    if method == "fed_rod":
        generic = [row["generic_loss"] * row["test_samples"] for row in run.clients]
        assert found["loss"] == pytest.approx(sum(generic) / sum(row["test_samples"] for row in run.clients), abs=1e-5)
    else:
        assert found["accuracy"] == run.summary["server_accuracy"]


# What is folded, on models that no run here could train in a second.


def description_for(model: ModelSettings, plugins: tuple[Any, ...], rate: float = 1.0) -> Description:
    return Description(
        view="personal", round=1, method={"name": "mine"}, tune={"name": "full"}, model=model,
        plugins=[plugin_table(plugin) for plugin in plugins], rate=rate, classes=list("abc"),
        input=Inputs(size=32, mean=(0.5,) * 3, std=(0.5,) * 3), image=(32, 32, 3), precision="fp32",
    )  # fmt: skip


FOLDED = [
    ("deit_tiny_distilled_patch16_224", (SecondHead(), HeadMaker()), 1.0),
    ("deit_tiny_distilled_patch16_224", (Lora(),), 0.3),
    ("vit_tiny_patch16_224", (Prefix(bottleneck=None, init="random"), Lora(), Splitter(), FeatureNoise()), 1.0),
    ("resnet18", (), 1.0),
    ("resnet50_gn", (), 1.0),
    ("densenet121", (), 1.0),
]


@pytest.mark.parametrize(("name", "plugins", "rate"), FOLDED)
def test_linear_plugins_become_part_of_the_plain_model(name: str, plugins: tuple[Any, ...], rate: float) -> None:
    settings = ModelSettings(name=name, image_size=32)
    model = build(settings, 3, plugins, 0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    model = narrow(model, rate) if rate < 1 else model
    description, weights = plain_model(model, description_for(settings, plugins, rate))
    assert description.timm is not None
    plain = timm.create_model(**description.timm.arguments()).eval()
    plain.load_state_dict(weights, strict=True)
    x = torch.randn(3, 3, 32, 32, generator=generator)
    found, expected = plain(x), model(x)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1)
    if plugins:  # the plugins matter here, so leaving them out would have been noticed
        bare = timm.create_model(**description.timm.arguments()).eval()
        bare.load_state_dict({key: value for key, value in model.state_dict().items() if key in weights})
        assert (bare(x) - expected).abs().max() > 10 * TOLERANCE * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize(("name", "rate"), [("shufflenet_v2_x0_5", 1.0), ("mlp", 1.0), ("resnet18", 0.5)])
def test_what_timm_does_not_have_is_built_again_from_its_description(name: str, rate: float, tmp_path: Path) -> None:
    settings = ModelSettings(name=name, image_size=32)
    model = build(settings, 3, (), 7).eval()
    model = narrow(model, rate) if rate < 1 else model
    description = description_for(settings, (), rate)
    with pytest.raises(CannotFoldError, match="timm has no such model"):
        plain_model(model, description)
    save(dict(model.state_dict()), description, tmp_path / "x.safetensors", "")
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(fedvit.load_model(tmp_path / "x.safetensors")(x), model(x))


def test_a_narrow_client_gets_a_smaller_timm_model(tmp_path: Path) -> None:
    sets = {"rates": "0=1,1=0.4,2=1,3=1"}
    run = Run(finish(small("heterofl", sets), tmp_path / "run", dataset=digits()))
    one, two = written(run, tmp_path, "0", "1")
    assert (one.description.timm.embed_dim, two.description.timm.embed_dim) == (48, 21)
    assert two.path.stat().st_size < one.path.stat().st_size / 2
    assert two.description.method["rates"] == "0.4", "a client's file names no other client"
    row = run.clients[1]
    assert scored(opened_by_timm(two.path), run, "1")["accuracy"] == row["personal_accuracy"]


@pytest.mark.parametrize("wire", ["int8", "bf16"])
def test_a_wire_that_rounds_is_part_of_the_exported_model(wire: str, tmp_path: Path) -> None:
    run = Run(finish(small("fedv", {"wire": wire}), tmp_path / "run", dataset=digits()))
    (one,) = written(run, tmp_path, "1")
    assert "method.wire" in one.description.not_timm
    found = scored(fedvit.load_model(one.path), run, "1")
    assert found["loss"] == pytest.approx(run.clients[1]["personal_loss"], abs=1e-5)


def test_a_file_whose_model_differs_is_not_written(tmp_path: Path, run: Run) -> None:
    model = run.model("1")
    opened, path = open_run(run), tmp_path / "x.safetensors"
    reference = torch.zeros(16, 10)
    save_to = lambda file, final: save(dict(model.state_dict()), final, file, "")  # noqa: E731
    with pytest.raises(UserError, match="was not written: its model differs"):
        compare_and_keep(path, describe(opened, "1"), reference, lambda file: load_model(file), save_to)
    assert not list(tmp_path.glob("x*"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(finish(small("fedper"), tmp_path_factory.mktemp("run") / "fedper", dataset=digits()))


# The command.


def test_all_writes_every_client_and_the_server_where_there_is_one(run: Run, tmp_path: Path) -> None:
    status, shown, message = call("export", run.folder, "--all", "--out", tmp_path / "a")
    assert status == 0, message
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        f"client-{i}.{kind}" for i in range(4) for kind in ("card.md", "safetensors")
    ]
    assert "plain timm; logits within" in shown
    other = finish(small("fedavg", rounds=1), tmp_path / "run", dataset=digits())
    assert call("export", other, "--all", "--out", tmp_path / "b")[0] == 0
    assert (tmp_path / "b" / "server.safetensors").is_file()
    assert call("export", other, "--server", "--out", tmp_path / "mine.safetensors")[0] == 0
    assert fedvit.load_model(tmp_path / "mine.safetensors").description.client is None  # type: ignore[union-attr]


MISTAKES = [
    (["--client", "9"], "no client '9' in"),
    (["--client", "9"], "there are 0, 1, 2, 3"),
    (
        ["--server"],
        "these weights never leave the clients: head.weight, head.bias. Take a client's model (--client NAME",
    ),
    ([], "say which model: --client NAME, --server or --all; the clients are 0, 1, 2, 3"),
    (["--client", "1", "--format", "tflite"], "--format expects timm or onnx"),
    (["--all", "--out", "x.safetensors"], "there are 4 models: name a folder"),
    (["--client", "1", "--out", "x.onnx"], "name it x.safetensors"),
]


@pytest.mark.parametrize(("arguments", "told"), MISTAKES)
def test_a_mistake_is_told(arguments: list[str], told: str, run: Run, tmp_path: Path) -> None:
    status, _, message = call("export", run.folder, "--out", tmp_path / "x", *arguments)
    assert status == 2
    assert told in message.replace("\n", " ")
    assert not (tmp_path / "x").exists()


def test_a_folder_that_is_not_a_run_says_where_runs_are(run: Run, tmp_path: Path) -> None:
    for command in (["export", tmp_path, "--all", "--out", tmp_path / "x"], ["predict", tmp_path, "x.png"]):
        status, _, message = call(*command)
        assert status == 2
        assert "is not a run: expected a folder with run.toml in it" in message.replace("\n", " ")
    with pytest.raises(UserError, match=r"there are runs inside it: .*fedper"):
        fedvit.load_run(run.folder.parent)
    with pytest.raises(UserError, match="does not exist"):
        fedvit.load_run(tmp_path / "nowhere")


def test_an_unfinished_run_gives_its_last_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = run_rounds(small("fedper"), tmp_path / "run", dataset=digits())
    next(steps)
    steps.close()
    (one,) = written(Run(tmp_path / "run"), tmp_path, "1")
    assert one.description.round == 1
    assert "is not finished: this is round 1 of 2" in caplog.text
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.toml").write_bytes((tmp_path / "run" / "run.toml").read_bytes())
    with pytest.raises(UserError, match="no checkpoint yet"):
        Run(tmp_path / "empty").model("1")


def test_a_run_of_a_gpu_is_opened_without_one(run: Run, tmp_path: Path) -> None:
    import shutil

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    folder = shutil.copytree(run.folder, tmp_path / "run")
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace('device = "cpu"', 'device = "cuda:0"'))
    assert torch.equal(Run(folder).model("1").head.weight, run.model("1").head.weight)  # type: ignore[union-attr,arg-type]


def test_a_model_made_from_images_needs_the_images_it_was_tested_with(tmp_path: Path) -> None:
    data = {name: (digits().images[start::3], digits().labels[start::3]) for start, name in enumerate("abc")}
    flags = {"rounds": 1, "epochs": 1, "patch_size": 4, "eval_every": 0}
    run = fedvit.run(method="fedavg_ft", data=data, out=tmp_path / "run", **flags)
    weight = run.model("b").head.weight  # type: ignore[union-attr]
    bare = fedvit.load_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"makes a client's model from the client's images.*data=\.\.\."):
        bare.model("b")
    again = fedvit.load_run(tmp_path / "run", data=data).model("b")
    assert torch.equal(again.head.weight, weight)  # type: ignore[union-attr,arg-type]
    with pytest.raises(UserError, match="has changed since the run began"):
        fedvit.load_run(tmp_path / "run", data={**data, "a": data["b"]}).model("b")
    assert bare.server_model().description.view == "server"  # type: ignore[union-attr]


# Opening.


def test_load_model_refuses_what_it_cannot_trust(run: Run, tmp_path: Path) -> None:
    (one,) = written(run, tmp_path, "1")
    weights = load_file(one.path)

    def told(words: str, path: Path) -> None:
        with pytest.raises(UserError, match=words):
            fedvit.load_model(path)

    told("is a folder", tmp_path)
    told("no model at", tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("not weights")
    told("is not a safetensors file", tmp_path / "text.safetensors")
    save_file(weights, tmp_path / "bare.safetensors")
    told("does not say which model it is", tmp_path / "bare.safetensors")

    def changed(**update: Any) -> Path:
        content = {**json.loads(one.description.to_json()), **update}
        save_file(weights, tmp_path / "changed.safetensors", {"fedvit": json.dumps(content)})
        return tmp_path / "changed.safetensors"

    told(
        "does not fit the model that it describes",
        changed(timm={"model_name": "deit_tiny_patch16_224", "num_classes": 3}),
    )
    told(
        "cannot get hf-hub:someone/something",
        changed(timm={"model_name": "hf-hub:someone/something", "num_classes": 3}),
    )
    told("which is newer", changed(format=2, fedvit="9.9"))
    told("does not know", changed(classes=None))
    told("unknown plugin", changed(timm=None, plugins=[{"kind": "magic"}]))
    assert fedvit.load_model(changed(something="new")) is not None
