"""Faults over ranks that users of training loops reported, each with what is to happen instead."""

import copy
import io
import logging
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stabilityguard import GradientSpikeError, GuardedOptimizer
from stabilityguard.distributed import peers
from tests.distributed.ranks import run
from tests.distributed.wrapped import Odd, ddp, fsdp2, local_part, make, rows
from tests.support import assert_same


def small():
    return make(lambda: Odd(depth=1))


def guarded_model(wrap, *, lr=1e-3, fused=False, **options):
    model = wrap(small())
    base = torch.optim.AdamW(model.parameters(), lr=lr, fused=fused)
    return model, GuardedOptimizer(base, model, verbose=False, warmup_steps=3, **options)


def train(model, guarded, step, *, factor=1.0):
    guarded.zero_grad()
    (model(rows(step, dist.get_rank(), dist.get_world_size())) * factor).backward()
    guarded.step()
    return guarded.last_record


def parameters_of(model):
    return [local_part(p).detach().clone() for p in model.parameters()]


def updates_of(guarded):
    return {int(state["step"]) for state in guarded.base_optimizer.state.values()}


def assert_alike(told):
    assert len(set(map(repr, told))) == 1, told


# One rank acts alone -------------------------------------------------------------------------------------------------


def _bad_batch_on_one_rank(rank):
    start = time.monotonic()
    model, guarded = guarded_model(ddp())
    actions = [train(model, guarded, i, factor=math.nan if (i, rank) == (3, 1) else 1.0).action for i in range(1, 6)]
    return actions, updates_of(guarded), parameters_of(model), time.monotonic() - start


def test_a_bad_batch_on_one_rank_freezes_nobody():
    told = run(2, _bad_batch_on_one_rank)
    assert [of_rank[0] for of_rank in told] == [["step", "step", "skip", "step", "step"]] * 2
    assert [of_rank[1] for of_rank in told] == [{4}, {4}]
    assert_same(told[0][2], told[1][2])
    assert max(of_rank[3] for of_rank in told) < 10


def _no_backward_on_one_rank(rank):
    model, guarded = guarded_model(ddp())
    train(model, guarded, 1)
    before, said = parameters_of(model), io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("stabilityguard").addHandler(handler)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        train(model, guarded, 2) if rank == 0 else guarded.step()
    assert_same(parameters_of(model), before)
    return said.getvalue(), guarded.last_record.step, time.monotonic() - start


def test_a_rank_that_leaves_out_its_backward_gets_an_error_and_no_other_ranks_gradients():
    told = run(2, _no_backward_on_one_rank, timeout=3)
    assert "rank 1 lost its peers while it was agreeing on step 2 with ranks 0, 1" in told[1][0]
    assert [of_rank[1] for of_rank in told] == [1, 1]
    assert max(of_rank[2] for of_rank in told) < 10


def _crossed(rank):
    model, guarded = guarded_model(ddp())
    guarded.zero_grad()
    model(rows(1, rank, 2)).backward()
    told = torch.full((5,), rank + 1.0)
    if rank == 0:
        under_way = dist.all_reduce(told, async_op=True)
        guarded.step()
        under_way.wait()
    else:
        guarded.step()
        dist.all_reduce(told)
    return told.tolist(), guarded.last_record.action


def test_what_ranks_say_in_another_order_than_the_guard_is_never_paired_with_its_words():
    assert run(2, _crossed, timeout=10) == [([3.0] * 5, "step")] * 2


def _saves_every_third_step(rank):
    model, guarded = guarded_model(ddp())
    saved = []
    for step in range(1, 10):
        record = train(model, guarded, step, factor=math.nan if step in (2, 3) and rank == step % 2 else 1.0)
        if record.step % 3 == 0:
            total = sum(p.sum() for p in parameters_of(model))
            mine = float(total)
            dist.all_reduce(total)
            saved.append((record.step, record.action, float(total) == 2 * mine))
    return saved, updates_of(guarded)


def test_what_is_done_every_few_steps_is_done_by_all_ranks_at_once_whatever_was_skipped():
    told = run(2, _saves_every_third_step)
    assert_alike(told)
    assert told[0] == ([(3, "skip", True), (6, "step", True), (9, "step", True)], {7})


def _shared_scale_of_healthy_norms(rank):
    model, guarded = guarded_model(ddp())
    records = [train(model, guarded, step, factor=1e6) for step in range(1, 8)]
    return [record.action for record in records], records[-1].global_norm > 890


def test_large_norms_that_are_usual_are_healthy_on_any_number_of_ranks():
    assert run(3, _shared_scale_of_healthy_norms) == [(["step"] * 7, True)] * 3


def test_ranks_agree_where_their_group_takes_tensors():
    group = SimpleNamespace(_device_types=[torch.device("meta")])
    on_host, on_device = torch.zeros(1), torch.zeros(1, device="meta")
    assert peers._device_for(group, [on_host, on_device]) == torch.device("meta")


# Loss scaling --------------------------------------------------------------------------------------------------------


def _scaled(rank, fused, bad_steps, steps, options, unscale=False):
    scaler = GradScaler("cpu", init_scale=1024.0)
    model, guarded = guarded_model(ddp(), fused=fused, scaler=scaler, **options)
    told = []
    for step in range(1, steps + 1):
        guarded.zero_grad()
        loss = model(rows(step, rank, 2)) * (math.inf if step in bad_steps and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(guarded)
        before = parameters_of(model)
        try:
            scaler.step(guarded)
        except GradientSpikeError as error:
            return told, (error.step, error.ranks), scaler.get_scale()
        scaler.update()
        moved = any(not torch.equal(p, q) for p, q in zip(before, parameters_of(model), strict=True))
        told.append((guarded.last_record.action, moved, scaler.get_scale(), guarded.last_record.global_norm))
    return told, parameters_of(model), updates_of(guarded)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_under_a_scaler_is_one_skip_that_moves_nothing_on_any_rank(fused):
    told = run(2, _scaled, fused, (3,), 5, {})
    assert_alike(told)
    assert [action for action, *_ in told[0][0]] == ["step", "step", "skip", "step", "step"]
    assert [moved for _, moved, *_ in told[0][0]] == [True, True, False, True, True]
    assert [scale for _, _, scale, _ in told[0][0]] == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert told[0][2] == {4}


@pytest.mark.parametrize("fused", [False, True])
def test_norms_over_ranks_are_those_of_unscaled_gradients(fused):
    scaled = run(2, _scaled, fused, (), 1, {})[0][0][0]
    model = small()
    model(rows(1, parts=2)).backward()
    assert scaled[3] == pytest.approx(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))


def test_a_skip_after_unscaling_leaves_the_scaler_ready_for_the_next_batch_on_all_ranks():
    told = run(2, _scaled, False, (2,), 4, {}, True)
    assert_alike(told)
    assert [action for action, *_ in told[0][0]] == ["step", "skip", "step", "step"]


def test_overflows_without_end_stop_all_ranks_at_the_same_step():
    told = run(2, _scaled, False, range(3, 200), 200, {})
    assert_alike(told)
    steps, (step, ranks), scale = told[0]
    assert step == 27
    assert ranks == (1,)
    assert len(steps) == 26
    assert scale > 0


# Checkpoints of shards -----------------------------------------------------------------------------------------------


def _moments(guarded):
    """This rank's part of the optimizer state."""
    states = guarded.base_optimizer.state.values()
    return copy.deepcopy([{key: local_part(value) for key, value in state.items()} for state in states])


def _checkpoint(rank, directory):
    model, guarded = guarded_model(fsdp2())
    for step in range(1, 4):
        train(model, guarded, step)
    parameters, moments = parameters_of(model), _moments(guarded)
    of_model, of_optimizer = get_state_dict(model, guarded)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory)
    expected = [train(model, guarded, step).action for step in (4, 5)], parameters_of(model)

    model, guarded = guarded_model(fsdp2())
    of_model, of_optimizer = copy.deepcopy(get_state_dict(model, guarded))  # else loading writes to the live tensors
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory)
    set_state_dict(model, guarded, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert guarded.last_record is None
    assert_same(parameters_of(model), parameters)
    assert_same(_moments(guarded), moments)
    assert_same(([train(model, guarded, step).action for step in (4, 5)], parameters_of(model)), expected)
    return [state["exp_avg"].tolist() for state in moments], expected[0]


def test_every_rank_gets_its_own_shard_of_the_optimizer_state_back_from_a_checkpoint(tmp_path):
    told = run(2, _checkpoint, str(tmp_path / "checkpoint"))
    assert told[0][0] != told[1][0]
    assert [of_rank[1] for of_rank in told] == [["step", "step"]] * 2
