import pytest
import torch

from stabilityguard.detect.detector import Verdict
from stabilityguard.detect.diagnosis import Diagnosis, diagnose
from stabilityguard.detect.statistics import Finding, Statistics
from tests.support import Net, batch, guard

INF, NAN = torch.inf, torch.nan


def finding(kind):
    return Finding(kind=kind, norm={"nan": NAN, "inf": INF, "overflow": 1e21}[kind], elements=4)


def diagnosis(*, findings=None, loss=1.0, scaled=False, overflowed=False, ratios=(1.0, 1.0, 1.0), vetoed=False):
    """What is wrong with a step of three layers; ``findings`` are kinds by layer, nearest the loss first."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    statistics = Statistics(
        norms=ratio,
        present=torch.ones(3, dtype=torch.bool),
        norms_at_step=ratio,
        findings={layer: finding(kind) for layer, kind in (findings or {}).items()},
        loss=loss,
        scaled=scaled,
        overflowed=overflowed,
        scale=None,
        rank_losses=(loss,),
        evidence=None,
        vetoed=vetoed,
    )
    verdict = Verdict(baselines=torch.ones(3, dtype=torch.float64), ratios=ratio, spikes=ratio > 10)
    return diagnose(statistics, verdict)


def test_a_healthy_step_has_no_fault():
    assert diagnosis() is None
    assert diagnosis(loss=None) is None


@pytest.mark.parametrize("kind", ["nan", "inf", "overflow"])
def test_the_layer_nearest_the_loss_is_blamed_whatever_its_number(kind):
    assert diagnosis(findings={1: kind, 2: "nan", 0: "inf"}) == Diagnosis(kind=kind, layer=1)


def test_the_largest_ratio_among_the_spiking_layers_is_blamed():
    assert diagnosis(ratios=(11.0, 99.0, 12.0)) == Diagnosis(kind="spike", layer=1)


def test_a_ratio_that_is_no_number_does_not_hide_a_spike():
    assert diagnosis(ratios=(NAN, 11.0, 12.0)) == Diagnosis(kind="spike", layer=2)


def test_a_layer_that_does_not_spike_is_not_blamed():
    assert diagnosis(ratios=(9.0, 10.0, 10.5)) == Diagnosis(kind="spike", layer=2)


@pytest.mark.parametrize(("loss", "kind"), [(NAN, "nan"), (INF, "inf"), (-INF, "inf")])
def test_a_loss_that_is_not_finite_is_a_fault_without_a_layer(loss, kind):
    assert diagnosis(loss=loss) == Diagnosis(kind=kind, layer=None)


def test_bad_gradients_are_graver_than_a_bad_loss_since_they_name_a_layer():
    assert diagnosis(findings={2: "inf"}, loss=NAN) == Diagnosis(kind="inf", layer=2)


def test_a_bad_loss_is_graver_than_a_spike():
    assert diagnosis(loss=NAN, ratios=(99.0, 1.0, 1.0)) == Diagnosis(kind="nan", layer=None)


def test_bad_gradients_are_graver_than_a_spike():
    assert diagnosis(findings={0: "nan"}, ratios=(NAN, 99.0, 1.0)) == Diagnosis(kind="nan", layer=0)


def test_a_veto_counts_only_where_nothing_else_is_wrong():
    assert diagnosis(vetoed=True) == Diagnosis(kind="veto")
    assert diagnosis(vetoed=True, ratios=(99.0, 1.0, 1.0)) == Diagnosis(kind="spike", layer=0)
    assert diagnosis(vetoed=True, findings={0: "nan"}) == Diagnosis(kind="nan", layer=0)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_bad_gradients_of_a_finite_scaled_loss_are_the_scalers_overflow(kind):
    assert diagnosis(findings={1: kind}, scaled=True, overflowed=True) == Diagnosis(kind="scaler_overflow", layer=1)
    assert diagnosis(findings={1: kind}, scaled=True, loss=None) == Diagnosis(kind="scaler_overflow", layer=1)


def test_an_overflow_that_only_the_scaler_saw_is_its_business():
    assert diagnosis(scaled=True, overflowed=True) == Diagnosis(kind="scaler_overflow", layer=None)


def test_no_scaler_is_to_blame_for_a_loss_that_was_not_finite_before_scaling():
    assert diagnosis(findings={1: "nan"}, scaled=True, overflowed=True, loss=NAN) == Diagnosis(kind="nan", layer=1)
    assert diagnosis(scaled=True, overflowed=True, loss=INF) == Diagnosis(kind="inf", layer=None)


def test_a_norm_beyond_float32_is_an_overflow_also_under_a_scaler():
    assert diagnosis(findings={1: "overflow"}, scaled=True) == Diagnosis(kind="overflow", layer=1)


def test_a_spike_under_a_scaler_is_a_spike():
    assert diagnosis(scaled=True, ratios=(1.0, 1.0, 30.0)) == Diagnosis(kind="spike", layer=2)


def test_finite_gradients_whose_norm_overflows_are_not_called_nan_or_inf():
    model = Net()
    optimizer = guard(model)
    model(batch(1)).backward()
    model.body.weight.grad.fill_(1e20)
    optimizer.step()
    record = optimizer.last_record
    assert (record.action, record.kind, record.trigger_layer) == ("skip", "overflow", "body")
    assert record.nan_layers == record.inf_layers == []
    assert record.layer_norms["body"] == pytest.approx(1e20 * model.body.weight.numel() ** 0.5, rel=1e-6)


def spoil(parameter):
    parameter.grad[0, 0] = torch.nan


def test_one_bad_layer_is_told_from_those_that_clipping_spoilt():
    model = Net()
    optimizer = guard(model)
    model.body.weight.register_post_accumulate_grad_hook(spoil)
    model(batch(1)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert model.head.weight.grad.isnan().all()
    optimizer.step()
    assert optimizer.last_record.nan_layers == ["body"]
    assert optimizer.last_record.trigger_layer == "body"
