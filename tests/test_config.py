import ast
import dataclasses
import inspect
import math
import pickle
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from stabilityguard import (
    Budget,
    CheckpointPolicy,
    ConfigurationError,
    GuardedOptimizer,
    SnapshotPolicy,
    StabilityGuardError,
)
from stabilityguard import config as config_module
from stabilityguard.config import GuardConfig
from tests.support import Net

FIRST_SEVEN = {
    "spike_threshold": 10.0,
    "nan_action": "skip",
    "log_every": 50,
    "log_dir": "./sg_logs",
    "ema_alpha": 0.01,
    "warmup_steps": 10,
    "verbose": True,
}

POLICIES = [GuardConfig, SnapshotPolicy, CheckpointPolicy, Budget]


def parameters():
    return list(inspect.signature(GuardedOptimizer).parameters.values())


def guarded(**options):
    model = Net()
    return GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **{"verbose": False, **options})


# What is documented ----------------------------------------------------------------------------------------------


def test_the_first_parameters_are_the_documented_ones_in_order_with_their_defaults():
    names = [parameter.name for parameter in parameters()]
    assert names[:2] == ["base_optimizer", "model"]
    assert {parameter.name: parameter.default for parameter in parameters()[2:9]} == FIRST_SEVEN
    assert names[2:9] == list(FIRST_SEVEN)


def test_the_first_parameters_can_be_given_by_place_and_all_others_only_by_name():
    kinds = [parameter.kind for parameter in parameters()]
    assert set(kinds[:9]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(kinds[9:]) == {inspect.Parameter.KEYWORD_ONLY}
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    assert GuardedOptimizer(base, model, 5.0, "raise", 0, "logs", 0.5, 3, False).base_optimizer is base
    with pytest.raises(TypeError):
        GuardedOptimizer(base, model, 5.0, "raise", 0, "logs", 0.5, 3, False, "ema")


def test_the_settings_have_the_same_defaults_as_the_optimizer():
    assert {name: getattr(GuardConfig(), name) for name in FIRST_SEVEN} == FIRST_SEVEN
    for parameter in parameters():
        field = {field.name: field for field in dataclasses.fields(GuardConfig)}.get(parameter.name)
        if field is not None and field.default is not dataclasses.MISSING:
            assert parameter.default == field.default


def test_values_are_kept_as_they_were_given():
    given = {
        "spike_threshold": 3,
        "nan_action": "raise",
        "log_every": 0,
        "log_dir": "elsewhere",
        "ema_alpha": 1,
        "warmup_steps": 0,
        "verbose": False,
        "max_grad_norm": 0.5,
        "snapshots": SnapshotPolicy(every=1, keep=2, quarantine=0),
        "budget": Budget(consecutive_skips=1, rollbacks=0, window=1),
    }
    assert {name: getattr(GuardConfig(**given), name) for name in given} == given


def test_snapshots_are_on_by_default_only_where_a_trip_rolls_back():
    assert GuardConfig(nan_action="rollback").snapshots == SnapshotPolicy(every=100, keep=3, quarantine=10)
    assert GuardConfig(nan_action="skip").snapshots is None
    assert GuardConfig(nan_action="raise").snapshots is None
    own = SnapshotPolicy(every=7)
    assert GuardConfig(nan_action="rollback", snapshots=own).snapshots is own


def test_the_default_budget_is_the_documented_one():
    assert GuardConfig().budget == Budget(consecutive_skips=5, rollbacks=3, window=1000)


def test_one_snapshot_is_enough_without_quarantine():
    assert SnapshotPolicy(keep=1, quarantine=0).keep == 1


@pytest.mark.parametrize("given", ["a/b", Path("a/b"), b"a/b"], ids=["text", "path", "bytes"])
def test_log_dir_is_kept_as_text(given):
    assert GuardConfig(log_dir=given).log_dir == "a/b"


@pytest.mark.parametrize("value", [numpy.float64(5.0), 5, 1.0000001], ids=repr)
def test_any_number_above_one_will_do_as_a_threshold(value):
    assert GuardConfig(spike_threshold=value).spike_threshold == value


# What is refused -------------------------------------------------------------------------------------------------

NOT_NUMBERS = [None, "10", True, False, [10.0], (1.5,), {}, object(), 2j, torch.tensor([2.0, 3.0])]
NOT_FINITE = [math.nan, math.inf, -math.inf]
NOT_INTEGERS = [None, "10", True, False, 10.0, 1.5, [10], math.nan, math.inf, object(), torch.tensor([2, 3])]

BAD = [
    *[(GuardConfig, "spike_threshold", value) for value in [*NOT_NUMBERS, *NOT_FINITE, 1.0, 1, 0.0, -10.0]],
    *[(GuardConfig, "ema_alpha", value) for value in [*NOT_NUMBERS, *NOT_FINITE, 0.0, 0, -0.01, 1.01, 2]],
    *[(GuardConfig, "warmup_steps", value) for value in [*NOT_INTEGERS, -1]],
    *[(GuardConfig, "log_every", value) for value in [*NOT_INTEGERS, -1]],
    *[(GuardConfig, "max_grad_norm", value) for value in [*NOT_NUMBERS[1:], *NOT_FINITE, 0.0, 0, -1.0]],
    *[(GuardConfig, "nan_action", value) for value in ["SKIP", "stop", "", None, True, 1, ["skip"], {}]],
    *[(GuardConfig, "verbose", value) for value in [None, 0, 1, "yes", "False", []]],
    *[(GuardConfig, "log_dir", value) for value in [None, 1, 1.5, True, ["logs"], object()]],
    *[(GuardConfig, "snapshots", value) for value in [True, 100, 0, "on", {}, {"every": 1}, SnapshotPolicy]],
    *[(GuardConfig, "budget", value) for value in [None, 5, 0, True, "none", {}, {"rollbacks": 1}, Budget]],
    *[(SnapshotPolicy, "every", value) for value in [*NOT_INTEGERS, 0, -1]],
    *[(SnapshotPolicy, "keep", value) for value in [*NOT_INTEGERS, 1, 0, -1]],
    *[(SnapshotPolicy, "quarantine", value) for value in [*NOT_INTEGERS, -1]],
    *[(Budget, "consecutive_skips", value) for value in [*NOT_INTEGERS, 0, -1]],
    *[(Budget, "rollbacks", value) for value in [*NOT_INTEGERS, -1]],
    *[(Budget, "window", value) for value in [*NOT_INTEGERS, 0, -1]],
]


def label(value):
    return getattr(value, "__name__", None) or (type(value).__name__ if "0x" in repr(value) else repr(value))


@pytest.mark.parametrize(("policy", "field", "value"), BAD, ids=label)
def test_a_value_that_cannot_be_used_is_refused_with_its_field_and_what_was_expected(policy, field, value):
    with pytest.raises(ConfigurationError) as refusal:
        policy(**{field: value})
    message = str(refusal.value)
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, StabilityGuardError)
    assert field in message
    assert repr(value) in message
    assert " must be " in message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GuardConfig(spike_threshold=1.0), ["spike_threshold", "greater than 1", "1.0"]),
        (lambda: GuardConfig(ema_alpha=2.0), ["ema_alpha", "greater than 0 and at most 1", "2.0"]),
        (lambda: GuardConfig(warmup_steps=-3), ["warmup_steps", "an integer of at least 0", "-3"]),
        (lambda: GuardConfig(nan_action="stop"), ["nan_action", "'skip', 'rollback', 'raise'", "'stop'"]),
        (lambda: GuardConfig(snapshots=True), ["snapshots", "SnapshotPolicy", "True", "pass SnapshotPolicy("]),
        (lambda: GuardConfig(budget=5), ["budget", "Budget", "5", "pass Budget("]),
        (lambda: SnapshotPolicy(keep=1), ["SnapshotPolicy.keep", "at least 2", "1"]),
        (lambda: SnapshotPolicy(keep=0, quarantine=0), ["SnapshotPolicy.keep", "at least 1", "0"]),
        (lambda: Budget(window=0), ["Budget.window", "at least 1", "0"]),
    ],
)
def test_a_refusal_says_the_range(make, words):
    with pytest.raises(ConfigurationError) as refusal:
        make()
    for word in words:
        assert word in str(refusal.value)


class Cannot:
    """Fits no parameter."""


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("spike_threshold", 1.0),
        ("nan_action", "stop"),
        ("log_every", -1),
        ("log_dir", None),
        ("ema_alpha", 0.0),
        ("warmup_steps", 1.5),
        ("verbose", "yes"),
        ("detector", "magic"),
        ("detector", Cannot()),
        ("detector", None),
        ("max_grad_norm", 0.0),
        ("scaler", Cannot()),
        ("snapshots", 100),
        ("budget", 5),
        ("budget", 0),
        ("track", [1]),
        ("track", {"thing": Cannot()}),
        ("sinks", Cannot()),
        ("sinks", [Cannot()]),
    ],
    ids=label,
)
def test_the_optimizer_refuses_it_too_and_names_the_parameter(parameter, value):
    with pytest.raises(ConfigurationError, match=parameter):
        guarded(**{parameter: value})


def test_base_optimizer_and_model_are_checked():
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, words in [
        ((model, base), "the optimizer comes first"),
        (("adam", model), "base_optimizer must be a torch.optim.Optimizer, but is a str"),
        ((base, "model"), "model must be a torch.nn.Module, but is a str"),
        ((base, nn.Linear(1, 1)), "none of the optimizer's 4 parameters belongs to the model"),
        ((GuardedOptimizer(base, model, verbose=False), model), "guarded already"),
    ]:
        with pytest.raises(ConfigurationError) as refusal:
            GuardedOptimizer(*arguments)
        assert words in str(refusal.value)


def test_a_refused_guard_leaves_no_hook_on_the_model():
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({"spike_threshold": 0.0}, {"detector": "magic"}, {"track": [1]}):
        with pytest.raises(ConfigurationError):
            GuardedOptimizer(base, model, **options)
    with pytest.raises(ConfigurationError):
        GuardedOptimizer(base, (other := nn.Linear(1, 1)))
    for module in (model, other):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(ConfigurationError, match="loss must be a number"):
        guarded().step(loss="low")


# As objects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_cannot_be_changed(policy):
    made = policy()
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, getattr(made, field.name))


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_are_given_by_name_only(policy):
    assert all(field.kw_only for field in dataclasses.fields(policy))
    with pytest.raises(TypeError):
        policy(10)


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_can_be_compared_and_pickled(policy):
    made = policy()
    assert made == policy()
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made) == made


def test_settings_without_a_name_are_refused():
    with pytest.raises(TypeError):
        GuardConfig(threshold=10.0)


def test_every_field_is_documented():
    tree = ast.parse(Path(config_module.__file__).read_text(encoding="utf-8"))
    documented = {}
    for owner in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        for node, after in zip(owner.body, [*owner.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign):
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                documented[owner.name, node.target.id] = text
    expected = {(policy.__name__, field.name) for policy in POLICIES for field in dataclasses.fields(policy)}
    assert documented.keys() == expected
    assert [field for field, text in documented.items() if len(text.split()) < 3] == []


def test_every_parameter_of_the_optimizer_is_documented():
    text = inspect.getdoc(GuardedOptimizer)
    assert [p.name for p in parameters() if f"\n    {p.name}: " not in text] == []
