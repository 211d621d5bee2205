import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stabilityguard.measure.backward import EndOfBackward
from tests.support import Net, batch, guard, table_of


class Watch:
    """Notes, at every end of a backward pass, what the gradients are by then."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.seen = []
        self.table = table_of(model, self.parameters)
        self.trigger = EndOfBackward(self.table, self.note)

    def note(self):
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters])

    @property
    def fired(self):
        return [self.table.names[layer] for layer in self.trigger.fired]


def hooks_on(model):
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def is_final(seen, model):
    return all(torch.equal(then, p.grad) for then, p in zip(seen, model.parameters(), strict=True))


class Checkpointed(nn.Module):
    """Embedding-like first layer, two checkpointed blocks, a head."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).square().mean()


def test_it_is_called_once_with_the_final_gradients_before_backward_returns():
    model = Net()
    watch = Watch(model)
    model(batch(1)).backward()
    assert len(watch.seen) == 1
    assert is_final(watch.seen[0], model)


def test_it_is_called_at_the_end_of_every_backward_pass_and_sees_what_has_accumulated():
    model = Net()
    watch = Watch(model)
    for step in (1, 2, 3):
        model(batch(step)).backward()
    assert len(watch.seen) == 3
    assert is_final(watch.seen[-1], model)
    assert not torch.equal(watch.seen[0][0], watch.seen[1][0])


def test_the_layers_are_listed_in_the_order_in_which_backward_reached_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    watch = Watch(model)
    model(batch(1)).sum().backward()
    assert watch.fired == ["2", "1", "0"]


def test_over_several_passes_the_last_time_that_a_layer_was_reached_counts():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    watch = Watch(model)
    model(batch(1)).sum().backward()
    model[1](batch(1)).sum().backward()
    assert len(watch.seen) == 2
    assert watch.fired == ["2", "0", "1"]
    model(batch(1)).sum().backward()
    assert watch.fired == ["2", "1", "0"]


def test_the_order_of_one_step_does_not_outlive_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = guard(model)
    model[0](model[1](batch(1))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (model(batch(2)).square().sum() * torch.nan).backward()
    optimizer.step()
    assert optimizer.last_record.nan_layers == ["1", "0"]


def test_a_pass_that_reaches_only_some_layers_is_seen():
    model = Net()
    watch = Watch(model)
    model.body(batch(1)).sum().backward()
    assert len(watch.seen) == 1
    assert watch.fired == ["body"]


def test_a_pass_that_reaches_only_one_of_a_layers_parameters_is_seen():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    model = Branches()
    watch = Watch(model)
    model.right.sum().backward()
    assert len(watch.seen) == 1
    model.left.sum().backward()
    assert len(watch.seen) == 2


def test_a_pass_that_reaches_no_layer_is_not_seen():
    model, other = Net(), Net()
    watch = Watch(model)
    other(batch(1)).backward()
    assert watch.seen == []


def test_gradients_taken_without_accumulating_are_not_a_backward_pass():
    model = Net()
    watch = Watch(model)
    torch.autograd.grad(model(batch(1)), list(model.parameters()))
    assert watch.seen == []


def test_a_graph_that_is_kept_may_be_run_twice():
    model = Net()
    watch = Watch(model)
    loss = model(batch(1))
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(watch.seen) == 2
    assert is_final(watch.seen[-1], model)
    assert torch.equal(watch.seen[1][0], 2 * watch.seen[0][0])


def test_a_gradient_penalty_is_seen_as_the_one_pass_that_it_is():
    model = Net()
    watch = Watch(model)
    x = batch(1).requires_grad_()
    loss = model(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    assert len(watch.seen) == 1
    assert is_final(watch.seen[0], model)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ArithmeticError("no gradient today")


def test_a_backward_pass_that_raises_does_not_disable_the_next_one():
    model = Net()
    watch = Watch(model)
    with pytest.raises(ArithmeticError):
        model.head(Raises.apply(model.body(batch(1)))).sum().backward()
    assert model.head.weight.grad is not None
    before = len(watch.seen)
    model.zero_grad()
    model(batch(1)).backward()
    assert len(watch.seen) == before + 1
    assert is_final(watch.seen[-1], model)
    assert watch.fired == ["head", "body"]


def test_an_error_in_the_callback_reaches_the_user():
    model = Net()

    def fail():
        raise ArithmeticError("cannot look")

    trigger = EndOfBackward(table_of(model, model.parameters()), fail)
    with pytest.raises(ArithmeticError, match="cannot look"):
        model(batch(1)).backward()
    trigger.close()


def test_frozen_layers_are_passed_over():
    model = Net()
    model.body.requires_grad_(False)
    watch = Watch(model)
    model(batch(1)).backward()
    assert watch.fired == ["head"]


def test_a_layer_whose_first_parameter_is_frozen_is_still_seen():
    model = nn.Linear(4, 1)
    model.weight.requires_grad_(False)
    watch = Watch(model)
    model(batch(1)).sum().backward()
    assert len(watch.seen) == 1


def test_tied_parameters_are_seen_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    watch = Watch(model)
    model(batch(1)).sum().backward()
    assert len(watch.seen) == 1
    assert sorted(watch.fired) == ["0", "1"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_the_last_look_sees_the_final_gradients(reentrant):
    model = Checkpointed(reentrant=reentrant)
    watch = Watch(model)
    model(batch(1)).backward()
    assert watch.seen
    assert is_final(watch.seen[-1], model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_every_layer_is_listed_in_backward_order(reentrant):
    model = Checkpointed(reentrant=reentrant)
    watch = Watch(model)
    model(batch(1)).backward()
    assert watch.fired == ["head", "blocks.1.0", "blocks.0.0", "first"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_a_bad_loss_is_blamed_on_the_layer_nearest_to_it(reentrant):
    model = Checkpointed(reentrant=reentrant)
    optimizer = guard(model)
    (model(batch(1)) * torch.nan).backward()
    optimizer.step()
    assert optimizer.last_record.nan_layers == ["head", "blocks.1.0", "blocks.0.0", "first"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_a_tied_parameter_is_counted_once(reentrant):
    model = Checkpointed(reentrant=reentrant)
    model.blocks[1][0].weight = model.blocks[0][0].weight
    optimizer = guard(model)
    model(batch(1)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    optimizer.step()
    assert optimizer.last_record.global_norm == pytest.approx(expected, rel=1e-6)


def test_closing_removes_every_hook():
    model = Net()
    watch = Watch(model)
    assert hooks_on(model) > 0
    watch.trigger.close()
    assert hooks_on(model) == 0
    model(batch(1)).backward()
    assert watch.seen == []


def test_closing_twice_is_harmless():
    watch = Watch(Net())
    watch.trigger.close()
    watch.trigger.close()


def test_a_trigger_that_is_dropped_takes_its_hooks_along():
    model = Net()
    watch = Watch(model)
    assert hooks_on(model) > 0
    del watch
    gc.collect()
    assert hooks_on(model) == 0
    model(batch(1)).backward()


def test_the_guards_of_two_models_do_not_hear_of_each_others_passes():
    first, second = Net(), Net()
    watches = Watch(first), Watch(second)
    first(batch(1)).backward()
    assert [len(watch.seen) for watch in watches] == [1, 0]


def test_one_pass_through_two_models_is_seen_by_both_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    watches = Watch(first), Watch(second)
    second(first(batch(1))).sum().backward()
    assert [len(watch.seen) for watch in watches] == [1, 1]
    assert is_final(watches[0].seen[0], first)
    assert is_final(watches[1].seen[0], second)


def test_a_compiled_model_is_seen_and_stays_one_graph():
    model = Net()
    watch = Watch(model)
    torch.compile(model, backend="aot_eager", fullgraph=True)(batch(1)).backward()
    assert len(watch.seen) == 1
    assert is_final(watch.seen[0], model)
