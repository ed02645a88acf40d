"""Sources: layouts told apart, images decoded once, and bad input named."""

import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedvit
from fedvit.core.batches import InputSettings, crop, image_batches, prepare
from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings, PartitionSettings
from fedvit.data import cache
from fedvit.data.arrays import from_clients
from fedvit.data.dataset import Dataset, keep_samples
from fedvit.data.partition.split import partition_dataset
from fedvit.data.size import size_of
from fedvit.data.sources import digits_from_file, digits_from_sklearn, list_datasets, load_dataset
from fedvit.engine.net import make_net
from fedvit.engine.worker import client_data, image_tensors
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny

CLASSES = ("cat", "dog", "owl")


def picture(path: Path, value: int, size: tuple[int, int] = (12, 9), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(value).integers(0, 40, (size[1], size[0], 3), dtype=np.uint8) + value % 200
    Image.fromarray(noise.astype(np.uint8)).convert(mode).save(path)


def folder(root: Path, *levels: tuple[str, ...], count: int = 8) -> Path:
    """An image folder with these names at each level, `count` images a leaf."""
    paths = [root]
    for names in levels:
        paths = [path / name for path in paths for name in names]
    for number, path in enumerate(paths):
        for image in range(count):
            picture(path / f"{image}.png", 20 * number + image)
    return root


def test_the_digits_of_the_file_are_those_of_scikit_learn() -> None:
    read = digits_from_file()
    assert read is not None
    for ours, theirs in zip(read, digits_from_sklearn(), strict=True):
        assert np.array_equal(ours, theirs)


def settings(root: Path, cache_folder: Path, **more: Any) -> DataSettings:
    return DataSettings(name=str(root), cache=cache_folder, **more)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_class_folders(tmp_path: Path, store: Path) -> None:
    data = load_dataset(settings(folder(tmp_path / "d", CLASSES), store), 16)
    assert data.images.shape == (24, 16, 16, 3)
    assert data.class_names == CLASSES
    assert data.sites is None
    assert data.official_test is None
    assert np.bincount(data.labels).tolist() == [8, 8, 8]


def test_site_folders_become_clients(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", ("mercy", "st mary"), CLASSES)
    data = load_dataset(settings(root, store), 16)
    assert data.site_names == ("mercy", "st mary")
    whole = partition_dataset(data, PartitionSettings(name="site", clients=2), settings(root, store), batch=4, seed=0)
    assert list(whole.clients) == ["mercy", "st mary"]
    for number, part in enumerate(whole.clients.values()):
        assert set(data.sites[part.train]) == {number}  # type: ignore[index]
        assert np.bincount(data.labels[part.test]).tolist() == [2, 2, 2]  # a quarter, stratified


@pytest.mark.parametrize("levels", [(("train", "test"), CLASSES), (("Train", "val"), CLASSES)])
def test_train_and_test_folders_are_respected(levels: Any, tmp_path: Path, store: Path) -> None:
    data = load_dataset(settings(folder(tmp_path / "d", *levels), store), 16)
    assert data.official_test is not None
    assert data.official_test.sum() == 24
    assert data.class_names == CLASSES


@pytest.mark.parametrize("levels", [(("a", "b"), ("train", "test"), CLASSES), (("train", "test"), ("a", "b"), CLASSES)])
def test_sites_may_have_their_own_train_and_test(levels: Any, tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", *levels)
    data = load_dataset(settings(root, store), 16)
    assert data.site_names == ("a", "b")
    whole = partition_dataset(data, PartitionSettings(name="site", clients=2), settings(root, store), batch=4, seed=0)
    assert [len(part.test) for part in whole.clients.values()] == [24, 24]


def test_tiny_imagenets_own_layout(tmp_path: Path, store: Path) -> None:
    root = tmp_path / "tiny"
    for wnid in ("n01", "n02"):
        for i in range(3):
            picture(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", i)
    for i in range(2):
        picture(root / "val" / "images" / f"val_{i}.JPEG", i)
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    (root / "wnids.txt").write_text("n01\nn02\n")
    (root / "words.txt").write_text("n01\tgoldfish, Carassius\nn02\ttoad\n")
    data = load_dataset(settings(root, store), 16)
    assert data.class_names == ("goldfish", "toad")
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    assert data.official_test is not None
    assert data.official_test.tolist() == [False] * 6 + [True] * 2


def test_tiny_imagenet_that_deviates_is_told_how(tmp_path: Path, store: Path) -> None:
    root = tmp_path / "tiny"
    for part in ("train", "val"):
        for wnid in ("n01", "n02"):
            picture(root / part / wnid / "images" / "0.JPEG", 1)
    (root / "wnids.txt").write_text("n01\nn02\n")
    data = load_dataset(settings(root, store), 16)  # val sorted into class folders, as many do
    assert data.official_test is not None
    assert data.official_test.tolist() == [False, False, True, True]
    (root / "wnids.txt").write_text("n01\nn02\nn03\n")
    with pytest.raises(UserError, match="no images of n03"):
        load_dataset(settings(root, store), 16)
    with pytest.raises(UserError, match="does not have Tiny-ImageNet's layout"):
        load_dataset(settings(tmp_path, store, layout="tiny_imagenet"), 16)


def test_domains_hold_several_clients_or_one(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", ("art", "photo"), CLASSES, count=20)
    data, where = load_dataset(settings(root, store), 8), settings(root, store)
    many = partition_dataset(data, PartitionSettings(name="domain", clients=6, alpha=1.0), where, batch=4, seed=0)
    assert list(many.clients) == ["art-0", "art-1", "art-2", "photo-0", "photo-1", "photo-2"]
    assert sum(len(part.train) + len(part.test) for part in many.clients.values()) == 120
    one = partition_dataset(data, PartitionSettings(name="domain", clients=2), where, batch=4, seed=0)
    assert list(one.clients) == ["art", "photo"]
    with pytest.raises(UserError, match="multiple of 2"):
        partition_dataset(data, PartitionSettings(name="domain", clients=3), where, batch=4, seed=0)


def test_a_run_on_site_folders_needs_no_other_flag(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "hospitals", ("mercy", "st mary", "north"), CLASSES)
    run = fedvit.run(
        data=root, method="fedper", rounds=1, epochs=1, patch_size=4, out=tmp_path / "r", settings={"cache": str(store)}
    )
    assert [client["client"] for client in run.clients] == ["mercy", "north", "st mary"]
    assert run.summary["partition"] == "site"
    assert run.summary["cohort"] == 3
    assert run.model("st mary")(torch.zeros(1, 3, 8, 8)).shape == (1, 3)


def test_images_are_decoded_once(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path / "d", CLASSES)
    first = load_dataset(settings(root, store), 16)
    monkeypatch.setattr(cache, "build", lambda *_, **__: pytest.fail("decoded again"))
    second = load_dataset(settings(root, store), 16)
    assert isinstance(second.images, np.memmap)
    assert not second.images.flags.writeable  # a private writable map would count as memory
    assert np.array_equal(first.images, second.images)


def test_a_changed_folder_is_decoded_again(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)
    before = np.array(load_dataset(settings(root, store), 16).images)
    picture(root / "cat" / "0.png", 199)
    after = load_dataset(settings(root, store), 16).images
    assert not np.array_equal(before[0], after[0])
    assert np.array_equal(before[1:], after[1:])


def test_a_folder_with_the_same_names_sizes_and_times_is_another_folder(tmp_path: Path, store: Path) -> None:
    import os

    for value, name in ((10, "a"), (200, "b")):
        for label in CLASSES:
            for i in range(4):
                path = tmp_path / name / label / f"{i}.bmp"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (value, value, value)).save(path)
                os.utime(path, (1, 1))
    assert load_dataset(settings(tmp_path / "a", store), 8).images.max() == 10
    assert load_dataset(settings(tmp_path / "b", store), 8).images.max() == 200


def test_a_damaged_cache_is_decoded_again(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)
    before = np.array(load_dataset(settings(root, store), 16).images)
    images = next(store.glob("*/images.npy"))
    images.write_bytes(images.read_bytes()[:100])
    assert np.array_equal(load_dataset(settings(root, store), 16).images, before)


@pytest.mark.attack
def test_links_are_followed_inside_the_folder_and_out_of_it_only_if_a_setting_says_so(
    tmp_path: Path, store: Path
) -> None:
    folder(tmp_path / "elsewhere", CLASSES)
    root = folder(tmp_path / "d", ("a", "b"), CLASSES)
    (root / "c").symlink_to(root / "a")
    assert load_dataset(settings(root, store), 16).site_names == ("a", "b", "c")
    (root / "d").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"d is a link that leads out of .*data.follow_links=true"):
        load_dataset(settings(root, store), 16)
    followed = settings(root, store).model_copy(update={"follow_links": True})
    assert load_dataset(followed, 16).site_names == ("a", "b", "c", "d")
    (root / "d").unlink()
    secret = tmp_path / "secret.png"
    secret.write_bytes(next((tmp_path / "elsewhere").rglob("*.png")).read_bytes())
    next((root / "b").rglob("*.png")).with_name("link.png").symlink_to(secret)
    with pytest.raises(UserError, match=r"link.png is a link that leads out"):
        load_dataset(settings(root, store), 16)
    assert load_dataset(followed, 16).site_names == ("a", "b", "c")


def test_a_link_to_a_folder_that_contains_it_is_an_error(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", ("a", "b"), CLASSES)
    (root / "a" / CLASSES[0] / "again").symlink_to(root)
    for follow in (False, True):
        with pytest.raises(UserError, match="again is a link to a folder that contains it"):
            load_dataset(settings(root, store).model_copy(update={"follow_links": follow}), 16)


@pytest.mark.attack
def test_an_image_with_more_pixels_than_the_setting_allows_is_named(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)
    big = root / CLASSES[0] / "big.png"
    Image.fromarray(np.zeros((40, 50), np.uint16)).save(big)
    few = settings(root, store).model_copy(update={"max_pixels": 1999})
    with pytest.raises(UserError, match=r"big.png has 50 x 40 pixels, over data.max_pixels=1999"):
        load_dataset(few, 16)
    skipped = load_dataset(few.model_copy(update={"skip_bad": True}), 16)
    assert "big.png" not in {Path(name).name for name in skipped.files}
    more = load_dataset(few.model_copy(update={"skip_bad": True, "max_pixels": 2000}), 16)
    assert len(more) == len(skipped) + 1


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    """16 bits of 89 million equal pixels compress to a few hundred kB; several threads decode such files in turn."""
    code = (
        "import resource, sys; from collections import Counter; from pathlib import Path;"
        "from concurrent.futures import ThreadPoolExecutor; from fedvit.data.decoding import decode;"
        "import numpy, PIL.Image; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "list(ThreadPoolExecutor(4).map(lambda n: decode(Path(sys.argv[1]), (8, 8), Counter()), range(4)));"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1000)"
    )
    Image.fromarray(np.zeros((9000, 9900), np.uint16)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 500_000
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bomb.png")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 900, "MB"


def test_a_split_notices_other_images(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)

    def source() -> str:
        where = settings(root, store)
        return partition_dataset(
            load_dataset(where, 16), PartitionSettings(name="iid", clients=2), where, batch=4, seed=0
        ).source

    before = source()
    assert before == source()
    picture(root / "cat" / "0.png", 199)
    assert source() != before


@pytest.mark.parametrize("damage", [b"not an image", b""])
def test_a_file_that_is_no_image_is_named_or_skipped(damage: bytes, tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)
    (root / "dog" / "3.png").write_bytes(damage)
    with pytest.raises(UserError, match=r"dog/3\.png.*skip_bad"):
        load_dataset(settings(root, store), 16)
    data = load_dataset(settings(root, store, skip_bad=True), 16)
    assert len(data) == len(data.images) == 23
    with pytest.raises(UserError, match=r"dog/3\.png"):
        load_dataset(settings(root, store), 16)


def test_a_truncated_image_is_named(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)
    picture(root / "owl" / "9.jpg", 3, (200, 200))
    blob = (root / "owl" / "9.jpg").read_bytes()
    (root / "owl" / "9.jpg").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(UserError, match=r"owl/9\.jpg cannot be read"):
        load_dataset(settings(root, store), 16)


def test_grey_and_colour_are_mixed_into_colour_and_said(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folder(tmp_path / "d", CLASSES)
    picture(root / "cat" / "grey.png", 7, mode="L")
    data = load_dataset(settings(root, store), 16)
    assert data.images.shape[3] == 3
    assert "mixes 1 gray and 24 color images" in caplog.text


def test_sixteen_bit_images_are_scaled_not_cut_off(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)
    Image.fromarray(np.full((8, 8), 257 * 100, dtype=np.uint16)).save(root / "cat" / "0.png")
    assert load_dataset(settings(root, store), 8).images[0].tolist() == np.full((8, 8, 3), 100).tolist()


def test_an_empty_class_is_named(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)
    (root / "emu").mkdir()
    with pytest.raises(UserError, match=r"the class 'emu'.*is empty"):
        load_dataset(settings(root, store), 16)


def test_sites_with_different_classes_are_named_unless_listed(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", ("a", "b"), CLASSES)
    folder(root / "c", ("cat", "dog"))
    with pytest.raises(UserError, match=r"different class names: c lacks owl.*data\.class_names"):
        load_dataset(settings(root, store), 16)
    data = load_dataset(settings(root, store, class_names="owl, dog, cat"), 16)
    assert data.class_names == ("owl", "dog", "cat")
    with pytest.raises(UserError, match="does not list: owl"):
        load_dataset(settings(root, store, class_names="dog,cat"), 16)


def test_mixed_depths_and_empty_folders_are_refused(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", CLASSES)
    folder(root / "zoo", CLASSES)
    with pytest.raises(UserError, match="mixes class/image"):
        load_dataset(settings(root, store), 16)
    with pytest.raises(UserError, match="expected class/image"):
        load_dataset(settings(root, store, layout="class"), 16)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no image folders"):
        load_dataset(settings(tmp_path / "empty", store), 16)


def test_a_class_with_one_image_is_trained_on_and_said(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folder(tmp_path / "d", ("a",), ("cat", "dog"))
    picture(root / "a" / "emu" / "0.png", 1)
    data = load_dataset(settings(root, store), 16)
    assert "has one image" in caplog.text
    part = partition_dataset(
        data, PartitionSettings(name="site", clients=1), settings(root, store), batch=2, seed=0
    ).clients["a"]
    assert 2 in data.labels[part.train]
    assert 2 not in data.labels[part.test]


def test_a_client_without_test_data_is_named(tmp_path: Path, store: Path) -> None:
    root = folder(tmp_path / "d", ("a", "b"), ("cat", "dog"))
    for name in ("cat", "dog"):
        for file in list((root / "b" / name).iterdir())[1:]:
            file.unlink()
    with pytest.raises(UserError, match="client b would have 2 training and 0 test images"):
        partition_dataset(
            load_dataset(settings(root, store), 8),
            PartitionSettings(name="site", clients=2),
            settings(root, store),
            batch=2,
            seed=0,
        )


# npz


def npz(path: Path, **replace: Any) -> Path:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 60), ("val", 10), ("test", 20)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count) % 3)[:, None].astype(np.uint8)
    arrays.update(replace)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def test_medmnist_files_grey_or_colour(tmp_path: Path) -> None:
    npz(tmp_path / "organamnist.npz")
    data = load_dataset(DataSettings(name="organamnist", dir=tmp_path), 8)
    assert data.images.shape == (90, 28, 28, 1)
    assert data.official_test is not None
    assert data.official_test.sum() == 20
    assert data.class_names == ("0", "1", "2")
    colour = np.zeros((60, 28, 28, 3), np.uint8)
    npz(
        tmp_path / "x.npz",
        train_images=colour,
        val_images=None,
        val_labels=None,
        test_images=colour[:20],
        class_names=["a", "b", "c"],
    )
    data = load_dataset(DataSettings(name="x.npz", dir=tmp_path), 8)
    assert data.images.shape == (80, 28, 28, 3)
    assert data.class_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("replace", "told"),
    [
        ({"train_labels": None}, "lacks train_labels"),
        ({"val_labels": None}, "val_images but no val_labels"),
        ({"train_labels": np.zeros((5, 1), int)}, "different lengths"),
        ({"train_images": np.zeros((60, 0, 28), np.uint8)}, "expected uint8 images"),
        ({"train_images": np.zeros((60, 28, 28), np.float32)}, "expected uint8 images"),
        ({"train_labels": np.zeros((60, 4), int)}, "one class number"),
        ({"class_names": ["only"]}, "1 class names for labels up to 2"),
    ],
)
def test_a_bad_npz_is_told_what_is_wrong(replace: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        load_dataset(DataSettings(name=str(npz(tmp_path / "bad.npz", **replace))), 8)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"\x93NUMPY nonsense"])
def test_a_damaged_npz_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.npz cannot be read"):
        load_dataset(DataSettings(name=str(tmp_path / "bad.npz")), 8)


def test_grey_and_colour_parts_of_an_npz_are_joined_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = load_dataset(
        DataSettings(name=str(npz(tmp_path / "x.npz", val_images=np.zeros((10, 28, 28, 3), np.uint8)))), 8
    )
    assert data.images.shape == (90, 28, 28, 3)
    assert "mixes gray and color" in caplog.text
    with pytest.raises(UserError, match="different sizes"):
        load_dataset(DataSettings(name=str(npz(tmp_path / "y.npz", val_images=np.zeros((10, 9, 9), np.uint8)))), 8)


def test_a_pickled_npz_is_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", train_images=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match="without pickles"):
        load_dataset(DataSettings(name=str(tmp_path / "evil.npz")), 8)


def test_a_missing_medmnist_file_is_told_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"organamnist\.npz is not in .*MedMNIST publishes it"):
        load_dataset(DataSettings(name="organamnist", dir=tmp_path), 8)
    with pytest.raises(UserError, match="did you mean 'organamnist'"):
        load_dataset(DataSettings(name="organamnst", dir=tmp_path), 8)


# torchvision: its real classes on small files of the same layout.


def idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize(("name", "where"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist_in_torchvisions_layout(name: str, where: str, tmp_path: Path) -> None:
    for part, count in (("train", 30), ("t10k", 20)):
        idx(tmp_path / where / "raw" / f"{part}-images-idx3-ubyte", np.zeros((count, 28, 28)))
        idx(tmp_path / where / "raw" / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    data = load_dataset(DataSettings(name=name, dir=tmp_path), 8)
    assert data.images.shape == (50, 28, 28, 1)
    assert data.official_test is not None
    assert data.official_test.sum() == 20
    assert len(data.class_names) == 10


def test_cifar_in_torchvisions_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda _: True)  # the real files' checksums are not ours
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    root = tmp_path / "cifar-10-batches-py"
    root.mkdir()
    for file in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]}
        (root / file).write_bytes(pickle.dumps(content))
    names = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    data = load_dataset(DataSettings(name="cifar10", dir=tmp_path), 8)
    assert data.images.shape == (24, 32, 32, 3)
    assert data.class_names[0] == "plane"


def test_pcam_in_torchvisions_layout(tmp_path: Path, store: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="PCam's files need h5py")
    (tmp_path / "pcam").mkdir()
    for number, (part, count) in enumerate((("train", 6), ("valid", 2), ("test", 4))):
        base = tmp_path / "pcam" / f"camelyonpatch_level_2_split_{part}"
        with h5py.File(f"{base}_x.h5", "w") as file:
            file["x"] = (
                np.full((count, 96, 96, 3), 10 * number, np.uint8)
                + np.arange(count, dtype=np.uint8)[:, None, None, None]
            )
        with h5py.File(f"{base}_y.h5", "w") as file:
            file["y"] = (np.arange(count) % 2).reshape(count, 1, 1, 1)
    data = load_dataset(DataSettings(name="pcam", dir=tmp_path, cache=store), 8)
    assert data.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 20, 21, 22, 23]
    assert data.labels.tolist() == [0, 1] * 6
    assert data.official_test is not None
    assert data.official_test.tolist() == [False] * 8 + [True] * 4
    data = load_dataset(DataSettings(name="pcam", dir=tmp_path, cache=store, join_val=False), 8)
    assert data.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 20, 21, 22, 23]
    assert data.labels.tolist() == [0, 1] * 5
    assert data.official_test is not None
    assert data.official_test.tolist() == [False] * 6 + [True] * 4


def test_validation_images_can_be_left_out(tmp_path: Path, store: Path) -> None:
    """FedPEFT samples PCam's training images from the official training set alone."""
    labels = np.arange(10, dtype=np.int64)
    here = npz(tmp_path / "x.npz", val_images=np.zeros((10, 28, 28), np.uint8), val_labels=labels)
    with_val, without = (DataSettings(name=str(here), join_val=join) for join in (True, False))
    assert len(load_dataset(with_val, 8)) - len(load_dataset(without, 8)) == 10
    assert [size_of(one, 8).images for one in (with_val, without)] == [
        len(load_dataset(with_val, 8)),
        len(load_dataset(without, 8)),
    ]
    for part, count in (("train", 4), ("val", 2), ("test", 3)):
        folder(tmp_path / "d" / part, CLASSES, count=count)
    where = settings(tmp_path / "d", store)
    assert len(load_dataset(where, 8)) == 27
    found = load_dataset(where.model_copy(update={"join_val": False}), 8)
    assert (len(found), found.official_test.sum()) == (21, 9)  # type: ignore[union-attr]
    pcam = [size_of(DataSettings(name="pcam", join_val=join), 8) for join in (True, False)]
    assert [(one.images, one.tests) for one in pcam] == [(327_680, 32_768), (294_912, 32_768)]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist", "pcam"])
def test_nothing_is_downloaded_unless_asked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("reached for the network"))
    for where in (
        "cifar.download_and_extract_archive",
        "mnist.download_and_extract_archive",
        "pcam.download_file_from_google_drive",
    ):
        monkeypatch.setattr(f"torchvision.datasets.{where}", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(UserError, match=r"data\.download=true"):
        load_dataset(DataSettings(name=name, dir=tmp_path), 8)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_the_catalogue_says_what_is_present(tmp_path: Path) -> None:
    npz(tmp_path / "organamnist.npz")
    folder(tmp_path / "hospitals", ("a", "b"), CLASSES, count=1)
    here = {entry["name"] for entry in list_datasets(DataSettings(dir=tmp_path)) if entry["present"]}
    assert here == {"digits", "organamnist", "hospitals"}


# From Python


def test_arrays_and_torch_datasets_per_client(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 2
    floats = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).float() / 255
    clients = {"a": (images, labels), "b": torch.utils.data.TensorDataset(floats, torch.from_numpy(labels))}
    data = from_clients(clients)
    assert np.array_equal(data.images[:40], data.images[40:])
    run = fedvit.run(
        data=clients, method="fedavg", rounds=1, epochs=1, patch_size=4, out=tmp_path / "r", class_names=["no", "yes"]
    )
    assert [client["client"] for client in run.clients] == ["a", "b"]
    with pytest.raises(UserError, match="client a has 40 images and 39 labels"):
        from_clients({"a": (images, labels[:39])})
    with pytest.raises(UserError, match=r"must lie in 0\.\.1"):
        from_clients({"a": (floats.numpy() * 300, labels)})


# Scarcity, unseen clients, batches


def test_samples_keep_the_same_number_of_every_class() -> None:
    digits = load_dataset(DataSettings(), 8)
    few = keep_samples(digits, 205, 0, train_only=False)
    assert sorted(np.bincount(digits.labels[few]).tolist()) == [20] * 5 + [21] * 5
    assert np.array_equal(few, keep_samples(digits, 205, 0, train_only=False))
    assert not np.array_equal(few, keep_samples(digits, 205, 1, train_only=False))
    whole = partition_dataset(
        digits, PartitionSettings(name="iid", clients=5), DataSettings(samples=205), batch=4, seed=0
    )
    used = np.sort(np.concatenate([np.concatenate([p.train, p.test]) for p in whole.clients.values()]))
    assert np.array_equal(used, few), "a split names the images by their place in the whole set"
    with pytest.raises(UserError, match="--samples 9999 of 1797"):
        keep_samples(digits, 9999, 0, train_only=False)


def test_samples_leave_an_official_test_set_alone(tmp_path: Path) -> None:
    data = load_dataset(DataSettings(name=str(npz(tmp_path / "x.npz"))), 8)
    few = keep_samples(data, 9, 0, train_only=True)
    assert data.official_test is not None
    assert (len(few), data.official_test[few].sum()) == (29, 20)


def test_fedpefts_scarcity_is_possible() -> None:
    labels = np.tile(np.arange(100), 150)
    test = np.arange(15_000) >= 10_000
    data = Dataset("c", np.zeros((15_000, 1, 1, 3), np.uint8), labels, tuple(map(str, range(100))), test)
    settings = PartitionSettings(name="dirichlet_train", clients=64, alpha=0.1)
    whole = partition_dataset(data, settings, DataSettings(samples=1000), batch=64, seed=0)
    assert sum(len(part.train) for part in whole.clients.values()) == 1000
    assert len(whole.global_test) == 5000


def test_unseen_clients_never_train_and_are_counted_apart(tmp_path: Path) -> None:
    run = Run(finish(tiny("fedper", {"data.unseen": 4}, rounds=3), tmp_path))
    unseen = {line.split(",")[0] for line in (tmp_path / "unseen.csv").read_text().splitlines()[1:]}
    assert len(unseen) == 4
    assert len(run.clients) == 8
    assert not unseen & {client["client"] for client in run.clients}
    assert not unseen & {name for row in run.rounds for name in row["cohort"]}
    views = run.summary["unseen"]
    assert set(views) == {"personal", "finetuned"}
    assert views["finetuned"]["loss"] < views["personal"]["loss"]


def test_batches_are_normalised_with_the_models_own_statistics() -> None:
    inputs = InputSettings(8, (0.5, 0.25, 0.0), (0.5, 0.25, 1.0))
    white = torch.full((1, 8, 8, 1), 255, dtype=torch.uint8)
    assert prepare(white, inputs)[0, :, 0, 0].tolist() == [1.0, 3.0, 1.0]
    assert prepare(torch.zeros(2, 20, 30, 3, dtype=torch.uint8), inputs).shape == (2, 3, 8, 8)


def test_crops_are_shifts_of_the_image() -> None:
    images = torch.arange(1, 65, dtype=torch.uint8).view(1, 8, 8, 1).expand(50, 8, 8, 3)
    cropped = crop(images, torch.Generator().manual_seed(0))
    seen = set()
    for image in cropped:
        first = image[1:-1, 1:-1, 0]  # padding of an eighth reaches one pixel in
        shift = int(first[0, 0]) - int(images[0, 1, 1, 0])
        row, column = round(shift / 8), shift - 8 * round(shift / 8)
        seen.add((row, column))
        rows, columns = slice(1 + row, 7 + row), slice(1 + column, 7 + column)
        assert torch.equal(first, images[0, rows, columns, 0])
    assert len(seen) > 5


def test_augmentation_is_keyed_and_changes_training_batches_only() -> None:
    data = load_dataset(DataSettings(), 8)
    images, labels = image_tensors(data)
    whole = partition_dataset(data, PartitionSettings(name="iid", clients=20), DataSettings(), batch=8, seed=0)
    client = client_data(images, labels, 10, whole.clients["0"])
    inputs = InputSettings(8, (0.5,) * 3, (0.5,) * 3)

    def first(augment: Any, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return next(iter(image_batches(client, client.train, 16, inputs, torch.device("cpu"), augment, generator)))[0]

    assert torch.equal(first("crop", 1), first("crop", 1))
    assert not torch.equal(first("crop", 1), first("crop", 2))
    assert not torch.equal(first("flip", 1), first("none", 1))


# Other networks


@pytest.mark.parametrize("model", ["resnet18", "resnet50_gn", "densenet121", "shufflenet_v2_x0_5"])
def test_convolutional_networks_run(model: str, tmp_path: Path) -> None:
    method = "fedavg" if model == "resnet50_gn" else "fedbn"
    experiment = tiny(method, model=model, image_size=32, patch_size=None, rounds=1, clients=40, cohort=1)
    run = Run(finish(experiment, tmp_path))
    summary = run.summary
    assert summary["macs_per_example"] > 0
    if model == "resnet18":
        personal = (tmp_path / "checkpoint" / "clients").iterdir()
        from safetensors.torch import load_file

        names = set(load_file(next(personal)))
        assert "personal/bn1.running_mean" in names
        assert "personal/layer2.0.downsample.1.running_var" in names
        assert not any("num_batches" in name for name in names)
        assert summary["nbytes"]["up"] == 4 * summary["params"]["shared"]  # all float buffers are the norms'


def test_a_densenets_norms_and_their_statistics_are_a_clients_own(tmp_path: Path) -> None:
    experiment = tiny("fedbn", model="densenet121", image_size=32, patch_size=None, rounds=1, clients=40, cohort=1)
    net = make_net(experiment, 10, torch.device("cpu"))
    assert {"features.norm0.running_mean", "features.norm5.weight"} <= set(net.roles.personal)
    assert sum(name.endswith("running_var") for name in net.roles.personal) == 121
    assert not any("conv" in name or "classifier" in name for name in net.roles.personal)
    head = make_net(tiny("fedper", model="densenet121", image_size=32, patch_size=None), 10, torch.device("cpu"))
    assert set(head.roles.personal) == {"classifier.weight", "classifier.bias"}


def test_the_perceptron_has_four_layers_on_pixels(tmp_path: Path) -> None:
    run = Run(finish(tiny("fedper", model="mlp", image_size=8, patch_size=None), tmp_path))
    assert run.summary["params"]["personal"] == 128 * 10 + 10
    assert run.summary["macs_per_example"] == 192 * 512 + 512 * 256 + 256 * 128 + 128 * 10
    with pytest.raises(UserError, match="no pre-trained weights"):
        make_net(tiny("fedavg", {"model.pretrained": True}, model="mlp", patch_size=None), 10, torch.device("cpu"))
    with pytest.raises(UserError, match="no patches"):
        make_net(tiny("fedavg", model="mlp"), 10, torch.device("cpu"))


def test_shufflenet_has_the_papers_size() -> None:
    from fedvit.core.settings import ModelSettings
    from fedvit.models.build import build

    model = build(ModelSettings(name="shufflenet_v2_x0_5"), 100, (), 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 444_292


# Real images and weights


def test_office_caltech_by_domain(shared_data: Path, store: Path) -> None:
    where = DataSettings(name="office_caltech10", dir=shared_data, cache=store)
    data = load_dataset(where, 32)
    assert dict(zip(data.site_names, np.bincount(data.sites), strict=True)) == {  # type: ignore[arg-type]
        "amazon": 958, "caltech10": 1123, "dslr": 157, "webcam": 295,
    }  # fmt: skip
    assert len(data.class_names) == 10


def test_pneumoniamnist_is_read_as_published(shared_data: Path) -> None:
    data = load_dataset(DataSettings(name="pneumoniamnist", dir=shared_data), 28)
    assert data.images.shape == (4708 + 524 + 624, 28, 28, 1)
    assert data.official_test is not None
    assert data.official_test.sum() == 624


def test_real_weights_know_something(shared_data: Path, tmp_path: Path) -> None:
    run = fedvit.run(
        data="cifar100_small", data_dir=shared_data, samples=1500, method="fedavg", tune="head",
        model="vit_tiny_patch16_224", image_size=64, weights="vit_tiny_patch16_224.fp16.safetensors",
        clients=2, cohort=2, rounds=3, epochs=6, batch=32, lr=0.05, eval_every=0, out=tmp_path / "r",
        settings={"momentum": 0.9, "data.val": 0.1, "alpha": 100},
    )  # fmt: skip
    assert run.summary["lr"] == 0.05
    assert run.summary["server_accuracy"] > 8  # chance is 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [8, 20, 64])
def test_prepared_images_are_the_obvious_formula(channels: int, side: int) -> None:
    inputs = InputSettings(20, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    images = torch.randint(0, 256, (5, side, side, channels), dtype=torch.uint8)
    x = images.permute(0, 3, 1, 2).float()
    if side != 20:
        x = torch.nn.functional.interpolate(x, (20, 20), mode="bilinear", antialias=side > 20)
    mean, std = (torch.tensor(three).view(1, 3, 1, 1) * 255 for three in (inputs.mean, inputs.std))
    kept = images.clone()
    assert torch.equal(prepare(images, inputs), (x - mean) / std)
    assert torch.equal(images, kept)
    one_level = 1 / std.min()
    assert (prepare(images, inputs, as_bytes=True) - prepare(images, inputs)).abs().max() <= 1.01 * one_level
