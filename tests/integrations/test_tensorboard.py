"""Event files, read back by TensorBoard's own reader."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

from stabilityguard import ConfigurationError
from stabilityguard.integrations import metrics
from stabilityguard.integrations.tensorboard import TensorBoardBridge
from tests.report.test_sinks import nan_at
from tests.support import Net, assert_same, guard, train


@pytest.fixture
def bridge():
    bridges = []

    def build(*arguments, **options):
        bridges.append(TensorBoardBridge(*arguments, **options))
        return bridges[-1]

    yield build
    for one in bridges:
        one.close()


def trained(trips=(12, 20), **options):
    model = Net()
    optimizer = guard(model, **options)
    train(model, optimizer, range(1, 31), spoil=nan_at(*trips))
    optimizer.close()
    return model.state_dict(), optimizer.base_optimizer.state_dict()


class Events:
    """What the event files of a directory hold."""

    def __init__(self, directory):
        self._events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0}).Reload()
        self.names = set(self._events.Tags()["tensors"]) | set(self._events.Tags()["scalars"])

    def scalars(self, name):
        return {event.step: float(make_ndarray(event.tensor_proto)) for event in self._events.Tensors(name)}

    def steps(self, name):
        return [event.step for event in self._events.Tensors(name)]

    def texts(self, name):
        content = {event.step: make_ndarray(event.tensor_proto) for event in self._events.Tensors(name)}
        return {step: text.item().decode() for step, text in content.items()}


def test_scalars_reports_and_a_summary_are_written(bridge, tmp_path):
    built = bridge(log_dir="events", log_every=10, layers=["body"])
    trained()
    built.close()
    events = Events(tmp_path / "events")
    steps = set(range(1, 31))
    assert events.scalars("sg/trip") == {step: float(step in (12, 20)) for step in steps}
    assert set(events.scalars("sg/grad_norm")) == steps - {12, 20}
    assert events.scalars("sg/nonfinite_layers")[12] == 1
    assert events.scalars("sg/skipped_total")[30] == 2
    assert set(events.scalars("sg/layer/body")) == {10, 12, 20, 30}
    reports = events.texts("sg/report/text_summary")
    assert set(reports) == {12, 20}
    assert "NAN DETECTED @ step 12" in reports[12]
    assert "spike_step12.json" in reports[12]
    (summary,) = events.texts("sg/summary/text_summary").values()
    assert "verdict: recovered" in summary
    assert "trips: 2" in summary
    assert "sg/grad_norm was NaN or Inf: 2 times" in summary


def test_a_writer_of_the_users_own_is_shared_and_left_open(bridge, tmp_path):
    with SummaryWriter("mine") as writer:
        built = bridge(writer)
        trained()
        built.close()
        writer.add_scalar("loss", 0.5, 31, new_style=True)
    events = Events(tmp_path / "mine")
    assert events.scalars("loss") == {31: 0.5}
    assert len(events.scalars("sg/trip")) == 30


def test_as_a_sink_it_is_told_once_and_closed_by_its_guard(bridge, tmp_path):
    built = bridge(log_dir="events")
    trained(sinks=[built])
    trained()  # by a guard that comes after the close
    assert Events(tmp_path / "events").steps("sg/trip") == list(range(1, 31))


def test_nothing_is_made_before_the_first_step(bridge, tmp_path):
    bridge(log_dir="events").close()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_not_the_first_does_nothing(bridge, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        built = bridge(log_dir="events")
    trained(sinks=[built])
    assert not (tmp_path / "events").exists()


def test_a_place_that_cannot_be_written_costs_one_warning(bridge, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    built = bridge(log_dir="file/events")
    expected = trained(trips=())
    assert built.tally.steps == 0
    torch.manual_seed(0)
    assert_same(trained(trips=()), expected)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "stabilityguard"]
    assert "TensorBoardBridge failed and is muted" in warning


def test_a_layer_that_is_not_there_is_named_once(bridge, caplog):
    bridge(log_dir="events", log_every=1, layers=["haed"])
    trained()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "stabilityguard"]
    assert warning == "TensorBoardBridge: no layer of this optimizer is called 'haed'; there are body, head, …"


def test_the_layout_has_a_place_for_every_metric(tmp_path):
    script = Path(__file__).parents[2] / "integrations" / "tensorboard_dashboard.py"
    subprocess.run([sys.executable, str(script), "events"], check=True, capture_output=True)
    (event,) = EventAccumulator(str(tmp_path / "events")).Reload().Tensors("custom_scalars__config__")
    layout = Layout.FromString(make_ndarray(event.tensor_proto).item())
    (category,) = layout.category
    tags = [tag for chart in category.chart for tag in chart.multiline.tag]
    written = {value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)}
    assert {tag.removesuffix(".*") for tag in tags} == written - {metrics.PREFIX, metrics.STEP}


@pytest.mark.parametrize("options", [{"writer": object()}, {"writer": "runs"}, {"log_every": True}, {"layers": [1]}])
def test_arguments_that_cannot_be_used_are_refused(options):
    with pytest.raises(ConfigurationError):
        TensorBoardBridge(**options)


def test_a_writer_and_a_directory_are_one_too_many(tmp_path):
    with SummaryWriter("mine") as writer, pytest.raises(ConfigurationError, match="pass one of the two"):
        TensorBoardBridge(writer, log_dir="events")
