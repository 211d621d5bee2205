import json
import logging
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stabilityguard import ConfigurationError
from stabilityguard.distributed.peers import ALONE, Peers
from tests.distributed.ranks import Died, run
from tests.support import Net, batch, guard

SECONDS = timedelta(seconds=1)


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def peers_of(optimizer):
    return optimizer._guard.peers


# One process ----------------------------------------------------------------------------------------------------------


def test_without_a_process_group_a_process_is_alone():
    assert Peers.of(None, [torch.ones(1)]) is ALONE
    assert (len(ALONE), ALONE.ranks, ALONE.place) == (1, (0,), 0)
    vector = torch.tensor([1.0, 2.0])
    ALONE.all_reduce(vector, "adding up")
    assert vector.tolist() == [1.0, 2.0]
    value = object()
    assert ALONE.gather(value, "asking") == [value]


def only_rank(rank):
    groups = [dist.new_group([0]), dist.new_group([1])]
    optimizer = guard(Net(), timeout=SECONDS, process_group=groups[rank])
    peers = peers_of(optimizer)
    return len(peers), peers.ranks, peers.gather("told", "asking")


def test_the_only_rank_of_a_group_is_alone_and_keeps_its_number():
    assert run(2, only_rank) == [(1, (0,), ["told"]), (1, (1,), ["told"])]


@pytest.mark.parametrize("timeout", [0, 5, timedelta(0), timedelta(seconds=-1), "5s"])
def test_a_timeout_that_is_no_positive_time_is_refused(timeout):
    with pytest.raises(ConfigurationError, match="timeout"):
        guard(Net(), timeout=timeout)


def test_a_process_group_needs_an_initialized_process():
    with pytest.raises(ConfigurationError, match=r"torch\.distributed is not initialized"):
        guard(Net(), process_group=object())


# The group of one's own -----------------------------------------------------------------------------------------------


def several_guards(rank):
    models = [Net() for _ in range(3)]
    groups = [peers_of(guard(model))._group for model in models]
    peers = peers_of(guard(Net()))
    return (
        all(group is groups[0] for group in [*groups, peers._group]),
        groups[0] is dist.group.WORLD,
        (peers.ranks, peers.place, len(peers), peers.device.type),
    )


def test_several_guards_share_one_group_which_is_not_the_default_one():
    assert run(3, several_guards) == [(True, False, ((0, 1, 2), rank, 3, "cpu")) for rank in range(3)]


def subgroup(rank):
    """Ranks 2 and 1 train together; rank 0 does something else, and takes no part in any call of theirs."""
    members = dist.new_group([1, 2])
    if rank == 0:
        try:
            guard(Net(), process_group=members)
        except ConfigurationError as error:
            return str(error)
        return None
    models = [Net(), Net()]
    optimizers = [guard(model, process_group=members, timeout=20 * SECONDS) for model in models]
    groups = [peers_of(optimizer)._group for optimizer in optimizers]
    models[0](batch(1)).backward()
    optimizers[0].step(loss=float(rank))
    peers = peers_of(optimizers[0])
    return (
        groups[0] is groups[1],
        groups[0] in (members, dist.group.WORLD),
        (peers.ranks, peers.place),
        peers.gather(rank * 10, "asking"),
        optimizers[0].last_record.rank_losses,
    )


def test_the_members_of_a_subgroup_speak_among_themselves_and_nobody_else_may():
    outside, *inside = run(3, subgroup)
    assert inside == [(True, False, ((1, 2), place), [10, 20], (1.0, 2.0)) for place in range(2)]
    assert "rank 0 is no member of process_group" in outside


def groups_made(rank):
    made, original = [], dist.new_group

    def counting(*arguments, **options):
        made.append(original(*arguments, **options))
        return made[-1]

    dist.new_group = counting
    pairs = [original([0, 1]), original([1, 0, 2], timeout=7 * SECONDS)]
    for pair in [pairs[0], pairs[0], None, None, pairs[1]] if rank < 2 else [None, None, pairs[1]]:
        guard(Net(), process_group=pair, timeout=9 * SECONDS)
    return len(made), [dist.get_process_group_ranks(group) for group in made]


def test_a_group_is_made_once_for_each_group_that_is_trained_with():
    everyone = [[0, 1, 2], [0, 1, 2]]
    assert run(3, groups_made) == [(3, [[0, 1], *everyone])] * 2 + [(2, everyone)]


def timeouts(rank):
    quick = dist.new_group(timeout=7 * SECONDS)
    asked = [(None, None), (None, 5 * SECONDS), (quick, None), (quick, 9 * SECONDS), (None, 5 * SECONDS)]
    groups = [peers_of(guard(Net(), process_group=g, timeout=limit))._group for g, limit in asked]
    return [timeout_of(group) for group in groups], groups[1] is groups[4], len(set(groups))


def test_the_timeout_is_the_one_asked_for_and_that_of_the_users_group_by_default():
    expected = [33 * SECONDS, 5 * SECONDS, 7 * SECONDS, 9 * SECONDS, 5 * SECONDS]
    assert run(2, timeouts, timeout=33) == [(expected, True, 4)] * 2


def started_again(rank, directory):
    seen = []
    for life in range(3):
        if life:
            dist.destroy_process_group()
            store = dist.FileStore(os.path.join(directory, str(life)), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=22 * SECONDS)
        model = Net()
        optimizer = guard(model)
        model(batch(1)).backward()
        optimizer.step(loss=float(life + rank))
        seen.append((peers_of(optimizer)._group, optimizer.last_record.rank_losses))
    groups, losses = zip(*seen, strict=True)
    return len(set(map(id, groups))), losses, timeout_of(groups[-1])


def test_a_process_that_starts_again_gets_a_new_group_that_works(tmp_path):
    expected = 3, tuple((float(life), float(life + 1)) for life in range(3)), 22 * SECONDS
    assert run(2, started_again, str(tmp_path)) == [expected] * 2


def speak(rank):
    peers = Peers.of(None, [torch.ones(1)])
    vector = torch.tensor([float(rank), 1.0], dtype=torch.float64)
    peers.all_reduce(vector, "adding up")
    values = [None, {"rank": rank, "share": torch.full((rank,), float("nan"))}, "x" * 1000 * rank]
    return vector.tolist(), peers.gather(rank, "asking"), repr(peers.gather(values[rank], "asking"))


def test_sums_and_gathered_values_are_the_same_everywhere_and_in_order():
    told = run(3, speak)
    assert told == [told[0]] * 3
    sums, ranks, values = told[0]
    assert (sums, ranks) == ([3.0, 3.0], [0, 1, 2])
    assert values == repr([None, {"rank": 1, "share": torch.tensor([float("nan")])}, "x" * 2000])


def trouble(rank, wrong):
    peers = Peers.of(None, [torch.ones(1)])
    try:
        with peers.sharing_errors("asking"):
            if rank in wrong:
                raise ConfigurationError(f"{rank} is wrong")
    except ConfigurationError as error:
        return str(error)
    return peers.gather(rank, "asking")


def test_a_wrong_setting_of_one_rank_is_an_error_on_all():
    assert run(3, trouble, (1,)) == ["rank 1: 1 is wrong", "1 is wrong", "rank 1: 1 is wrong"]
    assert run(3, trouble, ()) == [[0, 1, 2]] * 3


def device_for(rank):
    parameters = [torch.empty(1, device="meta"), torch.ones(1)]
    return Peers.of(None, parameters).device.type, Peers.of(None, parameters[:1]).device.type


def test_parameters_where_the_group_takes_no_tensors_speak_from_the_host():
    assert run(2, device_for) == [("cpu", "cpu")] * 2


# A rank that is lost --------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """The guard's log."""

    def __init__(self):
        super().__init__()
        self.records = []
        logging.getLogger("stabilityguard").addHandler(self)

    def emit(self, record):
        self.records.append((record.levelname, record.getMessage()))


def vanish_before_the_step(model, optimizer):
    os._exit(1)


def vanish_when_asked(model, optimizer):
    optimizer._guard._council._ask = lambda *arguments: os._exit(1)


def last_words(rank, directory, vanish):
    """What a survivor of rank 1's end in step 5 was told; in steps 3 and 5 there is something to report."""
    model, log = Net(), Lines()
    optimizer = guard(model, log_dir=directory, timeout=10 * SECONDS)
    threads = threading.active_count()
    for step in range(1, 7):
        optimizer.zero_grad()
        (model(batch(step)) * (torch.nan if step in (3, 5) else 1.0)).backward()
        if step == 5 and rank == 1:
            vanish(model, optimizer)
        before = [p.clone() for p in model.parameters()]
        began = time.monotonic()
        try:
            optimizer.step()
        except RuntimeError as error:
            unchanged = all(map(torch.equal, before, model.parameters()))
            added = [t for t in threading.enumerate()[threads:] if not t.daemon]
            errors = [message for level, message in log.records if level == "ERROR"]
            return step, time.monotonic() - began, type(error).__module__, unchanged, added, errors
    return None


@pytest.mark.parametrize(
    ("vanish", "doing"),
    [
        (vanish_before_the_step, "agreeing on step 5"),
        (vanish_when_asked, "telling what it saw in step 5"),
    ],
    ids=["before the step", "within it"],
)
def test_the_survivors_of_a_lost_rank_get_the_process_groups_error_and_say_what_they_were_doing(
    vanish, doing, tmp_path
):
    first, lost, last = run(3, last_words, str(tmp_path), vanish)
    assert lost == Died(1)
    for rank, told in [(0, first), (2, last)]:
        step, seconds, home, unchanged, added, errors = told
        assert step == 5
        assert seconds < 8
        assert not home.startswith("stabilityguard")
        assert unchanged
        assert added == []
        assert len(errors) == 1
        assert errors[0].startswith(f"rank {rank} lost its peers while it was {doing} with ranks 0, 1, 2: ")
        assert "\n" not in errors[0]
    assert [name for name in os.listdir(tmp_path) if "spike" in name] == ["spike_step3.json"]
    json.loads((tmp_path / "spike_step3.json").read_text())
    journal = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in journal if "action" in line] == [1, 2, 3, 4]


def test_an_error_of_many_lines_is_one_line_in_the_log(caplog):
    with pytest.raises(RuntimeError, match="remote worker"), ALONE._explained("adding up"):
        raise RuntimeError("\nConnection reset\nby a remote worker\n")
    assert caplog.messages == ["rank 0 lost its peers while it was adding up with ranks 0: Connection reset"]


def waiting(rank, done):
    model, log = Net(), Lines()
    optimizer = guard(model, timeout=3 * SECONDS)
    model(batch(1)).backward()
    began = time.monotonic()
    if rank == 1:
        while not os.path.exists(done) and time.monotonic() < began + 30:
            time.sleep(0.1)
        return None
    try:
        optimizer.step()
    except RuntimeError as error:
        return time.monotonic() - began, str(error), log.records
    finally:
        with open(done, "w"):
            pass


def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_timeout_says(tmp_path):
    (seconds, error, lines), absent = run(2, waiting, str(tmp_path / "done"))
    assert absent is None
    assert 2.5 < seconds < 10
    ((level, line),) = lines
    assert level == "ERROR"
    assert line.startswith("rank 0 lost its peers while it was agreeing on step 1 with ranks 0, 1: ")
    assert line.endswith(error.strip().partition("\n")[0])
