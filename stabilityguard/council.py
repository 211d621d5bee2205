"""The ranks that decide together: what they agree on in every step, and what they ask each other when one is bad."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from stabilityguard.config import GuardConfig
from stabilityguard.detect.statistics import Statistics
from stabilityguard.distributed.consensus import Agreement, Ballot, Consensus
from stabilityguard.distributed.digest import check_alike, named_ranks
from stabilityguard.distributed.drift import check_replicas, checksums
from stabilityguard.distributed.peers import Peers
from stabilityguard.errors import ConfigurationError
from stabilityguard.inquest import Readings, Testimony, read, settle, testify
from stabilityguard.measure.stopwatch import Stopwatch
from stabilityguard.measure.window import GradientWindow, Sight, shares_of


@dataclass(frozen=True, kw_only=True)
class Deliberation:
    """What was said about one step."""

    sight: Sight
    agreement: Agreement
    readings: Readings

    @property
    def wants_census(self) -> bool:
        """Whether the parameters of a rank have changed, so that the layers have to be counted anew."""
        return any(ballot.changed for ballot in self.agreement.ballots)

    @property
    def has_target(self) -> bool:
        """Whether every rank could roll back, to a state that it has reached together with the others."""
        return all(ballot.has_target and not ballot.joined for ballot in self.agreement.ballots)

    @property
    def has_joined(self) -> bool:
        """Whether a rank has run out of data."""
        return any(ballot.joined for ballot in self.agreement.ballots)

    @property
    def has_written(self) -> bool:
        """Whether every rank has ended writing a checkpoint in the background."""
        return all(ballot.written for ballot in self.agreement.ballots)

    @property
    def has_failed_to_write(self) -> bool:
        """Whether that failed on a rank."""
        return any(ballot.unwritten for ballot in self.agreement.ballots)

    @property
    def is_to_stop(self) -> bool:
        """Whether a rank was told to stop."""
        return any(ballot.signals for ballot in self.agreement.ballots)

    @property
    def is_suspect(self) -> bool:
        """Whether something is wrong that needs no judgement of norms."""
        losses = [ballot.loss for ballot in self.agreement.ballots if ballot.loss is not None]
        bad_loss = any(loss - loss != 0 for loss in losses)  # NaN and Inf
        said = any(ballot.vetoed or ballot.overflowed for ballot in self.agreement.ballots)
        return bool(self.readings.suspects) or bad_loss or said


class Council:
    """Speaks for this rank about the layers of one window.

    Args:
        peers: the ranks.
        window: this rank's gradients.
        witness: what else this rank knows when something is wrong: the fields of ``Evidence`` beside norms.
        drift_check_every: steps between two comparisons of replicated parameters; 0 for none.
        stopwatch: pauses while it waits for the others' sums.
    """

    def __init__(
        self,
        peers: Peers,
        window: GradientWindow,
        witness: Callable[[], Mapping[str, Any]],
        drift_check_every: int,
        stopwatch: Stopwatch,
    ) -> None:
        self.peers = peers
        self._window, self._witness, self._drift_check_every = window, witness, drift_check_every
        self._census, self._shards = window.table.census, window.table.shards
        self._consensus = Consensus(self._census, peers, stopwatch.paused)

    def agree(self, sight: Sight, loss: Tensor | None, ballot: Ballot) -> Deliberation:
        """Adds up what all ranks have seen. A collective: one all-reduce; waits for one copy to the host.

        Raises:
            DisagreementError: the ranks are not in one state, or their replicas are not.
        """
        looks_for_drift = self._drift_check_every > 0 and ballot.step % self._drift_check_every == 0
        looks_for_drift = looks_for_drift and len(self.peers) > 1
        sums = checksums(self._census.replicas, self._shards) if looks_for_drift else []
        agreement = self._consensus.agree(shares_of(sight, loss), ballot, sums)
        if len(self.peers) > 1:
            check_alike(agreement.ballots, self.peers.ranks)
        if looks_for_drift and not any(ballot.joined for ballot in agreement.ballots):  # they are apart until all have
            check_replicas(agreement.checksums, self._census.replicas, self.peers.ranks, ballot.step)
        return Deliberation(sight=sight, agreement=agreement, readings=read(agreement))

    def statistics(self, deliberation: Deliberation) -> Statistics:
        """What is to be judged. Where something is wrong already, a collective: all ranks tell what they saw."""
        asked = self._ask(deliberation, deliberation.readings.suspects) if deliberation.is_suspect else None
        return settle(deliberation.agreement, deliberation.readings, asked)

    def with_evidence(self, deliberation: Deliberation, statistics: Statistics, layers: Sequence[int]) -> Statistics:
        """The same, with what each rank saw of ``layers``. A collective, unless they were asked before."""
        asked = set(deliberation.readings.suspects)
        if statistics.evidence is not None and asked.issuperset(layers):
            return statistics
        return replace(
            statistics, evidence=tuple(t.evidence for t in self._ask(deliberation, sorted(asked.union(layers))))
        )

    def _ask(self, deliberation: Deliberation, layers: Sequence[int]) -> list[Testimony]:
        ballot = deliberation.agreement.ballots[self.peers.place]
        testimony = testify(
            self._window,
            deliberation.sight,
            layers,
            ballot,
            found=deliberation.readings.found,
            evidence=self._witness(),
        )
        return self.peers.gather(testimony, f"telling what it saw in step {ballot.step}")


def check_settings(peers: Peers, config: GuardConfig) -> None:
    """Raises ConfigurationError, on every rank, where they were asked to judge differently. Collective calls."""
    asked = peers.gather({k: v for k, v in asdict(config).items() if k not in _PRIVATE}, "comparing settings")
    for name in asked[0]:
        values: dict[str, list[int]] = defaultdict(list)
        for rank, settings in zip(peers.ranks, asked, strict=True):
            values[repr(settings[name])].append(rank)
        if len(values) > 1:
            told = "; ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in values.items())
            raise ConfigurationError(f"{name} differs over ranks: {told}; pass the same value on every rank")


_PRIVATE = ("log_dir", "log_every", "verbose")
"""Settings that need not be the same on all ranks."""
