"""The guard beneath a torch.amp.GradScaler, in every order that torch documents."""

import copy
import logging
import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

from stabilityguard import Budget, GradientSpikeError, SnapshotPolicy
from tests.support import Net, assert_same, batch, guard, snapshot

BASES = {
    "adamw-fused": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
    "adamw-foreach": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
    "adamw-plain": lambda parameters: AdamW(parameters, lr=1e-2, foreach=False),
    "sgd-fused": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
    "sgd-foreach": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9, foreach=True),
    "sgd-plain": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9, foreach=False),
}

every_base = pytest.mark.parametrize("make", BASES.values(), ids=BASES.keys())
every_order = pytest.mark.parametrize("order", ["step", "unscale, step", "unscale, clip, step"])
known_or_not = pytest.mark.parametrize("known", [True, False], ids=["scaler passed", "scaler not passed"])


def make_scaler(**options):
    return GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 3, **options})


class Run:
    """A model, its optimizer and its scaler, guarded or not."""

    def __init__(self, make, model, *, guarded, known=True, **options):
        self.model, self.scaler = model, options.pop("scaler", None) or make_scaler()
        base = make(model.parameters())
        if guarded:
            base = guard(model, base, scaler=self.scaler if known else None, **options)
        self.optimizer = base

    def step(self, number, order="step", *, spoil=None, factor=1.0, update=True):
        """``spoil`` is written into one scaled gradient; ``factor`` multiplies the loss behind the model's back."""
        self.optimizer.zero_grad()
        (self.scaler.scale(self.model(batch(number))) * factor).backward()
        if spoil is not None:
            self.model.head.weight.grad[0, 0] = spoil
        if "unscale" in order:
            self.scaler.unscale_(self.optimizer)
        if "clip" in order:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        result = self.scaler.step(self.optimizer)
        if update:
            self.scaler.update()
        return result

    @property
    def record(self):
        return self.optimizer.last_record

    def state(self):
        return snapshot(self.model, self.optimizer), self.scaler.state_dict()


def two_runs(make, known=True, **options):
    model = Net()
    return Run(make, copy.deepcopy(model), guarded=True, known=known, **options), Run(make, model, guarded=False)


@every_base
@every_order
@known_or_not
def test_a_healthy_run_equals_the_unguarded_run_bit_for_bit(make, order, known):
    mine, bare = two_runs(make, known)
    for number in range(8):
        mine.step(number, order)
        bare.step(number, order)
    assert bare.scaler.get_scale() == 4096.0
    assert_same(mine.state(), bare.state())
    assert (mine.record.step, mine.record.action) == (8, "step")


@every_base
@every_order
@known_or_not
@pytest.mark.parametrize("spoil", [math.inf, math.nan])
def test_an_overflow_moves_nothing_and_halves_the_scale_as_without_a_guard(make, order, known, spoil):
    mine, bare = two_runs(make, known)
    for run in (mine, bare):
        for number in range(2):
            run.step(number, order)
    before = snapshot(mine.model, mine.optimizer)
    for run in (mine, bare):
        run.step(2, order, spoil=spoil)
    assert_same(snapshot(mine.model, mine.optimizer), before)
    assert mine.scaler.get_scale() == bare.scaler.get_scale() == 512.0
    assert (mine.record.step, mine.record.action, mine.record.kind) == (3, "skip", "scaler_overflow")
    assert mine.record.trigger_layer == "head"
    assert mine.optimizer.reports == []
    for run in (mine, bare):
        for number in range(3, 8):
            run.step(number, order)
    assert_same(mine.state(), bare.state())
    assert mine.record.step == 8


@every_base
def test_an_overflow_at_the_very_first_step_leaves_the_run_as_the_unguarded_plain_one(make):
    mine, bare = two_runs(make)
    mine.step(0, spoil=math.inf)
    bare.scaler = make_scaler(init_scale=512.0)
    for number in range(3):
        mine.step(number)
        bare.step(number)
    assert_same(mine.state()[0], bare.state()[0])


@every_base
@every_order
def test_a_finite_spike_is_skipped_and_does_not_move_the_scale(make, order):
    mine, _ = two_runs(make, warmup_steps=3)
    mine.scaler.set_growth_interval(1000)
    for number in range(5):
        mine.step(number, order)
    before = snapshot(mine.model, mine.optimizer)
    mine.step(5, order, factor=1e4)
    assert (mine.record.action, mine.record.kind) == ("skip", "spike")
    assert mine.record.ratio > 1e3
    assert_same(snapshot(mine.model, mine.optimizer), before)
    assert mine.scaler.get_scale() == 1024.0


@every_base
@every_order
def test_the_batch_after_a_skip_is_taken_as_usual(make, order):
    mine, _ = two_runs(make, warmup_steps=3)
    for number in range(5):
        mine.step(number, order)
    mine.step(5, order, factor=1e4)
    mine.step(6, order)
    assert (mine.record.step, mine.record.action) == (7, "step")


class Line(nn.Module):
    """The gradient of its parameter is the batch."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum().float()


def step_line(optimizer, scaler, model, value=1.0, *, unscale=False):
    optimizer.zero_grad()
    scaler.scale(model(torch.tensor([value]))).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return optimizer.last_record


@every_base
@pytest.mark.parametrize("unscale", [True, False], ids=["unscale_", "no unscale_"])
def test_a_gradient_of_one_reads_as_one_whatever_the_scale(make, unscale):
    model, scaler = Line(), make_scaler(growth_interval=2)
    optimizer = guard(model, make(model.parameters()), scaler=scaler)
    for _ in range(6):
        record = step_line(optimizer, scaler, model, unscale=unscale)
        assert (record.action, record.global_norm) == ("step", 1.0)
    assert scaler.get_scale() == 8192.0
    assert record.baselines == {"(root)": 1.0}


def test_a_gradient_of_one_reads_as_one_without_the_scaler_where_it_unscales_at_the_step(caplog):
    model, scaler = Line(), make_scaler()
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING, logger="stabilityguard"):
        assert step_line(optimizer, scaler, model).global_norm == 1.0
    assert not caplog.records


def test_a_guard_that_cannot_know_the_scale_says_so_once(caplog):
    model, scaler = Line(), make_scaler()
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING, logger="stabilityguard"):
        for _ in range(3):
            step_line(optimizer, scaler, model, unscale=True)
    assert [record.getMessage().count("scaler=") for record in caplog.records] == [1]


@known_or_not
@pytest.mark.parametrize("unscale", [True, False], ids=["unscale_", "no unscale_"])
def test_the_guard_clips_unscaled_gradients(unscale, known):
    model, scaler = Line(), make_scaler()
    optimizer = guard(model, SGD(model.parameters(), lr=1.0), scaler=scaler if known else None, max_grad_norm=0.5)
    step_line(optimizer, scaler, model, 2.0, unscale=unscale)
    assert model.weight.item() == pytest.approx(-0.5, rel=1e-5)


def test_gradients_accumulated_under_a_scaler_equal_the_unguarded_ones():
    mine, bare = two_runs(BASES["adamw-fused"])
    for run in (mine, bare):
        for window in range(3):
            run.optimizer.zero_grad()
            for number in range(2):
                run.scaler.scale(run.model(batch(2 * window + number)) / 2).backward()
            run.scaler.step(run.optimizer)
            run.scaler.update()
    assert_same(mine.state(), bare.state())
    assert mine.record.step == 3


def test_a_loss_that_is_nan_is_a_trip_and_not_the_scalers_overflow():
    mine, _ = two_runs(BASES["adamw-fused"])
    mine.step(0)
    before = snapshot(mine.model, mine.optimizer)
    optimizer, scaler = mine.optimizer, mine.scaler
    optimizer.zero_grad()
    scaler.scale(mine.model(batch(1) * math.nan)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (mine.record.action, mine.record.kind) == ("skip", "nan")
    assert [report.record for report in optimizer.reports] == [mine.record]
    assert_same(snapshot(mine.model, optimizer), before)


def test_two_optimizers_under_one_scaler_are_skipped_each_on_its_own():
    model, scaler = Net(), make_scaler()
    guards = {
        part: guard(model, AdamW(getattr(model, part).parameters(), lr=1e-2), scaler=scaler)
        for part in ("body", "head")
    }
    scaler.scale(model(batch(0))).backward()
    model.head.weight.grad[0, 0] = math.inf
    body, head = copy.deepcopy(model.body.state_dict()), copy.deepcopy(model.head.state_dict())
    for optimizer in guards.values():
        scaler.step(optimizer)
    scaler.update()
    assert {p: o.last_record.kind for p, o in guards.items()} == {"body": None, "head": "scaler_overflow"}
    assert not torch.equal(model.body.weight, body["weight"])
    assert_same(model.head.state_dict(), head)
    assert scaler.get_scale() == 512.0


# Limits -----------------------------------------------------------------------------------------------------------


@known_or_not
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_without_end_stops_at_a_limit_before_the_scale_is_gone(where, known):
    mine, _ = two_runs(BASES["adamw-fused"], known)
    before = snapshot(mine.model, mine.optimizer)

    def train_on():
        for number in range(100):
            mine.optimizer.zero_grad()
            x = batch(number) * (math.nan if where == "loss" else 1.0)
            mine.scaler.scale(mine.model(x)).backward()
            mine.model.body.weight.grad.fill_(math.nan)
            mine.scaler.step(mine.optimizer)
            mine.scaler.update()

    with pytest.raises(GradientSpikeError):
        train_on()
    assert mine.record.action == "raise"
    assert mine.record.step == (5 if where == "loss" else 25)
    assert mine.scaler.get_scale() > 0
    assert_same(snapshot(mine.model, mine.optimizer), before)


def test_a_scale_that_has_to_come_down_from_its_default_is_waited_for():
    mine, _ = two_runs(BASES["adamw-fused"], scaler=GradScaler("cpu"))
    for number in range(16):
        mine.step(number, spoil=math.inf)
    assert mine.scaler.get_scale() == 1.0
    mine.step(16)
    assert (mine.record.step, mine.record.action) == (17, "step")


# Rollback ---------------------------------------------------------------------------------------------------------


@every_order
def test_a_rollback_restores_the_scale_too_and_forgets_the_overflow(order):
    mine, bare = two_runs(
        BASES["adamw-fused"], nan_action="rollback", snapshots=SnapshotPolicy(every=2, keep=2, quarantine=0)
    )
    states = [bare.state()]
    for number in range(5):
        mine.step(number, order)
        bare.step(number, order)
        states.append(bare.state())
    assert mine.scaler.get_scale() == 2048.0

    mine.optimizer.zero_grad()
    mine.scaler.scale(mine.model(batch(5) * math.nan)).backward()
    if "unscale" in order:
        mine.scaler.unscale_(mine.optimizer)
    mine.scaler.step(mine.optimizer)
    mine.scaler.update()
    assert (mine.record.action, mine.record.restored_step) == ("rollback", 4)
    assert_same(mine.state(), states[4])
    mine.step(4, order)
    assert_same(mine.state(), states[5])


def test_a_rollback_to_the_start_restores_the_first_scale():
    mine, _ = two_runs(
        BASES["sgd-plain"], nan_action="rollback", snapshots=SnapshotPolicy(every=100, keep=2, quarantine=0)
    )
    start = snapshot(mine.model, mine.optimizer)[0]
    for number in range(7):
        mine.step(number)
    assert mine.scaler.get_scale() == 4096.0
    mine.optimizer.zero_grad()
    mine.scaler.scale(mine.model(batch(7) * math.nan)).backward()
    mine.scaler.step(mine.optimizer)
    mine.scaler.update()
    assert (mine.record.action, mine.record.restored_step) == ("rollback", 0)
    assert mine.scaler.get_scale() == 1024.0
    assert_same(mine.model.state_dict(), start)


def test_scaler_overflows_without_end_end_in_a_rollback_where_there_is_a_snapshot():
    mine, _ = two_runs(
        BASES["adamw-fused"],
        snapshots=SnapshotPolicy(every=1, keep=2, quarantine=0),
        budget=Budget(consecutive_skips=2),
    )
    for number in range(2):
        mine.step(number)
    state = mine.state()
    for number in range(2, 24):
        mine.step(number, spoil=math.inf)
    assert (mine.record.action, mine.record.restored_step) == ("rollback", 2)
    assert_same(mine.state(), state)


# Neighbours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [True, False], ids=["unscale_", "no unscale_"])
@pytest.mark.parametrize("base", [SGD, AdamW])
def test_float16_parameters_give_torchs_own_error(base, unscale):
    model, scaler = Line(torch.float16), make_scaler()
    optimizer = guard(model, base(model.parameters(), lr=0.1), scaler=scaler)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        step_line(optimizer, scaler, model, unscale=unscale)
    assert optimizer.last_record is None
    assert_same(model.state_dict(), before)


@known_or_not
def test_a_disabled_scaler_changes_nothing(known):
    model = Net()
    mine = Run(BASES["adamw-fused"], copy.deepcopy(model), guarded=True, known=known, scaler=make_scaler(enabled=False))
    bare = Run(BASES["adamw-fused"], model, guarded=False, scaler=make_scaler(enabled=False))
    for number in range(3):
        mine.step(number, "unscale, step")
        bare.step(number, "unscale, step")
    assert_same(mine.state(), bare.state())
    mine.step(3, spoil=math.inf)
    assert (mine.record.action, mine.record.kind) == ("skip", "inf")
    assert_same(snapshot(mine.model, mine.optimizer), snapshot(bare.model, bare.optimizer))


def test_a_disabled_scaler_takes_part_in_a_rollback_without_harm():
    mine, _ = two_runs(
        BASES["adamw-fused"],
        scaler=make_scaler(enabled=False),
        nan_action="rollback",
        snapshots=SnapshotPolicy(every=1, keep=2, quarantine=0),
    )
    mine.step(0)
    mine.step(1, spoil=math.nan)
    assert (mine.record.action, mine.record.restored_step) == ("rollback", 1)


def test_a_step_without_the_scaler_that_the_guard_was_given_works_before_any_loss_was_scaled():
    model, scaler = Net(), make_scaler()
    optimizer = guard(model, scaler=scaler)
    loss = model(batch(0))
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    optimizer.step()
    assert optimizer.last_record.action == "step"
    assert optimizer.last_record.global_norm == pytest.approx(norm, rel=1e-6)


@every_base
def test_a_closed_guard_behaves_under_a_scaler_as_the_base_does(make):
    mine, bare = two_runs(make)
    mine.optimizer.close()
    for run in (mine, bare):
        run.step(0)
        run.step(1, spoil=math.inf)
        run.step(2, "unscale, step")
    assert_same(mine.state(), bare.state())


def test_a_scheduler_does_not_warn_when_the_first_step_overflowed(recwarn):
    mine, _ = two_runs(BASES["adamw-fused"])
    scheduler = torch.optim.lr_scheduler.StepLR(mine.optimizer, 1, 0.5)
    mine.step(0, spoil=math.inf)
    scheduler.step()
    assert mine.record.kind == "scaler_overflow"
    assert not recwarn.list


def test_a_copy_of_guard_and_scaler_together_stays_together():
    mine, _ = two_runs(BASES["adamw-fused"])
    mine.step(0)
    twin = copy.deepcopy(mine)
    for number in range(1, 4):
        mine.step(number)
        twin.step(number)
    assert_same(mine.state(), twin.state())
    assert mine.record.global_norm == twin.record.global_norm
