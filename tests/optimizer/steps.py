"""Steps of small models, sound and spoilt, and what they leave behind."""

import contextlib
import copy
import math

import pytest
import torch
from torch.optim import SGD, AdamW

from tests.support import Net, batch

BASES = {
    "sgd-momentum": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9),
    "adamw-fused": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
    "adamw-foreach": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
}

every_base = pytest.mark.parametrize("make", BASES.values(), ids=BASES.keys())


@contextlib.contextmanager
def fault(parameter, factor):
    """Multiplies what backward puts into ``parameter.grad`` by ``factor``."""
    handle = parameter.register_hook(lambda gradient: gradient * factor)
    yield
    handle.remove()


def step(model, optimizer, number=0, *, between=None):
    """One training step; ``between()`` runs after backward."""
    optimizer.zero_grad()
    model(batch(number)).backward()
    if between is not None:
        between()
    return optimizer.step()


def spoil_step(model, optimizer, number=0, *, factor=math.nan, parameter=None):
    with fault(model.body.weight if parameter is None else parameter, factor):
        step(model, optimizer, number)


def twins(kind=Net):
    """Two models that are equal and share nothing."""
    model = kind()
    return model, copy.deepcopy(model)


def global_norm(parameters):
    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack([g.double().abs().square().sum() for g in gradients]).sqrt()).item()


def read_all(module):
    """State of a module and its gradients."""
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return copy.deepcopy(module.state_dict()), gradients


def memory(optimizer):
    return copy.deepcopy(optimizer.state_dict()["stabilityguard"])


def hooks_of(model):
    on_parameters = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    on_modules = [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    return sum(len(hooks) for hooks in on_parameters + on_modules)
