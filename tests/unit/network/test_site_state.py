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


def test_a_state_survives_and_runs_do_not_mix(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    assert state.get("a", 5) == {}
    state.put("a", 1, memory(1))
    state.put("../b", 4, memory(4))
    again = SiteState(tmp_path)
    assert value_of(again.get("a", 1)) == 1
    assert value_of(again.get("a", 7)) == 1, "a site that was not asked keeps its state"
    assert value_of(again.get("../b", 4)) == 4
    assert all(path.is_relative_to(tmp_path) for path in again.states("../b").values())
    assert not again.states("..")


def test_the_last_two_are_kept_and_newer_ones_are_dropped(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    for round_ in (1, 3, 7):
        state.put("run", round_, memory(round_))
    assert list(state.states("run")) == [3, 7]
    assert value_of(state.get("run", 6)) == 3, "round 7 was lost with its server"
    assert list(state.states("run")) == [3]
    state.put("run", 7, memory(8))
    assert value_of(state.get("run", 9)) == 8


def test_a_server_back_at_the_start_finds_a_fresh_site(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    state.put("run", 1, memory(1))
    assert state.get("run", 0) == {}
    assert not state.states("run")


def test_a_history_that_is_too_old_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    for round_ in (1, 2, 3):
        state.put("run", round_, memory(round_))
    with pytest.raises(UserError, match="rounds 2, 3 of run run"):
        state.get("run", 1)
    assert list(state.states("run")) == [2, 3]
    assert state.get("run", 0) == {}, "from round 0 nothing is continued"


def test_a_message_that_waited_while_a_newer_one_came_is_refused(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    for sent in (1.5, 2.5, 2.5):
        state.advance("run", sent)
    state.advance("other", 1.0)
    with pytest.raises(PublicError, match="sent before the last one"):
        SiteState(tmp_path).advance("run", 2.4)


def test_looking_at_an_older_state_drops_nothing(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    for round_ in (1, 2):
        state.put("run", round_, memory(round_))
    assert value_of(state.get("run", 1, drop=False)) == 1
    assert list(state.states("run")) == [1, 2]


def test_a_damaged_or_half_written_state(tmp_path: Path) -> None:
    state = SiteState(tmp_path)
    state.put("run", 1, memory(1))
    path = state.states("run")[1]
    (path.parent / "000002.safetensors.partial").write_bytes(b"half")
    assert value_of(state.get("run", 2)) == 1
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="cannot be read"):
        state.get("run", 1)
