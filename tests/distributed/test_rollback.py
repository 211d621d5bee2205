"""A rollback over ranks: all return to the same step, and training on from there is what it was the first time."""

import pytest
import torch

from stabilityguard import GuardedOptimizer, SnapshotPolicy
from tests.distributed import wrapped
from tests.distributed.ranks import run


def plain(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded_state(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 (warns when it is imported)

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


MODES = {
    "ddp": (2, wrapped.ddp(), plain),
    "ddp, bucket views": (2, wrapped.ddp(gradient_as_bucket_view=True), plain),
    "zero redundancy": (2, wrapped.ddp(), sharded_state),
    "fsdp1": (3, wrapped.fsdp1("FULL_SHARD", use_orig_params=True), plain),
    "fsdp1, flat": (3, wrapped.fsdp1("FULL_SHARD", use_orig_params=False), plain),
    "fsdp1, not split": (2, wrapped.fsdp1("NO_SHARD", use_orig_params=True), plain),
    "fsdp2": (3, wrapped.fsdp2(), plain),
    "hsdp": (4, wrapped.hsdp(), plain),
    "tensor parallel": (2, wrapped.tensor_parallel(), plain),
}


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


def train(rank, ranks, wrap, optimizer, batches, *, bad=(), clear_at=None, waits=False, **options):
    """Trains on ``batches``, of which rank 1's are spoiled at ``bad`` steps; the parameters and what was done.

    If it ``waits``, it does so after every step for the checkpoint that is being written.
    """
    model = wrap(wrapped.make())
    base = optimizer(model)
    guarded = GuardedOptimizer(base, model, verbose=False, **options)
    done = []
    for step, number in enumerate(batches, start=1):
        guarded.zero_grad()
        batch = wrapped.rows(number, rank, ranks)
        if step in bad and rank == 1:
            batch = batch * torch.nan
        model(batch).backward()
        if step == clear_at:
            base.state.clear()
        guarded.step()
        if waits:
            guarded._guard._checkpoints.archive.wait()
        done.append((guarded.last_record.action, guarded.last_record.restored_step))
    return [local(parameter).clone() for parameter in model.parameters()], done


@pytest.mark.parametrize("mode", MODES)
def test_training_on_from_a_rollback_is_bit_for_bit_what_it_was(mode):
    ranks, wrap, optimizer = MODES[mode]
    policy = SnapshotPolicy(every=3, keep=2, quarantine=1)

    def with_fault(rank):
        return train(
            rank, ranks, wrap, optimizer, [*range(1, 9), 7, 8], bad={6}, nan_action="rollback", snapshots=policy
        )

    def without(rank):
        return train(rank, ranks, wrap, optimizer, [1, 2, 3, 7, 8, 7, 8])

    for (parameters, done), (expected, _) in zip(run(ranks, with_fault), run(ranks, without), strict=True):
        assert done == [("step", None)] * 5 + [("rollback", 3)] + [("step", None)] * 4
        assert all(map(torch.equal, parameters, expected))


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_optimizer_state_that_was_lost_since_is_made_anew(mode):
    ranks, wrap, optimizer = MODES[mode]
    policy = SnapshotPolicy(every=3, keep=2, quarantine=1)

    def with_loss(rank):
        options = {"nan_action": "rollback", "snapshots": policy, "clear_at": 6}
        return train(rank, ranks, wrap, optimizer, range(1, 10), bad={6}, **options)

    def without(rank):
        return train(rank, ranks, wrap, optimizer, [1, 2, 3, 7, 8, 9])

    for (parameters, _), (expected, _) in zip(run(ranks, with_loss), run(ranks, without), strict=True):
        assert all(map(torch.equal, parameters, expected))


def test_ranks_roll_back_only_where_all_of_them_can():
    def job(rank):
        model = wrapped.ddp()(wrapped.make())
        guarded = GuardedOptimizer(plain(model), model, verbose=False, nan_action="rollback")
        if rank == 1:
            guarded._guard._recovery._ring = None
        model(wrapped.rows(1, rank, 2)).backward()
        guarded.step()
        guarded.zero_grad()
        model(wrapped.rows(2, rank, 2) * torch.nan).backward()
        guarded.step()
        return guarded.last_record.action

    assert run(2, job) == ["skip", "skip"]
