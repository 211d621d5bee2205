"""Rollbacks to checkpoints on disk, in one process."""

import os
import shutil

import pytest
import torch

from stabilityguard import Budget, CheckpointError, GradientSpikeError, SnapshotPolicy
from tests.recover.runs import Run, Tied, damage, draws, path_of, rolling, spoiled
from tests.recover.test_rollback import OPTIMIZERS
from tests.support import Growing, assert_same, snapshot


@pytest.mark.parametrize(("name", "asynchronous"), [*((name, False) for name in OPTIMIZERS), ("adam", True)])
def test_training_on_from_a_checkpoint_is_bit_for_bit_what_it_was(directory, name, asynchronous):
    run = rolling(directory, base=name, asynchronous=asynchronous, replay_data=True).to(6)
    (model, base), tracked, memory, drawn = run.state()
    assert spoiled(run) == 3
    run.to(10)
    again = run.state()
    assert_same((again[0], again[1], again[3]), ((model, base), tracked, drawn))
    assert_same(again[2]["memory"], memory["memory"])
    run.optimizer.close()


def test_the_data_go_on_unless_they_are_to_be_replayed(directory):
    run = rolling(directory).to(5)
    assert spoiled(run) == 3
    assert run.rows.at == 6


def test_using_a_checkpoint_twice_gives_the_same_both_times(directory):
    run = rolling(directory, every=3, replay_data=True).to(4)
    states = []
    for _ in range(2):
        assert spoiled(run) == 3
        states.append((snapshot(run.model, run.base), run.rows.at, draws()))
        run.step()
        run.base.state[run.model.head.weight]["exp_avg"].fill_(3.0)
    assert_same(*states)


def test_the_nearest_is_used_first_and_then_older_ones(directory):
    run = rolling(directory, every=2, keep=3, budget=Budget(rollbacks=5)).to(7)
    assert [spoiled(run) for _ in range(5)] == [6, 4, 2, 2, 2]
    with pytest.raises(GradientSpikeError, match="5 rollbacks"):
        run.step(spoil=torch.nan)


def test_parameters_keep_their_identity_in_a_rollback(directory):
    run = rolling(directory, make=Tied).to(4)
    parameters, moments = list(run.model.parameters()), [run.base.state[p]["exp_avg"] for p in run.model.parameters()]
    assert spoiled(run) == 3
    assert all(map(lambda a, b: a is b, run.model.parameters(), parameters))
    assert run.model.other.weight is run.model.body.weight
    assert all(run.base.state[p]["exp_avg"] is moment for p, moment in zip(parameters, moments, strict=True))


def test_a_snapshot_in_ram_comes_before_a_checkpoint_of_the_same_step(directory):
    run = rolling(directory, snapshots=SnapshotPolicy(every=3, keep=2, quarantine=1)).to(5)
    damage(directory, 3)
    assert spoiled(run) == 3


def test_a_newer_checkpoint_comes_before_an_older_snapshot(directory):
    run = rolling(directory, snapshots=SnapshotPolicy(every=50)).to(5)
    assert spoiled(run) == 3
    assert spoiled(run) == 0


def test_one_gone_back_to_in_ram_is_passed_over_on_disk(directory):
    snapshots = SnapshotPolicy(every=4, keep=1, quarantine=0)
    run = rolling(directory, every=2, keep=9, quarantine=0, snapshots=snapshots, budget=Budget(rollbacks=9)).to(5)
    assert spoiled(run) == 4
    run.to(11)
    assert [spoiled(run) for _ in range(4)] == [10, 8, 2, 2]


def test_the_optimizer_starts_anew_with_the_layer_that_tripped(directory):
    run = rolling(directory, moments="reset_trigger_layer").to(4)
    assert spoiled(run) == 3
    body, head = run.model.body.weight, run.model.head.weight
    assert body not in run.base.state
    assert float(run.base.state[head]["step"]) == 3


def test_a_buffer_that_has_grown_is_rolled_back(directory):
    run = rolling(directory, make=Growing).to(5)
    assert spoiled(run) == 3
    assert run.model.seen.numel() == 4


@pytest.mark.parametrize("how", ["a flipped bit", "a missing file", "no manifest", "no directory"])
def test_a_damaged_checkpoint_is_passed_over(directory, caplog, how):
    run = rolling(directory).to(7)
    newest = path_of(directory, 6)
    if how == "a flipped bit":
        damage(directory, 6)
    elif how == "a missing file":
        next(newest.glob("*.distcp")).unlink()
    elif how == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        shutil.rmtree(newest)
    assert spoiled(run) == 3
    assert "the checkpoint of step 6 cannot be used" in caplog.text
    run.to(12)
    assert run.optimizer.last_record.applied


def test_where_all_are_damaged_the_step_raises_with_nothing_changed_and_the_report_is_written(directory):
    run = rolling(directory).to(7)
    for step in (3, 6):
        damage(directory, step)
    before, at = snapshot(run.model, run.base), run.scheduler.state_dict()
    with pytest.raises(GradientSpikeError, match="none of the checkpoints can be read") as raised:
        run.step(spoil=torch.nan)
    (weights, state), (expected, expected_state) = snapshot(run.model, run.base), before
    assert_same(state, expected_state)
    changed = {name for name in weights if not torch.equal(weights[name], expected[name])}
    assert all(name.startswith("norm.") for name in changed)
    assert_same(run.scheduler.state_dict(), at)
    assert next(run.model.parameters()).grad.isnan().all()
    assert os.path.exists(raised.value.report_path)
    assert run.optimizer.reports[-1].record.action == "raise"


def test_a_new_run_passes_over_a_damaged_one(directory, caplog):
    Run(directory).to(8)
    damage(directory, 6)
    second = Run(directory, seed=99)
    assert second.resumed() == 3
    assert "the checkpoint of step 6 cannot be used" in caplog.text
    assert_same(second.to(8).state(), Run().to(8).state())
    third = Run(directory, seed=98)
    assert third.resumed() == 6
    assert_same(third.to(8).state(), Run().to(8).state())


def test_a_new_run_that_can_read_none_says_so_with_nothing_changed(directory):
    Run(directory).to(8)
    for step in (3, 6):
        damage(directory, step)
    second = Run(directory, seed=99)
    before = second.state()
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        second.optimizer.resume()
    assert_same(second.state(), before)
