"""The manifest of a checkpoint: what its directory should hold, and what the checkpoint has proved to be."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stabilityguard.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1
"""Version of the manifest; readers refuse others."""

CHUNK = 1 << 20
"""Bytes of a file that are digested at once."""

State = Literal["verified", "clean"]

Exports = Mapping[str, Callable[[Path], None]]
"""What writes the state, as others keep it, into a new directory that all ranks see, by its name within a checkpoint.

Collective calls."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file as it was when it had been written."""

    bytes: int
    blake2b: str
    """Hexadecimal digest of 32 bytes."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of one checkpoint."""

    step: int
    """1-based count of ``step()`` calls at whose end the state was copied."""

    state: State
    """``"verified"``: whole, read back and finite; ``"clean"``: healthy steps followed, too."""

    world_size: int
    torch: str
    """Version that wrote it."""

    created: float
    """Seconds since 1970."""

    elements: int
    """Elements of weights and moments that the ranks hold together, replicas included; all are finite."""

    stopped: bool
    """Whether it was written because the run was asked to stop; ``resume()`` goes on from it."""

    files: Mapping[str, FileEntry]
    """By name within the directory."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.bytes for entry in self.files.values())

    def write(self, directory: Path) -> None:
        """Puts the manifest into ``directory``, whole or not at all."""
        temporary = directory / f".{NAME}.new"
        with temporary.open("w", encoding="ascii") as file:
            json.dump({"format": FORMAT, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / NAME)
        sync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest in ``directory``.

        Raises:
            CheckpointError: there is none, or it cannot be understood.
        """
        try:
            fields: dict[str, Any] = json.loads((directory / NAME).read_text(encoding="ascii"))
            if fields.pop("format") != FORMAT:
                raise CheckpointError(f"{directory / NAME} has a format that this version does not know")
            files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
            return cls(files=files, **fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{directory / NAME} cannot be read: {type(error).__name__}: {error}") from error

    def problems(self, directory: Path, names: Iterable[str] | None = None) -> Iterator[str]:
        """What is wrong with the files: missing, cut, or changed. Reads all bytes of the named ones (None: of all)."""
        for name in self.files if names is None else names:
            try:
                found = describe(directory / name)
            except OSError as error:
                yield f"{name}: {error.strerror or error}"
                continue
            if found.bytes != self.files[name].bytes:
                yield f"{name} has {found.bytes} bytes instead of {self.files[name].bytes}"
            elif found != self.files[name]:
                yield f"{name} is not what was written: its digest differs"

    def gaps(self, directory: Path) -> Iterator[str]:
        """The same as far as sizes tell: reads no file."""
        for name, entry in self.files.items():
            with contextlib.suppress(OSError):
                size = (directory / name).stat().st_size
                if size != entry.bytes:
                    yield f"{name} has {size} bytes instead of {entry.bytes}"
                continue
            yield f"{name} is missing"


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies in ``directory``."""
    return directory / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's directory is named by."""
    return int(path.name.removeprefix("step_"))


def find(directory: Path) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
    """The checkpoints in ``directory`` by step, with their manifests or what is wrong with these."""
    for path in sorted(directory.glob("step_*"), key=lambda path: path.name):
        if path.is_dir() and path.name.removeprefix("step_").isdigit():
            try:
                manifest = Manifest.read(path)
                if manifest.step != step_of(path):
                    raise CheckpointError(f"{path / NAME} is of step {manifest.step!r}, which is not the directory's")
                yield path, manifest
            except CheckpointError as error:
                yield path, error


def describe(path: Path) -> FileEntry:
    """Size and digest of a file."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(bytes=size, blake2b=digest.hexdigest())


def sync_directory(directory: Path) -> None:
    """Makes what was created or renamed in ``directory`` last, where the system can."""
    with contextlib.suppress(OSError):
        sync_file(directory)


def sync_file(path: Path) -> None:
    """Makes what was written to a file last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
