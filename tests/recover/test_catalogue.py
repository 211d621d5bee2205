import pytest
from hypothesis import given
from hypothesis import strategies as st

from stabilityguard.recover.catalogue import Catalogue, Entry, choose


def catalogue(*entries, keep=2, quarantine=0):
    return Catalogue(keep, quarantine, list(entries))


def clean(step, **options):
    return Entry(step=step, clean=True, **options)


def steps(entries):
    return [entry.step for entry in entries]


def healthy(of, count):
    return [steps(of.count_healthy_step()) for _ in range(count)]


# Which target ---------------------------------------------------------------------------------------------------------


def test_the_newest_target_is_chosen_whatever_their_order():
    assert choose([clean(6), clean(9), clean(3)]).step == 9


def test_a_target_gone_back_to_is_passed_over_while_there_is_an_older_one():
    targets = [clean(3), clean(6), clean(9, restored=True)]
    assert choose(targets).step == 6
    targets[1].restored = True
    assert choose(targets).step == 3


def test_a_newer_target_comes_before_older_ones_again():
    assert choose([clean(3), clean(6, restored=True), clean(9)]).step == 9


def test_the_oldest_is_chosen_where_all_have_been_gone_back_to():
    assert choose([clean(6, restored=True), clean(3, restored=True)]).step == 3


def test_there_is_nothing_to_choose_of_nothing():
    assert choose([]) is None


# Quarantine -----------------------------------------------------------------------------------------------------------


def test_one_becomes_clean_after_its_quarantine_and_only_once():
    one = catalogue(quarantine=3)
    one.add(Entry(step=6))
    assert healthy(one, 5) == [[], [], [6], [], []]
    assert steps(one.targets) == [6]


def test_each_has_a_quarantine_of_its_own():
    one = catalogue(quarantine=3)
    one.add(Entry(step=6))
    one.count_healthy_step()
    one.add(Entry(step=7))
    assert healthy(one, 3) == [[], [6], [7]]


def test_without_a_quarantine_one_is_clean_at_once():
    one = catalogue(quarantine=0)
    one.add(entry := Entry(step=6))
    assert entry.clean
    assert healthy(one, 1) == [[]]


def test_one_that_replaces_another_of_its_step_has_proved_nothing():
    one = catalogue(clean(6), quarantine=1)
    one.add(Entry(step=6))
    assert one.targets == []
    assert steps(one.entries) == [6]


def test_what_is_out_of_reach_never_becomes_clean_and_is_no_target():
    one = catalogue(Entry(step=3), clean(6), quarantine=1)
    one.put_out_of_reach()
    assert healthy(one, 3) == [[], [], []]
    assert one.targets == []
    one.put_within_reach()
    assert healthy(one, 1) == [[3]]
    assert steps(one.targets) == [3, 6]


def test_one_that_is_added_later_is_within_reach():
    one = catalogue(clean(6))
    one.put_out_of_reach()
    one.add(Entry(step=9))
    assert steps(one.targets) == [9]


def test_a_broken_one_is_no_target():
    assert steps(catalogue(clean(3), clean(6, broken=True)).targets) == [3]


# Retention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "gone"), [(1, [3, 6]), (2, [3]), (3, []), (4, [])])
def test_the_newest_clean_ones_are_kept_whatever_their_order(keep, gone):
    one = catalogue(clean(9), clean(3), clean(6), keep=keep)
    assert sorted(steps(one.surplus())) == gone
    assert sorted(steps(one.entries)) == sorted({3, 6, 9} - set(gone))
    assert one.surplus() == []


def test_those_on_probation_do_not_count():
    one = catalogue(clean(3), Entry(step=6), Entry(step=9), keep=1)
    assert one.surplus() == []


def test_broken_ones_do_not_count_and_stay():
    one = catalogue(clean(3), clean(6, broken=True), clean(9, broken=True), keep=1)
    assert one.surplus() == []


def test_what_will_never_become_clean_goes_when_a_newer_one_is_clean():
    stale, coming = Entry(step=3, reachable=False), Entry(step=12, reachable=False)
    one = catalogue(stale, Entry(step=5), clean(9), coming, keep=1)
    assert one.surplus() == [stale]


def test_what_will_never_become_clean_stays_while_there_is_nothing_clean():
    assert catalogue(Entry(step=3, reachable=False), Entry(step=9)).surplus() == []


# Giving up a future ---------------------------------------------------------------------------------------------------


def test_a_future_that_is_given_up_takes_its_unproven_ones_along():
    one = catalogue(Entry(step=3), clean(6), Entry(step=7), clean(8), Entry(step=9))
    assert steps(one.abandon_newer_than(6)) == [7, 9]
    assert steps(one.entries) == [3, 6, 8]


def test_what_is_newer_can_be_taken_out():
    one = catalogue(clean(3, broken=True), clean(6), clean(9, broken=True))
    assert steps(one.take_newer_than(6)) == [9]
    assert steps(one.entries) == [3, 6]


# Going on -------------------------------------------------------------------------------------------------------------


def test_a_new_run_goes_on_from_the_newest_clean_one():
    assert catalogue(clean(3), clean(9), clean(6), Entry(step=12)).resumable().step == 9


@pytest.mark.parametrize(("stopped_at", "start"), [(7, 9), (10, 10)])
def test_a_new_run_goes_on_from_what_a_stopped_one_has_left_where_that_is_newer(stopped_at, start):
    assert catalogue(clean(9), Entry(step=stopped_at, stopped=True)).resumable().step == start


def test_a_new_run_may_go_on_from_what_no_rollback_may_use():
    one = catalogue(clean(9), clean(6, restored=True))
    one.put_out_of_reach()
    assert one.resumable().step == 9


def test_a_new_run_passes_over_broken_ones():
    one = catalogue(clean(3), clean(6, broken=True), Entry(step=9, stopped=True, broken=True))
    assert one.resumable().step == 3
    assert catalogue(Entry(step=3), clean(6, broken=True)).resumable() is None


def test_the_newest_step_counts_all():
    assert catalogue().newest == 0
    assert catalogue(clean(3), Entry(step=9), clean(6, broken=True)).newest == 9


# All together ---------------------------------------------------------------------------------------------------------

MOVES = st.lists(st.sampled_from(["step", "step", "step", "write", "write", "roll back", "replace", "break"]))


@given(st.integers(1, 3), st.integers(0, 3), MOVES)
def test_the_newest_clean_one_is_never_removed_and_no_more_than_told_are_kept(keep, quarantine, moves):
    one = Catalogue(keep, quarantine)
    step = 0
    for move in moves:
        usable = {e.step for e in one.entries if e.clean and not e.broken}
        targets = steps(one.targets)
        removed = []
        if move == "step":
            step += 1
            became = one.count_healthy_step()
            removed = one.surplus() if became else []
        elif move == "write" and step > one.newest:
            one.add(Entry(step=step))
            removed = one.surplus() if quarantine == 0 else []
        elif move == "roll back" and (target := choose(one.targets)) is not None:
            target.restored = True
            removed = one.abandon_newer_than(target.step)
            assert all(e.step > target.step for e in removed)
            assert target in one.entries
        elif move == "replace":
            one.put_out_of_reach()
            assert one.targets == []
        elif move == "break" and targets:
            one.targets[-1].broken = True
            continue
        left = {e.step for e in one.entries if e.clean and not e.broken}
        assert not usable or max(left) >= max(usable)
        assert len(left) <= keep
        assert not ({e.step for e in removed} & left)
        assert all(e.healthy_steps >= quarantine for e in one.targets)
        assert set(steps(one.targets)) <= left
