"""One checkpoint on its way to the disk: written, read back, described, and made known in one step."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch

from stabilityguard.distributed.checkpoint import Contents, together, with_own_copies, write
from stabilityguard.distributed.peers import Peers
from stabilityguard.errors import CheckpointError
from stabilityguard.recover.manifest import Exports, FileEntry, Manifest, describe, path_of, sync_directory, sync_file

UNFINISHED: Final = ".unfinished-"
"""How the names of directories begin that are being written to."""


@dataclass
class Job:
    """What is to be written, and what came of it."""

    step: int
    make: Callable[[], Contents]
    stopped: bool
    problem: str | None = None
    """Why it failed, if it did."""

    abandoned: bool = False
    """Whether its future was given up while it was written."""

    outdated: bool = False
    """Whether the user has put another state in place since, so that no rollback may use it."""

    healthy_steps: int = 0
    """Healthy steps that have followed while it was written."""

    thread: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is written, or has failed, on this rank."""
        return self.thread is None or not self.thread.is_alive()


def write_checkpoint(job: Job, directory: Path, peers: Peers, exports: Exports) -> None:
    """Writes what the ranks hold into ``directory``, and ``exports`` into directories in it. Collective calls.

    Raises:
        CheckpointError: on all ranks, if one failed; what was there before is untouched.
    """
    made: list[Contents] = []
    together(peers, "putting a checkpoint together", lambda: made.append(job.make()))
    elements = sum(together(peers, "looking for NaN and Inf", lambda: _count_finite(made[0])))
    contents = with_own_copies(made[0], peers)
    path = Path(together(peers, "making a directory", lambda: _make_directory(directory, peers))[0])
    try:
        names = write(path, contents, peers)
        for name, export in exports.items():
            together(peers, f"writing {name}", partial(export, path / name))
        exported = together(peers, "listing", lambda: _files_in(path, exports) if peers.place == 0 else [])[0]
        names += exported[peers.place :: len(peers)]
        described = together(peers, "digesting", lambda: {name: describe(path / name) for name in names})
        files = {name: entry for of_rank in described for name, entry in of_rank.items()}
        together(peers, "publishing", lambda: _publish(job, path, files, elements, peers))
    except CheckpointError:
        if peers.place == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _files_in(path: Path, directories: Iterable[str]) -> list[str]:
    """Names of all files below these, which are brought to the disk, as others may leave that to the system."""
    found = [file for name in directories for file in (path / name, *(path / name).rglob("*"))]
    for file in found:
        (sync_directory if file.is_dir() else sync_file)(file)
    return sorted(file.relative_to(path).as_posix() for file in found if file.is_file())


def _make_directory(directory: Path, peers: Peers) -> str:
    if peers.place != 0:
        return ""
    path = _unfinished(directory)
    path.mkdir(parents=True)
    return str(path)


def _unfinished(directory: Path) -> Path:
    return directory / f"{UNFINISHED}{uuid4().hex[:12]}"


def sweep(directory: Path) -> None:
    """Removes what writing or removing has left unfinished; not to be called while either goes on."""
    for left_over in directory.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def remove(path: Path) -> None:
    """Takes a checkpoint's name away first, so that one whose removal is cut short is none."""
    doomed = _unfinished(path.parent)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _publish(job: Job, path: Path, files: Mapping[str, FileEntry], elements: int, peers: Peers) -> None:
    if peers.place != 0:
        return
    metadata = {".metadata": describe(path / ".metadata")}
    Manifest(
        step=job.step,
        state="verified",
        world_size=len(peers),
        torch=torch.__version__,
        created=time.time(),
        elements=elements,
        stopped=job.stopped,
        files={**files, **metadata},
    ).write(path)
    target = path_of(path.parent, job.step)
    if target.exists():
        raise CheckpointError(f"{target} exists; is another run, or a second guard, writing into this directory?")
    path.rename(target)
    sync_directory(path.parent)


def _count_finite(contents: Contents) -> int:
    """Number of elements of this rank's weights and moments.

    Raises:
        CheckpointError: some are NaN or Inf.
    """
    count = 0
    for portion in contents.portions:
        tensor = contents.tensors[portion.place]
        if portion.place[0] != "buffer" and (tensor.is_floating_point() or tensor.is_complex()):
            bad = sum(int((~torch.isfinite(box.within(tensor))).sum()) for box in portion.boxes)
            if bad:
                raise CheckpointError(f"{portion.name} has {bad} elements that are NaN or Inf")
            count += sum(box.numel for box in portion.boxes)
    return count
