"""Checkpoints over ranks when something breaks on one of them: all ranks see the same, and nothing live is touched."""

import contextlib
import copy
import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from stabilityguard import CheckpointError, CheckpointPolicy, GradientSpikeError, GuardedOptimizer
from tests.distributed import wrapped
from tests.distributed.ranks import run
from tests.distributed.test_rollback import plain
from tests.support import assert_same, refusal

RANKS = 2


class Notes:
    """Anything that is tracked."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Gate:
    """A value that no process can write down before the gate opens; copies are the gate itself."""

    def __init__(self, *, is_open=False):
        self.opened = threading.Event()
        if is_open:
            self.opened.set()

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        assert self.opened.wait(30)
        return int, (7,)


class Trainer:
    """One rank's part of a training; ``step`` counts from 1, and a ``bad`` one has a NaN on rank 1."""

    def __init__(self, rank, directory, wrap=None, *, track=None, optimizer=plain, **options):
        self.rank = rank
        self.model = (wrapped.fsdp2() if wrap is None else wrap)(wrapped.make())
        self.base = optimizer(self.model)
        defaults = {"every": 2, "keep": 3, "quarantine": 1, "asynchronous": False}
        policy = {name: options.pop(name, value) for name, value in defaults.items()}
        self.guarded = GuardedOptimizer(
            self.base,
            self.model,
            checkpoints=CheckpointPolicy(directory=str(directory), **policy),
            track=track,
            **{"verbose": False, "nan_action": "rollback", "snapshots": False, **options},
        )
        self.warnings = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warnings.append(record.getMessage())
        logging.getLogger("stabilityguard").handlers = [handler]

    @property
    def archive(self):
        return self.guarded._guard._checkpoints.archive

    def step(self, number, *, bad=False, waits=True):
        self.guarded.zero_grad()
        rows = wrapped.rows(number, self.rank, RANKS)
        self.model(rows * torch.nan if bad and self.rank == 1 else rows).backward()
        self.guarded.step()
        if waits:
            self.archive.wait()
        return self.guarded.last_record

    def steps(self, numbers, **options):
        return [self.step(number, **options) for number in numbers]

    def state(self):
        """Copies of what this rank holds of parameters and optimizer state, with the hyperparameters."""
        entries = [
            {name: _local(value) for name, value in self.base.state.get(parameter, {}).items()}
            for parameter in self.model.parameters()
        ]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.base.param_groups]
        return [_local(parameter) for parameter in self.model.parameters()], entries, copy.deepcopy(settings)


def _local(value):
    return wrapped.local_part(value).detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def names(directory):
    """What lies there, but for reports."""
    return sorted(path.name for path in directory.iterdir() if path.name != "sg_logs")


def step_names(*steps):
    return [f"step_{step:08d}" for step in steps]


def together(trainer):
    """Waits until all ranks are here."""
    torch.distributed.barrier()
    return trainer


# Writing fails on one rank -------------------------------------------------------------------------------------------


def only_small_files():
    """From here on no file of this process may grow beyond a few kilobytes; returns what lifts that again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("full", [0, 1], ids=lambda rank: f"full on rank {rank}")
def test_a_disk_that_is_full_for_one_rank_costs_one_checkpoint_and_one_warning(full, asynchronous, tmp_path):
    def job(rank):
        trainer = Trainer(rank, tmp_path, asynchronous=asynchronous)
        records = trainer.steps([1, 2])
        lift = only_small_files() if rank == full else lambda: None
        records += trainer.steps([3])
        lift()
        records += trainer.steps([4])
        seen = names(tmp_path)
        records += trainer.steps([5, 6, 7, 8, 9])
        trainer.guarded.close()
        return trainer.warnings, seen, [wrapped.in_full(record) for record in records], trainer.state()

    def without(rank):
        trainer = Trainer(rank, tmp_path / "other")
        trainer.steps(range(1, 10))
        return trainer.state()

    (warnings, seen, records, first), (silence, _, others, second) = run(RANKS, job)
    assert len(warnings) == 1
    assert "checkpoint of step 2 failed" in warnings[0]
    assert f"rank {full}" in warnings[0]
    assert silence == []
    assert seen == []
    assert records == others
    assert names(tmp_path) == step_names(4, 6, 8)
    for state, expected in zip((first, second), run(RANKS, without), strict=True):
        assert_same(state, expected)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own that holds 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_training_goes_on_while_the_disk_is_full_and_checkpoints_once_it_is_not(asynchronous, small_disk):
    def job(rank):
        trainer = Trainer(rank, small_disk, asynchronous=asynchronous)
        trainer.steps([1, 2, 3, 4])
        together(trainer)
        filler = small_disk / f"filler_{rank}"
        _fill(filler)
        records = together(trainer).steps([5, 6, 7])
        filler.unlink()
        together(trainer)
        seen, bad = names(small_disk), together(trainer).step(8, bad=True)
        records += trainer.steps([9, 10, 11])
        return trainer.warnings, seen, [record.action for record in records], (bad.action, bad.restored_step)

    (warnings, seen, actions, restored), (silence, *others) = run(RANKS, job)
    failed = [warning.partition(" failed")[0] for warning in warnings]
    assert failed == ["the checkpoint of step 4", "the checkpoint of step 6"]
    assert all("No space left" in warning for warning in warnings)
    assert silence == []
    assert [seen, actions, restored] == others == [step_names(2), ["step"] * 6, ("rollback", 2)]
    assert names(small_disk) == step_names(2, 10)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_on_a_disk_that_has_become_read_only_training_goes_on_and_goes_back(asynchronous, small_disk):
    def job(rank):
        trainer = Trainer(rank, small_disk, asynchronous=asynchronous)
        actions = [record.action for record in trainer.steps([1, 2, 3, 4])]
        together(trainer)
        if rank == 0:
            _remount(small_disk, "ro")
        actions += [record.action for record in together(trainer).steps([5, 6, 7])]
        bad = trainer.step(8, bad=True)
        together(trainer)
        if rank == 0:
            _remount(small_disk, "rw")
        return trainer.warnings, actions, (bad.action, bad.restored_step)

    (warnings, actions, restored), (silence, *others) = run(RANKS, job)
    assert warnings
    assert all("Read-only file system" in warning for warning in warnings)
    assert silence == []
    assert [actions, restored] == others == [["step"] * 7, ("rollback", 2)]


def test_a_directory_that_cannot_be_written_to_is_refused_on_all_ranks(small_disk):
    _remount(small_disk, "ro")
    told = run(RANKS, lambda rank: refusal(lambda: Trainer(rank, small_disk / "checkpoints")))
    _remount(small_disk, "rw")
    assert told[0] == told[1]
    assert "Read-only file system" in told[0]


def _remount(path, how):
    subprocess.run(["mount", "-o", f"remount,{how}", path], check=True)


def _fill(path):
    """With zeros, until there is no room left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_one_rank_cannot_serialize_costs_the_checkpoint_alone(asynchronous, tmp_path):
    def job(rank):
        notes = Notes()
        trainer = Trainer(rank, tmp_path, track={"notes": notes}, asynchronous=asynchronous)
        trainer.steps([1])
        notes.value = (lambda: 0) if rank == 1 else 0
        trainer.steps([2, 3])
        notes.value = 5
        actions = [record.action for record in trainer.steps([4, 5, 6, 7])]
        trainer.guarded.close()
        return trainer.warnings, actions

    (warnings, actions), (silence, others) = run(RANKS, job)
    assert [warning.partition(" failed")[0] for warning in warnings] == ["the checkpoint of step 2"]
    assert "rank 1" in warnings[0]
    assert silence == []
    assert actions == others == ["step"] * 4
    assert names(tmp_path) == step_names(4, 6)


def test_what_one_rank_cannot_copy_costs_the_checkpoint_alone(tmp_path):
    def job(rank):
        notes = Notes()
        trainer = Trainer(rank, tmp_path, track={"notes": notes})
        notes.value = threading.Lock() if rank == 1 else 0
        trainer.steps([1, 2, 3])
        notes.value = 5
        actions = [record.action for record in trainer.steps([4, 5])]
        trainer.guarded.close()
        return trainer.warnings, actions

    (warnings, actions), (silence, others) = run(RANKS, job)
    assert [warning.partition(" failed")[0] for warning in warnings] == ["the checkpoint of step 2"]
    assert silence == []
    assert actions == others == ["step"] * 2
    assert names(tmp_path) == step_names(4)


def test_moments_that_are_not_finite_on_one_rank_are_never_kept(tmp_path):
    def job(rank):
        trainer = Trainer(rank, tmp_path)

        def overwrite_moment(value):
            def hook(optimizer, *_):
                if rank == 1 and trainer.guarded._guard.steps + 1 == (4 if value else 5):
                    trainer.base.state[trainer.model.inp.weight]["exp_avg"]._local_tensor[0, 0] = value

            return hook

        trainer.base.register_step_post_hook(overwrite_moment(torch.inf))
        trainer.base.register_step_pre_hook(overwrite_moment(0.0))
        actions = [record.action for record in trainer.steps(range(1, 8))]
        return trainer.warnings, actions

    (warnings, actions), (silence, others) = run(RANKS, job)
    assert [warning.partition(" failed")[0] for warning in warnings] == ["the checkpoint of step 4"]
    assert "optimizer.state.inp.weight.exp_avg has 1 elements that are NaN or Inf" in warnings[0]
    assert silence == []
    assert actions == others == ["step"] * 7
    assert names(tmp_path) == step_names(2, 6)


def test_what_lies_in_the_place_of_a_new_checkpoint_is_not_replaced(tmp_path):
    path = tmp_path / "step_00000002"

    def job(rank):
        trainer = Trainer(rank, tmp_path)
        trainer.steps([1])
        if rank == 0:
            path.mkdir()
            (path / "mine").write_text("old")
        actions = [record.action for record in together(trainer).steps([2, 3, 4, 5, 6])]
        return trainer.warnings, actions

    (warnings, actions), (silence, others) = run(RANKS, job)
    assert len(warnings) == 1
    assert "step_00000002 exists" in warnings[0]
    assert silence == []
    assert actions == others == ["step"] * 5
    assert (path / "mine").read_text() == "old"
    assert names(tmp_path) == step_names(2, 4)


def test_a_new_checkpoint_whose_name_is_refused_costs_that_one_on_all_ranks(tmp_path, monkeypatch):
    real, refusals = Path.rename, iter([OSError(errno.EDQUOT, "Disk quota exceeded")])

    def rename(path, target):
        if Path(target).name == "step_00000004" and (error := next(refusals, None)):
            raise error
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)

    def job(rank):
        trainer = Trainer(rank, tmp_path)
        actions = [record.action for record in trainer.steps(range(1, 6))]
        trainer.guarded.close()
        second = Trainer(rank, tmp_path)
        return trainer.warnings, actions, second.guarded.resume().step

    (warnings, actions, step), (silence, others, same) = run(RANKS, job)
    assert len(warnings) == 1
    assert "Disk quota exceeded" in warnings[0]
    assert silence == []
    assert actions == others == ["step"] * 5
    assert step == same == 2
    assert names(tmp_path) == step_names(2)


# Directories ---------------------------------------------------------------------------------------------------------


def test_directories_that_differ_over_ranks_are_refused_on_all(tmp_path):
    def job(rank):
        return refusal(lambda: Trainer(rank, tmp_path / f"of {rank}"))

    told = run(RANKS, job)
    assert told[0] == told[1]
    assert "differs over ranks" in told[0]
    assert "checkpoints" in told[0]


def test_a_directory_that_the_ranks_do_not_share_is_refused_on_all(tmp_path):
    def job(rank):
        here = tmp_path / f"machine {rank}"
        here.mkdir()
        os.chdir(here)
        return refusal(lambda: Trainer(rank, "checkpoints"))

    told = run(RANKS, job)
    assert told[0] == told[1]
    assert "needs a directory that all ranks share" in told[0] or "need a directory that all ranks share" in told[0]
    assert "[1]" in told[0]
    assert names(tmp_path / "machine 0" / "checkpoints") == []


def test_a_directory_that_is_a_file_is_refused_on_all(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")

    def job(rank):
        return refusal(lambda: Trainer(rank, file))

    told = run(RANKS, job)
    assert told[0] == told[1]
    assert "CheckpointPolicy.directory" in told[0]
    assert file.read_text() == "mine"


# Damaged files -------------------------------------------------------------------------------------------------------


def shard_of_rank_1(path):
    return next(file for file in path.iterdir() if file.name.startswith("__1_"))


def truncate(path):
    file = shard_of_rank_1(path)
    os.truncate(file, file.stat().st_size // 2)


def flip(path):
    file = shard_of_rank_1(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def delete_shard(path):
    shard_of_rank_1(path).unlink()


def delete_manifest(path):
    (path / "manifest.json").unlink()


def garble_manifest(path):
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:-40])


def forge_manifest(path):
    """As valid JSON that is none of ours."""
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": []}))


def delete_metadata(path):
    (path / ".metadata").unlink()


def delete_all(path):
    shutil.rmtree(path)


DAMAGES = [
    truncate,
    flip,
    delete_shard,
    delete_manifest,
    garble_manifest,
    forge_manifest,
    delete_metadata,
    delete_all,
]
KINDS = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)


def on_the_first(rank, directory, damage, *steps):
    """All ranks wait until the first has damaged these checkpoints."""
    torch.distributed.barrier()
    for name in step_names(*steps) if rank == 0 else ():
        damage(directory / name)
    torch.distributed.barrier()


@KINDS
def test_ranks_fall_back_together_to_the_target_before_a_damaged_one(damage, tmp_path):
    def job(rank):
        trainer = Trainer(rank, tmp_path)
        trainer.steps([1, 2])
        expected = trainer.state()
        trainer.steps([3, 4, 5, 6])
        on_the_first(rank, tmp_path, damage, 4)
        record = trainer.step(7, bad=True)
        assert_same(trainer.state(), expected)
        return trainer.warnings, (record.action, record.restored_step), trainer.step(8).action

    (warnings, *did), (silence, *others) = run(RANKS, job)
    assert did == others == [("rollback", 2), "step"]
    assert [warning.partition(" cannot")[0] for warning in warnings] == ["the checkpoint of step 4"]
    assert silence == []


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("damage", [flip, delete_manifest, delete_all], ids=lambda damage: damage.__name__)
def test_without_a_readable_target_all_ranks_raise_and_can_train_on(damage, asynchronous, tmp_path):
    def job(rank):
        notes = Notes()
        trainer = Trainer(rank, tmp_path, asynchronous=asynchronous, track={"notes": notes})
        trainer.steps([1, 2, 3, 4, 5, 6])
        on_the_first(rank, tmp_path, damage, 2, 4)
        before, notes.value = trainer.state(), 9
        with pytest.raises(GradientSpikeError) as raised:
            trainer.step(7, bad=True)
        assert_same(trainer.state(), before)
        assert notes.value == 9
        records = trainer.steps([8, 9, 10])
        rollback = trainer.step(11, bad=True)
        told = raised.value.step, raised.value.layer, [(r.action, r.restored_step) for r in [*records, rollback]]
        trainer.guarded.close()
        return told

    first, second = run(RANKS, job)
    assert first == second
    assert first[0] == 7
    assert first[2] == [*[("step", None)] * 3, ("rollback", 9)]


@KINDS
def test_a_new_run_on_other_ranks_falls_back_to_the_checkpoint_before_a_damaged_one(damage, tmp_path):
    def first(rank):
        trainer = Trainer(rank, tmp_path)
        trainer.steps([1, 2, 3, 4, 5, 6])
        trainer.guarded.close()

    def second(rank):
        trainer = Trainer(rank, tmp_path)
        on_the_first(rank, tmp_path, damage, 4)
        resumed = trainer.guarded.resume()
        actions = [record.action for record in trainer.steps([3, 4, 5])]
        trainer.guarded.close()
        return resumed.step, actions, trainer.state()

    def whole(rank):
        trainer = Trainer(rank, tmp_path / "whole")
        trainer.steps([1, 2, 3, 4, 5])
        return trainer.state()

    def job(rank):
        first(rank)
        return second(rank), whole(rank)

    for (step, actions, state), expected in run(RANKS, job):
        assert (step, actions) == (2, ["step"] * 3)
        assert_same(state, expected)


@pytest.mark.parametrize("damage", [truncate, garble_manifest], ids=lambda damage: damage.__name__)
def test_a_new_run_that_can_read_nothing_is_told_so_on_all_ranks_and_keeps_its_state(damage, tmp_path):
    def job(rank):
        Trainer(rank, tmp_path).steps([1, 2, 3, 4, 5, 6])
        on_the_first(rank, tmp_path, damage, 2, 4)
        notes = Notes(3)
        trainer = Trainer(rank, tmp_path, optimizer=momentum, track={"notes": notes})
        before = trainer.state()
        with pytest.raises(CheckpointError) as raised:
            trainer.guarded.resume()
        assert_same(trainer.state(), before)
        return str(raised.value), notes.value

    first, second = run(RANKS, job)
    assert first == second
    assert first[1] == 3


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


# Late, in flight, and what it all costs ------------------------------------------------------------------------------


def test_checkpoints_that_are_due_while_one_is_written_are_left_out_and_told_once_each(tmp_path):
    def job(rank):
        gate, notes = Gate(), Notes()
        trainer = Trainer(rank, tmp_path, track={"notes": notes}, asynchronous=True)
        notes.value = gate if rank == 1 else 0
        records = trainer.steps([1, 2, 3, 4, 5, 6, 7], waits=False)
        notes.value = 0
        gate.opened.set()
        together(trainer).archive.wait()
        records += trainer.steps([8, 9, 10])
        trainer.guarded.close()
        return trainer.warnings, [wrapped.in_full(record) for record in records]

    (warnings, records), (silence, others) = run(RANKS, job)
    assert [warning.partition(":")[0] for warning in warnings] == [
        "no checkpoint of step 4",
        "no checkpoint of step 6",
    ]
    assert silence == []
    assert records == others
    assert names(tmp_path) == step_names(2, 8)


def test_a_rollback_to_disk_while_a_checkpoint_is_written_on_one_rank_is_exact(tmp_path):
    def job(rank):
        gate, notes = Gate(), Notes()
        trainer = Trainer(rank, tmp_path, track={"notes": notes}, asynchronous=True)
        trainer.steps([1, 2])
        expected = trainer.state()
        trainer.steps([3])
        notes.value = gate if rank == 0 else 1
        trainer.steps([4])
        trainer.step(5, waits=False)
        opening = threading.Timer(0.5, gate.opened.set)
        opening.start()
        record = trainer.step(6, bad=True, waits=False)
        assert_same(trainer.state(), expected)
        opening.join()
        actions = [record.action for record in trainer.steps([7, 8, 9, 10])]
        trainer.guarded.close()
        return (record.action, record.restored_step), actions, trainer.warnings

    assert run(RANKS, job) == [(("rollback", 2), ["step"] * 4, [])] * RANKS
    assert step_names(4)[0] not in names(tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_healthy_step_makes_one_collective_also_when_a_checkpoint_settles(asynchronous, tmp_path):
    def job(rank):
        trainer = Trainer(rank, tmp_path, wrapped.ddp(), every=4, asynchronous=asynchronous)
        seen = []
        for number in range(1, 9):
            trainer.guarded.zero_grad()
            trainer.model(wrapped.rows(number, rank, RANKS)).backward()
            seen.append(wrapped.collectives_of(trainer.guarded))
            trainer.archive.wait()
        trainer.guarded.close()
        return [len(of_step) for of_step in seen], trainer.archive.catalogue.newest

    for counts, newest in run(RANKS, job):
        assert newest == 4
        assert asynchronous or counts[4] > 1
        assert [*counts[:4], *counts[5:]] == [1] * 7
