"""Closures, several guards, collective optimizers and clipping over ranks."""

import copy
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stabilityguard import GradientSpikeError, GuardedOptimizer
from tests.distributed.decisions import Small, Trainer, assert_alike, fill, on_rank, words
from tests.distributed.ranks import run
from tests.distributed.wrapped import (
    ddp,
    fsdp2,
    make,
    rows,
)
from tests.support import assert_same

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
