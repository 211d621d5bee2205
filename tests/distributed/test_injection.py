"""Faults on one of several ranks: in whatever wrapping, the gradient that this rank has first is the one spoiled."""

import math

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from stabilityguard import ConfigurationError
from stabilityguard.demo.gpt import CONTEXT, GPT
from stabilityguard.demo.strategies.pp import PipelineTrainer
from stabilityguard.testing import Faults
from tests.distributed.ranks import run
from tests.distributed.wrapped import ddp, fsdp1, fsdp2, local_part, make, norms_by_layer, rows
from tests.support import guard

FACTOR = 1000.0
LAYER = "blocks.1.up"

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch does not run on the CPU"
)

REDUCED = {
    "ddp": ddp(),
    "ddp, views": ddp(gradient_as_bucket_view=True),
    **{
        f"fsdp1 {strategy} {orig}": fsdp1(strategy, use_orig_params=orig)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        for orig in (False, True)
    },
}
"""Wrappings that reduce gradients over ranks after autograd has left them."""


def spoiled_norms(wrap, faults, rank):
    model = wrap(make())
    optimizer = guard(model)
    with faults.inject(model):
        model(rows(1, rank, 2)).backward()
        optimizer.step()
    return dict(optimizer.last_record.layer_norms), optimizer.last_record.nan_layers, optimizer.last_record.inf_layers


def norms_of_mean(factor):
    """Layer norms where rank 1 multiplies its own gradient of one layer before both are averaged."""
    models = [make(dtype=torch.float64) for _ in range(2)]
    for part, model in enumerate(models):
        model(rows(1, part, 2).double()).backward()
    for (name, mean), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        mean.grad = (mean.grad + other.grad * (factor if name.startswith(LAYER) else 1)) / 2
    return norms_by_layer(models[0])


@pytest.mark.parametrize("wrapping", REDUCED)
def test_a_spike_on_one_rank_is_in_the_mean(wrapping):
    faults = Faults().spike(LAYER, step=1, factor=FACTOR, rank=1)
    expected = norms_of_mean(FACTOR)
    assert expected[LAYER] > 300 * norms_of_mean(1.0)[LAYER]
    for norms, _, _ in run(2, lambda rank: spoiled_norms(REDUCED[wrapping], faults, rank)):
        assert norms == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wrapping", REDUCED)
def test_nan_and_inf_on_one_rank_are_in_their_layers_and_no_other(wrapping):
    faults = Faults().nan(LAYER, step=1, rank=1).inf("blocks.0.norm", step=1, rank=0)
    for norms, nan_layers, inf_layers in run(2, lambda rank: spoiled_norms(REDUCED[wrapping], faults, rank)):
        assert (nan_layers, inf_layers) == ([LAYER], ["blocks.0.norm"])
        assert sum(map(math.isfinite, norms.values())) == len(norms) - 2


def local_gradients(rank, faults):
    model = fsdp2()(make())
    with faults.inject(model):
        model(rows(1, rank, 2)).backward()
    return {name: local_part(p.grad).clone() for name, p in model.named_parameters()}


@needs_fsdp2
def test_under_fsdp2_the_shard_of_one_rank_is_spoiled_if_it_holds_any_element():
    def compare(rank):
        clean = local_gradients(rank, Faults())
        faults = Faults().spike(LAYER, step=1, factor=FACTOR, rank=1).nan("head", step=1, rank=1)
        faulty = local_gradients(rank, faults)
        assert rank == 0 or clean["head.weight"].numel() == 0
        return {name for name in clean if not torch.equal(clean[name], faulty[name])}, faulty, clean

    (first, _, _), (second, faulty, clean) = run(2, compare)
    assert (first, second) == (set(), {f"{LAYER}.weight", f"{LAYER}.bias"})
    assert all(torch.equal(faulty[name], clean[name] * FACTOR) for name in second)


def staged_gradients(rank, faults):
    torch.manual_seed(0)
    trainer = PipelineTrainer(GPT(width=8, depth=2, heads=2), rank, 2)
    text = torch.randint(256, (4, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    with faults.inject(trainer.model, micro_batches=trainer.micro_batches, criterion=trainer.criterion):
        loss = trainer.backward(text)
    return {name: p.grad for name, p in trainer.model.named_parameters()}, loss


def test_in_a_pipeline_a_fault_is_of_the_whole_step_on_the_rank_that_holds_the_layer():
    def compare(rank):
        clean, loss = staged_gradients(rank, Faults())
        faults = Faults().spike("blocks.0.mlp.up", step=1, factor=FACTOR, rank=0).nan("head", step=1, rank=1)
        faulty, same_loss = staged_gradients(rank, faults)
        assert (loss is None) == (rank == 0)
        assert loss == same_loss
        changed = {name for name in clean if not torch.equal(clean[name], faulty[name])}
        return changed, {name: float((faulty[name] / clean[name]).median()) for name in changed}

    (first, factors), (second, _) = run(2, compare)
    assert first == {"blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias"}
    assert factors == pytest.approx(dict.fromkeys(first, FACTOR), rel=1e-4)
    assert second == {"head.weight"}


def test_in_a_pipeline_the_loss_is_spoiled_in_the_criterion():
    def spoil(rank):
        gradients, loss = staged_gradients(rank, Faults().inf_loss(step=1, rank=1))
        return loss, all(not g.isfinite().all() for g in gradients.values())

    assert run(2, spoil) == [(None, True), (math.inf, True)]


def test_a_layer_that_is_not_here_is_refused_where_the_fault_is_to_happen_and_nowhere_else():
    def refuses(rank):
        try:
            with Faults().nan("elsewhere", step=1, rank=1).inject(fully_shard(make())):
                return False
        except ConfigurationError:
            return True

    assert run(2, refuses) == [False, True]
