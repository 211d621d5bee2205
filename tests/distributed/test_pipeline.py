"""Pipelines: every rank holds layers of its own, under the names that they have in the whole model."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import run
from tests.distributed.wrapped import assert_alike, assert_norms, collectives_of, local_part, norms_by_layer
from tests.support import guard

WIDTH, MICRO_BATCHES, SIZE = 5, 4, 2


class Layers(nn.Module):
    """Some layers of a model, by their index in it."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def make():
    torch.manual_seed(0)
    return Layers({str(i): nn.Linear(WIDTH, WIDTH) for i in range(4)})


def batch(step, replicas, replica):
    """Inputs and targets of one step, of one replica's part."""
    generator = torch.Generator().manual_seed(100 + step)
    values = torch.randn(2, replicas, MICRO_BATCHES * SIZE, WIDTH, generator=generator)
    return values[:, replica]


def in_ddp(stage, mesh):
    return DistributedDataParallel(stage, process_group=mesh.get_group())


def in_fsdp2(stage, mesh):
    for layer in stage.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(stage, mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    schedule: type
    stages: tuple[tuple[tuple[str, ...], ...], ...] = ((("0", "1"),), (("2", "3"),))
    """Of each rank along the pipeline the stages, and their layers."""
    replicas: int = 1
    wrap: Callable = lambda stage, mesh: stage
    scale_grads: bool = True
    """Whether the schedule divides by the number of micro-batches when all backward passes have ended."""

    @property
    def ranks(self):
        return 2 * self.replicas

    def loss(self, output, target):
        return (output - target).square().mean() / (1 if self.scale_grads else MICRO_BATCHES)

    def true_norms(self, step):
        reference = make().double()
        inputs, targets = batch(step, self.replicas, slice(None)).double()
        (reference(inputs) - targets).square().mean().backward()
        return norms_by_layer(reference)


PIPELINES = {
    "gpipe": Pipeline(schedule=ScheduleGPipe),
    "gpipe, losses divided by hand": Pipeline(schedule=ScheduleGPipe, scale_grads=False),
    "1f1b": Pipeline(schedule=Schedule1F1B),
    "interleaved 1f1b": Pipeline(schedule=ScheduleInterleaved1F1B, stages=((("0",), ("2",)), (("1",), ("3",)))),
    "interleaved zero bubble": Pipeline(
        schedule=ScheduleInterleavedZeroBubble, stages=((("0",), ("2",)), (("1",), ("3",)))
    ),
    "1f1b x ddp": Pipeline(schedule=Schedule1F1B, replicas=2, wrap=in_ddp),
    "1f1b x fsdp2": Pipeline(schedule=Schedule1F1B, replicas=2, wrap=in_fsdp2),
}

per_pipeline = pytest.mark.parametrize("pipeline", PIPELINES)


@functools.cache
def trained(pipeline):
    """What happened on every rank of a pipeline in a few steps."""
    return run(PIPELINES[pipeline].ranks, train, PIPELINES[pipeline])


def train(rank, pipeline):
    mesh = init_device_mesh("cpu", (2, pipeline.replicas), mesh_dim_names=("pp", "dp"))
    place, replica = mesh.get_coordinate()
    model, schedule = build(pipeline, mesh, place)
    optimizer = guard(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    steps = []
    for step, is_spoiled in enumerate([False, False, True, False]):
        optimizer.zero_grad()
        inputs, targets = batch(step, pipeline.replicas, replica)
        losses = []
        schedule.step(*([inputs] if place == 0 else []), **({"target": targets, "losses": losses} if place else {}))
        loss = torch.stack(losses).detach().mean() if losses else None
        seen = SimpleNamespace(was_measured=optimizer._guard.window.measured)
        seen.spoiled = spoil(model) if is_spoiled and rank == 1 else None
        before = [local_part(p).clone() for p in model.parameters()]
        seen.collectives = collectives_of(optimizer, loss=loss)
        seen.moved = not all(map(torch.equal, before, map(local_part, model.parameters())))
        seen.loss = None if loss is None else float(loss)
        seen.record = optimizer.last_record
        steps.append(seen)
    return steps


def build(pipeline, mesh, place):
    """The model of this rank, and what runs it."""
    whole, own, count = make(), pipeline.stages[place], sum(map(len, pipeline.stages))
    parts = [pipeline.wrap(Layers({i: whole.layers[i] for i in layers}), mesh["dp"]) for layers in own]
    stages = [
        PipelineStage(part, place + 2 * i, count, torch.device("cpu"), group=mesh.get_group("pp"))
        for i, part in enumerate(parts)
    ]
    schedule = pipeline.schedule(
        stages if len(stages) > 1 else stages[0], MICRO_BATCHES, pipeline.loss, scale_grads=pipeline.scale_grads
    )
    model = parts[0] if len(parts) == 1 else Layers({i: whole.layers[i] for layers in own for i in layers})
    return model, schedule


def spoil(model):
    """Writes one NaN into the last layer on this rank, and names it."""
    name, parameter = [(n, p) for n, p in model.named_parameters() if local_part(p.grad).numel()][-1]
    local_part(parameter.grad).view(-1)[0] = math.nan
    return name.removeprefix("module.").rpartition(".")[0]


@per_pipeline
def test_the_table_is_the_union_and_its_norms_those_of_the_whole_model(pipeline):
    expected = PIPELINES[pipeline].true_norms(0)
    layers = [i for of_rank in PIPELINES[pipeline].stages for of_stage in of_rank for i in of_stage]
    for steps in trained(pipeline):
        assert_norms(steps[0].record, expected)
        assert steps[0].record.layers.names == [f"layers.{i}" for i in layers]


@per_pipeline
def test_a_healthy_step_is_one_collective(pipeline):
    for steps in trained(pipeline):
        for seen in (steps[1], steps[-1]):
            assert seen.record.action == "step"
            assert seen.moved
            assert seen.collectives == ["allreduce_"]


@per_pipeline
def test_ranks_write_the_same_records_bit_for_bit(pipeline):
    for of_step in zip(*trained(pipeline), strict=True):
        assert_alike([seen.record for seen in of_step])


@per_pipeline
def test_the_last_stage_tells_the_loss(pipeline):
    for of_step in zip(*trained(pipeline), strict=True):
        losses = [seen.loss for seen in of_step]
        known = [loss for loss in losses if loss is not None]
        assert len(known) == PIPELINES[pipeline].replicas
        for seen in of_step:
            assert seen.record.rank_losses == tuple(losses)
            assert seen.record.loss == pytest.approx(sum(known) / len(known))


@per_pipeline
def test_gradients_are_read_again_only_where_the_schedule_divides_them_after_backward(pipeline):
    divides = PIPELINES[pipeline].scale_grads
    assert {seen.was_measured for steps in trained(pipeline) for seen in steps} == {not divides}


@per_pipeline
def test_a_nan_on_one_rank_is_skipped_by_all_and_blamed_on_that_rank(pipeline):
    of_ranks = [steps[2] for steps in trained(pipeline)]
    for seen in of_ranks:
        record = seen.record
        assert (record.action, record.kind, record.trigger_layer) == ("skip", "nan", of_ranks[1].spoiled)
        assert record.bad_ranks == (1,)
        assert not seen.moved
