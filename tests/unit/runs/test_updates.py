"""Who stands out by its updates: the rule that the report states."""

from pathlib import Path
from typing import Any

import pytest

from fedvit.report.load import collect
from fedvit.report.page import page
from fedvit.runs.folder import Run
from fedvit.runs.updates import about_updates
from tests.conftest import finish, tiny


def rounds(norms: dict[str, float], cosines: dict[str, float], **more: Any) -> list[dict[str, Any]]:
    return [{"round": number, "update_norms": norms, "update_cosines": cosines, **more} for number in (1, 2, 3)]


def out(norms: list[float], cosines: list[float]) -> tuple[list[str], list[str]]:
    about = about_updates(rounds({str(i): x for i, x in enumerate(norms)}, {str(i): x for i, x in enumerate(cosines)}))
    return [n for n, one in about.items() if one.long], [n for n, one in about.items() if one.away]


def test_a_client_stands_out_by_its_length_or_direction_and_nobody_among_equals() -> None:
    assert out([1.0, 1.0, 1.0, 1.0], [0.3, 0.3, 0.3, 0.3]) == ([], [])
    assert out([1.0, 1.1, 0.9, 2.2], [0.3, 0.2, 0.3, 0.2]) == (["3"], [])
    assert out([1.0, 1.1, 0.9, 1.9], [0.3, 0.2, 0.3, -0.3]) == ([], ["3"])
    assert out([1.0, 1.1, 0.9, 0.1], [0.9, 0.9, 0.9, 0.1]) == ([], []), "short, or less along, is not suspicious"


def test_clients_that_differ_anyway_need_to_be_further_away() -> None:
    assert out([1.0, 2.0, 4.0, 8.0, 16.0], [-0.4, -0.2, 0.0, 0.2, 0.4]) == ([], [])


def test_of_two_clients_nobody_stands_out() -> None:
    assert out([1.0, 50.0], [0.5, -0.9]) == ([], [])


def test_numbers_are_medians_over_rounds_and_claims_are_the_largest() -> None:
    rows = rounds({"a": 2.0, "b": 4.0, "c": 6.0}, {"a": 0.1}, clipped=["c"], claimed={"b": 7.0})
    rows[0]["update_norms"] = {"a": 30.0, "b": 10.0, "c": 10.0}
    rows[1]["claimed"] = {"b": 9.0}
    about = about_updates([*rows, {"round": 4, "failed": ["a"]}])
    assert (about["a"].rounds, about["a"].norm, about["a"].length) == (3, 2.0, 0.5)
    assert (about["a"].cosine, about["b"].cosine) == (0.1, None)
    assert about["c"].clipped == 3
    assert (about["a"].claimed, about["b"].claimed) == (None, 9.0)


@pytest.mark.parametrize(("method", "shown"), [("heterofl", True), ("local", False)])
def test_clients_of_several_widths_have_lengths_alone_and_local_has_no_updates(
    method: str, shown: bool, tmp_path: Path
) -> None:
    run = Run(finish(tiny(method, cohort=4, clients=4), tmp_path / "run"))
    assert (run.summary["updates"] is not None) == shown
    assert ("Updates by site" in page(collect([run.folder]))) == shown
    if shown:
        assert all(row["update_cosines"] == {} and len(row["update_norms"]) == 4 for row in run.rounds)
