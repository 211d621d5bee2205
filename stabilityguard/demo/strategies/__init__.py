"""The model spread over ranks: a module for each name in ``settings.STRATEGIES``, with a function ``spread``.

Each is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module

import torch

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import GPT
from stabilityguard.demo.settings import HEADS, Settings
from stabilityguard.demo.trainer import Trainer


def make_trainer(settings: Settings) -> Trainer:
    """A fresh model of that seed, in one process or spread over the ranks. A collective."""
    torch.manual_seed(settings.seed)
    model = GPT(settings.width, settings.depth, HEADS).to(ranks.device())
    if ranks.count() == 1:
        return Trainer(model)
    trainer: Trainer = import_module(f"{__name__}.{settings.strategy}").spread(model)
    return trainer
