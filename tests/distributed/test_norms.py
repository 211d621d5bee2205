"""Every way of splitting a model over ranks: true norms, one collective, one decision."""

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, fully_shard

from tests.distributed.ranks import run
from tests.distributed.wrapped import (
    ROWS,
    Odd,
    assert_alike,
    assert_norms,
    collectives_of,
    ddp,
    fsdp1,
    fsdp2,
    fsdp2_tensor_parallel,
    hsdp,
    local_gradients,
    local_part,
    make,
    norms_by_layer,
    rows,
    tensor_parallel,
    true_norms,
)
from tests.support import guard

STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Fickle(Odd):
    """Leaves the last block out for some batches."""

    def forward(self, x):
        used = self.blocks if x.sum() > 0 else self.blocks[:-1]
        x = self.inp(x)
        for block in used:
            x = block(x)
        return (self.head(x * self.gain) * self.tri.sum()).square().mean()


class Tied(Odd):
    """One weight in two layers of one block."""

    def __init__(self):
        super().__init__(width=13, hidden=13)
        self.blocks[1].down.weight = self.blocks[1].up.weight


class Frozen(Odd):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)


class Tiny(nn.Module):
    """So small that some ranks hold nothing of it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.head(x[:, :4]).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def zero(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - its import warns

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-3)


def add_up(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def average(model):
    add_up(model)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


@dataclass(frozen=True, kw_only=True)
class Mode:
    ranks: int
    wrap: Callable = lambda model: model
    parts: int | None = None
    """Into how many parts the batch is split; as many as ranks unless told otherwise."""
    model: type = Odd
    base: Callable = sgd
    after_backward: Callable | None = None
    is_half: bool = False
    spoiled: tuple[str, ...] = ("blocks.1",)
    """Where rank 1 writes its NaN, one after the other."""
    multiple: int = 1
    """Of the mean loss's gradients."""

    def rows(self, step, rank):
        parts = self.parts or self.ranks
        return rows(step, rank * parts // self.ranks, parts)

    def true_norms(self, step, micro_batches=1):
        norms = true_norms(step, self.parts or self.ranks, self.model, micro_batches)
        return {layer: norm * self.multiple for layer, norm in norms.items()}


MODES = {
    "none, same data": Mode(ranks=2, parts=1),
    "none, averaged by hand": Mode(ranks=2, after_backward=average),
    "none, added up by hand": Mode(ranks=2, after_backward=add_up, multiple=2),
    "ddp": Mode(ranks=2, wrap=ddp()),
    "ddp, bucket view": Mode(ranks=2, wrap=ddp(gradient_as_bucket_view=True)),
    "ddp, static graph": Mode(ranks=2, wrap=ddp(static_graph=True)),
    "ddp, static graph, bucket view": Mode(ranks=2, wrap=ddp(static_graph=True, gradient_as_bucket_view=True)),
    "ddp, unused parameters": Mode(ranks=3, wrap=ddp(find_unused_parameters=True), model=Fickle),
    "ddp, ZeroRedundancyOptimizer": Mode(ranks=2, wrap=ddp(), base=zero),
    **{
        f"fsdp1, {strategy}, {'original' if original else 'flat'}": Mode(
            ranks=4 if "HYBRID" in strategy else 3, wrap=fsdp1(strategy, use_orig_params=original)
        )
        for strategy in STRATEGIES
        for original in (True, False)
    },
    **{
        f"fsdp1, bf16{', low gradients' if low else ''}, {'original' if original else 'flat'}": Mode(
            ranks=2,
            wrap=fsdp1(
                "FULL_SHARD",
                use_orig_params=original,
                mixed_precision=MixedPrecision(
                    param_dtype=torch.bfloat16,
                    reduce_dtype=torch.bfloat16 if low else torch.float32,
                    keep_low_precision_grads=low,
                ),
            ),
            is_half=True,
        )
        for low in (False, True)
        for original in (True, False)
    },
    "fsdp2": Mode(ranks=3, wrap=fsdp2()),
    "fsdp2, not resharded": Mode(ranks=3, wrap=fsdp2(reshard_after_forward=False)),
    "fsdp2, on the cpu": Mode(ranks=2, wrap=fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "fsdp2, bf16": Mode(ranks=2, wrap=fsdp2(mp_policy=MixedPrecisionPolicy(**HALF)), is_half=True),
    "hsdp": Mode(ranks=4, wrap=hsdp()),
    "tp of 2": Mode(ranks=2, parts=1, wrap=tensor_parallel(), spoiled=("blocks.1.up", "head")),
    "tp of 3": Mode(ranks=3, parts=1, wrap=tensor_parallel()),
    "sp": Mode(ranks=2, parts=1, wrap=tensor_parallel(sequence=True), spoiled=("blocks.1.up", "blocks.1.norm", "head")),
    "fsdp2 x tp": Mode(ranks=4, parts=2, wrap=fsdp2_tensor_parallel()),
}

per_mode = pytest.mark.parametrize("mode", MODES)


@functools.cache
def trained(mode):
    """What happened on every rank of a mode in a few steps."""
    return run(MODES[mode].ranks, train, MODES[mode])


def train(rank, mode):
    model = mode.wrap(make(mode.model))
    optimizer = guard(model, mode.base(model))
    return [
        train_step(rank, mode, model, optimizer, step, spoiled)
        for step, spoiled in enumerate([None, None, *mode.spoiled, None])
    ]


def train_step(rank, mode, model, optimizer, step, spoiled=None):
    optimizer.zero_grad()
    model(mode.rows(step, rank)).backward()
    if mode.after_backward is not None:
        mode.after_backward(model)
    seen = SimpleNamespace(squares=squares(model, mode), was_measured=optimizer._guard.window.measured)
    seen.spoiled = spoil(model, mode, spoiled) if spoiled is not None and rank == 1 else None
    before = [local_part(p).clone() for p in model.parameters()]
    seen.collectives = collectives_of(optimizer)
    seen.record = optimizer.last_record
    seen.moved = not all(map(torch.equal, before, map(local_part, model.parameters())))
    return seen


def squares(model, mode):
    found = defaultdict(float)
    for layer, gradient in local_gradients(model, make(mode.model)):
        found[layer] += float(gradient.double().square().sum())
    return dict(found)


def spoil(model, mode, where):
    """Writes one NaN below ``where`` into a gradient on this rank, and names the layer that it hit."""
    layer, gradient = next(
        (layer, gradient)
        for layer, gradient in local_gradients(model, make(mode.model))
        if f"{layer}.".startswith(f"{where}.") and gradient.numel()
    )
    gradient[(0,) * gradient.dim()] = math.nan
    return layer


@per_mode
def test_norms_are_those_of_the_whole_model_in_float64(mode):
    of_ranks = [steps[0] for steps in trained(mode)]
    if MODES[mode].is_half:
        layers = MODES[mode].true_norms(0)
        expected = {layer: math.sqrt(sum(seen.squares.get(layer, 0.0) for seen in of_ranks)) for layer in layers}
    else:
        expected = MODES[mode].true_norms(0)
    assert_norms(of_ranks[0].record, expected)
    assert list(of_ranks[0].record.layer_norms) == list(expected)


@per_mode
def test_a_healthy_step_is_one_collective(mode):
    for steps in trained(mode):
        for seen in (steps[1], steps[-1]):
            assert seen.record.action == "step"
            assert seen.moved
            assert seen.collectives == ["allreduce_"]


@per_mode
def test_ranks_write_the_same_records_bit_for_bit(mode):
    for of_step in zip(*trained(mode), strict=True):
        assert_alike([seen.record for seen in of_step])


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode].after_backward is None])
def test_what_backward_left_still_holds_at_step(mode):
    assert all(seen.was_measured for steps in trained(mode) for seen in steps)


@per_mode
def test_a_nan_on_one_rank_is_skipped_by_all_and_blamed_on_that_rank(mode):
    for of_step in list(zip(*trained(mode), strict=True))[2:-1]:
        layer = of_step[1].spoiled
        for seen in of_step:
            assert (seen.record.action, seen.record.kind, seen.record.trigger_layer) == ("skip", "nan", layer)
            assert seen.record.bad_ranks == (1,)
            assert not seen.moved


# Models that are special ---------------------------------------------------------------------------------------------

SHARDED = {
    "ddp": Mode(ranks=2, wrap=ddp()),
    "fsdp1, original": Mode(ranks=3, wrap=fsdp1("FULL_SHARD", use_orig_params=True)),
    "fsdp1, flat": Mode(ranks=3, wrap=fsdp1("FULL_SHARD", use_orig_params=False)),
    "fsdp2": Mode(ranks=3, wrap=fsdp2()),
}

per_sharding = pytest.mark.parametrize("sharding", SHARDED)


def assert_true(steps, norms):
    """``norms`` are those of the first step, and the second was measured in one collective."""
    for of_step in zip(*steps, strict=True):
        assert_alike([seen.record for seen in of_step])
    assert_norms(steps[0][0].record, norms)
    for of_rank in steps:
        assert of_rank[1].collectives == ["allreduce_"]
        assert all(seen.was_measured for seen in of_rank)


def train_briefly(rank, mode):
    model = mode.wrap(make(mode.model))
    optimizer = guard(model, mode.base(model))
    return [train_step(rank, mode, model, optimizer, step) for step in range(2)]


@per_sharding
def test_a_tied_weight_counts_once(sharding):
    mode = replace(SHARDED[sharding], model=Tied)
    assert_true(run(mode.ranks, train_briefly, mode), mode.true_norms(0))


@per_sharding
def test_frozen_layers_have_no_norm(sharding):
    mode = replace(SHARDED[sharding], model=Frozen)
    assert "blocks.0.up" not in mode.true_norms(0)
    assert_true(run(mode.ranks, train_briefly, mode), mode.true_norms(0))


@per_sharding
def test_a_rank_may_hold_nothing(sharding):
    mode = replace(SHARDED[sharding], model=Tiny)
    steps = run(mode.ranks, train_briefly, mode)
    assert_true(steps, mode.true_norms(0))
    assert (steps[-1][0].squares.get("head", 0.0) == 0.0) == (sharding != "ddp")


class Experts(nn.Module):
    """One expert that all ranks hold and only the first uses, and one that only the first holds."""

    def __init__(self, rank):
        super().__init__()
        self.inp = nn.Linear(5, 3)
        self.head = nn.Linear(3, 1)
        self.common = nn.Linear(3, 3)
        self.own = nn.ModuleDict({"first": nn.Linear(3, 3)} if rank == 0 else {})
        self.uses_experts = rank == 0

    def forward(self, x):
        x = self.inp(x)
        if self.uses_experts:
            x = self.own["first"](self.common(x))
        return self.head(x).square().mean()


def train_experts(rank, averaged):
    torch.manual_seed(0)
    model = Experts(rank)
    optimizer = guard(model, sgd(model))
    records, collectives, truth = [], [], []
    for step in range(2):
        optimizer.zero_grad()
        model(rows(step, rank, 2)).backward()
        if averaged:
            average(model.inp)
            average(model.head)
        truth.append(norms_by_layer(model))
        collectives.append(collectives_of(optimizer))
        records.append(optimizer.last_record)
    return SimpleNamespace(records=records, collectives=collectives, truth=truth)


def test_an_expert_has_the_norm_of_the_rank_that_uses_it():
    first, second = run(2, train_experts, False)
    experts = {"common", "own.first"}
    assert experts.isdisjoint(second.truth[0])
    for i, of_step in enumerate(zip(first.records, second.records, strict=True)):
        assert_alike(of_step)
        assert {layer: of_step[0].layer_norms[layer] for layer in experts} == pytest.approx(
            {layer: first.truth[i][layer] for layer in experts}, rel=1e-6
        )
    assert first.collectives == second.collectives == [["allreduce_"]] * 2


def test_experts_may_stand_beside_layers_that_are_averaged_by_hand():
    first, second = run(2, train_experts, True)
    for of_step, truth in zip(zip(first.records, second.records, strict=True), first.truth, strict=True):
        assert_alike(of_step)
        assert_norms(of_step[0], truth)


# Steps that are special ----------------------------------------------------------------------------------------------


def without_sync(model):
    if hasattr(model, "no_sync"):
        return model.no_sync()
    model.set_requires_gradient_sync(False)
    stack = contextlib.ExitStack()
    stack.callback(model.set_requires_gradient_sync, True)
    return stack


def accumulate(rank, mode, syncs):
    model = mode.wrap(make(mode.model))
    optimizer = guard(model, mode.base(model))
    seen = []
    for step in (0, 3):
        optimizer.zero_grad()
        with contextlib.nullcontext() if syncs else without_sync(model):
            for batch in (step, step + 1):
                model(mode.rows(batch, rank)).backward()
        model(mode.rows(step + 2, rank)).backward()
        was_measured = optimizer._guard.window.measured
        seen.append(
            SimpleNamespace(
                was_measured=was_measured, collectives=collectives_of(optimizer), record=optimizer.last_record
            )
        )
    return seen


@pytest.mark.parametrize("syncs", [True, False], ids=["synced every time", "synced at the end"])
@per_sharding
def test_accumulated_gradients_are_measured_as_their_sum(sharding, syncs):
    mode = SHARDED[sharding]
    assert_true(run(mode.ranks, accumulate, mode, syncs), mode.true_norms(0, micro_batches=3))


class HandSplit(nn.Module):
    """Two layers whose weights are split over two ranks by hand, along rows and along columns, and two that are not."""

    def __init__(self, rank=None):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3, bias=False)
        self.head = nn.Linear(3, 1)
        self.is_split = rank is not None
        if self.is_split:
            mine = slice(4 * rank, 4 * rank + 4)
            self.up.weight = nn.Parameter(self.up.weight.detach()[mine].clone())
            self.up.bias = nn.Parameter(self.up.bias.detach()[mine].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach()[:, mine].clone())

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        if self.is_split:
            x = _AddedUpInBackward.apply(x)
        x = self.down(torch.tanh(self.up(x)))
        if self.is_split:
            x = _AddedUpInForward.apply(x)
        return self.head(x).square().mean()


class _AddedUpInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _AddedUpInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def train_split_by_hand(rank):
    torch.manual_seed(0)
    model = HandSplit(rank)

    def shard_of(name, parameter):
        return rank if name.startswith(("up.", "down.")) else None

    optimizer = guard(model, sgd(model), shard_of=shard_of)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step)).backward()
        if step == 2 and rank == 1:
            model.up.weight.grad[0, 0] = math.nan
        was_measured = optimizer._guard.window.measured
        seen.append(
            SimpleNamespace(
                was_measured=was_measured, collectives=collectives_of(optimizer), record=optimizer.last_record
            )
        )
    return seen


def test_plain_tensors_split_by_hand_are_told_apart_by_shard_of():
    steps = run(2, train_split_by_hand)
    assert_true([of_rank[:2] for of_rank in steps], true_norms(0, 1, HandSplit))
    last = steps[0][2].record
    assert (last.action, last.trigger_layer, last.bad_ranks) == ("skip", "up", (1,))
    assert_alike([of_rank[2].record for of_rank in steps])


def train_more_later(rank, mode):
    model = mode.wrap(make(mode.model))
    late = [p for name, p in model.named_parameters() if "blocks.2." in name]
    early = [p for name, p in model.named_parameters() if "blocks.2." not in name]
    optimizer = guard(model, torch.optim.SGD(early, lr=0.0))
    seen = []
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": late, "lr": 0.0})
        model.zero_grad()
        optimizer.zero_grad()
        model(mode.rows(step, rank)).backward()
        was_measured = optimizer._guard.window.measured
        seen.append(
            SimpleNamespace(
                was_measured=was_measured, collectives=collectives_of(optimizer), record=optimizer.last_record
            )
        )
    return seen


@per_sharding
def test_parameters_that_are_added_later_are_counted_from_the_next_step_on(sharding):
    mode = SHARDED[sharding]
    steps = run(mode.ranks, train_more_later, mode)
    for of_step in zip(*steps, strict=True):
        assert_alike([seen.record for seen in of_step])
    late = {"blocks.2.up", "blocks.2.norm", "blocks.2.down"}
    first, second, third = (seen.record for seen in steps[0])
    assert_norms(first, {layer: norm for layer, norm in mode.true_norms(0).items() if layer not in late})
    assert_norms(second, mode.true_norms(1))
    assert_norms(third, mode.true_norms(2))
    for of_rank in steps:
        assert of_rank[2].collectives == ["allreduce_"]


# A layer that is large -----------------------------------------------------------------------------------------------

LARGE = {
    "ddp": ddp(),
    "fsdp2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
}


def directions(part):
    """The derivative of a rank's loss by what the large layer returns."""
    return torch.randn(ROWS, 4000, generator=torch.Generator().manual_seed(part))


def inputs(part):
    return torch.randn(ROWS, 5000, generator=torch.Generator().manual_seed(10 + part))


def train_large(rank, wrap):
    model = nn.Sequential(nn.utils.skip_init(nn.Linear, 5000, 4000))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model = wrap(model)
    optimizer = guard(model, sgd(model))
    (model(inputs(rank)) * directions(rank)).sum().backward()
    was_measured = optimizer._guard.window.measured
    optimizer.step()
    return optimizer.last_record, was_measured


@pytest.mark.parametrize("sharding", LARGE)
def test_twenty_million_elements_are_measured_to_a_millionth(sharding):
    (first, measured), (second, _) = run(2, train_large, LARGE[sharding])
    x = torch.cat([inputs(0), inputs(1)]).double()
    d = torch.cat([directions(0), directions(1)]).double() / 2
    of_weight = (x @ x.T).mul(d @ d.T).sum()  # squared norm of the outer products' sum
    assert_norms(first, {"0": math.sqrt(of_weight + d.sum(0).square().sum())})
    assert_alike([first, second])
    assert measured
