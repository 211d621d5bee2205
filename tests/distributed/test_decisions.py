"""What one rank sees, all ranks act upon: the same action, told in the same words, at the same step."""

import contextlib
import copy
import io
import math
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stabilityguard import Budget, GradientSpikeError, GuardedOptimizer, SnapshotPolicy
from stabilityguard.errors import DisagreementError
from tests.distributed.ranks import run
from tests.distributed.wrapped import (
    Odd,
    ddp,
    fsdp1,
    fsdp2,
    hsdp,
    local_part,
    make,
    rows,
)
from tests.support import assert_same

LAYERS = ["(root)", "inp", "blocks.0.up", "blocks.0.norm", "blocks.0.down", "head"]


class Small(Odd):
    def __init__(self):
        super().__init__(depth=1)


class Trainer:
    """A guarded model on one rank; ``step`` trains on this rank's part of the step's batch."""

    def __init__(self, wrap=None, *, optimizer=torch.optim.AdamW, lr=1e-3, group=None, **options):
        unwrapped = make(Small)
        self.model = unwrapped if wrap is None else wrap(unwrapped)
        self.base = optimizer(self.model.parameters(), lr=lr)
        options = {"verbose": False, "warmup_steps": 3, **options}
        self.guarded = GuardedOptimizer(self.base, self.model, process_group=group, **options)
        self.part, self.parts = dist.get_rank(group), dist.get_world_size(group)
        self.steps = 0

    def batch(self, step):
        return rows(step, self.part, self.parts)

    def step(self, *, loss_factor=1.0, edit=None, batch=None, **options):
        """Trains one step on this rank; ``edit(model)`` may change gradients as backward leaves them."""
        self.steps += 1
        self.guarded.zero_grad()
        loss = self.model(self.batch(self.steps) if batch is None else batch) * loss_factor
        loss.backward()
        if edit is not None:
            edit(self.model)
        self.guarded.step(**{"loss": loss, **options})
        return self.record

    def train(self, steps):
        return [self.step() for _ in range(steps)]

    @property
    def record(self):
        return self.guarded.last_record

    def state(self):
        """Copies of this rank's part of parameters and optimizer state."""
        parameters = list(self.model.parameters())
        states = [dict(self.base.state.get(p, {})) for p in parameters]
        kept = [{k: local_part(v) if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in states]
        return copy.deepcopy(([local_part(p).detach() for p in parameters], kept))


def words(record):
    """All that a record says, its tensors included."""
    layers = record.layers
    tensors = (layers.norms, layers.baselines, layers.ratios, layers.present)
    return str(record), layers.names, layers.nan, layers.inf, [tensor.tolist() for tensor in tensors]


def assert_alike(told):
    """Whether all ranks told the same; NaN equals NaN."""
    assert len(set(map(repr, told))) == 1, told


def gradients(model, layer):
    """This rank's gradients of a layer."""
    module = dict(model.named_modules())["" if layer == "(root)" else layer]
    return [local_part(p.grad) for p in module.parameters(recurse=False) if p.grad is not None]


def fill(layer, value):
    """Writes ``value`` into the first element that this rank holds of the layer's gradient."""

    def edit(model):
        prefix = "module." if isinstance(model, DistributedDataParallel) else ""
        held = [gradient for gradient in gradients(model, prefix + layer) if gradient.numel()]
        held[0].view(-1)[0] = value

    return edit


def fill_flat(value):
    """Writes ``value`` into the first element that this rank holds of the first gradient."""

    def edit(model):
        next(p.grad for p in model.parameters() if p.grad is not None)[0] = value

    return edit


def multiply(factor):
    def edit(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)

    return edit


def on_rank(rank, edit):
    return edit if dist.get_rank() == rank else None


@contextlib.contextmanager
def spoiled_before_reduction(model, layer, value):
    """Inside backward, before anything is reduced, this rank's gradients of the layer become ``value``."""
    module = dict(model.named_modules())[f"module.{layer}"]

    def spoil(parameter):
        parameter.grad.fill_(value)

    hooks = [p.register_post_accumulate_grad_hook(spoil) for p in module.parameters(recurse=False)]
    yield
    for hook in hooks:
        hook.remove()


# Skipping together ---------------------------------------------------------------------------------------------------


def _nan_in_one_shard(rank, wrap, bad_rank, edit):
    trainer = Trainer(wrap)
    trainer.train(2)
    before = trainer.state()
    record = trainer.step(edit=on_rank(bad_rank, edit))
    assert_same(trainer.state(), before)
    trainer.step()
    return words(record), record.action, record.kind, record.trigger_layer, record.bad_ranks, trainer.record.action


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_nan_in_one_ranks_shard_makes_every_rank_skip(bad_rank):
    told = run(2, _nan_in_one_shard, fsdp2(), bad_rank, fill("blocks.0.up", math.nan))
    assert_alike(told)
    assert told[0][1:] == ("skip", "nan", "blocks.0.up", (bad_rank,), "step")


def test_nan_in_one_replica_of_one_shard_makes_every_rank_skip():
    told = run(4, _nan_in_one_shard, hsdp(), 3, fill("blocks.0.up", math.nan))
    assert_alike(told)
    assert told[0][1:] == ("skip", "nan", "blocks.0.up", (3,), "step")


def test_nan_in_one_ranks_part_of_a_flat_parameter_makes_every_rank_skip():
    told = run(2, _nan_in_one_shard, fsdp1("FULL_SHARD", use_orig_params=False), 1, fill_flat(math.nan))
    assert_alike(told)
    _, action, kind, layer, bad_ranks, next_action = told[0]
    assert (action, kind, bad_ranks, next_action) == ("skip", "nan", (1,), "step")
    assert layer in LAYERS


def _only_one_loss_is_nan(rank, wrap):
    trainer = Trainer(wrap)
    trainer.train(2)
    before = trainer.state()
    record = trainer.step(**({"loss": math.nan} if rank == 1 else {}))
    assert_same(trainer.state(), before)
    return words(record), record.action, record.kind, record.trigger_layer, record.bad_ranks


@pytest.mark.parametrize("wrap", [ddp(), fsdp2()], ids=["ddp", "fsdp2"])
def test_a_nan_loss_on_any_rank_makes_every_rank_skip(wrap):
    told = run(2, _only_one_loss_is_nan, wrap)
    assert_alike(told)
    assert told[0][1:] == ("skip", "nan", None, (1,))


def _veto(rank):
    trainer = Trainer(ddp())
    trainer.train(2)
    before = trainer.state()
    if rank == 1:
        trainer.guarded.veto("the batch looks odd")
    record = trainer.step()
    assert_same(trainer.state(), before)
    after = trainer.step()
    return words(record), record.action, record.kind, record.reason, record.bad_ranks, after.action


def test_a_veto_of_one_rank_skips_on_all_and_says_whose_it_was_and_why():
    told = run(2, _veto)
    assert_alike(told)
    assert told[0][1:] == ("skip", "veto", "veto of rank 1: the batch looks odd", (1,), "step")


def _vetoes_of_several(rank):
    trainer = Trainer(ddp())
    if rank != 1:
        trainer.guarded.veto(f"not mine, says {rank}")
    record = trainer.step()
    return record.reason, record.bad_ranks


def test_vetoes_of_several_ranks_are_all_told():
    reason = "veto of rank 0: not mine, says 0; veto of rank 2: not mine, says 2"
    assert run(3, _vetoes_of_several) == [(reason, (0, 2))] * 3


def _vetoes_in_a_row(rank):
    trainer = Trainer(ddp(), budget=Budget(consecutive_skips=2))
    actions = []
    for _ in range(5):
        if rank == 1:
            trainer.guarded.veto("again")
        actions.append(trainer.step().action)
    return actions, trainer.step().action


def test_vetoes_count_towards_no_budget_on_any_rank():
    assert run(2, _vetoes_in_a_row) == [(["skip"] * 5, "step")] * 2


def _no_data_on_one_rank(rank, value):
    trainer = Trainer()  # replicas without a wrapper: nothing else speaks between the ranks
    if rank == 0:
        trainer.model(rows(1)).backward()
        if value is not None:
            fill("head", value)(trainer.model)
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients)) if gradients else None
    before = trainer.state()[0]
    trainer.guarded.step()
    unchanged = all(torch.equal(p, q) for p, q in zip(trainer.state()[0], before, strict=True))
    absent = all(p.grad is None for p in trainer.model.parameters())
    return words(trainer.record), trainer.record, norm, unchanged, absent


def test_a_rank_that_calls_step_without_gradients_agrees_with_the_others():
    told = run(2, _no_data_on_one_rank, None)
    assert_alike([of_rank[0] for of_rank in told])
    (_, record, norm, unchanged, _), (_, _, _, *other) = told
    assert record.action == "step"
    assert record.rank_losses[1] is None
    assert record.loss == record.rank_losses[0]
    assert record.global_norm == pytest.approx(norm)
    assert not unchanged
    assert other == [True, True]


def test_a_rank_without_gradients_skips_with_the_others_and_still_has_none():
    told = run(2, _no_data_on_one_rank, math.inf)
    assert_alike([of_rank[0] for of_rank in told])
    assert (told[0][1].action, told[0][1].bad_ranks) == ("skip", (0,))
    assert [of_rank[3:] for of_rank in told] == [(True, False), (True, True)]


class Logits(Small):
    """Returns no loss, but what one is computed from."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain) * self.tri.sum()


def _loss_on_one_rank(rank):
    model = DistributedDataParallel(make(Logits))
    guarded = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, verbose=False)
    loss = model(rows(1, rank, 2)).square().mean()
    loss.backward()
    guarded.step(**({"loss": loss} if rank == 0 else {}))
    record = guarded.last_record
    return words(record), record.action, record.loss == record.rank_losses[0], record.rank_losses[1]


def test_a_rank_without_a_loss_leaves_the_mean_to_the_others():
    told = run(2, _loss_on_one_rank)
    assert_alike(told)
    assert told[0][1:] == ("step", True, None)


# Spikes --------------------------------------------------------------------------------------------------------------


def _large_loss_on_one_rank(rank, wrap, threshold):
    trainer = Trainer(wrap, optimizer=torch.optim.SGD, lr=1e-4, spike_threshold=threshold)
    trainer.train(8)
    record = trainer.step(loss_factor=14.0 if rank == 1 else 1.0)
    trainer.train(3)
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in trainer.model.parameters()]
    memory = trainer.guarded.state_dict()["stabilityguard"]
    told = words(record), words(trainer.record), [p.tolist() for p in parameters], str(memory)
    return told, record.action, record.kind, record.bad_ranks


@pytest.mark.parametrize("wrap", [ddp(), fsdp2()], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize(("threshold", "action"), [(3.0, "skip"), (100.0, "step")])
def test_a_loss_fourteen_times_as_large_on_one_rank_is_skipped_by_all_or_by_none(wrap, threshold, action):
    told = run(2, _large_loss_on_one_rank, wrap, threshold)
    assert_alike(told)
    kind, bad_ranks = ("spike", (1,)) if action == "skip" else (None, ())
    assert told[0][1:] == (action, kind, bad_ranks)


def _large_shard(rank, factor):
    trainer = Trainer(fsdp2(), optimizer=torch.optim.SGD, lr=1e-4, spike_threshold=5.0)
    trainer.train(8)
    trainer.step(edit=on_rank(1, multiply(factor)))
    record = trainer.record
    trainer.train(4)
    return words(record), words(trainer.record), str(trainer.guarded.state_dict()["stabilityguard"]), record.action


def test_one_ranks_share_above_the_threshold_never_splits_the_ranks():
    actions = []
    for factor in (1.0, 10.0, 1000.0):
        told = run(2, _large_shard, factor)
        assert_alike(told)
        actions.append(told[0][3])
    assert actions[0] == "step"
    assert actions[-1] == "skip"


# Raising -------------------------------------------------------------------------------------------------------------


def _raises(rank, wrap, log_dir):
    trainer = Trainer(wrap, nan_action="raise", log_dir=log_dir)
    trainer.train(2)
    before = trainer.state()
    start = time.monotonic()
    with pytest.raises(GradientSpikeError) as caught:
        trainer.step(edit=on_rank(1, fill("blocks.0.norm", math.nan)))
    assert_same(trainer.state(), before)
    error = caught.value
    return type(error), str(error), error.layer, error.ranks, error.report_path, time.monotonic() - start


@pytest.mark.parametrize("wrap", [ddp(), fsdp2()], ids=["ddp", "fsdp2"])
def test_all_ranks_raise_the_same_error_that_names_the_rank_and_the_layer(wrap, tmp_path):
    told = run(2, _raises, wrap, str(tmp_path))
    assert {of_rank[0] for of_rank in told} == {GradientSpikeError}
    messages = [of_rank[1] for of_rank in told]
    assert len({message.partition("; report: ")[0] for message in messages}) == 1
    assert all("rank 1" in message and "blocks.0.norm" in message for message in messages)
    assert [of_rank[2:4] for of_rank in told] == [("blocks.0.norm", (1,))] * 2
    assert os.path.exists(told[0][4])
    assert told[1][4] is None
    assert messages[0].endswith(f"report: {told[0][4]}")
    assert messages[1].endswith("report: written by the first rank")
    assert max(of_rank[5] for of_rank in told) < 5


# The ladder ----------------------------------------------------------------------------------------------------------


def _skips_in_a_row(rank):
    trainer = Trainer(ddp(), budget=Budget(consecutive_skips=3))
    told = []
    for bad_rank in (0, 1, None, 1, 0, 1):
        edit = on_rank(bad_rank, fill("head", math.inf)) if bad_rank is not None else None
        try:
            record = trainer.step(edit=edit)
        except GradientSpikeError:
            record = trainer.record
        told.append((record.action, record.reason, record.bad_ranks))
    return told


def test_trips_of_different_ranks_climb_one_ladder():
    told = run(2, _skips_in_a_row)
    assert_alike(told)
    assert [action for action, _, _ in told[0]] == ["skip", "skip", "step", "skip", "skip", "raise"]
    assert [reason[:9] for _, reason, _ in told[0] if reason] == ["trip 1 of", "trip 2 of"] * 2 + ["trip 3 of"]
    assert [ranks for _, _, ranks in told[0]] == [(0,), (1,), (), (1,), (0,), (1,)]


def _lasting_level(rank):
    trainer = Trainer(ddp(), optimizer=torch.optim.SGD, lr=1e-6, budget=Budget(consecutive_skips=3))
    trainer.train(6)
    records = [trainer.step(loss_factor=1e4) for _ in range(4)]
    return [words(record) for record in records], [record.action for record in records]


def test_a_level_that_lasts_is_accepted_by_all_ranks_together():
    told = run(2, _lasting_level)
    assert_alike(told)
    assert told[0][1] == ["skip", "skip", "step", "step"]


def _rollbacks(rank):
    policy, budget = SnapshotPolicy(every=2, keep=2, quarantine=0), Budget(rollbacks=2)
    trainer = Trainer(ddp(), nan_action="rollback", snapshots=policy, budget=budget)
    trainer.train(4)
    states = {4: trainer.state()}
    trainer.train(1)
    record = trainer.step(edit=on_rank(1, fill("head", math.nan)))
    assert_same(trainer.state(), states[record.restored_step])
    digest = [p.tolist() for p in trainer.model.parameters()]
    trainer.train(2)
    second = trainer.step(edit=on_rank(0, fill("inp", math.nan)))
    with pytest.raises(GradientSpikeError) as caught:
        trainer.step(edit=on_rank(1, fill("inp", math.nan)))
    message = str(caught.value).partition("; report")[0]
    return words(record), words(second), digest, (record.action, record.restored_step, second.action, message)


def test_all_ranks_roll_back_to_the_same_step_and_give_up_together():
    told = run(2, _rollbacks)
    assert_alike(told)
    action, restored, second, message = told[0][3]
    assert (action, restored, second) == ("rollback", 4, "rollback")
    assert "2 rollbacks within 1000 steps are all that the budget allows" in message
    assert "rank 1" in message


# Accumulation --------------------------------------------------------------------------------------------------------


def _windows(rank, windows, spoilt):
    """Trains on windows of three micro-batches, the last of which reduces; rank 0 spoils the first of some."""
    trainer = Trainer(ddp())
    actions = []
    for window in windows:
        for i in range(3):
            batch = rows(3 * window + i, rank, 2)
            with trainer.model.no_sync() if i < 2 else contextlib.nullcontext():
                if window in spoilt and i == 0 and rank == 0:
                    batch = batch * math.nan
                (trainer.model(batch) / 3).backward()
        trainer.guarded.step()
        actions.append((trainer.record.action, trainer.record.bad_ranks))
        if window in spoilt:
            assert not any(p.grad.any() for p in trainer.model.parameters())
        else:
            trainer.guarded.zero_grad()
    return actions, trainer.state()


def test_nan_in_one_ranks_unsynchronized_micro_batch_costs_one_window_and_no_more():
    told = run(2, _windows, [0, 1, 2, 3], [1])
    assert [of_rank[0] for of_rank in told] == [[("step", ()), ("skip", (0,)), ("step", ()), ("step", ())]] * 2
    clean = run(2, _windows, [0, 2, 3], [])
    for (_, state), (_, expected) in zip(told, clean, strict=True):
        assert_same(state, expected)
    assert_same(told[0][1], told[1][1])


# Who speaks ----------------------------------------------------------------------------------------------------------


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


# Ranks that are not in one state -------------------------------------------------------------------------------------


def _loads_alone(rank, odd_rank, change):
    trainer = Trainer(ddp())
    trainer.train(4)
    if rank == odd_rank:
        state = trainer.guarded.state_dict()
        change(state["stabilityguard"])
        trainer.guarded.load_state_dict(state)
    before = trainer.state()
    with pytest.raises(DisagreementError) as caught:
        trainer.step()
    assert_same(trainer.state(), before)
    error = caught.value
    return str(error), error.step, error.ranks, trainer.record.step


def other_memory(state):
    state["memory"] = {**state["memory"], "mean": state["memory"]["mean"] * 2}


def other_step(state):
    state["steps"] += 3


def test_a_checkpoint_loaded_on_one_rank_only_is_noticed_by_all_before_anything_is_applied():
    told = run(3, _loads_alone, 1, other_memory)
    assert_alike(told)
    message, step, ranks, last = told[0]
    assert (step, ranks, last) == (5, (1,), 4)
    digests = re.findall(r"\b[0-9a-f]{12}\b", message)
    assert len(set(digests)) == 2
    assert f"{digests[0]} on ranks 0, 2" in message
    assert f"{digests[1]} on rank 1" in message
    assert "step 5" in message


def test_ranks_that_count_their_steps_differently_are_noticed_by_all():
    told = run(3, _loads_alone, 2, other_step)
    assert_alike(told)
    message, _, ranks, _ = told[0]
    assert ranks == (2,)
    assert "the number of the step" in message
    assert "5 on ranks 0, 1" in message
    assert "8 on rank 2" in message


def test_two_ranks_that_differ_are_both_named_since_neither_is_the_majority():
    told = run(2, _loads_alone, 1, other_memory)
    assert_alike(told)
    assert told[0][2] == (0, 1)


def _other_ladder(rank):
    trainer = Trainer(ddp())
    trainer.train(1)
    if rank == 1:
        state = trainer.guarded.state_dict()
        state["stabilityguard"]["breaker"]["trips"] = 4
        trainer.guarded.load_state_dict(state)
    before = trainer.state()
    with pytest.raises(DisagreementError, match="what was done before step 2") as caught:
        trainer.step(edit=on_rank(0, fill("head", math.nan)))
    assert_same(trainer.state(), before)
    return str(caught.value), caught.value.step


def test_ladders_that_differ_are_noticed_before_the_ranks_act_differently():
    told = run(2, _other_ladder)
    assert_alike(told)
    assert told[0][1] == 2


# Closures ------------------------------------------------------------------------------------------------------------


def _closure(rank, bad_step):
    trainer = Trainer(ddp())
    told = []
    for step in range(1, 5):

        def closure(step=step):
            trainer.guarded.zero_grad()
            loss = trainer.model(trainer.batch(step)) * (math.nan if (step, rank) == (bad_step, 1) else 1.0)
            loss.backward()
            return loss

        before = trainer.state()
        returned = trainer.guarded.step(closure)
        if step == bad_step:
            assert_same(trainer.state(), before)
            assert math.isnan(returned.item()) == (rank == 1)
        told.append(words(trainer.record))
    return told, [p.tolist() for p in trainer.model.parameters()]


def test_a_closure_whose_loss_is_nan_on_one_rank_is_skipped_by_all():
    told = run(2, _closure, 3)
    assert_alike(told)
    assert ["action='skip'" in text for text, *_ in told[0][0]] == [False, False, True, False]


def _lbfgs(rank, bad_evaluation):
    model = ddp()(make(Small))
    base = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, tolerance_change=0.0, tolerance_grad=0.0)
    guarded = GuardedOptimizer(base, model, verbose=False)
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        guarded.zero_grad()
        loss = model(rows(1, rank, 2))
        (loss * (math.nan if (evaluations, rank) == (bad_evaluation, 1) else 1.0)).backward()
        return loss

    before = copy.deepcopy(model.state_dict())
    guarded.step(closure)
    moved = any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    record = guarded.last_record
    guarded.step(closure)
    parameters = [p.tolist() for p in model.parameters()]
    return words(record), record.action, moved, guarded.last_record.action, parameters


@pytest.mark.parametrize(("bad_evaluation", "action"), [(None, "step"), (1, "skip"), (3, "skip")])
def test_lbfgs_is_undone_on_all_ranks_wherever_an_evaluation_fails(bad_evaluation, action):
    told = run(2, _lbfgs, bad_evaluation)
    assert_alike(told)
    assert told[0][1:4] == (action, action == "step", "step")


# Several guards, several groups --------------------------------------------------------------------------------------


def _two_players(rank):
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    players = [DistributedDataParallel(player) for player in (generator, critic)]
    guards = [
        GuardedOptimizer(torch.optim.Adam(p.parameters(), lr=0.01), p, verbose=False, warmup_steps=2) for p in players
    ]
    of_generator, of_critic = guards
    told = []
    for step in range(1, 7):
        noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        of_critic.zero_grad()
        loss = players[1](players[0](noise).detach()).square().mean()
        (loss * (math.nan if (step, rank) == (4, 1) else 1.0)).backward()
        of_critic.step()
        of_generator.zero_grad()
        players[1].requires_grad_(False)
        players[1].module(players[0](noise)).mean().backward()
        players[1].requires_grad_(True)
        of_generator.step()
        told.append([(words(g.last_record), g.last_record.action) for g in guards])
    counts = [{int(s["step"]) for s in g.base_optimizer.state.values()} for g in guards]
    return told, counts, [p.tolist() for player in players for p in player.parameters()]


def test_two_guarded_optimizers_decide_each_for_itself_on_all_ranks():
    told = run(2, _two_players)
    assert_alike(told)
    steps, counts, _ = told[0]
    assert [[action for _, action in of_step] for of_step in steps] == [["step"] * 2] * 3 + [["step", "skip"]] + [
        ["step"] * 2
    ] * 2
    assert counts == [{6}, {5}]


def _halves(rank, log_dir):
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    log_dir = os.path.join(log_dir, str(rank // 2))
    trainer = Trainer(ddp(process_group=group), group=group, nan_action="raise", log_dir=log_dir)
    trainer.train(2)
    message, path = None, None
    try:
        trainer.step(edit=on_rank(3, fill("head", math.nan)))
    except GradientSpikeError as error:
        message, path = str(error), error.report_path
    else:
        trainer.train(5)
    return words(trainer.record), trainer.record.step, trainer.record.bad_ranks, message, path


def test_each_half_of_the_ranks_decides_for_itself(tmp_path):
    told = run(4, _halves, str(tmp_path))
    assert_alike([of_rank[0] for of_rank in told[:2]])
    assert_alike([of_rank[0] for of_rank in told[2:]])
    assert [of_rank[1:3] for of_rank in told] == [(8, ())] * 2 + [(3, (3,))] * 2
    assert [of_rank[3] is None for of_rank in told] == [True, True, False, False]
    assert all("on rank 3" in of_rank[3] for of_rank in told[2:])
    assert [of_rank[4] for of_rank in told] == [None, None, str(tmp_path / "1" / "spike_step3.json"), None]
    assert os.listdir(tmp_path / "0") == ["journal.jsonl"]


def test_the_first_rank_of_a_group_says_that_its_report_could_not_be_written(tmp_path):
    (tmp_path / "1").write_text("no directory")
    messages = [of_rank[3] for of_rank in run(4, _halves, str(tmp_path))]
    assert messages[2].endswith("report: not written")
    assert messages[3].endswith("report: written by the first rank")


# Optimizers whose step is a collective -------------------------------------------------------------------------------


def _zero_redundancy(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 (warns when it is imported)

    model = ddp()(make(Small))
    base = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    entered = []
    step = base.step
    base.step = lambda *args, **kwargs: entered.append(1) or step(*args, **kwargs)
    guarded = GuardedOptimizer(base, model, verbose=False)
    told = []
    for i in range(1, 6):
        guarded.zero_grad()
        model(rows(i, rank, 2)).backward()
        if (i, rank) == (3, 1):
            fill("inp", math.nan)(model)
        before = copy.deepcopy(model.state_dict())
        guarded.step()
        if i == 3:
            assert_same(model.state_dict(), before)
        told.append((words(guarded.last_record), len(entered)))
    return told, [p.tolist() for p in model.parameters()]


def test_no_rank_enters_a_sharded_optimizers_step_alone():
    told = run(2, _zero_redundancy)
    assert_alike(told)
    assert [entered for _, entered in told[0][0]] == [1, 2, 2, 3, 4]


# Clipping ------------------------------------------------------------------------------------------------------------

LIMIT = 1e-4


def _clipped(rank, wrap):
    trainer = Trainer(wrap, optimizer=torch.optim.SGD, lr=1.0, max_grad_norm=LIMIT)
    norm = trainer.step().global_norm
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
    return [p.detach().clone() for p in parameters], norm


@pytest.mark.parametrize("wrap", [ddp(), fsdp2()], ids=["ddp", "fsdp2"])
def test_clipping_is_to_the_norm_of_the_whole_model(wrap):
    told = run(2, _clipped, wrap)
    assert_same(told[0], told[1])
    model = make(Small)
    start = [p.detach().clone() for p in model.parameters()]
    model(rows(1, parts=2)).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
    assert norm > 2 * LIMIT
    assert told[0][1] == pytest.approx(norm, rel=1e-5)
    moves = [after - before for after, before in zip(told[0][0], start, strict=True)]
    expected = [-p.grad for p in model.parameters()]
    torch.testing.assert_close(moves, expected, rtol=1e-3, atol=2e-7)


# Which rank it was ---------------------------------------------------------------------------------------------------


def _spike_of_one_rank(rank, wrap, odd_rank, oddity):
    """Rank 1's gradients spike, and ``odd_rank`` does something else that is unusual in the same step."""
    trainer = Trainer(wrap, optimizer=torch.optim.SGD, lr=1e-4)
    trainer.train(5)
    if rank == odd_rank and oddity == "veto":
        trainer.guarded.veto("as it happens")

    def drop(model):
        for parameter in model.parameters():
            parameter.grad = None

    edit = drop if rank == odd_rank and oddity == "drop" else None
    with spoiled_before_reduction(trainer.model, "head", 1e3) if rank == 1 else contextlib.nullcontext():
        record = trainer.step(edit=edit)
    report = trainer.guarded.reports[-1].details
    norms = [list(entry["norms"]) for entry in report["ranks"]]
    return words(record), record.kind, record.trigger_layer, record.bad_ranks, norms


@pytest.mark.parametrize("oddity", ["veto", "drop"])
def test_a_spike_is_blamed_on_its_rank_whatever_else_happens_on_another(oddity):
    told = run(3, _spike_of_one_rank, ddp(), 2, oddity)
    assert_alike(told)
    assert told[0][1:4] == ("spike", "head", (1,))
    assert all("head" in norms for norms in told[0][4])


def _bad_batch_over_shards(rank):
    trainer = Trainer(fsdp1("FULL_SHARD", use_orig_params=True))
    trainer.train(2)
    record = trainer.step(loss_factor=math.nan if rank == 0 else 1.0)
    return words(record), record.kind, record.bad_ranks


def test_the_rank_that_alone_holds_a_layer_is_not_blamed_for_anothers_batch():
    told = run(2, _bad_batch_over_shards)
    assert_alike(told)
    assert told[0][1:] == ("nan", (0,))


def _bucket_view(rank, fault, bucket_view):
    trainer = Trainer(ddp(gradient_as_bucket_view=bucket_view))
    trainer.train(2)
    batch = trainer.batch(3)
    spoiled = contextlib.nullcontext()
    if rank == 1:
        if fault == "gradient":
            spoiled = spoiled_before_reduction(trainer.model, "head", math.nan)
        if fault == "input":
            batch[0, 0] = math.nan
    with spoiled:
        record = trainer.step(batch=batch, loss_factor=math.nan if (fault, rank) == ("loss", 1) else 1.0)
    return words(record), record.action, record.kind, record.bad_ranks


@pytest.mark.parametrize(
    ("fault", "bucket_view", "bad_ranks"),
    [
        ("gradient", True, ()),
        ("loss", True, (1,)),
        ("input", True, (1,)),
        ("gradient", False, (1,)),
        ("loss", False, (1,)),
        ("input", False, (1,)),
    ],
)
def test_no_rank_is_blamed_where_only_the_reduced_gradients_are_seen(fault, bucket_view, bad_ranks):
    told = run(2, _bucket_view, fault, bucket_view)
    assert_alike(told)
    assert told[0][1:] == ("skip", "nan", bad_ranks)
