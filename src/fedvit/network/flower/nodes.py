"""The server's list of sites: which name belongs to which key, and so to which node of Flower's.

Flower binds a node's ID to the key that was registered for it. `fedvit provision --register` writes the list, and the
SuperLink's service names it in the environment, so that it holds for every app.
"""

import json
import os
from pathlib import Path
from typing import Any

from fedvit.core.errors import UserError

VARIABLE = "FEDVIT_NODES"


def read_nodes(file: Path) -> dict[str, dict[str, Any]]:
    """Read the list: by site, the ID of its node, its public key and the key's fingerprint."""
    try:
        nodes = json.loads(file.read_text())
        return {str(name): {**told, "node": int(told["node"]), "key": str(told["key"])} for name, told in nodes.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UserError(f"{file} is not the list of sites that `fedvit provision` wrote: {problem!r}") from problem


def pinned_names() -> dict[int, str] | None:
    """Return the sites' names by node, or None if this SuperLink has no list, so that nodes say who they are."""
    file = os.environ.get(VARIABLE)
    if not file:
        return None
    return {told["node"]: name for name, told in read_nodes(Path(file)).items()}
