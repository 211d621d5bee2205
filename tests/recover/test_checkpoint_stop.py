"""Runs that are asked to stop leave a checkpoint of their step."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch

from tests.recover.runs import Run, a_full_disk, lying_in, rolling, spoiled
from tests.support import assert_same, snapshot


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint_and_goes_on_without_losing_a_step(directory, at, asynchronous):
    run = Run(directory, asynchronous=asynchronous).to(at - 1)
    terminate()
    run.step()
    with pytest.raises(SystemExit) as ended:
        run.step()
    assert ended.value.code == 143
    assert lying_in(directory)[at] == "verified"
    run.optimizer.close()
    second = Run(directory, seed=99)
    assert second.resumed() == at
    assert_same(second.to(at + 3).state(), Run().to(at + 3).state())


def test_a_run_that_is_asked_to_stop_in_a_rollback_keeps_what_it_went_back_to(directory):
    run = rolling(directory).to(4)
    run.optimizer.zero_grad()
    run.loss().backward()
    next(run.model.parameters()).grad.fill_(torch.nan)
    terminate()
    run.optimizer.step()
    run.scheduler.step()
    assert run.optimizer.last_record.restored_step == 3
    expected = snapshot(run.model, run.base)
    with pytest.raises(SystemExit):
        run.step()
    second = rolling(directory, seed=99)
    assert second.resumed() == 5
    assert_same(snapshot(second.model, second.base), expected)


def test_a_checkpoint_of_a_stopped_run_is_a_target_only_when_it_has_proved_to_be_clean(directory):
    run = Run(directory).to(1)
    terminate()
    run.step()
    with pytest.raises(SystemExit):
        run.step()
    second = rolling(directory)
    assert second.resumed() == 2
    second.step(spoil=torch.nan)
    assert second.optimizer.last_record.action == "skip"
    second.step()
    assert spoiled(second) == 2


def test_a_run_whose_last_checkpoint_fails_leaves_all_the_same(directory, caplog):
    run = Run(directory).to(4)
    terminate()
    run.step()
    with a_full_disk(), pytest.raises(SystemExit) as ended:
        run.step()
    assert ended.value.code == 143
    assert "the checkpoint of step 5 failed" in caplog.text
    assert lying_in(directory) == {3: "clean"}


def test_a_stopped_process_ends_with_the_code_of_a_terminated_one_and_the_next_goes_on(directory):
    def work():
        run = Run(directory).to(4)
        terminate()
        run.to(9)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == 143
    second = Run(directory, seed=99)
    assert second.resumed() == 5
    assert_same(second.to(8).state(), Run().to(8).state())


def test_a_signal_is_not_lost_when_the_run_is_closed_before_the_next_step(directory):
    def work():
        run = Run(directory).to(2)
        terminate()
        run.optimizer.close()

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode in (143, -signal.SIGTERM)


def test_a_handler_of_the_users_is_called_and_put_back(directory):
    heard = []
    signal.signal(signal.SIGTERM, mine := lambda number, frame: heard.append(number))
    run = Run(directory).to(1)
    terminate()
    run.step()
    with pytest.raises(SystemExit):
        run.step()
    run.optimizer.close()
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is mine


def test_a_guard_that_is_made_beside_the_main_thread_writes_and_does_not_listen(directory):
    before, runs = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: runs.append(Run(directory).to(4)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert lying_in(directory) == {3: "clean"}
    runs[0].optimizer.close()
