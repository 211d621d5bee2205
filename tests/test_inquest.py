import math
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stabilityguard import inquest
from stabilityguard.detect.statistics import Evidence, Finding
from stabilityguard.distributed.consensus import Agreement, Ballot
from stabilityguard.inquest import read, settle
from tests.support import Net, batch, guard

patiently = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

INF, NAN = math.inf, math.nan


def agreement(left, found=None, *, reduced=None, ballots=None, present=None):
    """What ranks agreed on about layers with these norms, which ``step()`` finds as backward left them by default."""
    squares = [torch.tensor(norms, dtype=torch.float64).square() for norms in (left, left if found is None else found)]
    return Agreement(
        left=squares[0],
        found=squares[1],
        present=torch.tensor([True] * len(left) if present is None else present),
        reduced=torch.tensor([False] * len(left) if reduced is None else reduced),
        ballots=(Ballot(step=1),) if ballots is None else tuple(ballots),
        checksums=(),
    )


def says(*, findings=None, finite=None, order=(), evidence=None):
    return inquest.Testimony(
        findings=findings or {},
        finite=finite or {},
        order=tuple(order),
        evidence=Evidence(shares={}) if evidence is None else evidence,
    )


def nan(elements=None, nans=None, infs=None):
    return Finding(kind="nan", norm=NAN, elements=elements, nan_elements=nans, inf_elements=infs)


def inf(elements=None, nans=None, infs=None):
    return Finding(kind="inf", norm=INF, elements=elements, nan_elements=nans, inf_elements=infs)


def overflow(norm, elements=None):
    return Finding(kind="overflow", norm=norm, elements=elements, nan_elements=0, inf_elements=0)


def finite(norm, elements=None):
    return Finding(kind="finite", norm=norm, elements=elements)


def settled(norms, *testimonies, **options):
    told = agreement(norms, **options)
    return settle(told, read(told), testimonies)


def merged(*testimonies):
    """What is wrong with the only layer, by what the ranks say."""
    return settled([NAN], *testimonies).findings[0]


# Which norms are judged -----------------------------------------------------------------------------------------------


def test_the_norms_are_roots_of_the_sums_of_squares():
    readings = read(agreement([3.0, 0.0, 1e-20]))
    assert readings.norms.tolist() == pytest.approx([3.0, 0.0, 1e-20], rel=1e-12)
    assert readings.norms.dtype == torch.float64
    assert readings.suspects == ()


def test_the_larger_of_the_two_looks_is_judged_layer_by_layer():
    readings = read(agreement([4.0, 1.0, 5.0], [2.0, 3.0, 5.0]))
    assert readings.norms.tolist() == [4.0, 3.0, 5.0]
    assert readings.norms_at_step.tolist() == [2.0, 3.0, 5.0]
    assert readings.found
    assert readings.suspects == ()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_backward_left_counts_where_it_is_not_finite_whatever_step_finds(bad):
    readings = read(agreement([4.0, bad, 5.0], [NAN, NAN, 0.0]))
    assert readings.norms.tolist() == pytest.approx([4.0, bad, 5.0], nan_ok=True)
    assert readings.norms_at_step.tolist() == pytest.approx([4.0, bad, 5.0], nan_ok=True)
    assert (readings.suspects, readings.found) == ((1,), False)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_step_finds_counts_where_only_that_is_not_finite(bad):
    readings = read(agreement([4.0, 1.0, 5.0], [bad, 9.0, bad]))
    assert readings.norms.tolist() == pytest.approx([bad, 9.0, bad], nan_ok=True)
    assert readings.norms_at_step.tolist() == pytest.approx([bad, 9.0, bad], nan_ok=True)
    assert (readings.suspects, readings.found) == ((0, 2), True)


def test_finite_norms_whose_sum_overflows_are_no_suspects():
    told = agreement([1.0, 1.0])
    told.left.fill_(1.7e308)
    assert read(told).suspects == ()


def test_layers_that_were_reduced_by_hand_are_judged_as_step_finds_them():
    readings = read(agreement([8.0, 8.0], [2.0, 3.0], reduced=[True, False]))
    assert readings.norms.tolist() == [2.0, 8.0]
    assert readings.found


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_reduction_by_hand_hides_nothing_that_backward_left_not_finite(bad):
    readings = read(agreement([bad, 1.0], [2.0, 3.0], reduced=[True, True]))
    assert readings.norms.tolist() == pytest.approx([bad, 1.0], nan_ok=True)
    assert (readings.suspects, readings.found) == ((0,), False)


NORMS = st.floats(0, 1e100) | st.sampled_from([NAN, INF])


@patiently
@given(st.lists(st.tuples(NORMS, NORMS), min_size=1, max_size=5))
def test_no_layer_that_is_not_finite_in_what_is_judged_goes_unsuspected(looks):
    left, found = zip(*looks, strict=True)
    readings = read(agreement(left, found))
    bad = [i for i, norm in enumerate(readings.norms.tolist()) if not math.isfinite(norm)]
    assert list(readings.suspects) == bad
    assert bool(bad) == any(not math.isfinite(norm) for norm in left + found)


# What the ranks found, merged -----------------------------------------------------------------------------------------


def test_without_testimonies_nothing_is_found():
    told = agreement([1.0, NAN])
    statistics = settle(told, read(told), None)
    assert (statistics.findings, statistics.evidence) == ({}, None)
    assert statistics.norms.tolist() == pytest.approx([1.0, NAN], nan_ok=True)


def test_a_healthy_layer_keeps_its_norm_beside_a_bad_one():
    statistics = settled([2.0, INF, 3.0], says(findings={1: overflow(1e200)}))
    assert statistics.norms.tolist() == [2.0, 1e200, 3.0]
    assert list(statistics.findings) == [1]


def test_the_norms_that_were_read_are_not_written_to():
    told = agreement([2.0, INF])
    readings = read(told)
    settle(told, readings, [says(findings={1: overflow(1e200)})])
    assert readings.norms.tolist() == [2.0, INF]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([overflow(1e200), nan(), inf()], "nan"),
        ([inf(), overflow(1e200)], "inf"),
        ([inf(), inf(), nan()], "nan"),
        ([overflow(1e200), overflow(1e190)], "overflow"),
    ],
)
def test_a_nan_is_graver_than_an_inf_and_that_than_an_overflow(kinds, expected):
    found = merged(*(says(findings={0: finding}) for finding in kinds))
    assert found.kind == expected
    if expected != "overflow":
        assert found.norm == pytest.approx({"nan": NAN, "inf": INF}[expected], nan_ok=True)


def test_a_norm_that_overflows_on_several_ranks_is_exact():
    found = merged(
        says(findings={0: overflow(3e200)}),
        says(findings={0: overflow(4e200)}),
        says(finite={0: finite(12e200)}),
    )
    assert (found.kind, found.norm) == ("overflow", pytest.approx(13e200, rel=1e-12))


def test_finite_shares_whose_sum_is_infinite_are_an_overflow_that_nobody_counted():
    found = merged(says(finite={0: finite(6e160, 2)}), says(finite={0: finite(8e160, 2)}))
    assert (found.kind, found.norm) == ("overflow", pytest.approx(1e161, rel=1e-12))
    assert (found.elements, found.nan_elements, found.inf_elements) == (None, None, None)


def test_elements_are_added_over_the_ranks_also_those_of_finite_shares():
    found = merged(
        says(findings={0: nan(10, 2, 1)}),
        says(findings={0: inf(6, 0, 3)}),
        says(finite={0: finite(1, 4)}),
    )
    assert (found.elements, found.nan_elements, found.inf_elements) == (20, 2, 4)


def test_shared_elements_are_counted_once():
    found = merged(*[says(findings={0: nan(10 / 3, 1 / 3, 2 / 3)})] * 3)
    assert (found.elements, found.nan_elements, found.inf_elements) == (10, 1, 2)
    assert all(isinstance(count, int) for count in (found.elements, found.nan_elements, found.inf_elements))


def test_counts_that_one_rank_lacks_are_not_made_up_by_the_others():
    found = merged(says(findings={0: nan(10, 2, 1)}), says(findings={0: nan()}))
    assert (found.elements, found.nan_elements, found.inf_elements) == (None, None, None)


@patiently
@given(
    st.lists(
        st.tuples(st.sampled_from(["nan", "inf", "overflow", "finite"]), st.floats(1e150, 1e300)),
        min_size=1,
        max_size=5,
    )
)
def test_the_order_of_the_ranks_does_not_change_what_was_found(shares):
    def told(kind, norm):
        exact = {"nan": NAN, "inf": INF}.get(kind, norm)
        finding = Finding(kind=kind, norm=exact, elements=1, nan_elements=0, inf_elements=0)
        return says(finite={0: finding}) if kind == "finite" else says(findings={0: finding})

    one = merged(*(told(*share) for share in shares))
    other = merged(*(told(*share) for share in reversed(shares)))
    assert (one.kind, one.elements) == (other.kind, other.elements)
    assert one.norm == pytest.approx(other.norm, rel=1e-12, nan_ok=True)


# Nearest the loss first -----------------------------------------------------------------------------------------------


def order_of(norms, *orders):
    bad = [i for i, norm in enumerate(norms) if not math.isfinite(norm)]
    statistics = settled(norms, *(says(findings={i: nan() for i in bad}, order=order) for order in orders))
    return list(statistics.findings)


def test_the_layers_come_in_the_order_in_which_a_rank_reached_them():
    assert order_of([NAN, NAN, NAN], (1, 2, 0)) == [1, 2, 0]


def test_a_rank_that_reached_only_some_of_the_layers_gives_no_order():
    assert order_of([NAN, NAN, 1.0, NAN], (1,), (3, 0), (0, 3, 1)) == [0, 3, 1]


def test_the_first_rank_that_reached_all_of_them_gives_the_order():
    assert order_of([NAN, NAN, NAN], (0, 1), (2, 0, 1), (1, 0, 2)) == [2, 0, 1]


def test_where_no_rank_has_reached_all_the_last_defined_is_nearest_the_loss():
    assert order_of([NAN, 1.0, NAN, NAN], (0, 2), (3,)) == [3, 2, 0]


# What else is settled -------------------------------------------------------------------------------------------------


def ballots_of(*losses, **others):
    return [Ballot(step=1, loss=loss, **others) for loss in losses]


def test_the_loss_is_the_mean_over_the_ranks_that_have_one():
    statistics = settled([1.0], ballots=ballots_of(1.0, None, 4.0))
    assert (statistics.loss, statistics.rank_losses) == (2.5, (1.0, None, 4.0))


def test_without_any_loss_there_is_no_mean():
    statistics = settled([1.0], ballots=ballots_of(None, None))
    assert (statistics.loss, statistics.rank_losses) == (None, (None, None))


@pytest.mark.parametrize(("losses", "mean"), [((1.0, INF), INF), ((1.0, NAN), NAN), ((INF, -INF), NAN)])
def test_a_bad_loss_of_one_rank_shows_in_the_mean(losses, mean):
    statistics = settled([1.0], ballots=ballots_of(*losses))
    assert statistics.loss == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize("flag", ["scaled", "vetoed", "overflowed"])
def test_a_flag_of_any_rank_is_a_flag_of_all(flag):
    raised = [Ballot(step=1), Ballot(step=1, **{flag: True}), Ballot(step=1)]
    assert getattr(settled([1.0], ballots=raised), flag)
    assert not getattr(settled([1.0], ballots=ballots_of(None, None, None)), flag)


def test_the_scale_is_that_of_the_first_rank_that_knows_it():
    ballots = [Ballot(step=1), Ballot(step=1, scale_found=8.0), Ballot(step=1, scale_left=4.0, scale_found=2.0)]
    assert settled([1.0], ballots=ballots).scale == 8.0
    assert settled([1.0], ballots=ballots[::2]).scale == 4.0
    assert settled([1.0], ballots=ballots[:1]).scale is None


def test_the_evidence_is_every_ranks_in_order():
    evidence = [Evidence(shares={0: 1.0}), Evidence(shares={0: 2.0}, bad_inputs=True)]
    assert settled([1.0], *(says(evidence=e) for e in evidence)).evidence == tuple(evidence)


def test_presence_is_as_agreed():
    assert settled([1.0, 2.0], present=[False, True]).present.tolist() == [False, True]


# What a rank says of what it saw --------------------------------------------------------------------------------------


def spoil(parameter):
    parameter.grad[0, 0] = NAN


def test_a_testimony_pickles_and_tells_layers_by_what_is_wrong_with_them():
    model = Net()
    optimizer = guard(model)
    told = []
    inquired = optimizer._guard._council._ask
    optimizer._guard._council._ask = lambda *arguments: told.extend(inquired(*arguments)) or told
    for layer in (model.body, model.head):
        layer.weight.register_post_accumulate_grad_hook(spoil)
    model(batch(1)).backward()
    optimizer.step()
    (said,) = told
    assert {layer: (f.kind, f.elements, f.nan_elements) for layer, f in said.findings.items()} == {
        0: ("nan", 40, 1),
        1: ("nan", 9, 1),
    }
    assert (said.finite, said.order) == ({}, (1, 0))
    assert said.evidence.batches
    copied = pickle.loads(pickle.dumps(said))
    assert (copied.order, repr(copied)) == ((1, 0), repr(said))
