"""What goes wrong while checkpoints are written, kept and read, in one process."""

import copy
import logging
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from stabilityguard import Budget, ConfigurationError
from tests.recover.runs import (
    ALONE,
    Deadly,
    Run,
    a_full_disk,
    finish_writing,
    hearing_interrupts,
    loaded_by_torch,
    lying_in,
    path_of,
    rolling,
    spoiled,
)
from tests.support import Net, assert_same


def assert_only_warnings(caplog):
    assert {record.levelno for record in caplog.records if record.name == "stabilityguard"} == {logging.WARNING}


@pytest.mark.parametrize("keep", [1, 2])
def test_weights_that_are_not_finite_are_never_saved_and_never_remove_a_good_one(directory, caplog, keep):
    run = Run(directory, keep=keep, every=1, budget=Budget(consecutive_skips=99)).to(6)
    good = lying_in(directory)
    rate = run.base.param_groups[0]["lr"]
    run.base.param_groups[0]["lr"] = torch.nan
    run.step()
    run.base.param_groups[0]["lr"] = rate
    assert run.model.body.weight.isnan().any()
    for _ in range(5):
        run.step()
    assert run.optimizer.last_record.action == "skip"
    assert set(lying_in(directory)) <= {*good, 6}
    assert "clean" in lying_in(directory).values()
    assert "NaN" in caplog.text
    assert Run(directory, seed=99).resumed() in (5, 6)


def test_moments_that_are_not_finite_are_never_saved(directory, caplog):
    run = Run(directory).to(5)
    run.base.state[run.model.head.bias]["exp_avg_sq"].fill_(torch.inf)
    run.to(8)
    assert lying_in(directory) == {3: "clean"}
    assert "optimizer.state.head.bias.exp_avg_sq has 1 elements that are NaN or Inf" in caplog.text


@pytest.mark.parametrize("step", [3, 6, 9])
def test_one_that_was_removed_by_hand_causes_warnings_only(directory, caplog, step):
    run = Run(directory, quarantine=2).to(10)
    assert lying_in(directory) == {3: "clean", 6: "clean", 9: "verified"}
    shutil.rmtree(path_of(directory, step))
    run.to(17)
    assert lying_in(directory) == {12: "clean", 15: "clean"}
    assert_only_warnings(caplog)


def test_a_directory_that_was_removed_by_hand_is_made_again(directory):
    run = Run(directory / "below", quarantine=0).to(5)
    shutil.rmtree(directory)
    run.to(10)
    assert set(lying_in(directory / "below")) == {6, 9}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_earlier_ones_and_training_goes_on(directory, caplog, asynchronous):
    run = Run(directory, keep=1, asynchronous=asynchronous).to(5 + asynchronous)
    assert lying_in(directory) == {3: "clean"}
    with a_full_disk():
        run.to(8)
    assert lying_in(directory) == {3: "clean"}
    assert "the checkpoint of step 6 failed, and the earlier ones stay" in caplog.text
    assert_only_warnings(caplog)
    assert_same(run.to(11 + asynchronous).state(), Run().to(11 + asynchronous).state())
    assert lying_in(directory) == {9: "clean"}
    run.optimizer.close()


def test_a_disk_that_is_full_when_one_becomes_clean_keeps_the_earlier_one(directory, caplog):
    run = Run(directory, keep=1, quarantine=2).to(7)
    assert lying_in(directory) == {3: "clean", 6: "verified"}
    with a_full_disk(size=100):
        run.to(8)
        assert lying_in(directory) == {3: "clean", 6: "verified"}
    assert "could not be marked clean" in caplog.text
    run.to(9)
    assert lying_in(directory) == {6: "clean"}


def test_a_manifest_that_cannot_be_replaced_twice_is_the_third_time(directory, monkeypatch, caplog):
    real, refusals = Path.replace, iter([PermissionError(13, "in use")] * 2)

    def replace(path, target):
        if "clean" in path.read_text() and (error := next(refusals, None)):
            raise error
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    run = Run(directory, keep=1, quarantine=1).to(5)
    assert lying_in(directory) == {3: "verified"}
    run.to(6)
    assert lying_in(directory) == {3: "clean"}
    assert caplog.text.count("could not be marked clean") == 1


def test_names_of_files_are_such_as_every_system_takes(directory, tmp_path):
    run = rolling(directory, log_dir=str(tmp_path / "logs"), asynchronous=True).to(7)
    run.step(spoil=torch.nan)
    run.optimizer.close()
    names = [path.name for path in tmp_path.rglob("*")]
    assert {"manifest.json", "journal.jsonl", "spike_step8.json"} <= set(names)
    assert not [name for name in names if set(name) & set('<>:"\\|?*') or name.endswith((" ", "."))]


def test_a_file_in_the_place_of_the_directory_leaves_training_alone(directory, caplog):
    run = Run(directory).to(2)
    directory.rmdir()
    directory.write_text("mine")
    run.to(8)
    assert "the checkpoint of step 3 failed" in caplog.text
    assert_only_warnings(caplog)
    assert_same(run.state(), Run().to(8).state())
    assert directory.read_text() == "mine"


def test_a_file_in_the_place_of_the_directory_is_refused_at_construction(directory):
    directory.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"CheckpointPolicy\.directory"):
        Run(directory)


def test_what_does_not_pickle_causes_a_warning(directory, caplog):
    def refuse():
        raise TypeError("no pickle of this")

    Run(directory, track={"odd": Deadly(at=0, does=refuse)}).to(5)
    assert "no pickle of this" in caplog.text
    assert lying_in(directory) == {}
    assert_only_warnings(caplog)


def test_an_interrupt_while_writing_leaves_the_last_one_good_and_the_run_usable(directory):
    interrupt = Deadly(at=6, does=lambda: os.kill(os.getpid(), signal.SIGINT))
    run = rolling(directory, track={"odd": interrupt})
    with hearing_interrupts(), pytest.raises(KeyboardInterrupt):
        run.to(9)
    assert run.done == 6
    interrupt.at = 1000
    assert spoiled(run) == 3
    run.to(12)
    assert lying_in(directory) == {3: "clean", 10: "clean"}
    assert Run(directory, track={"odd": interrupt}).resumed() == 10


def test_a_background_job_that_failed_is_told_of_when_the_run_is_closed(directory, caplog):
    run = Run(directory, asynchronous=True).to(3)
    with a_full_disk():
        run.to(4)
    run.optimizer.close()
    assert "the checkpoint of step 3 failed" in caplog.text


def test_what_is_due_while_another_is_being_written_is_left_out(directory, caplog):
    free = threading.Event()
    run = Run(directory, every=2, asynchronous=True, track={"slow": Deadly(at=0, does=lambda: free.wait(60))})
    while run.done < 5:
        run.step()
    free.set()
    finish_writing()
    run.step()
    run.optimizer.close()
    assert "no checkpoint of step 4: that of step 2 is still being written" in caplog.text
    assert set(lying_in(directory)) == {2}


@ALONE
def test_what_is_written_in_the_background_is_the_state_of_its_step(directory):
    free = threading.Event()
    run = Run(directory, make=Net, asynchronous=True, track={"slow": Deadly(at=0, does=lambda: free.wait(60))})
    while run.done < 3:
        run.step()
    expected = copy.deepcopy(run.model.state_dict())
    run.step()
    run.step()
    free.set()
    finish_writing()
    run.step()
    run.optimizer.close()
    assert_same(loaded_by_torch(path_of(directory, 3), Net()), dict(expected))


def test_a_job_of_a_future_that_was_given_up_is_removed(directory):
    free = threading.Event()
    slow = Deadly(at=0, does=None)
    run = rolling(directory, asynchronous=True, track={"slow": slow}).to(6)
    slow.does = lambda: free.wait(60)
    run.step()
    assert spoiled(run) == 3
    free.set()
    slow.does = None
    run.to(9)
    finish_writing()
    run.step()
    assert 6 not in lying_in(directory)
    run.optimizer.close()


def test_a_relative_directory_stays_where_it_was(directory, monkeypatch):
    run = Run(directory.name)
    (elsewhere := directory.parent / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    run.to(4)
    assert lying_in(directory) == {3: "clean"}
