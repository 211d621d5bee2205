"""The jobs that a user launches, launched: the same training under torchrun, spread over ranks in every way."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stabilityguard
from stabilityguard.cli import main
from stabilityguard.demo.settings import STRATEGIES
from tests.distributed.test_injection import needs_fsdp2

ROOT = Path(stabilityguard.__file__).parent.parent
FOLDER = ROOT / "distributed"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SMALL = ["--steps", "50", "--width", "32", "--depth", "3", "--rows", "6", "--log-dir", "logs"]

RANKS = {"ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4, "tp": 2, "fsdp2_tp": 4, "pp": 2}

ROWS = [(15, "spike", "blocks.2.mlp.up"), (25, "nan", "blocks.1.attention.out"), (35, "inf_loss", "head")]
"""Step, fault and the layer that the guard has to name."""


def launch(ranks, strategy, *options):
    """What the job prints."""
    command = [*TORCHRUN, "--nproc-per-node", str(ranks), str(FOLDER / "train.py"), "--strategy", strategy]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *SMALL, *options], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_tables(shown, ranks_named):
    """The closing tables of a run that was saved; ``ranks_named`` by the guard, for each fault."""
    named = [f"{layer} @ {rank}" for (_, _, layer), rank in zip(ROWS, ranks_named, strict=True)]
    for (step, kind, _), place in zip(ROWS, named, strict=True):
        assert re.search(rf"^ +{step}  {kind} +\S.* @ \d +{place} +(\d+x|-)$", shown, re.MULTILINE), shown
    last = shown.splitlines()[-1]
    assert last.split()[:5] == ["faults,", "guarded", "50", "47", "3"]
    assert last.endswith("  SAVED")


def check_reports(directory):
    """One report for each fault, by one rank, and one line of the journal for each step."""
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["journal.jsonl", *(f"spike_step{step}.json" for step, _, _ in ROWS)]
    assert len((directory / "journal.jsonl").read_text().splitlines()) == 50
    for step, _, layer in ROWS:
        assert json.loads((directory / f"spike_step{step}.json").read_text())["trigger"]["layer"] == layer


LAUNCHED = [
    pytest.param(s, marks=needs_fsdp2) if s in ("fsdp2", "hsdp", "fsdp2_tp") else s for s in STRATEGIES if s != "ddp"
]
"""What has no test of its own below."""

NAMED = {"fsdp1": ("0,1", "0", "1"), "pp": ("1", "0", "1")}
"""The ranks that the guard names, where it is not the first that was told to spoil: FSDP 1 has reduced gradients by
then, and in a pipeline it is the rank that holds the layer."""


@pytest.mark.parametrize("strategy", LAUNCHED)
def test_the_job_is_saved_and_every_fault_is_named(strategy, tmp_path):
    shown = launch(RANKS[strategy], strategy, "--quick")
    assert f"{RANKS[strategy]} ranks, {strategy}: {STRATEGIES[strategy]}." in shown
    assert shown.count("STABILITYGUARD — ") == 3  # by the first rank alone
    check_tables(shown, NAMED.get(strategy, ("1", "1", "1")))
    check_reports(tmp_path / "logs")


def test_the_command_line_launches_ranks_and_shows_the_run_that_dies(capfd):
    assert main(["demo", "--ranks", "3", *SMALL]) == 0
    shown = capfd.readouterr().out
    check_tables(shown, ("1", "1", "1"))
    ratio = re.search(r"^ +15  spike .* (\d+)x$", shown, re.MULTILINE)[1]
    assert 200 < int(ratio) < 700  # a thousandfold on one of three ranks
    assert "faults, no guard  step   25/50  the weights are no longer finite" in shown
    assert "died at step 25" in shown.splitlines()[-2]


def test_every_launcher_starts_the_same_file_with_options_that_it_has():
    for name in ("README.md", "slurm.sbatch", "kubernetes.yaml"):
        text = (FOLDER / name).read_text()
        assert "torchrun" in text
        (job,) = set(re.findall(r"distributed/train\.py --strategy (\w+)", text))
        assert job in STRATEGIES
        assert "--nproc-per-node" in text


needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.cuda
@needs_gpus
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_job_is_saved_on_gpus(strategy, tmp_path):
    if torch.cuda.device_count() < RANKS[strategy]:
        pytest.skip(f"needs {RANKS[strategy]} GPUs")
    check_tables(launch(RANKS[strategy], strategy), NAMED.get(strategy, ("1", "1", "1")))
    check_reports(tmp_path / "logs")
