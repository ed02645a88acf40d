"""What frozen layers make of an image is computed once, and no result shows it but in how its sums round."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from fedvit.core.settings import ModelSettings
from fedvit.engine import activation_cache, worker
from fedvit.engine.activation_cache import Start, activations, first_learned, is_random_before
from fedvit.methods import METHODS
from fedvit.methods.tunes import make_tune, trainable_names
from fedvit.models.build import build
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import Run
from tests.conftest import Bench, almost, assert_close_trees, finish, tiny
from tests.contract.test_every_plan import FEDERATED, IMPOSSIBLE, SETTINGS, weights

DEEP = "blocks.3,head"  # of the four blocks of the default model
NEVER = {"distrans", "fedfed", "fedfa"}  # learn in front of the network, or draw noise inside it
PERSONAL_PARTS = {"fedperfix", "prefix_z", "prefix_r", "prompts", "adapters"}  # learn in every block
FILES = ("rounds.jsonl", "clients.csv")


def assert_close_runs(a: Path, b: Path) -> None:
    """Equal up to rounding: images come in other batches."""
    assert Run(a).rounds == almost(Run(b).rounds)
    assert Run(a).clients == almost(Run(b).clients)
    found, expected = ({name: load(blob) for name, blob in weights(folder).items()} for folder in (a, b))
    assert found.keys() == expected.keys()
    for name in found:
        assert_close_trees(found[name], expected[name])


def starts(label: str, tmp_path: Path) -> Start | None:
    found = Bench(tiny(label), tmp_path).worker.activations
    return found.start if found else None


@pytest.mark.parametrize("method", [name for name in FEDERATED if f"{name}+head" not in IMPOSSIBLE])
def test_every_method_ends_the_same_with_and_without_room_to_keep(method: str, tmp_path: Path) -> None:
    runs = {}
    for megabytes in (0, 100):
        experiment = tiny(f"{method}+head", {**SETTINGS.get(method, {}), "run.cache_mb": megabytes}, cohort=3)
        runs[megabytes] = finish(experiment, tmp_path / str(megabytes))
    assert_close_runs(runs[0], runs[100])
    kept = starts(f"{method}+head", tmp_path / "bench")
    assert (kept is None) == (method in NEVER | PERSONAL_PARTS)


@pytest.mark.parametrize("label", [f"fedavg+{DEEP}", f"fedper+{DEEP}", f"moon+{DEEP}", "fed_rod+head", "pfededit+head"])
def test_starting_late_equals_the_whole_pass(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = tiny(label, batch=16, cohort=3)
    late = finish(experiment, tmp_path / "late")
    assert "is frozen" in (late / "log.txt").read_text()
    monkeypatch.setattr(worker, "first_learned", lambda module, trainable: None)
    whole = finish(experiment, tmp_path / "whole")
    assert "is frozen" not in (whole / "log.txt").read_text()
    assert_close_runs(late, whole)


def test_frozen_layers_run_once_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    real = activation_cache.activations
    monkeypatch.setattr(activation_cache, "activations", lambda m, s, x: computed.append(len(x)) or real(m, s, x))
    experiment = tiny("fedper+head", clients=3, cohort=3, rounds=3, epochs=3)
    finish(experiment, tmp_path / "r")
    bench = Bench(experiment, tmp_path / "b")
    images = sum(len(part.train) + len(part.test) for part in bench.worker.partition.clients.values())
    assert images <= sum(computed) <= images + 10  # and a few to try whether it is equal


def test_a_cache_without_room_for_all_gives_the_same(tmp_path: Path) -> None:
    bench = Bench(tiny("fedper+head"), tmp_path)
    full = bench.worker.activations
    assert full is not None
    size = full.kept[:1].numel() * 4
    small = activation_cache.Activations(
        full.module, full.start, full.images, full.inputs, full.settings, limit=10 * size + 1
    )
    for chosen in (torch.arange(7), torch.arange(3, 20), torch.tensor([5, 100, 2, 18]), torch.tensor([19])):
        torch.testing.assert_close(small(chosen), full(chosen), rtol=1e-4, atol=1e-5)  # in other batches
    assert small.used == small.room == 10
    assert small.megabytes * 1e6 == 10 * size


def test_a_killed_run_continues_the_same_with_an_empty_cache(tmp_path: Path) -> None:
    experiment = tiny(f"fedper+{DEEP}", rounds=3)
    once = finish(experiment, tmp_path / "once")
    steps = run_rounds(experiment, tmp_path / "twice")
    next(steps)
    steps.close()
    twice = finish(experiment, tmp_path / "twice", resume=True)
    for name in FILES:
        assert (once / name).read_bytes() == (twice / name).read_bytes(), name
    assert weights(once) == weights(twice)


def test_augmentation_trains_on_images_and_says_so(tmp_path: Path) -> None:
    folder = finish(tiny("fedper+head", {"train.augment": "flip"}), tmp_path / "r")
    assert "only evaluation starts at the classifier" in (folder / "log.txt").read_text()
    client = Bench(tiny("fedper+head", {"train.augment": "flip"}), tmp_path / "b").worker.client("0", 1, {})
    assert next(client.batches(1, "train"))[0].ndim == 4
    client = Bench(tiny("fedper+head"), tmp_path / "c").worker.client("0", 1, {})
    assert next(client.batches(1, "train"))[0].ndim == 2


def test_noise_inside_frozen_layers_is_not_kept(tmp_path: Path) -> None:
    folder = finish(tiny("fedfa+head"), tmp_path / "r")
    assert "computed anew for every batch" in (folder / "log.txt").read_text()
    assert starts(f"fedfa+{DEEP}", tmp_path / "b") is None


@pytest.mark.parametrize(
    ("name", "tune", "start"),
    [
        ("vit_micro", "head", Start(classifier="head")),
        ("vit_micro", DEEP, Start(block=3)),
        ("vit_micro", "bias", None),
        ("vit_micro", "adapter", None),  # one adapter for all blocks
        ("vit_micro", "full", None),
        ("deit_tiny_distilled_patch16_224", "head", Start(block=12)),  # two classifiers, two tokens
        ("deit_tiny_distilled_patch16_224", "blocks.11,head", Start(block=11)),
        ("vit_small_patch16_dinov3.lvd1689m", "head", Start(classifier="head")),
        ("resnet18", "head", Start(classifier="fc")),
    ],
)
def test_where_the_pass_may_begin(name: str, tune: str, start: Start | None) -> None:
    chosen = make_tune({"name": tune})
    model = build(ModelSettings(name=name, image_size=None if name == "vit_micro" else 32), 5, chosen.build, 0).eval()
    assert first_learned(model, trainable_names(model, chosen, ())) == start
    if start is None:
        return
    size = 8 if name == "vit_micro" else 32
    x = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    assert not is_random_before(model, start)
    with torch.no_grad():
        expected = model(x)
        activation_cache.accept_activations_(model, start)
        assert torch.equal(model(x), expected)
        torch.testing.assert_close(model(activations(model, start, x)), expected, rtol=1e-4, atol=1e-5)


def test_dropout_before_the_start_is_seen() -> None:
    model = build(ModelSettings(), 5, (), 0)
    model.blocks[3].attn.proj_drop.p = 0.1
    assert not is_random_before(model, Start(block=3))
    assert is_random_before(model, Start(classifier="head"))
    model.blocks[0].attn.proj_drop.p = 0.1
    assert is_random_before(model, Start(block=3))


def test_split_methods_see_images(tmp_path: Path) -> None:
    for name in METHODS:
        if name not in FEDERATED:
            assert Bench(tiny(f"{name}+head"), tmp_path / name).worker.activations is None
