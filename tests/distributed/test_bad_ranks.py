"""Which rank it was."""

import contextlib
import math

import pytest
import torch

from tests.distributed.decisions import (
    Trainer,
    assert_alike,
    spoiled_before_reduction,
    words,
)
from tests.distributed.ranks import run
from tests.distributed.wrapped import (
    ddp,
    fsdp1,
)


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
