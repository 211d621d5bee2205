"""Whatever the sequence of healthy and bad gradients, and whatever the optimizer, nothing bad is ever written."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from stabilityguard import Budget, SnapshotPolicy
from tests.support import NormNet, assert_same, batch, guard, snapshot


class SignMomentum(torch.optim.Optimizer):
    """The sign of an interpolated momentum, as Lion does: an optimizer that torch does not have."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(momentum.lerp(p.grad, 1 - first).sign_(), alpha=group["lr"])
                    momentum.lerp_(p.grad, 1 - second)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "sign momentum": SignMomentum,
}

WARMUP = 3
PATIENT = Budget(consecutive_skips=1000, rollbacks=1000)


class Model(NormNet):
    """BatchNorm and dropout: buffers to spoil and random numbers to rewind."""

    def forward(self, x):
        hidden = nn.functional.dropout(torch.tanh(self.body(x)), 0.2, self.training)
        return self.head(self.norm(hidden)).square().mean()


def spike(model, x):
    (model(x) * 1e4).backward()


def infinite_loss(model, x):
    (model(x) * torch.inf).backward()


def nan_input(model, x):
    x = x.clone()
    x[0, 0] = torch.nan
    model(x).backward()


def nan_element(model, x):
    model(x).backward()
    model.body.bias.grad[2] = torch.nan


def clipped_inf(model, x):
    model(x).backward()
    model.head.weight.grad[0, 0] = torch.inf
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


FAULTS = {
    "spike": spike,
    "infinite loss": infinite_loss,
    "nan input": nan_input,
    "nan element": nan_element,
    "clipped inf": clipped_inf,
}

names = st.sampled_from(list(OPTIMIZERS))
sequences = st.lists(st.sampled_from([None, None, *FAULTS]), min_size=1, max_size=10)
repeatable = settings(derandomize=True, deadline=None, max_examples=30, database=None)


def built(name, seed=0, **options):
    torch.manual_seed(seed)
    model = Model()
    base = OPTIMIZERS[name](model.parameters())
    return model, guard(model, base, spike_threshold=500.0, warmup_steps=WARMUP, log_every=0, **options)


def attempt(model, optimizer, step, fault=None):
    """One step on its own batch, with the fault of that name; dropout draws what this step always draws."""
    torch.manual_seed(step)
    optimizer.zero_grad()
    if fault is None:
        model(batch(step)).backward()
    else:
        FAULTS[fault](model, batch(step))
    optimizer.step()


def lead_in(sequence):
    """Spikes are judged after the warm-up only; non-finite gradients always."""
    return [None] * (WARMUP if "spike" in sequence else 0) + sequence


@repeatable
@given(names, sequences)
def test_a_skip_leaves_parameters_buffers_and_optimizer_state_bit_for_bit(name, sequence):
    model, optimizer = built(name, budget=PATIENT)
    with optimizer:
        for step, fault in enumerate(lead_in(sequence), 1):
            before = snapshot(model, optimizer)
            attempt(model, optimizer, step, fault)
            assert optimizer.last_record.action == ("step" if fault is None else "skip")
            if fault is not None:
                assert_same(snapshot(model, optimizer), before)


@repeatable
@given(names, sequences)
def test_what_was_applied_equals_an_unguarded_run_over_the_healthy_batches_alone(name, sequence):
    model, optimizer = built(name, budget=PATIENT)
    twin = copy.deepcopy(model)
    bare = OPTIMIZERS[name](twin.parameters())
    with optimizer:
        for step, fault in enumerate(lead_in(sequence), 1):
            attempt(model, optimizer, step, fault)
            if fault is None:
                attempt(twin, bare, step)
        assert_same(snapshot(model, optimizer), snapshot(twin, bare))
        assert all(p.isfinite().all() for p in model.parameters())


@repeatable
@given(names, sequences, st.integers(1, 4), st.integers(1, 3))
def test_a_rollback_returns_to_a_state_that_was_and_replays_bit_for_bit(name, sequence, every, keep):
    policy = SnapshotPolicy(every=every, keep=keep, quarantine=0)
    torch.manual_seed(0)
    model = Model()
    base = OPTIMIZERS[name](model.parameters())
    scheduler = LambdaLR(base, lambda epoch: 1 / (1 + epoch))
    options = {"spike_threshold": 500.0, "warmup_steps": WARMUP, "log_every": 0, "budget": PATIENT}
    optimizer = guard(model, base, nan_action="rollback", snapshots=policy, track={"scheduler": scheduler}, **options)
    ends = {0: (snapshot(model, optimizer), torch.get_rng_state())}
    samples = {0: 0}  # healthy norms in the detector's memory at the end of each step
    with optimizer:
        for step, drawn in enumerate(lead_in(sequence), 1):
            in_warmup = samples[step - 1] < WARMUP
            fault = None if drawn == "spike" and in_warmup else drawn
            optimizer.zero_grad()
            if fault is None:
                model(batch(step)).backward()
            else:
                FAULTS[fault](model, batch(step))
            optimizer.step()
            record = optimizer.last_record
            assert record.action == ("step" if fault is None else "rollback")
            end = snapshot(model, optimizer), torch.get_rng_state()
            if record.action == "rollback":
                assert_same(end, ends[record.restored_step])
            ends[step] = end
            samples[step] = samples[step - 1] + 1 if fault is None else samples[record.restored_step]
            scheduler.step()


@repeatable
@given(names, st.integers(1, 6), st.integers(1, 4), st.sampled_from([fault for fault in FAULTS if fault != "spike"]))
def test_training_on_from_a_rollback_repeats_the_first_time_bit_for_bit(name, steps, every, fault):
    policy = SnapshotPolicy(every=every, keep=2, quarantine=0)
    model, optimizer = built(name, nan_action="rollback", snapshots=policy, budget=PATIENT)

    def continued(first):
        for step in range(first, steps + 1):
            optimizer.zero_grad()
            model(batch(step)).backward()
            optimizer.step()
        return snapshot(model, optimizer), torch.get_rng_state()

    with optimizer:
        once = continued(1)
        optimizer.zero_grad()
        FAULTS[fault](model, batch(77))
        optimizer.step()
        assert optimizer.last_record.action == "rollback"
        assert_same(continued(optimizer.last_record.restored_step + 1), once)


@repeatable
@given(names, sequences)
def test_a_guard_over_healthy_gradients_changes_nothing_at_all(name, sequence):
    model, optimizer = built(name, seed=1)
    twin = copy.deepcopy(model)
    bare = OPTIMIZERS[name](twin.parameters())
    with optimizer:
        for step in range(1, len(sequence) + 1):
            attempt(model, optimizer, step)
            attempt(twin, bare, step)
        assert optimizer.reports == []
    assert_same(snapshot(model, optimizer), snapshot(twin, bare))


@repeatable
@given(names, st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 5))
def test_bad_steps_in_a_row_never_exceed_the_budget(name, bad, limit):
    model, optimizer = built(name, budget=Budget(consecutive_skips=limit))
    row = 0
    with optimizer:
        for step, is_bad in enumerate(bad, 1):
            row = row + 1 if is_bad else 0
            try:
                attempt(model, optimizer, step, "nan element" if is_bad else None)
            except RuntimeError:
                assert row == limit
                return
            assert row < limit
