"""Real offline runs, read back from their own transaction logs."""

import json
import os
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from stabilityguard import SnapshotPolicy
from stabilityguard.integrations.wandb import WandBBridge
from tests.report.test_sinks import nan_at
from tests.support import Net, assert_same, guard, train

BLOCK, HEADER = 32768, 7
"""Bytes of the log's blocks, and of the header of each piece of a record: checksum, length, type."""


@pytest.fixture(autouse=True, scope="module")
def _offline(tmp_path_factory):
    """One process of W&B's for all tests, which sends nothing."""
    directory = str(tmp_path_factory.mktemp("of_wandb"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATA", "CACHE", "CONFIG", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", directory)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.chdir(directory)
        begin().finish()  # starts that process
        yield
        wandb.teardown()


@pytest.fixture(autouse=True)
def _nothing_open():
    yield
    if wandb.run is not None:
        wandb.finish()


@pytest.fixture
def bridge():
    bridges = []

    def build(**options):
        bridges.append(WandBBridge(**options))
        return bridges[-1]

    yield build
    for one in bridges:
        one.close()


def warnings_in(caplog):
    return [record for record in caplog.records if record.name == "stabilityguard"]


def begin(**options):
    return wandb.init(project="tests", settings=wandb.Settings(console="off", disable_git=True), **options)


class Log:
    """What a run has written."""

    def __init__(self, path):
        records = complete_records(Path(path))
        self.rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        self.alerts = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
        self.artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
        self.metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
        self.runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        self.summary = {}
        for record in records:
            for item in record.summary.update:
                self.summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)

    def column(self, name):
        return [row[name] for row in self.rows if name in row]


def complete_records(path):
    """All records of a run that has ended: W&B's process writes the last ones a little later."""
    end = time.monotonic() + 20
    while True:
        records = list(records_of(path.read_bytes()))
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        assert time.monotonic() < end, f"{path} is not complete"
        time.sleep(0.02)


def records_of(content):
    """The records of a log: pieces in blocks, as in LevelDB's log format after seven bytes of W&B's own."""
    position, whole = 7, b""
    while position + HEADER <= len(content):
        room = BLOCK - position % BLOCK
        if room < HEADER:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + HEADER])
        whole += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # the full record, or its last piece
            yield Record.FromString(whole)
            whole = b""


def finished(run):
    path = run.settings.sync_file
    run.finish()
    return Log(path)


def test_a_user_who_logs_with_steps_loses_no_row_and_every_trip_is_there(bridge):
    trips = set(range(25, 1001, 50))
    bridge(log_every=10)
    run, model = begin(), Net()
    optimizer = guard(model)
    for step in range(1, 1001):
        train(model, optimizer, [step], spoil=nan_at(*trips))
        run.log({"loss": float(step), "other": 1.0}, step=step)
    optimizer.close()
    log = finished(run)
    assert log.column("loss") == [float(step) for step in range(1, 1001)]
    assert log.column("other") == [1.0] * 1000
    assert sum(log.column("sg/trip")) == len(trips) == 20
    assert {row["sg/step"] for row in log.rows if row.get("sg/trip")} == trips
    assert log.column("sg/step") == list(range(1, 1001))
    assert log.column("sg/skipped_total")[-1] == 20
    assert len(log.column("sg/layer/body") + log.column("sg/layer/head")) >= 100


def test_a_user_who_logs_without_steps_seldom_gets_maxima_and_counts(bridge):
    bridge()
    run, model = begin(), Net()
    optimizer = guard(model)
    norms = []
    for step in range(1, 101):
        train(model, optimizer, [step], spoil=nan_at(11, 12, 55))
        norms.append(optimizer.last_record.global_norm)
        if step % 10 == 0:
            run.log({"loss": float(step)})
    log = finished(run)
    assert log.column("loss") == [float(step) for step in range(10, 101, 10)]
    assert log.column("sg/trip") == [0, 2, 0, 0, 0, 1, 0, 0, 0, 0]
    assert log.column("sg/nonfinite_layers") == [0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    finite = [[norm for norm in norms[start : start + 10] if norm == norm] for start in range(0, 100, 10)]
    assert log.column("sg/grad_norm") == [pytest.approx(max(ten)) for ten in finite]
    assert log.column("sg/step") == list(range(10, 101, 10))


def test_after_a_rollback_no_row_is_lost_as_the_guards_count_goes_on(bridge):
    bridge()
    run, model = begin(), Net()
    policy = SnapshotPolicy(every=2, keep=2, quarantine=1)
    optimizer = guard(model, nan_action="rollback", snapshots=policy)
    for step in range(1, 13):
        train(model, optimizer, [step], spoil=nan_at(8))
        run.log({"loss": float(step)})
    assert optimizer.reports[0].record.restored_step == 6
    log = finished(run)
    assert log.column("sg/step") == log.column("loss") == list(range(1, 13))
    assert log.column("sg/rollbacks_total") == [0] * 7 + [1] * 5


def test_what_happens_before_the_run_is_opened_and_after_the_last_row_is_not_lost(bridge):
    bridge()
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, [1, 2, 3], spoil=nan_at(2))
    assert wandb.run is None
    run = begin()
    train(model, optimizer, [4])
    run.log({"loss": 1.0}, step=7)
    train(model, optimizer, [5, 6], spoil=nan_at(6))
    log = finished(run)
    assert log.column("loss") == [1.0]
    assert sum(log.column("sg/trip")) == 2
    assert log.summary["sg/trips"] == 2


def test_the_runs_own_axis_summary_tag_and_artifact(bridge, tmp_path):
    bridge()
    run, model = begin(tags=["mine"]), Net()
    optimizer = guard(model)
    train(model, optimizer, range(1, 6), spoil=nan_at(3))
    log = finished(run)
    assert [(m.glob_name, m.step_metric) for m in log.metrics if m.glob_name] == [("sg/*", "sg/step")]
    assert log.summary["sg/verdict"] == "recovered"
    assert log.summary["sg/worst_layer"] == "head"
    assert set(log.runs[-1].tags) == {"mine", "sg:recovered"}
    (artifact,) = log.artifacts
    stored = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(stored) == {"journal.jsonl", "spike_step3.json"}
    for name, path in stored.items():
        assert path.read_bytes() == (tmp_path / "sg_logs" / name).read_bytes()


def test_alerts_are_one_a_minute_for_each_kind_and_their_titles_are_short(bridge):
    def spoil(step, model):
        if step in (3, 5):
            model.head.weight.grad.fill_(float("nan"))
        if step in (4, 6):
            model.head.weight.grad.fill_(float("inf"))

    bridge()
    run, model = begin(), Net()
    train(model, guard(model), range(1, 8), spoil=spoil)
    log = finished(run)
    assert [alert.title for alert in log.alerts] == ["StabilityGuard: nan at step 3", "StabilityGuard: inf at step 4"]
    assert all(len(alert.title) < 64 for alert in log.alerts)
    assert "Trigger layer  : head" in log.alerts[0].text


def test_no_alerts_where_none_are_wanted(bridge):
    bridge(alerts=False)
    run, model = begin(), Net()
    train(model, guard(model), [1, 2], spoil=nan_at(2))
    assert finished(run).alerts == []


def test_two_runs_in_a_row_are_counted_apart(bridge):
    bridge()
    model = Net()
    optimizer = guard(model)
    logs = []
    for steps in ([1, 2, 3], [4, 5]):
        run = begin()
        for step in steps:
            train(model, optimizer, [step], spoil=nan_at(2, 3, 5))
            run.log({"loss": 1.0})
        logs.append(finished(run))
    assert [log.column("sg/trip") for log in logs] == [[0, 1, 1], [0, 1]]
    assert [log.column("sg/skipped_total") for log in logs] == [[0, 1, 2], [0, 1]]
    assert [log.summary["sg/trips"] for log in logs] == [2, 1]


def test_a_bridge_that_is_closed_writes_no_more_and_leaves_the_run_open(bridge):
    closed = bridge()
    run, model = begin(), Net()
    optimizer = guard(model)
    train(model, optimizer, [1])
    closed.close()
    train(model, optimizer, [2], spoil=nan_at(2))
    run.log({"loss": 1.0})
    assert wandb.run is run
    log = finished(run)
    assert log.column("sg/step") == [1]
    assert log.column("loss") == [1.0]
    assert len(log.artifacts) == 1


def test_nothing_is_opened_where_the_user_opens_nothing(bridge, tmp_path, caplog):
    bridge().close()
    model = Net()
    built = bridge()
    train(model, guard(model), range(1, 5), spoil=nan_at(2))
    built.close()
    assert wandb.run is None
    assert not (tmp_path / "wandb").exists()
    assert warnings_in(caplog) == []


def test_training_is_bit_for_bit_the_same_and_a_run_that_breaks_costs_one_warning(bridge, caplog):
    def trained(run=None):
        model = Net()
        model.load_state_dict(start)
        optimizer = guard(model)
        train(model, optimizer, [1, 2], spoil=nan_at(2))
        if run is not None:
            run._interface = None  # what is logged from here on fails inside of W&B
            run.log = run.define_metric = None
        train(model, optimizer, [3, 4, 5], spoil=nan_at(4))
        return model.state_dict(), optimizer.base_optimizer.state_dict()

    start = Net().state_dict()
    expected = trained()
    bridge()
    run = begin()
    interface, log = run._interface, run.log
    assert_same(trained(run), expected)
    run._interface, run.log = interface, log
    (warning,) = warnings_in(caplog)
    assert "WandBBridge failed and is muted" in warning.getMessage()


def test_a_disabled_run_disturbs_nothing(bridge, caplog):
    bridge()
    run, model = begin(mode="disabled"), Net()
    train(model, guard(model), range(1, 4), spoil=nan_at(2))
    run.finish()
    assert warnings_in(caplog) == []


def test_a_script_that_closes_nothing_leaves_everything_in_its_run(tmp_path):
    script = """
        import wandb
        from stabilityguard.integrations.wandb import WandBBridge
        from tests.report.test_sinks import nan_at
        from tests.support import Net, guard, train
        WandBBridge()
        run = wandb.init(project="tests", settings=wandb.Settings(console="off", disable_git=True))
        print(run.settings.sync_file)
        model = Net()
        train(model, guard(model), range(1, 5), spoil=nan_at(3))
    """
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r})\n" + textwrap.dedent(script)
    alone = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=alone)
    log = Log(done.stdout.split()[0])
    assert log.summary["sg/verdict"] == "recovered"
    assert len(log.artifacts) == 1
    assert sum(log.column("sg/trip")) == 1
