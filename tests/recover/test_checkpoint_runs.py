"""Checkpoints of guarded runs in one process: what lies in the directory, and states that a user puts in place."""

import contextlib
import copy
import os
import pickle
import signal

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from stabilityguard import CheckpointError, ConfigurationError
from stabilityguard.cli import main
from stabilityguard.recover.manifest import find
from tests.recover.runs import (
    ALONE,
    Rows,
    Run,
    Tied,
    damage,
    finish_writing,
    loaded_by_torch,
    lying_in,
    path_of,
    spoiled,
)
from tests.support import Net, NormNet, assert_same, batch, snapshot

# What lies in the directory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("quarantine", "expected"),
    [
        (0, {3: {}, 4: {3: "clean"}, 7: {3: "clean", 6: "clean"}, 10: {6: "clean", 9: "clean"}}),
        (1, {3: {}, 4: {3: "clean"}, 7: {3: "clean", 6: "clean"}, 10: {6: "clean", 9: "clean"}}),
        (2, {4: {3: "verified"}, 5: {3: "clean"}, 10: {3: "clean", 6: "clean", 9: "verified"}, 11: {6: "clean"}}),
    ],
)
def test_checkpoints_are_written_proved_and_kept(directory, quarantine, expected, asynchronous):
    run = Run(directory, quarantine=quarantine, asynchronous=asynchronous)
    for step, states in expected.items():
        run.to(step + (asynchronous and quarantine < 2))  # what the background has written is noted a step later
        found = lying_in(directory)
        assert {step: found.get(step) for step in states} == states
        assert len(found) <= 3
    run.optimizer.close()


def test_steps_that_were_not_applied_do_not_count(directory):
    run = Run(directory)
    for step in range(1, 8):
        run.step(spoil=torch.nan if step in (2, 5, 6) else None)
    assert lying_in(directory) == {4: "clean"}


def test_a_manifest_tells_what_was_written(directory):
    run = Run(directory, make=Net).to(4)
    manifest = dict(find(directory))[path_of(directory, 3)]
    assert (manifest.world_size, manifest.torch, manifest.stopped) == (1, torch.__version__, False)
    assert manifest.elements == sum(3 * p.numel() + 1 for p in run.model.parameters())
    assert set(manifest.files) == set(os.listdir(path_of(directory, 3))) - {"manifest.json"}


def test_the_command_finds_them_whole(directory, capsys):
    Run(directory).to(7)
    assert main(["checkpoints", "--verify", str(directory)]) == 0
    assert capsys.readouterr().out.count("clean") == 2
    damage(directory, 3)
    assert main(["checkpoints", "--verify", str(directory)]) == 1


def test_training_with_checkpoints_is_bit_for_bit_what_it_is_without(directory):
    assert_same(Run(directory, every=1).to(6).state(), Run().to(6).state())


def test_nothing_is_written_and_nothing_listened_to_without_a_policy(directory):
    before = signal.getsignal(signal.SIGTERM)
    run = Run().to(4)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not directory.exists()
    with pytest.raises(ConfigurationError, match="checkpoints="):
        run.optimizer.resume()


# The tools of torch ---------------------------------------------------------------------------------------------------


@ALONE
@pytest.mark.parametrize("make", [Net, NormNet, Tied])
def test_the_model_can_be_loaded_by_torch_itself(directory, make):
    run = Run(directory, make=make).to(3)
    expected = copy.deepcopy(run.model.state_dict())
    run.to(4)
    assert_same(loaded_by_torch(path_of(directory, 3), make()), dict(expected))


@ALONE
def test_the_files_can_be_turned_into_one_of_torch_save(directory):
    run = Run(directory, make=NormNet).to(3)
    model, base = snapshot(run.model, run.base)
    run.to(4)
    dcp_to_torch_save(path_of(directory, 3), "one.pt")
    loaded = torch.load("one.pt", weights_only=False)
    assert_same({name: loaded["model"][name] for name in model}, dict(model))
    names = [name for name, _ in run.model.named_parameters()]
    assert_same(loaded["optimizer"]["state"], {name: base["state"][i] for i, name in enumerate(names)})
    assert loaded["ranks"]["0"]["objects"]["at_end"]["tracked"]["dataloader"] == {"at": 3}


def test_state_dicts_that_torch_asks_for_before_the_first_step_change_nothing(directory):
    other = Run()
    get_optimizer_state_dict(other.model, other.base)
    expected = other.to(4).state()
    run = Run(directory, every=1)
    get_model_state_dict(run.model)
    get_optimizer_state_dict(run.model, run.optimizer)
    assert run.done == 0
    assert lying_in(directory) == {}
    assert_same(run.to(4).state(), expected)
    assert lying_in(directory) == {2: "clean", 3: "clean"}


# A state that the user puts in place ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_directory_of_another_run_is_refused(directory, attempts):
    Run(directory).to(5)
    run = Run(directory)
    before = snapshot(run.model, run.base)
    for _ in range(attempts):
        with pytest.raises(ConfigurationError, match=r"resume\(\)"):
            run.step()
    assert_same(snapshot(run.model, run.base), before)
    assert lying_in(directory) == {3: "clean"}


@ALONE
def test_two_guards_never_replace_each_others_checkpoints(directory):
    first = Run(directory, make=Net)
    with contextlib.suppress(ConfigurationError):
        second = Run(directory, make=lambda: Net(width=9))
        for _ in range(4):
            first.step()
            second.step()
    expected = Run(make=Net).to(3).model.state_dict()
    first.to(4)
    assert_same(loaded_by_torch(path_of(directory, 3), Net()), dict(expected))


def test_no_rollback_goes_back_beyond_a_state_that_was_loaded_by_hand(directory):
    run = Run(directory, nan_action="rollback").to(4)
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.to(5)
    run.optimizer.load_state_dict({**saved, "stabilityguard": run.optimizer.state_dict()["stabilityguard"]})
    run.step(spoil=torch.nan)
    assert run.optimizer.last_record.action == "skip"
    run.to(10)
    run.step(spoil=torch.nan)
    assert run.optimizer.last_record.restored_step == 7


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_copy_made_before_a_state_was_loaded_by_hand_is_no_target(directory, asynchronous):
    run = Run(directory, nan_action="rollback", every=1, quarantine=0, asynchronous=asynchronous).to(3)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for _ in range(3):
        assert spoiled(run) is None
        finish_writing()
    run.optimizer.close()


def test_a_run_may_go_back_to_a_state_of_its_own_by_hand(directory):
    run = Run(directory).to(2)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    run.to(5)
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    run.to(4)
    assert run.optimizer.last_record.applied


def test_objects_that_were_not_tracked_when_it_was_written_are_told_of_before_anything_changes(directory):
    Run(directory).to(5)
    second = Run(directory, seed=99, track={"added": Rows()})
    before = second.state()
    with pytest.raises(CheckpointError):
        second.optimizer.resume()
    assert_same(second.state(), before)


class Refusing(Rows):
    """Takes no state of a later position."""

    def load_state_dict(self, state):
        if state["at"] > 0:
            raise ValueError("not from there")
        super().load_state_dict(state)


def test_a_tracked_object_that_refuses_its_state_leaves_everything_as_it_was(directory, caplog):
    first = Run(directory, track={"rows": Rows()})
    first.tracked["rows"].at = 5
    first.to(5)
    second = Run(directory, seed=99, track={"rows": Refusing()})
    before = second.state()
    with pytest.raises(CheckpointError):
        second.optimizer.resume()
    assert "not from there" in caplog.text
    assert_same(second.state(), before)


@pytest.mark.parametrize(
    "base",
    [
        lambda model: torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        lambda model: torch.optim.AdamW(model.head.parameters()),
    ],
)
def test_a_checkpoint_of_other_groups_is_refused_with_nothing_changed(directory, base):
    Run(directory).to(5)
    second = Run(directory, seed=99, base=base)
    before = second.state()
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        second.optimizer.resume()
    assert_same(second.state(), before)


def test_a_checkpoint_of_another_model_is_refused_with_nothing_changed(directory, caplog):
    Run(directory, make=Net).to(5)
    second = Run(directory, seed=99, make=lambda: Net(width=9))
    before = second.state()
    with pytest.raises(CheckpointError):
        second.optimizer.resume()
    assert "model.body.weight has the shape (8, 4), but is (9, 4) here" in caplog.text
    assert_same(second.state(), before)


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_writes_nothing_and_does_not_listen(directory, duplicate):
    run = Run(directory, make=Net)
    run.scheduler.lr_lambdas = [Halving()]
    run.to(4)
    handler = signal.getsignal(signal.SIGTERM)
    other = duplicate(run.optimizer)
    assert signal.getsignal(signal.SIGTERM) is handler
    model = other._parts["model"]
    for step in range(8):
        other.zero_grad()
        model(batch(step)).backward()
        other.step()
    assert lying_in(directory) == {3: "clean"}
    with pytest.raises(ConfigurationError, match="checkpoints="):
        other.resume()
    other.close()
    assert_same(run.to(8).state()[0], Run(make=Net).to(8).state()[0])
    assert lying_in(directory) == {3: "clean", 6: "clean"}


class Halving:
    """A schedule that pickles, and is the others'."""

    def __call__(self, step):
        return 1 / (1 + step)
