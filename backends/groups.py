"""The process groups a managed model works on."""

from __future__ import annotations

import functools
import itertools
import os

import torch
import torch.distributed as dist

from fxcomm import compat
from fxcomm.backends.calibration import measure_link
from fxcomm.backends.communicators import communicator_for
from fxcomm.backends.lowering import compile_update
from fxcomm.communicator import Communicator
from fxcomm.errors import FxcommError
from fxcomm.options import Options
from fxcomm.runtime.agreement import Agreement
from fxcomm.runtime.in_flight import InFlightParameters
from fxcomm.runtime.model import Environment


def training_group(options: Options) -> dist.ProcessGroup | None:
    """The group to train on; None in a single process.

    Raises:
        FxcommError: torchrun started several processes, and none initialised a process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        rank, world_size = os.environ.get("RANK"), int(os.environ.get("WORLD_SIZE", "1"))
        if rank is not None and world_size > 1:
            raise FxcommError(
                f"this is process {rank} of {world_size} and no process group is initialised: the "
                "model would train unsynchronised. Call torch.distributed.init_process_group() "
                "before the model's first forward."
            )
        return None
    group = options.group() or dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


def open_environment(
    group: dist.ProcessGroup, options: Options, number: int, in_flight: InFlightParameters
) -> Environment:
    """Groups of fxcomm's own over the ranks of ``group``: the order of collectives on them is
    fxcomm's to keep, whatever the user's program does on its groups."""
    ranks = dist.get_process_group_ranks(group)
    rank, world_size = dist.get_rank(group), len(ranks)
    fake = compat.group_backend(group, torch.device("cpu")) == "fake"

    names = (f"fxcomm/{ranks}/{number}/{i}" for i in itertools.count())

    def open_group(backend: str) -> dist.ProcessGroup:
        if fake:
            return group
        return compat.new_group(ranks, backend, next(names), compat.group_timeout(group))

    def connect(device: torch.device) -> Communicator:
        return communicator_for(open_group(compat.group_backend(group, device)), device)

    return Environment(
        agreement=Agreement(
            # The fake group has one process, which agrees with itself.
            store=compat.private_store() if fake else compat.group_store(group),
            rank=0 if fake else rank,
            world_size=1 if fake else world_size,
            timeout_s=options.start_timeout_s,
        ),
        rank=rank,
        world_size=world_size,
        connect=connect,
        connect_control=lambda: open_group("gloo"),
        in_flight=in_flight,
        compile_update=functools.partial(compile_update, options=options),
        measure_link=None if fake else measure_link,
    )
