"""One rank speaks for all."""

import contextlib
import io
import math
import os

import pytest

from tests.distributed.decisions import (
    Trainer,
    fill,
    on_rank,
)
from tests.distributed.ranks import run
from tests.distributed.wrapped import (
    ddp,
)


class Collecting:
    def __init__(self):
        self.calls = []

    def on_record(self, record):
        self.calls.append("record")

    def on_report(self, report):
        self.calls.append("report")

    def close(self):
        self.calls.append("close")


def _speaks(rank, log_dir):
    sink, out = Collecting(), io.StringIO()
    with contextlib.redirect_stdout(out):
        trainer = Trainer(ddp(), log_dir=log_dir, verbose=True, log_every=2, sinks=[sink])
        trainer.train(1)
        trainer.step(edit=on_rank(1, fill("head", math.nan)))
        trainer.guarded.close()
    return out.getvalue(), sink.calls, len(trainer.guarded.reports)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("spoken")
    return run(3, _speaks, str(log_dir)), sorted(os.listdir(log_dir))


def test_the_first_rank_prints_and_writes_for_all(spoken):
    told, files = spoken
    printed = [of_rank[0] for of_rank in told]
    assert printed[0].count("NAN DETECTED @ step 2") == 1
    assert printed[0].count("stabilityguard | step 2") == 1
    assert printed[1:] == ["", ""]
    assert files == ["journal.jsonl", "spike_step2.json"]


def test_a_users_sinks_are_fed_on_the_first_rank_and_closed_on_all(spoken):
    told, _ = spoken
    assert [of_rank[1] for of_rank in told] == [["record", "report", "record", "close"], ["close"], ["close"]]


def test_every_rank_has_the_reports_in_memory(spoken):
    told, _ = spoken
    assert [of_rank[2] for of_rank in told] == [1, 1, 1]
