import json
import os
import shutil
import threading

import pytest
import torch

from stabilityguard import CheckpointPolicy
from stabilityguard.distributed.checkpoint import Contents, read
from stabilityguard.distributed.layout import Box, Portion
from stabilityguard.distributed.peers import ALONE
from stabilityguard.recover.archive import Archive
from stabilityguard.recover.manifest import Manifest, find
from tests.support import assert_same


def archive(directory, **options):
    policy = {"directory": str(directory), "keep": 2, "quarantine": 1, **options}
    return Archive(CheckpointPolicy(**policy), ALONE, {})


TENSORS = {
    "plain": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(2.5),
    "half": torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
}


def portions(tensors):
    """Each tensor as a whole one of a parameter."""
    return [
        Portion(
            f"model.{n}", ("model", n), tuple(t.shape), (Box((0,) * t.dim(), tuple(t.shape)),), ("parameter", n, "")
        )
        for n, t in tensors.items()
    ]


def contents(tensors=TENSORS, **objects):
    return Contents(
        tensors={("parameter", name, ""): tensor for name, tensor in tensors.items()},
        portions=portions(tensors),
        objects={("objects", name): value for name, value in objects.items()},
    )


def put(one, *steps, **options):
    """Writes checkpoints of these steps; a healthy step follows each."""
    for step in steps:
        one.submit(step, contents, **options)
        one.count_healthy_step()


def states(directory):
    return {manifest.step: manifest.state for _, manifest in find(directory)}


def loaded(one, entry, tensors=TENSORS, objects=()):
    """New tensors as they lie in the checkpoint of ``entry``, and the objects."""
    new = {("parameter", name, ""): torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found = one.load(entry, lambda path, manifest: read(path, new, portions(tensors), objects))
    return None if found is None else ({name: tensor for (_, name, _), tensor in new.items()}, found)


def only(one):
    [entry] = one.catalogue.entries
    return entry


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_was_written_is_read_bit_for_bit(tmp_path, asynchronous):
    one = archive(tmp_path, asynchronous=asynchronous)
    one.submit(3, lambda: contents(told={"a": [1, torch.ones(2)]}))
    if asynchronous:
        one.wait()
        one.settle(succeeded=True)
    tensors, objects = loaded(one, only(one), objects=["objects.told"])
    assert_same(tensors, TENSORS)
    assert_same(objects, {"objects.told": {"a": [1, torch.ones(2)]}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_written(tmp_path, caplog, dtype, value):
    one = archive(tmp_path)
    one.submit(3, lambda: contents({"bad": torch.tensor([1.0, value, value]).to(dtype)}))
    assert one.catalogue.entries == []
    assert os.listdir(tmp_path) == []
    assert "model.bad has 2 elements that are NaN or Inf" in caplog.text


def test_a_new_archive_finds_what_was_left(tmp_path):
    put(archive(tmp_path), 3, 6)
    one = archive(tmp_path, quarantine=9)
    one.submit(7, contents, stopped=True)
    one.submit(8, contents)
    found = archive(tmp_path).catalogue.entries
    told = [(entry.step, entry.clean, entry.stopped, entry.reachable) for entry in found]
    assert told == [(3, True, False, False), (6, True, False, False), (7, False, True, False), (8, False, False, False)]


def test_nothing_but_checkpoints_is_left_in_the_directory(tmp_path):
    (tmp_path / ".unfinished-of-a-run-that-died").mkdir()
    put(archive(tmp_path), 3)
    assert os.listdir(tmp_path) == ["step_00000003"]


def test_writing_in_the_background_leaves_alone_what_is_removed_meanwhile(tmp_path):
    one, removal = archive(tmp_path, asynchronous=True), tmp_path / ".unfinished-removal"

    def begun():
        removal.mkdir()
        return contents()

    one.submit(3, begun)
    one.close()
    assert removal.exists()


def test_healthy_steps_count_while_a_checkpoint_is_written(tmp_path):
    one, may_end = archive(tmp_path, asynchronous=True, quarantine=2), threading.Event()
    one.submit(3, lambda: may_end.wait() and contents())
    one.count_healthy_step()
    one.count_healthy_step()
    assert states(tmp_path) == {}
    may_end.set()
    one.wait()
    one.settle(succeeded=True)
    assert states(tmp_path) == {3: "clean"}


@pytest.mark.parametrize(("healthy_steps", "state"), [(1, "verified"), (2, "clean")])
def test_closing_waits_for_a_checkpoint_and_marks_what_has_proved_clean(tmp_path, healthy_steps, state):
    one = archive(tmp_path, asynchronous=True, quarantine=2)
    one.submit(3, contents)
    for _ in range(healthy_steps):
        one.count_healthy_step()
    one.close()
    assert states(tmp_path) == {3: state}


def test_closing_removes_what_was_written_of_a_future_that_was_given_up(tmp_path):
    one = archive(tmp_path, asynchronous=True)
    one.submit(3, contents)
    one.abandon_newer_than(2)
    one.close()
    assert os.listdir(tmp_path) == []


def test_retention_removes_directories_once_a_newer_one_is_marked_clean(tmp_path):
    one = archive(tmp_path, keep=1)
    put(one, 3)
    one.submit(6, contents)
    assert states(tmp_path) == {3: "clean", 6: "verified"}
    one.count_healthy_step()
    assert states(tmp_path) == {6: "clean"}


def test_a_checkpoint_of_the_same_step_is_not_replaced(tmp_path, caplog):
    put(archive(tmp_path), 3)
    one = archive(tmp_path, quarantine=9)
    one.submit(3, lambda: contents({"other": torch.ones(1)}))
    assert states(tmp_path) == {3: "clean"}
    assert "step_00000003 exists" in caplog.text


def test_what_is_newer_than_a_state_that_was_put_in_place_is_put_aside(tmp_path, caplog):
    one = archive(tmp_path)
    put(one, 3, 6)
    one.begin(4)
    assert states(tmp_path) == {3: "clean"}
    assert "step 6 is put aside" in caplog.text
    (aside,) = tmp_path.glob("aside_step_00000006_*")
    assert list(Manifest.read(aside).problems(aside)) == []
    put(one, 6)
    assert states(tmp_path) == {3: "clean", 6: "clean"}


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "missing"])
def test_damage_is_noticed_before_anything_is_read(tmp_path, caplog, file, how):
    one = archive(tmp_path)
    put(one, 3)
    path = one.path(3) / file
    path.unlink() if how == "missing" else path.write_bytes(path.read_bytes()[:-1])
    entry = only(one)
    assert one.load(entry, lambda path, manifest: pytest.fail("it was read")) is None
    assert entry.broken
    assert one.catalogue.targets == []
    assert file in caplog.text


def test_every_single_flipped_byte_of_the_files_is_noticed(tmp_path):
    one = archive(tmp_path)
    put(one, 3)
    manifest = Manifest.read(one.path(3))
    for name in manifest.files:
        content = (one.path(3) / name).read_bytes()
        for place in range(0, len(content), 97):
            (one.path(3) / name).write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            assert list(manifest.problems(one.path(3))) == [f"{name} is not what was written: its digest differs"]
        (one.path(3) / name).write_bytes(content)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"plain": torch.zeros(3, 2)}, "model.plain has the shape (2, 3), but is (3, 2) here"),
        ({"none": torch.zeros(1)}, "it holds no model.none"),
    ],
)
def test_a_checkpoint_of_something_else_is_not_read(tmp_path, caplog, wanted, told):
    one = archive(tmp_path)
    put(one, 3)
    assert loaded(one, only(one), wanted) is None
    assert told in caplog.text


def test_an_error_in_reading_is_a_warning(tmp_path, caplog):
    one = archive(tmp_path)
    put(one, 3)
    assert one.load(only(one), lambda path, manifest: 1 / 0) is None
    assert "the checkpoint of step 3 cannot be used" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("step", [None, "three", 7])
def test_a_manifest_whose_step_is_another_than_that_of_its_directory_is_not_used(tmp_path, step):
    put(archive(tmp_path), 3, 6)
    path = tmp_path / "step_00000003" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": step}))
    assert [entry.step for entry in archive(tmp_path).catalogue.entries if not entry.broken] == [6]


def test_a_copy_beside_a_checkpoint_is_no_checkpoint(tmp_path):
    put(archive(tmp_path), 3, 6)
    shutil.copytree(tmp_path / "step_00000006", tmp_path / "step_00000006_mine")
    one = archive(tmp_path)
    assert [entry.step for entry in one.catalogue.entries] == [3, 6]
    one.resumed(6)
    put(one, 9)
    assert (tmp_path / "step_00000006").exists()


@pytest.mark.parametrize("gone", [6, 9])
def test_the_newest_clean_one_stays_where_one_on_probation_was_removed_by_hand(tmp_path, gone):
    one = archive(tmp_path, keep=1, quarantine=2)
    put(one, 3, 6, 9)
    assert states(tmp_path) == {6: "clean", 9: "verified"}
    shutil.rmtree(one.path(gone))
    one.count_healthy_step()
    assert states(tmp_path) == {15 - gone: "clean"}
    put(one, 12, 13, 14)
    assert states(tmp_path) == {13: "clean", 14: "verified"}
