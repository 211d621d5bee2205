"""What a step brings to the host."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import batch, guard


class CountReads(TorchDispatchMode):
    """Counts reads of a device tensor's value by the host."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_of_a_step(layers, *, bad=False, **options):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = guard(model, SGD(model.parameters(), lr=1e-4), warmup_steps=2, **options)
    for number in range(4):
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        optimizer.step()
    counter = CountReads()
    optimizer.zero_grad()
    loss = model(batch(4)).square().mean() * (1e6 if bad else 1.0)
    with counter:
        loss.backward()
        optimizer.step()
    assert optimizer.last_record.kind == ("spike" if bad else None)
    return counter.reads


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e-3}], ids=["plain", "clipping"])
def test_the_host_reads_as_many_values_for_two_layers_as_for_a_hundred(options):
    few, many = reads_of_a_step(2, **options), reads_of_a_step(100, **options)
    assert few == many
    assert 0 < few < 20
