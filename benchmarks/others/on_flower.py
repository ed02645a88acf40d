"""Run Flower's simulation engine (Ray) with one actor of one CPU per process, its FedAvg strategy and the same cohorts.

    python on_flower.py WORK OUT

Differences: replies are averaged in the order in which they arrive, in single precision, so the last bits of the
weights vary. The message to a node says which client the node simulates, because Flower numbers nodes at random. Only
weights that learn are sent. `run_simulation` is marked as deprecated, but `flwr run` first starts a server process.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

import bare
import flower_client
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


class SameCohorts(FedAvg):
    """FedAvg that samples the clients of the work, and records when each round ends."""

    def __init__(self, work: bare.Work):
        super().__init__(fraction_evaluate=1.0 if work.evaluates else 0.0)
        self.work, self.marks = work, []

    def messages(self, kind: str, clients: list[str], round_: int, arrays: ArrayRecord, grid: Grid) -> list[Message]:
        nodes = all_nodes(grid, len(self.work.clients))
        return [
            Message(
                RecordDict(
                    {
                        "arrays": arrays,
                        "config": ConfigRecord(
                            {"folder": str(self.work.folder), "client": client, "server-round": round_}
                        ),
                    }
                ),
                message_type=kind,
                dst_node_id=node,
            )
            for client, node in zip(clients, nodes, strict=False)
        ]

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Grid) -> Iterable[Message]:
        return self.messages("train", self.work.cohort(server_round), server_round, arrays, grid)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Grid) -> Iterable[Message]:
        return self.messages("evaluate", self.work.clients, server_round, arrays, grid) if self.work.evaluates else []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        refuse_failures(replies, len(self.work.cohort(server_round)))
        return super().aggregate_train(server_round, replies)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        replies = list(replies)
        if self.work.evaluates:
            refuse_failures(replies, len(self.work.clients))
        found = super().aggregate_evaluate(server_round, replies)
        self.marks.append(bare.now())
        return found


def all_nodes(grid: Grid, expected: int, seconds: float = 300) -> list[int]:
    """Wait for nodes, which register while the strategy runs; without a time limit, a failure would hang."""
    end = time.monotonic() + seconds
    while len(nodes := list(grid.get_node_ids())) < expected:
        if time.monotonic() > end:
            raise SystemExit(f"{len(nodes)} of {expected} nodes after {seconds:.0f} s")
        time.sleep(0.05)
    return nodes


def refuse_failures(replies: list[Message], expected: int) -> None:
    """Refuse a round that lost a client, because it is less work."""
    failed = [reply.error.reason for reply in replies if reply.has_error()]
    if failed or len(replies) != expected:
        raise SystemExit(f"{len(replies)} of {expected} clients answered, {len(failed)} with an error: {failed[:1]}")


def main(folder: str, out: str) -> None:
    work = bare.load(folder)
    strategy, ends = SameCohorts(work), []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        start = ArrayRecord(bare.weights(bare.build(work)))
        result = strategy.start(grid, start, num_rounds=len(work.cohorts))
        ends.append(result.arrays.to_torch_state_dict())

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend = {
        "client_resources": resources,
        "init_args": {"num_cpus": work.processes, "num_gpus": 0, "include_dashboard": False, "log_to_driver": False},
    }
    try:
        run_simulation(server, flower_client.app, num_supernodes=len(work.clients), backend_config=backend)
    except RuntimeError:
        traceback.print_exc()
        os._exit(1)  # the server's thread would wait forever for nodes that never come
    bare.report(out, strategy.marks, ends[0], "flwr", "ray", "torch")


if __name__ == "__main__":
    main(*sys.argv[1:])
