"""Checkpoints over ranks: a rollback to disk and a new run on as many ranks go on bit for bit."""

import os
import signal
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from stabilityguard import (
    Budget,
    CheckpointPolicy,
    ConfigurationError,
    GradientSpikeError,
    GuardedOptimizer,
    SnapshotPolicy,
)
from tests.distributed import wrapped
from tests.distributed.ranks import run
from tests.distributed.test_rollback import MODES, local, plain, train
from tests.support import NormNet, assert_same


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def policy(directory, **options):
    return CheckpointPolicy(**{"directory": str(directory), "every": 3, "keep": 2, "quarantine": 1, **options})


class Trainer:
    """One rank's part of a training whose batches are numbered; what it held by name can be compared."""

    def __init__(self, rank, ranks, directory, wrap, *, make=wrapped.make, optimizer=plain, checkpoints=(), **options):
        self.rank, self.ranks = rank, ranks
        self.model = wrap(make())
        self.base = optimizer(self.model)
        self.guarded = GuardedOptimizer(
            self.base,
            self.model,
            checkpoints=policy(directory, **dict(checkpoints)),
            **{"verbose": False, "nan_action": "rollback", "snapshots": False, **options},
        )

    @property
    def archive(self):
        return self.guarded._guard._checkpoints.archive

    def rows(self, number):
        return wrapped.rows(number, self.rank, self.ranks)

    def step(self, number, *, bad=False, waits=True, before=lambda: None):
        """One step; what was done. A bad one has a NaN on rank 1, and ``before`` is called between backward and it."""
        self.guarded.zero_grad()
        rows = self.rows(number)
        self.model(rows * torch.nan if bad and self.rank == 1 else rows).backward()
        before()
        self.guarded.step()
        if waits:
            self.archive.wait()
        return self.guarded.last_record.action, self.guarded.last_record.restored_step

    def steps(self, numbers, **options):
        return [self.step(number, **options) for number in numbers]

    def state(self):
        """Copies of this rank's parameters, buffers and optimizer state, by name."""
        named = dict(self.model.named_parameters())
        entries = {
            name: {entry: _copy(value) for entry, value in self.base.state.get(parameter, {}).items()}
            for name, parameter in named.items()
            if wrapped.local_part(parameter).numel()
        }
        tensors = {name: _copy(tensor) for name, tensor in [*named.items(), *self.model.named_buffers()]}
        return tensors, entries


def _copy(value):
    return local(value).clone() if isinstance(value, torch.Tensor) else value


def on_every_rank_alike(job, ranks=2):
    """What all ranks told, which has to be the same."""
    told = run(ranks, job)
    assert all(one == told[0] for one in told), told
    return told[0]


# Going back to disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_training_on_from_a_checkpoint_is_bit_for_bit_what_it_was(mode, asynchronous, tmp_path):
    ranks, wrap, optimizer = MODES[mode]
    optimizer = momentum if optimizer is plain and asynchronous else optimizer

    def job(rank):
        checkpoints = policy(tmp_path, asynchronous=asynchronous)
        options = {"nan_action": "rollback", "snapshots": False, "waits": asynchronous, "checkpoints": checkpoints}
        with_fault = train(rank, ranks, wrap, optimizer, [*range(1, 9), 7, 8], bad={6}, **options)
        return with_fault, train(rank, ranks, wrap, optimizer, [1, 2, 3, 7, 8, 7, 8])

    for (parameters, done), (expected, _) in run(ranks, job):
        assert done == [("step", None)] * 5 + [("rollback", 3)] + [("step", None)] * 4
        assert all(map(torch.equal, parameters, expected))


# A new run -----------------------------------------------------------------------------------------------------------


def assert_resumes(directory, wrap, *, ranks=2, last=6, options=None, **parts):
    """A run of 8 steps, and one of 7 that a new one goes on from: bit for bit the same, also in between."""

    def job(rank):
        whole = Trainer(rank, ranks, directory / "whole", wrap, **parts, **(options or {}))
        whole.steps(range(1, last + 1))
        then = whole.state()
        whole.steps(range(last + 1, 9))
        whole.guarded.close()
        first = Trainer(rank, ranks, directory / "parts", wrap, **parts, **(options or {}))
        first.steps(range(1, 8))
        first.guarded.close()
        second = Trainer(rank, ranks, directory / "parts", wrap, **parts, **(options or {}))
        assert second.guarded.resume().step == last
        assert_same(second.state(), then)
        done = second.steps(range(last + 1, 9))
        second.guarded.close()
        assert_same(second.state(), whole.state())
        return done

    assert on_every_rank_alike(job, ranks) == [("step", None)] * (8 - last)


@pytest.mark.parametrize("mode", MODES)
def test_a_new_run_goes_on_bit_for_bit(mode, tmp_path):
    ranks, wrap, optimizer = MODES[mode]
    assert_resumes(tmp_path, wrap, ranks=ranks, optimizer=optimizer)


def statistics_apart(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(model, broadcast_buffers=False)


def with_statistics():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), NormNet())


def frozen(parts=("inp", "blocks.1")):
    model = wrapped.make()
    for name in parts:
        model.get_submodule(name).requires_grad_(False)
    return model


def only_trainable(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def recomputing():
    model = wrapped.make()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


class Experts(nn.Module):
    """A common part, and two experts of which each rank uses its own; a third is used by nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.common = nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x):
        return self.experts[dist.get_rank() % 2](torch.tanh(self.common(x))).square().mean()


class Recalling(wrapped.Odd):
    """A buffer that grows with every step, by more on every further rank."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().mean(dim=1)[: dist.get_rank() + 1]])
        return super().forward(x)


def alone(model):
    return model


CASES = {
    "bfloat16": (wrapped.fsdp2(), {"make": lambda: wrapped.make().bfloat16(), "optimizer": momentum}),
    "mixed precision": (wrapped.fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), {}),
    "offloaded": (wrapped.fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)), {}),
    "statistics of one's own": (statistics_apart, {"make": with_statistics}),
    "buffers of one's own size": (statistics_apart, {"make": Recalling}),
    "parameters of one's own": (alone, {"options": {"drift_check_every": 0}}),
    "frozen, ddp": (wrapped.ddp(find_unused_parameters=True), {"make": frozen, "optimizer": only_trainable}),
    "frozen, fsdp1": (
        wrapped.fsdp1("FULL_SHARD", use_orig_params=True),
        {"make": frozen, "optimizer": only_trainable},
    ),
    "frozen, fsdp2": (wrapped.fsdp2(), {"make": frozen}),
    "recomputing, ddp": (wrapped.ddp(), {"make": recomputing}),
    "experts, ddp": (wrapped.ddp(find_unused_parameters=True), {"make": Experts}),
    "experts of one's own": (alone, {"make": Experts, "options": {"drift_check_every": 0}}),
}


class InBfloat16(Trainer):
    def rows(self, number):
        return super().rows(number).to(next(self.model.parameters()).dtype)


@pytest.mark.parametrize("case", CASES)
def test_a_new_run_of_an_uncommon_model_goes_on_bit_for_bit(case, tmp_path, monkeypatch):
    wrap, parts = CASES[case]
    if case == "bfloat16":
        monkeypatch.setitem(globals(), "Trainer", InBfloat16)
    assert_resumes(tmp_path, wrap, **parts)


@pytest.mark.parametrize("kind", ["hsdp", "fsdp2 x tensor parallel"])
def test_replicas_that_have_drifted_apart_are_each_kept(kind, tmp_path):
    wrap = {"hsdp": wrapped.hsdp(), "fsdp2 x tensor parallel": wrapped.fsdp2_tensor_parallel()}[kind]

    def with_drift(model):
        model = wrap(model)
        with torch.no_grad():
            for parameter in model.parameters():
                wrapped.local_part(parameter).mul_(1 + dist.get_rank() / 1000)
        return model

    assert_resumes(tmp_path, with_drift, ranks=4, options={"drift_check_every": 0})


def test_names_in_the_files_are_those_of_the_unwrapped_model(tmp_path):
    def job(rank):
        for name, wrap in {
            "ddp": wrapped.ddp(),
            "fsdp1": wrapped.fsdp1("FULL_SHARD", use_orig_params=True),
            "flat": wrapped.fsdp1("FULL_SHARD", use_orig_params=False),
        }.items():
            trainer = Trainer(rank, 2, tmp_path / name, wrap, make=recomputing)
            trainer.steps(range(1, 5))

    run(2, job)
    model = wrapped.make()
    model(wrapped.rows(1)).backward()
    expected = {f"model.{name}": parameter.shape for name, parameter in model.named_parameters()}
    for entry in ("exp_avg", "exp_avg_sq"):
        moments = {f"optimizer.state.{name}.{entry}": p.shape for name, p in model.named_parameters()}
        expected.update(moments)
    for directory in tmp_path.iterdir():
        if directory.name == "sg_logs":
            continue
        metadata = FileSystemReader(directory / "step_00000003").read_metadata().state_dict_metadata
        shapes = {name: entry.size for name, entry in metadata.items() if hasattr(entry, "size") and entry.size}
        assert shapes == expected, directory.name


# Parts of the ranks, and several guards ------------------------------------------------------------------------------


def test_some_of_the_ranks_keep_a_model_of_their_own(tmp_path):
    def go(rank, steps):
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        model = wrapped.ddp(process_group=group)(wrapped.make())
        guarded = GuardedOptimizer(
            plain(model), model, verbose=False, checkpoints=policy(tmp_path), process_group=group
        )
        resumed = guarded.resume()
        for step in range(resumed.step + 1 if resumed else 1, steps + 1):
            guarded.zero_grad()
            model(wrapped.rows(step, rank - 1, 2)).backward()
            guarded.step()
        guarded.close()
        return (resumed and resumed.step), {name: p.detach().clone() for name, p in model.named_parameters()}

    def whole(rank):
        trainer = Trainer(rank, 2, tmp_path / "whole", wrapped.ddp())
        trainer.steps(range(1, 9))
        return dict(trainer.state()[0])

    def job(rank):
        return go(rank, 7), go(rank, 8)

    nobody, first, second = run(3, job)
    expected = run(2, whole)[0]
    assert nobody == (None, None)
    for (started, _), (resumed_at, parameters) in (first, second):
        assert started is None
        assert resumed_at == 6
        assert_same(parameters, expected)


def test_two_guards_on_the_same_ranks_keep_their_checkpoints_apart(tmp_path):
    wraps = {"one": wrapped.ddp(), "other": wrapped.fsdp2()}

    def both(rank, directory):
        optimizers = {"one": plain, "other": momentum}
        return {
            name: Trainer(
                rank, 2, directory / name, wrap, optimizer=optimizers[name], checkpoints={"asynchronous": True}
            )
            for name, wrap in wraps.items()
        }

    def advance(trainers, numbers):
        for number in numbers:
            for trainer in trainers.values():
                trainer.step(number, waits=False)
            for trainer in trainers.values():
                trainer.archive.wait()

    def job(rank):
        whole, first = both(rank, tmp_path / "whole"), both(rank, tmp_path / "parts")
        advance(whole, range(1, 9))
        advance(first, range(1, 9))
        for trainer in [*whole.values(), *first.values()]:
            trainer.guarded.close()
        second = both(rank, tmp_path / "parts")
        resumed = [trainer.guarded.resume().step for trainer in second.values()]
        advance(second, [7, 8])
        for name, trainer in second.items():
            assert_same(trainer.state(), whole[name].state())
            trainer.guarded.close()
        return resumed

    assert on_every_rank_alike(job) == [6, 6]


# Uneven data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_no_checkpoint_is_made_of_ranks_that_are_apart(asynchronous, tmp_path):
    batches = {0: 7, 1: 4}

    def epoch(trainer, start=0):
        with trainer.model.join():
            trainer.steps(range(start + 1, start + batches[trainer.rank] + 1))

    def set_up(rank):
        checkpoints = {"every": 2, "asynchronous": asynchronous, "keep": 9}
        return Trainer(rank, 2, tmp_path, DistributedDataParallel, optimizer=stateless, checkpoints=checkpoints)

    def job(rank):
        trainer = set_up(rank)
        epoch(trainer)
        trainer.steps([50, 51])
        then = trainer.state()
        steps = [trainer.guarded._guard.steps]
        trainer.steps([52, 53])
        trainer.guarded.close()
        resumed = set_up(rank)
        steps.append(resumed.guarded.resume().step)
        held = sorted(entry.step for entry in resumed.archive.catalogue.entries)
        assert_same(resumed.state(), then)
        epoch(resumed, start=100)
        resumed.guarded.close()
        return steps, held, {name: tensor.tolist() for name, tensor in resumed.state()[0].items()}

    steps, held, _ = on_every_rank_alike(job)
    assert steps == [9, 9]
    assert not {5, 6, 7} & set(held)


def stateless(model):
    """An optimizer whose state does not go apart where a rank has no data."""
    return torch.optim.SGD(model.parameters(), lr=1e-2)


# The ladder ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ddp", "fsdp1, flat", "fsdp2", "zero redundancy"])
def test_rollbacks_go_further_back_on_disk_and_end_in_an_error_on_all_ranks(mode, tmp_path):
    ranks, wrap, optimizer = MODES[mode]

    def job(rank):
        checkpoints = {"every": 2, "keep": 3}
        trainer = Trainer(
            rank, ranks, tmp_path, wrap, optimizer=optimizer, checkpoints=checkpoints, budget=Budget(rollbacks=3)
        )
        at = {0: None}
        for number in range(1, 8):
            trainer.step(number)
            at[number] = trainer.state()
        done = []
        for number in (8, 9, 10):
            done.append(trainer.step(number, bad=True))
            assert_same(trainer.state(), at[done[-1][1]])
        with pytest.raises(GradientSpikeError) as raised:
            trainer.step(11, bad=True)
        assert_same(trainer.state(), at[2])
        return done, raised.value.step

    assert on_every_rank_alike(job, ranks) == ([("rollback", 6), ("rollback", 4), ("rollback", 2)], 11)


def test_a_target_in_ram_is_preferred_and_older_ones_are_on_disk(tmp_path):
    def job(rank):
        snapshots = SnapshotPolicy(every=1, keep=2, quarantine=1)
        trainer = Trainer(rank, 2, tmp_path, wrapped.fsdp2(), checkpoints={"every": 2, "keep": 5}, snapshots=snapshots)
        states = [None]
        for number in range(1, 8):
            trainer.step(number)
            states.append(trainer.state())
        done = []
        for number in (8, 9):
            done.append(trainer.step(number, bad=True)[1])
            assert_same(trainer.state(), states[done[-1]])
        return done

    first, second = on_every_rank_alike(job)
    assert first > second
    assert second % 2 == 0


@pytest.mark.parametrize("mode", ["ddp", "fsdp1", "fsdp2", "zero redundancy"])
def test_the_moments_of_the_layer_that_tripped_start_anew_everywhere(mode, tmp_path):
    ranks, wrap, optimizer = MODES[mode]

    def job(rank):
        trainer = Trainer(rank, ranks, tmp_path, wrap, optimizer=optimizer, moments="reset_trigger_layer")
        trainer.steps([1, 2])
        trainer.step(3)
        state = entries_of(trainer)
        trainer.steps([4, 5])
        done = trainer.step(6, before=lambda: spoil(trainer, "head"))
        left = entries_of(trainer)
        kept = {name: entries for name, entries in state.items() if not name.startswith("head.")}
        assert_same({name: entries for name, entries in left.items() if entries}, kept)
        again = trainer.step(7)
        steps = {name: {float(e["step"]) for e in [entries] if e} for name, entries in entries_of(trainer).items()}
        return done, again, {name: told for name, told in steps.items() if name.startswith("head.") and told}

    told = run(ranks, job)
    for done, again, of_head in told:
        assert (done, again) == (("rollback", 3), ("step", None))
        assert all(steps == {1.0} for steps in of_head.values())
    assert any(of_head for *_, of_head in told)


def entries_of(trainer):
    state = vars(trainer.base)["optim"].state if "optim" in vars(trainer.base) else trainer.base.state
    prefixes = ("_fsdp_wrapped_module.", "module.")
    found = {}
    for name, parameter in trainer.model.named_parameters():
        for prefix in prefixes:
            name = name.replace(prefix, "")
        if parameter in state and wrapped.local_part(parameter).numel():
            found[name] = {entry: _copy(value) for entry, value in state[parameter].items()}
    return found


def spoil(trainer, layer):
    for name, gradient in wrapped.local_gradients(trainer.model, wrapped.make()):
        if name == layer:
            gradient.fill_(torch.nan)


def test_single_moments_of_a_flat_parameter_are_refused_on_all_ranks(tmp_path):
    ranks, wrap, _ = MODES["fsdp1, flat"]

    def job(rank):
        with pytest.raises(ConfigurationError, match="use_orig_params=True") as raised:
            Trainer(rank, ranks, tmp_path, wrap, moments="reset_trigger_layer")
        return str(raised.value)

    on_every_rank_alike(job, ranks)


class Loader:
    """Hands out the numbers of batches."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return self.position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("replays", [False, True], ids=["data go on", "data are replayed"])
def test_a_rollback_to_disk_rewinds_the_data_if_told_so(replays, tmp_path):
    def job(rank):
        loader = Loader()
        trainer = Trainer(rank, 2, tmp_path, wrapped.fsdp2(), track={"dataloader": loader}, replay_data=replays)
        used = []
        for step in range(1, 9):
            used.append(next(loader))
            trainer.step(used[-1], bad=step == 6)
        trainer.guarded.close()
        resumed_loader = Loader()
        new = Trainer(rank, 2, tmp_path, wrapped.fsdp2(), track={"dataloader": resumed_loader}, replay_data=replays)
        new.guarded.resume()
        return used, resumed_loader.position

    used, position = on_every_rank_alike(job)
    assert used == ([1, 2, 3, 4, 5, 6, 4, 5] if replays else [1, 2, 3, 4, 5, 6, 7, 8])
    assert position == 3


# Being stopped -------------------------------------------------------------------------------------------------------


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def steps_until_stopped(trainer, last, *, at, bad=(), waits=True):
    """Trains until it is stopped; rank 1 gets a SIGTERM in step ``at``. The exit code and the steps that were made."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        for number in range(trainer.guarded._guard.steps + 1, last + 1):
            told = terminate if trainer.rank == 1 and number == at else lambda: None
            trainer.step(number, bad=number in bad, waits=waits, before=told)
    except SystemExit as stopped:
        return stopped.code, trainer.guarded._guard.steps
    finally:
        trainer.guarded.close()
        assert signal.getsignal(signal.SIGTERM) is not before
    return None


@pytest.mark.parametrize("case", ["while training", "in a rollback", "while one is written", "at a checkpoint"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_all_ranks_leave_after_the_same_step_and_go_on_from_there(mode, case, tmp_path):
    ranks, wrap, optimizer = MODES[mode]
    at = {"while training": 5, "in a rollback": 5, "while one is written": 4, "at a checkpoint": 6}[case]
    bad = {5} if case == "in a rollback" else set()

    def set_up(rank, name, **options):
        checkpoints = {"asynchronous": case == "while one is written"}
        return Trainer(rank, ranks, tmp_path / name, wrap, optimizer=optimizer, checkpoints=checkpoints, **options)

    def job(rank):
        whole = set_up(rank, "whole")
        done = [whole.step(number, bad=number in bad) for number in range(1, 9)]
        whole.guarded.close()
        left = steps_until_stopped(set_up(rank, "parts"), 8, at=at, bad=bad, waits=False)
        second = set_up(rank, "parts")
        resumed = second.guarded.resume()
        again = second.steps(range(resumed.step + 1, 9))
        second.guarded.close()
        assert_same(second.state(), whole.state())
        return left, resumed.step, again == done[at:]

    assert on_every_rank_alike(job, ranks) == ((143, at), at, True)


def test_a_rank_without_a_forward_leaves_with_the_others(tmp_path):
    def job(rank):
        trainer = Trainer(rank, 2, tmp_path, alone, drift_check_every=0)
        try:
            for number in range(1, 9):
                trainer.guarded.zero_grad()
                if rank == 0 and number == 6:
                    for parameter in trainer.model.parameters():
                        parameter.grad = torch.full_like(parameter, 1e-3)
                else:
                    trainer.model(trainer.rows(number)).backward()
                if (rank, number) == (1, 5):
                    terminate()
                trainer.guarded.step()
        except SystemExit as stopped:
            left = stopped.code, trainer.guarded._guard.steps
        trainer.guarded.close()
        then = trainer.state()
        second = Trainer(rank, 2, tmp_path, alone, drift_check_every=0)
        resumed = second.guarded.resume()
        assert_same(second.state(), then)
        second.guarded.close()
        return left, resumed.step

    assert on_every_rank_alike(job) == ((143, 5), 5)


def test_a_signal_between_two_steps_lets_one_more_step_pass_on_all_ranks(tmp_path):
    def job(rank):
        trainer = Trainer(rank, 2, tmp_path, wrapped.ddp())
        called = []
        signal.signal(signal.SIGTERM, lambda *_: called.append(rank))
        trainer.guarded.close()
        trainer = Trainer(rank, 2, tmp_path, wrapped.ddp())
        trainer.steps([1, 2])
        if rank == 1:
            terminate()
        try:
            trainer.steps([3, 4, 5])
        except SystemExit as stopped:
            return stopped.code, trainer.guarded._guard.steps, called

    assert run(2, job) == [(143, 3, []), (143, 3, [1])]


def test_a_stopped_run_waits_for_a_checkpoint_that_one_rank_still_writes(tmp_path):
    class Gate:
        """Keeps whoever writes it down waiting until it opens; a copy is the gate itself."""

        def __init__(self):
            self.opened = threading.Event()

        def state_dict(self):
            return {"gate": self}

        def load_state_dict(self, state):
            pass

        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            assert self.opened.wait(30)
            return int, (7,)

    def job(rank):
        gate = Gate()
        if rank == 1:
            gate.opened.set()
        trainer = Trainer(
            rank, 2, tmp_path, wrapped.fsdp2(), track={"gate": gate}, checkpoints={"asynchronous": True, "keep": 9}
        )
        opening = threading.Timer(0.5, gate.opened.set)
        trainer.steps([1, 2, 3])
        trainer.step(4, waits=False)
        opening.start()
        left = steps_until_stopped(trainer, 8, at=5, waits=False)
        opening.join()
        gate.opened.set()
        second = Trainer(rank, 2, tmp_path, wrapped.fsdp2(), track={"gate": gate})
        steps = sorted(entry.step for entry in second.archive.catalogue.entries)
        resumed = second.guarded.resume().step
        second.guarded.close()
        return left, steps, resumed

    assert on_every_rank_alike(job) == ((143, 5), [3, 5], 5)
