"""Precision, compiling and devices, as far as a CPU can tell."""

import getpass
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from fedvit.core.errors import UserError
from fedvit.core.settings import RunSettings
from fedvit.engine.pool import device_of
from fedvit.engine.processes import FORKED, context_for
from fedvit.models.build import MICRO
from fedvit.runs.resume import warn_of_slow_bf16
from tests.conftest import finish, tiny


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    ("label", "compiles"), [("fedper", True), ("moon", False)]
)  # MOON's loss looks inside the module
def test_compiled_training_ends_where_plain_training_does(
    label: str, compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MICRO, "depth", 1)  # more blocks of the same kind are only compiled for longer
    kept = (
        f"torchinductor_{getpass.getuser()}_{torch.backends.cpu.get_cpu_capability()}"  # not another processor's code
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / kept))
    torch._dynamo.utils.counters.clear()
    sets = {"optimizer": "sgd", "partition.name": "iid", "partition.min_samples": 8}
    flags = {"cohort": 1, "rounds": 1, "clients": 24, "samples": 24 * 20, "batch": 8}
    plain = finish(tiny(label, sets, **flags), tmp_path / "plain")
    quick = finish(tiny(label, {**sets, "train.compile": True}, **flags), tmp_path / "compiled")
    assert losses(quick) == pytest.approx(losses(plain), rel=1e-4)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == compiles


def test_bf16_trains_near_fp32_but_not_equal(tmp_path: Path) -> None:
    exact, rough = (finish(tiny("fedper", precision=p), tmp_path / p) for p in ("fp32", "bf16"))
    assert losses(rough) == pytest.approx(losses(exact), rel=0.05)
    assert losses(rough) != losses(exact)


def test_without_a_compiler_compiling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="g\\+\\+"):
        finish(tiny("fedavg", {"train.compile": True}), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_workers_take_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device_of(["cpu"], n) for n in range(3)] == ["cpu"] * 3
    pair = RunSettings(device="cuda:0,1").devices
    assert pair == ["cuda:0", "cuda:1"]
    assert [device_of(pair, n) for n in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [device_of(RunSettings(device="cuda").devices, n) for n in range(4)] == [
        "cuda:0",
        "cuda:1",
        "cuda:2",
        "cuda:0",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the error where there is no GPU")
def test_a_list_of_missing_devices_is_refused() -> None:
    with pytest.raises(UserError, match=r"cuda:0.*--device cpu"):
        tiny("fedavg", device="cuda:0,1")


def test_split_learning_refuses_to_be_compiled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"leave train\.compile out"):
        finish(tiny("fedv", {"train.compile": True}), tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("precision", "device", "able", "told"),
    [("bf16", "cpu", False, True), ("bf16", "cpu", True, False), ("fp32", "cpu", False, False),
     ("bf16", "cuda:0", False, False)],
)  # fmt: skip
def test_a_processor_without_bf16_is_told(
    precision: str,
    device: str,
    able: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: able)
    warn_of_slow_bf16(precision, [device])
    assert ("no instructions for bf16" in caplog.text) == told


def test_gpus_get_new_processes_and_the_cpu_forked_ones() -> None:
    assert context_for(["cuda:0", "cuda:1"]).get_start_method() == "spawn"
    assert context_for(["cpu"]).get_start_method() == ("forkserver" if FORKED else "spawn")
