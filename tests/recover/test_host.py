import pytest
import torch

from stabilityguard import GuardedOptimizer, SnapshotPolicy
from stabilityguard.recover.host import HostCopy
from tests.support import Net, assert_same, batch


def live(value):
    return {
        ("parameter", 0, ""): torch.full((2, 3), float(value)),
        ("optimizer", 0, "step"): torch.tensor(float(value)),
        ("optimizer", 0, "phase"): torch.full((2,), value, dtype=torch.complex64),
        ("buffer", "count", ""): torch.tensor(value),
        ("buffer", "empty", ""): torch.zeros(0, 3),
    }


def test_a_copy_holds_the_same_bits_and_does_not_follow_the_original():
    copy, original = HostCopy(), live(1)
    original["parameter", 0, ""][0, 0] = torch.nan
    expected = {place: tensor.clone() for place, tensor in original.items()}
    copy.take(original)
    for tensor in original.values():
        tensor.add_(1)
    copy.wait()
    assert_same(copy.tensors, expected)


def test_memory_is_used_again_for_tensors_that_are_alike():
    copy = HostCopy()
    copy.take(live(1))
    before = {place: tensor.data_ptr() for place, tensor in copy.tensors.items()}
    copy.take(live(2))
    assert_same(copy.tensors, live(2))
    assert {place: tensor.data_ptr() for place, tensor in copy.tensors.items()} == before


def test_other_shapes_and_types_get_memory_of_their_own_and_what_is_gone_is_forgotten():
    copy = HostCopy()
    copy.take(live(1))
    changed = live(2)
    changed["parameter", 0, ""] = torch.ones(3, 2)
    changed["buffer", "count", ""] = torch.tensor(2.0)
    del changed["optimizer", 0, "phase"]
    copy.take(changed)
    assert_same(copy.tensors, changed)


def test_a_copy_of_strided_and_expanded_tensors_is_contiguous():
    original = {("parameter", 0, ""): torch.arange(6.0).view(2, 3).t(), ("buffer", "b", ""): torch.ones(1).expand(4)}
    copy = HostCopy()
    copy.take(original)
    copy.fence()
    copy.wait()
    assert all(tensor.is_contiguous() for tensor in copy.tensors.values())
    assert_same(copy.tensors, {place: tensor.contiguous() for place, tensor in original.items()})


def test_nothing_is_copied_of_nothing():
    copy = HostCopy()
    copy.take({})
    copy.wait()
    assert copy.tensors == {}


# On a GPU -------------------------------------------------------------------------------------------------------------

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.cuda
@needs_a_gpu
def test_an_update_after_the_fence_comes_after_the_copy_from_a_gpu():
    original = {("parameter", 0, ""): torch.zeros(50_000_000, device="cuda")}
    copy = HostCopy()
    for round_ in range(3):
        copy.take(original)
        copy.fence()
        original["parameter", 0, ""].add_(1)
        copy.wait()
        (kept,) = copy.tensors.values()
        assert kept.is_pinned()
        assert not copy.is_torn
        assert bool((kept == round_).all())


@pytest.mark.cuda
@needs_a_gpu
def test_a_copy_from_a_gpu_that_was_written_to_before_the_fence_is_known_as_torn():
    original = {("parameter", 0, ""): torch.zeros(1000, device="cuda")}
    copy = HostCopy()
    copy.take(original)
    original["parameter", 0, ""].add_(1)
    copy.fence()
    assert copy.is_torn


@pytest.mark.cuda
@needs_a_gpu
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_what_follows_a_rollback_on_a_gpu_is_bit_for_bit_what_it_would_have_been(optimizer):
    def train(numbers, bad=()):
        torch.manual_seed(0)
        model = Net().cuda()
        policy = SnapshotPolicy(every=2, keep=2, quarantine=1)
        options = {"nan_action": "rollback", "snapshots": policy, "verbose": False}
        with GuardedOptimizer(optimizer(model.parameters(), lr=1e-2), model, **options) as guarded:
            for number in numbers:
                guarded.zero_grad()
                model(batch(number).cuda() * (torch.nan if number in bad else 1)).backward()
                guarded.step()
        return model.state_dict()

    assert_same(train([1, 2, 3, 4, 5, 6, 7, 8], bad={6}), train([1, 2, 3, 4, 7, 8]))
