"""Compiled models and recomputed activations."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from tests.support import Net, NormNet, assert_same, batch, guard, snapshot


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Dynamo reads the gradients of what it is given.
torch_reads_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def counting():
    """A backend without code generation that counts the graphs it is given."""
    return CompileCounterWithBackend("aot_eager")


def twins(kind=Net):
    model = kind()
    return model, copy.deepcopy(model)


def step(forward, model, optimizer, number, *, spoil=None):
    """A step whose gradient at the body's bias is ``spoil`` times what it should be."""
    optimizer.zero_grad()
    loss = forward(batch(number))
    handle = model.body.bias.register_hook(lambda gradient: gradient * spoil) if spoil is not None else None
    loss.backward()
    if handle is not None:
        handle.remove()
    optimizer.step()
    return loss


def outer(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model, backend):
    model.compile(backend=backend, fullgraph=True)
    return model


# Compiled models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [outer, in_place])
@pytest.mark.parametrize(("first", "kind"), [("compiled first", NormNet), ("guarded first", Net)])
def test_a_compiled_model_stays_one_graph_and_its_faults_are_found(way, first, kind):
    model, other = twins(kind)
    backend = counting()
    if first == "compiled first":
        forward = way(model, backend)
        optimizer = guard(model, warmup_steps=3)
    else:
        optimizer = guard(model, warmup_steps=3)
        forward = way(model, backend)
    reference, bare = way(other, "aot_eager"), AdamW(other.parameters(), lr=1e-2)
    for number in range(5):
        step(forward, model, optimizer, number)
        step(reference, other, bare, number)
    assert backend.frame_count == 1
    assert_same(snapshot(model, optimizer), snapshot(other, bare))
    assert set(optimizer.last_record.layer_norms) == {name for name, _ in model.named_children()}

    before = snapshot(model, optimizer)
    for spoil, kind_of_fault in ((math.nan, "nan"), (1e5, "spike")):
        step(forward, model, optimizer, 5, spoil=spoil)
        assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", kind_of_fault)
        assert optimizer.last_record.trigger_layer == "body"
        if kind is Net:
            assert_same(snapshot(model, optimizer), before)
    step(forward, model, optimizer, 6)
    assert optimizer.last_record.action == "step"


@pytest.mark.parametrize("way", [outer, in_place])
def test_buffers_that_a_compiled_forward_spoiled_are_put_back(way):
    model = NormNet()
    forward = way(model, "aot_eager")
    optimizer = guard(model)
    for number in range(3):
        step(forward, model, optimizer, number)
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    forward(batch(3) * math.nan).backward()
    assert model.norm.running_mean.isnan().any()
    optimizer.step()
    assert optimizer.last_record.action == "skip"
    assert_same(snapshot(model, optimizer), before)


def test_guarding_the_compiled_module_names_the_layers_as_in_the_plain_model():
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = guard(compiled, SGD(model.parameters(), lr=0.1))
    loss = step(compiled, model, optimizer, 0)
    assert set(optimizer.last_record.layer_norms) == {"body", "head"}
    assert optimizer.last_record.loss == pytest.approx(loss.item(), rel=1e-6)
    step(compiled, model, optimizer, 1, spoil=math.nan)
    assert optimizer.last_record.nan_layers == ["body"]


@pytest.mark.parametrize("way", [outer, in_place])
def test_a_guard_made_after_the_first_compiled_call_finds_faults(way):
    model = Net()
    backend = counting()
    forward = way(model, backend)
    bare = AdamW(model.parameters(), lr=1e-2)
    step(forward, model, bare, 0)
    optimizer = guard(model, bare)
    before = snapshot(model, optimizer)
    step(forward, model, optimizer, 1, spoil=math.nan)
    assert optimizer.last_record.nan_layers == ["body"]
    assert_same(snapshot(model, optimizer), before)
    step(forward, model, optimizer, 2)
    assert optimizer.last_record.action == "step"


@pytest.mark.parametrize("way", [outer, in_place])
def test_clipping_hides_nothing_in_a_compiled_model(way):
    model = Net()
    forward = way(model, "aot_eager")
    optimizer = guard(model)
    step(forward, model, optimizer, 0)
    optimizer.zero_grad()
    loss = forward(batch(1))
    handle = model.body.bias.register_hook(lambda gradient: gradient * math.nan)
    loss.backward()
    handle.remove()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.last_record.nan_layers == ["body"]


@torch_reads_gradients
def test_a_compiled_part_of_a_model_is_guarded_under_its_own_name():
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 1), backend="aot_eager", fullgraph=True))
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    model(batch(0)).square().mean().backward()
    optimizer.step()
    assert set(optimizer.last_record.layer_norms) == {"0", "1"}


# Compiled training steps ------------------------------------------------------------------------------------------


@torch_reads_gradients
@pytest.mark.parametrize("clear", ["guard", "model"])
def test_a_whole_training_step_can_be_compiled(clear):
    model, other = twins()
    optimizer, bare = guard(model), AdamW(other.parameters(), lr=1e-2)

    def make(model, optimizer):
        def train_step(x):
            loss = model(x)
            loss.backward()
            optimizer.step()
            if clear == "guard":
                optimizer.zero_grad()
            else:
                model.zero_grad()
            return loss

        return train_step

    compiled, plain = torch.compile(make(model, optimizer), backend="aot_eager"), make(other, bare)
    for number in range(4):
        torch.testing.assert_close(compiled(batch(number)), plain(batch(number)))
    assert (optimizer.last_record.step, optimizer.last_record.action) == (4, "step")
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)

    before = snapshot(model, optimizer)
    compiled(batch(5) * math.nan)
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "nan")
    assert_same(snapshot(model, optimizer), before)


def test_a_compiled_optimizer_step_is_judged():
    model = Net()
    optimizer = guard(model)
    compiled = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    model(batch(0)).backward()
    compiled()
    assert optimizer.last_record.action == "step"
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    (model(batch(1)) * math.nan).backward()
    compiled()
    assert optimizer.last_record.action == "skip"
    assert_same(snapshot(model, optimizer), before)


# Recomputed activations -------------------------------------------------------------------------------------------


class Recomputing(nn.Module):
    """A token model with tied ends, and blocks whose activations are recomputed in backward."""

    def __init__(self, reentrant, *, everything=False):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.reentrant = reentrant
        self.everything = everything

    def tail(self, hidden):
        return self.out(self.last(hidden) + self.embed(torch.arange(7)))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        if self.reentrant is None:
            for block in self.blocks:
                hidden = torch.tanh(block(hidden))
            return nn.functional.cross_entropy(self.tail(hidden), tokens.roll(1))
        for block in self.blocks:
            hidden = checkpoint(lambda h, b=block: torch.tanh(b(h)), hidden, use_reentrant=self.reentrant)
        logits = checkpoint(self.tail, hidden, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(logits, tokens.roll(1))


every_kind = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def norm(parameters):
    squares = [p.grad.double().square().sum() for p in dict.fromkeys(parameters)]
    return torch.stack(squares).sum().sqrt().item()


@every_kind
def test_weights_used_twice_in_a_recomputed_model_count_once(reentrant):
    model = Recomputing(reentrant)
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    tokens = torch.arange(7)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens).backward()
        expected = norm(model.parameters())
        embedding = norm([model.embed.weight])
        optimizer.step()
        assert optimizer.last_record.global_norm == pytest.approx(expected, rel=1e-6)
        assert optimizer.last_record.layer_norms["embed"] == pytest.approx(embedding, rel=1e-6)


@every_kind
def test_a_recomputed_run_equals_the_unguarded_run_bit_for_bit(reentrant):
    model, other = twins(lambda: Recomputing(reentrant))
    optimizer, bare = guard(model), AdamW(other.parameters(), lr=1e-2)
    for m, o in ((model, optimizer), (other, bare)):
        for number in range(3):
            o.zero_grad()
            m(torch.arange(7).roll(number)).backward()
            o.step()
    assert_same(snapshot(model, optimizer), snapshot(other, bare))
    assert optimizer.last_record.step == 3


@pytest.mark.parametrize("reentrant", [True, False, None], ids=["reentrant", "not reentrant", "nothing recomputed"])
def test_the_layer_to_blame_is_the_one_nearest_the_loss_also_where_activations_are_recomputed(reentrant):
    model = Recomputing(reentrant)
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))

    def poison(module, arguments, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.nan)

    handle = model.last.register_forward_hook(poison)
    model(torch.arange(7)).backward()
    handle.remove()
    optimizer.step()
    assert optimizer.last_record.trigger_layer == "last"
    assert optimizer.last_record.nan_layers == ["last", "blocks.2", "blocks.1", "blocks.0", "embed"]


@every_kind
def test_a_fault_inside_a_recomputed_block_survives_clipping(reentrant):
    model = Recomputing(reentrant)
    optimizer = guard(model)
    before = snapshot(model, optimizer)
    handle = model.blocks[0].weight.register_hook(lambda gradient: gradient * math.nan)
    model(torch.arange(7)).backward()
    handle.remove()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.last_record.nan_layers == ["blocks.0"]
    assert_same(snapshot(model, optimizer), before)
