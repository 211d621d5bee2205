"""Short digests, by which ranks notice that they no longer think alike."""

from __future__ import annotations

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from stabilityguard.distributed.consensus import PROTOCOL, Ballot
from stabilityguard.errors import DisagreementError

DIGEST_BYTES = 6
"""Whole numbers of this size are exact in float64."""


def digest_of(value: object) -> int:
    """Of anything whose ``repr`` says all that counts."""
    return _number(hashlib.blake2b(repr(value).encode(), digest_size=DIGEST_BYTES))


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> int:
    """Of the names and the bits of ``tensors``, which lie on the host."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    return _number(digest)


def _number(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "big")


def check_alike(ballots: Sequence[Ballot], ranks: Sequence[int]) -> None:
    """Raises DisagreementError, on every rank alike, if the ranks are not in one state. ``ranks`` are global ones."""
    own_step = max(ballot.step for ballot in ballots)
    questions: list[tuple[str, Callable[[Ballot], str]]] = [
        (f"the protocol ({PROTOCOL} here)", lambda ballot: str(ballot.protocol)),
        ("the number of the step", lambda ballot: str(ballot.step)),
        (f"what was done before step {own_step} (digests of the decision)", lambda ballot: f"{ballot.decision:012x}"),
        (f"the detector's state before step {own_step} (digests)", lambda ballot: f"{ballot.memory:012x}"),
    ]
    for question, answer in questions:
        answers: dict[str, list[int]] = defaultdict(list)
        for rank, ballot in zip(ranks, ballots, strict=True):
            answers[answer(ballot)].append(rank)
        if len(answers) > 1:
            told = "; ".join(f"{text} on {named_ranks(of)}" for text, of in answers.items())
            raise DisagreementError(
                f"the ranks disagree about {question}: {told}. Nothing was applied in step {own_step}. Did every rank "
                "load the same checkpoint, and call step() equally often?",
                step=own_step,
                ranks=tuple(
                    r for r, b in zip(ranks, ballots, strict=True) if 2 * len(answers[answer(b)]) <= len(ranks)
                ),
            )


def named_ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
