"""Ranks that are not in one state are told so before anything is applied."""

import math
import re

import pytest

from stabilityguard.errors import DisagreementError
from tests.distributed.decisions import Trainer, assert_alike, fill, on_rank
from tests.distributed.ranks import run
from tests.distributed.wrapped import (
    ddp,
)
from tests.support import assert_same


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
