import pytest

from stabilityguard import Budget
from stabilityguard.recover.breaker import SCALER_PATIENCE, Breaker, BreakerState

FINITE, NON_FINITE = ["spike"], ["nan", "inf", "overflow"]


def answers(breaker, kinds, *, has_target=False, state=None, first_step=1):
    """The decisions on steps judged ``kinds`` one after another."""
    decisions = []
    for step, kind in enumerate(kinds, first_step):
        decision = breaker.decide(state or BreakerState(), step=step, kind=kind, has_target=has_target)
        decisions.append(decision)
        state = decision.state
    return decisions


def actions(*arguments, **options):
    return [decision.action for decision in answers(*arguments, **options)]


def breaker(nan_action="skip", **budget):
    return Breaker(nan_action=nan_action, budget=Budget(**budget))


# Skipping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nan_action", ["skip", "rollback", "raise"])
def test_a_healthy_step_is_applied(nan_action):
    decision = answers(breaker(nan_action), [None], has_target=True)[0]
    assert decision.action == "step"
    assert not decision.accept_level


@pytest.mark.parametrize("kind", FINITE + NON_FINITE)
def test_a_trip_is_skipped_while_the_budget_lasts(kind):
    assert actions(breaker(consecutive_skips=5), [kind] * 4) == ["skip"] * 4


def test_the_reason_counts_the_trips_in_a_row():
    reasons = [decision.reason for decision in answers(breaker(consecutive_skips=3), ["nan"] * 2)]
    assert reasons == ["trip 1 of 3 in a row", "trip 2 of 3 in a row"]


@pytest.mark.parametrize("kind", FINITE + NON_FINITE)
@pytest.mark.parametrize("has_target", [False, True])
def test_one_healthy_step_resets_the_count(kind, has_target):
    steps = [*[kind] * 4, None, *[kind] * 4, None]
    expected = [*["skip"] * 4, "step", *["skip"] * 4, "step"]
    assert actions(breaker(consecutive_skips=5), steps, has_target=has_target) == expected


def test_faults_of_different_kinds_count_together():
    assert actions(breaker(consecutive_skips=3), ["spike", "inf", "nan"]) == ["skip", "skip", "raise"]


def test_a_budget_of_one_climbs_at_the_first_trip():
    assert actions(breaker(consecutive_skips=1), ["nan"]) == ["raise"]
    assert actions(breaker(consecutive_skips=1), ["spike"]) == ["step"]


# Climbing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_target", [False, True])
def test_a_spike_that_stays_is_accepted_as_the_new_level(has_target):
    decisions = answers(breaker(consecutive_skips=5), ["spike"] * 5, has_target=has_target)
    assert [decision.action for decision in decisions] == [*["skip"] * 4, "step"]
    assert [decision.accept_level for decision in decisions] == [False] * 4 + [True]
    assert decisions[-1].reason == "trip 5 of 5 in a row, which ends skipping: the level is new"


def test_after_a_level_was_accepted_the_count_starts_anew():
    assert actions(breaker(consecutive_skips=2), ["spike"] * 4) == ["skip", "step", "skip", "step"]


@pytest.mark.parametrize("kind", NON_FINITE)
def test_non_finite_gradients_that_stay_cause_a_rollback_where_there_is_a_target(kind):
    assert actions(breaker(consecutive_skips=5), [kind] * 5, has_target=True) == [*["skip"] * 4, "rollback"]


@pytest.mark.parametrize("kind", NON_FINITE)
def test_non_finite_gradients_that_stay_raise_where_there_is_no_target(kind):
    decisions = answers(breaker(consecutive_skips=5), [kind] * 5)
    assert [decision.action for decision in decisions] == [*["skip"] * 4, "raise"]
    assert "there is no snapshot to go back to" in decisions[-1].reason


def test_non_finite_gradients_are_never_accepted_as_a_level():
    for kind in NON_FINITE:
        for has_target in (False, True):
            decisions = answers(breaker(consecutive_skips=1, rollbacks=1), [kind] * 9, has_target=has_target)
            assert not any(decision.accept_level or decision.action == "step" for decision in decisions)


def test_after_a_rollback_the_count_of_trips_starts_anew():
    steps = ["nan"] * 6
    expected = ["skip", "skip", "rollback"] * 2
    assert actions(breaker(consecutive_skips=3, rollbacks=3), steps, has_target=True) == expected


# The user's choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FINITE + NON_FINITE)
def test_raising_is_immediate_where_the_user_asked_for_it(kind):
    assert actions(breaker("raise"), [kind], has_target=True) == ["raise"]


@pytest.mark.parametrize("kind", FINITE + NON_FINITE)
def test_rolling_back_is_immediate_where_the_user_asked_for_it(kind):
    assert actions(breaker("rollback"), [None, kind], has_target=True) == ["step", "rollback"]


def test_without_a_target_a_wish_to_roll_back_is_a_skip_and_then_climbs():
    assert actions(breaker("rollback", consecutive_skips=3), ["nan"] * 3) == ["skip", "skip", "raise"]
    assert actions(breaker("rollback", consecutive_skips=3), ["spike"] * 3) == ["skip", "skip", "step"]


# Rollbacks within the window ------------------------------------------------------------------------------------------


def test_one_rollback_more_than_allowed_raises():
    decisions = answers(breaker("rollback", rollbacks=3), ["nan"] * 4, has_target=True)
    assert [decision.action for decision in decisions] == ["rollback"] * 3 + ["raise"]
    assert "3 rollbacks within 1000 steps are all that the budget allows" in decisions[-1].reason


def test_no_rollback_allowed_means_raising_at_once():
    assert actions(breaker("rollback", rollbacks=0), ["nan"], has_target=True) == ["raise"]
    steps = ["nan"] * 2
    assert actions(breaker(consecutive_skips=2, rollbacks=0), steps, has_target=True) == ["skip", "raise"]


def test_healthy_steps_between_two_rollbacks_do_not_lengthen_the_budget():
    steps = ["nan", None, "nan", None, None, "nan"]
    expected = ["rollback", "step", "rollback", "step", "step", "raise"]
    assert actions(breaker("rollback", rollbacks=2), steps, has_target=True) == expected


def test_a_rollback_older_than_the_window_no_longer_counts():
    one = breaker("rollback", rollbacks=1, window=10)
    old = BreakerState(rollbacks=(100,))
    within = one.decide(old, step=109, kind="nan", has_target=True)
    beyond = one.decide(old, step=110, kind="nan", has_target=True)
    assert (within.action, beyond.action) == ("raise", "rollback")
    assert beyond.state.rollbacks == (110,)


def test_the_memory_of_rollbacks_does_not_grow_without_bound():
    state = BreakerState()
    for step in range(1, 5000, 7):
        state = breaker("rollback", rollbacks=3, window=20).decide(state, step=step, kind="nan", has_target=True).state
        assert len(state.rollbacks) <= 3


# Vetoes and scalers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nan_action", ["skip", "rollback", "raise"])
def test_a_veto_skips_and_counts_towards_no_budget(nan_action):
    decisions = answers(breaker(nan_action, consecutive_skips=1), ["veto"] * 50, has_target=True)
    assert {decision.action for decision in decisions} == {"skip"}
    assert decisions[-1].state == BreakerState()


def test_a_veto_does_not_break_a_row_of_trips():
    assert actions(breaker(consecutive_skips=3), ["nan", "veto", "nan", "veto", "nan"]) == [
        *["skip"] * 4,
        "raise",
    ]


@pytest.mark.parametrize("nan_action", ["skip", "rollback", "raise"])
def test_a_scaler_is_left_alone_with_its_overflows_for_a_while(nan_action):
    decisions = answers(breaker(nan_action), ["scaler_overflow"] * SCALER_PATIENCE, has_target=True)
    assert {decision.action for decision in decisions} == {"skip"}
    assert decisions[-1].state.trips == 0


def test_overflows_that_no_scale_cures_climb_the_ladder():
    steps = ["scaler_overflow"] * (SCALER_PATIENCE + 3)
    tail = actions(breaker(consecutive_skips=3), steps)[SCALER_PATIENCE:]
    assert tail == ["skip", "skip", "raise"]
    assert actions(breaker("raise"), steps)[SCALER_PATIENCE] == "raise"
    assert actions(breaker("rollback"), steps, has_target=True)[SCALER_PATIENCE] == "rollback"


def test_one_healthy_step_gives_the_scaler_its_patience_back():
    steps = [*["scaler_overflow"] * SCALER_PATIENCE, None] * 2
    assert "raise" not in actions(breaker("raise"), steps)


# Purity ---------------------------------------------------------------------------------------------------------------


def test_the_same_state_gives_the_same_decision_and_is_not_changed():
    one = breaker("rollback")
    state = BreakerState(trips=2, rollbacks=(3,))
    first = one.decide(state, step=9, kind="nan", has_target=True)
    assert first == one.decide(state, step=9, kind="nan", has_target=True)
    assert state == BreakerState(trips=2, rollbacks=(3,))
