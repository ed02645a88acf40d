"""What a client's work needs: the counts of a probe, or, for a large model, a formula."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvit.core import tree
from fedvit.core.batches import EVALUATION_BATCH
from fedvit.core.settings import Experiment
from fedvit.core.training import eval_mode, load_
from fedvit.engine.activation_cache import first_learned
from fedvit.engine.net import Net
from fedvit.split.plan import SplitPlan

PER_STEP = 6.0  # times that a step goes over the weights: gradients, optimizer and its sums


@dataclass(frozen=True)
class Work:
    """What some computation needs: multiply-adds, operations, and bytes that are written anew."""

    macs: float = 0.0
    ops: float = 0.0
    fresh: float = 0.0

    def at_least_nothing(self) -> "Work":
        return Work(max(0.0, self.macs), max(0.0, self.ops), max(0.0, self.fresh))


@dataclass(frozen=True)
class SplitBytes:
    """The bytes of split learning: per visit and per image, to a client, from it, and for its evaluation."""

    down: tuple[float, float]
    up: tuple[float, float]
    evaluation: tuple[float, float]


@dataclass(frozen=True)
class Footprint:
    """What a client's training and evaluation need, by visit of a client, step and image."""

    train_visit: Work
    train_step: Work
    train_image: Work  # per visit, whatever the number of epochs
    train_image_epoch: Work
    train_first: Work  # more for each image, the first time it is used: frozen layers are computed once
    test_visit: Work
    test_image: Work
    test_first: Work
    train_nbytes: float  # the peak of live tensors besides the model: this much,
    train_nbytes_image: float  # and this for every image of a batch
    test_nbytes: float
    test_nbytes_image: float
    cached_nbytes: int  # activations of frozen layers that are kept per image
    split: "SplitBytes | None" = None

    def working_nbytes(self, batch: int, tests: int = EVALUATION_BATCH) -> float:
        """Return the peak bytes of tensors while a client trains or is tested, besides the model."""
        training = self.train_nbytes + batch * self.train_nbytes_image
        return max(training, self.test_nbytes + tests * self.test_nbytes_image)


def by_formula(experiment: Experiment, net: Net, macs: int) -> Footprint:
    """Estimate the footprint of a large model from one forward pass of one image; ratios are those of ViT-Tiny."""
    ours = {tensor.untyped_storage().data_ptr() for tensor in net.live.values()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    device = next(net.module.parameters()).device
    with left_as_it_was(net):
        for name, parameter in net.module.named_parameters():
            parameter.requires_grad_(name in net.roles.trainable)
        image = torch.zeros(1, 3, net.inputs.size, net.inputs.size, device=device)
        with eval_mode(net.module), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = net.module(image)  # kept alive, so that no storage is reused
        del logits
    holds = sum(size for place, size in kept.items() if place not in ours)
    weights = tree.nbytes(net.initial)
    frozen = first_learned(net.module, net.roles.trainable) is not None and experiment.model.name != "python"
    learns = 2.0 if weights < 0.05 * tree.nbytes(net.live) else 3.0  # without or with gradients of most weights
    passes = 1.0 if isinstance(net.plan, SplitPlan) else net.plan.passes(experiment.train.epochs)
    forward = Work(macs, 0, 0.03 * macs)
    nothing, ops = Work(), 8.0 * len(net.live)
    split = None
    if isinstance(net.plan, SplitPlan):
        tokens = 4.0 * net.inputs.size**2  # a guess for heads and tails; steps count what crosses in training
        split = SplitBytes((0, 0), (0, 0), (0, tokens))
    return Footprint(
        train_visit=Work(ops=ops),
        train_step=Work(ops=ops, fresh=PER_STEP * weights),
        train_image=nothing,
        train_image_epoch=Work(0.01 * macs) if frozen else Work(learns * passes * macs, 0, 0.024 * learns * macs),
        train_first=forward if frozen else nothing,
        test_visit=Work(ops=ops / 2),
        test_image=Work(0.01 * macs) if frozen else forward,
        test_first=forward if frozen else nothing,
        train_nbytes=4.0 * weights,
        train_nbytes_image=1.2 * holds,
        test_nbytes=0.0,
        test_nbytes_image=max(0.085 * holds, 36.0 * net.inputs.size**2),
        cached_nbytes=4 * int(getattr(net.module, "num_features", 1000)) if frozen else 0,
        split=split,
    )


@contextmanager
def left_as_it_was(net: Net) -> Iterator[None]:
    """Undo everything that training does to the model."""
    module = net.module
    modes = [(part, part.training) for part in module.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    counts = {name: b.clone() for name, b in module.named_buffers() if not b.is_floating_point()}
    try:
        yield
    finally:
        load_(net.live, {**net.initial, **net.frozen})
        load_(dict(module.named_buffers()), counts)
        for part, mode in modes:
            part.training = mode
        for parameter, learns in learning:
            parameter.requires_grad_(learns)
            parameter.grad = None
        net.narrower.clear()
