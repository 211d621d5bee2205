"""A new run on other ranks: what was saved in one wrapping is taken over in another, bit for bit."""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from stabilityguard import CheckpointPolicy, GuardedOptimizer
from tests.distributed import wrapped
from tests.distributed.ranks import run
from tests.distributed.test_rollback import plain, sharded_state
from tests.support import assert_same

STEP = 4
"""Of the checkpoint; the run that wrote it made one step more."""


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def decaying(model):
    """Two groups: matrices decay, the others do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def in_bfloat16(wrap):
    return lambda model: wrap(model.bfloat16())


WRAPPINGS = {
    "plain": lambda model: model,
    "ddp": wrapped.ddp(),
    "fsdp1": wrapped.fsdp1("FULL_SHARD", use_orig_params=True),
    "fsdp1, flat": wrapped.fsdp1("FULL_SHARD", use_orig_params=False),
    "fsdp2": wrapped.fsdp2(),
    "fsdp2, bfloat16": in_bfloat16(wrapped.fsdp2()),
    "ddp, bfloat16": in_bfloat16(wrapped.ddp()),
    "fsdp2, mixed": wrapped.fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "hsdp": wrapped.hsdp(),
    "hsdp1": wrapped.fsdp1("HYBRID_SHARD", use_orig_params=True),
    "tensor parallel": wrapped.tensor_parallel(),
    "fsdp2 x tensor parallel": wrapped.fsdp2_tensor_parallel(),
}


# What torch itself gathers -------------------------------------------------------------------------------------------


def whole(model, base):
    """A copy of the unsharded parameters, optimizer state and hyperparameters by name, as torch gathers them."""
    return copy.deepcopy(_whole(model, base))


def _whole(model, base):
    options = StateDictOptions(full_state_dict=True)
    parameters = get_model_state_dict(model, options=options)
    if hasattr(base, "consolidate_state_dict"):
        return parameters, *_of_zero_redundancy(model, base)
    told = get_optimizer_state_dict(model, base, options=options)
    groups = [{**group, "params": sorted(group["params"])} for group in told["param_groups"]]
    return parameters, told["state"], groups


def _of_zero_redundancy(model, base):
    names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {names[parameter]: entries for parameter, entries in base.optim.state.items()})
    groups = [{**group, "params": sorted(names[p] for p in group["params"])} for group in base.param_groups]
    return {name: entries for of_rank in of_ranks for name, entries in of_rank.items()}, groups


def step(rank, ranks, name, of_rank, number):
    model, _, guarded, scheduler = of_rank
    alike = {"tensor parallel": ranks, "fsdp2 x tensor parallel": 2}.get(name, 1)
    guarded.zero_grad()
    rows = wrapped.rows(number, rank // alike, ranks // alike)
    model(rows.to(next(model.parameters()).dtype)).backward()
    guarded.step()
    scheduler.step()


def set_up(name, optimizer, directory, *, is_new=True):
    """The model, its optimizer, the guard and the schedule; one that is not new has other weights and settings."""
    model = wrapped.make()
    if not is_new:
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    model = WRAPPINGS[name](model)
    base = optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(base, 0.7 if is_new else 0.5)
    policy = CheckpointPolicy(directory=str(directory), every=STEP, keep=2, quarantine=0)
    guarded = GuardedOptimizer(
        base, model, verbose=False, checkpoints=policy, track={"lr_scheduler": scheduler}, warmup_steps=2
    )
    return model, base, guarded, scheduler


def save(rank, ranks, name, optimizer, directory):
    """The whole state at the checkpoint, and what the guard made of the step after it."""
    model, base, guarded, scheduler = of_rank = set_up(name, optimizer, directory)
    for number in range(1, STEP + 1):
        step(rank, ranks, name, of_rank, number)
    state = whole(model, base), scheduler.state_dict()
    step(rank, ranks, name, of_rank, STEP + 1)
    guarded.close()
    return state, guarded.last_record.baselines


def take_over(rank, ranks, name, optimizer, directory):
    """The same of a new run, with the step that it goes on from, and what was done in the next."""
    model, base, guarded, scheduler = of_rank = set_up(name, optimizer, directory, is_new=False)
    kept = [(parameter, wrapped.local_part(parameter).data_ptr()) for parameter in model.parameters()]
    resumed = guarded.resume()
    assert all(
        one is other and wrapped.local_part(one).data_ptr() == pointer
        for one, (other, pointer) in zip(model.parameters(), kept, strict=True)
    )
    state = whole(model, base), scheduler.state_dict()
    step(rank, ranks, name, of_rank, STEP + 1)
    guarded.close()
    record = guarded.last_record
    return resumed.step, state, record.baselines, (record.step, record.action)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Gives the directory of a run in a wrapping, and what each rank told of it; every run is made once."""
    made = {}

    def of(name, ranks, optimizer, directory):
        key = name, ranks, optimizer
        if key not in made:
            path = tmp_path_factory.mktemp("saved")
            made[key] = path, run(ranks, lambda rank: save(rank, ranks, name, optimizer, path))
        path, told = made[key]
        shutil.copytree(path, directory, dirs_exist_ok=True)
        return told

    return of


def assert_taken_over(saved, directory, first, second):
    """``first`` and ``second`` are a wrapping, a number of ranks and an optimizer each."""
    ((name, ranks, optimizer), (other_name, other_ranks, other_optimizer)) = first, second
    expected, baselines = saved(name, ranks, optimizer, directory)[0]
    results = run(other_ranks, lambda rank: take_over(rank, other_ranks, other_name, other_optimizer, directory))
    for resumed_at, state, found, record in results:
        assert_same(state, expected)
        assert found == baselines
        assert resumed_at == STEP
        assert record == (STEP + 1, "step")


# From wrapping to wrapping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("fsdp2", 2), ("fsdp2", 4)),
        (("fsdp2", 4), ("fsdp2", 2)),
        (("fsdp2", 3), ("fsdp2", 2)),
        (("fsdp2", 2), ("plain", 1)),
        (("plain", 1), ("fsdp2", 3)),
        (("fsdp2", 2), ("ddp", 2)),
        (("ddp", 2), ("fsdp2", 3)),
        (("ddp", 2), ("plain", 1)),
        (("ddp", 2), ("ddp", 3)),
        (("fsdp1", 3), ("fsdp2", 2)),
        (("fsdp1", 3), ("fsdp1", 2)),
        (("fsdp1, flat", 3), ("fsdp2", 2)),
        (("fsdp1, flat", 3), ("fsdp1, flat", 2)),
        (("fsdp1, flat", 3), ("fsdp1", 3)),
        (("fsdp2", 3), ("fsdp1, flat", 2)),
        (("fsdp2", 3), ("fsdp1", 3)),
        (("hsdp1", 4), ("fsdp2", 2)),
        (("tensor parallel", 2), ("plain", 1)),
        (("tensor parallel", 2), ("fsdp2", 3)),
        (("fsdp2", 4), ("tensor parallel", 2)),
        (("hsdp", 4), ("fsdp2", 2)),
        (("fsdp2", 2), ("hsdp", 4)),
        (("fsdp2 x tensor parallel", 4), ("fsdp2", 2)),
        (("fsdp2 x tensor parallel", 4), ("tensor parallel", 2)),
        (("fsdp2", 4), ("fsdp2 x tensor parallel", 4)),
        (("fsdp2, bfloat16", 2), ("ddp, bfloat16", 3)),
        (("fsdp2, mixed", 2), ("fsdp2", 3)),
    ],
    ids=lambda end: f"{end[0]} on {end[1]}",
)
def test_every_tensor_is_taken_over_bit_for_bit(first, second, saved, tmp_path):
    assert_taken_over(saved, tmp_path, (*first, plain), (*second, plain))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, sharded_state), (3, sharded_state)),
        ((2, sharded_state), (2, plain)),
        ((2, sharded_state), (3, plain)),
        ((2, plain), (3, sharded_state)),
    ],
    ids=lambda end: f"{end[1].__name__} on {end[0]}",
)
def test_optimizer_state_that_is_shared_out_by_parameters_is_taken_over(first, second, saved, tmp_path):
    assert_taken_over(saved, tmp_path, ("ddp", *first), ("ddp", *second))


@pytest.mark.parametrize("optimizer", [momentum, decaying], ids=["sgd with momentum", "groups and amsgrad"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(("fsdp2", 3), ("ddp", 2)), (("tensor parallel", 2), ("fsdp2", 3))],
    ids=lambda end: f"{end[0]} on {end[1]}",
)
def test_other_optimizers_and_groups_are_taken_over(optimizer, first, second, saved, tmp_path):
    assert_taken_over(saved, tmp_path, (*first, optimizer), (*second, optimizer))
