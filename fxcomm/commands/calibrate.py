"""``fxcomm calibrate``: what collectives cost on the ranks that torchrun started."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from fxcomm.analysis.costs import LinkCosts
from fxcomm.backends.calibration import measure_link
from fxcomm.backends.communicators import communicator_for
from fxcomm.commands.document import Document, Table, mb, ms
from fxcomm.errors import FxcommError

_UNDER_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def calibrate(budget_s: float = 1.8) -> Document | None:
    """Measures the link between the ranks; every rank calls it, and rank 0 gets the document. Opens
    a process group and closes it.

    Raises:
        FxcommError: it was not started by torchrun on two or more ranks.
    """
    missing = [name for name in _UNDER_TORCHRUN if name not in os.environ]
    if missing or int(os.environ["WORLD_SIZE"]) < 2:
        raise FxcommError(
            "calibrate: it measures what lies between ranks; start it with "
            "'torchrun --nproc-per-node 2 -m fxcomm calibrate', on several hosts as in training"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        group = dist.group.WORLD
        assert group is not None
        costs = measure_link(communicator_for(group, device), device, budget_s)
        return _document(costs, dist.get_world_size()) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _document(costs: LinkCosts, world_size: int) -> Document:
    rows = tuple(
        (kind, mb(nbytes), ms(seconds), f"{8e-6 * nbytes * _sent(world_size) / seconds:.0f}")
        for kind, curve in (("reduce", costs.reduce), ("gather", costs.gather))
        for nbytes, seconds in curve.points
        if seconds
    )
    data = {
        "world_size": world_size,
        "reduce": costs.reduce.points,
        "gather": costs.gather.points,
        "contention": costs.contention,
    }
    columns = ("collective", "bucket MB", "ms", "Mbit/s sent by a rank")
    return Document(
        data,
        [
            f"{world_size} ranks. Beside a collective, compute takes "
            f"{costs.contention:.2f} times as long.",
            Table("Seconds of a collective behind others of its size", columns, rows),
        ],
    )


def _sent(world_size: int) -> float:
    """The part of a bucket's bytes that a rank sends in a reduce-scatter or an all-gather."""
    return (world_size - 1) / world_size
