"""The documentation's Python is run as it stands."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedvit
from fedvit.cli.main import app

DOCS = Path(__file__).parents[3] / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE)


def test_the_tutorial_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    found = blocks("tutorial.md")
    assert len(found) >= 10
    for number, block in enumerate(found):
        exec(compile(block, f"tutorial block {number}", "exec"), scope)
    assert scope["mine"].summary["method"] == "halfway"
    assert (tmp_path / "models" / "client-3.safetensors").is_file()


def test_the_worked_example_of_patients_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVIT_DATA", str(shared_data))
    (snippet,) = (block for block in blocks("data.md") if "pneumoniamnist" in block)
    exec(compile(snippet, "data.md", "exec"), {})
    result = CliRunner().invoke(app, ["partition", "--data", "xray/manifest.csv", "--set", "data.val=0.2"])
    assert result.exit_code == 0, result.output
    page = (DOCS / "data.md").read_text()
    rows = [line.rstrip() for line in result.stdout.splitlines() if len(line.split()) == 8]
    assert len(rows) == 4
    assert all(row in page for row in rows)

    pytest.importorskip("pydicom")
    (snippet,) = (block for block in blocks("data.md") if "pydicom" in block)
    exec(compile(snippet, "data.md", "exec"), {})
    result = CliRunner().invoke(app, ["datasets", "scans", "--set", "data.patient=dicom", "--json"])
    assert result.exit_code == 0, result.output
    assert [site["patients"] for site in json.loads(result.stdout)["patients"].values()] == [48, 47, 48, 48]


def test_the_method_of_the_guide_runs(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    (block,) = blocks("add_a_method.md")
    exec(compile(block, "add_a_method", "exec"), scope)
    flags = {"patch_size": 4, "clients": 4, "rounds": 1, "epochs": 1, "samples": 400}
    run = fedvit.run(method=scope["plan"](mu=0.5), out=tmp_path / "r", **flags)
    assert run.summary["params"]["personal"] > 0


def test_links_between_the_pages_lead_somewhere() -> None:
    root = DOCS.parent
    for page in [*DOCS.glob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_of_commands_is_up_to_date() -> None:
    from fedvit.cli.docs import markdown

    page = (DOCS / "commands.md").read_text()
    assert page == markdown(), "run: python -m fedvit.cli.docs > docs/commands.md"
    for flag in ("--method", "--client NAME", "--csv FILE", "--out DIR", "--resume", "--seeds"):
        assert f"`{flag}" in page
