"""The report page: what is in it, that it stands alone, and what it says of runs that are not whole."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvit.core.errors import UserError
from fedvit.report import svg, units
from fedvit.report.load import collect
from fedvit.report.page import page, write_report
from fedvit.report.sections.clients import MOST_BARS
from fedvit.report.sections.confusion import MOST_MATRICES, square
from fedvit.report.sections.parts import MOST_DETAILS, MOST_LINES
from fedvit.report.statistics import Row, interval, lead
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import LocalBaseline, Run
from tests.browser import CHROMIUM, browser
from tests.conftest import finish, tiny
from tests.unit.cli.test_command_line import QUICK, call

SECTIONS = (
    "result",
    "table",
    "sites",
    "rounds",
    "gains",
    "clients",
    "updates",
    "split",
    "time",
    "settings",
    "again",
    "words",
)


class Checker(HTMLParser):
    """Tags that are opened and closed, ids, links and words of a page."""

    VOID = ("meta", "link", "br", "rect", "line", "circle", "path", "input", "hr")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.svgs: list[dict[str, str | None]] = []
        self.headings: list[int] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        if tag not in self.VOID or (tag in ("rect", "path", "circle") and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)
        if tag == "svg":
            self.svgs.append(found)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.ids += [found["id"]] if found.get("id") else []  # type: ignore[list-item]
        self.links += [found["href"]] if tag == "a" else []  # type: ignore[list-item]
        self.sources += [str(value) for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes) if tag in self.VOID else None

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def checked(text: str) -> Checker:
    """What every page must be: well formed, alone, with names for its figures."""
    found = Checker(text)
    assert len(set(found.ids)) == len(found.ids), "two elements share an id"
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links), "a link leads nowhere"
    assert all(source.startswith(("#", "data:")) for source in found.sources), "something lies outside the file"
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert all(len(str(svg["aria-label"])) > 15 and svg["role"] == "img" for svg in found.svgs)
    assert found.headings[0] == 1
    assert all(b - a <= 1 for a, b in zip(found.headings, found.headings[1:], strict=False)), (
        "a heading level is skipped"
    )
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<[^>]*>", " ", text)), "a number is not one"
    return found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local, a method of shared and own weights, one that chooses layers and a split one, with two seeds."""
    folder = tmp_path_factory.mktemp("compare") / "c"
    arguments = ["compare", "fedper", "pfededit", "fedv", *QUICK, "--rounds", "4", "--cohort", "6", "--seeds", "0,1"]
    status, shown, message = call(*arguments, "--out", folder)
    assert status == 0, message
    assert f"report: {folder / 'report.html'}" in shown.replace("\n", "")
    return folder


def test_a_comparison_writes_a_page_with_every_section(comparison: Path) -> None:
    text = (comparison / "report.html").read_text()
    found = checked(text)
    assert [name.removeprefix("g0-") for name in found.ids] == list(SECTIONS)
    for words in ("worst", "95 % interval", "clients<br>hurt", "MACs", "peak<br>memory", "Cost to reach a target"):
        assert words in text, words
    assert "Layers chosen by editing" in text
    layers = Run(comparison / "pfededit" / "seed0").summary["layers"]
    assert any(f">{name}<" in text for name in layers), "layers have names"
    assert (comparison / "pfededit" / "seed0" / "choice.png").stat().st_size > 1000
    assert "(client " in text, "split learning says what the client computes"
    assert len(found.svgs) > 4 * 12, "a confusion matrix for every client"
    for row in Run(comparison / "fedper" / "seed0").clients:
        assert f"client {row['client']}: {row['personal_accuracy']:.0f} %" in text
    assert not (comparison / "fedper" / "seed0" / "report.html").exists()


def test_the_numbers_are_those_of_the_files(comparison: Path) -> None:
    (rows,) = collect([comparison])
    by_label = {row.label: row for row in rows}
    for entry in json.loads((comparison / "compare.json").read_text()):
        row = by_label[entry["label"]]
        assert row.mean == pytest.approx(entry["mean"])
        assert row.view("std") == pytest.approx(entry["std"])
        assert row.seed_std == pytest.approx(entry["seed_std"])
        assert row.hurt == pytest.approx(entry["hurt"])
        assert np.mean(row.gains) == pytest.approx(entry["gain_mean"])
        assert row.seconds == pytest.approx(entry["seconds"])
    run = Run(comparison / "fedper" / "seed0")
    sent = run.summary["nbytes_run"]
    assert by_label["fedper"].first.curve[4][1] == sent["down"] + sent["up"]
    text = (comparison / "report.html").read_text()
    assert f"{by_label['fedper'].mean:.1f} ± {by_label['fedper'].view('std'):.1f}" in text


def test_the_interval_is_students_over_the_same_clients(comparison: Path) -> None:
    from scipy import stats

    (rows,) = collect([comparison])
    fedper, local = (next(row for row in rows if row.label == label) for label in ("fedper", "local"))
    assert len(fedper.gains) == 24  # twelve clients, two seeds: another seed makes other clients
    found = interval(fedper.gains)
    expected = stats.t.interval(0.95, 23, np.mean(fedper.gains), stats.sem(fedper.gains))
    assert found == pytest.approx(expected)
    assert lead(fedper, local) == pytest.approx(fedper.gains)
    assert interval([1.0]) is None


def test_a_run_writes_its_page_and_other_folders_are_put_together(comparison: Path, tmp_path: Path) -> None:
    alone, fedper = tmp_path / "alone", tmp_path / "fedper"
    assert call("run", "--method", "local", *QUICK, "--out", alone, "--quiet")[0] == 0
    status, shown, _ = call("run", "--method", "fedper", *QUICK, "--out", fedper)
    assert status == 0
    assert f"report: {fedper / 'report.html'}" in shown.replace("\n", "")
    text = (fedper / "report.html").read_text()
    checked(text)
    assert "Gains need Local" in text
    status, shown, message = call("report", alone, fedper, comparison, "--out", tmp_path / "all.html", "--target", "12")
    assert status == 0, message
    text = (tmp_path / "all.html").read_text()
    checked(text)
    assert "to 12 %" in text
    (rows,) = collect([alone, fedper])
    gains = next(row for row in rows if row.label == "fedper").gains
    accuracy = [{c["client"]: c["personal_accuracy"] for c in Run(folder).clients} for folder in (fedper, alone)]
    assert gains == pytest.approx([accuracy[0][name] - accuracy[1][name] for name in accuracy[0]])
    (rows,) = collect([comparison, fedper])  # other rounds, so another row, told apart by name
    assert {"fedper (rounds 4, cohort 6)", "fedper (rounds 2, cohort 2)"} <= {row.label for row in rows}


def test_runs_on_other_data_or_splits_are_kept_apart(tmp_path: Path) -> None:
    finish(tiny("fedper", rounds=1), tmp_path / "a")
    finish(tiny("fedper", {"partition.alpha": 9.0}, rounds=1), tmp_path / "b")
    finish(tiny("fedper", rounds=1, seed=1), tmp_path / "c")
    groups = collect([tmp_path])
    assert [[row.seeds for row in rows] for rows in groups] == [[[0, 1]], [[0]]]
    text = page(groups)
    checked(text)
    assert "several datasets or partitions" in text


def test_an_unfinished_run_is_reported_as_far_as_it_got(tmp_path: Path) -> None:
    steps = run_rounds(tiny("pfededit", rounds=5, cohort=12), tmp_path / "r")
    status, _, message = call("report", tmp_path / "r", "--out", tmp_path / "none.html")
    assert (status, "not a folder" in message.replace("\n", " ")) == (2, True)
    for _ in range(3):
        next(steps)
    steps.close()
    status, shown, message = call("report", tmp_path / "r")
    assert status == 0, message
    assert "3 of 5" in shown
    text = (tmp_path / "r" / "report.html").read_text()
    checked(text)
    assert "Not finished" in text
    assert "round 3 of 5" in text
    assert "layer " in text  # names come with the summary
    done = json.loads((tmp_path / "r" / "rounds.jsonl").read_text().splitlines()[-1])["views"]["personal"]["mean"]
    assert f"{done:.1f} %" in text
    finish(tiny("pfededit", rounds=5, cohort=12), tmp_path / "r", resume=True)  # a report does not stand in the way
    assert call("report", tmp_path / "r", "--quiet")[0] == 0
    assert "Not finished" not in (tmp_path / "r" / "report.html").read_text()


def test_a_run_that_was_never_scored_has_a_page_too(tmp_path: Path) -> None:
    steps = run_rounds(tiny("fedper", rounds=3, eval_every=0), tmp_path / "r")
    next(steps)
    steps.close()
    assert call("report", tmp_path / "r")[0] == 0
    text = (tmp_path / "r" / "report.html").read_text()
    checked(text)
    assert "not scored yet" in text
    assert "nothing to show but the settings" in text
    (tmp_path / "r" / "rounds.jsonl").unlink()
    (tmp_path / "r" / "timings.jsonl").unlink()
    assert call("report", tmp_path / "r")[0] == 0
    assert "no round of 3 yet" in (tmp_path / "r" / "report.html").read_text()


def test_a_seed_that_is_not_finished_is_not_counted(comparison: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(comparison, tmp_path / "c")
    (folder / "fedper" / "seed1" / "summary.json").unlink()
    (rows,) = collect([folder])
    fedper = next(row for row in rows if row.label == "fedper")
    assert fedper.seeds == [0]
    assert fedper.mean == Run(comparison / "fedper" / "seed0").summary["views"]["personal"]["mean"]
    text = page([rows])
    assert "1 of 2 seeds" in text
    assert "fedper, seed 1: round 4 of 4, not counted" in text
    assert '<tr class="best"><th scope="row">fedper' not in text


def test_a_row_finished_by_itself_still_has_its_gain_in_the_comparison(comparison: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(comparison, tmp_path / "c")
    told = json.loads((folder / "compare.json").read_text())
    shutil.rmtree(folder / "fedper" / "seed0")
    finish(Run(comparison / "fedper" / "seed0").experiment, folder / "fedper" / "seed0")
    assert Run(folder / "fedper" / "seed0").summary["gain_over_local"] is None
    arguments = ["compare", "fedper", "pfededit", "fedv", *QUICK, "--rounds", "4", "--cohort", "6", "--seeds", "0,1"]
    status, _, message = call(*arguments, "--out", folder)
    assert status == 0, message
    again = json.loads((folder / "compare.json").read_text())
    assert [row["gain_mean"] for row in again] == pytest.approx([row["gain_mean"] for row in told])


def test_a_repetition_does_not_displace_a_finished_run(comparison: Path, tmp_path: Path) -> None:
    half = shutil.copytree(comparison / "fedper" / "seed0", tmp_path / "fedper" / "seed0")
    (half / "summary.json").unlink()
    for folders in ([half, comparison / "fedper"], [comparison / "fedper", half]):
        ((row,),) = collect(folders)
        assert row.finished
        assert row.seeds == [0, 1]


def test_another_batch_is_another_split(tmp_path: Path) -> None:
    for batch in (8, 64):
        finish(tiny("fedavg", batch=batch, clients=24, rounds=1), tmp_path / str(batch))
    assert len(collect([tmp_path])) == 2


def test_a_worst_tenth_of_zero_is_shown(comparison: Path) -> None:
    (rows,) = collect([comparison / "fedper"])
    assert rows[0].records[0].rounds[-1]["views"]["personal"]["worst_decile"] is not None
    for record in rows[0].records:
        record.rounds[-1]["views"]["personal"]["worst_decile"] = 0.0
    assert "worst<br>tenth" in page([rows])


MISTAKES = [
    ("nothing", "is not a folder"),
    ("empty", "is not a run: expected a folder with run.toml"),
    ("damaged", "cannot be read"),
    ("toml", "cannot be read"),
    ("cells", "cannot be read"),
]


@pytest.mark.parametrize(("kind", "told"), MISTAKES)
def test_a_folder_that_is_not_a_run_is_told(kind: str, told: str, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    if kind != "nothing":
        folder.mkdir()
    if kind in ("damaged", "cells"):
        finish(tiny("fedavg", rounds=1), folder)
        name = "summary.json" if kind == "damaged" else "rounds.jsonl"
        (folder / name).write_text("{" if kind == "damaged" else '{"round": 1}\n')
    if kind == "toml":
        (folder / "run.toml").write_text("[data")
    for out in (["--out", tmp_path / "x.html"], []):
        status, shown, message = call("report", folder, *out)
        assert status == 2
        assert told in message.replace("\n", " ")
    assert "Traceback" not in shown + message
    assert not (tmp_path / "x.html").exists()


def test_a_file_that_is_not_a_report_is_not_written_over(comparison: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<h1>my thesis</h1>")
    status, _, message = call("report", comparison, "--out", tmp_path / "mine.html")
    assert (status, "not overwritten" in message.replace("\n", " ")) == (2, True)
    assert (tmp_path / "mine.html").read_text() == "<h1>my thesis</h1>"
    for _ in range(2):
        assert call("report", comparison, "--out", tmp_path / "new.html", "--quiet")[0] == 0
    with pytest.raises(UserError, match="a folder that exists"):
        write_report([comparison], tmp_path / "no" / "x.html")


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    """A client, a class or a row may be called anything: it is text in tables, in charts and in attributes."""
    import fedvit

    rng = np.random.default_rng(0)
    sites = ('<b>&"', "<b>St. Mary's & Co</b>", "north_<script>", "a" * 60)
    classes = ["<i>cat</i>", "dog & son", "{{ title }}"]
    data = {name: (rng.integers(0, 255, (40, 8, 8), dtype=np.uint8), np.arange(40) % 3) for name in sites}
    row = tmp_path / "<u>row & '1'"
    fedvit.run(data=data, class_names=classes, out=row / "seed0", rounds=1, epochs=1, patch_size=4)
    write_report([row], tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    found = checked(text)
    told = "".join(found.words)
    assert "u" not in found.tags
    assert found.tags.count("script") == 1, "the page's own"
    assert found.tags.count("i") == text.count('<i class="'), "those of the legends"
    assert found.tags.count("b") == text.count('<div class="card"><b>'), "those of the cards"
    for name in (*sites[:3], *classes, "<u>row & '1'"):
        assert name in told, name
    assert any('<b>&"' in str(svg["aria-label"]) for svg in found.svgs)


def test_sites_stay_the_same_over_seeds(tmp_path: Path) -> None:
    import fedvit

    rng = np.random.default_rng(0)
    data = {name: (rng.integers(0, 255, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3) for name in ("mercy", "north")}
    for seed in (0, 1):
        for method in ("local", "fedper"):
            out = tmp_path / f"{method}{seed}"
            fedvit.run(data=data, method=method, out=out, rounds=1, epochs=1, patch_size=4, seed=seed)
    (rows,) = collect([tmp_path])
    fedper = next(row for row in rows if row.label == "fedper")
    assert len(fedper.records) == 2
    assert len(fedper.gains) == 2  # two sites, each averaged over the seeds
    each = [record.gains["mercy"] for record in fedper.records]
    assert fedper.gains[0] == pytest.approx(np.mean(each))
    assert "mercy" in page([rows])


def grown(source: Path, folder: Path, clients: int, classes: int, rows: int) -> Path:
    """The files of a run, blown up to sizes that would take hours to train: clients, classes, rows."""
    rng = np.random.default_rng(0)
    for number in range(rows):
        made = shutil.copytree(
            source, folder / f"method{number}" / "seed0", ignore=shutil.ignore_patterns("checkpoint")
        )
        names = [f"site {n}" for n in range(clients)]
        lines = [
            "client,train_samples,test_samples,classes,rounds_trained,personal_accuracy,personal_balanced_accuracy,personal_loss,local_accuracy,gain"
        ]
        values = rng.uniform(0, 100, (clients, 2))
        lines += [f"{n},90,30,5,1,{a},{a},1.0,{b},{a - b}" for n, (a, b) in zip(names, values, strict=True)]
        (made / "clients.csv").write_text("\n".join(lines) + "\n")
        counts = rng.integers(0, 10, (clients, classes)) * (rng.random((clients, classes)) < 0.03)
        split: dict[str, Any] = json.loads((made / "split.json").read_text())
        split["clients"] = {name: {"train": [], "test": [], "val": []} for name in names}
        split["class_names"] = [f"class number {n}" for n in range(classes)]
        sparse = [{str(c): int(n) for c, n in enumerate(row) if n} for row in counts]
        split["class_counts"] = {name: {"train": row, "test": row} for name, row in zip(names, sparse, strict=True)}
        (made / "split.json").write_text(json.dumps(split))
        cells = rng.integers(0, classes, (clients, 6, 2)).tolist()
        confusion = {n: [[*pair, 5] for pair in pairs] for n, pairs in zip(names, cells, strict=True)}
        (made / "confusion.json").write_text(json.dumps(confusion))
        toml = (made / "run.toml").read_text()
        (made / "run.toml").write_text(toml.replace('name = "fedper"', f'name = "method{number}"'))
    return folder


def test_many_clients_classes_and_rows_are_cut_and_it_says_so(comparison: Path, tmp_path: Path) -> None:
    folder = grown(comparison / "fedper" / "seed0", tmp_path / "many", clients=1000, classes=100, rows=40)
    write_report([folder], tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    found = checked(text)
    assert len(text) < 3_000_000
    assert text.count('<tr class="') >= 40, "all rows are in the table"
    assert f"{MOST_LINES - 1} of 40 rows are drawn" in text
    assert "s10" not in text, "there are ten colours"
    assert f"The {MOST_DETAILS} best of 40 rows" in text
    assert f"{1000 - MOST_BARS} clients between" in text
    assert f"The {MOST_MATRICES // 2} best and worst of 1000 clients" in text
    assert "60 of 1000 clients are drawn" in text
    assert "others" in text
    assert len(found.svgs) < 300


def test_a_matrix_of_many_classes_keeps_every_image() -> None:
    rng = np.random.default_rng(0)
    cells = [[int(a), int(b), int(n)] for a, b, n in rng.integers(1, 60, (300, 3))]
    table, names = square(cells, [f"c{i}" for i in range(60)])
    assert len(table) == len(names) == 12
    assert names[-1].endswith("others")
    assert sum(map(sum, table)) == sum(cell[2] for cell in cells)
    assert "among themselves" in svg.matrix(table, names, "a matrix", rest=True)  # neither right nor wrong
    table, names = square([[3, 5, 2], [5, 5, 7]], ["a"] * 6)
    assert table == [[0, 2], [0, 7]]
    assert "among themselves" not in svg.matrix(table, names, "a matrix")


def test_units() -> None:
    assert [units.nbytes(n) for n in (0, 512, 1500, 21_974_784, 2.64e9, 3e12, None)] == [
        "0", "512 B", "1.50 kB", "22.0 MB", "2.64 GB", "3.00 TB", "-",
    ]  # fmt: skip
    assert [units.nbytes(n) for n in (999_499, 999_999)] == ["999 kB", "1.00 MB"]
    assert [units.count(n) for n in (12, 65_650_000, 4.6e9, None)] == ["12", "65.7 M", "4.60 G", "-"]
    assert [units.duration(s) for s in (0.04, 11.06, 59.96, 1287.3, 7260, None)] == [
        "0.0 s", "11.1 s", "1 min 00 s", "21 min 27 s", "2 h 01 min", "-",
    ]  # fmt: skip
    assert [units.points(p) for p in (0.01, -0.01, 5.04, -5.06)] == ["0.0", "0.0", "+5.0", "−5.1"]


def test_a_report_changes_no_result(comparison: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in comparison.rglob("*") if path.is_file()}
    write_report([comparison], tmp_path / "x.html")
    assert before == {path: path.read_bytes() for path in comparison.rglob("*") if path.is_file()}
    assert (tmp_path / "x.html").read_bytes() == (comparison / "report.html").read_bytes()


def test_gains_written_by_a_run_are_kept(comparison: Path) -> None:
    (rows,) = collect([comparison])
    local = LocalBaseline.of(Run(comparison / "local" / "seed0")).accuracy
    fedper: Row = next(row for row in rows if row.label == "fedper")
    for row in fedper.first.clients:
        assert fedper.first.gains[row["client"]] == row["personal_accuracy"] - local[row["client"]]


SIZES = "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).map(r => [r.width, r.height])"
SMALLEST = """Math.min(...[...document.querySelectorAll('.pair svg')].map(
    s => s.getBoundingClientRect().width / s.viewBox.baseVal.width * 12.5))"""
COLORS = """[getComputedStyle(document.body).backgroundColor,
    getComputedStyle(document.querySelector('svg .line')).stroke]"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_in_a_real_browser_every_figure_is_seen_and_nothing_is_complained_of(comparison: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.html"
    write_report([grown(comparison / "fedper" / "seed0", tmp_path / "many", 200, 100, 12)], many)
    with browser() as tab:
        paper = set()
        for file in (comparison / "report.html", many):
            for width in (1280, 390):
                for dark in (False, True):
                    tab.open(file, width, dark=dark)
                    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                    sizes = tab.evaluate(SIZES)
                    assert len(sizes) > 20
                    assert all(w > 30 and h > 15 for w, h in sizes), (file, width)
                    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
                    if width == 390:  # words in charts can be read
                        assert tab.evaluate(SMALLEST) > 7.5
                    colors = tab.evaluate(COLORS)
                    paper.add((dark, *colors))
                    tab.screenshot(tmp_path / f"{file.stem}-{width}-{dark}.png", 0, 2000)
                    assert (tmp_path / f"{file.stem}-{width}-{dark}.png").stat().st_size > 20_000
                    assert tab.problems() == []
        assert len(paper) == 2, "light and dark differ, and only they"
        tab.open(comparison / "report.html", 1280, dark=True)
        assert tab.pdf().startswith(b"%PDF")
        assert tab.problems() == []
