"""Runs a function on several ranks that torchrun starts, each a process of its own from the beginning."""

import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from stabilityguard.demo import ranks as ranks_of_the_demo

ROOT = Path(__file__).parent.parent.parent


def launch(ranks, function, *arguments, patience=240):
    """What ``tests.distributed.ranks.run`` returns; ``function`` is one that a module has by its name.

    Raises AssertionError with the end of what the ranks wrote if one fails, TimeoutExpired after ``patience`` seconds.
    """
    with tempfile.TemporaryDirectory() as directory:
        call = Path(directory, "call")
        call.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "tests.distributed.launched", str(call)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience)
        assert done.returncode == 0, done.stderr[-3000:]
        return [pickle.loads(Path(f"{call}.{rank}").read_bytes()) for rank in range(ranks)]


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    function, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    result = function(dist.get_rank(), *arguments)
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_bytes(pickle.dumps(result))
    ranks_of_the_demo.leave()


if __name__ == "__main__":
    main()
