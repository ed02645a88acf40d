"""The page of settings is generated from the schema, and the command says its version."""

import inspect
from pathlib import Path

from typer.testing import CliRunner

import fedvit
from fedvit.cli.main import app
from fedvit.config.resolve import keys_of_tables
from fedvit.methods import METHODS
from fedvit.methods.options import meaning
from fedvit.methods.tunes import TUNES

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_of_settings_is_up_to_date() -> None:
    from fedvit.cli.settings_page import settings_markdown

    assert PAGE.read_text() == settings_markdown(), "run: python -m fedvit.cli.docs settings > docs/settings.md"


def test_the_page_of_settings_has_every_key_with_a_type_and_a_meaning() -> None:
    rows = {line.split("`")[1]: line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    expected = {
        f"{table}.{key}"
        for table, keys in keys_of_tables("", "").items()
        for key in keys
        if table not in ("method", "tune")
    }
    assert expected <= set(rows)
    for key, (_, kind, default, text) in rows.items():
        assert kind, key
        assert default, key
        assert text.strip(" |"), key
    assert rows["train.batch"][1:3] == ["whole number, at least 1", "`32`"]
    assert rows["data.val"][1] == "number, at least 0, below 1"
    assert rows["train.lr"][2] == "-"


def test_every_option_of_every_method_and_tune_is_explained() -> None:
    for known in (METHODS, TUNES):
        for name, function in known.items():
            for key in inspect.signature(function).parameters:
                assert meaning(name, key), f"{name}.{key}"


def test_the_command_says_its_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"fedvit {fedvit.__version__}\n")
