"""A job that dies at a chosen moment: distributed/resumable.py with the package's own functions cut short."""

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import stabilityguard
from stabilityguard import Budget, CheckpointPolicy, GuardedOptimizer, SnapshotPolicy
from stabilityguard.demo import ranks as ranks_of_the_demo
from stabilityguard.recover import archive, writing
from stabilityguard.recover.listing import table
from stabilityguard.recover.manifest import Manifest, find
from tests.distributed import wrapped

ROOT = Path(stabilityguard.__file__).parent.parent


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


resumable = _load(ROOT / "distributed" / "resumable.py")

SIZES = ["--width", "8", "--depth", "1", "--rows", "4"]


# When to die ---------------------------------------------------------------------------------------------------------


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_a_file(writer, *_):
    """With one of this rank's files cut in the middle, as a write that was interrupted leaves it."""
    path = max(Path(writer.path).glob(f"__{dist.get_rank()}_*"))
    os.truncate(path, path.stat().st_size // 2)
    die()


def _die_removing(first):
    def remove(path, *_):
        next(Path(path).glob(first)).unlink()
        die()

    return remove


def _verified(manifest, *_):
    return manifest.state == "verified"


def _clean(manifest, *_):
    return manifest.state == "clean"


def _is_unfinished(path, *_):
    return path.name.startswith(writing.UNFINISHED)


def _retires(path, *_, **__):
    return '"clean"' in Path(path, "manifest.json").read_text()


def _marks(path, *_):
    return '"clean"' in path.read_text()


def _always(*_):
    return True


PHASES = {
    "before it begins": (Path, "mkdir", _is_unfinished, die, None),
    "before files are written": (FileSystemWriter, "write_data", _always, die, None),
    "in the middle of a file": (FileSystemWriter, "write_data", _always, None, _die_in_a_file),
    "before the metadata": (FileSystemWriter, "finish", _always, die, None),
    "after the metadata": (FileSystemWriter, "finish", _always, None, die),
    "before a digest": (writing, "describe", _always, die, None),
    "before the manifest": (Manifest, "write", _verified, die, None),
    "before the rename": (Path, "rename", _is_unfinished, die, None),
    "after the rename": (Path, "rename", _is_unfinished, None, die),
    "before it is marked": (Manifest, "write", _clean, die, None),
    "while it is marked": (Path, "replace", _marks, die, None),
    "after it is marked": (Manifest, "write", _clean, None, die),
}
"""Function, which of its calls count, and what happens before and after such a call."""

REMOVALS = {
    "files first": (shutil, "rmtree", _retires, _die_removing("*.distcp"), None),
    "manifest first": (shutil, "rmtree", _retires, _die_removing("manifest.json"), None),
}
"""The same for an old checkpoint that goes."""

ON_ANY_RANK = ("before files are written", "in the middle of a file", "before a digest")
"""Phases that all ranks come by; the others are the first rank's alone."""


def arm(phase, count=1):
    """Kills this process at the given occurrence of ``phase``."""
    owner, name, counts, before, after = (PHASES | REMOVALS)[phase]
    real, occurrences = getattr(owner, name), itertools.count(1)

    def cut_short(*arguments, **options):
        is_due = counts(*arguments) and next(occurrences) == count
        if is_due and before:
            before(*arguments)
        result = real(*arguments, **options)
        if is_due and after:
            after(*arguments)
        return result

    setattr(owner, name, cut_short)


def arm_at_random(seed, steps):
    """Kills this process within one of its next ``steps`` steps, wherever it then is."""
    draw = random.Random(seed)
    step, delay = draw.randint(1, steps), draw.uniform(0, 0.03)

    def kill_later():
        time.sleep(delay)
        die()

    at_step(step, lambda: threading.Thread(target=kill_later, daemon=True).start())


def at_step(number, action):
    """Calls ``action`` as the batch of this run's step ``number`` is drawn."""
    real, calls = resumable.draw_batch, itertools.count(1)

    def drawn(*arguments):
        if next(calls) == number:
            action()
        return real(*arguments)

    resumable.draw_batch = drawn


# What there is -------------------------------------------------------------------------------------------------------


def listing(directory):
    """What ``stabilityguard checkpoints --verify`` tells: its lines, and whether all are whole."""
    return table(Path(directory), verify=True)


def clean_steps(directory):
    """Steps of the checkpoints whose manifest says that they are clean, and whose files are what they were."""
    return {
        manifest.step
        for path, manifest in find(Path(directory))
        if isinstance(manifest, Manifest) and manifest.state == "clean" and not list(manifest.problems(path))
    }


# Under torchrun ------------------------------------------------------------------------------------------------------


def main():
    """``plan``: for each start of the ranks, who is to die where; ``hold``: a step at which a rank awaits SIGTERM.

    ``events``: what is to happen on which rank at which step, by its place in a list.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=json.loads, default=[])
    parser.add_argument("--hold", type=json.loads)
    parser.add_argument("--events", type=json.loads)
    parser.add_argument("--on-disk-alone", action="store_true")
    parser.add_argument("--notes", type=Path)
    parser.add_argument("--rollbacks", action="store_true")
    options, others = parser.parse_known_args()
    rank, start, notes = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), options.notes
    torch.set_num_threads(1)
    if options.rollbacks:
        return compare_rollbacks(notes)
    if start < len(options.plan) and options.plan[start]["rank"] == rank:
        arm(options.plan[start]["phase"], options.plan[start]["count"])
    if options.hold:
        _hold(notes, **options.hold)
    if options.events is not None:
        _Disturbance(rank, options.events, notes, on_disk_alone=options.on_disk_alone)
    elif rank == 0:
        lines, whole = listing(resumable.parse(others).checkpoints)
        (notes / f"listing_{start}").write_text(json.dumps({"lines": lines, "whole": whole}))
    try:
        resumable.main(others)
    except SystemExit as error:
        (notes / f"exit_{rank}").write_text(str(error.code))
        raise
    return 0


class _Disturbance:
    """Makes a list of events happen, and notes them, and what becomes of checkpoints, line by line.

    A rollback goes back to what was copied to RAM a few steps before, or to disk.
    """

    def __init__(self, rank, events, notes, *, on_disk_alone):
        self._rank, self._events, self._notes, self._step = rank, events, notes / "notes", 0
        snapshots = False if on_disk_alone else SnapshotPolicy(every=10, keep=3, quarantine=5)
        self._options = {"budget": Budget(rollbacks=10**6), "snapshots": snapshots}
        self._generator, self._make_trainer = resumable.generator, resumable.make_trainer
        resumable.generator, resumable.make_trainer = self._at_step, self._disturbed_trainer
        resumable.GuardedOptimizer = self._guard
        if rank == 0:
            self._follow(Manifest, "write", lambda m, _: (m.state, m.step))
            self._follow(archive.Archive, "_remove", lambda _, step: ("removed", step))

    def _note(self, *words):
        with self._notes.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def _follow(self, owner, name, words):
        real = getattr(owner, name)

        def noted(*arguments):
            result = real(*arguments)
            self._note(*words(*arguments))
            return result

        setattr(owner, name, noted)

    def _mine(self, *kinds):
        return [e for e in self._events if (e["rank"], e["step"]) == (self._rank, self._step) and e["kind"] in kinds]

    def _at_step(self, seed, step):
        self._step = step + 1
        for event in self._mine("sigterm", "kill", "kill in a save"):
            self._note("event", event["number"])
            if event["kind"] == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            elif event["kind"] == "kill":
                threading.Thread(target=lambda delay=event["delay"]: (time.sleep(delay), die()), daemon=True).start()
            else:
                arm(event["phase"])
        return self._generator(seed, step)

    def _guard(self, *arguments, **options):
        self._optimizer = GuardedOptimizer(*arguments, **options, **self._options)
        return self._optimizer

    def _disturbed_trainer(self, settings):
        trainer = self._make_trainer(settings)
        backward = trainer.backward

        def disturbed(text):
            loss = backward(text)
            for event in self._mine("nan", "spike", "veto"):
                self._note("event", event["number"])
                if event["kind"] == "veto":
                    self._optimizer.veto("a test")
                else:
                    _spoil(trainer.model, float("nan") if event["kind"] == "nan" else 1e6)
            return loss

        trainer.backward = disturbed
        return trainer


def _spoil(model, factor):
    for parameter in model.parameters():
        if parameter.grad is not None:
            wrapped.local_part(parameter.grad).mul_(factor)


def _hold(notes, step, rank):
    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: came.set())  # one of the user's own, which has to be called, too

    def wait():
        (notes / "waits").write_text(str(os.getpid()))
        while not came.is_set():
            time.sleep(0.01)

    if int(os.environ["RANK"]) == rank:
        at_step(step, wait)


# Rollbacks -----------------------------------------------------------------------------------------------------------


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


WRAPPINGS = {
    "ddp": wrapped.ddp(),
    "fsdp1": wrapped.fsdp1("FULL_SHARD", use_orig_params=True),
    "fsdp2": wrapped.fsdp2(),
    "hsdp": wrapped.hsdp(),
    "tensor parallel": wrapped.tensor_parallel(),
}


def compare_rollbacks(notes):
    """Goes back in every wrapping, and writes down what went on otherwise than in a run that was never disturbed."""
    from tests.distributed.test_rollback import train  # noqa: PLC0415 (needs pytest, which other jobs do without)

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank, ranks, told = dist.get_rank(), dist.get_world_size(), {}
    for (mode, wrap), optimizer in itertools.product(WRAPPINGS.items(), (adamw, momentum)):
        calm, _ = train(rank, ranks, wrap, optimizer, [1, 2, 3, 7, 8, 7, 8])
        places = ("ram", "disk") if ranks == 2 else ("disk",) if optimizer is adamw else ("ram",)
        for place in places:
            name = f"{mode}, {optimizer.__name__}, {place}"
            snapshots = SnapshotPolicy(every=3, keep=2, quarantine=1) if place == "ram" else False
            directory = str(notes / name.replace(", ", "_"))
            checkpoints = CheckpointPolicy(directory=directory, every=3, keep=2, quarantine=1)
            options = {"snapshots": snapshots, "checkpoints": None if snapshots else checkpoints}
            batches = [*range(1, 9), 7, 8]
            parameters, done = train(
                rank, ranks, wrap, optimizer, batches, bad={6}, nan_action="rollback", log_dir=str(notes), **options
            )
            told[name] = [done[5], all(map(torch.equal, parameters, calm))]
    (notes / f"rollbacks_{rank}").write_text(json.dumps(told))
    ranks_of_the_demo.leave()
    return 0


# In a forked rank ----------------------------------------------------------------------------------------------------


def attempt(rank, directory, options, victim, cut):
    """Trains until ``victim`` is killed by what ``cut`` arms; what the others then meet, or the result at the end."""
    os.chdir(directory)
    if rank == victim:
        cut()
    try:
        resumable.train(resumable.parse([*SIZES, "--result", "result.json", *options]))
    except RuntimeError:
        return traceback.format_exc()
    return json.loads(Path("result.json").read_text()) if rank == 0 else None


if __name__ == "__main__":
    raise SystemExit(main())
