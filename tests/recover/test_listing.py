import json
import os
import subprocess
import sys
import time

import pytest

from stabilityguard.cli import main
from stabilityguard.recover.listing import table
from tests.recover.test_manifest import edit, written


def put(directory, step, **options):
    """A small checkpoint of ``step``, and where it lies."""
    path = directory / f"step_{step:08d}"
    written(path, step=step, **{"created": time.time() + 600, **options})
    return path


def rows(directory, **options):
    """The cells of every line below the headline, and whether all are whole."""
    lines, whole = table(directory, **options)
    return [line.split() for line in lines[1:]], whole


def test_each_checkpoint_has_a_line_in_the_order_of_steps(tmp_path):
    put(tmp_path, 2000, state="clean")
    put(tmp_path, 300, created=time.time() - 3600 * 5.5)
    lines, whole = table(tmp_path)
    assert lines[0].split() == ["step", "state", "ranks", "size", "age", "remark"]
    assert [line.split() for line in lines[1:]] == [
        ["300", "verified", "2", "405", "B", "5", "h"],
        ["2000", "clean", "2", "405", "B", "0", "s"],
    ]
    assert whole
    assert all(line == line.rstrip() for line in lines)


def test_the_columns_stand_below_each_other(tmp_path):
    put(tmp_path, 7)
    put(tmp_path, 12345678, stopped=True, created=time.time() - 86400 * 30)
    lines, _ = table(tmp_path)
    assert len({line.index(word) for line, word in zip(lines, ["state", "verified", "verified"], strict=True)}) == 1
    assert lines[2].index("written as") == lines[0].index("remark")


def test_one_that_a_stopped_run_has_left_is_marked(tmp_path):
    put(tmp_path, 7, stopped=True)
    assert table(tmp_path)[0][1].endswith("written as the run was stopped")


@pytest.mark.parametrize("verify", [False, True])
def test_missing_and_cut_files_are_told_of(tmp_path, verify):
    (put(tmp_path, 3) / "a.bin").unlink()
    (put(tmp_path, 6) / "a.bin").write_bytes(b"alp")
    put(tmp_path, 9)
    found, whole = rows(tmp_path, verify=verify)
    assert [row[1] for row in found] == ["broken", "broken", "verified"]
    assert "a.bin" in " ".join(found[0])
    assert " ".join(found[1]).endswith("a.bin has 3 bytes instead of 5")
    assert not whole


def test_changed_files_are_told_of_where_they_are_read(tmp_path):
    (put(tmp_path, 3, state="clean") / "a.bin").write_bytes(b"alphA")
    assert [row[1] for row in rows(tmp_path)[0]] == ["clean"]
    found, whole = rows(tmp_path, verify=True)
    assert (found[0][1], whole) == ("broken", False)
    assert "a.bin is not what was written" in " ".join(found[0])


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"format": 99})])
def test_one_without_a_usable_manifest_is_broken(tmp_path, content):
    path = put(tmp_path, 3)
    (path / "manifest.json").unlink()
    if content is not None:
        (path / "manifest.json").write_text(content)
    found, whole = rows(tmp_path)
    assert (found[0][:2], whole) == (["3", "broken"], False)
    assert "manifest.json" in " ".join(found[0])


SIZES = {0: "0 B", 999: "999 B", 1000: "1 kB", 999_700: "1 MB", 587_000_000: "587 MB", 1_234_000_000_000: "1.234 TB"}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_told_in_three_digits(tmp_path, size):
    path = put(tmp_path, 3, contents={"a.bin": b""})
    edit(path, lambda fields: fields["files"]["a.bin"].update(bytes=size))
    assert f" {SIZES[size]} " in table(tmp_path)[0][1]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-60, "0 s"), (61, "1 min"), (3500, "58 min"), (7201, "2 h"), (86400 * 3 + 9, "3 d")],
)
def test_ages_are_told_in_the_largest_unit(tmp_path, seconds, told):
    put(tmp_path, 3, created=time.time() - seconds)
    assert table(tmp_path)[0][1].endswith(told)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_ends_well_where_all_are_whole(tmp_path, capsys):
    put(tmp_path, 3)
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == table(tmp_path)[0]


def test_the_command_reads_all_files_where_that_is_asked_for(tmp_path, capsys):
    (put(tmp_path, 3) / "a.bin").write_bytes(b"alphA")
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "broken" not in capsys.readouterr().out
    assert main(["checkpoints", "--verify", str(tmp_path)]) == 1
    assert "broken" in capsys.readouterr().out


@pytest.mark.parametrize("files", [[], ["file"], [".unfinished-1/a.bin"]])
def test_an_empty_directory_holds_nothing_and_that_is_well(tmp_path, capsys, files):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"


@pytest.mark.parametrize("name", ["none", "file"])
def test_a_wrong_directory_is_bad_usage(tmp_path, capsys, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", str(tmp_path / name)])
    assert ended.value.code == 2
    assert f"{tmp_path / name} is no directory" in capsys.readouterr().err


def test_the_command_runs_as_a_program(tmp_path):
    (put(tmp_path, 3) / "a.bin").unlink()
    program = "import sys; from stabilityguard.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "checkpoints", str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "a.bin is missing" in ended.stdout
