"""Loss scaling over ranks: whichever rank overflows, all skip the step, and all scales stay alike."""

import pytest
import torch
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from stabilityguard import ConfigurationError, GuardedOptimizer
from tests.distributed import wrapped
from tests.distributed.ranks import run

SCALE = 1024.0
WRAPPERS = {
    "fsdp1": wrapped.fsdp1("FULL_SHARD", use_orig_params=True),
    "fsdp2": wrapped.fsdp2(),
    "ddp": wrapped.ddp(),
}


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def spoil(model, value):
    """Writes ``value`` into the first gradient that this rank holds any of."""
    first = next(p.grad for p in model.parameters() if p.grad is not None and local(p.grad).numel())
    local(first).view(-1)[0] = value


def multiply(model, factor):
    for parameter in model.parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def train(rank, wrapper, make_scaler, *, fused=False, unscale=False, known=True, steps=5, spoil=None, **options):
    """What each of the steps did, and the number of steps that the base optimizer has counted."""
    model = WRAPPERS[wrapper](wrapped.make())
    base = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, foreach=None if fused else False)
    scaler = make_scaler("cpu", init_scale=SCALE)
    guarded = GuardedOptimizer(base, model, verbose=False, scaler=scaler if known else None, **options)
    seen = []
    for step in range(1, steps + 1):
        guarded.zero_grad()
        scaler.scale(model(wrapped.rows(step, rank, 2))).backward()
        if spoil is not None:
            spoil(step, rank, model)
        if unscale:
            scaler.unscale_(guarded)
        before = [local(p).detach().clone() for p in model.parameters()]
        scaler.step(guarded)
        scaler.update()
        moved = not all(torch.equal(one, local(p)) for one, p in zip(before, model.parameters(), strict=True))
        record = guarded.last_record
        seen.append((moved, scaler.get_scale(), record.action, record.kind, record.bad_ranks, record.global_norm))
    return seen, sorted({float(local(entry["step"])) for entry in base.state.values()})


def infinite_on_rank_1(step, rank, model):
    if (step, rank) == (4, 1):
        spoil(model, torch.inf)


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled at step", "unscale_ before"])
@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("scaler", [GradScaler, ShardedGradScaler], ids=lambda scaler: scaler.__name__)
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(wrapper, scaler, fused, unscale):
    def job(rank):
        return train(rank, wrapper, scaler, fused=fused, unscale=unscale, spoil=infinite_on_rank_1)

    first, second = run(2, job)
    assert repr(first) == repr(second)
    steps, counted = first
    assert [moved for moved, *_ in steps] == [True, True, True, False, True]
    assert [scale for _, scale, *_ in steps] == [SCALE] * 3 + [SCALE / 2] * 2
    assert steps[3][2:5] == ("skip", "scaler_overflow", (1,))
    assert counted == [4.0]
    norm = sum(norm**2 for norm in wrapped.true_norms(1, 2).values()) ** 0.5
    assert steps[0][5] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_finite_spike_is_skipped_on_all_ranks_and_leaves_the_scale_alone(wrapper):
    def spike(step, rank, model):
        if step == 6 and (rank == 1 or wrapper == "ddp"):
            multiply(model, 1e4)

    def job(rank):
        return train(rank, wrapper, GradScaler, spoil=spike, steps=7, warmup_steps=3)

    first, second = run(2, job)
    assert repr(first) == repr(second)
    assert first[0][5][:4] == (False, SCALE, "skip", "spike")
    assert [moved for moved, *_ in first[0]] == [True] * 5 + [False, True]


def test_overflows_in_a_row_lower_all_scales_until_training_goes_on():
    def job(rank):
        def spoil_twice(step, rank, model):
            if (step, rank) in ((2, 0), (3, 1)):
                spoil(model, torch.nan)

        return train(rank, "fsdp2", GradScaler, spoil=spoil_twice)

    first, second = run(2, job)
    assert repr(first) == repr(second)
    assert [scale for _, scale, *_ in first[0]] == [SCALE, SCALE / 2, SCALE / 4, SCALE / 4, SCALE / 4]
    assert [step[4] for step in first[0]] == [(), (0,), (1,), (), ()]


def test_scalers_that_would_go_apart_unseen_are_refused_on_all_ranks():
    def job(rank):
        try:
            train(rank, "fsdp1", GradScaler, known=False, spoil=infinite_on_rank_1)
        except ConfigurationError as error:
            return str(error)

    first, second = run(2, job)
    assert first == second
    assert "the GradScaler of rank 1 saw an overflow that others did not" in first
    assert "pass scaler=" in first


def test_a_scaler_need_not_be_known_where_all_ranks_see_the_same():
    def overflow_everywhere(step, rank, model):
        if step == 4:
            spoil(model, torch.inf)

    def job(rank):
        return train(rank, "ddp", GradScaler, known=False, spoil=overflow_everywhere)

    first, second = run(2, job)
    assert repr(first) == repr(second)
    assert [scale for _, scale, *_ in first[0]] == [SCALE] * 3 + [SCALE / 2] * 2
    assert [moved for moved, *_ in first[0]] == [True, True, True, False, True]
