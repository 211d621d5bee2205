import math
import re
from dataclasses import fields

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stabilityguard.distributed import consensus
from stabilityguard.distributed.census import Census, PartialGradient, ReplicaSet
from stabilityguard.distributed.consensus import PROTOCOL, ROW, Agreement, Ballot, Consensus, Shares
from stabilityguard.distributed.peers import ALONE, Peers
from tests.distributed.ranks import run
from tests.support import assert_same

patiently = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

INF, NAN = math.inf, math.nan
DIGEST = 2**48 - 1
FLAGS = [field.name for field in fields(Ballot) if field.default is False and field.name != "overflowed"]


def census(layers=2, *, holders=None, replicated=None, partial=(), replicas=(), by_hand=False):
    """A census of layers that one rank holds each, unless told otherwise."""
    return Census(
        layers=tuple("abcdefgh"[:layers]),
        holders=(1,) * layers,
        layer_holders=(1,) * layers if holders is None else tuple(holders),
        replicated=(False,) * layers if replicated is None else tuple(replicated),
        is_reduced_by_hand=by_hand,
        partial=tuple(partial),
        replicas=tuple(replicas),
    )


def partial(layer, start, stop):
    return PartialGradient(shard=None, layer=layer, elements=slice(start, stop), weight=1.0)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def shares(left=(1.0, 2.0), found=None, *, present=None, **others):
    """One rank's, which ``step()`` finds as backward left them by default."""
    return Shares(
        left=numbers(*left),
        found=numbers(*(left if found is None else found)),
        present=torch.tensor([True] * len(left) if present is None else present),
        **others,
    )


class Place:
    """Peers without a process group, seen from one of them."""

    def __init__(self, ranks, place):
        self.ranks, self.place, self.device = tuple(range(ranks)), place, torch.device("cpu")
        self.vector = None

    def __len__(self):
        return len(self.ranks)

    def all_reduce(self, vector, doing):
        if self.vector is not None:
            vector.copy_(self.vector)
        self.sent = vector.clone()


def summed(counted, *words):
    """What each of several ranks unpacks of the sum of their vectors; words are arguments of ``agree``."""
    places = [Place(len(words), place) for place in range(len(words))]
    for place, word in zip(places, words, strict=True):
        Consensus(counted, place).agree(*word)
    total = torch.stack([place.sent for place in places]).sum(dim=0)
    agreements = []
    for place, word in zip(places, words, strict=True):
        place.vector = total
        agreements.append(Consensus(counted, place).agree(*word))
    assert [bits(agreement) for agreement in agreements] == [bits(agreements[0])] * len(agreements)
    return agreements[0]


def bits(agreement):
    """Everything in an agreement down to the sign of a zero and the payload of a NaN."""
    tensors = [agreement.left, agreement.found]
    return [t.view(torch.int64).tolist() for t in tensors], agreement.present.tolist(), repr(agreement)


def alone(share, ballot=None, counted=None):
    ballot = Ballot(step=1) if ballot is None else ballot
    return Consensus(census(len(share.left)) if counted is None else counted, ALONE).agree(share, ballot)


# One process agrees with itself ---------------------------------------------------------------------------------------


def test_what_one_process_packs_is_what_it_unpacks():
    agreement = alone(shares((4.0, NAN), (INF, 0.0), present=[True, False]))
    assert_same(agreement.left, numbers(4.0, NAN))
    assert_same(agreement.found, numbers(INF, 0.0))
    assert agreement.present.tolist() == [True, False]
    assert agreement.checksums == ()
    assert len(agreement.ballots) == 1


def test_a_layer_is_present_in_one_process_however_small_its_gradient():
    assert alone(shares((0.0, 1e-300))).present.tolist() == [True, True]


@pytest.mark.parametrize("loss", [0.0, -0.0, 2.5, -1e300, 5e-324, INF, -INF, NAN])
def test_a_loss_is_told_bit_for_bit(loss):
    (ballot,) = alone(shares(loss=scalar(loss))).ballots
    assert repr(ballot.loss) == repr(loss)


def test_no_loss_is_not_a_loss_of_zero():
    assert alone(shares()).ballots[0].loss is None
    assert alone(shares(loss=scalar(0.0))).ballots[0].loss == 0.0


def test_a_loss_of_one_element_or_another_type_is_a_loss():
    assert alone(shares(loss=torch.tensor([0.5], dtype=torch.bfloat16))).ballots[0].loss == 0.5


@pytest.mark.parametrize(("overflow", "told"), [(None, False), (0.0, False), (1.0, True), (2.0, True)])
def test_an_overflow_is_told(overflow, told):
    share = shares(overflow=None if overflow is None else scalar(overflow))
    assert alone(share).ballots[0].overflowed is told


@pytest.mark.parametrize("name", ["scale_left", "scale_found"])
def test_scales_are_told_each_by_itself(name):
    (ballot,) = alone(shares(**{name: scalar(65536.0)})).ballots
    others = {"scale_left", "scale_found"} - {name}
    assert getattr(ballot, name) == 65536.0
    assert [getattr(ballot, other) for other in others] == [None]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_are_told_each_by_itself(flag):
    (ballot,) = alone(shares(), Ballot(step=1, **{flag: True})).ballots
    assert [name for name in FLAGS if getattr(ballot, name)] == [flag]


@pytest.mark.parametrize("name", ["decision", "memory"])
@pytest.mark.parametrize("digest", [0, 1, DIGEST, DIGEST - 1, 0x800000000001])
def test_digests_of_48_bits_are_exact(name, digest):
    assert getattr(alone(shares(), Ballot(step=1, **{name: digest})).ballots[0], name) == digest


def test_a_ballot_carries_the_protocol_of_the_one_who_packs():
    assert alone(shares()).ballots[0].protocol == PROTOCOL


WHOLE = st.integers(0, DIGEST)
FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=64)
SCALES = st.none() | st.floats(1e-30, 1e30)


@st.composite
def words(draw, layers=2):
    """What one rank might say, and the ballot that all should read."""
    told = {name: draw(WHOLE) for name in ("step", "signals", "decision", "memory")}
    told |= {name: draw(st.booleans()) for name in FLAGS}
    loss, overflow, passes = draw(st.none() | FLOATS), draw(st.none() | st.sampled_from([0.0, 1.0])), draw(WHOLE)
    scales = {name: draw(SCALES) for name in ("scale_left", "scale_found")}
    squares = st.lists(st.floats(0, 1e200), min_size=layers, max_size=layers)
    left, found = draw(squares), draw(squares)
    present = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    known = {"loss": loss, "overflow": overflow, **scales}
    share = shares(
        left,
        found,
        present=present,
        passes=passes,
        **{name: None if value is None else scalar(value) for name, value in known.items()},
    )
    read = Ballot(**told, **scales, passes=passes, loss=loss, overflowed=bool(overflow))
    return (share, Ballot(**told)), read


@patiently
@given(words())
def test_every_field_of_a_row_arrives_as_it_was_sent(word):
    (share, ballot), read = word
    assert repr(alone(share, ballot).ballots) == repr((read,))


# Several ranks --------------------------------------------------------------------------------------------------------


@patiently
@given(st.lists(words(), min_size=2, max_size=4))
def test_every_ballot_arrives_in_the_sum_and_no_other_touches_it(said):
    agreement = summed(census(holders=[len(said)] * 2), *(word for word, _ in said))
    for ballot, (_, read) in zip(agreement.ballots, said, strict=True):
        assert repr(vars(ballot)).replace("-0.0", "0.0") == repr(vars(read)).replace("-0.0", "0.0")
    left = torch.stack([share.left for (share, _), _ in said])
    assert agreement.left.tolist() == pytest.approx(left.sum(dim=0).tolist(), rel=1e-12)
    present = torch.stack([share.present for (share, _), _ in said])
    assert agreement.present.tolist() == present.any(dim=0).tolist()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("where", ["left", "found"])
def test_a_bad_share_of_any_rank_shows_in_its_layer_and_in_no_other(bad, where):
    spoilt = shares(**{"left": (1.0, 1.0), "found": (1.0, 1.0), where: (1.0, bad)})
    agreement = summed(census(), *[(share, Ballot(step=1)) for share in (shares(), spoilt, shares())])
    assert not bool(getattr(agreement, where)[1].isfinite())
    other = agreement.found if where == "left" else agreement.left
    assert bool(getattr(agreement, where)[0].isfinite())
    assert bool(other.isfinite().all())


def test_infinite_losses_of_opposite_signs_both_arrive():
    losses = (INF, -INF, NAN, 1.0, None)
    agreement = summed(
        census(), *[(shares(loss=None if loss is None else scalar(loss)), Ballot(step=1)) for loss in losses]
    )
    assert repr([ballot.loss for ballot in agreement.ballots]) == repr(list(losses))


# The layout -----------------------------------------------------------------------------------------------------------


def documented(numbers_written):
    """The sizes of the fields in the module's docstring, in order, given what is written there in numbers."""
    names = "left|found|present|spreads|left raw|found raw|checksums|rows"
    lines = re.findall(
        rf"^    ({names}) {{2,}}(\d \S or 0|\S x \d+|one for each member|[A-Z]\b)", consensus.__doc__, re.M
    )
    return {name: numbers_written[written] for name, written in lines}


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_vector_is_laid_out_as_documented(by_hand):
    counted = census(
        3,
        partial=[partial(0, 0, 4), partial(2, 4, 5)],
        replicas=[ReplicaSet(members=(0, 1, 2), shards=(0,)), ReplicaSet(members=(1, 2), shards=(1,))],
        by_hand=by_hand,
    )
    share = shares(
        (11.0, 12.0, 13.0),
        (21.0, 22.0, 23.0),
        present=[True, False, True],
        left_raw=numbers(31.0, 32.0, 33.0, 34.0, 35.0),
        found_raw=numbers(41.0, 42.0, 43.0, 44.0, 45.0),
    )
    place = Place(3, 1)
    Consensus(counted, place).agree(share, Ballot(step=7), [torch.tensor(51), torch.tensor(52)])
    spreads = 6 if by_hand else 0
    sizes = documented({"L": 3, "2 L or 0": spreads, "E": 5, "one for each member": 5, "R x 12": 3 * len(ROW)})
    parts = dict(zip(sizes, torch.split(place.sent, list(sizes.values())), strict=True))
    rows = parts.pop("rows").view(3, len(ROW))
    assert {name: part.tolist() for name, part in parts.items()} == {
        "left": [11.0, 12.0, 13.0],
        "found": [21.0, 22.0, 23.0],
        "present": [1.0, 0.0, 1.0],
        "spreads": [121.0, 144.0, 169.0, 441.0, 484.0, 529.0] if by_hand else [],
        "left raw": [31.0, 32.0, 33.0, 34.0, 35.0],
        "found raw": [41.0, 42.0, 43.0, 44.0, 45.0],
        "checksums": [0.0, 51.0, 0.0, 52.0, 0.0],
    }
    assert rows[0].eq(0).all()
    assert rows[2].eq(0).all()
    assert rows[1, ROW.index("step")] == 7
    assert place.sent.dtype == torch.float64


def test_one_process_sends_no_checksums():
    counted = census(replicas=[ReplicaSet(members=(0, 1), shards=(0,))])
    assert Consensus(counted, ALONE).agree(shares(), Ballot(step=1)).checksums == ()


def test_checksums_arrive_by_set_and_member():
    counted = census(replicas=[ReplicaSet(members=(0, 2), shards=(0,)), ReplicaSet(members=(0, 1, 2), shards=(1,))])
    said = [(DIGEST, 1), (7,), (DIGEST - 1, 2)]
    agreement = summed(
        counted, *[(shares(), Ballot(step=1), [torch.tensor(value) for value in values]) for values in said]
    )
    assert agreement.checksums == ((DIGEST, DIGEST - 1), (1, 7, 2))


def test_checksums_are_zero_in_steps_that_do_not_look_for_drift():
    counted = census(replicas=[ReplicaSet(members=(0, 1), shards=(0,))])
    assert summed(counted, *[(shares(), Ballot(step=1))] * 2).checksums == ((0, 0),)


# Presence and replicas ------------------------------------------------------------------------------------------------


def replicas_with(*squares):
    """The agreement of replicas of one layer; a square of None is one of a rank without a gradient."""
    ranks = len(squares)
    counted = census(1, holders=[ranks], replicated=[True])
    said = [(shares((0.0,) if s is None else (s / ranks,), present=[s is not None]), Ballot(step=1)) for s in squares]
    return summed(counted, *said)


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 49])
def test_alike_replicas_have_the_norm_of_one(ranks):
    agreement = replicas_with(*[9.0] * ranks)
    assert agreement.left.tolist() == pytest.approx([9.0], rel=1e-12)
    assert agreement.found.tolist() == pytest.approx([9.0], rel=1e-12)


def test_where_some_replicas_have_no_gradient_it_is_the_root_mean_square_of_those_that_do():
    agreement = replicas_with(9.0, None, 25.0, None, None)
    assert agreement.left.tolist() == pytest.approx([17.0], rel=1e-12)
    assert agreement.found.tolist() == pytest.approx([17.0], rel=1e-12)
    assert agreement.present.tolist() == [True]


def test_where_no_replica_has_a_gradient_there_is_none():
    agreement = replicas_with(None, None)
    assert (agreement.left.tolist(), agreement.present.tolist()) == ([0.0], [False])


def test_a_bad_gradient_shows_also_where_other_replicas_have_none():
    assert replicas_with(None, INF).left.tolist() == [INF]


def test_parts_of_a_split_layer_are_not_blown_up_where_some_have_no_gradient():
    counted = census(1, holders=[2], replicated=[False])
    agreement = summed(counted, (shares((9.0,)), Ballot(step=1)), (shares((0.0,), present=[False]), Ballot(step=1)))
    assert agreement.left.tolist() == [9.0]
    assert agreement.present.tolist() == [True]


@patiently
@given(st.lists(st.none() | st.floats(0, 1e100), min_size=2, max_size=8))
def test_the_norm_of_partly_present_replicas_is_the_mean_over_the_present(squares):
    known = [square for square in squares if square is not None]
    expected = math.fsum(known) / len(known) if known else 0.0
    assert replicas_with(*squares).left.tolist() == pytest.approx([expected], rel=1e-9)


# Replicas that are reduced by hand ------------------------------------------------------------------------------------


def reduced(*looks, by_hand=True, replicated=True):
    """Whether replicas of one layer were reduced, given the squares that backward left on each and ``step()`` finds."""
    ranks = len(looks)
    counted = census(1, holders=[ranks], replicated=[replicated], by_hand=by_hand)
    said = []
    for look in looks:
        left, found = (0.0, 0.0) if look is None else look
        said.append((shares((left / ranks,), (found / ranks,), present=[look is not None]), Ballot(step=1)))
    return summed(counted, *said).reduced.tolist() == [True]


def test_replicas_that_differ_when_backward_ends_and_are_alike_at_step_were_reduced():
    assert reduced((1.0, 7.0), (4.0, 7.0), (9.0, 7.0))


@pytest.mark.parametrize("ranks", [2, 3, 7, 49])
def test_rounding_does_not_make_alike_replicas_differ(ranks):
    assert not reduced(*[(0.1, 0.3)] * ranks)
    assert reduced((5.0, 0.3), *[(0.1, 0.3)] * (ranks - 1))


def test_replicas_that_were_alike_or_still_differ_were_not_reduced():
    assert not reduced((5.0, 1.0), (5.0, 1.0))
    assert not reduced((4.0, 1.0), (9.0, 1.1))
    assert not reduced((4.0, 1.0), (4.0, 2.0))


def test_sums_that_were_divided_by_the_number_of_replicas_were_reduced():
    assert reduced((4.0, 1.0), (4.0, 1.0))
    assert reduced((9.0, 1.0), (9.0, 1.0), (9.0, 1.0))
    assert not reduced((4.0, 1.0), (4.0, 1.0), (4.0, 1.0))


def test_those_without_a_gradient_are_left_out_of_the_comparison():
    assert reduced((1.0, 7.0), None, (4.0, 7.0))
    assert not reduced((4.0, 7.0), None, (4.0, 7.0))


def test_shards_and_what_a_wrapper_reduces_are_not_reduced_by_hand():
    assert not reduced((1.0, 7.0), (4.0, 7.0), by_hand=False)
    assert not reduced((1.0, 7.0), (4.0, 7.0), replicated=False)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_replicas_with_a_bad_gradient_are_not_taken_for_alike(bad):
    assert not reduced((1.0, bad), (4.0, bad))


def test_replicas_that_were_cleared_before_step_were_not_reduced():
    assert not reduced((1.0, 0.0), (1e6, 0.0))


# Partial gradients ----------------------------------------------------------------------------------------------------


def test_elements_of_partial_gradients_are_summed_before_they_are_squared():
    counted = census(2, partial=[partial(1, 0, 2)])
    first = shares((1.0, 2.0), left_raw=numbers(3.0, 5.0), found_raw=numbers(1.0, 1.0))
    second = shares((1.0, 2.0), left_raw=numbers(-3.0, 7.0), found_raw=numbers(2.0, -1.0))
    agreement = summed(counted, (first, Ballot(step=1)), (second, Ballot(step=1)))
    assert agreement.left.tolist() == [2.0, 4.0 + 0.0 + 144.0]
    assert agreement.found.tolist() == [2.0, 4.0 + 9.0 + 0.0]


def test_each_partial_gradient_counts_in_its_own_layer():
    counted = census(3, partial=[partial(2, 0, 1), partial(0, 1, 3), partial(2, 3, 4)])
    raw = numbers(1.0, 2.0, 3.0, 4.0)
    share = shares((0.0, 0.0, 0.0), left_raw=raw, found_raw=raw * 10)
    agreement = alone(share, counted=counted)
    assert agreement.left.tolist() == [13.0, 0.0, 17.0]
    assert agreement.found.tolist() == [1300.0, 0.0, 1700.0]


@pytest.mark.parametrize("terms", [(INF, 1.0), (INF, -INF), (NAN, 1.0)])
def test_a_bad_partial_element_shows_in_its_layer(terms):
    counted = census(1, partial=[partial(0, 0, 1)])
    said = [(shares((1.0,), left_raw=numbers(t), found_raw=numbers(0.0)), Ballot(step=1)) for t in terms]
    agreement = summed(counted, *said)
    assert not bool(agreement.left.isfinite().any())
    assert agreement.found.tolist() == [2.0]


# Over a real process group --------------------------------------------------------------------------------------------


def agreements(rank):
    peers = Peers.of(None, [torch.zeros(1)])
    ranks = len(peers)
    counted = census(
        4,
        holders=[ranks, ranks, 1, 1],
        replicated=[True, True, False, False],
        partial=[partial(3, 0, 2)],
        replicas=[ReplicaSet(members=tuple(range(ranks)), shards=(0,))],
    )
    agreed = Consensus(counted, peers)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(1, 4):
        left, found = torch.rand(2, 4, dtype=torch.float64, generator=generator).exp()
        if step == 2:
            left[rank % 4] = INF
        share = shares(
            left.tolist(),
            found.tolist(),
            present=[rank == 0, True, True, False],
            left_raw=torch.rand(2, dtype=torch.float64, generator=generator),
            found_raw=torch.full((2,), NAN if step == 3 else 1.0, dtype=torch.float64),
            loss=scalar([INF, -INF, NAN][rank]) if step == 1 else None,
            passes=rank,
        )
        ballot = Ballot(step=step, decision=DIGEST - rank, memory=DIGEST // 3, vetoed=rank == 1)
        seen.append(agreed.agree(share, ballot, [torch.tensor(DIGEST - 10 * rank)]))
    return [bits(agreement) for agreement in seen], seen


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_agree_bit_for_bit(ranks):
    told = run(ranks, agreements)
    assert [seen for seen, _ in told] == [told[0][0]] * ranks
    first, second, third = told[0][1]
    assert isinstance(first, Agreement)
    assert repr([ballot.loss for ballot in first.ballots]) == repr([INF, -INF, NAN][:ranks])
    assert [ballot.decision for ballot in first.ballots] == [DIGEST - rank for rank in range(ranks)]
    assert [ballot.vetoed for ballot in first.ballots] == [False, True, False][:ranks]
    assert [ballot.passes for ballot in first.ballots] == list(range(ranks))
    assert first.checksums == (tuple(DIGEST - 10 * rank for rank in range(ranks)),)
    assert first.present.tolist() == [True, True, True, False]
    assert second.left.isinf().tolist() == [place < ranks for place in range(4)]
    assert third.found.isnan().tolist() == [False, False, False, True]
