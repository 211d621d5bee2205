"""A trainer over ranks, and what spoils its gradients."""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stabilityguard import GuardedOptimizer
from tests.distributed.wrapped import (
    Odd,
    local_part,
    make,
    rows,
)

LAYERS = ["(root)", "inp", "blocks.0.up", "blocks.0.norm", "blocks.0.down", "head"]


class Small(Odd):
    def __init__(self):
        super().__init__(depth=1)


class Trainer:
    """A guarded model on one rank; ``step`` trains on this rank's part of the step's batch."""

    def __init__(self, wrap=None, *, optimizer=torch.optim.AdamW, lr=1e-3, group=None, **options):
        unwrapped = make(Small)
        self.model = unwrapped if wrap is None else wrap(unwrapped)
        self.base = optimizer(self.model.parameters(), lr=lr)
        options = {"verbose": False, "warmup_steps": 3, **options}
        self.guarded = GuardedOptimizer(self.base, self.model, process_group=group, **options)
        self.part, self.parts = dist.get_rank(group), dist.get_world_size(group)
        self.steps = 0

    def batch(self, step):
        return rows(step, self.part, self.parts)

    def step(self, *, loss_factor=1.0, edit=None, batch=None, **options):
        """Trains one step on this rank; ``edit(model)`` may change gradients as backward leaves them."""
        self.steps += 1
        self.guarded.zero_grad()
        loss = self.model(self.batch(self.steps) if batch is None else batch) * loss_factor
        loss.backward()
        if edit is not None:
            edit(self.model)
        self.guarded.step(**{"loss": loss, **options})
        return self.record

    def train(self, steps):
        return [self.step() for _ in range(steps)]

    @property
    def record(self):
        return self.guarded.last_record

    def state(self):
        """Copies of this rank's part of parameters and optimizer state."""
        parameters = list(self.model.parameters())
        states = [dict(self.base.state.get(p, {})) for p in parameters]
        kept = [{k: local_part(v) if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in states]
        return copy.deepcopy(([local_part(p).detach() for p in parameters], kept))


def words(record):
    """All that a record says, its tensors included."""
    layers = record.layers
    tensors = (layers.norms, layers.baselines, layers.ratios, layers.present)
    return str(record), layers.names, layers.nan, layers.inf, [tensor.tolist() for tensor in tensors]


def assert_alike(told):
    """Whether all ranks told the same; NaN equals NaN."""
    assert len(set(map(repr, told))) == 1, told


def gradients(model, layer):
    """This rank's gradients of a layer."""
    module = dict(model.named_modules())["" if layer == "(root)" else layer]
    return [local_part(p.grad) for p in module.parameters(recurse=False) if p.grad is not None]


def fill(layer, value):
    """Writes ``value`` into the first element that this rank holds of the layer's gradient."""

    def edit(model):
        prefix = "module." if isinstance(model, DistributedDataParallel) else ""
        held = [gradient for gradient in gradients(model, prefix + layer) if gradient.numel()]
        held[0].view(-1)[0] = value

    return edit


def fill_flat(value):
    """Writes ``value`` into the first element that this rank holds of the first gradient."""

    def edit(model):
        next(p.grad for p in model.parameters() if p.grad is not None)[0] = value

    return edit


def multiply(factor):
    def edit(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)

    return edit


def on_rank(rank, edit):
    return edit if dist.get_rank() == rank else None


@contextlib.contextmanager
def spoiled_before_reduction(model, layer, value):
    """Inside backward, before anything is reduced, this rank's gradients of the layer become ``value``."""
    module = dict(model.named_modules())[f"module.{layer}"]

    def spoil(parameter):
        parameter.grad.fill_(value)

    hooks = [p.register_post_accumulate_grad_hook(spoil) for p in module.parameters(recurse=False)]
    yield
    for hook in hooks:
        hook.remove()
