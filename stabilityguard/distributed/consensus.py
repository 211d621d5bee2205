"""The one vector that the ranks add up in every step, so that all of them judge by the same bits.

The vector, float64, one field after another:

    left         L          squared layer norms that backward left: this rank's share, unscaled
    found        L          the same as ``step()`` finds them
    present      L          1 / (ranks that hold the layer) where it has a gradient here, else 0
    spreads      2 L or 0   squares of both shares, where replicas may be reduced by hand
    left raw     E          elements of Partial gradients that backward left, to be summed before they are squared
    found raw    E          the same as ``step()`` finds them
    checksums    one for each member of each replica set; 0 but in steps that look for drift
    rows         R x 12     one row for each rank, 0 but for its own, with the fields of ``ROW``

Sums of squares are their own flags: they only grow, so that a NaN or an Inf of any rank shows in the sum. Rows have one
writer each, since sums over ranks cancel (inf - inf) and round. Whole numbers up to 2^53 travel exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from stabilityguard.distributed.census import Census
from stabilityguard.distributed.peers import Peers

PROTOCOL = 2
"""Version of the vector; ranks that run another one are named."""

ROW = (
    "protocol",
    "step",
    "flags",
    "signals",
    "decision",
    "memory",
    "has_loss",
    "loss",
    "overflow",
    "scale_left",
    "scale_found",
    "passes",
)
"""Fields of a rank's row, in order."""

_SCALARS = ("loss", "overflow", "scale_left", "scale_found")
"""Those of them that are measured on the device."""

_FLAGS = ("scaled", "vetoed", "changed", "has_target", "joined", "written", "unwritten")


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What one rank has measured, on the device; all float64."""

    left: Tensor
    """Shape (L,): its share in the squared norms that backward left."""

    found: Tensor
    """Shape (L,): its share in the squared norms as ``step()`` finds them."""

    present: Tensor
    """bool, shape (L,): layers with a gradient here."""

    left_raw: Tensor | None = None
    """Shape (E,): its terms of Partial gradients that backward left; None where there are none anywhere."""

    found_raw: Tensor | None = None

    loss: Tensor | None = None
    """0-dim: mean loss of its micro-batches."""

    overflow: Tensor | None = None
    """0-dim: above zero where its GradScaler saw a non-finite gradient; None without a scaler."""

    scale_left: Tensor | None = None
    """0-dim: the loss scale that backward's gradients carried, if known."""

    scale_found: Tensor | None = None
    """0-dim: the loss scale that they still carry at ``step()``."""

    passes: int = 0
    """Backward passes since the last step."""


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What one rank alone knows of a step, as all ranks read it."""

    step: int
    protocol: int = PROTOCOL
    scaled: bool = False
    """Whether a GradScaler is at work."""

    vetoed: bool = False
    changed: bool = False
    """Whether its parameters, or the form of their gradients, are no longer those of the census."""

    has_target: bool = False
    """Whether it could roll back."""

    joined: bool = False
    """Whether it has run out of data, and makes this step only for the others' sake."""

    written: bool = False
    """Whether the checkpoint that it was writing in the background is no longer being written."""

    unwritten: bool = False
    """Whether that has failed."""

    signals: int = 0
    """1 where the operating system has asked it to stop (SIGTERM), else 0."""

    decision: int = 0
    """48-bit digest of its previous decision."""

    memory: int = 0
    """48-bit digest of its detector's state."""

    loss: float | None = None
    overflowed: bool = False
    scale_left: float | None = None
    scale_found: float | None = None
    passes: int = 0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks know together, on the host, the same bits on each."""

    left: Tensor
    """float64, shape (L,): squared layer norms that backward left; NaN and Inf where so."""

    found: Tensor
    """float64, shape (L,): the same as ``step()`` finds them."""

    present: Tensor
    """bool, shape (L,): layers with a gradient on any rank."""

    reduced: Tensor
    """bool, shape (L,): layers whose replicas differed when backward ended, and are alike at ``step()``."""

    ballots: tuple[Ballot, ...]
    """By place among the peers."""

    checksums: tuple[tuple[int, ...], ...]
    """Of each replica set, by member."""


class Consensus:
    """Packs, adds up and unpacks the vector for one census; ``waiting`` is entered to wait for ranks and device."""

    def __init__(
        self, census: Census, peers: Peers, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._peers, self._layers, self._waiting = peers, len(census.layers), waiting
        members = [len(replicas.members) for replicas in census.replicas] if len(peers) > 1 else []
        elements = census.partial_elements
        spreads = self._layers if census.is_reduced_by_hand else 0
        sizes = [self._layers] * 3 + [spreads, spreads, elements, elements, sum(members), len(peers) * len(ROW)]
        self._sizes, self._members = sizes, members
        ends = list(accumulate(sizes))
        self._length, self._rows_at = ends[-1], ends[-2]
        self._own_row = slice(self._rows_at + peers.place * len(ROW), self._rows_at + (peers.place + 1) * len(ROW))
        self._slots = [(r, census.replicas[r].members.index(peers.place)) for r in self._memberships(census)]
        self._shares = torch.tensor([1.0 / n for n in census.layer_holders], dtype=torch.float64, device="cpu")
        self._replicated = torch.tensor(census.replicated, dtype=torch.bool, device="cpu")
        self._unreduced = torch.zeros(self._layers, dtype=torch.bool, device="cpu")
        self._layer_of_element = torch.repeat_interleave(
            torch.tensor([p.layer for p in census.partial], dtype=torch.int64, device="cpu"),
            torch.tensor([p.elements.stop - p.elements.start for p in census.partial], dtype=torch.int64, device="cpu"),
        )

    def _memberships(self, census: Census) -> list[int]:
        return [i for i, r in enumerate(census.replicas) if self._members and self._peers.place in r.members]

    def agree(self, shares: Shares, ballot: Ballot, checksums: Sequence[Tensor] = ()) -> Agreement:
        """Adds up all ranks' shares and reads all ballots: one all-reduce, and one copy to the host, waited for.

        ``checksums`` holds this rank's whole numbers for the replica sets that it is a member of, in their order.
        """
        if len(self._peers) == 1 and shares.left.device.type == "cpu" and shares.left_raw is None:
            return self._agree_alone(shares, ballot)
        vector = self._pack(shares, ballot, checksums)
        with self._waiting():
            self._peers.all_reduce(vector, f"agreeing on step {ballot.step}")
        return self._unpack(vector)

    def _agree_alone(self, shares: Shares, ballot: Ballot) -> Agreement:
        """The same without a vector, which takes time to pack."""
        loss, overflow, scale_left, scale_found = (
            None if (value := getattr(shares, name)) is None else float(value) for name in _SCALARS
        )
        known = replace(
            ballot,
            loss=loss,
            overflowed=(overflow or 0.0) > 0,
            scale_left=scale_left or None,
            scale_found=scale_found or None,
            passes=shares.passes,
        )
        return Agreement(
            left=shares.left,
            found=shares.found,
            present=shares.present,
            reduced=self._unreduced,
            ballots=(known,),
            checksums=(),
        )

    def _pack(self, shares: Shares, ballot: Ballot, checksums: Sequence[Tensor]) -> Tensor:
        device = self._peers.device if len(self._peers) > 1 else shares.left.device
        vector = torch.zeros(self._length, dtype=torch.float64, device=device)
        left, found, present, left_spread, found_spread, left_raw, found_raw, sums, _ = self._split(vector)
        left.copy_(shares.left)
        found.copy_(shares.found)
        _write(present, shares.present * self._shares)
        if left_spread.numel():
            left_spread.copy_(shares.left.square())
            found_spread.copy_(shares.found.square())
        if left_raw.numel():
            assert shares.left_raw is not None
            assert shares.found_raw is not None
            left_raw.copy_(shares.left_raw)
            found_raw.copy_(shares.found_raw)
        for (replicas, member), checksum in zip(self._slots, checksums, strict=bool(checksums)):
            sums[sum(self._members[:replicas]) + member].copy_(checksum)
        self._write_row(vector[self._own_row], shares, ballot)
        return vector

    def _write_row(self, row: Tensor, shares: Shares, ballot: Ballot) -> None:
        flags = sum(1 << i for i, name in enumerate(_FLAGS) if getattr(ballot, name))
        known = {name: getattr(ballot, name) for name in ("protocol", "step", "signals", "decision", "memory")}
        known |= {"flags": flags, "has_loss": shares.loss is not None, "passes": shares.passes}
        _write(row, torch.tensor([known.get(name, 0) for name in ROW], dtype=torch.float64, device="cpu"))
        for name in _SCALARS:
            value = getattr(shares, name)
            if value is not None:
                row[ROW.index(name)].copy_(value.reshape(()))

    def _split(self, vector: Tensor) -> Sequence[Tensor]:
        return torch.split(vector, self._sizes)

    def _unpack(self, vector: Tensor) -> Agreement:
        fields = self._split(vector)
        (left, found), (left_raw, found_raw) = fields[:2], fields[5:7]
        if left_raw.numel():
            self._layer_of_element = self._layer_of_element.to(vector.device)  # moves once
            left.index_add_(0, self._layer_of_element, left_raw.square())
            found.index_add_(0, self._layer_of_element, found_raw.square())
        with self._waiting():
            left, found, present, left_spread, found_spread, sums, rows = _to_host([*fields[:5], *fields[7:]])
        reduced = self._find_reduced(left, found, present, left_spread, found_spread)
        self._complete(left, found, present)
        checksums = torch.split(sums.long(), self._members) if self._members else ()
        return Agreement(
            left=left,
            found=found,
            present=present > 0,
            reduced=reduced,
            ballots=tuple(_read_row(row) for row in rows.view(-1, len(ROW)).tolist()),
            checksums=tuple(tuple(of_set.tolist()) for of_set in checksums),
        )

    def _find_reduced(
        self, left: Tensor, found: Tensor, present: Tensor, left_spread: Tensor, found_spread: Tensor
    ) -> Tensor:
        """Replicas are alike where Cauchy and Schwarz are: n times the sum of squares is the square of the sum."""
        if not left_spread.numel():
            return self._unreduced
        holders = present / self._shares
        were_alike, are_alike = (
            (holders * spread - total.square()).abs() <= 1e-12 * total.square()
            for spread, total in ((left_spread, left), (found_spread, found))
        )
        were_summed = (left - found * holders.square()).abs() <= 1e-5 * left  # in hooks, and divided after backward
        return self._replicated & are_alike & (~were_alike | were_summed) & (found > 0)  # not those that were cleared

    def _complete(self, left: Tensor, found: Tensor, present: Tensor) -> None:
        """Where some replicas of a layer have no gradient, the norm is that of the ones that do (root mean square)."""
        some = self._replicated & (present > 0) & (present < 1 - 1e-9)
        if bool(some.any()):
            left[some] /= present[some]
            found[some] /= present[some]


def _to_host(fields: Sequence[Tensor]) -> Sequence[Tensor]:
    """All in one copy, unless they are there."""
    if fields[0].device.type == "cpu":
        return fields
    return torch.split(torch.cat(list(fields)).cpu(), [field.numel() for field in fields])


def _write(target: Tensor, values: Tensor) -> None:
    """Copies from the host without waiting for the device: from pinned memory, where there is one."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


def _read_row(values: Sequence[float]) -> Ballot:
    row = dict(zip(ROW, values, strict=True))
    flags = int(row["flags"])
    return Ballot(
        protocol=int(row["protocol"]),
        step=int(row["step"]),
        signals=int(row["signals"]),
        decision=int(row["decision"]),
        memory=int(row["memory"]),
        loss=row["loss"] if row["has_loss"] else None,
        overflowed=row["overflow"] > 0,
        scale_left=row["scale_left"] or None,
        scale_found=row["scale_found"] or None,
        passes=int(row["passes"]),
        **{name: bool(flags >> i & 1) for i, name in enumerate(_FLAGS)},
    )
