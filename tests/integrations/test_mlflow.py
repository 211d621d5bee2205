"""A real server on SQLite, read back by its REST API."""

import http.server
import json
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import mlflow
import pytest
import torch

from stabilityguard import ConfigurationError
from stabilityguard.integrations.mlflow import MLflowBridge, allowed
from tests.report.test_sinks import nan_at
from tests.support import Net, assert_same, guard, train


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """``mlflow server`` over a database in ``directory``."""

    def __init__(self, directory):
        self.directory, self.port = directory, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.directory}/runs.db"]
        command += ["--artifacts-destination", f"{self.directory}/artifacts"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.directory, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + 100
        while not self._answers():
            assert time.monotonic() < end, (self.directory / "log").read_text()
            time.sleep(0.1)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def get(self, endpoint, **query):
        with urllib.request.urlopen(
            f"{self.uri}/api/2.0/mlflow/{endpoint}?{urllib.parse.urlencode(query)}", timeout=30
        ) as answer:
            return json.loads(answer.read())

    def _answers(self):
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=30).status == 200
        except OSError:
            return False


class Stored:
    """What the server has of a run."""

    def __init__(self, server, run_id):
        self._server, self._run_id = server, run_id
        self.run = server.get("runs/get", run_id=run_id)["run"]
        self.tags = {tag["key"]: tag["value"] for tag in self.run["data"]["tags"]}
        self.names = {metric["key"] for metric in self.run["data"]["metrics"]}

    def history(self, name):
        answer = self._server.get("metrics/get-history", run_id=self._run_id, metric_key=name)
        return {metric["step"]: metric["value"] for metric in answer["metrics"]}

    def files(self):
        answer = self._server.get("artifacts/list", run_id=self._run_id, path="stabilityguard")
        return {file["path"].removeprefix("stabilityguard/") for file in answer.get("files", [])}


@pytest.fixture(scope="module", autouse=True)
def _impatient():
    """The tests wait for nothing that MLflow does by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory, _impatient):
    one = Server(tmp_path_factory.mktemp("server"))
    one.start()
    yield one
    one.kill()


@pytest.fixture
def active(server):
    """A run of the user's own."""
    mlflow.set_tracking_uri(server.uri)
    with mlflow.start_run() as run:
        yield run.info.run_id
    mlflow.set_tracking_uri(None)


@pytest.fixture
def bridge():
    bridges = []

    def build(*arguments, **options):
        bridges.append(MLflowBridge(*arguments, **{"exit_seconds": 60.0, **options}))
        return bridges[-1]

    yield build
    for one in bridges:
        one.close()


def trained(steps=range(1, 31), trips=(12, 20), before=lambda step: None):
    model = Net()
    optimizer = guard(model)
    for step in steps:
        before(step)
        train(model, optimizer, [step], spoil=nan_at(*trips))
    return model.state_dict(), optimizer.base_optimizer.state_dict()


def told(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "stabilityguard"]


def test_numbers_tags_and_files_arrive(server, active, bridge, caplog):
    built = bridge(log_every=10, layers=["body"])
    trained()
    built.close()
    stored = Stored(server, active)
    steps = set(range(1, 31))
    assert stored.history("sg/trip") == {step: float(step in (12, 20)) for step in steps}
    assert set(stored.history("sg/grad_norm")) == steps - {12, 20}
    assert set(stored.history("sg/layer/body")) == {10, 12, 20, 30}
    assert stored.history("sg/skipped_total")[30] == 2
    assert stored.history("sg/nonfinite_layers")[12] == 1
    for name in stored.names:
        assert all(abs(value) < 1e300 for value in map(float, stored.history(name).values())), name
    told_of_run = {name: value for name, value in stored.tags.items() if name.startswith("sg.")}
    assert told_of_run == {
        "sg.verdict": "recovered",
        "sg.trips": "2",
        "sg.worst_layer": "head",
        "sg.left_out": "sg/grad_norm 2, sg/layer/head 2",
        "sg.dropped": "0",
    }
    assert stored.files() == {"journal.jsonl", "spike_step12.json", "spike_step20.json"}
    assert told(caplog) == []


def test_steps_before_the_run_is_active_are_not_lost(server, bridge):
    built = bridge()
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, [1, 2, 3], spoil=nan_at(2))
    mlflow.set_tracking_uri(server.uri)
    with mlflow.start_run() as run:
        train(model, optimizer, [4, 5])
    built.close()
    mlflow.set_tracking_uri(None)
    assert Stored(server, run.info.run_id).history("sg/trip") == {1: 0, 2: 1, 3: 0, 4: 0, 5: 0}


def test_a_run_that_is_not_active_is_written_to_by_its_id_and_no_other_is_begun(server, bridge):
    client = mlflow.MlflowClient(tracking_uri=server.uri)
    chosen = client.create_run("0").info.run_id
    before = len(client.search_runs(["0"]))
    built = bridge(chosen, tracking_uri=server.uri)
    trained(range(1, 4), trips=[2])
    built.close()
    assert Stored(server, chosen).history("sg/trip") == {1: 0, 2: 1, 3: 0}
    assert len(client.search_runs(["0"])) == before
    assert mlflow.active_run() is None


def test_without_a_run_nothing_is_begun_and_one_line_says_so(bridge, tmp_path, caplog):
    built = bridge()
    trained(range(1, 4), trips=[2])
    built.close()
    assert mlflow.active_run() is None
    assert not (tmp_path / "mlruns").exists()
    assert not (tmp_path / "mlflow.db").exists()
    assert told(caplog) == ["MLflowBridge: no run was active during 3 steps; they are not in MLflow"]


def test_a_run_that_the_server_does_not_know_costs_one_warning_and_what_is_lost_is_counted(server, bridge, caplog):
    built = bridge("0" * 32, tracking_uri=server.uri)
    trained(range(1, 4), trips=())
    built.close()
    first, last = told(caplog)
    assert "RESOURCE_DOES_NOT_EXIST" in first
    assert "messages did not reach the server and are lost" in last


def test_a_server_that_is_killed_and_started_again_gets_everything(server, active, bridge, caplog):
    built = bridge()
    expected_state = trained()  # its steps are in the run, too
    torch.manual_seed(0)

    def kill_at_the_third_step(step):
        if step == 3:
            server.kill()

    caplog.clear()
    assert_same(trained(range(1, 31), before=kill_at_the_third_step), expected_state)
    wait_until(lambda: told(caplog))
    server.start()
    built.close()
    (warning,) = told(caplog)
    assert "the server is out of reach" in warning
    stored = Stored(server, active)
    assert set(stored.history("sg/trip")) == set(range(1, 31))
    assert stored.tags["sg.trips"] == "4"


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_closed_port_changes_no_outcome(bridge, caplog):
    expected = trained()
    torch.manual_seed(0)
    built = bridge("0" * 32, tracking_uri=f"http://127.0.0.1:{free_port()}", exit_seconds=0.2)
    assert_same(trained(), expected)
    built.close()
    first, last = told(caplog)
    assert "the server is out of reach" in first
    assert "messages did not reach the server and are lost" in last


def test_training_does_not_wait_for_a_server_that_does_not_answer(bridge, tmp_path, caplog):
    answers = threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        asked = 0

        def do_POST(self):
            Slow.asked += 1
            answers.wait(60)
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({})

        def do_GET(self):
            self._answer({"run": {"info": {"run_id": "0" * 32, "artifact_uri": str(tmp_path / "kept")}, "data": {}}})

        def _answer(self, content):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as slow:
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        built = bridge("0" * 32, tracking_uri=f"http://127.0.0.1:{slow.server_port}")
        trained(range(1, 201), trips=())
        assert Slow.asked <= 1
        answers.set()
        built.close()
        slow.shutdown()
    assert Slow.asked >= 2
    assert (tmp_path / "kept" / "stabilityguard" / "journal.jsonl").is_file()
    assert told(caplog) == []


def test_a_script_that_closes_nothing_leaves_everything_in_its_run(server):
    script = """
        import mlflow
        from stabilityguard.integrations.mlflow import MLflowBridge
        from tests.report.test_sinks import nan_at
        from tests.support import Net, guard, train
        MLflowBridge()
        print(mlflow.start_run().info.run_id)
        model = Net()
        train(model, guard(model), range(1, 5), spoil=nan_at(3))
    """
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + textwrap.dedent(script)
    environment = {**os.environ, "MLFLOW_TRACKING_URI": server.uri}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    stored = Stored(server, done.stdout.split()[0])
    assert stored.history("sg/trip") == {1: 0, 2: 0, 3: 1, 4: 0}
    assert stored.tags["sg.verdict"] == "recovered"
    assert stored.files() == {"journal.jsonl", "spike_step3.json"}


def test_the_dashboard_becomes_a_page_among_the_artifacts(server, active, bridge, monkeypatch, capsys):
    built = bridge(log_every=10, layers=["head"])
    trained(range(1, 31), trips=[12])
    built.close()
    dashboard = runpy.run_path(str(Path(__file__).parents[2] / "integrations" / "mlflow_dashboard.py"))
    monkeypatch.setattr(sys, "argv", ["mlflow_dashboard.py", active, server.uri])
    dashboard["main"]()
    assert "dashboard.html" in Stored(server, active).files()
    where = f"{server.uri}/get-artifact?path=stabilityguard/dashboard.html&run_uuid={active}"  # as MLflow's UI asks
    with urllib.request.urlopen(where, timeout=30) as answer:
        content = answer.read().decode()
    assert content.count('class="trip"') == content.count("<svg")
    for title in (
        "Gradient norm",
        "Largest ratio to the baseline",
        "Skipped steps so far",
        "Norm of head",
        "recovered",
    ):
        assert title in content


def test_the_dashboard_of_a_run_without_a_bridge_says_so(server, active):
    dashboard = runpy.run_path(str(Path(__file__).parents[2] / "integrations" / "mlflow_dashboard.py"))
    with pytest.raises(SystemExit, match="train with an MLflowBridge first"):
        dashboard["page"](mlflow.MlflowClient(tracking_uri=server.uri), active)


def test_one_spike_does_not_flatten_a_chart_and_a_lone_point_is_seen():
    dashboard = runpy.run_path(str(Path(__file__).parents[2] / "integrations" / "mlflow_dashboard.py"))
    heights, chart = dashboard["heights"], dashboard["chart"]
    assert heights([1.0, 10.0, 1000.0]) == pytest.approx([0, 1 / 3, 1])
    assert heights([0.0, 10.0, 1000.0]) == pytest.approx([0, 0.01, 1])
    assert heights([0.001, 2.0005, 4.0]) == pytest.approx([0, 0.5, 1])
    assert heights([5.0, 5.0]) == [0, 0]
    assert ">log<" in chart([(1, 1.0), (2, 1.0), (3, 1000.0)], [3], 1, 3)
    assert chart([(3, 1.0)], [], 1, 9).count("<circle") == 1


def test_names_are_put_in_characters_that_mlflow_takes():
    assert allowed("sg/layer/transformer.h.11.mlp") == "sg/layer/transformer.h.11.mlp"
    assert allowed("sg/layer/weiß[0]*") == "sg/layer/wei__0__"
    long = allowed("sg/layer/" + "block." * 100 + "head")
    assert len(long) == 250
    assert (long[:9], long[-4:]) == ("sg/layer/", "head")


@pytest.mark.parametrize(
    "options",
    [
        {"tracking_uri": "http://x"},
        {"exit_seconds": -1},
        {"exit_seconds": math.nan},
        {"log_every": -1},
        {"layers": "a"},
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options):
    with pytest.raises(ConfigurationError):
        MLflowBridge(**options)
