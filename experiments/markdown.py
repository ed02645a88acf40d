"""A saved comparison as a Markdown table, best row first: python experiments/markdown.py results/small/cifar100.json"""

import json
import sys
from pathlib import Path


def table(path: Path) -> str:
    saved = json.loads(path.read_text())
    rows = sorted(saved["rows"], key=lambda row: -row["mean"])
    several = len(rows[0]["seeds"]) > 1
    clients = saved["settings"]["partition"]["clients"]
    header = ["row", "lr", "accuracy %", *(["± seeds"] if several else []), "gain over Local"]
    header += [f"clients hurt (of {clients})", "MB per client and round"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        local = row["method"] == "local"
        cells = [row["label"], f"{row['lr']:g}", f"{row['mean']:.1f} ± {row['std']:.1f}"]
        if several:
            cells.append(f"{row['seed_std']:.1f}")
        cells += ["-", "-"] if local else [f"{row['gain_mean']:+.1f}", f"{row['hurt']:.3g}"]
        lines.append([*cells, f"{(row['nbytes_down'] + row['nbytes_up']) / 1e6:.3g}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(table(Path(name)))
