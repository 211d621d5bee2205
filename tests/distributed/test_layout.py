"""Where a rank's tensors lie within the whole ones: boxes, and names."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stabilityguard.distributed.layout import Box, Layout, boxes_of_run
from stabilityguard.distributed.shards import Shard, find_shards
from tests.support import Net, NormNet


@st.composite
def runs(draw):
    """A shape, and a run of elements of the flattened tensor."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    first, end = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, first, end


@given(runs(), st.integers(0, 7))
def test_the_boxes_of_a_run_hold_its_elements_each_once_and_in_order(run, start):
    shape, first, end = run
    whole = torch.arange(math.prod(shape)).view(shape)
    local = torch.full((start + end - first + 2,), -1)
    local[start : start + end - first] = torch.arange(first, end)
    boxes = list(boxes_of_run(shape, first, end, start))
    found, at = [], start
    for box in boxes:
        assert box.start == at
        assert box.numel > 0
        place = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(box.within(local), whole[place])
        found += whole[place].flatten().tolist()
        at += box.numel
    assert found == list(range(first, end))


@given(runs())
def test_a_run_is_cut_into_few_boxes(run):
    shape, first, end = run
    assert len(list(boxes_of_run(shape, first, end))) <= max(1, 2 * len(shape) - 1)


def test_a_whole_tensor_is_one_box():
    assert list(boxes_of_run((3, 4, 2), 0, 24)) == [Box((0, 0, 0), (3, 4, 2))]
    assert list(boxes_of_run((), 0, 1, 5)) == [Box((), (), 5)]


def test_a_box_is_a_view_that_can_be_written_to():
    local = torch.zeros(10)
    Box((1, 0), (2, 2), 3).within(local).fill_(1)
    assert local.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]


# Names ----------------------------------------------------------------------------------------------------------------


def layout(model, shard_of=None, parameters=None, shards=None):
    parameters = list(model.parameters()) if parameters is None else parameters
    shards = find_shards(model, parameters, shard_of) if shards is None else shards
    return Layout(parameters, shards, shard_of, 3)


def named(portions):
    return [(portion.name, portion.shape, portion.boxes) for portion in portions]


def whole(*shape):
    return (Box((0,) * len(shape), shape),)


def test_parameters_and_their_moments_have_the_names_of_the_model():
    found = layout(Net())
    assert [found.names(i) for i in range(4)] == [["body.weight"], ["body.bias"], ["head.weight"], ["head.bias"]]
    body = torch.Size((8, 4))
    assert named(found.portions(("parameter", 0, ""), body)) == [("model.body.weight", (8, 4), whole(8, 4))]
    moments = found.portions(("optimizer", 0, "exp_avg"), body)
    assert named(moments) == [("optimizer.state.body.weight.exp_avg", (8, 4), whole(8, 4))]
    assert moments[0].path == ("optimizer", "state", "body.weight", "exp_avg")
    assert moments[0].place == ("optimizer", 0, "exp_avg")


def test_buffers_have_the_names_of_the_model():
    portions = layout(NormNet()).portions(("buffer", "norm.running_mean", ""), torch.Size((8,)))
    assert named(portions) == [("model.norm.running_mean", (8,), whole(8))]
    assert portions[0].path == ("model", "norm.running_mean")


@pytest.mark.parametrize("shape", [(), (1,), (8,), (2, 3, 4)])
def test_entries_of_another_shape_than_the_parameters_are_whole(shape):
    portions = layout(Net()).portions(("optimizer", 0, "entry"), torch.Size(shape))
    assert named(portions) == [("optimizer.state.body.weight.entry", shape, whole(*shape))]


def test_parameters_outside_of_the_model_have_names_of_their_own():
    model, extra = Net(), nn.Parameter(torch.zeros(2))
    found = layout(model, parameters=[*model.parameters(), extra])
    assert found.names(4) == ["(optimizer parameter 4)"]


def test_parts_that_were_split_by_hand_are_told_apart_and_replicas_are_not():
    found = layout(Net(), lambda name, parameter: 1 if name == "body.weight" else None)
    assert (found.names(0), found.names(1)) == (["body.weight[1]"], ["body.bias"])
    assert found.portions(("parameter", 0, ""), torch.Size((8, 4)))[0].name == "model.body.weight[1]"
    moments = found.portions(("optimizer", 0, "exp_avg"), torch.Size((8, 4)))
    assert moments[0].name == "optimizer.state.body.weight[1].exp_avg"


def flat():
    """A flat parameter with the end of one whole parameter and the beginning of another, and a gap between them."""
    parameter = nn.Parameter(torch.zeros(10))
    first = Shard("a", "weight", parameter, "x", slice(0, 4), parameter, torch.Size((3, 2)), slice(2, 6))
    second = Shard("b", "weight", parameter, "x", slice(5, 8), parameter, torch.Size((2, 4)), slice(0, 3))
    return layout(None, parameters=[parameter], shards=[first, second])


def test_a_flat_parameter_holds_portions_of_several():
    found = flat()
    assert found.names(0) == ["a.weight", "b.weight"]
    assert named(found.portions(("parameter", 0, ""), torch.Size((10,)))) == [
        ("model.a.weight", (3, 2), (Box((1, 0), (2, 2), 0),)),
        ("model.b.weight", (2, 4), (Box((0, 0), (1, 3), 5),)),
    ]
    moments = found.portions(("optimizer", 0, "exp_avg"), torch.Size((10,)))
    assert [portion.name for portion in moments] == [f"optimizer.state.{n}.weight.exp_avg" for n in "ab"]


def test_scalars_of_a_flat_parameter_are_told_of_each_of_its_parts():
    portions = flat().portions(("optimizer", 0, "step"), torch.Size(()))
    assert named(portions) == [(f"optimizer.state.{n}.weight.step", (), whole()) for n in "ab"]


def test_what_cannot_be_cut_with_a_flat_parameter_is_the_ranks_own():
    portions = flat().portions(("optimizer", 0, "row_var"), torch.Size((4,)))
    assert named(portions) == [("ranks.3.optimizer.state.a.weight.row_var", (4,), whole(4))]


def sizes(layout, index, entries):
    """What a checkpoint would hold of these optimizer entries."""
    places = {("optimizer", index, entry): torch.Size(shape) for entry, shape in entries.items()}
    return {p.name: torch.Size(p.shape) for place, shape in places.items() for p in layout.portions(place, shape)}


@pytest.mark.parametrize(
    ("make", "entries"),
    [
        (lambda: layout(Net()), {"exp_avg": (8, 4), "step": (), "row_var": (8, 1), "factor": (1,)}),
        (flat, {"exp_avg": (10,), "step": (), "row_var": (4,)}),
        (lambda: layout(Net(), lambda *_: "left"), {"exp_avg": (8, 4), "step": ()}),
    ],
)
def test_what_was_named_is_found_again_with_its_shape(make, entries):
    found = make()
    whole = sizes(found, 0, entries)
    seen = {place: (shape, portions) for place, shape, portions in found.find(0, whole, own=True)}
    assert {entry: shape for (_, _, entry), (shape, _) in seen.items()} == entries
    for place, (shape, portions) in seen.items():
        named = found.portions(place, shape)
        assert portions == (named[:1] if shape == () else named)


def test_the_entries_of_another_ranks_own_are_not_taken():
    found = flat()
    whole = sizes(found, 0, {"row_var": (4,)})
    assert list(found.find(0, whole, own=False)) == []
    assert list(found.find(0, {name.replace("ranks.3", "ranks.2"): s for name, s in whole.items()}, own=True)) == []


def test_parameters_whose_names_begin_alike_keep_their_entries_apart():
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "ab": nn.Linear(2, 2, bias=False)})
    found = layout(model)
    whole = {**sizes(found, 0, {"step": ()}), **sizes(found, 1, {"exp_avg": (2, 2)})}
    assert [place for place, _, _ in found.find(0, whole, own=True)] == [("optimizer", 0, "step")]
