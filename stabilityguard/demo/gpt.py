"""A small byte-level GPT, and the text that it learns: the source of Python's own standard library."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 128
"""Bytes that the model sees at once."""

BYTES = 256
"""Values of a byte: what the model tells apart."""

CORPUS_BYTES = 2_000_000


class SelfAttention(nn.Module):
    """Causal multi-head attention; (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attends over the positions before each."""
        # Head by head, so that a slice of the rows of qkv is a number of whole heads: as many as there are here.
        by_head = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = by_head.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


class MLP(nn.Module):
    """The position-wise network; (B, T, D) to (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Widens, bends and narrows."""
        bent: Tensor = self.down(functional.gelu(self.up(x)))
        return bent


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds attention and network to the stream."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Predicts the next byte; returns the mean cross-entropy in nats per byte."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """``text``: int64, shape (B, T + 1), T at most ``CONTEXT``; each byte is predicted from those before it."""
        seen, following = split(text)
        x = self.token(seen) + self.position.weight[: seen.shape[1]]
        for block in self.blocks:
            x = block(x)
        return mean_cross_entropy(self.head(self.norm(x)), following)


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """What is seen, and what is to be predicted from it: (B, T + 1) to twice (B, T)."""
    return text[:, :-1], text[:, 1:]


def mean_cross_entropy(logits: Tensor, following: Tensor) -> Tensor:
    """In nats per byte; (B, T, 256) and (B, T) to a scalar."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def stage_of(block: int, depth: int, stages: int) -> int:
    """The stage of a pipeline that holds a block: each has as many as the others, or one less."""
    return block * stages // depth


def read_corpus() -> tuple[Tensor, Tensor]:
    """Training and held-out bytes (uint8, 1-D): modules of the standard library in order of name, the end held out."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)[:CORPUS_BYTES]
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = len(corpus) // 10
    return corpus[:-held_out], corpus[-held_out:]


def draw_batch(corpus: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """int64, shape (rows, CONTEXT + 1): pieces of ``corpus`` from random places."""
    starts = torch.randint(len(corpus) - CONTEXT - 1, (rows,), generator=generator)
    return torch.stack([corpus[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
