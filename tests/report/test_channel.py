import pytest

from stabilityguard.report import channel
from tests.report.test_sinks import ALL, Broken, Recorder, nan_at, run
from tests.support import Net, guard, train


@pytest.fixture(autouse=True)
def _nobody_listens_afterwards():
    yield
    for sink in channel.listeners(beside=[]):
        channel.leave(sink)


def listening(sink):
    channel.join(sink)
    return sink


def test_a_listener_hears_every_guard_of_the_process_and_is_not_closed_by_them():
    sink = listening(Recorder())
    run()
    run()
    assert sink.told == 2 * ALL[:-1]


def test_one_that_leaves_hears_nothing_more():
    sink = listening(Recorder())
    channel.leave(sink)
    run()
    assert sink.told == []


def test_one_that_joins_in_the_middle_hears_what_follows():
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, [1, 2])
    sink = listening(Recorder())
    train(model, optimizer, [3])
    assert sink.told == [("on_record", 3)]


def test_one_that_is_a_sink_as_well_is_told_once_and_closed_by_its_guard():
    sink = listening(Recorder())
    channel.join(sink)
    run(sink)
    assert sink.told == ALL


def test_a_listener_that_raises_is_muted_with_one_warning_for_all_guards(caplog):
    broken, healthy = listening(Broken(failing="on_record")), listening(Recorder())
    run()
    run()
    assert broken.told == ALL[:1]
    assert healthy.told == 2 * ALL[:-1]
    (warning,) = caplog.records
    assert "Broken.on_record failed" in warning.getMessage()


def test_listeners_can_leave_while_they_are_told():
    class Leaver(Recorder):
        def on_record(self, record):
            super().on_record(record)
            channel.leave(self)

    first, second = listening(Leaver()), listening(Recorder())
    run()
    assert first.told == ALL[:1]
    assert second.told == ALL[:-1]


def test_journals_are_remembered_while_somebody_listens(tmp_path):
    model = Net()
    train(model, guard(model, log_dir="unheard"), [1])
    assert channel.journals() == []
    sink = listening(Recorder())
    for name in ("one", "two", "one"):
        train(model, guard(model, log_dir=name), [1], spoil=nan_at(1))
    assert channel.journals() == [str(tmp_path / name / "journal.jsonl") for name in ("one", "two")]
    channel.leave(sink)
    assert channel.journals() == []
