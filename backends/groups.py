"""The process groups a managed model works on."""

from __future__ import annotations

import functools
import itertools
import os
from functools import cached_property
from typing import Any

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
from fxcomm.runtime.open_groups import OpenGroups, dropped_everywhere


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


class _ModelGroups:
    """Opens the groups of model ``number`` on the ranks of ``group``: the order of collectives on
    them is fxcomm's to keep, whatever the user's program does on its groups. They count as dropped
    when this is collected, which the model's environment holds."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        number: int,
        in_flight: InFlightParameters,
        groups: OpenGroups,
    ) -> None:
        self._group = group
        self._in_flight = in_flight
        self._groups = groups
        self._ranks = dist.get_process_group_ranks(group)
        self._names = (f"fxcomm/{self._ranks}/{number}/{i}" for i in itertools.count())
        self._note = groups.opened_by(self, self._ranks, number)

    @cached_property
    def fake(self) -> bool:
        """Whether there is one process only, which plays a rank."""
        return compat.group_backend(self._group, torch.device("cpu")) == "fake"

    def connect(self, device: torch.device) -> Communicator:
        """A new group for tensors on ``device``. Collective."""
        backend = compat.group_backend(self._group, device)
        return communicator_for(self._open(backend), device)

    def connect_control(self) -> dist.ProcessGroup:
        """A new group for small CPU tensors. Collective; closes what every rank has dropped."""
        control = self._open("gloo")
        if not self.fake:
            # Dropped models may have left gathers, which hold their parameters.
            self._in_flight.finish_all()
            by_rank = _gather_objects(control, self._groups.dropped(self._ranks))
            agreed = dropped_everywhere(by_rank)
            self._groups.close(self._ranks, agreed, compat.close_group)
        return control

    def _open(self, backend: str) -> dist.ProcessGroup:
        if self.fake:
            return self._group
        name, timeout = next(self._names), compat.group_timeout(self._group)
        group = compat.new_group(self._ranks, backend, name, timeout)
        self._note(name)
        return group


def _gather_objects(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def open_environment(
    group: dist.ProcessGroup,
    options: Options,
    number: int,
    in_flight: InFlightParameters,
    open_groups: OpenGroups,
) -> Environment:
    """What model ``number`` on the ranks of ``group`` trains in. Its groups are closed some time
    after every rank has dropped it (:mod:`fxcomm.runtime.open_groups`)."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    groups = _ModelGroups(group, number, in_flight, open_groups)
    return Environment(
        agreement=Agreement(
            # The fake group has one process, which agrees with itself.
            store=compat.private_store() if groups.fake else compat.group_store(group),
            rank=0 if groups.fake else rank,
            world_size=1 if groups.fake else world_size,
            timeout_s=options.start_timeout_s,
        ),
        rank=rank,
        world_size=world_size,
        connect=groups.connect,
        connect_control=groups.connect_control,
        in_flight=in_flight,
        compile_update=functools.partial(compile_update, options=options),
        measure_link=None if groups.fake else measure_link,
    )
