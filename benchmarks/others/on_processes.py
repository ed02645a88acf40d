"""Run two bare processes of one thread: a plain PyTorch loop over the same clients, averaged by hand.

    python on_processes.py WORK OUT

There is no framework: weights are in shared memory, and processes take the next client as soon as they are free.
"""

import sys
from typing import Any

import bare
from torch import multiprocessing, set_num_threads

Task = tuple[str, int, int, str]  # what to do, round, place for the answer, client


def serve(folder: str, shared: Any, ends: Any, tasks: Any, done: Any) -> None:
    """Build the model once, then simulate clients; this is the main function of a process."""
    work = bare.load(folder)
    set_num_threads(work.threads)
    model = bare.build(work)
    while (task := tasks.get()) is not None:
        what, round_, place, client = task
        bare.load_(model, shared)
        if what == "train":
            answer = bare.train(model, work, round_, client)
            for name, parameter in bare.learned(model).items():
                ends[place][name].copy_(parameter.detach())
        else:
            answer = bare.correct(model, work, client)
        done.put((place, answer))


def main(folder: str, out: str) -> None:
    work = bare.load(folder)
    context = multiprocessing.get_context("spawn")
    tasks, done = context.SimpleQueue(), context.SimpleQueue()
    shared = {name: tensor.share_memory_() for name, tensor in bare.weights(bare.build(work)).items()}
    most = max(map(len, work.cohorts))
    ends = [{name: tensor.clone().share_memory_() for name, tensor in shared.items()} for _ in range(most)]
    processes = [
        context.Process(target=serve, args=(folder, shared, ends, tasks, done), daemon=True)
        for _ in range(work.processes)
    ]
    for process in processes:
        process.start()

    def all_of(what: str, round_: int, clients: list[str]) -> None:
        for place, client in enumerate(clients):
            tasks.put((what, round_, place, client))
        for _ in clients:
            done.get()

    marks = []
    for round_ in work.rounds:
        cohort = work.cohort(round_)
        all_of("train", round_, cohort)
        mean = bare.mean((work.examples(client), end) for client, end in zip(cohort, ends, strict=False))
        for name, tensor in mean.items():
            shared[name].copy_(tensor)
        if work.evaluates:
            all_of("evaluate", round_, work.clients)
        marks.append(bare.now())
    for _ in processes:
        tasks.put(None)
    for process in processes:
        process.join()
    bare.report(out, marks, shared, "torch")


if __name__ == "__main__":
    main(*sys.argv[1:])
