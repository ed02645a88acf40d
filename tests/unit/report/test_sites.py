"""Every site under every method: one rule for averages and counts, intervals over test images, and the sentences."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedvit.report.bootstrap import Hits, accuracy_interval, difference_interval, hits_of, merge
from fedvit.report.load import collect, with_gains
from fedvit.report.page import page
from fedvit.report.site_table import site_table
from fedvit.report.sites import SiteScore, site_scores
from fedvit.report.statistics import Record, Row, Unit, by_unit, count_hurt
from fedvit.report.verdict import headline, site_sentence
from tests.unit.cli.test_command_line import call

SITES = ("mercy", "north", "st-anna", "west")
GAINS = {  # points by site for two seeds: per seed one and three sites lose, averaged over seeds three do
    0: {"mercy": 30.0, "north": 10.0, "st-anna": 10.0, "west": -30.0},
    1: {"mercy": -10.0, "north": -20.0, "st-anna": -20.0, "west": 10.0},
}


def folder_of_sites(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for site in SITES:
        for kind in ("normal", "pneumonia"):
            place = folder / site / kind
            place.mkdir(parents=True)
            for number in range(20):
                Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(place / f"{number}.png")
    return folder


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def rewrite(run: Path, gains: Mapping[str, float]) -> None:
    """Give every site of a finished run ten test images of each class and a chosen gain over 50 %."""
    lines = read(run / "clients.csv")
    for line in lines:
        own = 50 + gains[line["client"]]
        line |= {"test_samples": "20", "personal_accuracy": str(own), "local_accuracy": "50.0"}
        line["gain"] = str(own - 50)
    with (run / "clients.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    summary = json.loads((run / "summary.json").read_text())
    hurt = sum(gain < 0 for gain in gains.values())
    summary["gain_over_local"] = {"mean": float(np.mean(list(gains.values()))), "hurt": hurt, "schedule": "rounds"}
    (run / "summary.json").write_text(json.dumps(summary))
    right = {name: round((50 + gain) / 10) for name, gain in gains.items()}
    cells = {name: [[0, 0, n], [0, 1, 10 - n], [1, 1, n], [1, 0, 10 - n]] for name, n in right.items()}
    (run / "confusion.json").write_text(json.dumps(cells))


def compare(data: Path, folder: Path, *more: str) -> str:
    short = ["--patch-size", "4", "--image-size", "8", "--rounds", "1", "--epochs", "1", "--seeds", "0,1"]
    status, shown, message = call("compare", "fedper", *more, "--data", data, *short, "--out", folder)
    assert status == 0, message
    return shown


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a comparison of Local and FedPer over four sites and two seeds, and what the terminal showed."""
    place = tmp_path_factory.mktemp("sites")
    data = folder_of_sites(place / "xray")
    compare(data, place / "c")
    for seed, gains in GAINS.items():
        rewrite(place / "c" / "local" / f"seed{seed}", dict.fromkeys(SITES, 0.0))
        rewrite(place / "c" / "fedper" / f"seed{seed}", gains)
    return place / "c", compare(data, place / "c")  # finished runs are not run again


def test_terminal_file_card_and_table_count_the_hurt_alike(comparison: tuple[Path, str]) -> None:
    folder, shown = comparison
    _, entry = json.loads((folder / "compare.json").read_text())
    assert entry["hurt"] == 3, "north, st-anna and west lose on average; the mean count per seed is 2"
    assert entry["gain_mean"] == pytest.approx(-2.5)
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("fedper ") and "kB" in line]
    assert line.split()[6:8] == ["-2.5", "3"]
    (rows,) = collect([folder])
    fedper = next(row for row in rows if row.label == "fedper")
    assert fedper.hurt == 3
    assert '<div class="card"><b>3 of 4</b>' in page([[fedper]])
    lines = read(folder / "sites.csv")
    losing = [line["client"] for line in lines if line["row"] == "fedper" and float(line["gain"]) < 0]
    assert losing == ["north", "st-anna", "west"]


def test_sites_csv_has_every_site_and_row_with_intervals(comparison: tuple[Path, str]) -> None:
    folder, shown = comparison
    lines = read(folder / "sites.csv")
    assert [(line["client"], line["row"]) for line in lines] == [(s, r) for r in ("local", "fedper") for s in SITES]
    for line in lines:
        assert line["seeds"] == "0 1"
        assert float(line["accuracy_low"]) < float(line["accuracy"]) < float(line["accuracy_high"])
        assert line["verdict"] == ("" if line["row"] == "local" else "cannot be told")
    assert "fedper: nobody is hurt beyond doubt; all 4 cannot be told." in shown
    assert "cannot tell" in shown
    assert "fedper is not distinguishable from training alone here: a mean gain of −2.5 points" in " ".join(
        shown.split()
    )


def test_the_table_fits_into_eighty_columns(comparison: tuple[Path, str]) -> None:
    from rich.console import Console

    (rows,) = collect([comparison[0]])
    console = Console(width=80)
    with console.capture() as captured:
        for part in site_table(rows):
            console.print(part)
    text = captured.get()
    for words in ("mercy", "fedper", "50.0 (", "cannot tell", "+10.0 (−", "verdict"):
        assert words in text


def test_clients_of_other_partitions_are_counted_per_seed() -> None:
    values = {0: {"0": 1.0, "1": -1.0}, 1: {"0": -2.0, "1": -3.0}}
    assert count_hurt(by_unit(values, "dirichlet")) == 1.5
    assert count_hurt(by_unit(values, "site")) == 2
    assert by_unit(values, "site") == {Unit("0"): -0.5, Unit("1"): -2.0}
    assert by_unit({0: {"a": 1.0}, 1: {"b": 2.0}}, "site") == {Unit("a"): 1.0, Unit("b"): 2.0}, (
        "absent in the first seed"
    )
    thirds = {seed: {"a": gain} for seed, gain in enumerate((0.1, 0.2, -0.3))}
    assert count_hurt(by_unit(thirds, "site")) == 0, "a mean of 0 is no loss, however it is rounded"


def a_row(label: str, by_seed: Mapping[int, Mapping[str, float]], images: int = 50, partition: str = "site") -> Row:
    """A row of finished runs that exist only here: percentages by seed and site, on images of one class."""
    records = []
    for seed, scores in by_seed.items():
        lines = [
            {"client": name, "train_samples": 9, "test_samples": images, "rounds_trained": 1,
             "personal_accuracy": value, "personal_balanced_accuracy": value, "local_accuracy": None, "gain": None}
            for name, value in scores.items()
        ]  # fmt: skip
        view = {"mean": float(np.mean(list(scores.values()))), "std": 0.0}
        round_ = {"round": 1, "cohort": [], "failed": [], "nbytes_down": 0, "nbytes_up": 0, "nbytes_evaluation": 0}
        tables: dict[str, Any] = {
            "data": {"name": "xray"}, "partition": {"name": partition}, "method": {"name": label},
            "tune": {"name": "full"}, "train": {"rounds": 1, "lr": 0.01}, "run": {"seed": seed},
            "model": {"name": "vit"},
        }  # fmt: skip
        split = {"clients": {name: {"test": [seed]} for name in scores}, "class_names": ["normal", "pneumonia"]}
        cells = {
            name: [[0, 0, round(v * images / 100)], [0, 1, images - round(v * images / 100)]]
            for name, v in scores.items()
        }
        records.append(
            Record(Path(label), label, tables, {}, {"seconds": 1.0}, [{**round_, "views": {"personal": view}}], [],
                   lines, split, cells, [])
        )  # fmt: skip
    return Row(label, records)


def measured(*rows: Row) -> list[Row]:
    """The rows with their gains over the row called local."""
    found = with_gains([record for row in rows for record in row.records])
    return [Row(row.label, [record for record in found if record.label == row.label]) for row in rows]


def one_seed(*values: float) -> dict[int, dict[str, float]]:
    return {0: {f"site{n}": value for n, value in enumerate(values)}}


LOCAL = a_row("local", one_seed(60, 62, 64, 66))


def test_the_headline_says_when_no_method_can_be_told_from_training_alone() -> None:
    rows = measured(LOCAL, a_row("fedavg", one_seed(70, 50, 74, 60)), a_row("fedper", one_seed(75, 55, 70, 58)))
    words = headline(rows)
    assert words.startswith(
        "No method is distinguishable from training alone here: the best, fedper, has a mean gain of +1.5"
    )
    assert "over 4 sites" in words
    assert "fedper leads fedavg, the second row, by 1.0 points" in words
    assert words.endswith("so the two cannot be told apart.")


def test_the_headline_names_the_row_that_beats_training_alone_and_its_interval() -> None:
    words = headline(measured(LOCAL, a_row("fedper", one_seed(70, 72.5, 74, 76.5))))
    assert (
        words == "fedper beats training alone: a mean gain of +10.2 points (95 % interval +9.8 to +10.7 over 4 sites)."
    )


def test_the_second_row_is_the_true_one_even_if_it_is_local() -> None:
    rows = measured(LOCAL, a_row("fedper", one_seed(70, 72.5, 74, 76.5)), a_row("fedavg", one_seed(40, 41, 44, 45)))
    assert "fedavg" not in headline(rows), "Local is second"
    best = measured(LOCAL, a_row("fedavg", one_seed(59, 62, 65, 65)))
    assert headline(best).startswith("fedavg is not distinguishable from training alone here: a mean gain of −0.2")
    worse = measured(LOCAL, a_row("fedavg", one_seed(50, 52.5, 54, 56.5)), a_row("fedper", one_seed(40, 41, 44, 45)))
    assert headline(worse).startswith("Do not federate with either method: the best of them, fedavg, loses")


def test_a_lower_row_that_is_surely_better_is_named() -> None:
    rows = measured(LOCAL, a_row("fedavg", one_seed(90, 40, 90, 70)), a_row("fedper", one_seed(65, 67.5, 69, 71)))
    assert "fedavg has the highest mean of the methods but cannot be told" in headline(rows)
    assert "; fedper can: a mean gain of +5.1 points" in headline(rows)


def test_no_lead_of_nothing_is_announced() -> None:
    words = headline(
        measured(LOCAL, a_row("fedavg", one_seed(70, 72, 74, 76)), a_row("fedper", one_seed(70, 72, 74, 76)))
    )
    assert "equal to a tenth of a point" in words
    assert "leads" not in words


def test_one_client_has_no_interval_over_clients() -> None:
    words = headline(measured(a_row("local", one_seed(60)), a_row("fedper", one_seed(90))))
    assert "only one client to compare, so there is no interval over clients" in words
    assert "over its test images" in words
    assert "which excludes 0" in words


def test_without_local_nothing_is_said_about_training_alone() -> None:
    words = headline([a_row("fedavg", one_seed(70, 72)), a_row("fedper", one_seed(80, 82.5))])
    assert words.startswith("Whether federating helps is not known")
    assert "fedper leads fedavg, the second row, by 10.2 points" in words


def test_who_gains_who_is_hurt_and_who_cannot_be_told() -> None:
    rows = measured(a_row("local", one_seed(60, 60, 60, 60)), a_row("fedper", one_seed(90, 20, 62, 56)))
    scores = site_scores(rows[1], rows)
    assert [score.verdict for score in scores] == ["gains", "hurt", "cannot be told", "cannot be told"]
    words = "fedper: site0 gains; site1 is hurt beyond doubt; site2 and site3 cannot be told."
    assert site_sentence(scores) == words
    parts = site_table(rows)
    assert parts[-1] == words
    assert words in page([rows])


def test_many_clients_become_a_few_losses_and_a_sentence() -> None:
    values = {0: {str(n): 10.0 if n < 2 else 60.0 if n < 30 else 94.0 for n in range(40)}}
    rows = measured(
        a_row("local", {0: dict.fromkeys(values[0], 60.0)}, partition="iid"), a_row("fedper", values, partition="iid")
    )
    first, second, last = site_table(rows, "c/sites.csv")
    assert not isinstance(first, str)
    assert first.row_count == 5
    assert second == "all 40 clients: c/sites.csv"
    assert isinstance(last, str)
    assert last == "fedper: 10 of 40 gain; client 0 and client 1 are hurt beyond doubt; 28 of 40 cannot be told."


def test_eight_rows_by_thirty_sites_fit_into_eighty_columns() -> None:
    from rich.console import Console

    sites = [f"hospital-{n}" for n in range(30)]
    rows = [a_row("local", {0: dict.fromkeys(sites, 60.0)})]
    rows += [a_row(f"method{n}+bias", {0: {site: 40.0 + 5 * n + i for i, site in enumerate(sites)}}) for n in range(7)]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(site_table(measured(*rows))[0])
    lines = captured.get().splitlines()
    assert sum("hospital-" in line for line in lines) == 30
    assert all(len(line) <= 80 for line in lines)
    assert any("▲" in line for line in lines)
    assert "hospital-29" in lines[-1] or "hospital-29" in lines[-2]
    assert captured.get().count("method") == 7


def test_intervals_are_wide_enough_for_few_images() -> None:
    """With equal rows, at most one verdict in twenty is wrong, even if the rows' hits are independent."""
    rng = np.random.default_rng(0)
    for images, rate in ((6, 0.8), (20, 0.5), (20, 0.95), (60, 0.8)):
        wrong = missed = 0
        for number in range(200):
            one, other = (Hits({0: images}, {0: float((rng.random(images) < rate).mean())}) for _ in range(2))
            low, high = difference_interval([(one, other)], str(number))
            wrong += low > 0 or high < 0
            low, high = accuracy_interval([one], str(number))
            missed += not low <= 100 * rate <= high
        assert wrong <= 14, (images, rate, wrong)
        assert missed <= 14, (images, rate, missed)


def test_all_right_on_few_images_is_not_certain() -> None:
    low, high = accuracy_interval([Hits({0: 10}, {0: 1.0})], "a")
    assert low < 90
    assert high == 100
    low, _ = difference_interval([(Hits({0: 30}, {0: 1.0}), Hits({0: 30}, {0: 26 / 30}))], "a")
    assert low <= 0, "Fisher's exact test gives 0.11 here"


def test_the_draw_of_the_classes_is_shared() -> None:
    """Two rows that are right on one class and wrong on the other do not differ, however the classes are drawn."""
    same = Hits({0: 500, 1: 500}, {0: 1.0, 1: 0.0})
    shared = difference_interval([(same, same)], "a")
    apart = difference_interval([(same.without_classes(), same.without_classes())], "a")
    assert shared[1] - shared[0] < 1
    assert apart[1] - apart[0] > 6


def test_the_same_images_tested_with_two_seeds_count_once() -> None:
    test = Hits({0: 40}, {0: 0.7})
    twice = accuracy_interval([merge([test, test])], "a")
    assert twice == accuracy_interval([test], "a")
    others = accuracy_interval([test, test], "a")
    assert others[1] - others[0] < twice[1] - twice[0]


def test_intervals_have_an_address() -> None:
    test = hits_of([[0, 0, 20], [0, 1, 10], [1, 1, 5], [1, 0, 0]])
    assert (test.images, test.total, test.accuracy) == ({0: 30, 1: 5}, 35, pytest.approx(25 / 35))
    assert accuracy_interval([test], "mercy") == accuracy_interval([test], "mercy")


def test_a_score_without_local_has_no_verdict() -> None:
    (score,) = site_scores(a_row("fedper", one_seed(60)), [])
    assert isinstance(score, SiteScore)
    assert (score.verdict, score.gain) == ("", None)
    assert site_table([a_row("fedper", one_seed(60))]) == []
