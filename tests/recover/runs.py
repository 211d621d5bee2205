"""Guarded runs with checkpoints on disk, in one process, and what may befall their files."""

import contextlib
import copy
import os
import random
import resource
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from stabilityguard import CheckpointPolicy
from stabilityguard.recover.manifest import find
from tests.recover.test_rollback import OPTIMIZERS, NoisyNet
from tests.support import Net, batch, guard, snapshot


class Rows:
    """Batches in a row, and how many of them were drawn."""

    def __init__(self):
        self.at = 0

    def draw(self):
        self.at += 1
        return batch(self.at)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Run:
    """One guarded run; ``to(step)`` trains until so many steps were made."""

    def __init__(self, directory=None, *, seed=0, make=NoisyNet, base="adamw foreach", track=(), **options):
        for plant in (torch.manual_seed, random.seed, np.random.seed):
            plant(seed)
        self.model, self.rows = make(), Rows()
        self.base = OPTIMIZERS[base](self.model.parameters()) if isinstance(base, str) else base(self.model)
        self.scheduler = LambdaLR(self.base, lambda step: 1 / (1 + step))
        policy = {"directory": str(directory), "every": 3, "keep": 2, "quarantine": 1}
        policy.update({name: options.pop(name) for name in (*policy, "asynchronous") if name in options})
        self.directory, self.asynchronous = directory, policy.get("asynchronous", False)
        checkpoints = CheckpointPolicy(**policy) if directory is not None else None
        self.tracked = {"scheduler": self.scheduler, "dataloader": self.rows, **dict(track)}
        options = {"checkpoints": checkpoints, "track": self.tracked, "snapshots": False, **options}
        self.optimizer = guard(self.model, self.base, **options)

    @property
    def done(self):
        return self.optimizer.state_dict()["stabilityguard"]["steps"]

    def loss(self):
        return self.model(self.rows.draw())

    def step(self, *, spoil=None):
        self.optimizer.zero_grad()
        self.loss().backward()
        if spoil is not None:
            next(self.model.parameters()).grad.fill_(spoil)
        self.optimizer.step()
        self.scheduler.step()

    def to(self, last):
        while self.done < last:
            self.step()
            if self.asynchronous:
                finish_writing()
        return self

    def state(self):
        """All that a run goes on from."""
        tracked = {name: copy.deepcopy(stateful.state_dict()) for name, stateful in self.tracked.items()}
        parts = snapshot(self.model, self.base), tracked, self.optimizer.state_dict()["stabilityguard"]
        return *parts, draws()

    def resumed(self):
        resumed = self.optimizer.resume()
        return None if resumed is None else resumed.step


def finish_writing():
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint of step"):
            thread.join()


def draws():
    """The next random numbers, without drawing them."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn = torch.rand(2), random.random(), np.random.rand(2).tolist()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    return drawn


def lying_in(directory):
    """The checkpoints in ``directory`` by step, and what they have proved; nothing else may lie there."""
    found = {manifest.step: manifest.state for _, manifest in find(directory)}
    assert sorted(os.listdir(directory)) == [f"step_{step:08d}" for step in found]
    return found


def path_of(directory, step):
    return directory / f"step_{step:08d}"


def damage(directory, step):
    file = next(path_of(directory, step).glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@contextlib.contextmanager
def a_full_disk(size=600):
    """No file can grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def hearing_interrupts():
    """SIGINT raises KeyboardInterrupt, also in a background job of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Tied(Net):
    """The same parameter in two modules, like an embedding and the layer before the loss."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 8)
        self.other.weight = self.body.weight

    def forward(self, x):
        return super().forward(x) + self.other(x).square().mean()


def loaded_by_torch(path, model):
    loaded = {"model": model.state_dict()}
    dcp.load(loaded, checkpoint_id=path)
    return dict(loaded["model"])


class Trap:
    def __init__(self, does):
        self.does = does

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        if self.does is not None:
            self.does()
        return Trap, (None,)


class Deadly:
    """A tracked object whose state does something when it is pickled, in the checkpoint of one step."""

    def __init__(self, at, does=lambda: os.kill(os.getpid(), signal.SIGKILL)):
        self.calls, self.at, self.does = 0, at, does

    def state_dict(self):
        self.calls += 1
        return Trap(self.does if self.calls >= 2 * self.at / 3 - 1 else None)

    def load_state_dict(self, state):
        pass


def rolling(directory, **options):
    return Run(directory, **{"nan_action": "rollback", **options})


def spoiled(run):
    """A bad step; the step it went back to."""
    run.step(spoil=torch.nan)
    return run.optimizer.last_record.restored_step
