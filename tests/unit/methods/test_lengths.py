"""A method is one small file."""

from pathlib import Path

import pytest

import fedvit.methods
from fedvit.methods import METHODS

FILES = [Path(fedvit.methods.__path__[0]) / f"{name}.py" for name in METHODS]


@pytest.mark.parametrize("path", [path for path in FILES if path.is_file()], ids=lambda path: path.stem)
def test_the_file_of_a_method_has_fewer_than_120_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 120
