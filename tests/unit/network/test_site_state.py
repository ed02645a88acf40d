"""What a site keeps: two states of every run, whole or not at all, and one history."""

from pathlib import Path

import pytest
import torch

from fedvit.core.client import Memory
from fedvit.core.errors import PublicError, UserError
from fedvit.network.site_state import SiteState


def memory(value: float) -> Memory:
    return {"personal": {"head.weight": torch.full((2, 3), value)}, "updated": value}


def value_of(kept: Memory) -> float:
    tree, number = kept["personal"], kept["updated"]
    assert isinstance(tree, dict)
    assert torch.equal(tree["head.weight"], torch.full((2, 3), float(number)))  # type: ignore[arg-type]
    return float(number)  # type: ignore[arg-type]


def put(state: SiteState, *rounds: int) -> None:
    """One round after another, each from the state before it."""
    for before, round_ in zip((max(state.states("run"), default=0), *rounds), rounds, strict=False):
        state.put("run", round_, memory(round_), after=before)


def test_a_state_survives_and_runs_do_not_mix(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    state.put("a", 1, memory(1), after=0)
    state.put("../b", 4, memory(4), after=0)
    again = SiteState(tmp_path)
    assert value_of(again.get("a", 1)) == 1
    assert value_of(again.get("../b", 4)) == 4
    assert again.get("a", 0) == {}, "from round 0 nothing is continued"
    assert all(path.is_relative_to(tmp_path) for path in again.states("../b").values())
    assert not again.states("..")


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    put(state, 1, 3, 7)
    assert list(state.states("run")) == [3, 7]
    assert value_of(state.get("run", 7)) == 7
    assert value_of(state.get("run", 3)) == 3, "the server may have lost round 7"


def test_a_state_that_is_missing_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    put(state, 1, 2, 3)
    for round_ in (1, 9):
        with pytest.raises(PublicError, match=f"the state of round {round_}, which this site does not have"):
            state.get("run", round_)
    assert list(state.states("run")) == [2, 3]


def test_nothing_is_deleted_before_a_new_state_is_safe(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    put(state, 1, 2)
    assert state.get("run", 0) == {}, "what a server that starts again gets, or one that wants to do harm"
    assert list(state.states("run")) == [1, 2]
    state.put("run", 1, memory(9), after=0)
    assert value_of(state.get("run", 2)) == 2, "and even then the newest stays"
    assert value_of(state.get("run", 1)) == 9


def test_a_message_that_comes_late_loses_no_state_that_the_server_continues_from(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    put(state, 3, 5)  # a message of round 4 was late, and the server went on
    state.put("run", 4, memory(4), after=3)
    assert value_of(state.get("run", 5)) == 5
    state.put("run", 6, memory(6), after=5)
    assert list(state.states("run")) == [5, 6]


def test_the_state_that_a_resumed_server_continues_from_outlives_rounds_that_it_lost(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    put(state, 3, 5)  # the server lost round 5, and this site is not asked before round 7
    state.put("run", 7, memory(7), after=3)
    assert value_of(state.get("run", 3)) == 3, "round 7 may be lost, too"
    state.put("run", 8, memory(8), after=7)
    assert list(state.states("run")) == [7, 8]


def test_messages_for_impossible_rounds_do_not_push_out_the_newest_state(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    put(state, 1, 2)
    state.put("run", 10**6, memory(0), after=0)
    assert value_of(state.get("run", 2)) == 2
    state.put("run", 3, memory(3), after=2)
    assert value_of(state.get("run", 3)) == 3


def test_a_damaged_or_half_written_state(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    put(state, 1)
    path = state.states("run")[1]
    (path.parent / "000002.safetensors.partial").write_bytes(b"half")
    assert value_of(state.get("run", 1)) == 1
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="cannot be read"):
        state.get("run", 1)
