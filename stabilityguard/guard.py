"""The path of one step: measure, judge, act, record. It does not know who calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from stabilityguard.case import BadEvaluation, Case, Outcome, make_error, make_record
from stabilityguard.chronicle import Chronicle
from stabilityguard.config import GuardConfig
from stabilityguard.council import Council, Deliberation, check_settings
from stabilityguard.detect.detector import Detector
from stabilityguard.detect.diagnosis import diagnose
from stabilityguard.detect.statistics import Statistics
from stabilityguard.distributed.consensus import Ballot
from stabilityguard.distributed.join import JoinedRank
from stabilityguard.distributed.peers import ALONE, Peers
from stabilityguard.errors import CheckpointError
from stabilityguard.groups import learning_rate
from stabilityguard.measure.forward import ForwardObserver
from stabilityguard.measure.layers import LayerTable
from stabilityguard.measure.modules import leaves_gradients_to_the_end, reduces_in_groups
from stabilityguard.measure.stopwatch import Stopwatch
from stabilityguard.measure.window import GradientWindow, LossScale, Sight
from stabilityguard.memory import Memory
from stabilityguard.recover.breaker import Breaker
from stabilityguard.recover.buffers import owned_buffers
from stabilityguard.recover.checkpoints import Checkpoints
from stabilityguard.recover.recovery import Recovery
from stabilityguard.recover.state import Resumed, Stateful, check_moments
from stabilityguard.report.records import StepRecord
from stabilityguard.report.sinks import Sink
from stabilityguard.report.spike import hyperparameters
from stabilityguard.subject import Subject

T = TypeVar("T")


class Guard:
    """Stands between backward and the update.

    Args:
        subject: what it watches over.
        config: what was asked for.
        detector: judges the norms.
        tracked: objects that are saved and rewound with the model.
        sinks: further consumers of records and reports.
        peers: the ranks that decide together.
    """

    def __init__(
        self,
        subject: Subject,
        config: GuardConfig,
        detector: Detector,
        tracked: Mapping[str, Stateful],
        sinks: Sequence[Sink],
        peers: Peers = ALONE,
    ) -> None:
        self.config = config
        self.peers = peers
        self.deliberation: Deliberation
        self.chronicle = Chronicle(sinks, config, peers)
        self._subject, self._stopwatch = subject, Stopwatch()
        self._detector, self._tracked = detector, tracked
        self._breaker = Breaker(nan_action=config.nan_action, budget=config.budget)
        self._had_joined = self._in_step = False
        self._veto: str | None = None
        check_settings(peers, config)
        table = self._count()  # refuses the wrong model before any hook is set
        check_moments(config.moments, table.shards)
        exports = subject.exports(config.checkpoints.format) if config.checkpoints else {}
        self._checkpoints = Checkpoints(config.checkpoints, peers, exports)
        self._forward = ForwardObserver(subject.model, self._forward_begins)
        self._joined_rank = JoinedRank(subject.model, self.shadow_step) if len(peers) > 1 else None
        self._memory = Memory(detector, table.names)
        self._watch(table)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._memory.steps

    # The path of one step ---------------------------------------------------------------------------------------

    def step(self, update: Callable[[Statistics], T], *, loss: Tensor | None, scale: LossScale) -> T | None:
        """Calls ``update`` if the gradients are healthy, else does what the policy says. Returns its result, or None.

        A collective over the peers: one all-reduce, and a gathering of what each rank saw where something is wrong.
        Makes one copy to the host, and waits for it. If ``update`` raises, the error passes and the step counts for
        nothing.

        Raises:
            GradientSpikeError: the policy ends in raising; nothing was changed.
            DisagreementError: the ranks are not in one state, or their replicas are not.
        """
        with self._stopwatch.running():
            self.window.refuse_consumed()
            self.check_parameters()
            self._begin()
            with self._stopwatch.paused():
                self._checkpoints.write()
            statistics = self.measure(loss, scale)
            try:
                return self._settle(statistics, update)
            except BadEvaluation as fault:
                return self._settle(fault.statistics, update)

    def shadow_step(self) -> None:
        """Takes part in a step that other ranks make, as a rank that has run out of data: nothing is updated here."""
        self._begin()
        self._checkpoints.write()
        self._agree(lambda: self.window.nothing(), None, LossScale(), joined=True)
        self._settle(self._council.statistics(self.deliberation), lambda _: None)

    def measure(self, loss: Tensor | None, scale: LossScale) -> Statistics:
        """The statistics of the present gradients, agreed on with the peers; ``loss`` defaults to the model's own."""
        seen = self._forward.take_loss()
        loss = seen if loss is None else loss
        self._agree(lambda: self.window.look(scale), loss, scale)
        return self._council.statistics(self.deliberation)

    def _agree(self, see: Callable[[], Sight], loss: Tensor | None, scale: LossScale, *, joined: bool = False) -> None:
        """Agrees with the peers on what ``see`` shows, twice where the layers have to be counted anew in between."""
        self.deliberation = self._council.agree(see(), loss, self._ballot(scale, joined=joined))
        if self.deliberation.wants_census:
            self._replace_table(self._count())
            self._begin()
            self.deliberation = self._council.agree(see(), loss, self._ballot(scale, joined=joined))
        had_joined, self._had_joined = self._had_joined, self.deliberation.has_joined
        if had_joined and not self._had_joined:  # the ranks' states were apart, and were made alike again
            self._recovery.begin(self.steps, self._memory.state_dict, in_step=True)
        if self.deliberation.has_written:
            self._checkpoints.settle(succeeded=not self.deliberation.has_failed_to_write)

    def _ballot(self, scale: LossScale, *, joined: bool) -> Ballot:
        alone = len(self.peers) == 1
        return Ballot(
            step=self.steps + 1,
            joined=joined,
            scaled=scale.found_inf is not None,
            vetoed=self._veto is not None,
            changed=not self._is_counted or self.window.reader.finds_new_partial(),
            has_target=self._recovery.has_target,
            **self._checkpoints.ballot(),
            decision=0 if alone else self._memory.digest_of_decision(),
            memory=0 if alone else self._memory.digest(),
        )

    def attempt(self, update: Callable[[], T]) -> T:
        """Calls ``update`` on a copied state, and puts that state back if it ends in a bad evaluation."""
        undo = self._recovery.remember()
        try:
            return update()
        except BadEvaluation:
            undo()
            raise

    def _settle(self, statistics: Statistics, update: Callable[[Statistics], T]) -> T | None:
        case = self._judge(statistics)
        groups = hyperparameters(self._subject.optimizer) if case.decision.is_trip else []  # a rollback changes them
        try:
            outcome = self._act(case, update)
        except CheckpointError as error:  # nothing was changed
            case = case.ending_in(error)
            outcome = self._act(case, update)
        overhead = self._stopwatch.take()
        record = make_record(
            case, self.window.table, self.peers.ranks, restored_step=outcome.restored_step, overhead_ms=overhead
        )
        self._memory.note(record)
        report = None
        if case.decision.is_trip:
            name = type(self._subject.optimizer).__name__
            report = self.chronicle.report(case, outcome, record, optimizer=name, groups=groups)
        self._finish(record)
        if report is not None and record.action == "raise":
            raise make_error(report, place=self.peers.place)
        if not self._had_joined:  # a rank without data has an old state
            stop = self.deliberation.is_to_stop
            self._checkpoints.preserve(self.steps, self.state_dict, applied=record.applied, stop=stop)
        return outcome.result

    def _judge(self, statistics: Statistics) -> Case:
        verdict = self._detector.judge(self._memory.norms, statistics.norms)
        diagnosis = diagnose(statistics, verdict)
        if diagnosis is not None:
            spikes = verdict.spikes.nonzero().flatten().tolist()
            statistics = self._council.with_evidence(self.deliberation, statistics, spikes)
        decision = self._breaker.decide(
            self._memory.breaker,
            step=self.steps + 1,
            kind=diagnosis.kind if diagnosis else None,
            has_target=self.deliberation.has_target,
        )
        return Case(
            step=self.steps + 1,
            statistics=statistics,
            verdict=verdict,
            diagnosis=diagnosis,
            decision=decision,
            lr=learning_rate(self._subject.optimizer),
        )

    def _act(self, case: Case, update: Callable[[Statistics], T]) -> Outcome[T]:
        outcome: Outcome[T] = Outcome()
        if case.decision.action == "step":
            self._recovery.fence()
            with self._stopwatch.paused():
                outcome = Outcome(result=update(case.statistics))
            self._memory.learn(case)
            self._recovery.applied(case.step, self._memory.state_dict)
        elif case.decision.action == "skip":
            outcome = Outcome(buffers=self._recovery.undo_forward())
        elif case.decision.action == "rollback":
            step, remembered = self._recovery.roll_back()
            self._memory.recall(remembered)
            if self.config.moments == "reset_trigger_layer" and case.diagnosis is not None:
                self._recovery.forget_moments(self.window.table.parameters_of(case.diagnosis.layer))
            outcome = Outcome(restored_step=step)
        if case.decision.action in ("skip", "rollback"):
            self._subject.discard_gradients(self.window.reader, are_finite=not case.statistics.findings)
        self._memory.steps, self._memory.breaker = case.step, case.decision.state
        return outcome

    def _finish(self, record: StepRecord) -> None:
        self._veto = None
        self._in_step = False
        if self._joined_rank is not None:
            self._joined_rank.step_ended()
        self._forward.forget_batches()
        self.chronicle.note(record)

    # Life ---------------------------------------------------------------------------------------------------------

    def veto(self, reason: str) -> None:
        """Asks for the coming step to be skipped."""
        self._veto = reason

    def forget_gradients(self) -> None:
        """Drops what was measured: these gradients will not be stepped on."""
        self.window.forget()
        if self._joined_rank is not None:
            self._joined_rank.forget()

    def check_parameters(self) -> None:
        """Looks whether the parameters are others; layers keep their history, snapshots are given up.

        Peers have to take part in the count of layers, and do so in the coming step.
        """
        self._is_counted = self._subject.has_only(self._parameters)
        if not self._is_counted and len(self.peers) == 1:
            self._replace_table(self._count())

    def _count(self) -> LayerTable:
        """The layers of the parameters. A collective over the peers."""
        return LayerTable.of(self._subject.model, self._subject.shards, self.peers)

    def _replace_table(self, table: LayerTable) -> None:
        self.window.close()
        self._memory.follow(table.names)
        self._watch(table, keeps_recovery=self._subject.has_only(self._parameters))

    def close(self) -> None:
        """Removes every hook and closes the sinks."""
        if self._joined_rank is not None:
            self._joined_rank.close()
        self.window.close()
        self._forward.close()
        self.chronicle.close()
        self._checkpoints.close()

    def resume(self) -> Resumed | None:
        """Goes on from the newest checkpoint that was left for that. Collective calls.

        Raises:
            CheckpointError: on all ranks, if there are checkpoints and none can be read; nothing was changed.
        """
        loaded = self._recovery.resume()
        if loaded is not None:
            self.load_state_dict(loaded.guard)
        return None if loaded is None else Resumed(step=self.steps, tracked=loaded.at_next.tracked)

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on judging alike: tensors and plain values."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Takes over such a state, layer by name; the memory stays with None, which is what an unguarded run has."""
        if state is not None:
            self._memory.load_state_dict(state)
        self.window.forget()
        self._forward.call_before_next(self._begin)
        self._begun = False

    def _watch(self, table: LayerTable, *, keeps_recovery: bool = False) -> None:
        """Starts to measure the parameters of ``table``, and to keep ways back for them."""
        self._parameters = self._subject.parameters()
        self._is_counted = True
        model = self._subject.model
        self.window = GradientWindow(
            table,
            self._backward_ended,
            sees_own=len(self.peers) > 1 and leaves_gradients_to_the_end(model),
            in_order=not reduces_in_groups(model),
            find=self._subject.find_gradients,
            stopwatch=self._stopwatch,
        )
        self._council = Council(
            self.peers,
            self.window,
            lambda: {**self._forward.testimony(), "veto": self._veto},
            self.config.drift_check_every,
            self._stopwatch,
        )
        if keeps_recovery:
            return
        slots = owned_buffers(model, self._parameters)
        self._recovery = Recovery(
            self._subject.state(slots, self._tracked),
            slots,
            self.config,
            self._checkpoints.archive,
            self._subject.layout(table.shards, self.peers.place),
        )
        self._checkpoints.follow(self._recovery.disk)
        self._begun = False
        self._forward.call_before_next(self._begin)

    def _forward_begins(self) -> None:
        """What the user did since the last step, to buffers and to what is trained, is taken as it is."""
        self.window.follow_requires_grad()
        if self._begun and not self._in_step:
            self._in_step = True
            self._recovery.step_begins()
            if not self._had_joined:  # every rank comes by, here or in step()
                self._checkpoints.leave()

    def _backward_ended(self) -> None:
        self._forward.backward_ended()
        if self._joined_rank is not None:
            self._joined_rank.backward_ended()

    def _begin(self) -> None:
        """Copies the state that the user hands over; before the first forward where that can be seen."""
        if not self._begun or self._recovery.was_rewritten:
            self._recovery.begin(self.steps, self._memory.state_dict)
            self._begun = True
