"""Measure seconds per round over Flower, with a server and two sites on separate hosts, one behind a slow, lossy link.

The hosts are network namespaces joined by a bridge, so this needs root and iproute2 (and iptables for packet loss):

    python -m benchmarks.hosts [--rate 20mbit] [--loss 0.01] [--rounds 3] [ROW ...]

Every row also runs in one process on the same folders; the difference in time per round is due to Flower and the link.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from fedvit.config.load import load_experiment
from fedvit.network.flower.template import for_sites, write_app
from fedvit.network.flower.trial import Trial, submit, superlink, supernode
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import Run

HOSTS = {"server": "192.0.2.1", "north": "192.0.2.2", "south": "192.0.2.3"}  # addresses reserved for documentation
SLOW, PORT, CLASSES = "south", 8000, ("dark", "light")


def inside(host: str) -> tuple[str, ...]:
    return "ip", "netns", "exec", f"fedvit-{host}"


def at(host: str, *words: str) -> None:
    subprocess.run([*inside(host), *words], check=True)


@contextmanager
def hosts(rate: str, loss: float) -> Iterator[None]:
    """Set up namespaces with an address each, joined by a bridge in a fourth; one is slow in both directions."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise SystemExit("this creates network namespaces: run it as root, with iproute2 installed")
    names = [*HOSTS, "hub"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", f"fedvit-{name}"], check=True)
            at(name, "ip", "link", "set", "lo", "up")
        at("hub", "ip", "link", "add", "bridge", "type", "bridge")
        at("hub", "ip", "link", "set", "bridge", "up")
        for name, address in HOSTS.items():
            at("hub", "ip", "link", "add", name, "type", "veth", "peer", "name", "eth", "netns", f"fedvit-{name}")
            at("hub", "ip", "link", "set", name, "master", "bridge", "up")
            at(name, "ip", "address", "add", f"{address}/24", "dev", "eth")
            at(name, "ip", "link", "set", "eth", "up")
        for host, device in ((SLOW, "eth"), ("hub", SLOW)):
            at(host, "tc", "qdisc", "add", "dev", device, *f"root tbf rate {rate} burst 32kbit latency 400ms".split())
        for chain in ("INPUT", "OUTPUT") if loss else ():
            drop = f"iptables -A {chain} -m statistic --mode random --probability {loss} -j DROP"
            at(SLOW, *drop.split())
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"fedvit-{name}"], check=False, capture_output=True)


def make_images(folder: Path, count: int) -> None:
    """Write images for two sites and two classes: noise at two levels of brightness."""
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        for label, bright in zip(CLASSES, (80, 150), strict=True):
            (folder / site / label).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(rng.normal(bright, 40, (96, 96, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / site / label / f"{number}.png")


def flags_of(row: str, rounds: int) -> dict[str, object]:
    method, _, tune = row.partition("+")
    return {
        "method": method, "tune": tune or None, "model": "vit_tiny_patch16_224", "image_size": 96, "rounds": rounds,
        "epochs": 1, "batch": 32, "eval_every": 0,
    }  # fmt: skip


def over_flower(row: str, images: Path, folder: Path, rounds: int) -> Run:
    """Run the row with every part on its own host."""
    experiment = load_experiment(None, None, flags_of(row, rounds), sites=("north", "south"))
    experiment, federation = for_sites(experiment, ["north", "south"], CLASSES)
    trials = {name: Trial(folder / name, PORT, HOSTS["server"], inside(name)) for name in HOSTS}
    out = folder / "out"
    write_app(folder / "app", experiment, federation, str(out))
    with ExitStack() as stack:
        trials["server"].write_profile({"insecure": True})
        stack.enter_context(superlink(trials["server"]))
        for name in federation.sites:
            told = {"site": name, "state": str(folder / "state" / name), "data": str(images / name)}
            stack.enter_context(supernode(trials[name], name, told))
        submit(trials["server"], folder / "app", {"round-timeout": 600.0})
        end = time.monotonic() + 1800
        while not Run(out).finished:
            if (out / "error.txt").is_file():
                raise SystemExit((out / "error.txt").read_text())
            if time.monotonic() > end:
                raise SystemExit(f"{row} did not end in 30 minutes; see {folder}")
            time.sleep(1)
    return Run(out)


def in_one_process(row: str, images: Path, folder: Path, rounds: int) -> Run:
    sets = {"data.cache": str(folder / "cache")}
    for _ in run_rounds(load_experiment(None, sets, {**flags_of(row, rounds), "data": str(images)}), folder / "alone"):
        pass
    return Run(folder / "alone")


def seconds_a_round(run: Run) -> float:
    """Return the mean training time of a round, without the first round, which includes start-up."""
    later = [timing["seconds"]["train"] for timing in run.timings[1:]]
    return sum(later) / len(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["fedavg+bias", "fedperfix", "fedavg"], metavar="ROW")
    parser.add_argument("--rate", default="20mbit", help="rate of the slow link, each way (default: 20mbit)")
    parser.add_argument("--loss", type=float, default=0.01, help="share of its packets that is lost (default: 0.01)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=32, help="images of each class at each site (default: 32)")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, hosts(told.rate, told.loss):
        images = Path(place) / "images"
        make_images(images, told.images)
        print(f"{SLOW} behind {told.rate}, {100 * told.loss:g} % of packets lost; {told.rounds} rounds, ViT-Tiny 96 px")
        print(f"{'row':16}{'MB each way':>14}{'over Flower, s':>16}{'one process, s':>16}{'difference, s':>15}")
        for row in told.rows:
            folder = Path(place) / row
            folder.mkdir()
            wide, near = over_flower(row, images, folder, told.rounds), in_one_process(row, images, folder, told.rounds)
            a, b = seconds_a_round(wide), seconds_a_round(near)
            same = (wide.folder / "clients.csv").read_bytes() == (near.folder / "clients.csv").read_bytes()
            megabytes = wide.summary["nbytes"]["up"] / 1e6
            print(
                f"{row:16}{megabytes:>14.2f}{a:>16.1f}{b:>16.1f}{a - b:>15.1f}{'' if same else '  OTHER RESULT'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
