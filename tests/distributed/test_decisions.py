"""What one rank sees, all ranks act upon: the same action, told in the same words, at the same step."""

import contextlib
import math
import os
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stabilityguard import Budget, GradientSpikeError, GuardedOptimizer, SnapshotPolicy
from tests.distributed.decisions import (
    LAYERS,
    Small,
    Trainer,
    assert_alike,
    fill,
    fill_flat,
    multiply,
    on_rank,
    words,
)
from tests.distributed.ranks import run
from tests.distributed.wrapped import (
    ddp,
    fsdp1,
    fsdp2,
    hsdp,
    make,
    rows,
)
from tests.support import assert_same

# Skipping together ---------------------------------------------------------------------------------------------------


def _nan_in_one_shard(rank, wrap, bad_rank, edit):
    trainer = Trainer(wrap)
    trainer.train(2)
    before = trainer.state()
    record = trainer.step(edit=on_rank(bad_rank, edit))
    assert_same(trainer.state(), before)
    trainer.step()
    return words(record), record.action, record.kind, record.trigger_layer, record.bad_ranks, trainer.record.action


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_nan_in_one_ranks_shard_makes_every_rank_skip(bad_rank):
    told = run(2, _nan_in_one_shard, fsdp2(), bad_rank, fill("blocks.0.up", math.nan))
    assert_alike(told)
    assert told[0][1:] == ("skip", "nan", "blocks.0.up", (bad_rank,), "step")


def test_nan_in_one_replica_of_one_shard_makes_every_rank_skip():
    told = run(4, _nan_in_one_shard, hsdp(), 3, fill("blocks.0.up", math.nan))
    assert_alike(told)
    assert told[0][1:] == ("skip", "nan", "blocks.0.up", (3,), "step")


def test_nan_in_one_ranks_part_of_a_flat_parameter_makes_every_rank_skip():
    told = run(2, _nan_in_one_shard, fsdp1("FULL_SHARD", use_orig_params=False), 1, fill_flat(math.nan))
    assert_alike(told)
    _, action, kind, layer, bad_ranks, next_action = told[0]
    assert (action, kind, bad_ranks, next_action) == ("skip", "nan", (1,), "step")
    assert layer in LAYERS


def _only_one_loss_is_nan(rank, wrap):
    trainer = Trainer(wrap)
    trainer.train(2)
    before = trainer.state()
    record = trainer.step(**({"loss": math.nan} if rank == 1 else {}))
    assert_same(trainer.state(), before)
    return words(record), record.action, record.kind, record.trigger_layer, record.bad_ranks


@pytest.mark.parametrize("wrap", [ddp(), fsdp2()], ids=["ddp", "fsdp2"])
def test_a_nan_loss_on_any_rank_makes_every_rank_skip(wrap):
    told = run(2, _only_one_loss_is_nan, wrap)
    assert_alike(told)
    assert told[0][1:] == ("skip", "nan", None, (1,))


def _veto(rank):
    trainer = Trainer(ddp())
    trainer.train(2)
    before = trainer.state()
    if rank == 1:
        trainer.guarded.veto("the batch looks odd")
    record = trainer.step()
    assert_same(trainer.state(), before)
    after = trainer.step()
    return words(record), record.action, record.kind, record.reason, record.bad_ranks, after.action


def test_a_veto_of_one_rank_skips_on_all_and_says_whose_it_was_and_why():
    told = run(2, _veto)
    assert_alike(told)
    assert told[0][1:] == ("skip", "veto", "veto of rank 1: the batch looks odd", (1,), "step")


def _vetoes_of_several(rank):
    trainer = Trainer(ddp())
    if rank != 1:
        trainer.guarded.veto(f"not mine, says {rank}")
    record = trainer.step()
    return record.reason, record.bad_ranks


def test_vetoes_of_several_ranks_are_all_told():
    reason = "veto of rank 0: not mine, says 0; veto of rank 2: not mine, says 2"
    assert run(3, _vetoes_of_several) == [(reason, (0, 2))] * 3


def _vetoes_in_a_row(rank):
    trainer = Trainer(ddp(), budget=Budget(consecutive_skips=2))
    actions = []
    for _ in range(5):
        if rank == 1:
            trainer.guarded.veto("again")
        actions.append(trainer.step().action)
    return actions, trainer.step().action


def test_vetoes_count_towards_no_budget_on_any_rank():
    assert run(2, _vetoes_in_a_row) == [(["skip"] * 5, "step")] * 2


def _no_data_on_one_rank(rank, value):
    trainer = Trainer()  # replicas without a wrapper: nothing else speaks between the ranks
    if rank == 0:
        trainer.model(rows(1)).backward()
        if value is not None:
            fill("head", value)(trainer.model)
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients)) if gradients else None
    before = trainer.state()[0]
    trainer.guarded.step()
    unchanged = all(torch.equal(p, q) for p, q in zip(trainer.state()[0], before, strict=True))
    absent = all(p.grad is None for p in trainer.model.parameters())
    return words(trainer.record), trainer.record, norm, unchanged, absent


def test_a_rank_that_calls_step_without_gradients_agrees_with_the_others():
    told = run(2, _no_data_on_one_rank, None)
    assert_alike([of_rank[0] for of_rank in told])
    (_, record, norm, unchanged, _), (_, _, _, *other) = told
    assert record.action == "step"
    assert record.rank_losses[1] is None
    assert record.loss == record.rank_losses[0]
    assert record.global_norm == pytest.approx(norm)
    assert not unchanged
    assert other == [True, True]


def test_a_rank_without_gradients_skips_with_the_others_and_still_has_none():
    told = run(2, _no_data_on_one_rank, math.inf)
    assert_alike([of_rank[0] for of_rank in told])
    assert (told[0][1].action, told[0][1].bad_ranks) == ("skip", (0,))
    assert [of_rank[3:] for of_rank in told] == [(True, False), (True, True)]


class Logits(Small):
    """Returns no loss, but what one is computed from."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain) * self.tri.sum()


def _loss_on_one_rank(rank):
    model = DistributedDataParallel(make(Logits))
    guarded = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, verbose=False)
    loss = model(rows(1, rank, 2)).square().mean()
    loss.backward()
    guarded.step(**({"loss": loss} if rank == 0 else {}))
    record = guarded.last_record
    return words(record), record.action, record.loss == record.rank_losses[0], record.rank_losses[1]


def test_a_rank_without_a_loss_leaves_the_mean_to_the_others():
    told = run(2, _loss_on_one_rank)
    assert_alike(told)
    assert told[0][1:] == ("step", True, None)


# Spikes --------------------------------------------------------------------------------------------------------------


def _large_loss_on_one_rank(rank, wrap, threshold):
    trainer = Trainer(wrap, optimizer=torch.optim.SGD, lr=1e-4, spike_threshold=threshold)
    trainer.train(8)
    record = trainer.step(loss_factor=14.0 if rank == 1 else 1.0)
    trainer.train(3)
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in trainer.model.parameters()]
    memory = trainer.guarded.state_dict()["stabilityguard"]
    told = words(record), words(trainer.record), [p.tolist() for p in parameters], str(memory)
    return told, record.action, record.kind, record.bad_ranks


@pytest.mark.parametrize("wrap", [ddp(), fsdp2()], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize(("threshold", "action"), [(3.0, "skip"), (100.0, "step")])
def test_a_loss_fourteen_times_as_large_on_one_rank_is_skipped_by_all_or_by_none(wrap, threshold, action):
    told = run(2, _large_loss_on_one_rank, wrap, threshold)
    assert_alike(told)
    kind, bad_ranks = ("spike", (1,)) if action == "skip" else (None, ())
    assert told[0][1:] == (action, kind, bad_ranks)


def _large_shard(rank, factor):
    trainer = Trainer(fsdp2(), optimizer=torch.optim.SGD, lr=1e-4, spike_threshold=5.0)
    trainer.train(8)
    trainer.step(edit=on_rank(1, multiply(factor)))
    record = trainer.record
    trainer.train(4)
    return words(record), words(trainer.record), str(trainer.guarded.state_dict()["stabilityguard"]), record.action


def test_one_ranks_share_above_the_threshold_never_splits_the_ranks():
    actions = []
    for factor in (1.0, 10.0, 1000.0):
        told = run(2, _large_shard, factor)
        assert_alike(told)
        actions.append(told[0][3])
    assert actions[0] == "step"
    assert actions[-1] == "skip"


# Raising -------------------------------------------------------------------------------------------------------------


def _raises(rank, wrap, log_dir):
    trainer = Trainer(wrap, nan_action="raise", log_dir=log_dir)
    trainer.train(2)
    before = trainer.state()
    start = time.monotonic()
    with pytest.raises(GradientSpikeError) as caught:
        trainer.step(edit=on_rank(1, fill("blocks.0.norm", math.nan)))
    assert_same(trainer.state(), before)
    error = caught.value
    return type(error), str(error), error.layer, error.ranks, error.report_path, time.monotonic() - start


@pytest.mark.parametrize("wrap", [ddp(), fsdp2()], ids=["ddp", "fsdp2"])
def test_all_ranks_raise_the_same_error_that_names_the_rank_and_the_layer(wrap, tmp_path):
    told = run(2, _raises, wrap, str(tmp_path))
    assert {of_rank[0] for of_rank in told} == {GradientSpikeError}
    messages = [of_rank[1] for of_rank in told]
    assert len({message.partition("; report: ")[0] for message in messages}) == 1
    assert all("rank 1" in message and "blocks.0.norm" in message for message in messages)
    assert [of_rank[2:4] for of_rank in told] == [("blocks.0.norm", (1,))] * 2
    assert os.path.exists(told[0][4])
    assert told[1][4] is None
    assert messages[0].endswith(f"report: {told[0][4]}")
    assert messages[1].endswith("report: written by the first rank")
    assert max(of_rank[5] for of_rank in told) < 5


# The ladder ----------------------------------------------------------------------------------------------------------


def _skips_in_a_row(rank):
    trainer = Trainer(ddp(), budget=Budget(consecutive_skips=3))
    told = []
    for bad_rank in (0, 1, None, 1, 0, 1):
        edit = on_rank(bad_rank, fill("head", math.inf)) if bad_rank is not None else None
        try:
            record = trainer.step(edit=edit)
        except GradientSpikeError:
            record = trainer.record
        told.append((record.action, record.reason, record.bad_ranks))
    return told


def test_trips_of_different_ranks_climb_one_ladder():
    told = run(2, _skips_in_a_row)
    assert_alike(told)
    assert [action for action, _, _ in told[0]] == ["skip", "skip", "step", "skip", "skip", "raise"]
    assert [reason[:9] for _, reason, _ in told[0] if reason] == ["trip 1 of", "trip 2 of"] * 2 + ["trip 3 of"]
    assert [ranks for _, _, ranks in told[0]] == [(0,), (1,), (), (1,), (0,), (1,)]


def _lasting_level(rank):
    trainer = Trainer(ddp(), optimizer=torch.optim.SGD, lr=1e-6, budget=Budget(consecutive_skips=3))
    trainer.train(6)
    records = [trainer.step(loss_factor=1e4) for _ in range(4)]
    return [words(record) for record in records], [record.action for record in records]


def test_a_level_that_lasts_is_accepted_by_all_ranks_together():
    told = run(2, _lasting_level)
    assert_alike(told)
    assert told[0][1] == ["skip", "skip", "step", "step"]


def _rollbacks(rank):
    policy, budget = SnapshotPolicy(every=2, keep=2, quarantine=0), Budget(rollbacks=2)
    trainer = Trainer(ddp(), nan_action="rollback", snapshots=policy, budget=budget)
    trainer.train(4)
    states = {4: trainer.state()}
    trainer.train(1)
    record = trainer.step(edit=on_rank(1, fill("head", math.nan)))
    assert_same(trainer.state(), states[record.restored_step])
    digest = [p.tolist() for p in trainer.model.parameters()]
    trainer.train(2)
    second = trainer.step(edit=on_rank(0, fill("inp", math.nan)))
    with pytest.raises(GradientSpikeError) as caught:
        trainer.step(edit=on_rank(1, fill("inp", math.nan)))
    message = str(caught.value).partition("; report")[0]
    return words(record), words(second), digest, (record.action, record.restored_step, second.action, message)


def test_all_ranks_roll_back_to_the_same_step_and_give_up_together():
    told = run(2, _rollbacks)
    assert_alike(told)
    action, restored, second, message = told[0][3]
    assert (action, restored, second) == ("rollback", 4, "rollback")
    assert "2 rollbacks within 1000 steps are all that the budget allows" in message
    assert "rank 1" in message


# Accumulation --------------------------------------------------------------------------------------------------------


def _windows(rank, windows, spoilt):
    """Trains on windows of three micro-batches, the last of which reduces; rank 0 spoils the first of some."""
    trainer = Trainer(ddp())
    actions = []
    for window in windows:
        for i in range(3):
            batch = rows(3 * window + i, rank, 2)
            with trainer.model.no_sync() if i < 2 else contextlib.nullcontext():
                if window in spoilt and i == 0 and rank == 0:
                    batch = batch * math.nan
                (trainer.model(batch) / 3).backward()
        trainer.guarded.step()
        actions.append((trainer.record.action, trainer.record.bad_ranks))
        if window in spoilt:
            assert not any(p.grad.any() for p in trainer.model.parameters())
        else:
            trainer.guarded.zero_grad()
    return actions, trainer.state()


def test_nan_in_one_ranks_unsynchronized_micro_batch_costs_one_window_and_no_more():
    told = run(2, _windows, [0, 1, 2, 3], [1])
    assert [of_rank[0] for of_rank in told] == [[("step", ()), ("skip", (0,)), ("step", ()), ("step", ())]] * 2
    clean = run(2, _windows, [0, 2, 3], [])
    for (_, state), (_, expected) in zip(told, clean, strict=True):
        assert_same(state, expected)
    assert_same(told[0][1], told[1][1])
