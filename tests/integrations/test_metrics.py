import math
import re
from pathlib import Path

import pytest
import torch

from stabilityguard.integrations import metrics
from stabilityguard.integrations.metrics import layer_numbers, merge, numbers_of, split
from stabilityguard.integrations.tally import Tally
from stabilityguard.report.records import LayerReadings, StepRecord


def record(step=3, *, norms=(2.0, 30.0, 4.0), baselines=(1.0, 3.0, math.nan), **options):
    norms, baselines = torch.tensor(norms, dtype=torch.float64), torch.tensor(baselines, dtype=torch.float64)
    layers = LayerReadings(
        places={"a": 0, "b.c": 1, "head": 2},
        norms=norms,
        baselines=baselines,
        ratios=norms / baselines,
        present=torch.tensor(options.pop("present", (True, True, True))),
        nan=tuple(i for i, norm in enumerate(norms.tolist()) if math.isnan(norm)),
        inf=tuple(i for i, norm in enumerate(norms.tolist()) if math.isinf(norm)),
    )
    return StepRecord(
        **{"step": step, "action": "step", "global_norm": float(norms.norm()), **options, "layers": layers}
    )


def test_the_numbers_of_a_healthy_step():
    numbers = numbers_of(record(rank_losses=(1.5,)), Tally(skipped=4, rollbacks=2), tripped=False)
    assert numbers == {
        "sg/step": 3.0,
        "sg/grad_norm": pytest.approx(math.sqrt(4 + 900 + 16)),
        "sg/ratio_max": 10.0,
        "sg/trip": 0.0,
        "sg/skipped_total": 4.0,
        "sg/rollbacks_total": 2.0,
        "sg/nonfinite_layers": 0.0,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_is_counted_and_leaves_the_largest_ratio_to_the_others(bad):
    numbers = numbers_of(record(norms=(2.0, bad, 4.0)), Tally(), tripped=True)
    assert numbers["sg/ratio_max"] == 2.0
    assert numbers["sg/nonfinite_layers"] == 1.0
    finite, left_out = split(numbers)
    assert left_out == ["sg/grad_norm"]
    assert all(map(math.isfinite, finite.values()))


def test_without_baselines_there_is_no_ratio():
    assert "sg/ratio_max" not in numbers_of(record(baselines=(math.nan,) * 3), Tally(), tripped=False)


@pytest.mark.parametrize(
    ("losses", "spread"),
    [((1.0, 4.0, 2.5), 3.0), ((1.0, None, 2.0), 1.0), ((1.0,), None), ((None, 1.0), None), ((), None)],
)
def test_the_spread_of_losses_is_that_of_the_ranks_that_know_one(losses, spread):
    assert numbers_of(record(rank_losses=losses), Tally(), tripped=False).get("sg/loss_spread") == spread


@pytest.mark.parametrize("losses", [(1.0, math.nan), (math.nan, 1.0), (math.inf, math.inf), (1.0, math.inf)])
def test_the_spread_of_losses_that_are_not_finite_is_left_out(losses):
    numbers = numbers_of(record(rank_losses=losses), Tally(), tripped=False)
    assert "sg/loss_spread" in split(numbers)[1]


def test_layers_are_the_worst_the_one_that_tripped_and_the_chosen_ones_that_have_a_gradient():
    assert layer_numbers(record(), []) == {"sg/layer/b.c": 30.0}
    assert layer_numbers(record(), ["head"]) == {"sg/layer/head": 4.0, "sg/layer/b.c": 30.0}
    assert layer_numbers(record(trigger_layer="a"), []) == {"sg/layer/b.c": 30.0, "sg/layer/a": 2.0}
    assert layer_numbers(record(present=(True, True, False)), ["head", "unknown"]) == {"sg/layer/b.c": 30.0}
    assert layer_numbers(record(baselines=(math.nan,) * 3), []) == {}


def test_steps_are_brought_together_by_sum_maximum_and_the_latest():
    first = {
        metrics.STEP: 1.0,
        metrics.TRIP: 1.0,
        metrics.GRAD_NORM: 9.0,
        metrics.SKIPPED_TOTAL: 5.0,
        "sg/layer/a": 1.0,
    }
    second = {
        metrics.STEP: 2.0,
        metrics.TRIP: 1.0,
        metrics.GRAD_NORM: 3.0,
        metrics.SKIPPED_TOTAL: 0.0,
        "sg/layer/b": 2.0,
    }
    merged = {metrics.STEP: 2.0, metrics.TRIP: 2.0, metrics.GRAD_NORM: 9.0, metrics.SKIPPED_TOTAL: 0.0}
    assert merge(first, second) == {**merged, "sg/layer/a": 1.0, "sg/layer/b": 2.0}
    assert merge({}, second) == second
    assert merge(first, {}) == first


def test_the_tally_counts_and_gives_a_verdict():
    tally = Tally().after(record(1), tripped=False)
    assert (tally.verdict, tally.worst_layer, tally.steps) == ("healthy", "b.c", 1)
    for step, (action, layer) in enumerate([("skip", "a"), ("rollback", "head"), ("skip", "a")], start=2):
        tally = tally.after(record(step, action=action, kind="nan", trigger_layer=layer), tripped=True)
    tally = tally.after(record(5, action="skip", kind="veto"), tripped=False)
    assert (tally.trips, tally.skipped, tally.rollbacks) == (3, 3, 1)
    assert (tally.verdict, tally.worst_layer, dict(tally.blamed)) == ("recovered", "a", {"a": 2, "head": 1})
    tally = tally.after(record(6, action="raise", kind="nan", trigger_layer="a"), tripped=True)
    assert tally.verdict == "stopped"


def test_every_name_has_the_prefix_and_is_in_the_table_of_the_manual():
    names = {value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)}
    assert all(name.startswith(metrics.PREFIX) for name in names)
    manual = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(sg/[^`]+)` \|", manual, flags=re.MULTILINE)
    assert {name.removesuffix("<name>") for name in rows} == names - {metrics.PREFIX}
