import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as SplitAlong

from stabilityguard.distributed.shards import Shard, find_shards, local_part, partial_terms
from stabilityguard.errors import ConfigurationError
from tests.distributed.ranks import run
from tests.distributed.wrapped import fsdp1, make, norms_by_layer, rows


class Tied(nn.Module):
    """A parameter of the model's own, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


def keys(shards):
    return [(shard.layer, shard.name) for shard in shards]


# Plain tensors --------------------------------------------------------------------------------------------------------


def test_plain_parameters_are_whole_shards_in_the_order_of_the_definition():
    model = Tied()
    shards = find_shards(model, reversed(list(model.parameters())))
    assert keys(shards) == [("(root)", "scale"), ("embedding", "weight"), ("head", "bias")]
    assert [shard.parameter for shard in shards] == [model.scale, model.embedding.weight, model.head.bias]
    assert [shard.identity for shard in shards] == [(2,), (5, 3), (5,)]
    assert all(shard.span is None and shard.trigger is None for shard in shards)


def test_a_parameter_that_is_given_twice_is_one_shard():
    model = Tied()
    assert len(find_shards(model, [*model.parameters(), *model.parameters()])) == 3


def test_parameters_that_the_optimizer_lacks_are_no_shards():
    model = Tied()
    assert keys(find_shards(model, [model.head.bias])) == [("head", "bias")]


def test_a_parameter_outside_the_model_is_a_layer_named_by_its_place_after_all_others():
    model = Tied()
    shards = find_shards(model, [nn.Parameter(torch.ones(1)), model.head.bias, nn.Parameter(torch.ones(1))])
    assert [shard.layer for shard in shards] == ["head", "(optimizer parameter 0)", "(optimizer parameter 2)"]


def test_another_model_is_refused():
    with pytest.raises(ConfigurationError, match="none of the optimizer's 3 parameters belongs to the model"):
        find_shards(Tied(), Tied().parameters())


def test_a_lazy_model_is_refused():
    model = nn.LazyLinear(3)
    with pytest.raises(ConfigurationError, match="lazy"):
        find_shards(model, model.parameters())


def test_shapes_tell_shards_apart():
    wide, narrow = nn.Linear(3, 2), nn.Linear(2, 2)
    (one, _), (other, _) = find_shards(wide, wide.parameters()), find_shards(narrow, narrow.parameters())
    assert one.key != other.key
    assert one.key[:2] == other.key[:2]


def test_shards_split_by_hand_are_told_apart_by_what_the_user_says_of_them():
    model, asked = Tied(), []

    def shard_of(name, parameter):
        asked.append((name, parameter))
        return 3 if name == "head.bias" else None

    identities = [shard.identity for shard in find_shards(model, model.parameters(), shard_of)]
    assert identities == [((2,), None), ((5, 3), None), ((5,), 3)]
    assert [name for name, _ in asked] == ["scale", "embedding.weight", "head.bias"]
    assert all(parameter is model.get_parameter(name) for name, parameter in asked)


# The part that a shard reads ------------------------------------------------------------------------------------------


def test_a_plain_tensor_is_its_own_part():
    tensor = torch.ones(2, 3)
    assert local_part(tensor) is tensor
    assert Shard("a", "weight", tensor, "whole").local(tensor) is tensor


def test_a_span_is_cut_from_the_flattened_tensor_and_writes_through():
    tensor = torch.arange(6.0).reshape(2, 3)
    part = Shard("a", "weight", tensor, "whole", slice(2, 5)).local(tensor)
    assert part.tolist() == [2.0, 3.0, 4.0]
    part.zero_()
    assert tensor.flatten().tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 5.0]


# Partial gradients ----------------------------------------------------------------------------------------------------


def placed(*placements, sizes=(2, 3, 5)):
    tensor = torch.zeros(2)
    tensor.placements = placements
    tensor.device_mesh = type("Mesh", (), {"size": lambda self, dimension: sizes[dimension]})()
    return tensor


@pytest.mark.parametrize(
    ("placements", "terms"),
    [
        ((), None),
        ((Replicate(), SplitAlong(0)), None),
        ((Partial(), Replicate()), 2.0),
        ((SplitAlong(0), Partial("sum")), 3.0),
        ((Partial(), SplitAlong(0), Partial()), 10.0),
        ((Replicate(), Partial("avg")), 1.0),
        ((Partial("avg"), Partial("avg")), 1.0),
    ],
)
def test_a_partial_sum_counts_each_term_by_the_ranks_along_its_dimensions(placements, terms):
    assert partial_terms(placed(*placements)) == terms


def test_a_plain_gradient_is_not_partial():
    assert partial_terms(torch.ones(2)) is None


@pytest.mark.parametrize("placements", [(Partial("max"),), (Partial("sum"), Partial("avg"))])
def test_neither_sums_nor_means_are_refused(placements):
    with pytest.raises(ConfigurationError, match="only partial sums and means"):
        partial_terms(placed(*placements))


# Tensors on a mesh ----------------------------------------------------------------------------------------------------


def on_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    layer = nn.Module()
    placements = {
        "replica": (Replicate(), Replicate()),
        "rows": (Replicate(), SplitAlong(0)),
        "columns": (SplitAlong(1), Replicate()),
        "both": (SplitAlong(0), SplitAlong(1)),
        "twice": (SplitAlong(0), SplitAlong(0)),
    }
    for name, placement in placements.items():
        layer.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, placement)))
    layer.small = nn.Parameter(distribute_tensor(torch.ones(1, 4), mesh, placements["rows"]))
    layer.empty = nn.Parameter(distribute_tensor(torch.ones(0, 4), mesh, placements["rows"]))
    first = init_device_mesh("cpu", (1,))
    layer.elsewhere = nn.Parameter(DTensor.from_local(torch.ones(2), first, [Replicate()], run_check=False))
    layer.nothing = nn.Parameter(DTensor.from_local(torch.ones(0), first, [Replicate()], run_check=False))
    shards = {shard.name: shard for shard in find_shards(layer, layer.parameters())}
    for shard in shards.values():
        assert shard.local(shard.parameter) is shard.parameter._local_tensor
    return {name: shard.identity for name, shard in shards.items()}


@pytest.fixture(scope="module")
def identities():
    return run(4, on_mesh)


def holders(identities, name):
    """The ranks grouped by what they hold of a parameter."""
    groups = {}
    for rank, of_rank in enumerate(identities):
        groups.setdefault(of_rank[name], []).append(rank)
    return sorted(groups.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("replica", [[0, 1, 2, 3]]),
        ("rows", [[0, 2], [1, 3]]),
        ("columns", [[0, 1], [2, 3]]),
        ("both", [[0], [1], [2], [3]]),
        ("twice", [[0], [1], [2], [3]]),
    ],
)
def test_ranks_hold_the_same_elements_where_the_dimensions_that_split_are_at_the_same_place(identities, name, expected):
    assert holders(identities, name) == expected


def test_a_rank_without_elements_holds_none_of_them(identities):
    assert [of_rank["small"] is None for of_rank in identities] == [False, True, False, True]


def test_a_parameter_without_elements_is_not_lost(identities):
    assert all(of_rank["empty"] is not None for of_rank in identities)


def test_a_rank_outside_the_mesh_holds_nothing(identities):
    for name in ("elsewhere", "nothing"):
        assert [of_rank[name] is None for of_rank in identities] == [False, True, True, True]


# Flat parameters ------------------------------------------------------------------------------------------------------


def flat_shards(rank, use_orig_params):
    model = fsdp1("FULL_SHARD", use_orig_params=use_orig_params)(make())
    model(rows(1)).backward()
    told = []
    for shard in find_shards(model, model.parameters()):
        gradient = None if shard.parameter.grad is None else shard.local(shard.parameter.grad).reshape(-1).tolist()
        told.append((shard.layer, shard.name, shard.identity, gradient))
    return told


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original parameters", "flat parameters"])
def test_the_parts_of_flat_parameters_make_up_the_gradients_of_the_layers(use_orig_params):
    told = run(2, flat_shards, use_orig_params)
    whole = make()
    whole(rows(1)).backward()
    parts = {}
    for of_rank in told:
        for layer, name, identity, gradient in of_rank:
            if identity is not None:
                parts.setdefault((layer, name), []).extend(gradient)
            else:
                assert not gradient
    expected = {
        tuple(name.rpartition(".")[::2]) if "." in name else ("(root)", name): p.grad.flatten().tolist()
        for name, p in whole.named_parameters()
    }
    assert parts.keys() == expected.keys()
    for key, values in expected.items():
        assert parts[key] == pytest.approx(values, rel=1e-4, abs=1e-7)
    assert {layer for layer, _ in parts} == norms_by_layer(whole).keys()
