import contextlib
import io
import math
import pty
import re
import sys
import unicodedata
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from stabilityguard import Budget, GradientSpikeError, GuardedOptimizer
from stabilityguard.report.console import Console, number
from stabilityguard.report.records import LayerReadings, SpikeReport, StepRecord
from tests.support import Net, batch, guard, train

ALERT = """\
╔══════════════════════════════════════════════════════════════╗
║  ⚠ STABILITYGUARD — SPIKE DETECTED @ step 847                ║
╠══════════════════════════════════════════════════════════════╣
║  Trigger layer  : transformer.h.11.mlp.c_proj                ║
║  Grad norm      : 847.3  (baseline: 1.2, ratio: 706.1x)      ║
║  Action taken   : optimizer.step() SKIPPED                   ║
║  Loss (pre-skip): 14.71                                      ║
╚══════════════════════════════════════════════════════════════╝
stabilityguard.log written → ./sg_logs/spike_step847.json
"""

ASCII_ALERT = """\
+==============================================================+
|  ! STABILITYGUARD - SPIKE DETECTED @ step 847                |
+==============================================================+
|  Trigger layer  : transformer.h.11.mlp.c_proj                |
|  Grad norm      : 847.3  (baseline: 1.2, ratio: 706.1x)      |
|  Action taken   : optimizer.step() SKIPPED                   |
|  Loss (pre-skip): 14.71                                      |
+==============================================================+
stabilityguard.log written > ./sg_logs/spike_step847.json
"""


def record(
    step=847, action="skip", kind="spike", layer="transformer.h.11.mlp.c_proj", norm=847.3, loss=14.71, **fields
):
    """A record made by hand, of one layer with baseline 1.2."""
    norms, baselines = (torch.tensor([value], dtype=torch.float64) for value in (norm, 1.2))
    readings = LayerReadings(
        places={layer or "quiet": 0},
        norms=norms,
        baselines=baselines,
        ratios=norms / baselines,
        present=torch.tensor([True]),
    )
    return StepRecord(
        step=step,
        action=action,
        kind=kind,
        trigger_layer=layer,
        ratio=norm / 1.2,
        global_norm=norm,
        loss=loss,
        layers=readings,
        **fields,
    )


def report(path="./sg_logs/spike_step847.json", **fields):
    """A report made by hand of such a record."""
    one = record(**fields)
    trigger = {
        "layer": one.trigger_layer,
        "kind": one.kind,
        "norm": one.global_norm,
        "baseline": 1.2,
        "ratio": one.ratio,
        "elements": None,
        "nan_elements": None,
        "inf_elements": None,
    }
    return SpikeReport(
        record=replace(one, reason="a test"), details={"trigger": trigger if one.trigger_layer else None}, path=path
    )


# Terminals differ in what they make of these: spacing marks, variation selectors, the loose parts of a Hangul syllable.
LETTERS = st.characters(
    codec=None,
    exclude_categories=["Mc"],
    exclude_characters=[
        chr(c) for block in ((0xFE00, 0xFE10), (0x1160, 0x1200), (0xD7B0, 0xD800)) for c in range(*block)
    ],
)


def printed(told, stream=None):
    """What the console prints of a report."""
    stream = stream or io.StringIO()
    Console(0, stream).on_report(told)
    return stream.getvalue()


def columns(text):
    """Columns on a terminal: two for wide characters, none for marks that join the letter before them."""

    def of(character):
        if unicodedata.category(character) in ("Mn", "Me"):
            return 0
        return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1

    return sum(map(of, text))


def assert_straight(box):
    """Every row of the box is as wide as the others, and begins and ends with an edge."""
    widths = {columns(row) for row in box}
    assert len(widths) == 1, "\n".join(box)
    assert all(row[0] + row[-1] in ("║║", "||", "╔╗", "╠╣", "╚╝", "++") for row in box)
    assert all(
        unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for row in box for character in row
    )


def nested(path):
    """A model with one weight, in a module of that qualified name."""
    root = module = nn.Module()
    *parents, last = path.split(".")
    for name in parents:
        module.add_module(name, nn.Module())
        module = getattr(module, name)
    module.add_module(last, nn.Linear(1, 1, bias=False))
    return root


# The box ---------------------------------------------------------------------------------------------------------


def test_the_alert_of_a_real_spike_is_printed_character_for_character_as_documented(capsys):
    model = nested("transformer.h.11.mlp.c_proj")
    (weight,) = model.parameters()
    optimizer = GuardedOptimizer(torch.optim.SGD([weight], lr=0.0), model, log_every=0)
    for step in range(1, 848):
        weight.grad = torch.full((1, 1), 847.3 if step == 847 else 1.2)
        optimizer.step(loss=14.71)
    assert capsys.readouterr().out == ALERT


def test_an_alert_made_of_the_documented_numbers_is_the_documented_one():
    assert printed(report()) == ALERT


def test_a_file_that_was_not_written_is_said_so():
    assert printed(report(path=None)).splitlines()[-1] == "stabilityguard.log not written"


@settings(max_examples=300, deadline=None)
@given(name=st.text(LETTERS, max_size=160))
@example("")
@example("a" * 10_000)
@example("層" * 300)
@example("e\u0301" * 200)
@example("\u0e01\u0e31\u0e49" * 5)
@example("क\u0947" * 70)
@example("\u20dd" * 10)
@example("\x1b[31m\x07\r\n\t\x00")
@example("\u202e\u200b\u200d\ufeff")
@example("\ud800")
@example("Ｗide" + "x" * 99)
def test_the_right_edge_is_straight_whatever_the_name(name):
    *box, last = printed(report(layer=name or None)).split("\n")[:-1]
    assert len(box) == (8 if name else 7)
    assert_straight(box)
    assert 64 <= columns(box[0]) <= 118
    assert last.startswith("stabilityguard.log written")


@settings(max_examples=100, deadline=None)
@given(
    norm=st.floats(min_value=0) | st.just(math.nan),
    loss=st.floats(allow_nan=True, allow_infinity=True) | st.none(),
    step=st.integers(1, 10**18),
)
def test_the_right_edge_is_straight_whatever_the_numbers(norm, loss, step):
    *box, _ = printed(report(norm=norm, loss=loss, step=step)).splitlines()
    assert_straight(box)


def test_the_box_is_as_narrow_as_documented_until_a_line_needs_more():
    fits, wider = "n" * (62 - 4 - 17), "n" * (62 - 4 - 17 + 1)
    assert columns(printed(report(layer=fits)).splitlines()[0]) == 64
    assert columns(printed(report(layer=wider)).splitlines()[0]) == 65
    assert f"║  Trigger layer  : {wider}  ║" in printed(report(layer=wider)).splitlines()


def test_a_name_beyond_the_widest_box_loses_its_middle():
    name = "first." + "m" * 200 + ".last"
    row = printed(report(layer=name)).splitlines()[3]
    assert row.startswith("║  Trigger layer  : first.mmm")
    assert row.endswith("mmm.last  ║")
    assert row.count("…") == 1
    assert columns(row) == 118


# Colour ----------------------------------------------------------------------------------------------------------


def on_a_terminal(told, monkeypatch, **variables):
    """What the console sends to a terminal in such an environment."""
    ours, theirs = pty.openpty()
    with monkeypatch.context() as patch, open(ours, "rb", buffering=0) as screen:
        for name in ("NO_COLOR", "TERM"):
            patch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm", **variables}.items():
            patch.setenv(name, value)
        with open(theirs, "w", encoding="utf-8") as terminal:
            Console(0, terminal).on_report(told)
            terminal.write("\x04")
            terminal.flush()
            sent = b""
            while not sent.endswith(b"\x04"):
                sent += screen.read(65536)
    return sent[:-1].decode().replace("\r\n", "\n")


def test_an_alert_is_coloured_on_a_terminal_and_otherwise_the_same(monkeypatch, tmp_path):
    sent = on_a_terminal(report(), monkeypatch)
    assert sent.startswith("\x1b[")
    assert sent.rstrip("\n").endswith("\x1b[0m")
    assert re.sub(r"\x1b\[[0-9;]*m", "", sent) == ALERT


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_that_wants_no_colour_gets_none(variables, monkeypatch):
    assert on_a_terminal(report(), monkeypatch, **variables) == ALERT


def test_there_is_no_colour_where_there_is_no_terminal(tmp_path):
    with open(tmp_path / "out", "w+", encoding="utf-8") as file:
        Console(0, file).on_report(report())
        file.seek(0)
        assert file.read() == ALERT


# Encodings -------------------------------------------------------------------------------------------------------


def encoded(told, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    Console(0, stream).on_report(told)
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_the_alert_is_plain_where_the_stream_lacks_box_characters(encoding):
    assert encoded(report(), encoding) == ASCII_ALERT


@pytest.mark.parametrize(
    "encoding", ["ascii", "latin-1", "cp1252", "cp437", "cp932", "euc_jp", "gbk", "big5", "koi8-r"]
)
@pytest.mark.parametrize(
    "name",
    ["plain", "größe", "層.出力", "слой", "λ" * 200, "層" * 100, "e\u0301" * 60],
    ids=["ascii", "latin", "wide", "cyrillic", "long", "long and wide", "combining"],
)
def test_the_right_edge_is_straight_in_every_encoding(encoding, name):
    *box, _ = encoded(report(layer=name), encoding).splitlines()
    assert len(box) == 8
    assert_straight(box)


def test_a_stream_that_takes_utf8_gets_the_documented_box():
    assert encoded(report(), "utf-8") == ALERT


# Where it is printed ----------------------------------------------------------------------------------------------


def test_nothing_at_all_is_printed_unless_verbose(capfd):
    model = Net()
    optimizer = guard(model, log_every=1, budget=Budget(consecutive_skips=2))

    def spoil(step, model):
        if step in (4, 6, 7):
            model.head.weight.grad[0, 0] = torch.nan

    optimizer.veto("no")
    with contextlib.suppress(GradientSpikeError):
        train(model, optimizer, range(1, 9), spoil=spoil)
    optimizer.close()
    assert len(optimizer.reports) == 3
    assert capfd.readouterr() == ("", "")


def test_a_standard_output_redirected_later_is_followed():
    model = Net()
    optimizer = guard(model, verbose=True, log_every=1)
    first, second = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(first):
        train(model, optimizer, [1])
    with contextlib.redirect_stdout(second):
        train(model, optimizer, [2])
    assert "step 1 " in first.getvalue()
    assert "step 2 " not in first.getvalue()
    assert "step 2 " in second.getvalue()


def test_output_goes_to_stdout_and_not_to_stderr(capfd):
    model = Net()
    train(model, guard(model, verbose=True, log_every=2), range(1, 5))
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 2
    assert err == ""


def test_a_closed_standard_output_does_not_stop_the_training(caplog):
    model = Net()
    optimizer = guard(model, verbose=True, log_every=1)
    stream = io.StringIO()
    stream.close()
    with contextlib.redirect_stdout(stream):
        train(model, optimizer, range(1, 5))
    assert [entry.name for entry in caplog.records] == ["stabilityguard"]
    assert "Console" in caplog.text
    assert optimizer.last_record.step == 4


def test_a_process_without_standard_output_trains_on(monkeypatch, caplog):
    model = Net()
    optimizer = guard(model, verbose=True, log_every=1)
    monkeypatch.setattr(sys, "stdout", None)
    train(model, optimizer, range(1, 5))
    assert optimizer.last_record.step == 4
    assert caplog.records == []


# Summaries -------------------------------------------------------------------------------------------------------


def summaries(steps, capsys, *, veto=(), spoil=None, **options):
    model = Net()
    optimizer = guard(model, verbose=True, **options)
    capsys.readouterr()
    for step in range(1, steps + 1):
        if step in veto:
            optimizer.veto("a test")
        train(model, optimizer, [step], spoil=spoil)
    lines = capsys.readouterr().out.splitlines()
    return optimizer, [line for line in lines if line.startswith("stabilityguard | step") and "grad norm" in line]


def test_a_summary_is_printed_every_log_every_steps(capsys):
    _, lines = summaries(12, capsys, log_every=5)
    assert [line.split(" | ")[1] for line in lines] == ["step 5", "step 10"]


def test_no_summary_is_printed_where_log_every_is_zero(capsys):
    assert summaries(12, capsys, log_every=0)[1] == []


def test_a_summary_tells_loss_norm_worst_layer_and_counts(capsys):
    def spoil(step, model):
        if step in (3, 5):
            model.head.weight.grad[0, 0] = torch.nan

    optimizer, lines = summaries(8, capsys, log_every=8, spoil=spoil)
    last = optimizer.last_record
    name, ratio = last.worst_layer
    assert lines == [
        f"stabilityguard | step 8 | loss {number(last.loss)} | grad norm {number(last.global_norm)}"
        f" | worst {name} ({number(ratio)}x) | trips 2, skipped 2"
    ]


def test_a_summary_leaves_out_what_is_not_known():
    stream = io.StringIO()
    readings = LayerReadings(
        places={"layer": 0},
        norms=torch.ones(1, dtype=torch.float64),
        baselines=torch.full((1,), torch.nan, dtype=torch.float64),
        ratios=torch.full((1,), torch.nan, dtype=torch.float64),
        present=torch.tensor([True]),
    )
    Console(1, stream).on_record(StepRecord(step=1, action="step", global_norm=1.0, layers=readings))
    assert stream.getvalue() == "stabilityguard | step 1 | grad norm 1.0 | trips 0, skipped 0\n"


def test_a_step_that_the_user_vetoed_is_told_in_a_line_and_counted_as_skipped_but_not_as_a_trip(capsys):
    model = Net()
    optimizer = guard(model, verbose=True, log_every=3)
    train(model, optimizer, [1])
    optimizer.veto("a test")
    train(model, optimizer, [2, 3])
    told, summary = capsys.readouterr().out.splitlines()
    assert told == "stabilityguard | step 2 | optimizer.step() skipped | veto: a test"
    assert summary.endswith("trips 0, skipped 1")


def test_an_overflow_left_to_the_scaler_is_told_in_a_line_and_no_box(capsys):
    model = Net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = guard(model, verbose=True, log_every=0, scaler=scaler)
    scaler.scale(model(batch(1))).backward()
    model.head.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    told = capsys.readouterr().out
    reason = "the gradients overflowed, which is left to the GradScaler"
    assert told == f"stabilityguard | step 1 | optimizer.step() skipped | {reason}\n"


def test_a_summary_is_one_line_of_printable_characters_whatever_the_name():
    stream = io.StringIO()
    Console(1, stream).on_record(record(action="step", kind=None, layer="a\nb\x1b[2Jc"))
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()


# Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.0, "1.0"),
        (1.2, "1.2"),
        (847.3, "847.3"),
        (706.0833, "706.1"),
        (999_999.0, "999999.0"),
        (1e6, "1e+06"),
        (1.2345e20, "1.23e+20"),
        (0.5, "0.5"),
        (0.012345, "0.0123"),
        (1.2e-7, "1.2e-07"),
        (-3.14159, "-3.1"),
        (-0.25, "-0.25"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
    ],
)
def test_a_number_is_short_and_readable(value, text):
    assert number(value) == text


def test_a_loss_has_two_decimals():
    assert [number(value, 2) for value in (14.706, 2.0, -14.706, 0.69314)] == ["14.71", "2.00", "-14.71", "0.693"]


# What the alerts say ----------------------------------------------------------------------------------------------


def alert(capsys, *, bad, change=None, loss=None, steps=8, **options):
    """The text of the last alert of a real run whose steps ``bad`` are spoilt."""
    model = Net()
    optimizer = guard(model, verbose=True, log_every=0, warmup_steps=3, **options)
    capsys.readouterr()
    with contextlib.suppress(GradientSpikeError):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(batch(step)).backward()
            if step in bad and change is not None:
                change(model)
            optimizer.step(loss=loss if step in bad else None)
    *_, last = capsys.readouterr().out.split("╔")
    rows = last.splitlines()[:-1]
    assert_straight(["╔" + rows[0], *rows[1:]])
    return optimizer, [row.strip("║").strip() for row in rows if row.startswith("║")]


def poison(model):
    model.head.weight.grad[0, :3] = torch.nan
    model.head.weight.grad[0, 4] = torch.inf


def explode(model):
    model.head.weight.grad *= 1e4


def test_an_alert_of_a_nan_names_layer_and_counts_the_elements(capsys):
    optimizer, text = alert(capsys, bad={8}, change=poison)
    trip = optimizer.reports[-1]
    baseline = number(trip.details["trigger"]["baseline"])
    assert text == [
        "⚠ STABILITYGUARD — NAN DETECTED @ step 8",
        "Trigger layer  : head",
        f"Grad norm      : nan  (baseline: {baseline}; 3 NaN, 1 Inf of 9 elements)",
        "Action taken   : optimizer.step() SKIPPED",
        f"Loss (pre-skip): {number(trip.record.loss, 2)}",
    ]


def test_an_alert_in_warm_up_says_that_there_is_no_baseline(capsys):
    _, text = alert(capsys, bad={1}, change=poison, steps=1)
    assert text[2] == "Grad norm      : nan  (no baseline yet; 3 NaN, 1 Inf of 9 elements)"


def test_an_alert_of_an_overflow_says_that_every_element_is_finite(capsys):
    _, text = alert(capsys, bad={8}, change=lambda model: model.head.weight.grad.fill_(1e20))
    assert text[0] == "⚠ STABILITYGUARD — OVERFLOW DETECTED @ step 8"
    assert text[2].startswith("Grad norm      : 2.83e+20  (baseline: ")
    assert text[2].endswith("x; every element is finite)")


def test_an_alert_of_a_bad_loss_alone_blames_no_layer_and_shows_no_norm(capsys):
    _, text = alert(capsys, bad={8}, loss=math.nan)
    assert text == [
        "⚠ STABILITYGUARD — NAN DETECTED @ step 8",
        "Trigger layer  : (the loss; every gradient is finite)",
        "Action taken   : optimizer.step() SKIPPED",
        "Loss (pre-skip): nan",
    ]
    assert alert(capsys, bad={8}, loss=-math.inf)[1][0] == "⚠ STABILITYGUARD — INF DETECTED @ step 8"


def test_an_alert_without_a_loss_has_no_loss_line():
    assert "Loss" not in printed(report(loss=None))


def test_an_alert_of_a_rollback_says_where_to_and_why(capsys):
    _, text = alert(capsys, bad={8}, change=poison, nan_action="rollback")
    assert text[3:5] == [
        "Action taken   : ROLLED BACK to the end of step 0",
        'Reason         : nan_action is "rollback"',
    ]
    assert text[5].startswith("Loss           : ")


def test_an_alert_of_a_raise_says_what_was_raised_and_why(capsys):
    _, text = alert(capsys, bad={8}, change=explode, nan_action="raise")
    assert text[0] == "⚠ STABILITYGUARD — SPIKE DETECTED @ step 8"
    assert text[3:5] == ["Action taken   : RAISED GradientSpikeError", 'Reason         : nan_action is "raise"']


def test_an_alert_of_an_accepted_level_says_that_the_step_was_applied(capsys):
    optimizer, text = alert(capsys, bad={7, 8}, change=explode, budget=Budget(consecutive_skips=2))
    assert text[3:5] == [
        "Action taken   : optimizer.step() APPLIED, the new level ACCEPTED as baseline",
        "Reason         : trip 2 of 2 in a row, which ends skipping: the level is new",
    ]
    assert text[5].startswith("Loss           : ")
    assert optimizer.last_record.applied


def test_an_alert_of_a_scaler_that_does_not_recover_names_the_layer(capsys):
    model = Net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = guard(model, verbose=True, log_every=0, scaler=scaler, budget=Budget(consecutive_skips=1))

    def overflow_for_ever():
        for step in range(1, 40):
            optimizer.zero_grad()
            scaler.scale(model(batch(step))).backward()
            model.head.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(GradientSpikeError, match="scaler"):
        overflow_for_ever()
    lines, box = capsys.readouterr().out.split("╔")
    assert "║  Trigger layer  : head  " in box
    assert "║  Action taken   : RAISED GradientSpikeError  " in box
    assert len(lines.splitlines()) == optimizer.reports[0].record.step - 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(LETTERS.filter(lambda c: c != "."), max_size=60))
def test_a_real_guard_prints_a_straight_box_whatever_its_layer_is_called(name, tmp_path):
    model = nested("0" + name)
    (weight,) = model.parameters()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        optimizer = GuardedOptimizer(torch.optim.SGD([weight], lr=0.1), model, log_dir=tmp_path / "logs", log_every=0)
        weight.grad = torch.full((1, 1), torch.nan)
        optimizer.step()
    optimizer.close()
    *box, last = out.getvalue().split("\n")[:-1]
    assert_straight(box)
    assert last == f"stabilityguard.log written → {optimizer.reports[0].path}"
