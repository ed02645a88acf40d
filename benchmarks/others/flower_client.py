"""Flower's side of a client, in a module of its own, so that an actor imports it once and keeps its model."""

from functools import lru_cache

import bare
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@lru_cache(maxsize=1)
def ready(folder: str) -> tuple[bare.Work, torch.nn.Module]:
    """Load the work and its model, once per actor."""
    work = bare.load(folder)
    torch.set_num_threads(work.threads)
    return work, bare.build(work)


@app.train()
def train(message: Message, context: Context) -> Message:
    asked = message.content["config"]
    work, model = ready(asked["folder"])
    bare.load_(model, message.content["arrays"].to_torch_state_dict())
    loss = bare.train(model, work, asked["server-round"], asked["client"])
    metrics = MetricRecord({"num-examples": work.examples(asked["client"]), "loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(bare.weights(model)), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    asked = message.content["config"]
    work, model = ready(asked["folder"])
    bare.load_(model, message.content["arrays"].to_torch_state_dict())
    tested = len(work.test(asked["client"])[1])
    metrics = MetricRecord({"num-examples": tested, "accuracy": bare.correct(model, work, asked["client"]) / tested})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
