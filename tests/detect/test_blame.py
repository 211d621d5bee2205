import math

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stabilityguard.detect.blame import OUTLYING, blame
from stabilityguard.detect.statistics import Evidence
from tests.distributed.ranks import run
from tests.support import Net, batch, guard

patiently = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

INF, NAN = math.inf, math.nan
LAYER = 3
BAD_KINDS = ["nan", "inf", "overflow", "scaler_overflow"]


def seen(share=None, own=None, **others):
    """What one rank knows of the layer; a number of None is one that it does not know."""
    return Evidence(shares={} if share is None else {LAYER: share}, own=None if own is None else {LAYER: own}, **others)


def verdict(kind, evidence, *, losses=None, layer=LAYER, replicated=True):
    return blame(kind, layer, [1.0] * len(evidence) if losses is None else losses, evidence, replicated=replicated)


# One process ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*BAD_KINDS, "spike", "veto"])
@pytest.mark.parametrize("layer", [LAYER, None])
@pytest.mark.parametrize("replicated", [True, False])
def test_one_process_has_nobody_else_to_blame(kind, layer, replicated):
    assert verdict(kind, [seen(1.0)], layer=layer, replicated=replicated) == (0,)


# What a rank's own batch shows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BAD_KINDS)
@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_blames_its_rank(kind, loss):
    assert verdict(kind, [seen(NAN)] * 3, losses=[1.0, loss, 2.0]) == (1,)


def test_a_bad_loss_blames_its_rank_also_where_no_layer_is_to_blame():
    assert verdict("nan", [seen()] * 3, losses=[1.0, 2.0, NAN], layer=None) == (2,)


def test_all_ranks_with_a_bad_loss_are_blamed():
    assert verdict("inf", [seen(INF)] * 4, losses=[INF, 1.0, -INF, 1.0]) == (0, 2)


def test_an_unknown_loss_is_no_bad_one():
    assert verdict("nan", [seen(NAN)] * 3, losses=[None, None, NAN]) == (2,)


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_bad_inputs_blame_their_rank(kind):
    assert verdict(kind, [seen(NAN), seen(NAN, bad_inputs=True)]) == (1,)


def test_bad_inputs_and_bad_losses_blame_their_ranks_together():
    evidence = [seen(NAN, bad_inputs=True), seen(NAN), seen(NAN)]
    assert verdict("nan", evidence, losses=[1.0, 1.0, NAN]) == (0, 2)


def test_a_bad_batch_is_blamed_rather_than_the_holders_of_the_elements_that_it_spoilt():
    evidence = [seen(NAN), seen(1.0), seen(NAN)]
    assert verdict("nan", evidence, losses=[1.0, NAN, 1.0], replicated=False) == (1,)


# Its gradients from before they were reduced --------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "bad"), [("nan", NAN), ("inf", INF)])
def test_the_own_gradients_tell_who_produced_what_all_have_after_the_reduction(kind, bad):
    assert verdict(kind, [seen(bad, 1.0), seen(bad, 1.0), seen(bad, bad)]) == (2,)


def test_replicas_whose_gradients_differ_were_not_reduced_and_tell_by_themselves():
    assert verdict("nan", [seen(1.0), seen(NAN)]) == (1,)


def test_own_gradients_and_bad_batches_are_blamed_together():
    evidence = [seen(NAN, 1.0), seen(NAN, NAN), seen(NAN, 1.0)]
    assert verdict("nan", evidence, losses=[INF, 1.0, 1.0]) == (0, 1)


def test_own_gradients_that_are_alike_tell_nothing_unless_they_are_surely_unreduced():
    assert verdict("nan", [seen(NAN, NAN)] * 2) == ()
    assert verdict("nan", [seen(NAN, NAN, is_unreduced=True)] * 2) == (0, 1)
    assert verdict("nan", [seen(NAN, NAN, is_unreduced=True), seen(NAN, NAN)]) == ()


def test_own_gradients_that_one_rank_lacks_tell_nothing():
    assert verdict("nan", [seen(NAN), seen(NAN, 1.0), seen(NAN, NAN)]) == ()
    assert verdict("nan", [seen(NAN, NAN), seen(NAN)]) == ()
    assert verdict("nan", [seen(NAN, NAN), seen(NAN)], losses=[1.0, NAN]) == (1,)


# Who holds the bad elements -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF])
def test_without_any_of_that_the_holders_of_the_bad_elements_are_blamed(bad):
    assert verdict("nan", [seen(1.0), seen(bad), seen(0.0), seen(bad)], replicated=False) == (1, 3)


def test_alike_shards_are_still_shards():
    assert verdict("nan", [seen(NAN), seen(NAN)], replicated=False) == (0, 1)


def test_a_rank_without_a_share_is_not_blamed():
    assert verdict("nan", [seen(NAN), seen()], replicated=False) == (0,)


# Spikes ---------------------------------------------------------------------------------------------------------------


def test_a_spike_is_blamed_on_the_rank_whose_own_gradient_is_the_largest():
    assert verdict("spike", [seen(50.0, 1.0), seen(50.0, 150.0), seen(50.0, 2.0)]) == (1,)


def test_a_spike_is_shared_by_the_ranks_within_a_factor_of_the_largest():
    near, far = 90.0 / OUTLYING, 90.0 / OUTLYING * 0.999
    assert verdict("spike", [seen(9.0, 90.0), seen(9.0, near), seen(9.0, far)]) == (0, 1)


def test_own_gradients_count_more_than_losses_in_a_spike():
    assert verdict("spike", [seen(50.0, 1.0), seen(50.0, 150.0)], losses=[99.0, 1.0]) == (1,)


def test_a_spike_that_only_losses_tell_of_is_blamed_on_the_outlier():
    assert verdict("spike", [seen(50.0)] * 4, losses=[1.0, 1.1, 30.0, 0.9]) == (2,)


def test_the_sign_of_a_loss_does_not_make_it_an_outlier():
    assert verdict("spike", [seen(50.0)] * 3, losses=[-1.0, 1.0, -30.0]) == (2,)


def test_a_loss_is_an_outlier_only_beyond_the_factor():
    assert verdict("spike", [seen(9.0), seen(1.0), seen(1.0)], losses=[1.0, OUTLYING, 1.0], replicated=False) == (0,)
    beyond = OUTLYING * 1.001
    assert verdict("spike", [seen(9.0), seen(1.0), seen(1.0)], losses=[1.0, beyond, 1.0], replicated=False) == (1,)


def test_one_known_loss_has_nothing_to_be_compared_with():
    assert verdict("spike", [seen(9.0), seen(1.0)], losses=[None, 1e9], replicated=False) == (0,)


def test_without_any_loss_there_is_no_outlier():
    assert verdict("spike", [seen(9.0), seen(1.0)], losses=[None, None], replicated=False) == (0,)


def test_a_spike_in_shards_without_an_outlying_loss_is_blamed_on_the_largest_share():
    assert verdict("spike", [seen(1.0), seen(100.0), seen(40.0)], replicated=False) == (1, 2)


def test_a_spike_of_two_ranks_can_be_told_by_their_losses():
    assert verdict("spike", [seen(50.0)] * 2, losses=[1.0, 30.0]) == (1,)


@patiently
@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6))
def test_the_rank_with_the_largest_own_gradient_always_has_a_part_in_a_spike(own):
    blamed = verdict("spike", [seen(5.0, value, is_unreduced=True) for value in own])
    assert own.index(max(own)) in blamed
    assert all(own[place] * OUTLYING >= max(own) for place in blamed)
    assert list(blamed) == sorted(set(blamed))


# Vetoes ---------------------------------------------------------------------------------------------------------------


def test_a_veto_is_blamed_on_those_who_cast_it():
    evidence = [seen(), seen(veto="too warm"), seen(bad_inputs=True), seen(veto="")]
    assert verdict("veto", evidence, layer=None) == (1, 3)


# What cannot be told --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*BAD_KINDS, "spike"])
def test_reduced_gradients_that_are_alike_tell_nothing(kind):
    assert verdict(kind, [seen(NAN)] * 3) == ()


@pytest.mark.parametrize("kind", [*BAD_KINDS, "spike"])
def test_no_layer_and_finite_losses_tell_nothing(kind):
    assert verdict(kind, [seen(NAN)] * 3, layer=None) == ()


def test_no_evidence_tells_nothing():
    assert verdict("nan", [], losses=[]) == ()
    assert verdict("veto", [], losses=[]) == ()


@patiently
@given(st.lists(st.sampled_from([1.0, NAN, INF, 0.0]), min_size=2, max_size=5), st.data())
def test_a_healthy_rank_is_never_blamed_for_what_its_own_gradients_show_to_be_anothers(own, data):
    losses = data.draw(st.lists(st.sampled_from([1.0, NAN, None]), min_size=len(own), max_size=len(own)))
    blamed = verdict("nan", [seen(NAN, value, is_unreduced=True) for value in own], losses=losses)
    guilty = [
        value - value != 0 or (loss is not None and loss != loss) for value, loss in zip(own, losses, strict=True)
    ]
    assert blamed == tuple(place for place, is_guilty in enumerate(guilty) if is_guilty)


# Layers that not all ranks hold ---------------------------------------------------------------------------------------


def test_replicas_are_compared_among_those_that_hold_the_layer():
    evidence = [seen(), seen(), seen(NAN), seen(NAN)]
    assert verdict("nan", evidence, losses=[None, None, 1.0, NAN]) == (3,)
    assert verdict("spike", [seen(), seen(), seen(9.0), seen(9.0)], losses=[None, None, 1.0, 99.0]) == (3,)


def small_head(rank, spoil):
    """One rank alone holds the last layer, which has a single row; what it holds was reduced over both."""
    model = Net()
    for module in (model.body, model.head, model):
        fully_shard(module)
    optimizer = guard(model, warmup_steps=2)
    for step in range(1, 6):
        optimizer.zero_grad()
        loss = model(batch(10 * step + rank))
        loss = loss * spoil if step == 5 and rank == 1 else loss
        loss.backward()
        optimizer.step(loss=loss)
    record = optimizer.last_record
    return record.kind, record.trigger_layer, record.bad_ranks


@pytest.mark.parametrize(("spoil", "kind"), [(NAN, "nan"), (1000.0, "spike")])
def test_the_only_holder_of_a_shard_is_not_blamed_for_another_ranks_batch(spoil, kind):
    assert run(2, small_head, spoil) == [(kind, "head", (1,))] * 2


class Stage(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.add_module(name, nn.Linear(4, 1))

    def forward(self, x):
        (layer,) = self.children()
        return layer(x).square().mean()


def two_stages(rank):
    """Ranks 0 and 1 replicate one stage of a pipeline, ranks 2 and 3 the other."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = Stage("first" if rank < 2 else "second")
    stage = DistributedDataParallel(stage, process_group=pairs[rank // 2], gradient_as_bucket_view=True)
    optimizer = guard(stage)
    loss = stage(batch(rank)) * (NAN if rank == 3 else 1.0)
    loss.backward()
    optimizer.step(loss=loss)
    return optimizer.last_record.trigger_layer, optimizer.last_record.bad_ranks


def test_the_replica_of_a_stage_is_not_blamed_for_its_twins_batch():
    assert run(4, two_stages) == [("second", (3,))] * 4
