"""The command line, and the demonstration at a tenth of its size."""

import subprocess
import sys

import pytest
import torch

from stabilityguard.cli import main
from stabilityguard.demo import launch, runs
from stabilityguard.demo.gpt import CONTEXT, GPT, draw_batch, read_corpus, stage_of
from stabilityguard.demo.job import main as job
from stabilityguard.demo.outcome import Run, trip_table, was_saved
from stabilityguard.demo.settings import STRATEGIES, Settings

SMALL = ["--width", "32", "--depth", "3", "--rows", "2"]
"""A narrow model and few rows: the same code in seconds."""

PLANNED = runs.plan_faults(Settings()).planned


def test_the_demo_shows_a_run_that_dies_and_the_same_run_saved(capsys):
    assert main(["demo", "--steps", "60", *SMALL]) == 0
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


def test_the_demo_fails_where_the_guard_does_not_save_the_run(monkeypatch, capsys):
    monkeypatch.setattr(runs, "_guard", lambda base, model, settings: base)
    assert main(["demo", "--steps", "50", "--quick", *SMALL]) == 1
    assert capsys.readouterr().out.rstrip().endswith("NOT SAVED")


def test_a_fault_that_is_named_wrongly_does_not_count_as_saved():
    clean, guarded = Run(name="clean", loss=2.0), Run(name="guarded", loss=2.0)
    assert was_saved(clean, guarded, [])
    assert not was_saved(clean, guarded, PLANNED)
    assert [line.split()[-2:] for line in trip_table(PLANNED, guarded)[1:]] == [["nothing", "-"]] * 3


@pytest.mark.parametrize(("loss", "saved"), [(2.09, True), (2.11, False), (float("nan"), False)])
def test_saved_means_close_to_the_clean_loss(loss, saved):
    assert was_saved(Run(name="clean", loss=2.0), Run(name="guarded", loss=loss), []) is saved


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


def test_every_block_has_a_stage_and_no_stage_lags_behind():
    for depth in range(1, 9):
        for stages in range(1, depth + 1):
            held = [stage_of(block, depth, stages) for block in range(depth)]
            assert held == sorted(held)
            counts = [held.count(stage) for stage in range(stages)]
            assert max(counts) - min(counts) <= 1
            assert min(counts) >= 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "49"], "at least 50 are needed"),
        (["--depth", "2"], "at least 3 are needed"),
        (["--width", "30"], "must be a multiple of 4"),
        (["--rows", "0"], "at least 1 are needed"),
        (["--ranks", "0"], "ddp needs at least 2 ranks, but the number of ranks is 0"),
        (["--ranks", "2", "--strategy", "hsdp"], "hsdp needs an even number of ranks, at least 4"),
        (["--ranks", "3", "--strategy", "tp"], "tp needs 2 or 4 ranks"),
        (["--ranks", "5", "--strategy", "pp"], "pp needs 2 ranks or more, --depth at most"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(arguments, reason, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", *arguments])
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_job_without_torchrun_says_so(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as exit_:
        job([])
    assert exit_.value.code == 2
    assert "ddp needs at least 2 ranks, but the number of ranks is 1" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_ranks_are_launched_with_all_that_was_asked_for(strategy, monkeypatch):
    launched = []

    def run(command, **options):
        launched.append((command, options))
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(launch.subprocess, "run", run)
    asked = ["--strategy", strategy, "--steps", "70", "--seed", "3", "--log-dir", "a b", "--rows", "8", "--quick"]
    assert main(["demo", "--ranks", "4", *asked]) == 7
    ((command, options),) = launched
    assert command[:6] == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert command[6:8] == ["-m", "stabilityguard.demo.job"]
    told = command[8:]
    assert all(" ".join(asked[i : i + 2]) in " ".join(told) for i in range(0, len(asked) - 1, 2))
    assert told[-1] == "--quick"
    assert int(options["env"]["OMP_NUM_THREADS"]) >= 1


def test_help_needs_no_torch():
    code = (
        "import sys; from stabilityguard.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "demo" in shown
    assert shown.endswith("False\n")
