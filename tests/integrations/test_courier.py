import threading
import time

import pytest

from stabilityguard.integrations import courier as module
from stabilityguard.integrations.courier import Courier, RefusedError


class Door:
    """Where things are brought: it takes, fails or refuses as it is told to."""

    def __init__(self):
        self.taken, self.tries, self.error = [], 0, None
        self.open = threading.Event()
        self.open.set()

    def __call__(self, things):
        self.open.wait(10)
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.taken += things


@pytest.fixture
def door(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(module, "GATHERING", 0.01)
    return Door()


def courier_to(door, capacity=100, batch=10):
    return Courier("Bridge", door, capacity=capacity, batch=batch)


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_all_arrives_in_order_in_batches(door, caplog):
    door.open.clear()
    courier = courier_to(door)
    for number in range(95):
        courier.put(number)
    door.open.set()
    courier.close(10)
    assert door.taken == list(range(95))
    assert door.tries <= 11
    assert (courier.dropped, caplog.records) == (0, [])


def test_what_comes_within_the_time_of_gathering_goes_at_once(door, monkeypatch):
    monkeypatch.setattr(module, "GATHERING", 60.0)
    courier = courier_to(door)
    for number in range(15):
        courier.put(number)
    wait_until(lambda: door.taken == list(range(10)))  # a whole batch waits no longer
    courier.close(10)
    assert door.taken == list(range(15))
    assert door.tries == 2


def test_what_fails_is_tried_again_with_one_warning(door, caplog):
    door.error = ConnectionError("out of reach")
    courier = courier_to(door)
    for number in range(5):
        courier.put(number)
    wait_until(lambda: door.tries >= 3)
    door.error = None
    courier.close(10)
    assert door.taken == list(range(5))
    (warning,) = caplog.records
    assert "Bridge: the server is out of reach" in warning.getMessage()
    assert "out of reach" in warning.getMessage()


def test_the_oldest_are_dropped_where_too_many_wait_and_are_counted(door, caplog):
    door.open.clear()
    courier = courier_to(door, capacity=20)
    courier.put(0)
    wait_until(lambda: not courier._waiting)
    for number in range(1, 101):
        courier.put(number)
    door.open.set()
    courier.close(10)
    assert door.taken == [0, *range(81, 101)]
    assert courier.dropped == 80
    assert "80 messages did not reach the server" in caplog.records[-1].getMessage()


def test_what_is_refused_is_dropped_and_the_rest_goes_on(door):
    door.error = RefusedError("no such run")
    courier = courier_to(door)
    courier.put(0)
    wait_until(lambda: door.tries == 1 and courier.dropped == 1)
    door.error = None
    courier.put(1)
    courier.close(10)
    assert (door.taken, courier.dropped) == ([1], 1)


def test_the_end_waits_no_longer_than_it_is_told_to(door, caplog):
    door.open.clear()
    courier = courier_to(door)
    for number in range(30):
        courier.put(number)
    began = time.monotonic()
    courier.close(0.05)
    assert time.monotonic() - began < 5
    assert courier.dropped == 30
    assert len(caplog.records) == 1
    door.open.set()


def test_the_end_comes_at_once_where_the_server_fails(door):
    door.error = ConnectionError("out of reach")
    courier = courier_to(door, batch=100)
    for number in range(30):
        courier.put(number)
    wait_until(lambda: door.tries >= 1)
    courier.close(10)
    assert courier.dropped == 30


def test_a_courier_that_had_nothing_to_carry_ends_at_once_and_started_no_thread(door):
    threads = threading.active_count()
    courier_to(door).close(10)
    assert threading.active_count() == threads
    assert door.tries == 0
