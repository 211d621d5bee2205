"""The command line, and the demonstration at a tenth of its size."""

import subprocess
import sys

import pytest
import torch

from stabilityguard.cli import main
from stabilityguard.demo import runs
from stabilityguard.demo.gpt import CONTEXT, GPT, draw_batch, read_corpus


@pytest.fixture
def small(monkeypatch):
    """A narrow model and few rows: the same code in seconds."""
    monkeypatch.setattr(runs, "GPT", lambda: GPT(width=32, depth=3, heads=2))
    monkeypatch.setattr(runs, "ROWS", 2)


@pytest.mark.usefixtures("small")
def test_the_demo_shows_a_run_that_dies_and_the_same_run_saved(capsys):
    assert main(["demo", "--steps", "60"]) == 0
    shown = capsys.readouterr().out
    assert "step   30/60  the weights are no longer finite" in shown
    alerts = [line for line in shown.splitlines() if "DETECTED @ step" in line]
    assert [alert.split("@ step ")[1].split()[0] for alert in alerts] == ["18", "30", "42"]
    table = [line.split() for line in shown.splitlines()]
    assert ["18", "spike", "blocks.2.mlp.up", "blocks.2.mlp.up"] in [row[:4] for row in table]
    assert ["30", "nan", "blocks.1.attention.out", "blocks.1.attention.out"] in [row[:4] for row in table]
    assert shown.splitlines()[-3].startswith("clean ")
    assert "died at step 30" in shown.splitlines()[-2]
    assert shown.splitlines()[-1].split()[:5] == ["faults,", "guarded", "60", "57", "3"]
    assert shown.splitlines()[-1].endswith("SAVED")


@pytest.mark.usefixtures("small")
def test_the_demo_fails_where_the_guard_does_not_save_the_run(monkeypatch, capsys):
    monkeypatch.setattr(runs, "_guard", lambda base, model, settings: base)
    assert main(["demo", "--steps", "50"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("NOT SAVED")


def test_a_fault_that_is_named_wrongly_does_not_count_as_saved():
    clean, guarded = runs.Run(name="clean", loss=2.0), runs.Run(name="guarded", loss=2.0)
    assert runs.was_saved(clean, guarded, [])
    assert not runs.was_saved(clean, guarded, runs.Settings().faults.planned)


@pytest.mark.parametrize(("loss", "saved"), [(2.09, True), (2.11, False), (float("nan"), False)])
def test_saved_means_close_to_the_clean_loss(loss, saved):
    assert runs.was_saved(runs.Run(name="clean", loss=2.0), runs.Run(name="guarded", loss=loss), []) is saved


def test_the_corpus_is_the_standard_library_and_the_end_is_held_out():
    corpus, held_out = read_corpus()
    assert corpus.dtype == torch.uint8
    assert len(corpus) > 1_000_000
    assert len(held_out) == (len(corpus) + len(held_out)) // 10
    assert b"import" in bytes(corpus[:100_000].tolist())
    drawn = draw_batch(corpus, 3, torch.Generator().manual_seed(0))
    assert drawn.shape == (3, CONTEXT + 1)
    assert torch.equal(drawn, draw_batch(corpus, 3, torch.Generator().manual_seed(0)))


def test_the_model_predicts_no_byte_from_itself_or_those_after_it():
    torch.manual_seed(0)
    model, text = GPT(width=32, depth=2, heads=2), torch.randint(256, (1, CONTEXT + 1))
    changed = text.clone()
    changed[0, -1] = (text[0, -1] + 1) % 256
    logits = []
    model.head.register_forward_hook(lambda module, args, output: logits.append(output))
    model(text)
    model(changed)
    assert torch.equal(logits[0], logits[1])


def test_too_few_steps_are_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--steps", "49"])
    assert exit_.value.code == 2
    assert "at least 50 are needed" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = (
        "import sys; from stabilityguard.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "demo" in shown
    assert shown.endswith("False\n")
