"""Who missed which round and why: in rounds.jsonl and on the page."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedvit.core.payload import Failure, Payload
from fedvit.engine.inprocess import InProcess
from fedvit.engine.loop import federate, short_reason
from fedvit.report.load import collect
from fedvit.report.page import page
from fedvit.runs.folder import Run
from tests.conftest import Bench, finish, tiny

DROPPED = "dropped out (train.dropout)"


def test_a_round_says_why_a_client_failed_and_the_page_shows_it(tmp_path: Path) -> None:
    settings = {"train.dropout": 0.5}
    finish(tiny("fedper", settings, rounds=4, cohort=12), tmp_path / "r")
    rounds = Run(tmp_path / "r").rounds
    assert any(row["failed"] for row in rounds)
    for row in rounds:
        assert row.get("failures", {}) == dict.fromkeys(row["failed"], DROPPED)
        assert ("failures" in row) == bool(row["failed"]), "the field is there only if someone failed"
    text = page(collect([tmp_path / "r"]))
    assert "Who was missing" in text
    assert DROPPED in text
    finish(tiny("fedper", settings, rounds=4, cohort=12), tmp_path / "again", workers=2)
    assert (tmp_path / "again" / "rounds.jsonl").read_bytes() == (tmp_path / "r" / "rounds.jsonl").read_bytes()


def test_a_split_run_says_it_too(tmp_path: Path) -> None:
    finish(tiny("fedv", {"train.dropout": 0.5}, rounds=3, cohort=12), tmp_path / "r")
    rounds = Run(tmp_path / "r").rounds
    assert any(row["failed"] for row in rounds)
    assert all(row.get("failures", {}) == dict.fromkeys(row["failed"], DROPPED) for row in rounds)


def test_a_page_without_failures_has_no_such_section(tmp_path: Path) -> None:
    finish(tiny("fedper", rounds=1), tmp_path / "r")
    assert "Who was missing" not in page(collect([tmp_path / "r"]))


class Unreliable:
    """A transport on which one client never answers, and says something long and odd about it."""

    def __init__(self, inner: InProcess, reason: str):
        self.inner, self.reason = inner, reason

    def clients(self) -> Any:
        return self.inner.clients()

    def exchange(self, task: Any, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        for name, answer in self.inner.exchange(task, messages):
            yield name, Failure(self.reason) if name == "3" else answer

    def commit(self, round_: int) -> None:
        self.inner.commit(round_)


def test_reasons_from_outside_are_one_short_escaped_line(tmp_path: Path) -> None:
    reason = "error: <b>disk\nfull</b> at /srv/data/north/x.png \x1b[31m run 0123456789abcdef0123 " + "y" * 300
    bench = Bench(tiny("fedavg", rounds=1, cohort=12), tmp_path)
    transport = Unreliable(bench.transport, reason)
    net = bench.net
    (done,) = federate(net.federated, bench.server, transport, bench.experiment, None, bench.test_samples)
    for field in ("failures", "failures_evaluation"):
        (told,) = done.row[field].values()
        assert len(told) == 200
        assert told.startswith("error: <b>disk full</b> at …")
        assert told.isprintable()
        assert "0123456789abcdef" not in told
    finish(tiny("fedavg", rounds=1, cohort=12), tmp_path / "r")
    (tmp_path / "r" / "rounds.jsonl").write_text(json.dumps(done.row) + "\n")
    text = page(collect([tmp_path / "r"]))
    assert "error: &lt;b&gt;disk full&lt;/b&gt;" in text
    assert "evaluation" in text


def test_an_older_run_without_reasons_is_still_shown(tmp_path: Path) -> None:
    finish(tiny("fedper", {"train.dropout": 0.5}, rounds=3, cohort=12), tmp_path / "r")
    lines = [{k: v for k, v in row.items() if k != "failures"} for row in Run(tmp_path / "r").rounds]
    (tmp_path / "r" / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "not recorded" in page(collect([tmp_path / "r"]))


def test_ordinary_reasons_stay_as_they_are() -> None:
    for words in ("did not answer within 3600 s", "is not connected", "policy: least_images and/or least_batch"):
        assert short_reason(words) == words
