import itertools
import os
import subprocess
import sys

import pytest
import torch

from acutance import distributed as processes
from acutance.errors import AcutanceError


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_shares_are_disjoint_and_complete(kind, size: int) -> None:
    shares = [list(processes.share(kind(range(7)), rank, size)) for rank in range(size)]
    assert sorted(itertools.chain(*shares)) == list(range(7))
    assert shares[0] == list(range(0, 7, size))
    share = processes.share(range(7), 1, 3)  # batches of other processes are never made
    assert (len(share), share.indices) == (2, range(1, 7, 3))


def test_one_process_needs_no_others_and_a_device_is_chosen_or_refused() -> None:
    assert processes.rank_and_world_size() == (0, 1)
    assert processes.gather("mine") == ["mine"]
    with processes.joined() as place:
        assert place == (0, 1)
    assert processes.device("cpu") == "cpu"
    if not torch.cuda.is_available():
        assert processes.device("auto") == "cpu"
        with pytest.raises(AcutanceError, match="no CUDA device"):
            processes.device("cuda")


@pytest.mark.parametrize(("torchrun", "argument", "code"), [("", "lost", 2), ("1", "lost", 2), ("1", "--version", 0)])
def test_a_process_of_torchrun_leaves_at_once_with_everything_written(torchrun, argument, code):
    program = "import atexit, runpy; atexit.register(print, 'taken down')"
    command = [sys.executable, "-c", f"{program}; runpy.run_module('acutance', run_name='__main__')", argument]
    environment = os.environ | ({"TORCHELASTIC_RUN_ID": torchrun} if torchrun else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("taken down" in done.stdout) == (not torchrun)
    assert {"lost": "No such command", "--version": "acutance 0"}[argument] in done.stdout + done.stderr
