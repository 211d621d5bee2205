import pytest
import torch

from stabilityguard import GuardedOptimizer
from stabilityguard.detect.ema import EmaDetector
from stabilityguard.distributed.peers import Peers
from stabilityguard.measure import stopwatch
from stabilityguard.measure.gradients import GradientReader
from stabilityguard.measure.stopwatch import Stopwatch
from tests.distributed import wrapped
from tests.distributed.ranks import run
from tests.support import Net


class Clock:
    """Stands still unless told to go on."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def during(self, seconds, function):
        """The same function, but that it takes so long."""

        def called(*arguments, **options):
            self.now += seconds
            return function(*arguments, **options)

        return called


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_it_counts_what_is_done_while_it_runs_and_is_not_paused(clock):
    watch = Stopwatch()
    clock.now += 1
    with watch.running():
        clock.now += 2
        with watch.paused():
            clock.now += 4
            with watch.running():
                clock.now += 8
            with watch.paused():
                clock.now += 16
        clock.now += 32
        assert watch.take() == 42_000
        clock.now += 64
    assert watch.take() == 64_000
    with watch.paused():
        clock.now += 1
    assert watch.take() == 0


def test_it_stands_again_after_an_error(clock):
    watch = Stopwatch()
    with pytest.raises(ValueError, match="twice"), watch.running(), watch.paused():
        raise ValueError("twice")
    clock.now += 1
    assert watch.take() == 0


def test_a_record_tells_what_measuring_and_judging_took_but_not_the_update(clock, monkeypatch):
    monkeypatch.setattr(GradientReader, "read", clock.during(0.002, GradientReader.read))
    monkeypatch.setattr(EmaDetector, "judge", clock.during(0.001, EmaDetector.judge))
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    guarded = GuardedOptimizer(base, model, verbose=False)
    base.step = clock.during(4, base.step)
    told = []
    for factor in (1.0, float("nan")):
        guarded.zero_grad()
        (model(torch.ones(2, 4)) * factor).backward()
        clock.now += 8
        guarded.step()
        told.append((guarded.last_record.action, guarded.last_record.overhead_ms))
    assert told == [("step", pytest.approx(3)), ("skip", pytest.approx(3))]


def test_waiting_for_other_ranks_is_left_out(clock, monkeypatch):
    monkeypatch.setattr(Peers, "all_reduce", clock.during(4, Peers.all_reduce))

    def job(rank):
        model = wrapped.ddp()(wrapped.make())
        guarded = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, verbose=False)
        model(wrapped.rows(1, rank, 2)).backward()
        guarded.step()
        return guarded.last_record.overhead_ms

    assert run(2, job) == [0, 0]
