"""A tune that `--set` names brings its own keys to the rows of a comparison."""

from fedvit.studies.compare import make_rows


def test_options_of_a_tune_that_set_names_are_not_lost() -> None:
    sets = {"tune.name": "adapter", "tune.width": 8}
    rows = make_rows(["fedavg", "fedper+bias"], [0], None, sets, {"patch_size": 4})
    tunes = {row.label: row.first.tune for row in rows}
    assert tunes["fedavg+adapter"]["width"] == 8
    assert tunes["local+adapter"]["width"] == 8
    assert tunes["fedper+bias"] == {"name": "bias"}
