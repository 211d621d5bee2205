"""Runs a function on several ranks: forked processes that speak over gloo."""

import datetime
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch._dynamo  # before the fork: its import takes longer than most of the tests
import torch.distributed as dist

PATIENCE = 60
"""Seconds after which a group of ranks counts as hung."""


class RankError(AssertionError):
    """A rank ended in an error that the test did not expect."""


def run(ranks, function, *arguments, patience=PATIENCE, timeout=PATIENCE):
    """The results of ``function(rank, *arguments)`` on that many ranks, in order; raises if one raises or hangs.

    A rank may die on purpose by ``os._exit``: its result is then the exit code, as ``Died(code)``.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        jobs = (os.path.join(directory, "store"), ranks, timeout)
        processes = [
            context.Process(target=_work, args=(rank, *jobs, pipes[rank][1], function, arguments), daemon=True)
            for rank in range(ranks)
        ]
        gc.collect()
        gc.freeze()  # else each rank's collector touches, and so copies, all that has been imported here
        for process in processes:
            process.start()
        gc.unfreeze()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], processes, time.monotonic() + patience)
        finally:
            for process in processes:
                process.kill()
                process.join()


class Died(int):
    """The exit code of a rank that ended without a result."""


def _collect(receivers, processes, deadline):
    results, errors = [], []
    for rank, receiver in enumerate(receivers):
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            raise RankError(f"rank {rank} hangs; so far: {results} {errors}")
        try:
            good, value = pickle.loads(receiver.recv_bytes())
        except EOFError:
            processes[rank].join(5)
            good, value = True, Died(processes[rank].exitcode)
        (results if good else errors).append(value if good else f"rank {rank}: {value}")
    if errors:
        raise RankError("\n".join(errors))
    return results


def _work(rank, store, ranks, timeout, sender, function, arguments):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun does
    warnings.filterwarnings("ignore", module=r"torch\b")  # what torch says of itself
    warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = pickle.dumps((True, function(rank, *arguments)))
    except BaseException:
        result = pickle.dumps((False, traceback.format_exc()))
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()) is not None:
        measured.stop()
        measured.save()
    sender.send_bytes(result)
    sender.close()
    sys.stdout.flush()
    os._exit(0)  # neither pytest's nor gloo's own end of a process
