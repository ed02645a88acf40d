"""Another user of this machine, who can read every file but owns no process of ours."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

import pytest

NOBODY = "65534"
READS_ALL = "+dac_override"  # so that it can start our Python wherever that is installed
needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="acts as another user, which needs root and setpriv",
)


def as_stranger(
    words: Sequence[object], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as nobody."""
    become = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
    become += ["--inh-caps", READS_ALL, "--ambient-caps", READS_ALL]
    return subprocess.run(
        [*become, *map(str, words)], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
