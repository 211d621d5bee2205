import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stabilityguard.detect.statistics import DETAILED_LAYERS, Finding
from stabilityguard.measure.gradients import GradientReader
from stabilityguard.measure.norms import MANY, SMALL
from tests.support import assert_same, guard, table_of


def reader_of(*gradients):
    """A reader over one layer per gradient; None stands for a parameter without one."""
    layers = []
    for gradient in gradients:
        layer = nn.Module()
        like = torch.zeros(1) if gradient is None else gradient
        layer.weight = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype))
        layer.weight.grad = gradient
        layers.append(layer)
    model = nn.ModuleList(layers)
    return GradientReader(table_of(model, model.parameters()))


def norms(reader):
    return reader.read().squares.sqrt()


def examine(reader, layers):
    return reader.examine(layers, reader.read().squares)


def exact(gradient):
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    wide = torch.view_as_real(dense) if dense.is_complex() else dense
    return float(wide.double().square().sum().sqrt())


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


def sparse(values, rows=(1, 1, 3), height=5):
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (height, values.shape[1]), check_invariants=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (7,), (64, 65), (300, 1000)])
def test_the_norm_is_true_to_a_millionth_in_every_type_and_size(dtype, shape):
    gradient = normal(*shape, dtype=dtype)
    assert float(norms(reader_of(gradient))) == pytest.approx(exact(gradient), rel=1e-6)


@pytest.mark.parametrize(("elements", "rel"), [(10_000, 2e-5), (65_536, 2e-5), (65_537, 1e-6), (1_000_000, 1e-6)])
def test_the_norm_of_many_equal_elements_is_as_true_as_promised(elements, rel):
    gradient = torch.full((elements,), 0.1)
    assert float(norms(reader_of(gradient))) == pytest.approx(exact(gradient), rel=rel)


def test_the_norm_of_twenty_million_elements_is_true_to_a_millionth():
    gradient = torch.randn(20_000_000)
    expected = sum(float(part.double().square().sum()) for part in gradient.split(1_000_000)) ** 0.5
    assert float(norms(reader_of(gradient))) == pytest.approx(expected, rel=1e-6)


def test_the_parameters_of_one_layer_add_up():
    layer = nn.Linear(300, 400)
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    reader = GradientReader(table_of(layer, layer.parameters()))
    expected = math.hypot(*(exact(parameter.grad) for parameter in layer.parameters()))
    assert norms(reader).tolist() == pytest.approx([expected], rel=1e-6)


def test_types_may_be_mixed_within_one_model():
    gradients = [
        normal(40, 40, dtype=dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16, torch.complex128)
    ]
    for order in (gradients, gradients[::-1]):
        assert norms(reader_of(*order)).tolist() == pytest.approx([exact(g) for g in order], rel=1e-6)


def many_of_each(*shapes, dtype=torch.float32):
    """Gradients of several shapes in turn, enough of each for small ones to be read side by side."""
    return [normal(*shape, dtype=dtype) * 2.0**i for i in range(MANY) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_each_of_many_small_gradients_has_its_own_norm_also_beside_large_ones(dtype):
    gradients = many_of_each((), (7,), (3, 5), (300, 301), (SMALL,), (SMALL + 1,), dtype=dtype)
    reader, expected = reader_of(*gradients), list(map(exact, gradients))
    assert norms(reader).tolist() == pytest.approx(expected, rel=1e-6)
    reader.table.parameters[8].grad, expected[8] = None, 0.0
    assert norms(reader).tolist() == pytest.approx(expected, rel=1e-6)


def test_small_gradients_in_any_order_in_memory_count_alike():
    gradients = [g for _ in range(MANY) for g in (normal(5, 4).t(), normal(9, 20)[1:5, ::4], normal(1, 5).expand(4, 5))]
    assert norms(reader_of(*gradients)).tolist() == pytest.approx(list(map(exact, gradients)), rel=1e-6)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("shape", [(3, 2), (2, 2), (100, 2000)])
def test_a_small_gradient_that_takes_another_shape_counts_with_all_of_its_elements(place, shape):
    reader = reader_of(*many_of_each((2, 3)))
    reader.read()
    parameter = reader.table.parameters[place]
    parameter.grad = None
    parameter.data = torch.zeros(shape)
    parameter.grad = torch.randn(shape)
    expected = [exact(parameter.grad) for parameter in reader.table.parameters]
    assert norms(reader).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_element_among_many_small_gradients_shows_in_its_layer_alone(value):
    gradients = many_of_each((3, 5), (7,))
    gradients[4][2, 2] = value
    assert norms(reader_of(*gradients)).isfinite().logical_not().nonzero().flatten().tolist() == [4]


def test_a_glance_shows_the_norms_of_dense_gradients():
    gradients = [None, *many_of_each((3, 5), (7,), (30, 40), (300, 301)), sparse(torch.ones(3, 4))]
    glance = reader_of(*gradients).glance()
    expected = {layer: exact(g) for layer, g in enumerate(gradients) if g is not None and not g.is_sparse}
    assert glance.of_layers(range(len(gradients))) == pytest.approx(
        {**expected, 0: 0.0, len(gradients) - 1: 0.0}, rel=1e-3
    )


def test_glances_and_readings_do_not_disturb_each_other():
    reader = reader_of(*many_of_each((3, 5)))
    for absent in (None, 1, None, 3):
        gradients = many_of_each((3, 5))
        for i, parameter in enumerate(reader.table.parameters):
            parameter.grad = None if i == absent else gradients[i]
        expected = [0.0 if i == absent else exact(g) for i, g in enumerate(gradients)]
        assert list(reader.glance().of_layers(range(MANY)).values()) == pytest.approx(expected, rel=1e-6)
        reader.table.parameters[0].grad = None
        assert norms(reader).tolist() == pytest.approx([0.0, *expected[1:]], rel=1e-6)


@pytest.mark.parametrize("rows", [(0, 2, 3), (3, 1, 1)], ids=["distinct rows", "repeated rows"])
def test_a_sparse_gradient_counts_like_its_dense_form(rows):
    gradient = sparse(torch.randn(3, 4), rows)
    assert norms(reader_of(gradient, torch.ones(2))).tolist() == pytest.approx([exact(gradient), 2**0.5], rel=1e-6)


def test_reading_leaves_a_sparse_gradient_as_it_was():
    gradient = sparse(torch.randn(3, 4))
    reader_of(gradient).read()
    assert not gradient.is_coalesced()


@pytest.mark.parametrize("size", [4, 96])
def test_a_gradient_in_channels_last_order_counts_like_any_other(size):
    gradient = torch.randn(8, 16, size, size).to(memory_format=torch.channels_last)
    assert float(norms(reader_of(gradient))) == pytest.approx(exact(gradient), rel=1e-6)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[5:, 7:],
        lambda t: t[0].expand(400, 500),
    ],
    ids=["transposed", "strided", "with an offset", "expanded"],
)
def test_a_gradient_that_is_a_view_counts_only_its_own_elements(view):
    gradient = view(torch.randn(400, 500))
    assert float(norms(reader_of(gradient))) == pytest.approx(exact(gradient), rel=1e-6)


def test_a_gradient_without_elements_has_norm_zero_and_is_present():
    measured = reader_of(torch.zeros(0, 4), torch.ones(4)).read()
    assert measured.squares.tolist() == [0.0, 4.0]
    assert measured.present.tolist() == [True, True]


def test_a_missing_gradient_is_absent_and_not_zero():
    measured = reader_of(None, torch.zeros(3)).read()
    assert measured.squares.tolist() == [0.0, 0.0]
    assert measured.present.tolist() == [False, True]


def test_a_model_without_any_gradient_can_be_read():
    measured = reader_of(None, None).read()
    assert measured.squares.tolist() == [0.0, 0.0]
    assert not measured.present.any()


def test_gradients_that_come_and_go_are_read_as_they_are():
    reader = reader_of(torch.full((1,), 3.0), torch.full((1,), 4.0))
    first, second = reader.table.parameters
    assert norms(reader).tolist() == [3.0, 4.0]
    first.grad = None
    assert norms(reader).tolist() == [0.0, 4.0]
    second.grad, first.grad = None, torch.full((1,), 5.0)
    assert norms(reader).tolist() == [5.0, 0.0]
    second.grad = torch.full((1,), 6.0)
    assert norms(reader).tolist() == [5.0, 6.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("gradient", [torch.ones(5), torch.ones(200_000), torch.ones(3, dtype=torch.bfloat16)])
def test_one_bad_element_shows_in_the_norm_of_its_layer_alone(value, gradient):
    gradient = gradient.clone()
    gradient[-1] = value
    squares = reader_of(torch.ones(4), gradient, torch.ones(9)).read().squares
    assert squares.isfinite().tolist() == [True, False, True]


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's value is brought to the host."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return operation(*args, **(kwargs or {}))


def test_the_counter_of_host_reads_counts():
    with HostReads() as reads:
        torch.ones(1).item()
    assert reads.count == 1


def test_reading_a_hundred_gradients_brings_none_of_them_to_the_host():
    reader = reader_of(*(torch.randn(70_000 if i == 50 else 8) for i in range(100)))
    with HostReads() as reads:
        measured = reader.read()
        reader.unchanged_since(measured)
    assert reads.count == 0


def test_host_reads_of_a_whole_healthy_step_do_not_grow_with_the_number_of_layers():
    def count(layers):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        with guard(model, torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
            for _ in range(2):
                model(torch.ones(2, 3)).square().sum().backward()
                with HostReads() as reads:
                    optimizer.step()
        return reads.count

    assert count(100) == count(2)


def test_a_nan_is_told_from_an_inf_and_each_is_counted():
    gradient = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, torch.nan, 2.0])
    infinite = torch.tensor([1.0, -torch.inf])
    findings = examine(reader_of(gradient, infinite), [0, 1])
    assert (findings[0].kind, findings[0].elements) == ("nan", 6)
    assert (findings[0].nan_elements, findings[0].inf_elements) == (2, 2)
    assert math.isnan(findings[0].norm)
    assert findings[1] == Finding(kind="inf", norm=torch.inf, elements=2, nan_elements=0, inf_elements=1)


def test_finite_elements_whose_norm_leaves_float32_are_an_overflow_with_the_exact_norm():
    reader = reader_of(torch.full((100,), 1e20))
    assert not norms(reader).isfinite()
    finding = examine(reader, [0])[0]
    assert (finding.kind, finding.nan_elements, finding.inf_elements) == ("overflow", 0, 0)
    assert finding.norm == pytest.approx(1e21, rel=1e-6)


def test_finite_elements_whose_squares_leave_float64_are_an_overflow_with_the_exact_norm():
    reader = reader_of(torch.full((4,), 1e200, dtype=torch.float64))
    assert not reader.read().squares.isfinite()
    finding = examine(reader, [0])[0]
    assert finding.kind == "overflow"
    assert finding.norm == pytest.approx(2e200, rel=1e-12)


def test_a_float16_gradient_near_its_largest_value_has_a_finite_true_norm():
    reader = reader_of(torch.full((1000,), 60000.0, dtype=torch.float16))
    assert float(norms(reader)) == pytest.approx(60000 * 1000**0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_bad_elements_are_counted_in_every_type(dtype):
    gradient = torch.ones(6, dtype=dtype)
    gradient[1], gradient[4] = torch.nan, torch.inf
    finding = examine(reader_of(gradient), [0])[0]
    assert (finding.kind, finding.nan_elements, finding.inf_elements) == ("nan", 1, 1)


def test_a_nan_in_a_sparse_gradient_is_found_and_counted():
    values = torch.ones(3, 4)
    values[2, 0] = torch.nan
    reader = reader_of(sparse(values))
    assert norms(reader).isnan().all()
    finding = examine(reader, [0])[0]
    assert (finding.kind, finding.nan_elements) == ("nan", 1)


def test_the_faults_of_a_layer_are_counted_over_all_its_parameters():
    layer = nn.Linear(300, 300)
    layer.weight.grad, layer.bias.grad = torch.ones(300, 300), torch.ones(300)
    layer.weight.grad[0, 0] = layer.weight.grad[-1, -1] = torch.inf
    layer.bias.grad[7] = torch.nan
    finding = examine(GradientReader(table_of(layer, layer.parameters())), [0])[0]
    assert (finding.kind, finding.elements) == ("nan", 300 * 300 + 300)
    assert (finding.nan_elements, finding.inf_elements) == (1, 2)


def test_elements_are_counted_only_in_the_layers_given_first():
    reader = reader_of(*(torch.full((3,), torch.nan) for _ in range(DETAILED_LAYERS + 2)))
    order = list(reversed(range(DETAILED_LAYERS + 2)))
    findings = examine(reader, order)
    assert list(findings) == order
    assert [findings[layer].nan_elements for layer in order] == [3] * DETAILED_LAYERS + [None] * 2
    assert {finding.kind for finding in findings.values()} == {"nan"}


def test_an_empty_gradient_in_a_bad_layer_does_not_disturb_the_look_at_it():
    layer = nn.Module()
    layer.empty, layer.full = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(2))
    layer.empty.grad, layer.full.grad = torch.zeros(0, 3), torch.tensor([1.0, torch.inf])
    finding = examine(GradientReader(table_of(layer, layer.parameters())), [0])[0]
    assert (finding.kind, finding.elements, finding.inf_elements) == ("inf", 2, 1)


def test_gradients_left_alone_are_unchanged():
    reader = reader_of(torch.ones(3), None, sparse(torch.ones(3, 2)))
    measured = reader.read()
    assert reader.unchanged_since(measured)


def edit_in_place(parameter):
    parameter.grad.mul_(2)


def replace(parameter):
    parameter.grad = parameter.grad * 2


def replace_twice(parameter):
    parameter.grad = parameter.grad * 2
    parameter.grad = parameter.grad * 3


def drop(parameter):
    parameter.grad = None


@pytest.mark.parametrize("change", [edit_in_place, replace, replace_twice, drop], ids=lambda change: change.__name__)
@pytest.mark.parametrize("which", [0, -1])
def test_a_gradient_that_was_changed_is_noticed(change, which):
    reader = reader_of(*(torch.ones(3) for _ in range(20)))
    measured = reader.read()
    change(reader.table.parameters[which])
    assert not reader.unchanged_since(measured)


def test_a_gradient_replaced_again_and_again_is_noticed_however_memory_is_reused():
    reader = reader_of(torch.ones(3))
    (parameter,) = reader.table.parameters
    measured = reader.read()
    for factor in range(2, 20):
        parameter.grad = parameter.grad * factor
        assert not reader.unchanged_since(measured)


def test_gradients_made_non_finite_by_replacing_them_are_never_stepped_on():
    for times in (1, 2, 3):
        model = nn.Linear(3, 2)
        optimizer = guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(4, 3)).square().sum().backward()
        for factor in ([1.0] * times + [torch.nan])[-times:]:
            for parameter in model.parameters():
                parameter.grad = parameter.grad * factor
        optimizer.step()
        assert optimizer.last_record.action == "skip"
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_gradients_that_changed_places_are_noticed():
    reader = reader_of(torch.ones(3), torch.ones(3))
    first, second = reader.table.parameters
    measured = reader.read()
    first.grad, second.grad = second.grad, first.grad
    assert not reader.unchanged_since(measured)


def test_a_gradient_that_appeared_is_noticed():
    reader = reader_of(None, torch.ones(3))
    measured = reader.read()
    reader.table.parameters[0].grad = torch.ones(1)
    assert not reader.unchanged_since(measured)


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_scaling_multiplies_every_kind_of_gradient_in_place(factor):
    gradients = [
        torch.randn(4, 3),
        torch.randn(5, dtype=torch.float64),
        torch.randn(6, dtype=torch.complex64),
        torch.randn(7).bfloat16(),
        torch.zeros(0),
        sparse(torch.randn(3, 4)),
        None,
    ]
    expected = [None if g is None else (g.to_dense() if g.is_sparse else g) * 0.5 for g in gradients]
    reader = reader_of(*gradients)
    reader.scale_(factor)
    for parameter, before, wanted in zip(reader.table.parameters, gradients, expected, strict=True):
        assert parameter.grad is before
        if before is not None:
            assert_same(before.to_dense() if before.is_sparse else before, wanted)


def test_the_types_of_the_present_gradients_are_told():
    reader = reader_of(torch.ones(1), None, torch.ones(1, dtype=torch.float16))
    assert reader.dtypes() == {torch.float32, torch.float16}
