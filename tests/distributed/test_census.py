import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as SplitAlong

from stabilityguard.distributed.census import Census, PartialGradient, ReplicaSet
from stabilityguard.distributed.peers import ALONE, Peers
from stabilityguard.distributed.shards import Shard, find_shards
from tests.distributed.ranks import run
from tests.distributed.wrapped import hsdp, make

patiently = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def shard(layer, name, identity="whole", gradient=None, elements=2):
    parameter = nn.Parameter(torch.zeros(elements))
    parameter.grad = gradient
    return Shard(layer, name, parameter, identity)


class Everyone:
    """Peers that say what they hold when they are asked, without any process group."""

    def __init__(self, held):
        self.held, self.told = held, []

    def __len__(self):
        return len(self.held)

    def gather(self, value, doing):
        self.told.append(value)
        return self.told


def counts(*held, is_wrapped=False):
    """The census of every rank, given the shards of each."""
    everyone = Everyone(held)
    for shards in held:
        Census.take(shards, everyone, is_wrapped=is_wrapped)
    words = everyone.told

    class Told(Everyone):
        def gather(self, value, doing):
            return words

    return [Census.take(shards, Told(held), is_wrapped=is_wrapped) for shards in held]


# One process ----------------------------------------------------------------------------------------------------------


def test_one_process_holds_everything_alone():
    census = Census.take([shard("a", "weight"), shard("a", "bias"), shard("b", "weight")], ALONE, is_wrapped=False)
    assert census.layers == ("a", "b")
    assert census.holders == (1, 1, 1)
    assert census.layer_holders == (1, 1)
    assert (census.partial, census.replicas, census.partial_elements) == ((), (), 0)


def test_nothing_at_all_can_be_counted():
    census = Census.take([], ALONE, is_wrapped=False)
    assert (census.layers, census.holders, census.replicas) == ((), (), ())


# Who holds what -------------------------------------------------------------------------------------------------------


def test_replicas_are_held_by_all():
    first, second = counts(*[[shard("a", "weight"), shard("b", "weight")] for _ in range(2)])
    assert first == second
    assert (first.holders, first.layer_holders, first.replicated) == ((2, 2), (2, 2), (True, True))
    assert first.replicas == (ReplicaSet(members=(0, 1), shards=(0, 1)),)


def test_shards_are_held_by_one_each_and_no_rank_has_the_whole_layer():
    censuses = counts(*[[shard("a", "weight", part)] for part in range(3)])
    for census in censuses:
        assert (census.holders, census.layer_holders, census.replicated) == ((1,), (3,), (False,))
        assert census.replicas == ()


def test_replicated_shards_are_held_by_their_replicas():
    censuses = counts(*[[shard("a", "weight", place % 2)] for place in range(4)])
    assert [census.holders for census in censuses] == [(2,)] * 4
    assert [census.layer_holders for census in censuses] == [(4,)] * 4
    assert [census.replicated for census in censuses] == [(False,)] * 4
    assert [[r.members for r in census.replicas] for census in censuses] == [[(0, 2), (1, 3)]] * 4
    assert [[r.shards for r in census.replicas] for census in censuses] == [[(0,), ()], [(), (0,)]] * 2


def test_a_layer_with_a_split_weight_and_a_whole_bias_is_not_replicated():
    censuses = counts(*[[shard("a", "weight", part), shard("a", "bias")] for part in range(2)])
    for census in censuses:
        assert (census.holders, census.layer_holders, census.replicated) == ((1, 2), (2,), (False,))
        assert census.replicas == (ReplicaSet(members=(0, 1), shards=(1,)),)


def test_a_layer_is_judged_replicated_by_those_who_hold_it():
    censuses = counts([shard("a", "weight")], [shard("b", "weight")], [shard("b", "weight")])
    assert [census.layers for census in censuses] == [("a", "b")] * 3
    assert [census.layer_holders for census in censuses] == [(1, 2)] * 3
    assert [census.replicated[1] for census in censuses] == [True] * 3
    assert [census.holders for census in censuses] == [(1,), (2,), (2,)]
    assert [census.replicas for census in censuses] == [
        (ReplicaSet(members=(1, 2), shards=()),),
        *[(ReplicaSet(members=(1, 2), shards=(0,)),)] * 2,
    ]


def test_ranks_that_share_different_shards_with_different_ranks_are_in_several_sets():
    everywhere, left, right = shard("a", "all"), shard("b", "left"), shard("b", "right")
    censuses = counts([everywhere, left], [everywhere, left, right], [right, everywhere])
    assert [[r.members for r in census.replicas] for census in censuses] == [[(0, 1), (0, 1, 2), (1, 2)]] * 3
    assert [[r.shards for r in census.replicas] for census in censuses] == [
        [(1,), (0,), ()],
        [(1,), (0,), (2,)],
        [(), (1,), (0,)],
    ]


def test_different_shapes_under_one_name_are_different_shards():
    censuses = counts([shard("a", "weight", ((2, 3), None))], [shard("a", "weight", ((3, 2), None))])
    for census in censuses:
        assert (census.layers, census.holders, census.replicated, census.replicas) == (("a",), (1,), (False,), ())


def test_a_rank_that_holds_the_same_elements_twice_counts_once():
    twice = [shard("a", "weight"), shard("a", "weight")]
    assert [census.holders for census in counts(twice, [shard("a", "weight")])] == [(2, 2), (2,)]


# Empty shards ---------------------------------------------------------------------------------------------------------


def test_a_rank_without_elements_does_not_hold_the_layer():
    holder, empty = counts([shard("a", "weight", "rows 0 to 1")], [shard("a", "weight", None)])
    assert holder.layers == empty.layers == ("a",)
    assert holder.layer_holders == empty.layer_holders == (1,)
    assert (holder.holders, empty.holders) == ((1,), (1,))
    assert holder.replicas == empty.replicas == ()


def test_empty_shards_are_no_replicas_of_each_other():
    censuses = counts([shard("a", "weight", 0)], [shard("a", "weight", None)], [shard("a", "weight", None)])
    assert [census.holders for census in censuses] == [(1,)] * 3
    assert [census.replicas for census in censuses] == [()] * 3


def test_a_layer_of_which_nobody_holds_an_element_is_counted_without_dividing_by_zero():
    for census in counts([shard("a", "weight", None)], [shard("a", "weight", None)]):
        assert (census.layers, census.layer_holders, census.holders) == (("a",), (1,), (1,))


# Who reduces the gradients ------------------------------------------------------------------------------------------


def test_plain_replicas_without_a_wrapper_are_reduced_by_hand():
    alike = [[shard("a", "weight")], [shard("a", "weight")]]
    assert [census.is_reduced_by_hand for census in counts(*alike)] == [True, True]
    assert [census.is_reduced_by_hand for census in counts(*alike, is_wrapped=True)] == [False, False]


def test_shards_and_what_a_wrapper_made_are_not_reduced_by_hand():
    assert not any(census.is_reduced_by_hand for census in counts([shard("a", "weight", 0)], [shard("a", "weight", 1)]))
    flat = [Shard("a", "weight", nn.Parameter(torch.ones(2)), "whole", trigger=torch.ones(2))]
    assert not any(census.is_reduced_by_hand for census in counts(flat, flat))
    assert not Census.take([shard("a", "weight")], ALONE, is_wrapped=False).is_reduced_by_hand


def test_replicas_of_other_ranks_count_too():
    censuses = counts([shard("a", "weight")], [shard("b", "weight")], [shard("b", "weight")])
    assert [census.is_reduced_by_hand for census in censuses] == [True] * 3


# The order of the layers ----------------------------------------------------------------------------------------------


def test_the_layers_are_the_first_ranks_then_what_it_lacks_of_the_second_and_so_on():
    held = [[shard(name, "weight") for name in names] for names in ("ca", "bad", "eb")]
    assert [census.layers for census in counts(*held)] == [("c", "a", "b", "d", "e")] * 3


HOLDINGS = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([0, 1, None])), unique=True, max_size=6)


@patiently
@given(st.lists(HOLDINGS, min_size=2, max_size=4))
def test_every_rank_counts_the_same_and_each_element_once(held):
    shards = [[shard(layer, "weight", identity) for layer, identity in of_rank] for of_rank in held]
    censuses = counts(*shards)
    first = censuses[0]
    for census in censuses:
        assert (census.layers, census.layer_holders, census.replicated) == (
            first.layers,
            first.layer_holders,
            first.replicated,
        )
        assert [r.members for r in census.replicas] == [r.members for r in first.replicas]
    weights = sum(
        1 / holders
        for of_rank, census in zip(shards, censuses, strict=True)
        for part, holders in zip(of_rank, census.holders, strict=True)
        if part.identity is not None
    )
    distinct = {part.key for of_rank in shards for part in of_rank if part.identity is not None}
    assert weights == pytest.approx(len(distinct))


# Partial gradients ----------------------------------------------------------------------------------------------------


class Summed(torch.Tensor):
    """A gradient that counts as the sum of what the ranks along a mesh dimension hold."""

    @staticmethod
    def over(ranks, elements, operation="sum"):
        gradient = torch.zeros(elements).as_subclass(Summed)
        gradient.placements = (Partial(operation),)
        gradient.device_mesh = type("Mesh", (), {"size": lambda self, dimension: ranks})()
        return gradient


def partials(*gradients, identity="whole"):
    return [[shard("plain", "weight"), shard("a", "weight", identity, gradient, elements=3)] for gradient in gradients]


def test_a_partial_gradient_has_a_place_among_the_elements_that_travel():
    for census in counts(*partials(Summed.over(2, 3), Summed.over(2, 3))):
        assert census.partial == (PartialGradient(shard=1, layer=1, elements=slice(0, 3), weight=1.0),)
        assert census.partial_elements == 3


def test_a_partial_mean_weighs_each_term_by_the_number_of_its_holders():
    for census in counts(*partials(*[Summed.over(4, 3, "avg") for _ in range(4)])):
        assert [gradient.weight for gradient in census.partial] == [0.25]


def test_a_partial_gradient_that_only_some_dimensions_of_the_mesh_sum_is_not_counted_for_each_replica():
    for census in counts(*partials(*[Summed.over(2, 3) for _ in range(4)])):
        assert [gradient.weight for gradient in census.partial] == [0.5]


def test_several_partial_gradients_lie_side_by_side():
    held = [
        [
            shard("a", "weight", "whole", Summed.over(2, 3), elements=3),
            shard("b", "weight", "whole", Summed.over(2, 5), elements=5),
        ]
        for _ in range(2)
    ]
    for census in counts(*held):
        assert [(p.layer, p.elements) for p in census.partial] == [(0, slice(0, 3)), (1, slice(3, 8))]
        assert census.partial_elements == 8


def test_a_rank_that_lacks_the_partial_shard_knows_of_its_elements():
    with_it, without = counts(partials(Summed.over(1, 3))[0], [shard("plain", "weight")])
    assert [p.shard for p in with_it.partial] == [1]
    assert [p.shard for p in without.partial] == [None]
    assert with_it.partial_elements == without.partial_elements == 3


def test_complex_elements_count_twice():
    gradient = Summed.over(2, 3)
    complex_gradient = torch.zeros(3, dtype=torch.complex64).as_subclass(Summed)
    complex_gradient.placements, complex_gradient.device_mesh = gradient.placements, gradient.device_mesh
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    parameter.grad = complex_gradient
    assert Census.take([Shard("a", "weight", parameter, "whole")], ALONE, is_wrapped=False).partial_elements == 6


# Ranks that speak -----------------------------------------------------------------------------------------------------


def real_counts(rank):
    model = make()
    peers = Peers.of(None, model.parameters())
    plain = Census.take(find_shards(model, model.parameters()), peers, is_wrapped=False)
    hybrid = hsdp()(copy.deepcopy(model))
    mixed = Census.take(find_shards(hybrid, hybrid.parameters()), peers, is_wrapped=False)
    mesh = init_device_mesh("cpu", (2, 2))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, (Replicate(), SplitAlong(0)), run_check=False))
    parameter.grad = DTensor.from_local(torch.ones(2, 3), mesh, (Partial(), SplitAlong(0)), run_check=False)
    layer = nn.Module()
    layer.weight = parameter
    summed = Census.take(find_shards(layer, layer.parameters()), peers, is_wrapped=False)
    return plain, mixed, summed


@pytest.fixture(scope="module")
def real():
    return list(zip(*run(4, real_counts), strict=True))


def test_real_ranks_count_plain_replicas(real):
    plain, _, _ = real
    assert all(census == plain[0] for census in plain)
    assert set(plain[0].holders) == {4}
    assert plain[0].is_reduced_by_hand
    assert all(plain[0].replicated)
    assert [r.members for r in plain[0].replicas] == [(0, 1, 2, 3)]


def test_real_ranks_count_replicated_shards(real):
    _, mixed, _ = real
    assert not any(census.is_reduced_by_hand for census in mixed)
    assert mixed[0].layers == mixed[3].layers
    assert [[r.members for r in census.replicas] for census in mixed] == [[(0, 2), (1, 3)]] * 4
    assert [[bool(r.shards) for r in census.replicas] for census in mixed] == [[True, False], [False, True]] * 2
    assert mixed[0].layer_holders[mixed[0].layers.index("head")] == 2
    assert mixed[0].layer_holders[mixed[0].layers.index("blocks.0.up")] == 4


def test_real_partial_gradients_of_split_parameters_are_counted_part_by_part(real):
    _, _, summed = real
    assert [census.partial_elements for census in summed] == [12] * 4
    assert [[p.shard for p in census.partial] for census in summed] == [[0, None], [None, 0]] * 2
    assert {p.weight for census in summed for p in census.partial} == {1.0}
