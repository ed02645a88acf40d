"""The one hash of settings: it names default folders, and two experiments with the same hash have the same results."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from fedvit.config.resolve import to_tables
from fedvit.config.tables import Tables
from fedvit.core.settings import Experiment

# No result depends on these. A run may also be resumed with other values of them.
NO_RESULT = ("data.dir", "data.cache", "run.cache_mb", "run.track")

EACH_ITS_OWN = ("run.threads", "run.device")  # settings that every machine of a federation chooses for itself


def agreed_hash(experiment: Experiment, federation: Any = None) -> str:
    """Return the hash of what all machines of a federation have agreed to, for `settings_sha256` in a policy."""
    return settings_hash(experiment, without=EACH_ITS_OWN, more=federation)


def settings_hash(*experiments: Experiment | Tables, without: Iterable[str] = (), more: Any = None) -> str:
    """Return 64 hexadecimal digits that depend on every setting except NO_RESULT and those in `without`.

    `without` has keys, such as run.seed, or whole tables, such as method; `more` is hashed as it is.
    """
    left_out = {*NO_RESULT, *without}
    content = [
        {
            f"{table}.{key}": value
            for table, keys in (to_tables(one) if isinstance(one, Experiment) else one).items()
            for key, value in keys.items()
            if table not in left_out and f"{table}.{key}" not in left_out
        }
        for one in experiments
    ]
    return hashlib.sha256(json.dumps([content, more], sort_keys=True, default=str).encode()).hexdigest()
