"""Checkpoints over ranks: a rollback to disk and a new run go on bit for bit, also on another number of ranks."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from stabilityguard import CheckpointPolicy, GuardedOptimizer
from tests.distributed import wrapped
from tests.distributed.ranks import run
from tests.distributed.test_rollback import MODES, local, plain, train


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def policy(directory, **options):
    return CheckpointPolicy(**{"directory": str(directory), "every": 3, "keep": 2, "quarantine": 1, **options})


# Going back to disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_training_on_from_a_checkpoint_is_bit_for_bit_what_it_was(mode, asynchronous, tmp_path):
    ranks, wrap, optimizer = MODES[mode]
    optimizer = momentum if optimizer is plain and asynchronous else optimizer
    options = {"nan_action": "rollback", "snapshots": False, "waits": asynchronous}

    def with_fault(rank):
        checkpoints = policy(tmp_path, asynchronous=asynchronous)
        batches = [*range(1, 9), 7, 8]
        return train(rank, ranks, wrap, optimizer, batches, bad={6}, checkpoints=checkpoints, **options)

    def without(rank):
        return train(rank, ranks, wrap, optimizer, [1, 2, 3, 7, 8, 7, 8])

    for (parameters, done), (expected, _) in zip(run(ranks, with_fault), run(ranks, without), strict=True):
        assert done == [("step", None)] * 5 + [("rollback", 3)] + [("step", None)] * 4
        assert all(map(torch.equal, parameters, expected))


# A new run -----------------------------------------------------------------------------------------------------------


def go_on(rank, ranks, wrap, optimizer, directory, steps, *, stop_at=None, resume=True, **options):
    """Trains up to a step, from the newest checkpoint on; the step it began at, the whole parameters, and the local."""
    model = wrap(wrapped.make())
    guarded = GuardedOptimizer(optimizer(model), model, verbose=False, checkpoints=policy(directory, **options))
    resumed = guarded.resume() if resume else None
    start = 0 if resumed is None else resumed.step
    for step in range(start + 1, steps + 1):
        guarded.zero_grad()
        model(wrapped.rows(step, rank, ranks)).backward()
        guarded.step()
    guarded.close()
    return start, [local(parameter).clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", MODES)
def test_a_new_run_goes_on_bit_for_bit(mode, tmp_path):
    ranks, wrap, optimizer = MODES[mode]

    def whole(rank):
        return go_on(rank, ranks, wrap, optimizer, tmp_path / "whole", 9)

    def first(rank):
        return go_on(rank, ranks, wrap, optimizer, tmp_path / "parts", 8)

    def second(rank):
        return go_on(rank, ranks, wrap, optimizer, tmp_path / "parts", 9)

    run(ranks, first)
    for (start, parameters), (_, expected) in zip(run(ranks, second), run(ranks, whole), strict=True):
        assert start == 6
        assert all(map(torch.equal, parameters, expected))


def full_state(model, base):
    """The unsharded parameters and moments by the names of the unwrapped model, in order."""
    state = get_model_state_dict(model)
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
