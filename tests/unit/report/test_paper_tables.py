"""`fedvit table`: the report's figures as CSV, Markdown and LaTeX, and pictures for papers."""

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from fedvit.report.load import collect
from fedvit.report.paper_tables import Published, latex_text, paper_table, write_tables
from fedvit.report.statistics import interval
from tests.unit.cli.test_command_line import QUICK, call


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "c"
    status, _, message = call("compare", "fedavg", "fedper+bias", *QUICK, "--seeds", "0,1", "--out", folder, "--quiet")
    assert status == 0, message
    return folder


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_csv_has_the_plain_numbers_of_the_comparison(comparison: Path) -> None:
    status, shown, message = call("table", comparison, "--format", "csv")
    assert status == 0, message
    entries = json.loads((comparison / "compare.json").read_text())
    rows = {row.label: row for row in collect([comparison])[0]}
    found = lines(shown)
    assert (
        [line["row"] for line in found] == [entry["label"] for entry in entries] == ["local", "fedavg", "fedper+bias"]
    )
    for line, entry in zip(found, entries, strict=True):
        assert float(line["accuracy"]) == pytest.approx(entry["mean"], abs=1e-3)
        assert float(line["accuracy_std_clients"]) == pytest.approx(entry["std"], abs=1e-3)
        assert float(line["accuracy_std_seeds"]) == pytest.approx(entry["seed_std"], abs=1e-3)
        assert float(line["lr"]) == entry["lr"]
        sent = (entry["nbytes_down"] or 0) + (entry["nbytes_up"] or 0)
        assert float(line["mb_per_client_and_round"]) == pytest.approx(sent / 1e6, rel=1e-3)
        assert line["seeds"] == "0 1"
        if entry["label"] == "local":
            assert line["gain"] == line["hurt"] == ""
            continue
        assert float(line["gain"]) == pytest.approx(entry["gain_mean"], abs=1e-3)
        row = rows[entry["label"]]
        assert row.hurt is not None
        assert float(line["hurt"]) == pytest.approx(row.hurt, abs=1e-3)
        ends = interval(row.gains)
        assert ends is not None
        assert (float(line["gain_low"]), float(line["gain_high"])) == pytest.approx(ends, abs=1e-3)


def latex_problems(text: str) -> list[str]:
    """What a compiler would stumble over: environments that do not nest, braces, math and cells that do not add up."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    bare = re.sub(r"\\[\\{}$&%#_]", "", code)
    found = [] if bare.count("{") == bare.count("}") else ["braces"]
    found += [] if bare.count("$") % 2 == 0 else ["math"]
    found += [f"unescaped {sign}" for sign in '#~"<>|±\N{MINUS SIGN}' if sign in bare]
    math = re.findall(r"\$[^$]*\$", bare)
    found += [
        f"unescaped {sign}" for sign in "_^" if sign in bare.replace("$^", "") and not any(sign in m for m in math)
    ]
    stack: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", code):
        if kind == "begin":
            stack.append(name)
        elif not stack or stack.pop() != name:
            found.append(f"end of {name}")
    found += stack
    columns = re.findall(r"\\begin\{tabular\}\{(\w+)\}", code)
    for head, body in zip(columns, re.findall(r"\\toprule(.*?)\\bottomrule", code, re.DOTALL), strict=True):
        rows = [row for row in body.split("\\\\\n") if "&" in row]
        found += [f"cells of {row}" for row in rows if len(re.sub(r"\\&", "", row).split("&")) != len(head)]
    return found


def test_latex_is_a_booktabs_table_with_the_best_row_in_bold(comparison: Path) -> None:
    status, shown, message = call("table", comparison, "--format", "latex")
    assert status == 0, message
    assert latex_problems(shown) == []
    assert "seeds 0, 1" in shown.splitlines()[0]
    assert shown.startswith("% fedvit ")
    for word in (r"\toprule", r"\midrule", r"\bottomrule", r"\caption{", r"\usepackage{booktabs}"):
        assert word in shown
    best = max(json.loads((comparison / "compare.json").read_text()), key=lambda entry: entry["mean"])
    (bold,) = re.findall(r"^ *(\S+) & .*\\textbf\{([\d.]+)\}", shown, re.MULTILINE)
    assert bold == (best["label"], f"{best['mean']:.1f}")


def test_markdown_has_as_many_cells_in_every_line(comparison: Path) -> None:
    status, shown, message = call("table", comparison)
    assert status == 0, message
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert len({line.count("|") for line in table}) == 1
    assert sum("**" in line for line in table) == 1
    assert "seeds 0, 1" in shown


@pytest.mark.parametrize("name", ['a_b & 50% $x$ #1 {y} ~ ^ \\ <b> |c| "q"', "\N{MINUS SIGN}1 ± 2"])
def test_names_are_escaped_for_latex(name: str) -> None:
    assert latex_problems(f"\\begin{{x}}{latex_text(name)}\\end{{x}}") == []


def renamed(comparison: Path, to: Path, name: str) -> Path:
    shutil.copytree(comparison, to)
    (to / "fedper+bias").rename(to / name)
    entries = json.loads((to / "compare.json").read_text())
    entries[-1]["label"] = name
    (to / "compare.json").write_text(json.dumps(entries))
    return to


def test_a_row_of_any_name_spoils_no_form(comparison: Path, tmp_path: Path) -> None:
    folder = renamed(comparison, tmp_path / "c", "=1+1|_x_&{y} 50%$")
    assert latex_problems(call("table", folder, "--format", "latex")[1]) == []
    markdown = [line for line in call("table", folder, "--format", "md")[1].splitlines() if line.startswith("|")]
    assert len({len(re.sub(r"\\\|", "", line).split("|")) for line in markdown}) == 1
    assert lines(call("table", folder, "--format", "csv")[1])[-1]["row"] == "'=1+1|_x_&{y} 50%$"


def test_published_figures_have_a_footnote(comparison: Path) -> None:
    (rows,) = collect([comparison])
    other = Published(23.29, 11.31, "Paper_A, Table 2", "other settings; there 64 clients & more", False)
    same = Published(44.42, None, "Paper B, Table 3", "same settings", True)
    table = paper_table(rows, {"fedavg": other, "fedper+bias": same})
    assert table is not None
    latex = write_tables([table], "latex")
    assert latex_problems(latex) == []
    assert r"23.3 $\pm$ 11.3$^{\dagger}$" in latex
    assert r"44.4$^{a}$" in latex
    assert r"$^{\dagger}$ Paper\_A, Table 2: other settings; there 64 clients \& more" in latex
    markdown = write_tables([table], "md")
    assert "23.3 ± 11.3 † |" in markdown
    assert "\na Paper B, Table 3: same settings" in markdown
    local, first, second = lines(write_tables([table], "csv"))
    assert local["published"] == ""
    assert (first["published"], first["published_std"], first["published_comparable"]) == ("23.29", "11.31", "no")
    assert (second["published"], second["published_comparable"]) == ("44.42", "yes")


def test_the_form_follows_the_suffix_and_the_file_is_replaced(comparison: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.tex"
    file.write_text("old")
    status, shown, message = call("table", comparison, "--out", file)
    assert status == 0, message
    assert shown == ""
    assert file.read_text() == call("table", comparison, "--format", "latex")[1]


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_a_figure_has_the_same_bytes_every_time(comparison: Path, tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        status, _, message = call("table", comparison, "--figure", file)
        assert status == 0, message
    first, second = (file.read_bytes() for file in files)
    assert first == second
    if suffix == ".svg":
        assert b"<path" in first
        assert b"<image" not in first
        assert b"<dc:date>" not in first
    if suffix == ".pdf":
        assert first.startswith(b"%PDF")
        assert b"CreationDate" not in first
        assert b"/Type3" not in first
    if suffix == ".png":
        assert first == (comparison / "compare.png").read_bytes(), "the picture of the comparison itself"


def test_the_picture_of_a_study_is_drawn_again_as_a_vector(tmp_path: Path) -> None:
    flags = ["--rounds", "1", "--epochs", "1", "--seeds", "0", "--samples", "600", "--data", "digits"]
    status, _, message = call("study", "designs", *flags, "--out", tmp_path / "s", "--quiet")
    assert status == 0, message
    for name in ("a.svg", "b.svg", "c.png"):
        status, shown, message = call("table", tmp_path / "s", "--figure", tmp_path / name)
        assert status == 0, message
        assert shown.count("|") > 20
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes() == (tmp_path / "s" / "study.png").read_bytes()


def test_a_study_that_trains_nothing_has_a_figure_and_no_table(tmp_path: Path) -> None:
    assert call("study", "resources", "--out", tmp_path / "s", "--quiet")[0] == 0
    status, shown, message = call("table", tmp_path / "s", "--figure", tmp_path / "s.png")
    assert status == 0, message
    assert shown == ""
    assert (tmp_path / "s.png").read_bytes() == (tmp_path / "s" / "study.png").read_bytes()
    status, _, message = call("table", tmp_path / "s")
    assert status == 2
    assert "trains nothing" in message


def test_rows_that_have_not_finished_are_left_out_and_named(
    comparison: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "c"
    shutil.copytree(comparison, folder)
    for seed in (0, 1):
        (folder / "fedavg" / f"seed{seed}" / "summary.json").unlink()
    status, shown, _ = call("table", folder, "--format", "csv")
    assert status == 0
    assert [line["row"] for line in lines(shown)] == ["local", "fedper+bias"]
    assert "fedavg: not finished" in caplog.text
    for file in folder.rglob("summary.json"):
        file.unlink()
    status, _, message = call("table", folder)
    assert status == 2
    assert "no run has finished" in message.replace("\n", " ")


MISTAKES = [
    (["table", "{c}", "--format", "html"], "--format expects csv, md or latex, found 'html'"),
    (["table", "{c}", "--format", "csv", "--out", "{here}/t.tex"], "does not fit --format csv: name it t.csv"),
    (["table", "{c}", "--out", "{here}/t.html"], "--out expects a file that ends in .csv, .md or .tex"),
    (["table", "{c}", "--out", "{here}/none/t.md"], "expected a file in a folder that exists"),
    (["table", "{c}", "--figure", "{here}/t.gif"], "--figure expects a file that ends in .png, .svg, .pdf"),
    (["table", "{here}"], "is not a run"),
    (["report", "{c}", "--out", "{here}/t.tex"], "use `fedvit table`"),
    (["report", "{c}", "--out", "{here}/t.csv"], "use `fedvit table`"),
    (["report", "{c}", "--out", "{here}/t"], "expects a name that ends in .html"),
]


@pytest.mark.parametrize(("arguments", "told"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_told_and_writes_nothing(
    arguments: list[str], told: str, comparison: Path, tmp_path: Path
) -> None:
    filled = [text.replace("{c}", str(comparison)).replace("{here}", str(tmp_path)) for text in arguments]
    status, _, message = call(*filled)
    assert status == 2
    assert told in message.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []
