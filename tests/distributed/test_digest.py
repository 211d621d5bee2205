import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stabilityguard.distributed.consensus import PROTOCOL, Ballot
from stabilityguard.distributed.digest import check_alike, digest_of, digest_of_tensors, named_ranks
from stabilityguard.errors import DisagreementError, ReplicaDriftError, StabilityGuardError
from tests.distributed.ranks import run
from tests.support import Net, batch, guard

patiently = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

DTYPES = [torch.float64, torch.float32, torch.int64, torch.bool, torch.bfloat16]


# Digests --------------------------------------------------------------------------------------------------------------


def test_digests_have_48_bits():
    digests = [digest_of(i) for i in range(200)] + [digest_of_tensors({"a": torch.tensor(i)}) for i in range(200)]
    assert len(set(digests)) == 400
    assert all(0 <= digest < 2**48 for digest in digests)
    assert max(digests) >= 2**47
    assert [int(float(digest)) for digest in digests] == digests


def test_a_digest_is_the_same_in_every_process():
    assert digest_of((3, "skip", "nan", None)) == 0x38E4BB62491C
    assert digest_of_tensors({"mean": torch.tensor([1.0, 2.0], dtype=torch.float64)}) == 0x7A2777A2891C


def test_any_part_of_a_value_counts():
    values = [(1, "skip"), (2, "skip"), (1, "step"), (1, "skip", None), "(1, 'skip')", None]
    assert len({digest_of(value) for value in values}) == len(values)


def memory(**changes):
    tensors = {"mean": torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64), "count": torch.tensor([1, 2, 3])}
    return {**tensors, **changes}


def test_the_order_of_the_keys_does_not_count():
    assert digest_of_tensors(dict(reversed(memory().items()))) == digest_of_tensors(memory())


def test_neither_does_the_layout_in_memory():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest_of_tensors({"a": matrix.t().contiguous().t()}) == digest_of_tensors({"a": matrix})


@pytest.mark.parametrize(
    "changed",
    [
        {**memory(), "more": torch.zeros(0)},
        {"mean": memory()["mean"]},
        {"means": memory()["mean"], "count": memory()["count"]},
        {"mean": memory()["count"], "count": memory()["mean"]},
        memory(mean=memory()["mean"].view(torch.int64)),
        memory(mean=memory()["mean"].reshape(1, 3)),
        memory(mean=memory()["mean"].reshape(3, 1)),
        memory(mean=memory()["mean"][:2]),
        memory(mean=torch.tensor([1.0, -2.0, -0.0], dtype=torch.float64)),
    ],
    ids=["more", "less", "key", "exchanged", "dtype", "row", "column", "shorter", "sign of zero"],
)
def test_names_types_shapes_and_signs_count(changed):
    assert digest_of_tensors(changed) != digest_of_tensors(memory())


@patiently
@given(st.sampled_from(DTYPES), st.integers(1, 9), st.data())
def test_every_bit_counts(dtype, elements, data):
    raw = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=elements, max_size=elements))).to(dtype)
    place = data.draw(st.integers(0, raw.numel() * raw.element_size() - 1))
    bit = 0 if dtype == torch.bool else data.draw(st.integers(0, 7))
    flipped = raw.clone()
    flipped.view(torch.uint8)[place] ^= 1 << bit
    assert digest_of_tensors({"a": flipped}) != digest_of_tensors({"a": raw})


# Ranks that are alike -------------------------------------------------------------------------------------------------


def ballot(**changes):
    return Ballot(**{"step": 12, "decision": 0xABC, "memory": 0xDEF, **changes})


def disagreement(*ballots, ranks=None):
    with pytest.raises(DisagreementError) as caught:
        check_alike(ballots, tuple(range(len(ballots))) if ranks is None else ranks)
    return caught.value


def test_ranks_that_are_alike_are_left_alone():
    check_alike([ballot()], (0,))
    check_alike([ballot()] * 5, (0, 1, 2, 3, 4))


def test_what_ranks_may_differ_in_is_no_disagreement():
    check_alike(
        [ballot(loss=1.0, has_target=False, passes=1), ballot(loss=None, vetoed=True, has_target=True, scale_left=2.0)],
        (0, 1),
    )


@pytest.mark.parametrize(
    ("changes", "said", "answers"),
    [
        ({"protocol": PROTOCOL + 1}, "the protocol", (f"{PROTOCOL} on ranks 0, 2", f"{PROTOCOL + 1} on rank 1")),
        ({"step": 11}, "the number of the step", ("12 on ranks 0, 2", "11 on rank 1")),
        (
            {"decision": 0x123},
            "what was done before step 12",
            ("000000000abc on ranks 0, 2", "000000000123 on rank 1"),
        ),
        (
            {"memory": 2**48 - 1},
            "the detector's state before step 12",
            ("000000000def on ranks 0, 2", "ffffffffffff on rank 1"),
        ),
    ],
    ids=["protocol", "step", "decision", "memory"],
)
def test_the_odd_rank_is_named_with_what_each_side_says(changes, said, answers):
    error = disagreement(ballot(), ballot(**changes), ballot())
    assert (error.step, error.ranks) == (12, (1,))
    assert said in str(error)
    assert all(answer in str(error) for answer in answers)
    assert "Nothing was applied in step 12" in str(error)


def test_ranks_are_named_by_their_global_numbers():
    error = disagreement(ballot(), ballot(), ballot(memory=1), ranks=(3, 5, 7))
    assert error.ranks == (7,)
    assert "on rank 7" in str(error)
    assert "on ranks 3, 5" in str(error)


def test_a_rank_that_is_ahead_gives_the_number_of_the_step():
    assert disagreement(ballot(), ballot(), ballot(step=13)).step == 13


def test_the_gravest_question_is_asked_first():
    assert "protocol" in str(disagreement(ballot(), ballot(protocol=9, step=1, decision=1, memory=1)))
    assert "number of the step" in str(disagreement(ballot(), ballot(step=1, decision=1, memory=1)))
    assert "what was done" in str(disagreement(ballot(), ballot(decision=1, memory=1)))


def test_all_minorities_are_named_in_order():
    error = disagreement(*[ballot(memory=memory) for memory in (5, 1, 2, 1, 1, 5, 1)])
    assert error.ranks == (0, 2, 5)


def test_where_there_is_no_majority_all_are_named():
    assert disagreement(ballot(), ballot(memory=1)).ranks == (0, 1)


@patiently
@given(st.lists(st.integers(0, 2), min_size=2, max_size=7))
def test_a_majority_is_never_named_and_everyone_else_is(memories):
    common = [value for value in set(memories) if 2 * memories.count(value) > len(memories)]
    if len(set(memories)) == 1:
        check_alike([ballot(memory=memory) for memory in memories], range(len(memories)))
    elif common:
        error = disagreement(*[ballot(memory=memory) for memory in memories])
        assert set(error.ranks) == {rank for rank, memory in enumerate(memories) if memory != common[0]}


def test_ranks_are_named_in_words():
    assert named_ranks([1]) == "rank 1"
    assert named_ranks((0, 2)) == "ranks 0, 2"


# The error ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DisagreementError, ReplicaDriftError])
def test_the_error_pickles_and_keeps_what_it_knows(kind):
    error = kind("they differ", step=12, ranks=(1, 3))
    error.__notes__ = ["on node 7"]
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert (str(copied), copied.step, copied.ranks) == ("they differ", 12, (1, 3))
    assert copied.__notes__ == ["on node 7"]


def test_it_can_be_caught_as_ours_and_as_a_runtime_error():
    assert issubclass(ReplicaDriftError, DisagreementError)
    assert issubclass(DisagreementError, StabilityGuardError)
    assert issubclass(DisagreementError, RuntimeError)


# Real ranks -----------------------------------------------------------------------------------------------------------


def forget(optimizer):
    state = optimizer.state_dict()
    state["stabilityguard"]["memory"] = {k: v + 1 for k, v in state["stabilityguard"]["memory"].items()}
    optimizer.load_state_dict(state)


def lag(optimizer):
    optimizer._guard._memory.steps -= 1


def decide_otherwise(optimizer):
    optimizer._guard._memory._decided = "something else"


def nothing(optimizer):
    pass


def deviate(rank, deviation):
    model = Net()
    optimizer = guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 8):
        if step == 5 and rank == 1:
            deviation(optimizer)
        before = [p.clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(batch(step)).backward()
        try:
            optimizer.step()
        except DisagreementError as error:
            unchanged = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            return step, error.step, error.ranks, str(error), unchanged
    return None


@pytest.mark.parametrize("deviation", [forget, lag, decide_otherwise])
def test_all_ranks_raise_alike_at_the_first_step_after_one_deviates_and_nothing_is_applied(deviation):
    told = run(3, deviate, deviation)
    assert [(step, number, ranks, unchanged) for step, number, ranks, _, unchanged in told] == [(5, 5, (1,), True)] * 3
    assert len({message for *_, message, _ in told}) == 1


def test_ranks_that_do_not_deviate_never_disagree():
    assert run(3, deviate, nothing) == [None] * 3
