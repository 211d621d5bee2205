import copy
import gc
import io
import weakref
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stabilityguard.measure.batch import SAMPLED_BYTES, describe_batch, fingerprint
from stabilityguard.measure.forward import HELD_BATCHES, ForwardObserver
from stabilityguard.measure.loss import find_loss
from tests.support import Net, NormNet, batch, guard


class Returning(nn.Module):
    """A model whose output is what ``shape`` makes of its loss."""

    def __init__(self, shape):
        super().__init__()
        self.net = Net()
        self.shape = shape

    def forward(self, x):
        return self.shape(self.net(x))


def loss_seen(model, x):
    """The loss in the record of a step over ``x``, and the loss that the step was made from."""
    with guard(model) as optimizer:
        loss = find_loss(model(x))
        loss.backward()
        optimizer.step()
        return optimizer.last_record.loss, loss.item()


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        lambda loss: loss,
        lambda loss: loss.reshape(1),
        lambda loss: SimpleNamespace(loss=loss, logits=torch.ones(3)),
        lambda loss: {"loss": loss, "logits": torch.ones(3)},
        lambda loss: UserDict(loss=loss),
        lambda loss: (loss, torch.ones(3)),
        lambda loss: [loss, {}],
    ],
    ids=["scalar", "one element", "attribute", "dict", "mapping", "tuple", "list"],
)
def test_the_loss_is_found_in_whatever_shape_the_model_returns_it(shape):
    model = Returning(shape)
    seen, expected = loss_seen(model, batch(1))
    assert seen == expected


@pytest.mark.parametrize(
    "output",
    [
        None,
        3.5,
        (),
        {},
        {"loss": None},
        {"loss": 2.0},
        SimpleNamespace(loss="unknown"),
        torch.ones(3, requires_grad=True) * 1,
        torch.ones(()),
        torch.ones((), dtype=torch.complex64, requires_grad=True) * 1,
        torch.ones((), dtype=torch.int64),
        (torch.ones(3, requires_grad=True) * 1, torch.ones((), requires_grad=True) * 1),
    ],
)
def test_what_is_no_differentiable_scalar_is_no_loss(output):
    assert find_loss(output) is None


def test_a_loss_of_low_precision_is_averaged_in_double_precision():
    model = Returning(lambda loss: loss.bfloat16())
    optimizer = guard(model)
    losses = []
    for step in range(1, 8):
        loss = model(batch(step))
        losses.append(loss.item())
        loss.backward()
    optimizer.step()
    assert optimizer.last_record.loss == pytest.approx(sum(losses) / 7, rel=1e-12)


def test_a_loss_does_not_come_again_in_the_next_step():
    model = Net()
    optimizer = guard(model)
    model(batch(1)).backward()
    optimizer.step()
    assert optimizer.last_record.loss is not None
    model.head.weight.square().sum().backward()
    optimizer.step()
    assert optimizer.last_record.loss is None


def test_the_record_shows_the_mean_loss_over_the_micro_batches_of_its_step():
    model = Net()
    optimizer = guard(model)
    losses = []
    for step in (1, 2, 3):
        loss = model(batch(step))
        losses.append(float(loss.detach()))
        loss.backward()
    optimizer.step()
    assert optimizer.last_record.loss == pytest.approx(sum(losses) / 3)


def test_a_loss_that_the_user_passes_wins():
    model = Net()
    optimizer = guard(model)
    model(batch(1)).backward()
    optimizer.step(loss=torch.tensor([41.0]))
    assert optimizer.last_record.loss == 41.0
    model(batch(2)).backward()
    optimizer.step(loss=42)
    assert optimizer.last_record.loss == 42.0


def test_a_model_that_returns_no_loss_has_none_in_its_record():
    model = nn.Linear(4, 2)
    optimizer = guard(model)
    model(batch(1)).square().mean().backward()
    optimizer.step()
    assert optimizer.last_record.loss is None


def test_forwards_in_evaluation_mode_or_without_gradients_are_passed_over():
    model = Net()
    optimizer = guard(model)
    loss = model(batch(1))
    model.eval()
    model(batch(2) * 1e6)
    model.train()
    with torch.no_grad():
        model(batch(3) * 1e6)
    with torch.inference_mode():
        model(batch(4) * 1e6)
    loss.backward()
    optimizer.step()
    assert optimizer.last_record.loss == float(loss.detach())


def test_a_batch_that_the_user_drops_does_not_count_against_the_next_step():
    model = Net()
    optimizer = guard(model)
    for step in range(1, 5):
        optimizer.zero_grad()
        loss = model(batch(step) * (torch.inf if step == 3 else 1.0))
        if not loss.isfinite():
            continue
        loss.backward()
        optimizer.step()
        assert optimizer.last_record.action == "step"
        assert optimizer.last_record.loss == float(loss.detach())


def test_clearing_gradients_between_forward_and_backward_does_not_lose_the_loss():
    model = Net()
    optimizer = guard(model)
    for step in (1, 2):
        loss = model(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert optimizer.last_record.loss == float(loss.detach())


def test_an_infinite_loss_with_finite_gradients_is_not_stepped_on():
    model = Net()
    optimizer = guard(model)
    model(batch(1)).backward()
    before = copy.deepcopy(model.state_dict())
    optimizer.step(loss=float("inf"))
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "inf")
    assert optimizer.last_record.trigger_layer is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# The batch ------------------------------------------------------------------------------------------------------------


def test_a_batch_is_described_by_name_shape_type_and_device():
    described = describe_batch(
        (torch.zeros(2, 3), [torch.zeros(4, dtype=torch.int64), ({"mask": torch.ones(1, dtype=torch.bool)},)]),
        {"labels": torch.zeros(5, dtype=torch.bfloat16), "extra": {"a": torch.zeros(())}, "flag": True, "none": None},
    )
    assert [(entry["name"], entry["shape"], entry["dtype"], entry["device"]) for entry in described] == [
        ("args[0]", [2, 3], "float32", "cpu"),
        ("args[1][0]", [4], "int64", "cpu"),
        ("args[1][1][0].mask", [1], "bool", "cpu"),
        ("labels", [5], "bfloat16", "cpu"),
        ("extra.a", [], "float32", "cpu"),
    ]
    assert all(len(entry["fingerprint"]) == 16 for entry in described)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).reshape(2, 3),
        lambda: torch.arange(6.0).bfloat16(),
        lambda: torch.arange(6.0).to(torch.float8_e4m3fn),
        lambda: torch.arange(6).to(torch.uint8),
        lambda: torch.tensor([True, False]),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(1 + 2j).conj(),
        lambda: torch.arange(6.0).reshape(2, 3).to_sparse(),
        lambda: torch.arange(12.0).reshape(3, 4)[:, ::2],
        lambda: torch.arange(float(SAMPLED_BYTES)),
        lambda: torch.arange(6.0).requires_grad_(),
    ],
    ids=["float", "bf16", "float8", "bytes", "bool", "empty", "conjugate", "sparse", "strided", "large", "graph"],
)
def test_equal_data_has_equal_fingerprints(make):
    assert fingerprint(make()) == fingerprint(make())
    assert len(fingerprint(make())) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(0, 3), torch.zeros(3, 0)),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).bfloat16()),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
        (torch.tensor(1 + 2j), torch.tensor(1 + 2j).conj()),
        (torch.zeros(SAMPLED_BYTES), torch.ones(SAMPLED_BYTES)),
    ],
    ids=["order", "shape", "type", "empty", "bf16", "bool", "sparse", "conjugate", "large"],
)
def test_different_data_has_different_fingerprints(one, other):
    assert fingerprint(one) != fingerprint(other)


def test_the_layout_in_memory_does_not_change_a_fingerprint():
    dense = torch.arange(12.0).reshape(3, 4)
    assert fingerprint(dense.t().contiguous().t()) == fingerprint(dense)
    assert fingerprint(torch.tensor(1 + 2j).conj()) == fingerprint(torch.tensor(1 - 2j))


def test_every_byte_of_a_batch_up_to_a_mebibyte_is_looked_at():
    large = torch.zeros(SAMPLED_BYTES, dtype=torch.uint8)
    changed = large.clone()
    changed[-2] = 1
    assert fingerprint(large) != fingerprint(changed)


def test_a_large_batch_is_sampled_from_end_to_end():
    large = torch.zeros(3 * SAMPLED_BYTES)
    tail = large.clone()
    tail[-1000:] = 1.0
    assert fingerprint(large) != fingerprint(tail)


def test_a_tensor_without_readable_elements_has_no_fingerprint():
    assert fingerprint(torch.zeros(3, device="meta")) is None
    described = describe_batch((torch.zeros(3, device="meta"),), {})
    assert (described[0]["shape"], described[0]["device"], described[0]["fingerprint"]) == ([3], "meta", None)


def test_reports_describe_every_micro_batch_of_the_bad_step_and_no_other():
    model = Net()
    optimizer = guard(model)
    model(batch(1)).backward()
    optimizer.step()
    for x in (batch(2), batch(3, rows=5) * torch.inf):
        model(x).backward()
    optimizer.step()
    batches = optimizer.reports[-1].details["batches"]
    assert [[entry["shape"] for entry in micro] for micro in batches] == [[[6, 4]], [[5, 4]]]
    assert batches[0][0]["fingerprint"] == fingerprint(batch(2))


def test_only_the_newest_micro_batches_are_held():
    model = Net()
    observer = ForwardObserver(model)
    for rows in range(1, HELD_BATCHES + 4):
        model(batch(1, rows=rows))
    assert [micro[0]["shape"][0] for micro in observer.testimony()["batches"]] == list(range(4, HELD_BATCHES + 4))


def test_batches_given_by_keyword_are_described():
    model = Net()
    observer = ForwardObserver(model)
    model(x=batch(1))
    assert [[entry["name"] for entry in micro] for micro in observer.testimony()["batches"]] == [["x"]]


@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "bad"])
def test_the_batch_is_let_go_of_when_the_step_ends(bad):
    model = Net()
    optimizer = guard(model)
    x = batch(1) * (torch.nan if bad else 1.0)
    alive = weakref.ref(x)
    model(x).backward()
    del x
    assert alive() is not None
    optimizer.step()
    gc.collect()
    assert alive() is None


# The observer ---------------------------------------------------------------------------------------------------------


def test_the_callback_comes_once_before_the_next_training_forward_touches_anything():
    model = NormNet()
    observer = ForwardObserver(model)
    seen = []
    observer.call_before_next(lambda: seen.append(int(model.norm.num_batches_tracked)))
    model.eval()
    model(batch(1))
    assert seen == []
    model.train()
    model(batch(1))
    model(batch(2))
    assert seen == [0]


def test_closing_removes_the_hooks():
    model = Net()
    observer = ForwardObserver(model)
    observer.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    model(batch(1)).backward()
    assert observer.take_loss() is None
    assert observer.testimony()["batches"] == []


def test_an_observer_that_is_gone_does_not_disturb_the_model():
    model = Net()
    observer = ForwardObserver(model)
    del observer
    gc.collect()
    model(batch(1))


def serialised(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, serialised], ids=["deepcopy", "pickle"])
def test_a_copy_of_the_model_reports_to_nobody(make_copy):
    model = Net()
    optimizer = guard(model)
    twin = make_copy(model)
    twin(batch(1) * 1e3).backward()
    loss = model(batch(2))
    loss.backward()
    model.head.weight.grad.fill_(torch.nan)
    optimizer.step()
    assert optimizer.last_record.loss == loss.item()
    batches = optimizer.reports[-1].details["batches"]
    assert [micro[0]["fingerprint"] for micro in batches] == [fingerprint(batch(2))]


def test_a_copy_of_a_guarded_model_trains_by_itself():
    model = Net()
    optimizer = guard(model)
    twin = copy.deepcopy(model)
    (twin(batch(1)) * torch.nan).backward()
    model(batch(1)).backward()
    expected = twin(batch(1)).item()
    optimizer.step()
    assert optimizer.last_record.action == "step"
    assert optimizer.last_record.loss == pytest.approx(expected, rel=1e-6)


def test_a_compiled_model_stays_one_graph_under_observation():
    model = Net()
    observer = ForwardObserver(model)
    torch.compile(model, backend="aot_eager", fullgraph=True)(batch(1)).backward()
    observer.close()
