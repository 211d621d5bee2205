import dataclasses
import json
import os

import pytest

from stabilityguard import CheckpointError
from stabilityguard.recover.manifest import CHUNK, FileEntry, Manifest, describe, find


def written(directory, *, step=7, contents=None, **fields):
    """A checkpoint's directory with files of these contents, and its manifest."""
    contents = {"a.bin": b"alpha", "b.bin": b"beta" * 100} if contents is None else contents
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    files = {name: describe(directory / name) for name in contents}
    told = {"state": "verified", "world_size": 2, "torch": "2.13", "created": 1.5, "elements": 9, "stopped": False}
    manifest = Manifest(step=step, files=files, **{**told, **fields})
    manifest.write(directory)
    return manifest


def edit(directory, change):
    path = directory / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


# Writing and reading --------------------------------------------------------------------------------------------------


def test_what_was_written_is_read(tmp_path):
    manifest = written(tmp_path, state="clean", stopped=True)
    assert Manifest.read(tmp_path) == manifest
    assert manifest.bytes == 405
    assert list(manifest.problems(tmp_path)) == []
    assert list(manifest.gaps(tmp_path)) == []


def test_a_manifest_replaces_the_former_one_and_leaves_no_other_file(tmp_path):
    manifest = dataclasses.replace(written(tmp_path), state="clean")
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path).state == "clean"
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "b.bin", "manifest.json"]


def test_a_manifest_that_cannot_be_written_whole_leaves_the_former_one(tmp_path):
    manifest = written(tmp_path)
    cut = dataclasses.replace(manifest, state="clean", torch=object())  # fails in the middle of the file
    with pytest.raises(TypeError):
        cut.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_files_of_every_size_are_described(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    before = describe(path)
    assert (before.bytes, len(before.blake2b)) == (size, 64)
    path.write_bytes(bytes(size) + b"x")
    assert describe(path).blake2b != before.blake2b


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    manifest = written(tmp_path)
    (tmp_path / "a.bin").unlink()
    assert list(manifest.gaps(tmp_path)) == ["a.bin is missing"]
    assert list(manifest.problems(tmp_path)) == ["a.bin: No such file or directory"]


def test_a_file_that_became_a_directory_is_named(tmp_path):
    manifest = written(tmp_path)
    (tmp_path / "a.bin").unlink()
    (tmp_path / "a.bin").mkdir()
    assert [text.partition(":")[0] for text in manifest.problems(tmp_path)] == ["a.bin"]


@pytest.mark.parametrize("content", [b"", b"alph", b"alpha!"])
def test_a_file_of_another_size_is_named(tmp_path, content):
    manifest = written(tmp_path)
    (tmp_path / "a.bin").write_bytes(content)
    told = [f"a.bin has {len(content)} bytes instead of 5"]
    assert (list(manifest.gaps(tmp_path)), list(manifest.problems(tmp_path))) == (told, told)


@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, CHUNK + 9])
def test_a_flipped_bit_is_found_by_reading_only(tmp_path, place):
    content = bytearray(CHUNK + 10)
    manifest = written(tmp_path, contents={"a.bin": bytes(content)})
    content[place] ^= 1
    (tmp_path / "a.bin").write_bytes(content)
    assert list(manifest.gaps(tmp_path)) == []
    assert list(manifest.problems(tmp_path)) == ["a.bin is not what was written: its digest differs"]


def test_every_damaged_file_is_named_and_only_those_that_were_asked_for(tmp_path):
    manifest = written(tmp_path)
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).unlink()
    assert len(list(manifest.problems(tmp_path))) == len(list(manifest.gaps(tmp_path))) == 2
    assert list(manifest.problems(tmp_path, [])) == []
    assert [text[:5] for text in manifest.problems(tmp_path, ["b.bin"])] == ["b.bin"]


def test_further_files_do_not_matter(tmp_path):
    manifest = written(tmp_path)
    (tmp_path / "note.txt").write_text("mine")
    assert list(manifest.problems(tmp_path)) == []


# Manifests that cannot be used ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"null", b'"text"', b"{}", b"\xff\xfe", b'{"format": 1}', b'{"format": 2}']
)
def test_a_manifest_that_is_none_cannot_be_read(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("key", ["format", "files", *(f.name for f in dataclasses.fields(Manifest))])
def test_a_manifest_without_one_of_its_fields_cannot_be_read(tmp_path, key):
    written(tmp_path)
    edit(tmp_path, lambda fields: fields.pop(key))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(FileEntry)])
def test_a_manifest_without_size_or_digest_of_a_file_cannot_be_read(tmp_path, field):
    written(tmp_path)
    edit(tmp_path, lambda fields: fields["files"]["a.bin"].pop(field))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(tmp_path)


def test_a_later_format_is_refused_by_its_name(tmp_path):
    written(tmp_path)
    edit(tmp_path, lambda fields: fields.update(format=2))
    with pytest.raises(CheckpointError, match="format"):
        Manifest.read(tmp_path)


def test_a_directory_without_a_manifest_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        Manifest.read(tmp_path / "none")


# Finding --------------------------------------------------------------------------------------------------------------


def test_checkpoints_are_found_by_step_with_those_that_are_broken(tmp_path):
    for step in (12, 3, 100):
        written(tmp_path / f"step_{step:08d}", step=step)
    (tmp_path / "step_00000003" / "manifest.json").write_text("{")
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_file").write_text("")
    (tmp_path / ".unfinished-1").mkdir()
    (tmp_path / "other").mkdir()
    found = [(path.name, getattr(manifest, "step", None)) for path, manifest in find(tmp_path)]
    steps = {3: None, 7: None, 12: 12, 100: 100}
    assert found == [(f"step_{step:08d}", told) for step, told in steps.items()]


def test_nothing_is_found_where_there_is_nothing(tmp_path):
    assert list(find(tmp_path)) == []
    assert list(find(tmp_path / "none")) == []
