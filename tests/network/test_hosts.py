"""Server and sites on hosts of their own, one behind a slow and lossy link."""

import shutil
import subprocess
import sys

import pytest


def can_make_hosts() -> bool:
    """Whether network namespaces, a slow link and losses can be had here."""
    if any(shutil.which(tool) is None for tool in ("ip", "tc", "iptables")):
        return False
    made = subprocess.run(["ip", "netns", "add", "fedvit-probe"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", "fedvit-probe"], capture_output=True, check=False)
    return made


@pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip, tc and iptables")
def test_a_run_over_three_hosts_ends_as_in_one_process() -> None:
    words = [sys.executable, "-m", "benchmarks.hosts", "fedavg+bias", "--rounds", "2", "--images", "8"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[-1]
    assert row.startswith("fedavg+bias")
    assert "OTHER RESULT" not in row
