"""Long runs with faults at random: every rank says the same of every step, and what tripped was never applied."""

import collections
import hashlib
import math
import os
import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from stabilityguard import Budget, GuardedOptimizer
from tests.distributed.ranks import run
from tests.distributed.wrapped import Collectives, Odd, ddp, fsdp1, fsdp2, make

WRAPPINGS = {
    "ddp": ddp(),
    "fsdp1": fsdp1("FULL_SHARD", use_orig_params=True),
    "fsdp2": fsdp2(),
}

KINDS = ("nan", "inf", "spike", "veto", "absent", "loss", "input")
"""``absent``: the rank has no gradients and says so by a veto; ``loss`` and ``input``: NaN in what its backward starts
from and its forward is given; the others are as they are called in a record."""

OF_BATCH = ("loss", "input")

QUIET_STEPS = 20
"""Steps without a fault at the start, so that spikes are judged."""

FACTOR = 1e6

ROWS = 32


@dataclass(frozen=True)
class Fault:
    kind: str
    layer: str
    early: bool
    """Whether gradients are spoiled inside backward, which under DDP is before they are reduced; else after it."""


@dataclass(frozen=True)
class Told:
    """What one rank tells of its run."""

    records: list[str]
    states: dict[int, str]
    plan: dict[int, dict[int, Fault]]
    kinds: list[str | None]


@dataclass(frozen=True)
class Summary:
    kinds: collections.Counter
    seconds: float


def soak(ranks, mode, *, steps, faults, seed, directory, patience=120):
    """Trains ``steps`` steps with ``faults`` bad ones among them; raises if a rank hangs or differs."""
    start = time.monotonic()
    told = run(ranks, _train, mode, steps, faults, seed, str(directory), patience=patience)
    seconds = time.monotonic() - start
    _assert_told_alike(told)
    if mode == "ddp":
        _assert_replicas_alike(told)
    first = told[0]
    assert all(rank.plan == first.plan for rank in told)
    assert len(first.plan) == faults
    tripped = collections.Counter(kind for kind in first.kinds if kind)
    assert tripped.total() == faults
    reports = [name for name in os.listdir(directory) if name.startswith("spike_step")]
    assert len(reports) == faults - tripped["veto"]
    return Summary(kinds=tripped, seconds=seconds)


def _assert_told_alike(told):
    for of_step in zip(*(rank.records for rank in told), strict=True):
        assert len(set(of_step)) == 1, of_step


def _assert_replicas_alike(told):
    first = told[0].states
    for rank in told:
        different = [step for step in first if rank.states[step] != first[step]]
        assert not different, f"replicas differ at the end of steps {different}"


# One rank ------------------------------------------------------------------------------------------------------------


def _train(rank, mode, steps, count, seed, directory):
    model = WRAPPINGS[mode](make(lambda: Odd(depth=1)))
    base = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    guarded = GuardedOptimizer(
        base, model, spike_threshold=50, budget=Budget(consecutive_skips=10**6), log_dir=directory, verbose=False
    )
    gradients = _Gradients(model)
    plan = {}
    told = Told(records=[], states={}, plan=plan, kinds=[])
    for step in range(1, steps + 1):
        faults = plan.get(step, {})
        loss = _backward(model, guarded, gradients, step, faults.get(rank))
        if step == 1:
            plan.update(draw_plan(seed, steps, count, _gathered(gradients.held()), may_be_early=mode != "fsdp1"))
        before = _state(base) if faults else None
        with Collectives() as collectives:
            guarded.step(loss=loss)
        record = guarded.last_record
        told.records.append(_told(record))
        told.kinds.append(record.kind)
        if faults:
            assert record.action == "skip", (faults, record)
            assert _state(base) == before, f"step {step} was skipped, and yet something changed"
            _assert_expected(faults, record)
            assert collectives.seen[0] == "allreduce_"
        else:
            assert record.action == "step", record
            assert collectives.seen == ["allreduce_"], (step, collectives.seen)
        if faults or step == steps:
            told.states[step] = _state(base)
    updates = {int(entry["step"]) for entry in base.state.values()}
    assert updates == {steps - count}
    return told


def _backward(model, guarded, gradients, step, fault):
    guarded.zero_grad()
    batch = _batch(step)
    if fault is not None and fault.kind == "input":
        batch[0, 0] = math.nan
    loss = model(batch)
    if fault is not None and fault.kind == "loss":
        loss = loss * math.nan
    gradients.fault = fault if fault is not None and fault.early else None
    loss.backward()
    gradients.fault = None
    if fault is not None:
        if not fault.early:
            gradients.spoil(fault)
        if fault.kind == "absent":
            gradients.drop()
        if fault.kind in ("veto", "absent"):
            guarded.veto(fault.kind)
    return loss


def _batch(step):
    """This rank's rows: enough of them that no healthy rank's loss is an outlier."""
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


class _Gradients:
    """This rank's gradients by layer; spoils them inside backward or after it."""

    def __init__(self, model):
        self.fault = None
        self._layers = collections.defaultdict(list)
        for name, parameter in model.named_parameters():
            layer = _clean(name).rpartition(".")[0] or "(root)"
            self._layers[layer].append(parameter)
            parameter.register_post_accumulate_grad_hook(lambda p, layer=layer: self._fire(p, layer))

    def held(self):
        """Layers of which this rank has gradient elements."""
        return [name for name, of_layer in self._layers.items() if any(map(_elements, of_layer))]

    def spoil(self, fault):
        for parameter in self._layers[fault.layer]:
            _spoil(parameter, fault.kind)

    def drop(self):
        for of_layer in self._layers.values():
            for parameter in of_layer:
                parameter.grad = None

    def _fire(self, parameter, layer):
        if self.fault is not None and self.fault.layer == layer:
            _spoil(parameter, self.fault.kind)


def _clean(name):
    return ".".join(part for part in name.split(".") if part not in ("module", "_fsdp_wrapped_module"))


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


def _elements(parameter):
    return 0 if parameter.grad is None else _local(parameter.grad).numel()


def _spoil(parameter, kind):
    if _elements(parameter):
        gradient = _local(parameter.grad).view(-1)
        if kind == "spike":
            gradient.mul_(FACTOR)
        elif kind in ("nan", "inf"):
            gradient[-1] = float(kind)


def _gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# What is to happen, and what did -------------------------------------------------------------------------------------


def draw_plan(seed, steps, count, held, *, may_be_early):
    """Faults by step and rank, the same wherever it is drawn; ``held`` are the layers of every rank."""
    draw = random.Random(seed)
    chosen = draw.sample(range(QUIET_STEPS + 1, steps + 1), count)
    return {step: _draw_faults(draw, held, may_be_early=may_be_early) for step in sorted(chosen)}


def _draw_faults(draw, held, *, may_be_early):
    places = draw.sample(range(len(held)), draw.choice((1, 1, 1, 2, len(held))))
    kind, early, is_mixed = draw.choice(KINDS), may_be_early and draw.random() < 0.5, draw.random() < 0.2
    return {
        place: Fault(kind=draw.choice(KINDS) if is_mixed else kind, layer=draw.choice(held[place]), early=early)
        for place in sorted(places)
    }


def _assert_expected(faults, record):
    kinds, layers, ranks = _expected(faults, record.trigger_layer)
    assert record.kind in kinds, (faults, record)
    assert record.trigger_layer in layers, (faults, record)
    on_all_alike = len(ranks) == dist.get_world_size() and not any(fault.early for fault in faults.values())
    is_partly_told = record.kind == "spike" or len({fault.kind for fault in faults.values()}) > 1
    assert set(record.bad_ranks) <= ranks, (faults, record)
    assert record.bad_ranks or on_all_alike, (faults, record)
    assert set(record.bad_ranks) == ranks or is_partly_told or on_all_alike, (faults, record)


def _expected(faults, named):
    """Kinds and layers that may be told, and the ranks to blame if ``named`` is the layer."""
    layers = collections.defaultdict(set)
    for fault in faults.values():
        layers[fault.layer].add(fault.kind)
    of_batch = {rank for rank, fault in faults.items() if fault.kind in OF_BATCH}
    if of_batch:
        everywhere = {"(root)", "inp", "head", "blocks.0.up", "blocks.0.norm", "blocks.0.down"}
        return {"nan"}, everywhere, of_batch | _ranks_of(faults, ("nan", "inf"), named)
    not_finite = {layer for layer, kinds in layers.items() if kinds & {"nan", "inf"}}
    if not_finite:
        return {"nan" if "nan" in layers[named] else "inf"}, not_finite, _ranks_of(faults, ("nan", "inf"), named)
    spiking = {layer for layer, kinds in layers.items() if "spike" in kinds}
    if spiking:
        return {"spike"}, spiking, _ranks_of(faults, ("spike",), named)
    return {"veto"}, {None}, set(faults)


def _ranks_of(faults, kinds, layer):
    return {rank for rank, fault in faults.items() if fault.kind in kinds and fault.layer == layer}


def _told(record):
    """All of a record: its fields as text, the bits of its layers' readings as a digest."""
    layers = record.layers
    readings = (layers.norms, layers.baselines, layers.ratios, layers.present)
    return f"{record} {layers.names} {layers.nan} {layers.inf} {_digest(readings)}"


def _state(optimizer):
    """Digest of the bits of this rank's parameters and optimizer state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    return _digest([*parameters, *kept])


def _digest(tensors):
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(_local(tensor).reshape(-1).contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


# The tests -----------------------------------------------------------------------------------------------------------


def test_a_thousand_steps_with_a_hundred_faults_under_ddp(tmp_path):
    summary = soak(2, "ddp", steps=1000, faults=100, seed=1, directory=tmp_path)
    assert set(summary.kinds) == {"nan", "inf", "spike", "veto"}
    assert min(summary.kinds.values()) >= 5


@pytest.mark.parametrize(("ranks", "seed"), [(3, 11), (4, 13)])
def test_three_hundred_steps_with_thirty_faults_where_every_rank_holds_a_shard(ranks, seed, tmp_path):
    summary = soak(ranks, "fsdp2", steps=300, faults=30, seed=seed, directory=tmp_path)
    assert set(summary.kinds) == {"nan", "inf", "spike", "veto"}


def test_a_hundred_steps_with_thirty_faults_where_parameters_are_flat(tmp_path):
    soak(2, "fsdp1", steps=100, faults=30, seed=2, directory=tmp_path)
