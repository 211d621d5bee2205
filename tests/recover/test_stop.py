import multiprocessing
import os
import signal
import threading
import time

import pytest

from stabilityguard.recover.stop import EXIT_CODE, StopRequest


@pytest.fixture(autouse=True)
def _handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def in_a_thread(work):
    """The result of ``work()`` or the error it raised, from a thread."""
    results = []

    def run():
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_the_exit_code_is_that_of_a_terminated_process():
    assert EXIT_CODE == 143


def test_a_signal_is_remembered_and_does_not_end_the_process():
    request = StopRequest()
    assert not request.has_come
    terminate()
    terminate()
    assert request.has_come
    request.close()


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None])
def test_the_former_handler_is_put_back(before):
    signal.signal(signal.SIGTERM, before)
    request = StopRequest()
    assert signal.getsignal(signal.SIGTERM) is not before
    request.close()
    request.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_was_there_is_called_with_what_it_expects():
    heard = []
    signal.signal(signal.SIGTERM, lambda *arguments: heard.append(arguments))
    request = StopRequest()
    terminate()
    assert [number for number, _ in heard] == [signal.SIGTERM]
    assert heard[0][1] is not None
    assert request.has_come
    request.close()
    terminate()
    assert len(heard) == 2


def test_a_handler_that_raises_does_so_and_the_signal_is_remembered():
    def give_up(number, frame):
        raise InterruptedError

    signal.signal(signal.SIGTERM, give_up)
    request = StopRequest()
    with pytest.raises(InterruptedError):
        terminate()
    assert request.has_come
    request.close()


def test_a_handler_that_was_put_in_place_since_stays():
    request, heard = StopRequest(), []
    signal.signal(signal.SIGTERM, mine := lambda number, frame: heard.append(number))
    request.close()
    assert signal.getsignal(signal.SIGTERM) is mine
    terminate()
    assert heard == [signal.SIGTERM]
    assert not request.has_come


def test_two_requests_hear_the_same_signal():
    requests = StopRequest(), StopRequest()
    terminate()
    assert all(request.has_come for request in requests)
    for request in reversed(requests):
        request.close()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_process_can_be_terminated_again_when_all_are_closed(order):
    def die():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        requests = StopRequest(), StopRequest()
        for place in order:
            requests[place].close()
        terminate()

    assert exit_code_of(die) == -signal.SIGTERM


def test_a_process_that_was_started_since_can_be_terminated():
    request = StopRequest()
    assert exit_code_of(lambda: time.sleep(2), terminates=True) == -signal.SIGTERM
    assert not request.has_come
    request.close()


def exit_code_of(work, *, terminates=False):
    """The exit code of a forked process, which is terminated from outside if told so."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    if terminates:
        time.sleep(0.2)
        process.terminate()
    process.join(10)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def test_beside_the_main_thread_nothing_is_heard_and_nothing_changed():
    before = signal.getsignal(signal.SIGTERM)
    request = in_a_thread(StopRequest)
    assert isinstance(request, StopRequest)
    assert signal.getsignal(signal.SIGTERM) is before
    request.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not request.has_come


def test_a_request_can_be_closed_beside_the_main_thread():
    assert in_a_thread(StopRequest().close) is None
