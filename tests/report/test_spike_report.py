import calendar
import contextlib
import hashlib
import json
import math
import platform
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from torch import nn

import stabilityguard
from stabilityguard import Budget, GradientSpikeError, SnapshotPolicy
from stabilityguard.measure.batch import fingerprint
from tests.support import Net, NormNet, batch, guard, train

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
MANUAL = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")


def strictly(text):
    """The value of a JSON text that holds neither bare NaN or Infinity, nor a key twice."""

    def no_constant(word):
        raise AssertionError(f"{word} is not JSON")

    def no_duplicates(pairs):
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    return json.loads(text, parse_constant=no_constant, object_pairs_hook=no_duplicates)


def read(path):
    """A report file, strictly parsed and valid."""
    text = Path(path).read_bytes().decode("ascii")
    assert "tensor(" not in text
    report = strictly(text)
    VALIDATOR.validate(report)
    return report


def written(optimizer):
    """All reports that a guard wrote, oldest first."""
    return [read(report.path) for report in optimizer.reports]


def at(step, change):
    """A ``spoil`` for ``train`` that changes the model's gradients after the backward of that step (or steps)."""
    steps = {step} if isinstance(step, int) else set(step)
    return lambda now, model: change(model) if now in steps else None


def explode(model):
    """Gradients of the head 1e4 times as large, those of the body 1e3 times."""
    model.head.weight.grad *= 1e4
    model.head.bias.grad *= 1e4
    model.body.weight.grad *= 1e3
    model.body.bias.grad *= 1e3


def poison(value):
    def change(model):
        model.head.weight.grad[0, 0] = value

    return change


def overflow(model):
    model.head.weight.grad.fill_(1e20)


def run(spoil, *, steps=8, model=None, base=None, **options):
    model = model or Net()
    optimizer = guard(model, base, warmup_steps=3, **options)
    with contextlib.suppress(GradientSpikeError):
        train(model, optimizer, range(1, steps + 1), spoil=spoil)
    optimizer.close()
    return optimizer


def run_with_bad_loss(value):
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    for step in range(1, 9):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step(loss=value if step == 8 else None)
    return optimizer


def run_without_loss():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = guard(model, warmup_steps=3)
    for step in range(1, 9):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if step == 8:
            model[0].weight.grad *= 1e4
        optimizer.step()
    return optimizer


def run_without_forward():
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    for step in range(1, 9):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e6 if step == 8 else 1.0)
        optimizer.step()
    return optimizer


def run_beyond_the_scalers_patience():
    model = Net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = guard(model, scaler=scaler, warmup_steps=3)
    with contextlib.suppress(GradientSpikeError):
        for step in range(1, 40):
            optimizer.zero_grad()
            scaler.scale(model(batch(step))).backward()
            if step > 2:
                model.head.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    return optimizer


def run_with_bad_closure():
    model = Net()
    optimizer = guard(model, torch.optim.LBFGS(model.parameters(), max_iter=4), warmup_steps=0)
    calls = []

    def closure():
        calls.append(None)
        optimizer.zero_grad()
        loss = model(batch(1))
        loss.backward()
        if len(calls) == 2:
            model.head.weight.grad[0, 0] = torch.nan
        return loss

    optimizer.step(closure)
    return optimizer


TRIPS = {
    "a spike": (lambda: run(at(8, explode)), "spike", "skip"),
    "a NaN": (lambda: run(at(8, poison(torch.nan))), "nan", "skip"),
    "an Inf": (lambda: run(at(8, poison(-torch.inf))), "inf", "skip"),
    "a norm beyond float32": (lambda: run(at(8, overflow)), "overflow", "skip"),
    "a NaN loss alone": (lambda: run_with_bad_loss(math.nan), "nan", "skip"),
    "an infinite loss alone": (lambda: run_with_bad_loss(-math.inf), "inf", "skip"),
    "a level accepted": (lambda: run(at((7, 8), explode), budget=Budget(consecutive_skips=2)), "spike", "step"),
    "a rollback": (lambda: run(at(8, poison(torch.nan)), nan_action="rollback"), "nan", "rollback"),
    "a raise": (lambda: run(at(8, explode), nan_action="raise"), "spike", "raise"),
    "a raise for a NaN": (lambda: run(at(8, poison(torch.nan)), nan_action="raise"), "nan", "raise"),
    "a scaler that does not recover": (run_beyond_the_scalers_patience, "scaler_overflow", "raise"),
    "a NaN in the first step": (lambda: run(at(1, poison(torch.nan))), "nan", "skip"),
    "an Inf in warm-up": (lambda: run(at(2, poison(torch.inf))), "inf", "skip"),
    "a step whose loss was not seen": (run_without_loss, "spike", "skip"),
    "gradients made by hand": (run_without_forward, "spike", "skip"),
    "buffers": (lambda: run(at(8, poison(torch.nan)), model=NormNet()), "nan", "skip"),
    "a closure": (run_with_bad_closure, "nan", "skip"),
    "clipping and snapshots": (
        lambda: run(at(8, poison(torch.nan)), max_grad_norm=1.0, snapshots=SnapshotPolicy(every=2)),
        "nan",
        "skip",
    ),
}


def test_the_schema_is_a_valid_schema():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", TRIPS)
def test_every_report_is_strict_json_as_the_schema_says(name):
    make, kind, action = TRIPS[name]
    optimizer = make()
    reports = written(optimizer)
    assert reports
    assert (reports[-1]["kind"], reports[-1]["action"]) == (kind, action)
    assert reports[-1]["step"] == optimizer.reports[-1].record.step
    assert reports[-1]["reason"] == optimizer.reports[-1].reason


@pytest.mark.parametrize(
    "spoilt",
    [
        {"surprise": 1},
        {"loss": "tensor(1.)"},
        {"loss": True},
        {"step": 0},
        {"step": 8.5},
        {"kind": "veto"},
        {"restored_step": 3},
        {"trigger": None},
        {"schema_version": 2},
        {"global_norm": "-Infinity"},
        {"global_norm": -1.0},
        {"buffers": {"restored": []}},
        {"tripped": {"nan": [], "inf": [], "overflow": [], "spike": [3]}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_not_a_report(spoilt):
    report = written(run(at(8, explode)))[0]
    assert not VALIDATOR.is_valid({**report, **spoilt})


@pytest.mark.parametrize("field", SCHEMA["required"])
def test_the_schema_refuses_a_report_that_lacks_a_field(field):
    report = written(run(at(8, explode)))[0]
    del report[field]
    assert not VALIDATOR.is_valid(report)


def test_the_manual_explains_every_field_of_the_schema():
    def fields(schema):
        for name, inner in schema.get("properties", {}).items():
            yield name
            yield from fields(inner)
            yield from fields(inner.get("items", {}))

    names = set(fields(SCHEMA)) | {name for part in SCHEMA["$defs"].values() for name in fields(part)}
    assert [name for name in sorted(names) if f"`{name}`" not in MANUAL] == []


def test_the_schema_knows_every_kind_that_the_manual_lists():
    table = MANUAL.split("**`kind`**")[1].split("**`action`**")[0]
    assert [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")] == SCHEMA["properties"]["kind"][
        "enum"
    ]


NAMES = st.text(st.characters(codec=None, exclude_characters="."), min_size=1, max_size=24)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES)
def test_any_layer_name_is_written_so_that_it_reads_back(name, tmp_path):
    model = nn.Module()
    model.register_module("0" + name, nn.Linear(2, 1))
    layer = model.get_submodule("0" + name)
    optimizer = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), log_dir=tmp_path / "logs")
    layer(torch.ones(1, 2)).sum().backward()
    layer.weight.grad[0, 0] = torch.nan
    optimizer.step()
    optimizer.close()
    report = written(optimizer)[0]
    assert report["trigger"]["layer"] == "0" + name
    assert report["trajectory"]["layers"].keys() == {"0" + name}


# What it says ---------------------------------------------------------------------------------------------------


def test_the_trigger_of_a_spike_is_the_layer_with_the_largest_ratio_and_the_others_follow():
    report = written(run(at(8, explode)))[0]
    layers = report["layers"]
    assert [entry["layer"] for entry in layers] == ["head", "body"]
    assert report["trigger"] == layers[0]
    assert layers[0]["ratio"] > layers[1]["ratio"] > 10
    for entry in layers:
        assert entry["ratio"] == pytest.approx(entry["norm"] / entry["baseline"])
        assert entry["kind"] == "spike"


def test_the_order_of_spikes_does_not_follow_the_order_of_the_model():
    def body_first(model):
        model.body.weight.grad *= 1e5
        model.head.weight.grad *= 1e3

    report = written(run(at(8, body_first)))[0]
    assert [entry["layer"] for entry in report["layers"]] == ["body", "head"]


def test_non_finite_layers_come_before_spikes_and_the_one_nearest_the_loss_first():
    class Three(Net):
        def __init__(self):
            super().__init__()
            self.middle = nn.Linear(8, 8)

        def forward(self, x):
            return self.head(self.middle(torch.tanh(self.body(x)))).square().mean()

    def spoil(model):
        model.head.weight.grad *= 1e6
        model.body.weight.grad[0, 0] = torch.nan
        model.middle.weight.grad[0, :3] = torch.inf

    report = written(run(at(8, spoil), model=Three()))[0]
    listed = [(entry["layer"], entry["kind"]) for entry in report["layers"]]
    assert listed == [("middle", "inf"), ("body", "nan"), ("head", "spike")]
    assert report["tripped"] == {"nan": ["body"], "inf": ["middle"], "overflow": [], "spike": ["head"]}
    assert report["trigger"]["layer"] == "middle"
    assert (report["layers"][0]["inf_elements"], report["layers"][0]["nan_elements"]) == (3, 0)
    assert report["layers"][0]["elements"] == 72
    assert report["layers"][1]["nan_elements"] == 1


def test_an_overflow_is_given_with_its_true_norm_and_no_bad_element():
    trigger = written(run(at(8, overflow)))[0]["trigger"]
    assert trigger["norm"] == pytest.approx(1e20 * math.sqrt(8), rel=1e-6)
    assert (trigger["nan_elements"], trigger["inf_elements"], trigger["elements"]) == (0, 0, 9)


def test_numbers_that_are_not_finite_are_words():
    nan, inf = written(run(at(8, poison(torch.nan))))[0], written(run(at(8, poison(torch.inf))))[0]
    assert (nan["trigger"]["norm"], nan["global_norm"]) == ("NaN", "NaN")
    assert (inf["trigger"]["norm"], inf["trigger"]["ratio"], inf["global_norm"]) == ("Infinity",) * 3
    assert written(run_with_bad_loss(-math.inf))[0]["loss"] == "-Infinity"
    assert written(run_with_bad_loss(math.nan))[0]["loss"] == "NaN"


def test_before_there_is_history_baseline_and_ratio_are_null():
    trigger = written(run(at(1, poison(torch.nan))))[0]["trigger"]
    assert (trigger["baseline"], trigger["ratio"]) == (None, None)


def test_a_bad_loss_alone_blames_no_layer_and_traces_the_one_with_the_largest_ratio():
    optimizer = run_with_bad_loss(math.nan)
    report = written(optimizer)[0]
    assert report["trigger"] is None
    assert report["layers"] == []
    assert list(report["trajectory"]["layers"]) == [optimizer.last_record.worst_layer[0]]


def test_it_says_when_the_trouble_began():
    reports = written(run(at((3, 6, 7, 8), poison(torch.nan))))
    assert [report["streak"] for report in reports] == [
        {"began_at_step": 3, "trips": 1},
        {"began_at_step": 6, "trips": 1},
        {"began_at_step": 6, "trips": 2},
        {"began_at_step": 6, "trips": 3},
    ]


def test_a_skip_that_the_user_asked_for_is_no_trip_of_the_streak():
    model = Net()
    optimizer = guard(model)
    for step in range(1, 7):
        optimizer.zero_grad()
        model(batch(step)).backward()
        if step in (4, 6):
            model.head.weight.grad[0, 0] = torch.nan
        elif step in (3, 5):
            optimizer.veto("a bad batch")
        optimizer.step()
    last = written(optimizer)[-1]
    assert last["reason"].startswith("trip 2 of")
    assert last["streak"] == {"began_at_step": 4, "trips": 2}


def test_the_trajectory_repeats_what_the_records_said():
    records = []

    class Recorder:
        def on_record(self, record):
            records.append(record)

        def on_report(self, report):
            pass

        def close(self):
            pass

    model = Net()
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = guard(model, base, warmup_steps=3, sinks=[Recorder()])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(1, 9):
        optimizer.zero_grad()
        model(batch(step)).backward()
        if step == 8:
            explode(model)
        optimizer.step()
        scheduler.step()
    trajectory = written(optimizer)[0]["trajectory"]
    assert trajectory["step"] == list(range(1, 9))
    assert trajectory["action"] == ["step"] * 7 + ["skip"]
    for field in ("loss", "lr", "global_norm"):
        assert trajectory[field] == [getattr(record, field) for record in records]
    assert len(set(trajectory["lr"])) == 8
    assert list(trajectory["layers"]) == ["head", "body"]
    for layer, norms in trajectory["layers"].items():
        assert norms == [record.layer_norms[layer] for record in records]


def test_the_trajectory_has_null_where_a_layer_had_no_gradient():
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    for step in range(1, 9):
        optimizer.zero_grad()
        (model.body(batch(step)).square().mean() if step == 4 else model(batch(step))).backward()
        if step == 8:
            explode(model)
        optimizer.step()
    layers = written(optimizer)[0]["trajectory"]["layers"]
    assert [norm is None for norm in layers["head"]] == [step == 4 for step in range(1, 9)]
    assert None not in layers["body"]


def test_the_trajectory_ends_with_the_trip_and_goes_back_sixty_four_steps():
    trajectory = written(run(at(80, poison(torch.nan)), steps=80))[0]["trajectory"]
    assert trajectory["step"] == list(range(17, 81))
    assert {len(series) for series in [*trajectory["layers"].values(), trajectory["loss"]]} == {64}


def test_the_trajectory_traces_eight_and_the_report_describes_eight_and_names_all_bad_layers():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(19)])

    def spoil(step, model):
        if step == 8:
            for i, layer in enumerate(model):
                layer.weight.grad *= 1e4 * (i + 1)

    optimizer = guard(model, torch.optim.SGD(model.parameters(), lr=0.0), warmup_steps=3)
    for step in range(1, 9):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        spoil(step, model)
        optimizer.step()
    report = written(optimizer)[0]
    ratios = {
        name: norm / optimizer.last_record.baselines[name] for name, norm in optimizer.last_record.layer_norms.items()
    }
    worst = sorted(ratios, key=ratios.get, reverse=True)
    assert report["tripped"] == {"nan": [], "inf": [], "overflow": [], "spike": worst}
    assert len(worst) == 19
    assert [entry["layer"] for entry in report["layers"]] == worst[:8]
    assert list(report["trajectory"]["layers"]) == worst[:8]


def test_hyperparameters_are_given_for_every_group_as_numbers():
    model = Net()
    base = torch.optim.AdamW(
        [
            {"params": model.body.parameters(), "lr": torch.tensor(0.25), "betas": (0.5, 0.75)},
            {"params": model.head.parameters(), "lr": 1e-3, "weight_decay": 0.125},
        ]
    )
    optimizer = run(at(8, explode), model=model, base=base)
    described = written(optimizer)[0]["optimizer"]
    assert described["class"] == "AdamW"
    first, second = described["param_groups"]
    assert (first["lr"], first["betas"], first["weight_decay"], first["parameters"]) == (0.25, [0.5, 0.75], 0.01, 2)
    assert (second["lr"], second["weight_decay"], second["parameters"]) == (1e-3, 0.125, 2)
    for group, live in zip(described["param_groups"], base.param_groups, strict=True):
        assert group.keys() - {"parameters"} == live.keys() - {"params"}


def test_a_report_in_memory_keeps_the_hyperparameters_of_its_step():
    model = Net()
    base = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    optimizer = run(at(8, explode), model=model, base=base)
    base.param_groups[0]["lr"].fill_(0.5)
    assert float(optimizer.reports[0].details["optimizer"]["param_groups"][0]["lr"]) == 0.25


@pytest.mark.parametrize(
    "value",
    [torch.tensor([0.5, 0.25]), numpy.array([0.5, 0.25]), torch.zeros(0), object()],
    ids=lambda v: type(v).__name__,
)
def test_a_hyperparameter_of_any_type_costs_neither_the_report_nor_the_journal(value, caplog):
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    base.param_groups[0]["custom"] = value
    optimizer = run(at(8, explode), model=model, base=base)
    read(optimizer.reports[0].path)
    assert len(Path("sg_logs/journal.jsonl").read_text().splitlines()) == 8
    assert caplog.records == []


def test_the_batches_are_those_that_were_fed_with_their_shapes_and_fingerprints():
    model = Net()
    optimizer = guard(model)
    fed = [batch(1, rows=6), batch(2, rows=5)]
    for x in fed:
        model(x).backward()
    with torch.no_grad():
        model(batch(9))
    model.head.weight.grad[0, 0] = torch.nan
    optimizer.step()
    batches = written(optimizer)[0]["batches"]
    assert batches == [
        [
            {
                "name": "args[0]",
                "shape": [len(x), 4],
                "dtype": "float32",
                "device": "cpu",
                "fingerprint": fingerprint(x),
            }
        ]
        for x in fed
    ]
    by_hand = hashlib.sha256(f"torch.float32 {(6, 4)} ".encode() + fed[0].numpy().tobytes()).hexdigest()[:16]
    assert batches[0][0]["fingerprint"] == by_hand
    assert batches[1][0]["fingerprint"] != by_hand


def test_tensors_of_a_batch_are_named_by_their_place():
    class Named(Net):
        def forward(self, inputs, *, scale):
            return super().forward(inputs["x"] * scale + inputs["pair"][1])

    model = Named()
    optimizer = guard(model)
    model({"x": batch(1), "pair": (None, torch.zeros(4))}, scale=torch.ones(())).backward()
    model.head.weight.grad[0, 0] = torch.nan
    optimizer.step()
    named = {entry["name"]: entry["shape"] for entry in written(optimizer)[0]["batches"][0]}
    assert named == {"args[0].x": [6, 4], "args[0].pair[1]": [4], "scale": []}


def test_only_the_batches_of_the_bad_step_are_listed():
    report = written(run(at(8, explode)))[0]
    assert [[entry["fingerprint"] for entry in one] for one in report["batches"]] == [[fingerprint(batch(8))]]
    assert written(run_without_forward())[0]["batches"] == []


def test_restored_buffers_are_named():
    skipped = written(run(at(8, poison(torch.nan)), model=NormNet()))[0]
    assert skipped["buffers"] == {
        "restored": ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"],
        "touched": [],
    }
    assert written(run(at(8, explode)))[0]["buffers"] == {"restored": [], "touched": []}


def test_the_environment_is_the_one_in_use():
    assert written(run(at(8, explode)))[0]["environment"] == {
        "stabilityguard": stabilityguard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "machine": platform.machine(),
    }


def test_the_settings_are_repeated_with_defaults_filled_in():
    config = written(run(at(8, poison(torch.nan)), nan_action="rollback", max_grad_norm=2, log_dir=Path("a") / "b"))[0][
        "config"
    ]
    assert config == {
        "spike_threshold": 10.0,
        "nan_action": "rollback",
        "log_every": 50,
        "log_dir": "a/b",
        "ema_alpha": 0.01,
        "warmup_steps": 3,
        "verbose": False,
        "max_grad_norm": 2,
        "snapshots": {"every": 100, "keep": 3, "quarantine": 10},
        "checkpoints": None,
        "moments": "keep",
        "replay_data": False,
        "budget": {"consecutive_skips": 5, "rollbacks": 3, "window": 1000},
        "drift_check_every": 0,
    }


def test_a_rollback_says_where_it_went():
    report = written(run(at(8, poison(torch.nan)), nan_action="rollback"))[0]
    assert report["restored_step"] == 0
    late = run(at(8, poison(torch.nan)), nan_action="rollback", snapshots=SnapshotPolicy(every=2, keep=3, quarantine=1))
    assert written(late)[0]["restored_step"] == 6


def test_the_loss_scale_is_given_and_norms_are_without_it():
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = guard(model, scaler=scaler, warmup_steps=3)
    for step in range(1, 9):
        optimizer.zero_grad()
        scaler.scale(model(batch(step))).backward()
        if step == 8:
            explode(model)
        scaler.step(optimizer)
        scaler.update()
    scaled = written(optimizer)[0]
    plain = written(run(at(8, explode)))[0]
    assert (scaled["loss_scale"], plain["loss_scale"]) == (1024.0, None)
    assert scaled["loss"] == optimizer.reports[0].record.loss < 100
    assert max(scaled["trajectory"]["global_norm"][:7]) < 100


def test_the_time_is_now_in_utc():
    before = int(time.time())
    stamp = written(run(at(8, explode)))[0]["time"]
    assert before <= calendar.timegm(time.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ")) <= time.time()


# The file -------------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_same_directory_overwrites_no_report():
    first = run(at(5, poison(torch.nan)), log_dir="logs").reports[0].path
    kept = Path(first).read_bytes()
    second = run(at(5, poison(torch.inf)), log_dir="logs").reports[0].path
    third = run(at(5, explode), log_dir="logs").reports[0].path
    names = ["spike_step5.json", "spike_step5-2.json", "spike_step5-3.json"]
    assert [Path(path) for path in (first, second, third)] == [Path("logs") / name for name in names]
    assert Path(first).read_bytes() == kept
    assert [read(path)["kind"] for path in (first, second, third)] == ["nan", "inf", "spike"]


def test_the_file_holds_what_the_report_in_memory_holds():
    optimizer = run(at(8, explode))
    report = optimizer.reports[0]
    assert report.path == "./sg_logs/spike_step8.json"
    assert json.loads(json.dumps(report.details)) == read(report.path)


def test_a_healthy_run_and_a_veto_leave_no_report():
    model = Net()
    optimizer = guard(model)
    optimizer.veto("not this one")
    train(model, optimizer, range(1, 5))
    assert optimizer.last_record.step == 4
    assert optimizer.reports == []
    assert [path.name for path in Path("sg_logs").iterdir()] == ["journal.jsonl"]
