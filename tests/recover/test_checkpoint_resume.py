"""Runs that go on from a checkpoint: bit for bit as if they had not been interrupted."""

import multiprocessing
import os
import signal

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.recover.runs import Deadly, Run, Tied, lying_in
from tests.recover.test_rollback import OPTIMIZERS
from tests.support import Growing, Net, NormNet, assert_same, snapshot


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
    assert start is None or (start % 3 == 0 and killed_after - 4 <= start < killed_after)
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
