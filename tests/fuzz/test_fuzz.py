"""Decoders refuse what they cannot read with the errors that they promise, and what they accept may be trusted."""

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.recorded import record
from tests.fuzz.targets import Target, targets

NAMES = (
    "payload", "split message", "client memory", "Flower records", "hello", "report", "scores", "order", "split hello",
    "split welcome", "split request", "split answer", "split task", "checkpoint manifest", "site policy",
    "manifest of images", "npz of images",
)  # fmt: skip


@pytest.fixture(scope="module")
def all_targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "files").mkdir()
    return {target.name: target for target in targets(record(folder), folder / "files")}


def test_there_is_a_target_of_every_name(all_targets: dict[str, Target]) -> None:
    assert tuple(all_targets) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_really_sends_is_accepted(name: str, all_targets: dict[str, Target]) -> None:
    target = all_targets[name]
    for content in target.real:
        assert target.right(target.read(content))


@pytest.mark.parametrize("name", NAMES)
def test_changed_content_is_refused_by_name_or_may_be_trusted(name: str, all_targets: dict[str, Target]) -> None:
    target = all_targets[name]

    @settings(derandomize=True, max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(range(len(target.real))), st.randoms(use_true_random=False))
    def check(number: int, rng: Random) -> None:
        assert tried(target, target.mutate(target.real[number], rng)) is None

    check()


def tried(target: Target, content: Any) -> str | None:
    """Feed a decoder, and return what went wrong."""
    try:
        found = target.read(content)
    except target.refuses:
        return None
    return None if target.right(found) else "accepted something that may not be trusted"


@pytest.mark.parametrize("name", ["payload", "split message", "client memory", "split hello", "site policy"])
def test_any_bytes_are_refused_by_name(name: str, all_targets: dict[str, Target]) -> None:
    target = all_targets[name]

    @settings(derandomize=True, max_examples=150, deadline=None, database=None)
    @given(st.binary(max_size=300))
    def check(blob: bytes) -> None:
        assert tried(target, blob) is None
        assert tried(target, len(blob).to_bytes(8, "little") + blob) is None

    check()
