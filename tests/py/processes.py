"""Process groups of tests. None can hang: none meets at a port, which another program may have, and whoever waits for
another does so for a time."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

#: How long a collective waits for the others. PyTorch's own is half an hour.
_PATIENCE = timedelta(minutes=5)
#: Seconds after which a process of a test says where each of its threads is, and ends, whatever holds it. Python's lock
#: may be what it waits for: the watch needs none. The test's own process is watched by pytest (pyproject.toml).
_LIFE = 1500


#: What nearly all of them import: ten seconds of a process's start, spent once, in one that the others are forked from.
_IMPORTED = ["torch", "bastile", "transformers.modeling_utils", "accelerate", "peft", "pytest"]

#: Groups that this process was. None is ended while it runs: a model of DistributedDataParallel's that goes after its
#: group would end it with Python's lock held, and wait for gloo's threads, of which one was seen to wait for that lock.
_kept: list[Any] = []


@contextmanager
def alone(backend: str = "gloo") -> Iterator[None]:
    """This process is a group, for what asks for one."""
    store = distributed.HashStore()
    distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_PATIENCE)
    _kept.append(distributed.group.WORLD)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def zero_config(stage: int, **zero: Any) -> dict[str, Any]:
    """DeepSpeed's configuration, in which the optimiser is the test's own and no parameter is too small to be parted.
    zero: more of "zero_optimization"."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def on_processes(number: int, folder: Path, function: Callable[..., None], *args: Any) -> None:
    """function(rank, *args) in each of so many processes, which are a group. folder: the test's, where they meet.

    On CPUs: Transformers and FSDP2 would take a GPU for each process where there is one, and few have as many."""
    multiprocessing.set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # from their start on, for what they import may look
        given = number, Path(folder, "meet").as_uri(), dict(os.environ), function, args
        torch.multiprocessing.start_processes(_process, given, nprocs=number, start_method="forkserver")


def _process(
    rank: int, number: int, meet: str, environment: dict[str, str], function: Callable[..., None], args: Any
) -> None:
    faulthandler.dump_traceback_later(_LIFE, exit=True)
    os.environ.update(environment)  # the others' is from when the first test asked for processes
    torch.set_num_threads(1)
    # As torch's launcher says it, for those who ask. DeepSpeed takes the group that is there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(number), LOCAL_WORLD_SIZE=str(number))
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(number))
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=number, timeout=_PATIENCE)
    function(rank, *args)
    distributed.destroy_process_group()
    # Not by way of Python's end, where sharded models that go so late were seen to end gloo's threads in one run
    # of three ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
