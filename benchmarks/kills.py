"""Kill runs at random times, resume each until it is finished, and compare the final bytes with undisturbed runs.

    python -m benchmarks.kills [--kills 100] [--kinds local workers flower split] [--seed 0]

Every run is a command in processes of its own (those of `local` and `split` are forked from one that has imported
PyTorch, which is faster), and every kill is a SIGKILL, which no process can notice. Of a run on
one machine, the command or one of its workers is killed; over Flower, everything at once, as by a power cut; of split
learning, the server or everything at once. (A site or client that dies alone costs its round: then other bytes are
right.) Each kill comes at a random time between the start of the processes and the time that the undisturbed run took.

Compared are rounds.jsonl, clients.csv, confusion.json, all tensors of the newest checkpoint and, over a network, the
newest state of every site.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import psutil

from benchmarks.common import Result, show
from fedvit.cli.main import app
from fedvit.engine.processes import context_for
from fedvit.network.flower.trial import free_port

Kind = Literal["local", "workers", "flower", "split"]
KINDS = get_args(Kind)
SHARES = {"local": 35, "workers": 20, "split": 37, "flower": 8}  # of the kills; those over Flower take longest
MOST = 6  # kills of one run; then it may finish
WAIT = 1200  # seconds after which a run that nobody kills hangs
GONE = 300  # seconds in which a process notices that its parent was killed, even while it imports
NAMES = ("0", "1", "2")
TINY = {
    "model.patch_size": 4, "train.batch": 32, "train.epochs": 1, "train.cohort": 3, "partition.clients": 3,
    "data.samples": 120, "run.threads": 1,
}  # fmt: skip
OWN = {
    "local": {"method.name": "fedperfix", "train.rounds": 8},
    "workers": {"method.name": "fedperfix", "train.rounds": 8},
    "flower": {"method.name": "fedper", "train.rounds": 3, "run.eval_every": 0},
    "split": {"method.name": "fedv", "method.fedround": 2, "train.rounds": 8},
}
SAME = ("rounds.jsonl", "clients.csv", "confusion.json")


class Command:
    """A command of ours as a process; `forked` from one that has imported PyTorch, or quite by itself."""

    def __init__(self, words: list[str], folder: Path, output: Path, *, forked: bool):
        self.process: Any = None
        if forked:
            self.process = context_for(["cpu"]).Process(target=_become, args=(words, folder, output))
            self.process.start()
        else:
            with output.open("ab") as stream:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "fedvit", *words], cwd=folder, stdout=stream, stderr=stream,
                    stdin=subprocess.DEVNULL,
                )  # fmt: skip

    def wait(self, seconds: float) -> int | None:
        """Return the status, or None if the process still runs after this time."""
        if isinstance(self.process, subprocess.Popen):
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(seconds)
            return None
        self.process.join(seconds)
        return cast("int | None", self.process.exitcode)

    @property
    def number(self) -> int:
        return int(self.process.pid)


def _become(words: list[str], folder: Path, output: Path) -> None:
    """Do in a forked process what the command does."""
    os.chdir(folder)
    with output.open("ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    sys.argv = ["fedvit", *words]
    app(words)


@dataclass
class Disturbed:
    """A run in a folder of its own, and its processes; the first one, `main`, ends when the run is finished."""

    kind: str
    folder: Path
    port: int = field(default_factory=free_port)
    processes: dict[str, Command] = field(default_factory=dict)
    kills: int = 0

    def commands(self) -> dict[str, list[str]]:
        sets = [word for key, value in {**TINY, **OWN[self.kind]}.items() for word in ("--set", f"{key}={value}")]
        out = ["--out", "out", "--resume", "--quiet"]
        if self.kind != "split":
            engine = {"workers": ["--workers", "2"], "flower": ["--engine", "flower"]}.get(
                self.kind, ["--workers", "1"]
            )
            return {"main": ["run", *sets, *engine, *out]}
        (self.folder / "experiment.toml").touch()
        at = f"127.0.0.1:{self.port}"
        served = ["split-server", "experiment.toml", *sets, "--insecure", "--min-sites", "3", "--address", at, *out]
        return {"main": [*served, "--clients", ",".join(NAMES)]} | {
            name: ["split-client", "experiment.toml", *sets, "--insecure", "--server", at, "--name", name,
                   "--state", f"sites/{name}", "--wait", str(WAIT)] for name in NAMES
        }  # fmt: skip

    def start(self) -> None:
        """Start every process that does not run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, words in self.commands().items():
            if name not in self.processes or self.processes[name].wait(0) is not None:
                output = self.folder / f"output-{name}.txt"
                forked = self.kind in ("local", "split")
                self.processes[name] = Command(words, self.folder, output, forked=forked)

    def kill(self, rng: random.Random) -> None:
        """Kill one process or all of them, as the kind of run wants it."""
        tree = {name: family(process.number) for name, process in self.processes.items()}
        everything = [one for members in tree.values() for one in members]
        victims = {
            "local": everything,
            "workers": [rng.choice(tree["main"])] if tree["main"] else [],
            "flower": everything,
            "split": rng.choice([tree["main"], everything]),
        }[self.kind]
        for victim in victims:
            with suppress(psutil.Error):
                victim.send_signal(signal.SIGKILL)
        self.kills += bool(victims)
        self.processes["main"].wait(WAIT)  # a command whose worker died ends by itself
        alive = psutil.wait_procs(tree["main"], GONE)[1]
        if alive:
            raise SystemExit(f"processes outlive their {self.kind} run: {alive}")
        for name, process in self.processes.items():
            if any(member in victims for member in tree[name]):
                process.wait(WAIT)

    def end(self) -> None:
        for process in self.processes.values():
            for member in family(process.number):
                with suppress(psutil.Error):
                    member.send_signal(signal.SIGKILL)
            process.wait(WAIT)

    def said(self) -> str:
        return (self.folder / "output-main.txt").read_text(errors="replace")[-2000:]


def family(number: int) -> list[psutil.Process]:
    """Return a process and its descendants, without those that have ended."""
    with suppress(psutil.Error):
        parent = psutil.Process(number)
        return [one for one in (parent, *parent.children(recursive=True)) if one.status() != psutil.STATUS_ZOMBIE]
    return []


def final(folder: Path) -> Mapping[str, str]:
    """Return the hashes of what a finished run leaves behind."""
    out = folder / "out"
    newest = sorted((out / "checkpoint").glob("manifest-*.json"))[-1]
    manifest = json.loads(newest.read_text())
    files = [out / name for name in SAME]
    files += [out / "checkpoint" / one["file"] for one in (manifest["server"], *manifest["clients"].values())]
    found = {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    for site in sorted([*out.glob("sites/*"), *folder.glob("sites/*")]):
        states = sorted(site.glob("states/*/*.safetensors")) or sorted(site.glob("*/*.safetensors"))
        found[f"site {site.name}"] = hashlib.sha256(max(states, key=lambda path: path.name).read_bytes()).hexdigest()
    return found


def results(kills: int = 100, kinds: tuple[str, ...] = KINDS, seed: int = 0) -> list[Result]:
    rows = []
    for kind in kinds:
        share = max(1, round(kills * SHARES[kind] / sum(SHARES[one] for one in kinds)))
        rows.append(measure(kind, share, random.Random(f"{seed} {kind}")))
        print(f"{rows[-1].what}: {rows[-1].beside}", file=sys.stderr, flush=True)
    return rows


def measure(kind: str, kills: int, rng: random.Random) -> Result:
    equal: list[float] = []
    done = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        for name in ("first", "second"):  # the first one also imports what later ones find imported
            whole = Disturbed(kind, Path(place) / name)
            begin = time.monotonic()
            finish(whole)
            duration = time.monotonic() - begin
        expected = final(Path(place) / "first")
        if final(whole.folder) != expected:
            raise SystemExit(f"two {kind} runs that nobody disturbs have other bytes")
        while done < kills:
            run = Disturbed(kind, Path(place) / f"run-{len(equal)}")
            finish(run, rng, min(MOST, kills - done), duration)
            done += run.kills
            found = final(run.folder)
            other = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
            equal.append(float(not other))
            told = f"differs in {', '.join(other)}" if other else "equal bytes"
            print(f"{kind}: {done} of {kills} kills, {run.kills} in this run, {told}", file=sys.stderr, flush=True)
    beside = f"{done} kills in {len(equal)} runs, {sum(equal):.0f} with equal final bytes"
    return Result(f"{kind}: share of killed runs with equal final bytes", [sum(equal) / len(equal)], 1.0, True, beside)


def finish(run: Disturbed, rng: random.Random | None = None, kills: int = 0, duration: float = 0.0) -> None:
    """Bring a run to its end, killing it up to this many times."""
    try:
        while True:
            run.start()
            patience = rng.uniform(0, duration) if rng is not None and run.kills < kills else None
            status = run.processes["main"].wait(WAIT if patience is None else patience)
            if status == 0:
                return
            if status is not None or rng is None or patience is None:
                raise SystemExit(f"a {run.kind} run in {run.folder} failed or hangs: {run.said()}")
            run.kill(rng)
    finally:
        run.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", NO_COLOR="1")
    show(results(given.kills, tuple(given.kinds), given.seed))
