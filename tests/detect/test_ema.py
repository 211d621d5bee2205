import copy

import pytest
import torch
from torch import nn

from stabilityguard import Budget
from stabilityguard.detect.detector import Detector
from stabilityguard.detect.ema import NEGLIGIBLE, EmaDetector
from tests.support import Net, assert_same, batch, guard

INF, NAN = torch.inf, torch.nan


def ema(*, threshold=10.0, alpha=0.01, warmup=10):
    return EmaDetector(threshold=threshold, alpha=alpha, warmup=warmup)


def norms(*values):
    return torch.tensor(values, dtype=torch.float64)


def after(detector, *history):
    """The memory after healthy steps with these norms; a number stands for a single layer."""
    rows = [norms(*row) if isinstance(row, tuple) else norms(row) for row in history]
    state = detector.initial(rows[0].numel())
    for row in rows:
        state = detector.absorb(state, row)
    return state


def spikes(detector, state, *values):
    return detector.judge(state, norms(*values)).spikes.tolist()


# The average ----------------------------------------------------------------------------------------------------------


def test_it_is_a_detector():
    assert isinstance(ema(), Detector)


def test_without_warmup_the_baseline_is_the_bias_corrected_moving_average():
    history = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.5
    state = after(ema(alpha=0.1, warmup=0), *history.tolist())
    weights = 0.1 * 0.9 ** torch.arange(49, -1, -1, dtype=torch.float64)
    assert float(state["mean"]) == pytest.approx(float((weights * history).sum() / (1 - 0.9**50)), rel=1e-12)


def test_after_warmup_the_average_goes_on_from_the_median_of_the_warmup():
    alpha, warmup, total = 0.05, 7, 60
    history = torch.rand(total, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 0.5
    state = after(ema(alpha=alpha, warmup=warmup), *history.tolist())
    beta = 1 - alpha
    opening = history[:warmup].median() * (1 - beta**warmup) * beta ** (total - warmup)
    weights = alpha * beta ** torch.arange(total - warmup - 1, -1, -1, dtype=torch.float64)
    expected = (opening + (weights * history[warmup:]).sum()) / (1 - beta**total)
    assert float(state["mean"]) == pytest.approx(float(expected), rel=1e-12)


def test_during_warmup_the_baseline_is_the_median_so_far():
    detector = ema(warmup=9)
    assert float(after(detector, 5.0)["mean"]) == 5.0
    assert float(after(detector, 5.0, 100.0, 1.0)["mean"]) == 5.0
    assert float(after(detector, 5.0, 100.0, 1.0, 2.0, 3.0)["mean"]) == 3.0


def test_a_steady_norm_has_ratio_one():
    verdict = ema().judge(after(ema(), *[2.5] * 40), norms(2.5))
    assert float(verdict.baselines) == pytest.approx(2.5, rel=1e-12)
    assert float(verdict.ratios) == pytest.approx(1.0, rel=1e-12)


def test_an_alpha_of_one_makes_the_last_norm_the_baseline():
    assert float(after(ema(alpha=1.0, warmup=2), 1.0, 2.0, 3.0, 7.0)["mean"]) == 7.0


def test_layers_have_histories_of_their_own():
    state = after(ema(warmup=3), *[(1.0, 100.0, 0.01)] * 20)
    assert state["mean"].tolist() == pytest.approx([1.0, 100.0, 0.01])
    assert spikes(ema(warmup=3), state, 11.0, 100.0, 0.2) == [True, False, True]


# Comparing before updating --------------------------------------------------------------------------------------------


def test_a_large_alpha_does_not_keep_a_spike_from_being_found_or_its_true_ratio_from_being_told():
    detector = ema(alpha=0.1, threshold=10.0)
    verdict = detector.judge(after(detector, *[1.0] * 30), norms(1e6))
    assert bool(verdict.spikes)
    assert float(verdict.ratios) == pytest.approx(1e6, rel=1e-9)


def test_the_threshold_itself_is_not_beyond_the_threshold():
    detector = ema(threshold=8.0)
    state = after(detector, *[1.0] * 20)
    assert spikes(detector, state, 8.0) == [False]
    assert spikes(detector, state, 8.0000001) == [True]


def test_a_spike_is_found_from_the_first_step_after_warmup_on():
    detector = ema(warmup=5)
    assert spikes(detector, after(detector, *[1.0] * 4), 50.0) == [False]
    assert spikes(detector, after(detector, *[1.0] * 5), 50.0) == [True]


def test_warmup_never_spikes_but_tells_the_ratio():
    detector = ema(warmup=10)
    verdict = detector.judge(after(detector, *[1.0] * 9), norms(1e9))
    assert not bool(verdict.spikes)
    assert float(verdict.ratios) == pytest.approx(1e9)


def test_without_warmup_the_first_norm_is_no_spike_and_the_second_can_be():
    detector = ema(warmup=0)
    assert spikes(detector, detector.initial(1), 1e9) == [False]
    assert spikes(detector, after(detector, 1.0), 50.0) == [True]


def test_before_any_history_there_is_no_baseline_and_no_ratio():
    verdict = ema().judge(ema().initial(2), norms(1.0, 2.0))
    assert verdict.baselines.isnan().all()
    assert verdict.ratios.isnan().all()
    assert not verdict.spikes.any()


@pytest.mark.parametrize(
    "opening",
    [
        [1000.0] + [1.0] * 9,
        [1.0] * 4 + [1e6] + [1.0] * 5,
        [1.0] * 9 + [1e9],
        [1e3, 1e4, 1e5] + [1.0] * 7,
        [1.0, 1e8, 1.0, 1e8, 1.0, 1e8, 1.0, 1.0, 1.0, 1.0],
    ],
    ids=["large first", "outlier", "outlier at the end", "falling", "several"],
)
def test_outliers_in_warmup_do_not_hide_a_later_spike(opening):
    detector = ema()
    assert spikes(detector, after(detector, *opening), 50.0) == [True]
    assert spikes(detector, after(detector, *opening, *[1.0] * 20), 50.0) == [True]


def test_a_small_outlier_in_warmup_raises_no_false_alarm_later():
    detector = ema()
    assert spikes(detector, after(detector, 1e-6, *[1.0] * 9), 2.0) == [False]


# Small, zero and absent norms -----------------------------------------------------------------------------------------


def test_noise_in_a_layer_far_below_the_others_is_silent():
    detector = ema()
    state = after(detector, *[(1.0, 1e-9)] * 20)
    assert spikes(detector, state, 1.0, 9e-6) == [False, False]


def test_a_small_layer_above_the_noise_is_still_judged():
    detector = ema()
    state = after(detector, *[(1.0, 1e-4)] * 20)
    assert spikes(detector, state, 1.0, 50e-4) == [False, True]
    assert float(detector.judge(state, norms(1.0, 50e-4)).ratios[1]) == pytest.approx(50.0)


def test_the_noise_of_a_negligible_layer_is_measured_against_the_largest_baseline():
    detector = ema()
    verdict = detector.judge(after(detector, *[(4.0, 1e-9)] * 20), norms(4.0, 1.0))
    assert float(verdict.baselines[1]) == pytest.approx(4.0 * NEGLIGIBLE)
    assert verdict.spikes.tolist() == [False, True]


def test_where_everything_is_tiny_a_spike_is_still_found():
    detector = ema()
    state = after(detector, *[(1e-9, 3e-10)] * 20)
    assert spikes(detector, state, 50e-9, 3e-10) == [True, False]


def test_zero_gradients_neither_trip_nor_enter():
    detector = ema()
    state = after(detector, *[1.0] * 20)
    for _ in range(50):
        verdict = detector.judge(state, norms(0.0))
        assert not bool(verdict.spikes)
        assert float(verdict.ratios) == 0.0
        state = detector.absorb(state, norms(0.0))
    assert_same(state, after(detector, *[1.0] * 20))


def test_a_model_whose_gradients_were_always_zero_can_be_judged():
    detector = ema()
    verdict = detector.judge(after(detector, *[(0.0, 0.0)] * 50), norms(0.0, 0.0))
    assert not verdict.spikes.any()
    assert verdict.ratios.isnan().all()


def test_a_layer_that_wakes_after_a_hundred_zero_steps_begins_its_own_warmup():
    detector = ema()
    state = after(detector, *[(1.0, 0.0)] * 100)
    for _ in range(9):
        assert spikes(detector, state, 1.0, 30.0) == [False, False]
        state = detector.absorb(state, norms(1.0, 30.0))
    state = detector.absorb(state, norms(1.0, 30.0))
    assert spikes(detector, state, 1.0, 31.0) == [False, False]
    assert spikes(detector, state, 1.0, 1000.0) == [False, True]


def test_a_layer_that_is_used_now_and_then_is_judged_by_the_steps_in_which_it_was():
    detector = ema(warmup=5)
    state = after(detector, *[(1.0, 2.0 if step % 7 == 0 else 0.0) for step in range(70)])
    assert float(state["mean"][1]) == pytest.approx(2.0)
    assert spikes(detector, state, 1.0, 100.0) == [False, True]


def test_a_model_without_layers_can_be_judged():
    detector = ema()
    state = detector.absorb(detector.initial(0), norms())
    assert detector.judge(state, norms()).spikes.numel() == 0


# Non-finite norms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("healthy", [0, 3, 20])
def test_a_norm_that_is_not_finite_never_enters_a_baseline(value, healthy):
    detector = ema()
    rows = [(1.0, 2.0)] * healthy
    state = after(detector, (1.0, 0.0), *rows)
    spoilt = detector.absorb(state, norms(1.0, value))
    clean = detector.absorb(state, norms(1.0, 0.0))
    assert_same(spoilt, clean)


def test_a_nan_has_no_ratio_and_an_inf_has_an_infinite_one():
    verdict = ema().judge(after(ema(), *[(1.0, 1.0)] * 20), norms(NAN, INF))
    assert verdict.ratios[0].isnan()
    assert verdict.ratios[1] == INF


# A new level ----------------------------------------------------------------------------------------------------------


def test_an_accepted_level_becomes_the_baseline_of_the_layers_concerned_only():
    detector = ema()
    state = after(detector, *[(1.0, 1.0)] * 20)
    state = detector.rebase(state, norms(40.0, 3.0), torch.tensor([True, False]))
    assert state["mean"].tolist() == pytest.approx([40.0, 1.0])
    assert spikes(detector, state, 41.0, 3.0) == [False, False]
    assert spikes(detector, state, 500.0, 30.0) == [True, True]


# Purity ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("healthy", [1, 5, 30])
def test_the_state_passed_in_is_left_as_it_was(healthy):
    detector = ema()
    state = after(detector, *[(1.0, 0.5)] * healthy)
    before, row = copy.deepcopy(state), norms(7.0, 0.0)
    detector.judge(state, row)
    detector.absorb(state, row)
    detector.rebase(state, row, torch.tensor([True, True]))
    assert_same(state, before)
    assert row.tolist() == [7.0, 0.0]


def test_the_same_bits_in_give_the_same_bits_out():
    history = [tuple(row) for row in torch.rand(40, 3, dtype=torch.float64).tolist()]
    one, other = after(ema(), *history), after(ema(), *history)
    assert_same(one, other)
    row = norms(3.0, 0.1, 99.0)
    first, second = ema().judge(one, row), ema().judge(other, row)
    assert_same(vars(first), vars(second))


# Through the guarded optimizer ----------------------------------------------------------------------------------------


class Dial(nn.Module):
    """Layers whose gradient norms are whatever the test asks for."""

    def __init__(self, *names):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names or ("only",)})

    def forward(self, *slopes):
        return sum((slope * layer.weight).sum() for layer, slope in zip(self.layers.values(), slopes, strict=True))


def run(optimizer, model, *rows):
    """Steps with these gradient norms; returns the action and kind of each."""
    told = []
    for row in rows:
        optimizer.zero_grad()
        model(*(row if isinstance(row, tuple) else (row,))).backward()
        optimizer.step()
        told.append((optimizer.last_record.action, optimizer.last_record.kind))
    return told


def dial(*names, **options):
    model = Dial(*names)
    return guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), **options), model


HEALTHY = ("step", None)


def test_a_nan_at_the_first_step_is_skipped_and_leaves_no_trace():
    optimizer, model = dial()
    assert run(optimizer, model, NAN, *[1.0] * 12) == [("skip", "nan"), *[HEALTHY] * 12]
    assert optimizer.last_record.baselines == {"layers.only": pytest.approx(1.0)}


def test_a_nan_during_warmup_is_skipped_and_leaves_no_trace():
    optimizer, model = dial()
    told = run(optimizer, model, 1.0, 1.0, NAN, 1.0, INF, *[1.0] * 7, 50.0)
    assert told == [*[HEALTHY] * 2, ("skip", "nan"), HEALTHY, ("skip", "inf"), *[HEALTHY] * 7, ("skip", "spike")]
    assert optimizer.last_record.ratio == pytest.approx(50.0)


def test_a_spike_right_after_a_spike_is_measured_against_the_clean_baseline():
    optimizer, model = dial()
    run(optimizer, model, *[1.0] * 20)
    assert run(optimizer, model, 1e4) == [("skip", "spike")]
    assert run(optimizer, model, 500.0) == [("skip", "spike")]
    assert optimizer.last_record.ratio == pytest.approx(500.0)
    assert optimizer.last_record.baselines["layers.only"] == pytest.approx(1.0)


def test_spikes_that_were_skipped_again_and_again_do_not_contaminate_the_baseline():
    optimizer, model = dial()
    run(optimizer, model, *[1.0] * 20)
    for _ in range(14):
        assert run(optimizer, model, 1e4, 1.0) == [("skip", "spike"), HEALTHY]
    assert run(optimizer, model, 50.0) == [("skip", "spike")]
    assert optimizer.last_record.baselines["layers.only"] == pytest.approx(1.0)


def test_a_lasting_change_of_level_is_accepted_with_a_report_when_the_budget_is_spent_and_is_quiet_then():
    optimizer, model = dial(budget=Budget(consecutive_skips=3))
    run(optimizer, model, *[1.0] * 20)
    assert run(optimizer, model, *[30.0] * 10) == [
        *[("skip", "spike")] * 2,
        ("step", "spike"),
        *[HEALTHY] * 7,
    ]
    assert [report.record.action for report in optimizer.reports] == ["skip", "skip", "step"]
    assert "the level is new" in optimizer.reports[-1].reason
    assert optimizer.last_record.baselines["layers.only"] == pytest.approx(30.0)


def test_after_a_new_level_was_accepted_spikes_above_it_still_trip():
    optimizer, model = dial(budget=Budget(consecutive_skips=2))
    run(optimizer, model, *[1.0] * 20, *[30.0] * 5)
    assert run(optimizer, model, 290.0, 1500.0) == [HEALTHY, ("skip", "spike")]


def test_the_step_that_accepts_a_level_is_applied():
    optimizer, model = dial(budget=Budget(consecutive_skips=1))
    run(optimizer, model, *[1.0] * 20)
    before = model.layers["only"].weight.detach().clone()
    run(optimizer, model, 30.0)
    assert float(before - model.layers["only"].weight.detach()) == pytest.approx(30.0 * 1e-3, rel=1e-4)


def test_a_new_level_in_one_layer_leaves_the_baselines_of_the_others():
    optimizer, model = dial("a", "b", budget=Budget(consecutive_skips=2))
    run(optimizer, model, *[(1.0, 1.0)] * 20, (30.0, 1.0), (30.0, 1.0), (30.0, 1.0))
    assert optimizer.last_record.baselines["layers.a"] == pytest.approx(30.0)
    assert optimizer.last_record.baselines["layers.b"] == pytest.approx(1.0)


def test_the_largest_ratio_names_the_layer():
    optimizer, model = dial("a", "b", "c")
    run(optimizer, model, *[(1.0, 0.01, 5.0)] * 20, (30.0, 0.9, 5.0))
    assert optimizer.last_record.trigger_layer == "layers.b"
    assert optimizer.last_record.ratio == pytest.approx(90.0)
    assert [entry["layer"] for entry in optimizer.reports[-1].details["layers"]] == ["layers.b", "layers.a"]


def test_layers_without_a_gradient_are_neither_judged_nor_listed():
    model = Dial("a", "b")
    optimizer = guard(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(20):
        optimizer.zero_grad()
        model.layers["a"].weight.sum().backward()
        optimizer.step()
        assert optimizer.last_record.action == "step"
    assert optimizer.last_record.layer_norms == {"layers.a": pytest.approx(1.0)}
    assert optimizer.last_record.baselines == {"layers.a": pytest.approx(1.0)}


def test_fifty_steps_of_zero_gradients_pass_in_silence():
    optimizer, model = dial()
    assert run(optimizer, model, *[0.0] * 50, *[1.0] * 10) == [HEALTHY] * 60


def test_low_rank_adapters_that_start_from_zero_do_not_trip():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 16).requires_grad_(False)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return (self.base(x) + self.up(self.down(x)) - x).square().mean()

    model = Adapted()
    optimizer = guard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))
    for step in range(1, 61):
        optimizer.zero_grad()
        model(batch(step, rows=32, columns=16)).backward()
        optimizer.step()
        assert optimizer.last_record.action == "step"


def test_a_real_training_run_raises_no_false_alarm():
    model = Net()
    optimizer = guard(model)
    for step in range(1, 101):
        optimizer.zero_grad()
        model(batch(step, rows=64)).backward()
        optimizer.step()
    assert optimizer.reports == []
