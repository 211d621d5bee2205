"""Models and loops that several tests use."""

import copy

import torch
from torch import nn

from stabilityguard import ConfigurationError, GuardedOptimizer
from stabilityguard.distributed.shards import find_shards
from stabilityguard.measure.layers import LayerTable


class Net(nn.Module):
    """Two layers and a loss that the model returns itself."""

    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Linear(4, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).square().mean()


class Text(torch.utils.data.Dataset):
    """Tokens for a causal language model, the same at every reading."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Growing(Net):
    """A buffer that grows with every step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return super().forward(x)


class NormNet(Net):
    """The same with BatchNorm in the middle."""

    def __init__(self, width=8):
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.body(x)))).square().mean()


def table_of(model, parameters):
    return LayerTable.of(model, lambda: find_shards(model, parameters))


def batch(step, rows=6, columns=4):
    """The batch of one step, the same at every call."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 + step))


def guard(model, base=None, **options):
    """A silent guard over ``model``, AdamW beneath it unless told otherwise."""
    base = torch.optim.AdamW(model.parameters(), lr=1e-2) if base is None else base
    return GuardedOptimizer(base, model, **{"verbose": False, **options})


def train(model, optimizer, steps, *, spoil=None):
    """Plain training over ``steps``; ``spoil(step, model)`` may edit gradients as backward leaves them."""
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        if spoil is not None:
            spoil(step, model)
        optimizer.step()


def snapshot(model, optimizer):
    """Copies of everything that a skip must not touch: model state, optimizer state and hyperparameters."""
    base = getattr(optimizer, "base_optimizer", optimizer)
    return copy.deepcopy(model.state_dict()), copy.deepcopy(base.state_dict())


def _bits(tensor):
    return torch.view_as_real(tensor).contiguous().view(torch.uint8) if tensor.is_complex() else _real_bits(tensor)


def _real_bits(tensor):
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def assert_same(first, second):
    """Bit-for-bit equality of nested states."""
    if isinstance(first, torch.Tensor):
        assert isinstance(second, torch.Tensor)
        assert first.dtype == second.dtype
        assert first.shape == second.shape
        assert torch.equal(_bits(first), _bits(second)), (first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_same(value, second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


def refusal(function):
    """What a ConfigurationError of ``function`` says; None without one."""
    try:
        function()
    except ConfigurationError as error:
        return str(error)
    return None
