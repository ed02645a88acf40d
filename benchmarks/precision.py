"""Compare bf16 and torch.compile with plain training: python -m benchmarks.precision [--repeats 3]

Each repeat trains one client of 256 images with a ViT-Tiny at 32 px with patches of 4, on one thread. Compilation
happens before the measurement and is reported separately.
"""

import argparse
import time

from benchmarks.common import Result, alternate, make_worker, settings, show
from fedvit.core.training import descend


def results(images: int = 256, repeats: int = 3) -> list[Result]:
    plain = make_worker(settings("fedavg", clients=1, cohort=1, threads=1), images)
    found = []
    for name, sets in (("bf16", {"run.precision": "bf16"}), ("compiled", {"train.compile": True})):
        other = make_worker(settings("fedavg", sets, clients=1, cohort=1, threads=1), images)
        begin = time.perf_counter()
        descend(other.client("0", 1, {}), other.net.initial)
        first = time.perf_counter() - begin
        ratios = alternate(
            lambda repeat, other=other: descend(other.client("0", repeat + 1, {}), other.net.initial),
            lambda repeat: descend(plain.client("0", repeat + 1, {}), plain.net.initial),
            repeats,
        )
        found.append(Result(f"training {name} / fp32", ratios, None, beside=f"first round {first:.1f} s"))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--images", type=int, default=256)
    show(results(**vars(parser.parse_args())))
