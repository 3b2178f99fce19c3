"""Runs a test's work in two processes connected by gloo, forked from one that has already imported their modules."""

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
    dist.barrier()  # a process that leaves first would cut the other off
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo and autograd may outlive the interpreter, and a crash of one at exit would mean nothing.
    os._exit(0)
