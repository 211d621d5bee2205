"""The definition of the view, as it is written and as W&B gets it."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

from stabilityguard.integrations import metrics

SCRIPT = Path(__file__).parents[2] / "integrations" / "wandb_dashboard.py"


def dashboard(*arguments, home, **settings):
    """Runs the script as a user does who has no key unless ``settings`` hold one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**kept, "HOME": str(home), "USERPROFILE": str(home), **settings}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def charts_of(spec):
    (section,) = spec["section"]["panelBankConfig"]["sections"]
    assert section["isOpen"]
    return [panel["config"] for panel in section["panels"]]


def assert_complete(spec):
    """Every metric has a chart, over the guard's own count of steps."""
    charts = charts_of(spec)
    assert {chart["xAxis"] for chart in charts} == {metrics.STEP}
    drawn = {name for chart in charts for name in chart["metrics"]}
    drawn |= {chart["metricRegex"].removesuffix(".*") for chart in charts if chart.get("useMetricRegex")}
    written = {value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)}
    assert drawn == written - {metrics.PREFIX, metrics.STEP}
    columns = spec["section"]["runSets"][0]["runFeed"]["columnPinned"]
    assert set(columns) == {"run:displayName", "summary:sg/verdict", "summary:sg/trips"}


def test_a_file_gets_the_definition_and_nobody_is_asked(tmp_path):
    done = dashboard("me/mine", "view.json", home=tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    view = json.loads((tmp_path / "view.json").read_text(encoding="utf-8"))
    assert (view["entity"], view["project"], view["displayName"]) == ("me", "mine", "StabilityGuard")
    assert_complete(view["spec"])


def test_without_a_key_the_definition_is_written_and_one_line_says_why(tmp_path):
    done = dashboard("me/mine", home=tmp_path)
    assert done.returncode == 1
    assert "it is not in W&B yet: No API key configured" in done.stderr
    assert "Traceback" not in done.stderr
    assert_complete(json.loads((tmp_path / "wandb_dashboard.json").read_text(encoding="utf-8"))["spec"])


class Answering(http.server.BaseHTTPRequestHandler):
    """Says who the user is, and takes the view."""

    saved: ClassVar[list] = []

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(content) if self.path == "/graphql" else {"query": ""}
        answer = {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if "upsertView" in asked["query"]:
            self.saved.append(asked["variables"])
            answer = {"upsertView": {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": answer}).encode())

    def log_message(self, *_):
        pass


def test_with_a_key_the_view_is_made_in_the_project(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        done = dashboard("me/mine", home=tmp_path, WANDB_BASE_URL=place, WANDB_API_KEY="a" * 40)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert f"{place}/me/mine?nw=abc" in done.stderr
    (view,) = Answering.saved
    assert (view["entityName"], view["projectName"], view["type"]) == ("me", "mine", "project-view")
    assert_complete(json.loads(view["spec"]))


def test_a_wrong_call_is_told_the_right_one(tmp_path):
    done = dashboard("mine", home=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")


def test_without_the_package_one_line_tells_the_command(tmp_path):
    (tmp_path / "wandb_workspaces.py").write_text("raise ImportError")
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = dashboard("me/mine", home=tmp_path, PYTHONPATH=places)
    assert done.returncode == 1
    assert done.stderr == 'wandb-workspaces is not installed; run: pip install "wandb[workspaces]"\n'
