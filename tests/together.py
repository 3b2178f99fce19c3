"""A test's work in two processes that meet over gloo, forked from one that has imported what they import."""

import faulthandler
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import forked

START = forked.FORKS.get_start_method()
PATIENCE = timedelta(minutes=5)  # a hang fails


def in_two_processes(work, *given):
    """Run `work(rank, *given)` in both; an error in one of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_one, args=(f"file://{folder}/meeting", work, given), nprocs=2, start_method=START)


def _one(rank, meeting, work, given):
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=PATIENCE)
    work(rank, *given)
    dist.barrier()  # who leaves first would cut the other off
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo and autograd may outlive the interpreter, and the crash of one on the way out would be no finding.
    os._exit(0)
