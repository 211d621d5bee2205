"""What all bridges have in common, on one that writes down what it gets."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from stabilityguard import Budget
from stabilityguard.integrations.bridge import Bridge
from tests.distributed.ranks import run
from tests.report.test_sinks import nan_at
from tests.support import Net, guard, train


class Notes(Bridge):
    """Writes into lists, to the run that ``open`` names."""

    def __init__(self, **options):
        super().__init__(**{"log_every": 0, "layers": (), **options})
        self.open, self.written, self.reports, self.left = "run", [], [], []

    def _find_run(self):
        return self.open

    def _enter(self):
        pass

    def _write(self, record, numbers):
        self.written.append((self._run, record.step, numbers["sg/trip"], numbers["sg/skipped_total"]))

    def _write_report(self, report):
        self.reports.append(report.record.step)

    def _leave(self):
        self.left.append((self._run, self.tally.trips))


@pytest.fixture
def notes():
    built = []

    def build(**options):
        built.append(Notes(**options))
        return built[-1]

    yield build
    for one in built:
        one.close()


def guarded():
    model = Net()
    return model, guard(model)


def test_it_hears_every_guard_from_construction_to_close(notes):
    first, second = guarded(), guarded()
    train(*first, [1])
    one = notes()
    train(*first, [2], spoil=nan_at(2))
    train(*second, [1])
    one.close()
    train(*first, [3], spoil=nan_at(3))
    assert one.written == [("run", 2, 1.0, 1.0), ("run", 1, 0.0, 1.0)]
    assert (one.reports, one.left) == ([2], [("run", 1)])


def test_runs_are_counted_apart_and_steps_between_them_belong_to_the_next(notes):
    one, model = notes(), Net()
    optimizer = guard(model, budget=Budget(consecutive_skips=10))
    for step, open_now in enumerate([None, "a", "b", "a", None, "c"], start=1):
        one.open = open_now
        train(model, optimizer, [step], spoil=nan_at(step))
    one.close()
    assert [run for run, *_ in one.written] == [None, "a", "b", "a", None, "c"]
    assert [skipped for *_, skipped in one.written] == [1, 2, 1, 3, 1, 2]
    assert one.left == [("a", 2), ("b", 1), ("a", 3), ("c", 2)]


def test_one_that_fails_is_muted_with_one_warning_for_all_guards_that_have_it_as_a_sink(notes, caplog):
    one = notes()
    one._write = lambda record, numbers: 1 / 0
    for _ in range(2):
        model = Net()
        optimizer = guard(model, sinks=[one])
        train(model, optimizer, [1, 2])
        optimizer.close()
    one.close()
    (warning,) = caplog.records
    assert warning.getMessage() == ("Notes failed and is muted from now on: ZeroDivisionError: division by zero")


def test_a_copy_in_a_forked_process_does_nothing(notes):
    one, (model, optimizer) = notes(), guarded()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        train(model, optimizer, [1])
        one.close()
        os.write(writer, pickle.dumps((one.written, one.left)))
        os._exit(0)
    os.waitpid(child, 0)
    assert pickle.loads(os.read(reader, 10_000)) == ([], [])
    os.close(reader)
    os.close(writer)
    train(model, optimizer, [1])
    assert len(one.written) == 1


def test_of_two_ranks_the_first_alone_writes_and_gives_the_spread_of_losses():
    def job(rank):
        class Losses(Notes):
            def _write(self, record, numbers):
                self.written.append(numbers["sg/loss_spread"])

        early = Losses()
        model = torch.nn.parallel.DistributedDataParallel(Net())
        optimizer = guard(model, log_dir=f"logs{rank}", sinks=[early])
        for step in range(1, 4):
            loss = model(torch.full((6, 4), float(rank + step)))
            loss.backward()
            optimizer.step(loss=torch.tensor(float(10 * rank)))
            optimizer.zero_grad()
        optimizer.close()
        return early.written, early.left

    assert run(2, job) == [([10.0] * 3, [("run", 0)]), ([], [])]


def test_a_missing_package_gives_one_sentence_with_the_command():
    code = """
import importlib, sys
for package in ("wandb", "mlflow", "tensorboard"):
    sys.modules[package] = None
    try:
        importlib.import_module(f"stabilityguard.integrations.{package}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f'{package} is not installed; run: pip install "stabilityguard[{package}]"'
        for package in ("wandb", "mlflow", "tensorboard")
    ]
