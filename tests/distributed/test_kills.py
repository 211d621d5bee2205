"""Jobs as users launch them, killed and stopped at any moment: started again, they end as if nothing had happened."""

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed.killed_job import (
    ON_ANY_RANK,
    PHASES,
    REMOVALS,
    ROOT,
    SIZES,
    WRAPPINGS,
    arm,
    arm_at_random,
    attempt,
    clean_steps,
    listing,
)
from tests.distributed.ranks import Died, run
from tests.distributed.test_injection import needs_fsdp2

STEPS, KEEP = 60, 3
PATIENCE = 240
"""Seconds after which a launched job counts as hung."""

pytestmark = [needs_fsdp2, pytest.mark.timeout(300)]

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else ranks that torchrun starts again can find each other at the addresses of those that have died, and hang."""

IN_BOTH_WAYS = pytest.mark.parametrize(("strategy", "asynchronous"), [("ddp", False), ("fsdp2", True)])


def options_for(strategy, *, steps=STEPS, asynchronous=False):
    background = ["--asynchronous"] if asynchronous else []
    return ["--strategy", strategy, "--steps", str(steps), "--every", "3", "--quarantine", "2", *background]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The result of a run that nothing happens to, by strategy; it writes no checkpoint."""

    @functools.cache
    def result(strategy):
        options = [*options_for(strategy), "--every", "1000"]
        return run(2, attempt, tmp_path_factory.mktemp("calm"), options, None, None)[0]

    return result


def assert_ended_like(result, expected):
    assert result["start"] > 0
    assert result["losses"] == expected["losses"][result["start"] :]
    assert result["digests"] == expected["digests"]


def assert_whole(directory):
    lines, whole = listing(directory)
    assert whole, "\n".join(lines)


# Killed, rank by rank ------------------------------------------------------------------------------------------------


class Job:
    """One job that is started again and again in the same directory."""

    def __init__(self, directory, capfd, strategy, *, asynchronous):
        self.checkpoints = directory / "sg_checkpoints"
        self._directory, self._capfd = directory, capfd
        self._options = options_for(strategy, asynchronous=asynchronous)

    def begin(self):
        run(2, attempt, self._directory, [*self._options, "--steps", "15"], None, None)
        assert clean_steps(self.checkpoints)
        self._capfd.readouterr()

    def killed(self, victim, cut):
        """Goes on until ``victim`` is killed, and looks at what that has left."""
        before = clean_steps(self.checkpoints)
        told = run(2, attempt, self._directory, self._options, victim, cut)
        assert told[victim] == Died(-signal.SIGKILL), told
        assert "RuntimeError" in told[1 - victim], told
        assert re.findall(r"Goes on from step (\d+)", self._capfd.readouterr().out) == [str(max(before))]
        after = clean_steps(self.checkpoints)
        assert set(sorted(before | after)[-KEEP:]) <= after

    def finish(self):
        return run(2, attempt, self._directory, self._options, None, None)[0]


@IN_BOTH_WAYS
def test_a_rank_killed_at_any_phase_of_a_save_costs_no_clean_checkpoint(strategy, asynchronous, calm, tmp_path, capfd):
    job, draw = Job(tmp_path, capfd, strategy, asynchronous=asynchronous), random.Random(strategy)
    job.begin()
    for phase in PHASES:
        victim = draw.choice((0, 1)) if phase in ON_ANY_RANK else 0
        job.killed(victim, functools.partial(arm, phase, draw.choice((1, 2))))
        assert_whole(job.checkpoints)
    assert_ended_like(job.finish(), calm(strategy))
    assert_whole(job.checkpoints)
    assert not list(job.checkpoints.glob(".*"))


@pytest.mark.parametrize("order", REMOVALS)
def test_a_checkpoint_whose_removal_was_cut_short_is_not_left_behind_as_a_broken_one(order, tmp_path, capfd):
    job = Job(tmp_path, capfd, "ddp", asynchronous=False)
    job.begin()
    job.killed(0, functools.partial(arm, order))
    job.finish()
    assert max(clean_steps(job.checkpoints)) >= STEPS - 6
    assert_whole(job.checkpoints)


@pytest.mark.parametrize(("strategy", "asynchronous"), [("ddp", True), ("fsdp2", False)])
def test_ranks_killed_at_random_moments_change_nothing(strategy, asynchronous, calm, tmp_path, capfd):
    job = Job(tmp_path, capfd, strategy, asynchronous=asynchronous)
    job.begin()
    for seed in range(5):
        job.killed(seed % 2, functools.partial(arm_at_random, seed, steps=12))
        assert_whole(job.checkpoints)
    assert_ended_like(job.finish(), calm(strategy))


# Launched ------------------------------------------------------------------------------------------------------------


def start(ranks, directory, *arguments, restarts=0):
    """Starts torchrun on that many ranks; its output goes to files in ``directory``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **OWN_STORE}
    with (directory / "output").open("w") as output:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT)


def end(process, directory):
    """Its exit code and what it printed; a job that does not end is a failure."""
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()  # it kills its ranks, which it has put in sessions of their own
        process.wait()
        raise AssertionError(f"the job hangs: {(directory / 'output').read_text()}") from None
    return code, (directory / "output").read_text()


def killed_job(directory, *arguments):
    return ["-m", "tests.distributed.killed_job", "--notes", str(directory), *arguments]


def go_on(ranks, directory, options):
    """Launches the example itself to its end, and returns its result."""
    job = [str(ROOT / "distributed" / "resumable.py"), *SIZES, *options, "--result", "result.json"]
    code, shown = end(start(ranks, directory, *job), directory)
    assert code == 0, shown
    return json.loads((directory / "result.json").read_text())


def test_torchrun_brings_a_job_back_of_which_a_rank_has_died(calm, tmp_path):
    plan = [{"rank": 1, "phase": "before a digest", "count": 4}]
    arguments = killed_job(tmp_path, "--plan", json.dumps(plan), *SIZES, *options_for("fsdp2", asynchronous=True))
    code, shown = end(start(2, tmp_path, *arguments, "--result", "result.json", restarts=1), tmp_path)
    assert code == 0, shown
    assert_ended_like(json.loads((tmp_path / "result.json").read_text()), calm("fsdp2"))
    assert "Starts anew" in shown
    lines, whole = json.loads((tmp_path / "listing_1").read_text()).values()
    assert whole, "\n".join(lines)


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, (path.parent / "output").read_text()
        time.sleep(0.05)
    return int(path.read_text())


@pytest.mark.parametrize(("strategy", "to"), [("ddp", "rank"), ("fsdp2", "agent")])
def test_sigterm_ends_all_ranks_with_a_checkpoint_of_the_step(strategy, to, calm, tmp_path):
    options = options_for(strategy, asynchronous=to == "agent")
    hold = json.dumps({"step": 20, "rank": 1})
    process = start(2, tmp_path, *killed_job(tmp_path, "--hold", hold, *SIZES, *options))
    rank = wait_for(tmp_path / "waits", process)
    os.kill(rank if to == "rank" else process.pid, signal.SIGTERM)
    code, shown = end(process, tmp_path)
    assert code != 0
    assert [(tmp_path / f"exit_{rank}").read_text() for rank in (0, 1)] == ["143", "143"], shown
    assert to == "agent" or "exitcode  : 143" in shown
    lines, whole = listing(tmp_path / "sg_checkpoints")
    assert whole, "\n".join(lines)
    assert re.match(r" +20 .* written as the run was stopped$", lines[-1]), "\n".join(lines)
    result = go_on(2, tmp_path, options)
    assert result["start"] == 20
    assert_ended_like(result, calm(strategy))


def test_a_job_goes_on_with_another_number_of_ranks(calm, tmp_path):
    for ranks, steps, begins in ((2, 20, 0), (4, 32, 18), (1, 44, 30)):
        result = go_on(ranks, tmp_path, options_for("fsdp2", steps=steps))
        assert result["start"] == begins
        assert result["losses"] == pytest.approx(calm("fsdp2")["losses"][begins:steps], rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_job_that_has_gone_back_goes_on_like_one_that_was_never_disturbed(ranks, tmp_path):
    code, shown = end(start(ranks, tmp_path, *killed_job(tmp_path, "--rollbacks")), tmp_path)
    assert code == 0, shown
    for rank in range(ranks):
        told = json.loads((tmp_path / f"rollbacks_{rank}").read_text())
        assert len(told) == len(WRAPPINGS) * (4 if ranks == 2 else 2)
        assert all(outcome == [["rollback", 3], True] for outcome in told.values()), told
