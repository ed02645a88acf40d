"""How the page is drawn: few points, colors that differ, hints where something is cut off, doubts, and targets."""

import html
import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedvit.core.errors import UserError
from fedvit.report import plots, svg
from fedvit.report.load import collect
from fedvit.report.page import page, write_report
from fedvit.report.sections.parts import Group
from fedvit.report.sections.rounds import rounds
from fedvit.runs.folder import Run
from tests.browser import CHROMIUM, browser
from tests.conftest import finish, tiny
from tests.unit.report.test_sites import a_row, measured, one_seed

STYLE = (Path(svg.__file__).parent / "templates" / "style.css").read_text()


def oklab(color: str) -> NDArray[np.float64]:
    """Björn Ottosson's OKLab of a color such as #1f5fbf, in which distances are about as large as they look."""
    srgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
    lab = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                    [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip
    return np.asarray(lab @ np.cbrt(cones @ linear), dtype=np.float64)


def apart(a: str, b: str) -> float:
    return float(np.linalg.norm(oklab(a) - oklab(b)))


def palettes() -> dict[str, tuple[str, list[str]]]:
    """The background and the ten colors of the page in both modes, and those of pictures."""
    paper = re.findall(r"--paper: (#\w{6})", STYLE)
    colors = re.findall(r"--s\d: (#\w{6})", STYLE)
    return {
        "light": (paper[0], colors[:10]),
        "dark": (paper[1], colors[10:]),
        "pictures": ("#ffffff", list(plots.COLORS)),
    }


@pytest.mark.parametrize("name", ["light", "dark", "pictures"])
def test_all_colors_of_a_chart_differ_from_each_other_and_from_the_background(name: str) -> None:
    paper, colors = palettes()[name]
    assert len(colors) == len(set(colors)) == 10
    for a, b in combinations(colors, 2):
        assert apart(a, b) > 0.12, (a, b)
    for color in colors:
        assert apart(color, paper) > 0.25, color
    assert apart("#000000", "#ffffff") == pytest.approx(1, abs=1e-3)


def test_few_clients_are_dots_and_many_a_density() -> None:
    few = page([measured(a_row("local", one_seed(60, 62, 64, 66)), a_row("fedper", one_seed(70, 61, 69, 66)))])
    assert few.count('class="unit s1"') == 4
    assert "site0: +10.0" in few
    assert 'class="area' not in few
    values = [60.0 + n for n in range(9)]
    many = page([measured(a_row("local", one_seed(*[60.0] * 9)), a_row("fedper", one_seed(*values)))])
    assert 'class="area s1"' in many
    assert 'class="unit' not in many


def test_one_evaluated_round_makes_no_curve(tmp_path: Path) -> None:
    finish(tiny("fedper", rounds=2, eval_every=0), tmp_path / "r")
    assert "Accuracy by round." not in page(collect([tmp_path / "r"]))
    finish(tiny("fedper", rounds=2), tmp_path / "s")
    assert "Accuracy by round." in page(collect([tmp_path / "s"]))
    for name, parts in (("r", 1), ("s", 2)):
        plots.draw_comparison({"fedper": [Run(tmp_path / name)]}, tmp_path / f"{name}.png", "a title")
        width, height = png_size(tmp_path / f"{name}.png")
        assert (width / height > 2) == (parts == 2)


def png_size(path: Path) -> tuple[int, int]:
    blob = path.read_bytes()
    return int.from_bytes(blob[16:20], "big"), int.from_bytes(blob[20:24], "big")


@pytest.mark.parametrize("best", [51.0, 58.0, 95.0])
def test_targets_below_chance_are_not_offered(best: float) -> None:
    row = a_row("fedper", one_seed(best))  # two classes
    found = rounds(Group([row]))
    goals = [] if found is None or found.targets is None else found.targets.head[1:]
    assert all(50 < float(goal.split()[1]) <= best for goal in goals)
    assert goals or best < 52


def test_a_row_at_chance_has_no_targets_but_one_may_be_asked_for() -> None:
    row = a_row("fedper", one_seed(49.0))
    assert rounds(Group([row])) is None
    asked = rounds(Group([row], 30.0))
    assert asked is not None
    assert asked.targets is not None
    assert asked.targets.head == ["row", "to 30 %"]


def test_a_target_is_that_of_the_view_asked_for_or_of_the_study(tmp_path: Path) -> None:
    """FedPEFT's Table 2 is about the server's model, whose accuracy is another one."""
    rounds_file = finish(tiny("fedavg+bias", rounds=2, lr=0.01), tmp_path / "study" / "bias" / "seed0") / "rounds.jsonl"
    lines = [json.loads(line) for line in rounds_file.read_text().splitlines()]
    for line, own, server in zip(lines, (50.0, 60.0), (10.0, 30.0), strict=True):
        line["views"]["personal"]["mean"], line["views"]["server"]["mean"] = own, server
    rounds_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    folder, out = tmp_path / "study", tmp_path / "r.html"

    def shown(view: str | None = None) -> str:
        write_report([folder], out, 25.0, view)
        return " ".join(html.unescape(out.read_text()).split())

    assert "round 1," in shown()
    assert "that of each client's own model" in shown()
    assert "round 2," in shown("server")
    (folder / "study.json").write_text(json.dumps({"rows": [{"figures": {"view": "server"}}]}))
    assert "round 2," in shown()
    (folder / "table2").mkdir()
    (folder / "study.json").rename(folder / "table2" / "study.json")  # where a paper's studies share their runs
    assert "round 2," in shown()
    assert "that of the server's model" in shown()
    assert "round 1," in shown("personal")
    with pytest.raises(UserError, match="no run has the view 'serve'; they have personal, server"):
        shown("serve")


def test_warnings_of_the_runs_are_shown_as_doubts(tmp_path: Path) -> None:
    finish(tiny("fedper", rounds=1), tmp_path / "r")
    path = tmp_path / "r" / "summary.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "warnings": ["the loss of <b>client 3</b> is above chance"]}))
    text = page(collect([tmp_path / "r"]))
    assert "<strong>Doubts</strong>" in text
    assert "fedper, seed 0: the loss of &lt;b&gt;client 3&lt;/b&gt; is above chance" in text
    path.write_text(json.dumps({key: value for key, value in content.items() if key != "warnings"}))
    assert "Doubts" not in page(collect([tmp_path / "r"]))


HINTS = """[...document.querySelectorAll('.scroll')].filter(b => b.offsetWidth).map(b =>
    [b.scrollWidth > b.clientWidth + 1, getComputedStyle(b, '::before').content.includes('scroll')])"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_whatever_is_cut_off_says_so(tmp_path: Path) -> None:
    finish(tiny("fedper", rounds=1), tmp_path / "r")
    rows = [a_row("local", one_seed(60, 62, 64, 66))]
    rows += [a_row(f"method{n}", one_seed(70 + n, 61, 69, 66)) for n in range(8)]
    (tmp_path / "x.html").write_text(page([measured(*rows)]))
    with browser() as tab:
        cut = {}
        for file in (tmp_path / "r" / "report.html", tmp_path / "x.html"):
            write_report([tmp_path / "r"], tmp_path / "r" / "report.html")
            for width in (1200, 390):
                for dark in (False, True):
                    tab.open(file, width, dark=dark)
                    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                    tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
                    boxes = tab.evaluate(HINTS)
                    assert boxes
                    assert all(is_cut == hinted for is_cut, hinted in boxes), (file, width)
                    cut[file.name, width] = sum(is_cut for is_cut, _ in boxes)
                    assert tab.evaluate("document.documentElement.scrollWidth") <= width
                    assert tab.problems() == []
        assert cut["x.html", 390] > 2
        assert cut["report.html", 1200] == 0, "the tables of one run fit on a screen"


def test_bars_of_sites_are_averaged_like_everything_else(tmp_path: Path) -> None:
    local = a_row("local", {0: {"a": 60.0, "b": 60.0}, 1: {"a": 60.0, "b": 60.0}})
    fedper = a_row("fedper", {0: {"a": 80.0, "b": 50.0}, 1: {"a": 50.0, "b": 60.0}})
    text = page([measured(local, fedper)])
    assert "a: 65.0 % of 50 test images, alone 60.0 %" in text
    assert "Bars are means over seeds" in text
