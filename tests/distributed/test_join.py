"""Uneven data: a rank that has run out of it goes on deciding with the others."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from stabilityguard import GuardedOptimizer, SnapshotPolicy
from tests.distributed import wrapped
from tests.distributed.ranks import run
from tests.support import NormNet

BATCHES = {0: 7, 1: 4}
"""Of each rank."""


def epoch(rank, model, guarded, *, start=0, bad=()):
    with model.join():
        for step in range(1, BATCHES[rank] + 1):
            guarded.zero_grad()
            batch = wrapped.rows(start + step, rank, 2)
            model(batch * torch.nan if (start + step, rank) in bad else batch).backward()
            guarded.step()


def set_up(kind=torch.optim.AdamW, **options):
    model = DistributedDataParallel(wrapped.make())
    base = kind(model.parameters(), lr=1e-2)
    return model, GuardedOptimizer(base, model, verbose=False, **options)


def told(guarded):
    records = guarded._guard.chronicle.records
    return [(r.step, r.action, r.kind, r.bad_ranks, r.rank_losses, r.layers.norms.tolist()) for r in records]


def parameters(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_rank_without_data_votes_in_every_step_of_the_others():
    def job(rank):
        model, guarded = set_up()
        epoch(rank, model, guarded, bad={(6, 0)})
        return told(guarded), parameters(model)

    (first, ours), (second, theirs) = run(2, job)
    assert repr(first) == repr(second)
    assert [action for _, action, *_ in first] == ["step"] * 5 + ["skip", "step"]
    assert first[5][3] == (0,)
    assert [loss[1] is None for _, _, _, _, loss, _ in first] == [False] * 4 + [True] * 3
    assert all(map(torch.equal, ours, theirs))


def test_norms_are_those_of_the_ranks_that_still_have_data():
    def job(rank):
        model, guarded = set_up()
        seen = []

        def note(optimizer, *_):
            norms = wrapped.norms_by_layer(model.module)
            seen.append([norms[name] for name in optimizer_layers(guarded)])

        guarded.base_optimizer.register_step_pre_hook(note)
        epoch(rank, model, guarded)
        return seen, [norms for *_, norms in told(guarded)]

    (seen, norms), _ = run(2, job)
    assert len(seen) == len(norms) == 7
    for one, other in zip(seen, norms, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def optimizer_layers(guarded):
    return guarded._guard.window.table.names


def test_training_goes_on_together_after_the_join_and_rolls_back_to_where_it_ended():
    policy = SnapshotPolicy(every=3, keep=2, quarantine=1)

    def job(rank):
        model, guarded = set_up(nan_action="rollback", snapshots=policy)
        epoch(rank, model, guarded)
        after = parameters(model)
        model(wrapped.rows(50, rank, 2) * torch.nan).backward()
        guarded.step()
        record = guarded.last_record
        restored = all(map(torch.equal, after, parameters(model)))
        epoch(rank, model, guarded, start=100)
        return record.action, record.restored_step, restored, parameters(model), repr(told(guarded))

    first, second = run(2, job)
    assert first[:3] == second[:3] == ("rollback", 7, True)
    assert all(map(torch.equal, first[3], second[3]))
    assert first[4] == second[4]


def test_a_guard_that_is_closed_leaves_the_wrapper_as_it_was():
    def job(rank):
        model, guarded = set_up()
        guarded.close()
        epoch(rank, model, guarded)
        return "join_hook" in vars(model), len(told(guarded))

    assert run(2, job) == [(False, 0)] * 2


def test_steps_of_several_backward_passes_are_followed():
    def job(rank, quiet):
        model, guarded = set_up()
        with model.join():
            for step in range(1, BATCHES[rank] + 1):
                guarded.zero_grad()
                with model.no_sync() if quiet else contextlib.nullcontext():
                    model(wrapped.rows(step, rank, 2)).backward()
                model(wrapped.rows(100 + step, rank, 2)).backward()
                guarded.step()
        return repr(told(guarded)), len(told(guarded))

    for quiet in (True, False):
        first, second = run(2, job, quiet)
        assert first == second
        assert first[1] == 7


def test_replicas_are_not_compared_while_a_rank_has_no_data():
    def job(rank):
        model, guarded = set_up(torch.optim.SGD, drift_check_every=1)  # its state has nothing to drift
        epoch(rank, model, guarded)
        epoch(rank, model, guarded, start=50)
        return len(told(guarded))

    assert run(2, job) == [14, 14]


def test_wrappers_with_a_guard_can_be_copied_and_have_two():
    def job(rank):
        model, guarded = set_up()
        copied = copy.deepcopy(model)
        other = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, verbose=False)
        pickle.dumps(model)
        with model.join():
            for step in range(1, BATCHES[rank] + 1):
                guarded.zero_grad()
                model(wrapped.rows(step, rank, 2)).backward()
                guarded.step()
                other.step()
        other.close()
        epoch(rank, model, guarded, start=50)
        guarded.close()
        with copied.join():
            for step in range(BATCHES[rank]):
                copied(wrapped.rows(step, rank, 2)).backward()
        return len(told(guarded)), len(told(other))

    assert run(2, job) == [(14, 7)] * 2


def test_statistics_of_the_first_step_after_a_join_are_put_back_if_it_is_bad():
    def job(rank):
        model = DistributedDataParallel(NormNet())
        base = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guarded = GuardedOptimizer(base, model, verbose=False)
        with model.join():
            for _ in range(1, BATCHES[rank] + 1):
                guarded.zero_grad()
                model(torch.randn(6, 4)).backward()
                guarded.step()
        model(torch.full((6, 4), torch.nan)).backward()
        guarded.step()
        return guarded.last_record.action, bool(model.module.norm.running_mean.isfinite().all())

    assert run(2, job) == [("skip", True)] * 2


def test_a_rank_without_data_is_not_blamed_for_the_others():
    def job(rank):
        model = DistributedDataParallel(wrapped.make())
        guarded = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, verbose=False)
        with model.join():
            for step in range(1, (6, 6, 3)[rank] + 1):
                guarded.zero_grad()
                model(wrapped.rows(step, rank, 3)).backward()
                if step == 5 and rank == 0:
                    model.module.head.weight.grad[0, 0] = torch.nan
                guarded.step()
        return [record[3] for record in told(guarded)]

    assert run(3, job) == [[(), (), (), (), (0,), ()]] * 3
