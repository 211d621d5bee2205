import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from stabilityguard import ConfigurationError
from stabilityguard.measure.modules import ROOT_LAYER, named_layers
from tests.support import Net, batch, guard, table_of


def names(model):
    return table_of(model, model.parameters()).names


def table_of_four():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    return table_of(model, model.parameters())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.mlp(x))


class HeadFirst(nn.Module):
    """The head is defined before the body, as some people do."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.body = nn.Linear(4, 8)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).square().mean()


def test_a_layer_is_a_module_that_owns_parameters_and_bears_its_qualified_name():
    model = nn.Sequential(Block(), nn.Dropout(), nn.Linear(4, 2))
    assert names(model) == ("0.mlp.0", "0.mlp.2", "0.norm", "2")


def test_every_parameter_is_listed_once_beside_the_index_of_its_layer():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
    table = table_of(model, model.parameters())
    assert [id(p) for p in table.parameters] == [id(p) for p in model.parameters()]
    assert table.layer_of == (0, 0, 1)


def test_parameters_that_the_model_owns_directly_form_a_layer_of_their_own():
    model = nn.Linear(2, 2)
    assert names(model) == (ROOT_LAYER,)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: torch.compile(m, backend="eager"),
        nn.DataParallel,
        checkpoint_wrapper,
        lambda m: nn.DataParallel(torch.compile(checkpoint_wrapper(m), backend="eager")),
    ],
    ids=["compile", "data parallel", "checkpoint", "all of them"],
)
def test_wrapping_the_model_changes_no_name(wrap):
    model = nn.Sequential(Block(), nn.Linear(4, 2))
    plain = names(model)
    assert names(wrap(model)) == plain


def test_wrapping_a_part_of_the_model_changes_no_name():
    model = nn.Sequential(Block(), nn.Linear(4, 2))
    plain = names(model)
    model[0] = checkpoint_wrapper(model[0])
    model[0]._checkpoint_wrapped_module.mlp = torch.compile(model[0]._checkpoint_wrapped_module.mlp, backend="eager")
    assert names(model) == plain


def test_compiling_in_place_changes_no_name():
    model = nn.Sequential(Block(), nn.Linear(4, 2))
    plain = names(model)
    model.compile(backend="eager")
    assert names(model) == plain


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["replicated", "sharded", "sharded by parameter"])
def test_distributing_the_model_changes_no_name(kind):
    model = nn.Sequential(Block(), nn.Linear(4, 2))
    plain = names(model)
    if kind == "replicated":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "sharded":
        model[0] = FullyShardedDataParallel(model[0], use_orig_params=True, device_id=torch.device("cpu"))
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        fully_shard(model[0])
        fully_shard(model)
    assert names(model) == plain


def test_a_submodule_that_the_user_called_module_keeps_its_name():
    model = nn.Sequential()
    model.add_module("module", Block())
    expected = ("module.mlp.0", "module.mlp.2", "module.norm")
    assert names(model) == expected
    assert names(nn.DataParallel(model)) == expected


def test_a_tied_parameter_is_listed_once_under_the_first_module_that_owns_it():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["embedding"].weight
    table = table_of(model, model.parameters())
    assert table.names == ("embedding", "head")
    assert [id(p) for p in table.parameters] == [id(model["embedding"].weight), id(model["head"].bias)]
    assert table.layer_of == (0, 1)


def test_a_parameter_named_twice_by_its_owner_and_by_the_optimizer_is_listed_once():
    model = nn.Linear(2, 2, bias=False)
    model.alias = model.weight
    assert len(table_of(model, [model.weight, model.weight]).parameters) == 1


def test_a_module_used_at_two_places_is_one_layer_under_its_first_name():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"encoder": shared, "decoder": nn.Sequential(shared, nn.Linear(3, 1))})
    assert names(model) == ("encoder", "decoder.1")


def test_a_module_that_contains_itself_is_walked_once():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0]._modules["above"] = model
    assert [name for name, _ in named_layers(model)] == [ROOT_LAYER, "0"]


def test_a_parameter_that_the_model_lacks_gets_a_layer_named_by_its_place_in_the_optimizer():
    model = nn.Linear(2, 2)
    temperature = nn.Parameter(torch.ones(()))
    table = table_of(model, [*model.parameters(), temperature])
    assert table.names == (ROOT_LAYER, "(optimizer parameter 2)")
    assert table.layer_of == (0, 0, 1)


def test_a_parameter_that_the_model_lacks_is_judged_like_any_other():
    model, temperature = Net(), nn.Parameter(torch.ones(()))
    optimizer = guard(model, torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
    (model(batch(1)) * temperature).backward()
    temperature.grad.fill_(torch.inf)
    optimizer.step()
    assert optimizer.last_record.trigger_layer == "(optimizer parameter 4)"
    assert optimizer.last_record.action == "skip"


def test_only_the_parameters_of_the_optimizer_are_listed():
    model = Net()
    assert table_of(model, model.head.parameters()).names == ("head",)


def test_a_model_that_holds_none_of_the_parameters_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"none of the optimizer's 4 parameters.*\(Linear\)"):
        guard(nn.Linear(4, 1), torch.optim.SGD(Net().parameters(), lr=0.1))


def test_the_layers_keep_the_order_of_definition_whatever_the_order_in_the_optimizer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    backwards = list(model.parameters())[::-1]
    assert table_of(model, backwards).names == ("0", "1", "2")


def test_nearest_the_loss_means_the_order_in_which_backward_reached_the_layers():
    table = table_of_four()
    assert table.nearest_loss_first([0, 1, 2, 3], [2, 0, 3, 1]) == [2, 0, 3, 1]
    assert table.nearest_loss_first([1, 3], [2, 0, 3, 1]) == [3, 1]


def test_layers_that_backward_was_not_seen_to_reach_come_last_in_reverse_order_of_definition():
    table = table_of_four()
    assert table.nearest_loss_first([0, 1, 2, 3], []) == [3, 2, 1, 0]
    assert table.nearest_loss_first([0, 1, 2, 3], [1]) == [1, 3, 2, 0]


def test_a_head_that_is_defined_before_the_body_is_still_nearest_the_loss():
    model = HeadFirst()
    optimizer = guard(model)
    (model(batch(1)) * torch.nan).backward()
    optimizer.step()
    assert optimizer.last_record.trigger_layer == "head"
    assert optimizer.last_record.nan_layers == ["head", "body"]


def test_the_named_layer_does_not_depend_on_the_seed_of_the_hash():
    program = """
import torch
from torch import nn
from stabilityguard import GuardedOptimizer

torch.manual_seed(0)
model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "wxyz"})
guarded = GuardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, verbose=False)
out = torch.ones(2, 3)
for layer in model.values():
    out = layer(out).tanh()
(out.sum() * torch.nan).backward()
guarded.step()
print(guarded.last_record.trigger_layer, guarded.last_record.nan_layers)
"""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "4242")
    ]
    said = {run.communicate()[0] for run in runs}
    assert said == {"z ['z', 'y', 'x', 'w']\n"}
