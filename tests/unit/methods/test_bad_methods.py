"""Settings of methods that cannot be: what is allowed is said before anything is trained."""

from pathlib import Path

import numpy as np
import pytest

from fedvit.core.errors import UserError
from fedvit.data.partition.records import ClientPartition, Partition
from fedvit.data.partition.split import hold_out_probe
from tests.unit.cli.test_command_line import call

CASES = {
    "k larger than the number of layers": (["pfededit", "k=99"], "choose 0 to 27"),
    "a negative k": (["pfededit", "k=-1"], "greater than or equal to 0"),
    "a probe that leaves a client nothing to try": (["pfededit", "probe=0.001"], "at least one must be held out"),
    "a probe of everything": (["pfededit", "probe=1"], "less than 1"),
    "layers of another network": (["pfededit", "layers=resnet54"], "is for ResNets"),
    "an unknown metric": (["pfededit", "metric=guess"], "'prediction_list'"),
    "alpha above 1": (["apfl", "method.alpha=1.5"], "less than or equal to 1"),
    "alpha below 0": (["apfl", "method.alpha=-0.1"], "greater than or equal to 0"),
    "a rate of 0": (["heterofl", "rates=1,0"], "above 0 and up to 1"),
    "a rate above 1": (["fedrolex", "rates=1.5"], "above 0 and up to 1"),
    "groups that do not exist": (["partialfed", "keep=hed"], "head"),
    "a negative mu": (["fedprox", "mu=-1"], "greater than or equal to 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused_with_what_can(case: str, tmp_path: Path) -> None:
    (method, option), expected = CASES[case]
    status, _, errors = call("run", "--method", method, "--set", option, "--out", tmp_path / "r")
    assert status == 2, errors
    assert expected in " ".join(errors.split())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("share", [0.01, 0.95])
def test_the_probe_that_is_advised_suits_the_smallest_client(share: float) -> None:
    nothing, labels = np.empty(0, dtype=np.int64), np.zeros(40, dtype=np.int64)
    sizes = {"large": 40, "small": 5, "middle": 10}  # a small share fails at the first client already
    split = Partition(
        {name: ClientPartition(np.arange(size), nothing, nothing) for name, size in sizes.items()}, nothing
    )
    with pytest.raises(UserError, match=r"choose 0\.2 to 0\.8,"):
        hold_out_probe(split, labels, share, 0)
    for advised in (0.2, 0.8):
        parts = hold_out_probe(split, labels, advised, 0).clients.values()
        assert all(len(part.probe) and len(part.train) for part in parts)


def test_moon_needs_a_model_with_features(tmp_path: Path) -> None:
    flags = ["--model", "levit_128s", "--clients", "4", "--out", tmp_path / "r"]
    status, _, errors = call("run", "--method", "moon", *flags)
    assert status == 2, errors
    assert "linear classifier" in errors
    assert not (tmp_path / "r").exists()
