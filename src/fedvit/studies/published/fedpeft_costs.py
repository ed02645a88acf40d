"""FedPEFT's costs, Tables 1 and 2: what is printed, and the count behind it.

The paper counts one direction in units of 2^20 bytes, and rounds the weights to 10,000, what a client sends in full
fine-tuning to a megabyte, and every round's cost before it multiplies it by the rounds.
"""

from collections.abc import Mapping, Sequence

UNIT = 2**20
MILLIONS = {"full": 85.88, "head": 0.08, "shufflenet": 0.44, "bias": 0.18, "adapter": 0.23, "prompt": 0.17}
COSTS = {  # of Table 1: a round of all its clients, by our name of the row
    "full_x8": "2.56GB", "full_x4": "1.28GB", "full_x2": "656MB", "full_x1": "328MB", "head_x8": "2.44MB",
    "head_x64": "19.53MB", "shufflenet_x8": "13.43MB", "bias_x8": "5.49MB", "adapter_x8": "7.02MB",
    "prompt_x8": "5.19MB",
}  # fmt: skip
TARGETS = {  # of Table 2, in percent
    "CIFAR-100": (85.0, 90.0),
    "PCam": (75.0, 80.0),
}
TO_TARGET: Mapping[
    str, Mapping[str, Sequence[tuple[str, int] | None]]
] = {  # of Table 2: what reaching the two targets of a column costs, and after how many rounds that is
    "CIFAR-100": {
        "full_x8": (("10.24GB", 4), ("25.6GB", 10)),
        "full_x4": (("16.64GB", 13), ("51.2GB", 40)),
        "full_x2": (("19.22GB", 30), None),
        "full_x1": (None, None),
        "bias_x8": (("38.34MB", 7), ("115.29MB", 21)),
        "adapter_x8": (("42.12MB", 6), None),
        "prompt_x8": (("31.14MB", 6), ("88.23MB", 17)),
    },
    "PCam": {
        "full_x8": (("7.68GB", 3), ("30.72GB", 12)),
        "full_x4": (("3.84GB", 3), ("14.08GB", 11)),
        "full_x2": (("1.92GB", 3), ("12.17GB", 19)),
        "full_x1": (("1.28GB", 4), None),
        "bias_x8": (("16.47MB", 3), ("54.9MB", 10)),
        "adapter_x8": (("63.18MB", 9), ("287.82MB", 41)),
        "prompt_x8": (("15.57MB", 3), ("15.57MB", 3)),
    },
}
MISPRINTS = {"38.34MB": "38.43MB"}  # seven rounds of 5.49 MB


def printed_costs(row: str, column: str) -> tuple[str, ...]:
    """Return what the paper prints for a round of a row, and for its targets where Table 2 has the row."""
    cells = TO_TARGET[column].get(row, (None, None))
    words = ["-" if cell is None else f"{cell[0]} ({cell[1]} rounds)" for cell in cells]
    return (COSTS[row], *words)


def cost_of_round(tune: str, clients: int) -> str:
    """Return the cost of a round as the paper prints it."""
    each = MILLIONS[tune] * 1e6 * 4 / UNIT
    return _printed(clients * (round(each) if tune == "full" else each))


def cost_of_rounds(cost: str, rounds: int) -> str:
    """Return the cost of several rounds, given the printed one of a round."""
    value, giga = float(cost[:-2]), cost.endswith("GB")
    return _printed(value * rounds * (1024 if giga else 1))


def _printed(megabytes: float) -> str:
    giga = megabytes >= 1024
    value = megabytes / 1024 if giga else megabytes
    return f"{value:.2f}".rstrip("0").rstrip(".") + ("GB" if giga else "MB")
