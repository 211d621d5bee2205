"""What users do over several ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from stabilityguard import ConfigurationError, GuardedOptimizer
from tests.distributed import wrapped
from tests.distributed.ranks import run


def guard(base, model, **options):
    return GuardedOptimizer(base, model, verbose=False, **options)


def train(rank, model, guarded, steps, *, bad=(), columns=5):
    told = []
    for step in steps:
        guarded.zero_grad()
        batch = torch.randn(4, columns, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(batch).square().mean()
        (loss * torch.nan if step in bad else loss).backward()
        guarded.step()
        told.append((guarded.last_record.step, guarded.last_record.action))
    return told


def test_a_part_that_is_trained_may_be_smaller_than_the_ranks():
    def job(rank):
        model = nn.Sequential(nn.Linear(5, 64).requires_grad_(False), nn.Tanh(), nn.Linear(64, 1))
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        return train(rank, model, guard(torch.optim.AdamW(trained, lr=0.01), model), range(1, 5), bad={2})

    assert run(2, job) == [[(1, "step"), (2, "skip"), (3, "step"), (4, "step")]] * 2


def test_a_veto_before_any_backward_is_a_skip():
    model = wrapped.make()
    guarded = guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    guarded.veto("too early")
    guarded.step()
    assert guarded.last_record.action == "skip"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_the_state_may_be_read_on_one_rank_alone(kind):
    def job(rank):
        model = DistributedDataParallel(nn.Linear(5, 3))
        guarded = guard(kind(model.parameters(), lr=0.01), model)
        told = train(rank, model, guarded, [1], bad={1})
        if rank == 0:
            get_optimizer_state_dict(model, guarded)
        return told + train(rank, model, guarded, [2, 3])

    assert run(2, job) == [[(1, "skip"), (2, "step"), (3, "step")]] * 2


def test_a_state_may_be_loaded_after_one_rank_made_a_forward():
    def job(rank):
        model = DistributedDataParallel(nn.Linear(5, 3))
        guarded = guard(torch.optim.AdamW(model.parameters(), lr=0.01), model)
        train(rank, model, guarded, [1, 2])
        saved, memory = get_optimizer_state_dict(model, guarded), guarded.state_dict()["stabilityguard"]
        model = DistributedDataParallel(nn.Linear(5, 3))
        guarded = guard(torch.optim.AdamW(model.parameters(), lr=0.01), model)
        if rank == 0:
            model.module(torch.randn(2, 5))
        set_optimizer_state_dict(model, guarded, saved)
        guarded.load_state_dict({"stabilityguard": memory})
        return train(rank, model, guarded, [3, 4])

    assert run(2, job) == [[(3, "step"), (4, "step")]] * 2


def test_complex_parameters_are_measured():
    def job(rank):
        model = DistributedDataParallel(nn.Linear(5, 3, dtype=torch.complex64))
        guarded = guard(torch.optim.SGD(model.parameters(), lr=0.01), model)
        batch = torch.randn(4, 5, dtype=torch.complex64)
        (model(batch).abs().mean() * (torch.nan if rank == 1 else 1.0)).backward()
        guarded.step()
        return guarded.last_record.action, guarded.last_record.bad_ranks

    assert run(2, job) == [("skip", (1,))] * 2


def test_sums_made_in_hooks_and_divided_afterwards_are_taken_as_means():
    def job(rank):
        model = wrapped.make()
        guarded = guard(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        model(wrapped.rows(1, rank, 3)).backward()
        for parameter in model.parameters():
            parameter.grad /= 3
        guarded.step()
        return guarded.last_record.layer_norms

    expected = wrapped.true_norms(1, 3)
    for norms in run(3, job):
        assert norms == pytest.approx(expected, rel=1e-5)


def test_guards_of_one_wrapper_are_followed_in_the_order_in_which_they_step():
    def job(rank):
        model = DistributedDataParallel(wrapped.make())
        one, *others = model.parameters()
        first = guard(torch.optim.SGD([one], lr=0.01), model)
        second = guard(torch.optim.SGD(others, lr=0.01), model)
        with model.join():
            for step in range((3, 6)[rank]):
                model(wrapped.rows(step, rank, 2)).backward()
                second.step()
                first.step()
                first.zero_grad()
                second.zero_grad()
        return first.last_record.step, second.last_record.step

    assert run(2, job) == [(6, 6)] * 2


def test_a_mesh_is_no_process_group():
    def job(rank):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        model = nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match="get_group"):
            guard(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group=mesh)
        return True

    assert run(2, job) == [True, True]
