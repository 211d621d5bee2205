"""Guarded runs with checkpoints on disk, in one process: killed, stopped, spoiled, and gone on from."""

import contextlib
import copy
import logging
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stabilityguard import (
    Budget,
    CheckpointError,
    CheckpointPolicy,
    ConfigurationError,
    GradientSpikeError,
    SnapshotPolicy,
)
from stabilityguard.cli import main
from stabilityguard.recover.manifest import find
from tests.recover.test_rollback import OPTIMIZERS, NoisyNet
from tests.support import Growing, Net, NormNet, assert_same, batch, guard, snapshot


@pytest.fixture(autouse=True)
def _handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


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


# What lies in the directory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("quarantine", "expected"),
    [
        (0, {3: {}, 4: {3: "clean"}, 7: {3: "clean", 6: "clean"}, 10: {6: "clean", 9: "clean"}}),
        (1, {3: {}, 4: {3: "clean"}, 7: {3: "clean", 6: "clean"}, 10: {6: "clean", 9: "clean"}}),
        (2, {4: {3: "verified"}, 5: {3: "clean"}, 10: {3: "clean", 6: "clean", 9: "verified"}, 11: {6: "clean"}}),
    ],
)
def test_checkpoints_are_written_proved_and_kept(directory, quarantine, expected, asynchronous):
    run = Run(directory, quarantine=quarantine, asynchronous=asynchronous)
    for step, states in expected.items():
        run.to(step + asynchronous)  # what was written in the background is noted one step later
        found = lying_in(directory)
        assert {step: found.get(step) for step in states} == states
        assert len(found) <= 3
    run.optimizer.close()


def test_steps_that_were_not_applied_do_not_count(directory):
    run = Run(directory)
    for step in range(1, 8):
        run.step(spoil=torch.nan if step in (2, 5, 6) else None)
    assert lying_in(directory) == {4: "clean"}


def test_a_manifest_tells_what_was_written(directory):
    run = Run(directory, make=Net).to(4)
    manifest = dict(find(directory))[path_of(directory, 3)]
    assert (manifest.world_size, manifest.torch, manifest.stopped) == (1, torch.__version__, False)
    assert manifest.elements == sum(3 * p.numel() + 1 for p in run.model.parameters())
    assert set(manifest.files) == set(os.listdir(path_of(directory, 3))) - {"manifest.json"}


def test_the_command_finds_them_whole(directory, capsys):
    Run(directory).to(7)
    assert main(["checkpoints", "--verify", str(directory)]) == 0
    assert capsys.readouterr().out.count("clean") == 2
    damage(directory, 3)
    assert main(["checkpoints", "--verify", str(directory)]) == 1


def test_training_with_checkpoints_is_bit_for_bit_what_it_is_without(directory):
    assert_same(Run(directory, every=1).to(6).state(), Run().to(6).state())


def test_nothing_is_written_and_nothing_listened_to_without_a_policy(directory):
    before = signal.getsignal(signal.SIGTERM)
    run = Run().to(4)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not directory.exists()
    with pytest.raises(ConfigurationError, match="checkpoints="):
        run.optimizer.resume()


# The tools of torch ---------------------------------------------------------------------------------------------------

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Tied(Net):
    """The same parameter in two modules, like an embedding and the layer before the loss."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 8)
        self.other.weight = self.body.weight

    def forward(self, x):
        return super().forward(x) + self.other(x).square().mean()


@ALONE
@pytest.mark.parametrize("make", [Net, NormNet, Tied])
def test_the_model_can_be_loaded_by_torch_itself(directory, make):
    run = Run(directory, make=make).to(3)
    expected = copy.deepcopy(run.model.state_dict())
    run.to(4)
    assert_same(loaded_by_torch(path_of(directory, 3), make()), dict(expected))


def loaded_by_torch(path, model):
    loaded = {"model": model.state_dict()}
    dcp.load(loaded, checkpoint_id=path)
    return dict(loaded["model"])


@ALONE
def test_the_files_can_be_turned_into_one_of_torch_save(directory):
    run = Run(directory, make=NormNet).to(3)
    model, base = snapshot(run.model, run.base)
    run.to(4)
    dcp_to_torch_save(path_of(directory, 3), "one.pt")
    loaded = torch.load("one.pt", weights_only=False)
    assert_same({name: loaded["model"][name] for name in model}, dict(model))
    names = [name for name, _ in run.model.named_parameters()]
    assert_same(loaded["optimizer"]["state"], {name: base["state"][i] for i, name in enumerate(names)})
    assert loaded["ranks"]["0"]["objects"]["at_end"]["tracked"]["dataloader"] == {"at": 3}


def test_state_dicts_that_torch_asks_for_before_the_first_step_change_nothing(directory):
    other = Run()
    get_optimizer_state_dict(other.model, other.base)
    expected = other.to(4).state()
    run = Run(directory, every=1)
    get_model_state_dict(run.model)
    get_optimizer_state_dict(run.model, run.optimizer)
    assert run.done == 0
    assert lying_in(directory) == {}
    assert_same(run.to(4).state(), expected)
    assert lying_in(directory) == {2: "clean", 3: "clean"}


# Going on -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted():
    """The state of a run after 12 steps, which nothing has disturbed."""
    torch.set_num_threads(1)
    return Everything().to(12).state()


class Everything(Run):
    """Batches changed at random, accumulated gradients, a loss scale that grows, a schedule."""

    def __init__(self, directory=None, **options):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        super().__init__(directory, scaler=self.scaler, **options)
        self.tracked["scaler"] = self.scaler

    def loss(self):
        return self.scaler.scale(self.model(self.rows.draw() + 0.1 * torch.rand(4)))

    def step(self):
        self.optimizer.zero_grad()
        for _ in range(2):
            self.loss().backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("killed_after", range(4, 12))
def test_a_run_that_was_killed_goes_on_bit_for_bit(directory, uninterrupted, killed_after, asynchronous):
    first = Everything(directory, asynchronous=asynchronous).to(killed_after)
    first.optimizer.close()
    second = Everything(directory, seed=99, asynchronous=asynchronous)
    start = second.resumed()
    assert start is None or (start % 3 == 0 and killed_after - 4 <= start + asynchronous < killed_after)
    if start is not None:
        assert_same(second.to(12).state(), uninterrupted)
    second.optimizer.close()


@pytest.mark.parametrize("steps", [0, 3])
def test_there_is_nothing_to_go_on_from_before_one_is_clean(directory, steps):
    Run(directory).to(steps)
    run = Run(directory)
    before = run.state()
    assert run.optimizer.resume() is None
    assert_same(run.state(), before)
    assert_same(run.to(5).state(), Run().to(5).state())


def test_one_on_probation_is_not_gone_on_from(directory):
    Run(directory, quarantine=2).to(7)
    assert lying_in(directory) == {3: "clean", 6: "verified"}
    run = Run(directory)
    assert run.resumed() == 3
    assert lying_in(directory) == {3: "clean"}


def test_what_a_dead_run_could_not_prove_is_given_up_where_there_is_nothing_to_go_on_from(directory):
    Run(directory, quarantine=9).to(7)
    assert lying_in(directory) == {3: "verified", 6: "verified"}
    run = Run(directory)
    assert run.optimizer.resume() is None
    assert_same(run.to(5).state(), Run().to(5).state())
    assert lying_in(directory) == {3: "clean"}


def test_a_new_run_is_told_where_it_goes_on(directory):
    Run(directory).to(5)
    run = Run(directory)
    resumed = run.optimizer.resume()
    assert resumed.step == run.done == 3
    assert resumed.tracked["dataloader"] == {"at": 3}
    assert run.scheduler.last_epoch == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_for_bit(directory, name):
    Run(directory, base=name).to(5)
    second = Run(directory, base=name, seed=99)
    assert second.resumed() == 3
    assert_same(second.to(7).state(), Run(base=name).to(7).state())


class Rare(nn.Module):
    """Sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)

    def forward(self, x):
        return self.table(x.abs().long() % 9).square().mean()


def test_sparse_gradients_go_on_bit_for_bit(directory):
    options = {"make": Rare, "base": lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.1)}
    Run(directory, **options).to(5)
    second = Run(directory, seed=99, **options)
    assert second.resumed() == 3
    assert_same(second.to(7).state(), Run(**options).to(7).state())


class Searching(Run):
    """L-BFGS, which calls a closure many times."""

    def __init__(self, directory=None, **options):
        def base(model):
            return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

        super().__init__(directory, make=Net, base=base, **options)

    def step(self):
        rows = self.rows.draw()

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(rows)
            loss.backward()
            return loss

        self.optimizer.step(closure)
        self.scheduler.step()


def test_closures_go_on_bit_for_bit(directory):
    Searching(directory).to(5)
    second = Searching(directory, seed=99)
    assert second.resumed() == 3
    assert_same(second.to(7).state(), Searching().to(7).state())


class Averaging(Run):
    """An average of the weights follows the updates."""

    def __init__(self, directory=None, **options):
        model = NormNet()
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        super().__init__(directory, make=lambda: model, track={"average": self.average}, **options)

    def step(self, **options):
        super().step(**options)
        if self.optimizer.last_record.action != "skip":
            self.average.update_parameters(self.model)


def test_an_average_of_the_weights_goes_on_bit_for_bit(directory):
    torch.manual_seed(0)
    Averaging(directory).to(5)
    second = Averaging(directory, seed=99)
    assert second.resumed() == 3
    torch.manual_seed(0)
    assert_same(second.to(7).state(), Averaging().to(7).state())


class Partly(Tied):
    """Tied, frozen, unused, scalar, empty, complex and half-precision parameters."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.phase = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x):
        return super().forward(x) * self.scale + self.phase.abs().sum() + self.narrow.float().square().sum()


def in_groups(model):
    """A rate in a tensor, a group of its own for some, and one that is empty."""
    names = {"scale", "narrow"}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in names], "lr": torch.tensor(0.01)},
        {"params": [], "weight_decay": 0.5},
        {"params": [p for n, p in model.named_parameters() if n in names], "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=0.02, foreach=False)


def test_unusual_parameters_and_groups_go_on_bit_for_bit_and_keep_their_identity(directory):
    Run(directory, make=Partly, base=in_groups).to(5)
    second = Run(directory, make=Partly, base=in_groups, seed=99)
    parameters, rate = list(second.model.parameters()), second.base.param_groups[0]["lr"]
    second.model.load_state_dict(Run(make=Partly, base=in_groups).model.state_dict())  # where the frozen ones are
    assert second.resumed() == 3
    assert all(one is other for one, other in zip(second.model.parameters(), parameters, strict=True))
    assert second.model.other.weight is second.model.body.weight
    assert second.base.param_groups[0]["lr"] is rate
    assert_same(second.to(7).state(), Run(make=Partly, base=in_groups).to(7).state())


class WithNothing(Net):
    """A parameter and a buffer without elements."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x):
        return super().forward(x) + self.empty.sum()


def test_parameters_without_elements_go_on(directory):
    Run(directory, make=WithNothing).to(5)
    second = Run(directory, make=WithNothing, seed=99)
    assert second.resumed() == 3
    assert_same(second.to(7).state(), Run(make=WithNothing).to(7).state())


def test_a_buffer_that_changes_its_shape_goes_on(directory):
    Run(directory, make=Growing).to(5)
    second = Run(directory, make=Growing, seed=99)
    assert second.resumed() == 3
    assert_same(second.to(7).state(), Run(make=Growing).to(7).state())


def test_resuming_twice_is_resuming_once(directory):
    Run(directory).to(5)
    second = Run(directory, seed=99)
    assert second.resumed() == 3
    first = second.state()
    torch.rand(3)
    assert second.resumed() == 3
    assert_same(second.state(), first)
    assert_same(second.to(7).state(), Run().to(7).state())


def test_resuming_after_training_has_begun_gives_up_what_was_made_since(directory):
    run = Run(directory).to(6)
    assert run.resumed() == 3
    assert_same(run.to(4).state(), Run().to(4).state())
    assert lying_in(directory) == {3: "clean"}
    assert_same(run.to(8).state(), Run().to(8).state())
    assert lying_in(directory) == {3: "clean", 6: "clean"}


def test_a_resumed_run_can_be_resumed_from(directory):
    Run(directory).to(5)
    second = Run(directory, seed=98)
    assert second.resumed() == 3
    second.to(7)
    third = Run(directory, seed=99)
    assert third.resumed() == 6
    assert_same(third.to(9).state(), Run().to(9).state())


def test_a_checkpoint_of_a_run_before_is_a_target_of_the_one_that_goes_on(directory):
    before = Run(directory).to(3)
    after_update = snapshot(before.model, before.base)[0]
    before.to(5)
    second = Run(directory, seed=99, nan_action="rollback")
    second.resumed()
    second.to(4)
    second.step(spoil=torch.nan)
    assert second.optimizer.last_record.restored_step == 3
    assert_same(dict(second.model.state_dict()), dict(after_update))


def die_while_writing(directory):
    """Kills this process as the checkpoint of step 6 is written."""
    run = Run(directory, track={"deadly": Deadly(at=6)})
    run.to(9)


class Deadly:
    """A tracked object whose state does something when it is pickled, in the checkpoint of one step."""

    def __init__(self, at, does=lambda: os.kill(os.getpid(), signal.SIGKILL)):
        self.calls, self.at, self.does = 0, at, does

    def state_dict(self):
        self.calls += 1
        return Trap(self.does if self.calls >= 2 * self.at / 3 - 1 else None)

    def load_state_dict(self, state):
        pass


class Trap:
    def __init__(self, does):
        self.does = does

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        if self.does is not None:
            self.does()
        return Trap, (None,)


def test_a_process_that_dies_while_writing_leaves_the_last_one_good(directory):
    process = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(directory,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert sorted(name[:12] for name in os.listdir(directory)) == [".unfinished-", "step_0000000"]
    second = Run(directory, seed=99, track={"deadly": Deadly(at=100)})
    assert second.resumed() == 3
    second.to(7)
    assert lying_in(directory) == {3: "clean", 6: "clean"}
    second.tracked.pop("deadly")
    assert_same(second.state(), Run().to(7).state())


# A state that the user puts in place ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_directory_of_another_run_is_refused(directory, attempts):
    Run(directory).to(5)
    run = Run(directory)
    before = snapshot(run.model, run.base)
    for _ in range(attempts):
        with pytest.raises(ConfigurationError, match=r"resume\(\)"):
            run.step()
    assert_same(snapshot(run.model, run.base), before)
    assert lying_in(directory) == {3: "clean"}


@ALONE
def test_two_guards_never_replace_each_others_checkpoints(directory):
    first = Run(directory, make=Net)
    with contextlib.suppress(ConfigurationError):
        second = Run(directory, make=lambda: Net(width=9))
        for _ in range(4):
            first.step()
            second.step()
    expected = Run(make=Net).to(3).model.state_dict()
    first.to(4)
    assert_same(loaded_by_torch(path_of(directory, 3), Net()), dict(expected))


def test_no_rollback_goes_back_beyond_a_state_that_was_loaded_by_hand(directory):
    run = Run(directory, nan_action="rollback").to(4)
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.to(5)
    run.optimizer.load_state_dict({**saved, "stabilityguard": run.optimizer.state_dict()["stabilityguard"]})
    run.step(spoil=torch.nan)
    assert run.optimizer.last_record.action == "skip"
    run.to(10)
    run.step(spoil=torch.nan)
    assert run.optimizer.last_record.restored_step == 7


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_copy_made_before_a_state_was_loaded_by_hand_is_no_target(directory, asynchronous):
    run = Run(directory, nan_action="rollback", every=1, quarantine=0, asynchronous=asynchronous).to(3)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for _ in range(3):
        assert spoiled(run) is None
        finish_writing()
    run.optimizer.close()


def test_a_run_may_go_back_to_a_state_of_its_own_by_hand(directory):
    run = Run(directory).to(2)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    run.to(5)
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    run.to(4)
    assert run.optimizer.last_record.applied


def test_objects_that_were_not_tracked_when_it_was_written_are_told_of_before_anything_changes(directory):
    Run(directory).to(5)
    second = Run(directory, seed=99, track={"added": Rows()})
    before = second.state()
    with pytest.raises(CheckpointError):
        second.optimizer.resume()
    assert_same(second.state(), before)


class Refusing(Rows):
    """Takes no state of a later position."""

    def load_state_dict(self, state):
        if state["at"] > 0:
            raise ValueError("not from there")
        super().load_state_dict(state)


def test_a_tracked_object_that_refuses_its_state_leaves_everything_as_it_was(directory, caplog):
    first = Run(directory, track={"rows": Rows()})
    first.tracked["rows"].at = 5
    first.to(5)
    second = Run(directory, seed=99, track={"rows": Refusing()})
    before = second.state()
    with pytest.raises(CheckpointError):
        second.optimizer.resume()
    assert "not from there" in caplog.text
    assert_same(second.state(), before)


@pytest.mark.parametrize(
    "base",
    [
        lambda model: torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        lambda model: torch.optim.AdamW(model.head.parameters()),
    ],
)
def test_a_checkpoint_of_other_groups_is_refused_with_nothing_changed(directory, base):
    Run(directory).to(5)
    second = Run(directory, seed=99, base=base)
    before = second.state()
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        second.optimizer.resume()
    assert_same(second.state(), before)


def test_a_checkpoint_of_another_model_is_refused_with_nothing_changed(directory, caplog):
    Run(directory, make=Net).to(5)
    second = Run(directory, seed=99, make=lambda: Net(width=9))
    before = second.state()
    with pytest.raises(CheckpointError):
        second.optimizer.resume()
    assert "model.body.weight has the shape (8, 4), but is (9, 4) here" in caplog.text
    assert_same(second.state(), before)


# Going back -----------------------------------------------------------------------------------------------------------


def rolling(directory, **options):
    return Run(directory, **{"nan_action": "rollback", **options})


def spoiled(run):
    """A bad step; the step it went back to."""
    run.step(spoil=torch.nan)
    return run.optimizer.last_record.restored_step


@pytest.mark.parametrize(("name", "asynchronous"), [*((name, False) for name in OPTIMIZERS), ("adam", True)])
def test_training_on_from_a_checkpoint_is_bit_for_bit_what_it_was(directory, name, asynchronous):
    run = rolling(directory, base=name, asynchronous=asynchronous, replay_data=True).to(6)
    (model, base), tracked, memory, drawn = run.state()
    assert spoiled(run) == 3
    run.to(10)
    again = run.state()
    assert_same((again[0], again[1], again[3]), ((model, base), tracked, drawn))
    assert_same(again[2]["memory"], memory["memory"])
    run.optimizer.close()


def test_the_data_go_on_unless_they_are_to_be_replayed(directory):
    run = rolling(directory).to(5)
    assert spoiled(run) == 3
    assert run.rows.at == 6


def test_using_a_checkpoint_twice_gives_the_same_both_times(directory):
    run = rolling(directory, every=3, replay_data=True).to(4)
    states = []
    for _ in range(2):
        assert spoiled(run) == 3
        states.append((snapshot(run.model, run.base), run.rows.at, draws()))
        run.step()
        run.base.state[run.model.head.weight]["exp_avg"].fill_(3.0)
    assert_same(*states)


def test_the_nearest_is_used_first_and_then_older_ones(directory):
    run = rolling(directory, every=2, keep=3, budget=Budget(rollbacks=5)).to(7)
    assert [spoiled(run) for _ in range(5)] == [6, 4, 2, 2, 2]
    with pytest.raises(GradientSpikeError, match="5 rollbacks"):
        run.step(spoil=torch.nan)


def test_parameters_keep_their_identity_in_a_rollback(directory):
    run = rolling(directory, make=Tied).to(4)
    parameters, moments = list(run.model.parameters()), [run.base.state[p]["exp_avg"] for p in run.model.parameters()]
    assert spoiled(run) == 3
    assert all(map(lambda a, b: a is b, run.model.parameters(), parameters))
    assert run.model.other.weight is run.model.body.weight
    assert all(run.base.state[p]["exp_avg"] is moment for p, moment in zip(parameters, moments, strict=True))


def test_a_snapshot_in_ram_comes_before_a_checkpoint_of_the_same_step(directory):
    run = rolling(directory, snapshots=SnapshotPolicy(every=3, keep=2, quarantine=1)).to(5)
    damage(directory, 3)
    assert spoiled(run) == 3


def test_a_newer_checkpoint_comes_before_an_older_snapshot(directory):
    run = rolling(directory, snapshots=SnapshotPolicy(every=50)).to(5)
    assert spoiled(run) == 3
    assert spoiled(run) == 0


def test_one_gone_back_to_in_ram_is_passed_over_on_disk(directory):
    snapshots = SnapshotPolicy(every=4, keep=1, quarantine=0)
    run = rolling(directory, every=2, keep=9, quarantine=0, snapshots=snapshots, budget=Budget(rollbacks=9)).to(5)
    assert spoiled(run) == 4
    run.to(11)
    assert [spoiled(run) for _ in range(4)] == [10, 8, 2, 2]


def test_the_optimizer_starts_anew_with_the_layer_that_tripped(directory):
    run = rolling(directory, moments="reset_trigger_layer").to(4)
    assert spoiled(run) == 3
    body, head = run.model.body.weight, run.model.head.weight
    assert body not in run.base.state
    assert float(run.base.state[head]["step"]) == 3


def test_a_buffer_that_has_grown_is_rolled_back(directory):
    run = rolling(directory, make=Growing).to(5)
    assert spoiled(run) == 3
    assert run.model.seen.numel() == 4


@pytest.mark.parametrize("how", ["a flipped bit", "a missing file", "no manifest", "no directory"])
def test_a_damaged_checkpoint_is_passed_over(directory, caplog, how):
    run = rolling(directory).to(7)
    newest = path_of(directory, 6)
    if how == "a flipped bit":
        damage(directory, 6)
    elif how == "a missing file":
        next(newest.glob("*.distcp")).unlink()
    elif how == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        shutil.rmtree(newest)
    assert spoiled(run) == 3
    assert "the checkpoint of step 6 cannot be used" in caplog.text
    run.to(12)
    assert run.optimizer.last_record.applied


def test_where_all_are_damaged_the_step_raises_with_nothing_changed_and_the_report_is_written(directory):
    run = rolling(directory).to(7)
    for step in (3, 6):
        damage(directory, step)
    before, at = snapshot(run.model, run.base), run.scheduler.state_dict()
    with pytest.raises(GradientSpikeError, match="none of the checkpoints can be read") as raised:
        run.step(spoil=torch.nan)
    (weights, state), (expected, expected_state) = snapshot(run.model, run.base), before
    assert_same(state, expected_state)
    changed = {name for name in weights if not torch.equal(weights[name], expected[name])}
    assert all(name.startswith("norm.") for name in changed)
    assert_same(run.scheduler.state_dict(), at)
    assert next(run.model.parameters()).grad.isnan().all()
    assert os.path.exists(raised.value.report_path)
    assert run.optimizer.reports[-1].record.action == "raise"


def test_a_new_run_passes_over_a_damaged_one(directory, caplog):
    Run(directory).to(8)
    damage(directory, 6)
    second = Run(directory, seed=99)
    assert second.resumed() == 3
    assert "the checkpoint of step 6 cannot be used" in caplog.text
    assert_same(second.to(8).state(), Run().to(8).state())
    third = Run(directory, seed=98)
    assert third.resumed() == 6
    assert_same(third.to(8).state(), Run().to(8).state())


def test_a_new_run_that_can_read_none_says_so_with_nothing_changed(directory):
    Run(directory).to(8)
    for step in (3, 6):
        damage(directory, step)
    second = Run(directory, seed=99)
    before = second.state()
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        second.optimizer.resume()
    assert_same(second.state(), before)


# What goes wrong on the way -------------------------------------------------------------------------------------------


def assert_only_warnings(caplog):
    assert {record.levelno for record in caplog.records if record.name == "stabilityguard"} == {logging.WARNING}


@pytest.mark.parametrize("keep", [1, 2])
def test_weights_that_are_not_finite_are_never_saved_and_never_remove_a_good_one(directory, caplog, keep):
    run = Run(directory, keep=keep, every=1, budget=Budget(consecutive_skips=99)).to(6)
    good = lying_in(directory)
    rate = run.base.param_groups[0]["lr"]
    run.base.param_groups[0]["lr"] = torch.nan
    run.step()
    run.base.param_groups[0]["lr"] = rate
    assert run.model.body.weight.isnan().any()
    for _ in range(5):
        run.step()
    assert run.optimizer.last_record.action == "skip"
    assert set(lying_in(directory)) <= {*good, 6}
    assert "clean" in lying_in(directory).values()
    assert "NaN" in caplog.text
    assert Run(directory, seed=99).resumed() in (5, 6)


def test_moments_that_are_not_finite_are_never_saved(directory, caplog):
    run = Run(directory).to(5)
    run.base.state[run.model.head.bias]["exp_avg_sq"].fill_(torch.inf)
    run.to(8)
    assert lying_in(directory) == {3: "clean"}
    assert "optimizer.state.head.bias.exp_avg_sq has 1 elements that are NaN or Inf" in caplog.text


@pytest.mark.parametrize("step", [3, 6, 9])
def test_one_that_was_removed_by_hand_causes_warnings_only(directory, caplog, step):
    run = Run(directory, quarantine=2).to(10)
    assert lying_in(directory) == {3: "clean", 6: "clean", 9: "verified"}
    shutil.rmtree(path_of(directory, step))
    run.to(17)
    assert lying_in(directory) == {12: "clean", 15: "clean"}
    assert_only_warnings(caplog)


def test_a_directory_that_was_removed_by_hand_is_made_again(directory):
    run = Run(directory / "below", quarantine=0).to(5)
    shutil.rmtree(directory)
    run.to(10)
    assert set(lying_in(directory / "below")) == {6, 9}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_earlier_ones_and_training_goes_on(directory, caplog, asynchronous):
    run = Run(directory, keep=1, asynchronous=asynchronous).to(5 + asynchronous)
    assert lying_in(directory) == {3: "clean"}
    with a_full_disk():
        run.to(8)
    assert lying_in(directory) == {3: "clean"}
    assert "the checkpoint of step 6 failed, and the earlier ones stay" in caplog.text
    assert_only_warnings(caplog)
    assert_same(run.to(11 + asynchronous).state(), Run().to(11 + asynchronous).state())
    assert lying_in(directory) == {9: "clean"}
    run.optimizer.close()


def test_a_disk_that_is_full_when_one_becomes_clean_keeps_the_earlier_one(directory, caplog):
    run = Run(directory, keep=1, quarantine=2).to(7)
    assert lying_in(directory) == {3: "clean", 6: "verified"}
    with a_full_disk(size=100):
        run.to(8)
        assert lying_in(directory) == {3: "clean", 6: "verified"}
    assert "could not be marked clean" in caplog.text
    run.to(9)
    assert lying_in(directory) == {6: "clean"}


def test_a_file_in_the_place_of_the_directory_leaves_training_alone(directory, caplog):
    run = Run(directory).to(2)
    directory.rmdir()
    directory.write_text("mine")
    run.to(8)
    assert "the checkpoint of step 3 failed" in caplog.text
    assert_only_warnings(caplog)
    assert_same(run.state(), Run().to(8).state())
    assert directory.read_text() == "mine"


def test_a_file_in_the_place_of_the_directory_is_refused_at_construction(directory):
    directory.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"CheckpointPolicy\.directory"):
        Run(directory)


def test_what_does_not_pickle_causes_a_warning(directory, caplog):
    def refuse():
        raise TypeError("no pickle of this")

    Run(directory, track={"odd": Deadly(at=0, does=refuse)}).to(5)
    assert "no pickle of this" in caplog.text
    assert lying_in(directory) == {}
    assert_only_warnings(caplog)


def test_an_interrupt_while_writing_leaves_the_last_one_good_and_the_run_usable(directory):
    interrupt = Deadly(at=6, does=lambda: os.kill(os.getpid(), signal.SIGINT))
    run = rolling(directory, track={"odd": interrupt})
    with hearing_interrupts(), pytest.raises(KeyboardInterrupt):
        run.to(9)
    assert run.done == 6
    interrupt.at = 1000
    assert spoiled(run) == 3
    run.to(12)
    assert lying_in(directory) == {3: "clean", 10: "clean"}
    assert Run(directory, track={"odd": interrupt}).resumed() == 10


def test_a_background_job_that_failed_is_told_of_when_the_run_is_closed(directory, caplog):
    run = Run(directory, asynchronous=True).to(3)
    with a_full_disk():
        run.to(4)
    run.optimizer.close()
    assert "the checkpoint of step 3 failed" in caplog.text


def test_what_is_due_while_another_is_being_written_is_left_out(directory, caplog):
    free = threading.Event()
    run = Run(directory, every=2, asynchronous=True, track={"slow": Deadly(at=0, does=lambda: free.wait(60))})
    while run.done < 5:
        run.step()
    free.set()
    finish_writing()
    run.step()
    run.optimizer.close()
    assert "no checkpoint of step 4: that of step 2 is still being written" in caplog.text
    assert set(lying_in(directory)) == {2}


@ALONE
def test_what_is_written_in_the_background_is_the_state_of_its_step(directory):
    free = threading.Event()
    run = Run(directory, make=Net, asynchronous=True, track={"slow": Deadly(at=0, does=lambda: free.wait(60))})
    while run.done < 3:
        run.step()
    expected = copy.deepcopy(run.model.state_dict())
    run.step()
    run.step()
    free.set()
    finish_writing()
    run.step()
    run.optimizer.close()
    assert_same(loaded_by_torch(path_of(directory, 3), Net()), dict(expected))


def test_a_job_of_a_future_that_was_given_up_is_removed(directory):
    free = threading.Event()
    slow = Deadly(at=0, does=None)
    run = rolling(directory, asynchronous=True, track={"slow": slow}).to(6)
    slow.does = lambda: free.wait(60)
    run.step()
    assert spoiled(run) == 3
    free.set()
    slow.does = None
    run.to(9)
    finish_writing()
    run.step()
    assert 6 not in lying_in(directory)
    run.optimizer.close()


def test_a_relative_directory_stays_where_it_was(directory, monkeypatch):
    run = Run(directory.name)
    (elsewhere := directory.parent / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    run.to(4)
    assert lying_in(directory) == {3: "clean"}


# Stopping -------------------------------------------------------------------------------------------------------------


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint_and_goes_on_without_losing_a_step(directory, at, asynchronous):
    run = Run(directory, asynchronous=asynchronous).to(at - 1)
    terminate()
    run.step()
    with pytest.raises(SystemExit) as ended:
        run.step()
    assert ended.value.code == 143
    assert lying_in(directory)[at] == "verified"
    run.optimizer.close()
    second = Run(directory, seed=99)
    assert second.resumed() == at
    assert_same(second.to(at + 3).state(), Run().to(at + 3).state())


def test_a_run_that_is_asked_to_stop_in_a_rollback_keeps_what_it_went_back_to(directory):
    run = rolling(directory).to(4)
    run.optimizer.zero_grad()
    run.loss().backward()
    next(run.model.parameters()).grad.fill_(torch.nan)
    terminate()
    run.optimizer.step()
    run.scheduler.step()
    assert run.optimizer.last_record.restored_step == 3
    expected = snapshot(run.model, run.base)
    with pytest.raises(SystemExit):
        run.step()
    second = rolling(directory, seed=99)
    assert second.resumed() == 5
    assert_same(snapshot(second.model, second.base), expected)


def test_a_checkpoint_of_a_stopped_run_is_a_target_only_when_it_has_proved_to_be_clean(directory):
    run = Run(directory).to(1)
    terminate()
    run.step()
    with pytest.raises(SystemExit):
        run.step()
    second = rolling(directory)
    assert second.resumed() == 2
    second.step(spoil=torch.nan)
    assert second.optimizer.last_record.action == "skip"
    second.step()
    assert spoiled(second) == 2


def test_a_run_whose_last_checkpoint_fails_leaves_all_the_same(directory, caplog):
    run = Run(directory).to(4)
    terminate()
    run.step()
    with a_full_disk(), pytest.raises(SystemExit) as ended:
        run.step()
    assert ended.value.code == 143
    assert "the checkpoint of step 5 failed" in caplog.text
    assert lying_in(directory) == {3: "clean"}


def test_a_stopped_process_ends_with_the_code_of_a_terminated_one_and_the_next_goes_on(directory):
    def work():
        run = Run(directory).to(4)
        terminate()
        run.to(9)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == 143
    second = Run(directory, seed=99)
    assert second.resumed() == 5
    assert_same(second.to(8).state(), Run().to(8).state())


def test_a_signal_is_not_lost_when_the_run_is_closed_before_the_next_step(directory):
    def work():
        run = Run(directory).to(2)
        terminate()
        run.optimizer.close()

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode in (143, -signal.SIGTERM)


def test_a_handler_of_the_users_is_called_and_put_back(directory):
    heard = []
    signal.signal(signal.SIGTERM, mine := lambda number, frame: heard.append(number))
    run = Run(directory).to(1)
    terminate()
    run.step()
    with pytest.raises(SystemExit):
        run.step()
    run.optimizer.close()
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is mine


def test_a_guard_that_is_made_beside_the_main_thread_writes_and_does_not_listen(directory):
    before, runs = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: runs.append(Run(directory).to(4)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert lying_in(directory) == {3: "clean"}
    runs[0].optimizer.close()


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_writes_nothing_and_does_not_listen(directory, duplicate):
    run = Run(directory, make=Net)
    run.scheduler.lr_lambdas = [Halving()]
    run.to(4)
    handler = signal.getsignal(signal.SIGTERM)
    other = duplicate(run.optimizer)
    assert signal.getsignal(signal.SIGTERM) is handler
    model = other._parts["model"]
    for step in range(8):
        other.zero_grad()
        model(batch(step)).backward()
        other.step()
    assert lying_in(directory) == {3: "clean"}
    with pytest.raises(ConfigurationError, match="checkpoints="):
        other.resume()
    other.close()
    assert_same(run.to(8).state()[0], Run(make=Net).to(8).state()[0])
    assert lying_in(directory) == {3: "clean", 6: "clean"}


class Halving:
    """A schedule that pickles, and is the others'."""

    def __call__(self, step):
        return 1 / (1 + step)
