import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from stabilityguard import ConfigurationError, GuardedOptimizer
from stabilityguard.distributed.census import ReplicaSet
from stabilityguard.distributed.drift import check_replicas, checksum, checksums, odd_ones
from stabilityguard.distributed.shards import Shard, local_part
from stabilityguard.errors import ReplicaDriftError
from tests.distributed.ranks import run
from tests.distributed.wrapped import Collectives, ddp, fsdp2, hsdp, make, rows
from tests.support import assert_same, guard, snapshot

patiently = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.complex64,
    torch.complex128,
]


def of_bytes(values, dtype):
    """A tensor of these bytes, as many elements as they fill."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.tensor(values[: len(values) // size * size], dtype=torch.uint8).view(dtype)


def flipped(tensor, bit):
    """A copy with one bit of its storage inverted."""
    copied = tensor.detach().clone()
    flip_(copied, bit)
    return copied


@torch.no_grad()
def flip_(tensor, bit):
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    real.reshape(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


# Checksums ------------------------------------------------------------------------------------------------------------


@patiently
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 255), min_size=16, max_size=96), st.data())
def test_any_flipped_bit_changes_the_checksum(dtype, values, data):
    tensors = [of_bytes(values, dtype), of_bytes(values[::-1], dtype)]
    which = data.draw(st.sampled_from([0, 1]))
    bit = data.draw(st.integers(0, tensors[which].numel() * tensors[which].element_size() * 8 - 1))
    other = list(tensors)
    other[which] = flipped(tensors[which], bit)
    assert int(checksum(other)) != int(checksum(tensors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_of_a_tensor_counts(dtype):
    tensor = of_bytes(torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(7)).tolist(), dtype)
    sums = {int(checksum([flipped(tensor, bit)])) for bit in range(64 * 8)}
    assert int(checksum([tensor])) not in sums


@pytest.mark.parametrize(
    ("dtype", "values", "changed"),
    [
        (torch.int8, [-1, 0], [-1, 1]),
        (torch.bfloat16, [1.0, -3.984375], [1.0078125, -3.984375]),
    ],
    ids=["int8", "bf16"],
)
def test_bits_that_add_up_to_minus_one_are_not_taken_for_those_that_add_up_to_zero(dtype, values, changed):
    one, other = (torch.tensor(v, dtype=dtype) for v in (values, changed))
    assert int(checksum([one])) != int(checksum([other]))


def test_the_sign_of_a_zero_and_the_payload_of_a_nan_count():
    assert int(checksum([torch.tensor([0.0])])) != int(checksum([torch.tensor([-0.0])]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert int(checksum([nans[:1]])) != int(checksum([nans[1:]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_is_exact_in_float64(dtype):
    for seed in range(20):
        values = torch.randint(0, 256, (160,), generator=torch.Generator().manual_seed(seed)).tolist()
        total = checksum([of_bytes(values, dtype)] * 3)
        assert total.dtype == torch.int64
        assert total.dim() == 0
        assert 0 <= int(total) < 2**48


def test_the_order_of_the_tensors_counts():
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    assert int(checksum([first, second])) != int(checksum([second, first]))


def test_what_lies_in_which_tensor_counts():
    assert int(checksum([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])) != int(
        checksum([torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_the_layout_in_memory_does_not_count(dtype):
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    strided = torch.empty(6, 8, dtype=dtype)[:, ::2].copy_(matrix)
    expected = int(checksum([matrix]))
    assert int(checksum([strided])) == expected
    assert int(checksum([matrix.t().contiguous().t()])) == expected
    flip_(strided.t().contiguous(), 0)
    assert int(checksum([strided])) == expected
    strided[5, 3] = 0
    assert int(checksum([strided])) != expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_and_scalar_tensors_have_checksums(dtype):
    assert int(checksum([torch.zeros(0, dtype=dtype)])) == int(checksum([])) == 0
    assert int(checksum([torch.ones((), dtype=dtype)])) == int(checksum([torch.ones(1, dtype=dtype)]))


def test_a_parameter_is_summed_without_a_graph():
    assert not checksum([nn.Parameter(torch.ones(3))]).requires_grad


def test_there_is_one_checksum_for_each_set_of_which_this_rank_is_a_member():
    shards = [Shard("a", name, torch.full((2,), float(i)), "whole") for i, name in enumerate("xyz")]
    sets = [
        ReplicaSet(members=(0, 1), shards=(0, 2)),
        ReplicaSet(members=(2, 3), shards=()),
        ReplicaSet(members=(0, 3), shards=(1,)),
    ]
    sums = [int(value) for value in checksums(sets, shards)]
    assert sums == [int(checksum([shards[0].parameter, shards[2].parameter])), int(checksum([shards[1].parameter]))]


# Who is odd -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sums", "odd"),
    [
        ([], []),
        ([7], []),
        ([7, 7, 7], []),
        ([7, 7, 8], [2]),
        ([8, 7, 7], [0]),
        ([7, 8], [0, 1]),
        ([7, 7, 8, 8], [0, 1, 2, 3]),
        ([7, 7, 8, 9], [0, 1, 2, 3]),
        ([7, 7, 7, 8, 9], [3, 4]),
        ([1, 2, 3], [0, 1, 2]),
    ],
)
def test_those_that_differ_from_the_majority_are_odd_and_all_where_there_is_none(sums, odd):
    assert odd_ones(sums) == odd


SETS = [ReplicaSet(members=(0, 1, 2), shards=(0,)), ReplicaSet(members=(1, 3), shards=())]
RANKS = (10, 11, 12, 13)


def drift(*sums):
    with pytest.raises(ReplicaDriftError) as caught:
        check_replicas(sums, SETS, RANKS, 6)
    return caught.value


def test_alike_replicas_are_left_alone():
    check_replicas([(1, 1, 1), (2, 2)], SETS, RANKS, 6)
    check_replicas([], [], RANKS, 6)


def test_drifted_ranks_are_named_by_their_global_numbers_with_their_checksums():
    error = drift((1, 1, 0xABC), (2, 2))
    assert (error.step, error.ranks) == (6, (12,))
    message = str(error)
    assert "before step 6: rank 12 differ" in message
    assert "rank 10: 000000000001, rank 11: 000000000001, rank 12: 000000000abc" in message
    assert "rank 13" not in message


def test_the_ranks_of_all_sets_are_named_each_once_and_in_order():
    assert drift((1, 9, 1), (2, 3)).ranks == (11, 13)


# End to end -----------------------------------------------------------------------------------------------------------


def training(rank, wrap, bad_rank, every):
    """Trains; after step 4 one bit of ``bad_rank``'s first parameter flips. Returns when which ranks were named.

    And whether that was before the update, and the collectives that each step made.
    """
    model = wrap(make())
    optimizer = guard(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), drift_check_every=every)
    held, collectives, named = [p for p in map(local_part, model.parameters()) if p.numel()], [], None
    for step in range(1, 8):
        optimizer.zero_grad()
        model(rows(step, rank, dist.get_world_size())).backward()
        before = snapshot(model, optimizer)
        try:
            with Collectives() as mode:
                optimizer.step()
        except ReplicaDriftError as error:
            assert_same(local_parts(snapshot(model, optimizer)), local_parts(before))
            named = step, error.step, error.ranks
        collectives.append(mode.seen)
        if named:
            break
        if step == 4 and rank == bad_rank:
            flip_(held[0], 3)
    return named, collectives


def local_parts(state):
    if isinstance(state, dict):
        return {key: local_parts(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [local_parts(value) for value in state]
    return local_part(state) if isinstance(state, torch.Tensor) else state


def named(ranks, wrap, bad_rank, every=3):
    """What all ranks were told alike, and after how many steps; each of these made one collective."""
    answers = run(ranks, training, wrap, bad_rank, every)
    assert answers == [answers[0]] * ranks
    verdict, collectives = answers[0]
    assert collectives == [["allreduce_"]] * len(collectives)
    return verdict, len(collectives)


def test_all_ranks_name_the_one_of_three_whose_parameter_drifted_before_the_next_check_updates():
    assert named(3, ddp(), 2) == ((6, 6, (2,)), 6)


def test_of_two_ranks_both_are_named():
    assert named(2, ddp(), 1) == ((6, 6, (0, 1)), 6)


def test_replicas_of_shards_are_compared_among_themselves():
    assert named(4, hsdp(), 3) == ((6, 6, (1, 3)), 6)


def test_a_check_in_every_step_finds_drift_at_once():
    assert named(3, ddp(), 0, every=1) == ((5, 5, (0,)), 5)


def test_shards_that_only_one_rank_holds_are_compared_with_none():
    assert named(2, fsdp2(), 1) == (None, 7)


@pytest.mark.parametrize(("ranks", "wrap"), [(3, ddp()), (4, hsdp())], ids=["ddp", "hsdp"])
def test_healthy_replicas_never_drift(ranks, wrap):
    assert named(ranks, wrap, None) == (None, 7)


def test_drift_is_not_looked_for_unless_asked_to():
    assert named(3, ddp(), 2, every=0) == (None, 7)


def without_ranks(every):
    model = make()
    optimizer = guard(model, drift_check_every=every)
    for step in range(1, 5):
        optimizer.zero_grad()
        model(rows(step)).backward()
        optimizer.step()
        flip_(next(model.parameters()), 3)
    return optimizer.last_record.action


def test_one_process_has_nothing_to_compare():
    assert without_ranks(1) == "step"


@pytest.mark.parametrize("every", [-1, 1.5, True, None])
def test_the_number_of_steps_between_checks_is_a_whole_one(every):
    with pytest.raises(ConfigurationError, match="drift_check_every"):
        without_ranks(every)


def test_there_are_no_checks_by_default():
    model = make()
    assert GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)._guard.config.drift_check_every == 0
