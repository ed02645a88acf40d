"""A checkpoint's manifest is read like a message: one that we did not write is an error, and deletes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedvit.core.errors import UserError
from fedvit.engine.checkpoint import collect_garbage, load_checkpoint, save_checkpoint
from fedvit.engine.client_store import ClientStore
from tests.conftest import Bench, tiny

pytestmark = pytest.mark.attack


@pytest.mark.parametrize(
    "change",
    [
        {"clients": {"a": {"file": "../elsewhere.safetensors", "sha256": "0"}}},
        {"clients": {"a": {"file": "clients/../../elsewhere.safetensors", "sha256": "0"}}},
        {"clients": [1]},
        {"server": 3},
        {"round": "1"},
        {"round": 7},
        {"round": None},
    ],
)
def test_a_manifest_that_nobody_wrote_is_damage_and_deletes_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere.safetensors"
    elsewhere.touch()
    bench = Bench(tiny(), tmp_path)
    save_checkpoint(folder, bench.server, ClientStore(folder, in_ram=False))
    (path,) = folder.glob("manifest-*")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    store = ClientStore(folder, in_ram=False)
    with pytest.raises(UserError, match="no generation of the checkpoint"):
        load_checkpoint(folder, store)
    collect_garbage(folder, 9, store)
    assert elsewhere.exists()


def test_a_manifest_of_nested_lists_is_damage(tmp_path: Path) -> None:
    (tmp_path / "manifest-000001.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="not a manifest of ours"):
        load_checkpoint(tmp_path, ClientStore(tmp_path, in_ram=False))
