"""Run all benchmarks and print one table of ratios, each measured side by side: python -m benchmarks [NAME ...]

Those of ON_REQUEST take long, and run only if they are named.
"""

import sys

from benchmarks import (
    advice,
    backbones,
    bad_site,
    channel,
    checks,
    editing,
    estimate,
    evaluation,
    federation,
    frozen,
    images,
    kills,
    many_clients,
    precision,
    privacy,
    updates,
    workers,
)
from benchmarks.common import show

ALL = {
    "federation": federation.results,
    "workers": workers.results,
    "frozen": frozen.results,
    "many_clients": many_clients.results,
    "images": images.results,
    "evaluation": evaluation.results,
    "editing": editing.results,
    "precision": precision.results,
    "privacy": privacy.results,
    "channel": channel.results,
    "checks": checks.results,
    "estimate": estimate.results,
    "backbones": backbones.results,
    "updates": updates.results,
}
ON_REQUEST = {"advice": advice.results, "bad_site": bad_site.results, "kills": kills.results}

if __name__ == "__main__":
    known = {**ALL, **ON_REQUEST}
    unknown = set(sys.argv[1:]) - set(known)
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rows = []
    for name in sys.argv[1:] or ALL:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += known[name]()
    show(rows)
