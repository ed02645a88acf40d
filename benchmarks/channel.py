"""Measure the split channel with a real server process over loopback: python -m benchmarks.channel [--repeats 3]

The messages are those of a batch as FedV sends them, 32 images of 197 tokens up and as many down, at the widths of
ViT-Tiny and ViT-B. The server returns the tensors it received, so that only the transport is measured. The share on the
wire is the time spent in the call, relative to the time of the call plus building and reading messages, which happen on
this side. The ratio is TLS to plain.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import Result, show
from fedvit.core.payload import Payload
from fedvit.network.grpc.channel import Connection, Event, Listener
from fedvit.network.grpc.identity import Identity
from fedvit.split.messages import Message, pack, unpack
from fedvit.split.plan import Wire

WIDTHS = {"ViT-Tiny": 192, "ViT-B": 768}
BATCH, TOKENS = 32, 197
ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def serve(folder: Path, *, safe: bool) -> None:
    """Print the port to standard output and echo messages until standard input ends."""
    identity = Identity(folder / "cert.pem", folder / "key.pem", folder / "cert.pem") if safe else None
    listener = Listener("localhost:0", identity, lambda hello: None, {"run": "echo"}, clients=1)
    print(listener.port, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), listener.events.put(None)), daemon=True).start()  # type: ignore[arg-type, func-returns-value]
    while True:
        event: Event | None = listener.events.get()
        if event is None:
            break
        if event.kind == "call":
            event.reply.set_result(Message.from_bytes(event.content).to_bytes())
    listener.close()


def make_certificate(folder: Path) -> None:
    """Make one self-signed certificate for both sides."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem",
         "-out", folder / "cert.pem"], check=True, capture_output=True,
    )  # fmt: skip


@dataclass
class Measured:
    """Seconds of building, calling and reading, with the number of messages and their bytes."""

    messages: int = 0
    nbytes: int = 0
    building: float = 0.0
    calling: float = 0.0
    reading: float = 0.0

    @property
    def seconds(self) -> float:
        return self.building + self.calling + self.reading

    def __str__(self) -> str:
        rate, speed = self.messages / self.seconds, 2 * self.nbytes / self.seconds / 1e6
        return (
            f"{rate:.1f} messages/s, {speed:.0f} MB/s both ways, {100 * self.calling / self.seconds:.0f} % on the wire"
        )


def measure(connection: Connection, x: torch.Tensor, wire: Wire, seconds: float) -> Measured:
    found = Measured()
    while found.seconds < seconds or found.messages < 3:
        a = time.perf_counter()
        message = Message(1, "localhost", found.messages, "forward", Payload({"h": pack(x, wire)}, {"last": 0.0}))
        blob = message.to_bytes()
        b = time.perf_counter()
        reply = connection.call(blob)
        c = time.perf_counter()
        unpack(Message.from_bytes(reply).payload.trees["h"], CPU)
        found.reading += time.perf_counter() - c
        found.building, found.calling = found.building + b - a, found.calling + c - b
        found.messages, found.nbytes = found.messages + 1, found.nbytes + len(blob)
    return found


def results(
    repeats: int = 3,
    seconds: float = 1.0,
    widths: Mapping[str, int] = WIDTHS,
    batch: int = BATCH,
    wires: tuple[Wire, ...] = ("fp32", "bf16"),
) -> list[Result]:
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        make_certificate(folder)
        connections = {}
        for safe in (True, False):
            command = [
                sys.executable,
                "-m",
                "benchmarks.channel",
                "--serve",
                str(folder),
                *(["--safe"] if safe else []),
            ]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
            )
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.stdin.close)
            port = int(process.stdout.readline())
            identity = Identity(folder / "cert.pem", folder / "key.pem", folder / "cert.pem") if safe else None
            connection = connections[safe] = Connection(f"localhost:{port}", identity)
            stack.callback(connection.close)
            connection.attend({"name": "localhost"})
        for model, width in widths.items():
            for wire in wires:
                x = torch.randn(batch, TOKENS, width)
                ratios = []
                for _ in range(repeats):
                    tls, plain = (measure(connections[safe], x, wire, seconds) for safe in (True, False))
                    ratios.append((tls.seconds / tls.messages) / (plain.seconds / plain.messages))
                size = tls.nbytes / tls.messages / 1e6
                what = f"split channel, {model} {wire} {size:.1f} MB: TLS / plain"
                rows.append(Result(what, ratios, None, beside=f"TLS {tls}; plain {plain}"))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--safe", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, safe=given.safe)
    else:
        show(results(given.repeats, given.seconds))
