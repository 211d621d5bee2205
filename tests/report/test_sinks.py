import contextlib
import logging
from pathlib import Path

import pytest
import torch

from stabilityguard import ConfigurationError, GradientSpikeError
from tests.support import Net, assert_same, guard, train


class Recorder:
    """A sink that writes down what it is told, and raises where it is told to."""

    def __init__(self, failing=None, error=RuntimeError, told=None):
        self.told = [] if told is None else told
        self.failing = failing
        self.error = error

    def on_record(self, record):
        self._take("on_record", record.step)

    def on_report(self, report):
        self._take("on_report", report.record.step)

    def close(self):
        self._take("close", None)

    def _take(self, method, step):
        self.told.append((method, step))
        if method == self.failing:
            raise self.error("out of order")


class Broken(Recorder):
    """One whose name the warning must give."""


def nan_at(*steps):
    def spoil(step, model):
        if step in steps:
            model.head.weight.grad[0, 0] = torch.nan

    return spoil


def run(*sinks, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = guard(model, sinks=sinks, **options)
    with contextlib.suppress(GradientSpikeError):
        train(model, optimizer, range(1, 6), spoil=nan_at(2, 4))
    optimizer.close()
    return model.state_dict(), optimizer.base_optimizer.state_dict()


ALL = [
    ("on_record", 1),
    ("on_report", 2),
    ("on_record", 2),
    ("on_record", 3),
    ("on_report", 4),
    ("on_record", 4),
    ("on_record", 5),
    ("close", None),
]


def test_a_sink_gets_everything_in_order_and_a_report_before_the_record_of_its_step():
    sink = Recorder()
    run(sink)
    assert sink.told == ALL


def test_sinks_are_told_in_the_order_in_which_they_were_given():
    told = []

    class Named(Recorder):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def _take(self, method, step):
            told.append((self.name, method, step))

    run(Named("one"), Named("two"))
    assert told == [(name, *event) for event in ALL for name in ("one", "two")]


def test_a_sink_gets_report_and_record_of_the_step_that_raises():
    sink = Recorder()
    run(sink, nan_action="raise")
    assert sink.told == [("on_record", 1), ("on_report", 2), ("on_record", 2), ("close", None)]


def test_a_sink_finds_the_report_written_when_it_is_told_of_it():
    class Reader(Recorder):
        def on_report(self, report):
            self.told.append(Path(report.path).read_text()[0])

    sink = Reader()
    run(sink)
    assert "{" in sink.told


def test_a_sink_sees_what_the_optimizer_shows():
    class Matcher(Recorder):
        optimizer = None

        def on_record(self, record):
            self.told.append(record is self.optimizer.last_record)

    sink = Matcher()
    model = Net()
    sink.optimizer = guard(model, sinks=[sink])
    train(model, sink.optimizer, range(1, 4))
    assert sink.told == [True] * 3


def test_sinks_are_closed_once():
    sink = Recorder()
    model = Net()
    with guard(model, sinks=[sink]) as optimizer:
        train(model, optimizer, [1])
    optimizer.close()
    assert sink.told == [("on_record", 1), ("close", None)]


def test_a_closed_guard_tells_its_sinks_nothing_more():
    sink = Recorder()
    model = Net()
    optimizer = guard(model, sinks=[sink])
    optimizer.close()
    train(model, optimizer, range(1, 4))
    assert sink.told == [("close", None)]


@pytest.mark.parametrize("method", ["on_record", "on_report", "close"])
def test_a_sink_that_raises_is_muted_with_one_warning_that_names_it_and_training_goes_on(method, caplog):
    expected = run()
    broken, healthy = Broken(failing=method), Recorder()
    assert_same(run(broken, healthy), expected)
    assert broken.told == ALL[: [event[0] for event in ALL].index(method) + 1]
    assert healthy.told == ALL
    (warning,) = caplog.records
    assert (warning.name, warning.levelno) == ("stabilityguard", logging.WARNING)
    for part in ("Broken", method, "RuntimeError", "out of order"):
        assert part in warning.getMessage()


def test_a_sink_that_raises_before_others_does_not_cost_them_a_word(caplog):
    one, two, three = Recorder(), Recorder(), Recorder()
    run(one, Broken(failing="on_record"), two, Broken(failing="on_record"), three)
    assert one.told == two.told == three.told == ALL
    assert len(caplog.records) == 2


def test_a_sink_that_lacks_a_method_is_refused():
    class Half:
        def on_record(self, record):
            pass

        def close(self):
            pass

    with pytest.raises(ConfigurationError, match="sinks must be a list of objects with the methods of Sink"):
        guard(Net(), sinks=[Half()])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("method", ["on_record", "on_report"])
def test_an_interrupt_in_a_sink_is_not_swallowed(method, error, caplog):
    model = Net()
    optimizer = guard(model, sinks=[Recorder(failing=method, error=error)])
    with pytest.raises(error):
        train(model, optimizer, range(1, 6), spoil=nan_at(2))
    assert caplog.records == []


def test_training_can_go_on_after_an_interrupt_in_a_sink():
    model = Net()
    sink = Recorder(failing="on_record", error=KeyboardInterrupt)
    optimizer = guard(model, sinks=[sink])
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, [1])
    sink.failing = None
    train(model, optimizer, [2, 3])
    assert sink.told == [("on_record", 1), ("on_record", 2), ("on_record", 3)]


def test_a_sink_that_is_equal_to_a_broken_one_is_not_muted_in_its_place(caplog):
    class Alike(Recorder):
        def __eq__(self, other):
            return isinstance(other, Alike)

        __hash__ = None

    healthy, broken = Alike(), Alike(failing="on_record")
    run(healthy, broken)
    assert healthy.told == ALL
    assert broken.told == ALL[:1]
    assert len(caplog.records) == 1
