"""What users do between steps, and what models hold and return, that a guard must live with."""

import copy
import threading

import pytest
import torch
from torch import nn

from stabilityguard import ConfigurationError, SnapshotPolicy
from tests.support import NormNet, assert_same, batch, guard, train


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=1e-3, **options)


def step(model, optimizer, x, *, factor=1.0, clip=None):
    optimizer.zero_grad()
    (model(x).square().mean() * factor).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return optimizer.last_record


@pytest.mark.parametrize("nan_action", ["skip", "rollback"])
def test_a_bad_step_right_after_a_group_was_added_leaves_clean_buffers(nan_action):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = guard(model, torch.optim.SGD(model[:2].parameters(), lr=1e-3), nan_action=nan_action)
    for i in range(5):
        step(model, optimizer, batch(i))
    optimizer.add_param_group({"params": model[2].parameters()})
    before = copy.deepcopy(model.state_dict())
    assert step(model, optimizer, batch(6) * torch.nan).action == nan_action
    assert_same(dict(model.state_dict()), dict(before))


def freeze_weights(model):
    for layer in model:
        layer.weight.requires_grad_(False)


def thaw_first(model):
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)


@pytest.mark.parametrize("change", [freeze_weights, thaw_first])
def test_a_spike_is_seen_before_clipping_whatever_is_frozen_meanwhile(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if change is thaw_first:
        model[0].requires_grad_(False)
    optimizer = guard(model, sgd(model), warmup_steps=3)
    for i in range(6):
        step(model, optimizer, batch(i), clip=1.0)
    change(model)
    for i in range(6):
        step(model, optimizer, batch(i), clip=1.0)
    assert step(model, optimizer, batch(7), factor=1e4, clip=1.0).kind == "spike"


class Prompts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.prompts = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})

    def forward(self, x):
        return self.body(x + self.prompts["b"])


def test_a_container_of_parameters_is_measured_whichever_of_them_is_used():
    model = Prompts()
    optimizer = guard(model, torch.optim.SGD(model.prompts.parameters(), lr=1e-3), warmup_steps=3)
    for i in range(6):
        step(model, optimizer, batch(i), clip=0.1)
    assert step(model, optimizer, batch(7), factor=1e4, clip=0.1).kind == "spike"


@pytest.mark.parametrize("rows", [16384, 5000])
def test_a_parameter_may_change_its_size(rows):
    model = nn.Embedding(8192, 4)
    optimizer = guard(model, sgd(model))
    for _ in range(3):
        step(model, optimizer, torch.arange(64))
    model.weight.grad = None
    model.weight.data = torch.randn(rows, 4)
    assert step(model, optimizer, torch.arange(rows - 8, rows)).global_norm > 0
    assert step(model, optimizer, torch.arange(rows - 8, rows), factor=torch.nan).kind == "nan"
    assert model.weight.isfinite().all()


def test_a_skip_keeps_what_the_user_wrote_to_buffers_since_the_last_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = guard(model, sgd(model))
    for i in range(5):
        step(model, optimizer, batch(i))
    best = copy.deepcopy(model.state_dict())
    for i in range(20):
        step(model, optimizer, batch(i))
    model.load_state_dict(best)
    assert step(model, optimizer, batch(1) * torch.nan).action == "skip"
    assert_same(dict(model.state_dict()), dict(best))


def test_a_forward_that_writes_to_parameters_does_not_spoil_the_start():
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = copy.deepcopy(dict(model[1].state_dict()))
    optimizer = guard(model, sgd(model))
    assert step(model, optimizer, torch.arange(8), factor=torch.nan).action == "skip"
    assert_same(dict(model[1].state_dict()), before)


class Unusual(torch.optim.Optimizer):
    """No learning rate, tensors under a key that is no parameter, a lock and a parameter in its group."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": None, "lock": threading.Lock(), "reference": parameters[0]})
        self.state["global"] = {"k": torch.zeros(1)}

    @torch.no_grad()
    def step(self, closure=None):
        self.state["global"]["k"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.01)


def test_an_optimizer_may_keep_anything_anywhere():
    model = NormNet()
    policy = SnapshotPolicy(every=2, keep=2, quarantine=0)
    base = Unusual(model.parameters())
    optimizer = guard(model, base, nan_action="rollback", snapshots=policy)
    train(model, optimizer, range(1, 6))
    record = step(model, optimizer, batch(6) * torch.nan)
    assert (record.action, record.restored_step, record.lr) == ("rollback", 4, None)
    assert base.state["global"]["k"].item() == 4
    assert base.param_groups[0]["reference"] is next(model.parameters())


class Holding(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("held", buffer)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.ones(1, 4).expand(8, 4),
    ],
    ids=["sparse", "csr", "meta", "expanded"],
)
@pytest.mark.parametrize("nan_action", ["skip", "rollback"])
def test_buffers_of_every_kind_can_be_lived_with(make, nan_action):
    model = Holding(make())
    optimizer = guard(model, sgd(model), nan_action=nan_action)
    for i in range(3):
        step(model, optimizer, batch(i))
    assert step(model, optimizer, batch(4) * torch.nan).action == nan_action


def test_a_buffer_made_in_inference_mode_can_be_lived_with():
    model = Holding(torch.ones(4))
    optimizer = guard(model, sgd(model))
    with torch.inference_mode():
        model.held = torch.ones(8)
    assert step(model, optimizer, batch(1)).applied


def test_inputs_that_contain_themselves_do_not_keep_a_trip_from_being_told():
    class Listed(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs[0])

    model = Listed(4, 1)
    optimizer = guard(model, sgd(model))
    endless = [batch(1)]
    endless.append(endless)
    assert step(model, optimizer, endless, factor=torch.nan).action == "skip"
    assert optimizer.reports[0].path
    [[described]] = optimizer.reports[0].details["batches"]
    assert (described["name"], described["shape"]) == ("args[0][0]", [6, 4])


def test_inputs_that_cannot_be_described_do_not_keep_a_trip_from_being_told():
    class Broken(dict):
        def items(self):
            raise ValueError("closed")

    class Picking(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs["x"])

    model = Picking(4, 1)
    optimizer = guard(model, sgd(model))
    assert step(model, optimizer, Broken(x=batch(1)), factor=torch.nan).action == "skip"
    assert optimizer.reports[0].path


def test_an_output_whose_loss_raises_does_not_disturb_the_forward():
    class Output:
        value = None

        @property
        def loss(self):
            raise ValueError("labels were not given")

    class Model(nn.Linear):
        def forward(self, x):
            output = Output()
            output.value = super().forward(x)
            return output

    model = Model(4, 1)
    optimizer = guard(model, sgd(model))
    model(batch(1)).value.sum().backward()
    optimizer.step()
    assert optimizer.last_record.loss is None


def test_a_parameter_that_the_model_returns_is_no_loss_and_gathers_no_hooks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.temperature, self.layer(x)

    model = Model()
    optimizer = guard(model, sgd(model))
    for i in range(3):
        temperature, out = model(batch(i))
        (temperature * out).sum().backward()
        optimizer.step()
    assert optimizer.last_record.loss is None
    assert not model.temperature._backward_hooks


def test_a_loss_beyond_float32_is_finite():
    model = Holding(torch.ones(1))
    optimizer = guard(model, sgd(model))
    model(batch(1)).sum().backward()
    optimizer.step(loss=1e39)
    assert (optimizer.last_record.action, optimizer.last_record.loss) == ("step", 1e39)


def test_a_guard_made_under_another_default_device_works():
    model = Holding(torch.ones(1))
    with torch.device("meta"):
        optimizer = guard(model, sgd(model))
    assert step(model, optimizer, batch(1)).applied


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_guarded_model_can_be_traced():
    model = Holding(torch.ones(1))
    guard(model, sgd(model))
    assert torch.jit.trace(model, batch(1))(batch(2)).shape == (6, 4)


def test_lazy_parameters_are_refused_with_the_remedy():
    model = nn.LazyLinear(2)
    with pytest.raises(ConfigurationError, match="run one forward before guarding"):
        guard(model, sgd(model))
    assert not model._forward_hooks


def test_a_loss_given_in_the_place_of_the_closure_is_told_how_to_be_given():
    model = Holding(torch.ones(1))
    optimizer = guard(model, sgd(model))
    with pytest.raises(ConfigurationError, match=r"pass a loss as step\(loss=loss\)"):
        optimizer.step(torch.ones(()))


def test_the_report_of_a_rollback_has_the_hyperparameters_of_the_bad_step():
    model = NormNet()
    optimizer = guard(model, sgd(model), nan_action="rollback")
    optimizer.param_groups[0]["lr"] = 1.0
    train(model, optimizer, [1])
    optimizer.param_groups[0]["lr"] = 0.25
    step(model, optimizer, batch(2) * torch.nan)
    assert optimizer.reports[0].details["optimizer"]["param_groups"][0]["lr"] == 0.25
    assert optimizer.param_groups[0]["lr"] == 1.0
