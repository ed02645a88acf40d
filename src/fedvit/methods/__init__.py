"""Every method by name: one dictionary, one file each."""

from collections.abc import Callable, Mapping
from typing import Any

from fedvit.methods import (
    adapters,
    cd2_pfed,
    centralized,
    custom,
    fedavg,
    fedavg_ft,
    fedbabu,
    fedbn,
    fedfa,
    fedfed,
    fedper,
    fedperfix,
    fedrep,
    local,
    prefix_r,
    prefix_z,
    prompts,
    vanilla_attention,
)
from fedvit.plan import Plan

METHODS: dict[str, Callable[..., Plan]] = {
    "fedavg": fedavg.plan,
    "local": local.plan,
    "fedper": fedper.plan,
    "fedrep": fedrep.plan,
    "fedbn": fedbn.plan,
    "fedbabu": fedbabu.plan,
    "vanilla_attention": vanilla_attention.plan,
    "fedperfix": fedperfix.plan,
    "prefix_z": prefix_z.plan,
    "prefix_r": prefix_r.plan,
    "prompts": prompts.plan,
    "adapters": adapters.plan,
    "custom": custom.plan,
    "fedavg_ft": fedavg_ft.plan,
    "centralized": centralized.plan,
    "fedfa": fedfa.plan,
    "cd2_pfed": cd2_pfed.plan,
    "fedfed": fedfed.plan,
}


def make_plan(table: Mapping[str, Any]) -> Plan:
    """The plan of a [method] table: its name, and the arguments of its function."""
    return METHODS[table["name"]](**{key: value for key, value in table.items() if key != "name"})
