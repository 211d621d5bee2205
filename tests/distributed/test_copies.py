"""Copies and pickles of a guard over several ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from stabilityguard import ConfigurationError, GuardedOptimizer
from tests.distributed import wrapped
from tests.distributed.ranks import run


def set_up(**options):
    model = wrapped.make()
    return GuardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, verbose=False, **options)


def step(rank, guarded, number, *, bad=()):
    guarded.zero_grad()
    batch = wrapped.rows(number)
    guarded._parts["model"](batch * torch.nan if (number, rank) in bad else batch).backward()
    guarded.step()
    return guarded.last_record.step, guarded.last_record.action, guarded.last_record.bad_ranks


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda guarded: pickle.loads(pickle.dumps(guarded))], ids=["deepcopy", "pickle"]
)
def test_a_copy_decides_with_the_same_ranks_and_goes_on_counting(copied):
    def job(rank):
        guarded = set_up()
        told = [step(rank, guarded, number) for number in (1, 2, 3)]
        copy_of_it = copied(guarded)
        return told + [step(rank, copy_of_it, number, bad={(5, 1)}) for number in (4, 5, 6)]

    first, second = run(2, job)
    assert first == second
    assert first[3:] == [(4, "step", ()), (5, "skip", (1,)), (6, "step", ())]


def test_a_copy_that_is_never_stepped_speaks_to_nobody():
    def job(rank):
        guarded = set_up()
        step(rank, guarded, 1)
        if rank == 0:
            copy.deepcopy(guarded).state_dict()
        return step(rank, guarded, 2)

    assert run(2, job) == [(2, "step", ())] * 2


def test_a_copy_of_a_guard_over_a_part_of_the_ranks_is_refused_when_it_steps():
    def job(rank):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        guarded = set_up(process_group=halves[rank // 2])
        step(rank, guarded, 1)
        try:
            step(rank, copy.deepcopy(guarded), 2)
        except ConfigurationError as error:
            return str(error)

    for rank, message in enumerate(run(4, job)):
        assert f"a copy of a guard over ranks {'0, 1' if rank < 2 else '2, 3'}, and there are 4 ranks here" in message


def test_state_creation_by_torch_is_not_mistaken_for_a_rank_without_gradients_at_zero_rate():
    def job(rank):
        model = wrapped.make()
        guarded = GuardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.0), model, verbose=False)
        if rank == 0:
            model(wrapped.rows(1)).backward()
        guarded.step()
        return guarded.last_record.step

    assert run(2, job) == [1, 1]


def test_settings_that_differ_over_ranks_are_refused_on_all():
    def job(rank):
        try:
            set_up(spike_threshold=10.0 if rank != 1 else 5.0)
        except ConfigurationError as error:
            return str(error)

    told = run(3, job)
    assert len(set(told)) == 1
    assert "spike_threshold differs over ranks: 10.0 on ranks 0, 2; 5.0 on rank 1" in told[0]


def test_a_model_that_is_wrong_on_one_rank_is_refused_on_all():
    def job(rank):
        model = wrapped.make()
        other = wrapped.make() if rank == 1 else model
        try:
            GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), other)
        except ConfigurationError as error:
            return str(error)

    first, second = run(2, job)
    assert "none of the optimizer's" in second
    assert first == f"rank 1: {second}"
