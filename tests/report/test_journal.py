import contextlib
import gc
import json
import logging
import math
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from stabilityguard.report.journal import Journal
from stabilityguard.report.records import LayerReadings, SpikeReport, StepRecord
from tests.support import Net, assert_same, batch, guard, train

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses /dev/full, /sys and file limits")


def strictly(text):
    def no_constant(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=no_constant)


def lines(path):
    text = Path(path).read_bytes().decode("ascii")
    assert text.endswith("\n")
    return [strictly(line) for line in text.splitlines()]


def whole_lines(path):
    """Steps of the lines that are JSON; others are passed over."""
    steps = []
    for line in Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            steps.append(strictly(line)["step"])
    return steps


def record(step, **fields):
    """A record made by hand, of one layer."""
    one = torch.ones(1, dtype=torch.float64)
    layers = LayerReadings(places={"layer": 0}, norms=one, baselines=one, ratios=one, present=one.bool())
    return StepRecord(**{"step": step, "action": "step", "global_norm": 1.0, "layers": layers, **fields})


def report(step, **details):
    return SpikeReport(
        record=record(step, action="skip", kind="nan", reason="a test"), details={"step": step, **details}
    )


def nan_at(*steps):
    def spoil(step, model):
        if step in steps:
            model.head.weight.grad[0, 0] = torch.nan

    return spoil


def train_guarded(steps=8, *, spoil=None, **options):
    """The model, its optimizer and the guard after a run from a fixed seed."""
    torch.manual_seed(0)
    model = Net()
    optimizer = guard(model, **options)
    train(model, optimizer, range(1, steps + 1), spoil=spoil)
    return model, optimizer


def healthy_result(**options):
    """Model and optimizer state after the same run where everything can be written."""
    model, optimizer = train_guarded(log_dir="fine", **options)
    return model.state_dict(), optimizer.base_optimizer.state_dict()


def warnings(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.name == "stabilityguard"]


def assert_one_warning(caplog, *words):
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
    (message,) = warnings(caplog)
    assert "training goes on" in message
    for word in words:
        assert word in message


@contextlib.contextmanager
def files_no_larger_than(size):
    """For the process's files, as on a full disk: what goes beyond ``size`` bytes cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# What is written ------------------------------------------------------------------------------------------------


def test_every_step_is_one_line_of_strict_json():
    _, optimizer = train_guarded(spoil=nan_at(5))
    written = lines("sg_logs/journal.jsonl")
    assert [line["step"] for line in written] == list(range(1, 9))
    assert [line["action"] for line in written] == ["step"] * 4 + ["skip"] + ["step"] * 3
    last = optimizer.last_record
    for field in ("global_norm", "loss", "lr", "ratio"):
        assert written[-1][field] == getattr(last, field)


def test_a_bad_step_tells_kind_and_layer_and_numbers_that_are_not_finite_are_words():
    train_guarded(spoil=nan_at(5))
    bad = lines("sg_logs/journal.jsonl")[4]
    assert (bad["kind"], bad["trigger_layer"], bad["global_norm"]) == ("nan", "head", "NaN")
    assert isinstance(bad["loss"], float)


def test_fields_without_a_value_are_left_out():
    journal = Journal("logs")
    journal.on_record(record(1))
    journal.on_record(record(2, action="rollback", restored_step=0, kind="inf", loss=-math.inf, ratio=math.inf, lr=0.0))
    journal.close()
    first, second = lines("logs/journal.jsonl")
    assert first.keys() == {"step", "time", "action", "global_norm"}
    assert (second["restored_step"], second["lr"]) == (0, 0.0)
    assert (second["loss"], second["ratio"]) == ("-Infinity", "Infinity")


def test_a_line_tells_the_time_of_the_step():
    before = time.time()
    train_guarded(steps=1)
    assert before - 0.001 <= lines("sg_logs/journal.jsonl")[0]["time"] <= time.time() + 0.001


@pytest.mark.parametrize("name", ['a "quote"', "back\\slash", "new\nline", "層\ud800", "\x00\x1b[31m", "\u2028"])
def test_any_layer_name_stays_in_its_line(name):
    journal = Journal("logs")
    journal.on_record(record(1, trigger_layer=name))
    journal.on_record(record(2))
    journal.close()
    first, second = lines("logs/journal.jsonl")
    assert (first["trigger_layer"], second["step"]) == (name, 2)


def test_a_line_is_on_disk_when_its_step_has_ended():
    model = Net()
    optimizer = guard(model)
    for step in range(1, 4):
        train(model, optimizer, [step], spoil=nan_at(2))
        assert [line["step"] for line in lines("sg_logs/journal.jsonl")] == list(range(1, step + 1))
    assert Path("sg_logs/spike_step2.json").exists()


def test_files_are_written_where_nothing_is_printed(capfd):
    train_guarded(spoil=nan_at(3), verbose=False)
    assert sorted(os.listdir("sg_logs")) == ["journal.jsonl", "spike_step3.json"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("form", [str, Path, os.fsencode], ids=["text", "pathlib", "bytes"])
def test_log_dir_may_be_any_kind_of_path(form, tmp_path):
    _, optimizer = train_guarded(spoil=nan_at(3), log_dir=form(tmp_path / "deep" / "down"))
    assert len(lines(tmp_path / "deep" / "down" / "journal.jsonl")) == 8
    assert optimizer.reports[0].path == str(tmp_path / "deep" / "down" / "spike_step3.json")


def test_nothing_is_written_before_the_first_step():
    guard(Net())
    assert os.listdir() == []


def test_a_second_run_in_the_same_directory_goes_on_in_the_same_journal():
    train_guarded(steps=3)[1].close()
    train_guarded(steps=2)[1].close()
    assert [line["step"] for line in lines("sg_logs/journal.jsonl")] == [1, 2, 3, 1, 2]


def test_a_guard_that_nobody_closes_closes_its_journal():
    def held():
        links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return [
            str(link)
            for link in links
            if link.is_symlink() and os.readlink(link) == os.path.abspath("logs/journal.jsonl")
        ]

    model, optimizer = train_guarded(steps=2, log_dir="logs")
    assert len(held()) == 1
    del model, optimizer
    gc.collect()
    assert held() == []


# Bounded --------------------------------------------------------------------------------------------------------


def test_the_journal_is_bounded_and_keeps_the_newest_steps(caplog):
    journal = Journal("logs", max_bytes=1000)
    for step in range(1, 201):
        journal.on_record(record(step))
        assert sum(path.stat().st_size for path in Path("logs").iterdir()) <= 2200
    journal.close()
    assert sorted(os.listdir("logs")) == ["journal.1.jsonl", "journal.jsonl"]
    kept = lines("logs/journal.1.jsonl") + (
        lines("logs/journal.jsonl") if os.stat("logs/journal.jsonl").st_size else []
    )
    steps = [line["step"] for line in kept]
    assert steps == list(range(steps[0], 201))
    assert len(steps) >= 1000 // 100
    assert warnings(caplog) == []


def test_a_journal_that_an_earlier_run_left_full_is_moved_away_too():
    os.makedirs("logs")
    Path("logs/journal.jsonl").write_text('{"step": 0}\n' * 100)
    journal = Journal("logs", max_bytes=1000)
    journal.on_record(record(1))
    journal.on_record(record(2))
    journal.close()
    assert lines("logs/journal.1.jsonl")[-1]["step"] == 1
    assert [line["step"] for line in lines("logs/journal.jsonl")] == [2]


def test_two_guards_that_share_a_directory_do_not_cut_each_others_lines(caplog):
    first, second = Net(), Net()
    guards = [guard(first), guard(second)]
    for step in range(1, 31):
        for model, optimizer in zip((first, second), guards, strict=True):
            train(model, optimizer, [step], spoil=nan_at(7))
    written = lines("sg_logs/journal.jsonl")
    assert [line["step"] for line in written] == [step for step in range(1, 31) for _ in range(2)]
    assert sorted(os.listdir("sg_logs")) == ["journal.jsonl", "spike_step7-2.json", "spike_step7.json"]
    assert warnings(caplog) == []


def test_two_journals_that_share_a_directory_stay_bounded_and_lose_no_recent_line(caplog):
    first, second = Journal("logs", max_bytes=2000), Journal("logs", max_bytes=2000)
    for step in range(1, 201):
        first.on_record(record(2 * step - 1))
        second.on_record(record(2 * step))
        assert sum(path.stat().st_size for path in Path("logs").iterdir()) <= 4 * 2200
    first.close()
    second.close()
    assert warnings(caplog) == []
    kept = [line for path in sorted(Path("logs").iterdir()) if path.stat().st_size for line in lines(path)]
    steps = sorted(line["step"] for line in kept)
    assert steps == list(range(401 - len(steps), 401))
    assert len(steps) >= 20


# What cannot be written -----------------------------------------------------------------------------------------


def test_a_journal_on_a_full_disk_costs_one_warning_and_nothing_else(caplog):
    expected = healthy_result(spoil=nan_at(3, 6))
    os.makedirs("full")
    os.symlink("/dev/full", "full/journal.jsonl")
    model, optimizer = train_guarded(spoil=nan_at(3, 6), log_dir="full")
    assert_one_warning(caplog, "full", "No space left")
    assert_same((model.state_dict(), optimizer.base_optimizer.state_dict()), expected)
    assert [Path(report.path).name for report in optimizer.reports] == ["spike_step3.json", "spike_step6.json"]


def test_a_report_on_a_full_disk_costs_one_warning_and_leaves_no_stump(caplog):
    expected = healthy_result(spoil=nan_at(3, 6))
    with files_no_larger_than(900):
        model, optimizer = train_guarded(spoil=nan_at(3, 6), log_dir="full")
    assert_one_warning(caplog, "full")
    assert_same((model.state_dict(), optimizer.base_optimizer.state_dict()), expected)
    assert [report.path for report in optimizer.reports] == [None, None]
    assert os.listdir("full") == ["journal.jsonl"]


def test_a_disk_with_space_again_gets_the_next_report_and_the_journal_from_there(caplog):
    torch.manual_seed(0)
    model = Net()
    optimizer = guard(model, log_dir="full")
    with files_no_larger_than(0):
        train(model, optimizer, range(1, 5), spoil=nan_at(3))
    train(model, optimizer, range(5, 9), spoil=nan_at(6))
    assert len(warnings(caplog)) == 1
    assert [report.path for report in optimizer.reports] == [None, "full/spike_step6.json"]
    assert [line["step"] for line in lines("full/journal.jsonl")] == [6, 7, 8]


def test_a_line_that_a_full_disk_has_cut_does_not_spoil_the_lines_after_it():
    torch.manual_seed(0)
    model = Net()
    optimizer = guard(model, log_dir="full")
    with files_no_larger_than(250):
        train(model, optimizer, range(1, 5))
    train(model, optimizer, range(5, 9), spoil=nan_at(6))
    assert whole_lines("full/journal.jsonl") == [1, 6, 7, 8]


def test_a_line_that_a_killed_run_has_cut_does_not_spoil_the_lines_after_it():
    os.makedirs("logs")
    Path("logs/journal.jsonl").write_text('{"step": 1}\n{"step": 2, "ti')
    train_guarded(steps=2, log_dir="logs")
    assert whole_lines("logs/journal.jsonl") == [1, 1, 2]


def test_a_file_in_the_directorys_place_costs_one_warning_and_nothing_else(caplog):
    expected = healthy_result(spoil=nan_at(3, 6))
    Path("taken").write_text("mine")
    model, optimizer = train_guarded(spoil=nan_at(3, 6), log_dir="taken")
    assert_one_warning(caplog, "taken")
    assert_same((model.state_dict(), optimizer.base_optimizer.state_dict()), expected)
    assert [report.path for report in optimizer.reports] == [None, None]
    assert Path("taken").read_text() == "mine"


def test_a_read_only_place_costs_one_warning_and_nothing_else(caplog):
    expected = healthy_result(spoil=nan_at(3, 6))
    # The kernel's own tree takes no directories, not even from root.
    model, optimizer = train_guarded(spoil=nan_at(3, 6), log_dir="/sys/sg_logs")
    assert_one_warning(caplog, "/sys/sg_logs")
    assert_same((model.state_dict(), optimizer.base_optimizer.state_dict()), expected)
    assert [report.path for report in optimizer.reports] == [None, None]


def test_a_name_that_no_file_can_have_costs_one_warning_and_nothing_else(caplog):
    expected = healthy_result(spoil=nan_at(3, 6))
    model, optimizer = train_guarded(spoil=nan_at(3, 6), log_dir="n\x00l")
    assert len(warnings(caplog)) == 1
    assert_same((model.state_dict(), optimizer.base_optimizer.state_dict()), expected)


def test_a_directory_removed_in_mid_run_is_made_again_for_the_next_report(caplog):
    expected = healthy_result(spoil=nan_at(3, 6))
    torch.manual_seed(0)
    model = Net()
    optimizer = guard(model, log_dir="logs")
    train(model, optimizer, range(1, 5), spoil=nan_at(3))
    shutil.rmtree("logs")
    train(model, optimizer, range(5, 9), spoil=nan_at(6))
    assert_same((model.state_dict(), optimizer.base_optimizer.state_dict()), expected)
    assert optimizer.reports[1].path == "logs/spike_step6.json"
    assert strictly(Path("logs/spike_step6.json").read_text())["step"] == 6
    steps = [line["step"] for line in lines("logs/journal.jsonl")]
    assert steps[-3:] == [6, 7, 8]
    assert steps == list(range(steps[0], 9))
    assert len(warnings(caplog)) <= 1


def test_a_directory_replaced_by_a_file_in_mid_run_costs_one_warning(caplog):
    expected = healthy_result(spoil=nan_at(3, 6))
    torch.manual_seed(0)
    model = Net()
    optimizer = guard(model, log_dir="logs")
    train(model, optimizer, range(1, 5), spoil=nan_at(3))
    shutil.rmtree("logs")
    Path("logs").write_text("mine")
    train(model, optimizer, range(5, 9), spoil=nan_at(6))
    assert_one_warning(caplog, "logs")
    assert_same((model.state_dict(), optimizer.base_optimizer.state_dict()), expected)
    assert optimizer.reports[1].path is None


def test_a_warning_is_given_once_for_each_guard(caplog):
    Path("taken").write_text("mine")
    for _ in range(2):
        train_guarded(spoil=nan_at(2, 4, 6), log_dir="taken")
    assert len(warnings(caplog)) == 2


def test_writing_files_changes_nothing_in_the_training():
    torch.manual_seed(0)
    model = Net()
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 9):
        base.zero_grad()
        model(batch(step)).backward()
        base.step()
    assert_same((model.state_dict(), base.state_dict()), healthy_result())


def test_a_report_that_cannot_be_put_in_words_leaves_no_stump():
    class Unspeakable:
        def __str__(self):
            raise ValueError("no words")

    journal = Journal("logs")
    journal.on_record(record(1))
    with contextlib.suppress(ValueError):
        journal.on_report(report(1, fault=Unspeakable()))
    journal.close()
    assert os.listdir("logs") == ["journal.jsonl"]


def test_an_interrupt_while_a_report_is_written_leaves_no_stump():
    class Interrupting:
        def __str__(self):
            raise KeyboardInterrupt

    journal = Journal("logs")
    journal.on_record(record(1))
    with pytest.raises(KeyboardInterrupt):
        journal.on_report(report(1, fault=Interrupting()))
    journal.close()
    assert os.listdir("logs") == ["journal.jsonl"]
