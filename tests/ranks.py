"""Real gloo ranks for tests: processes that stay alive and run functions on demand.

A job is a module-level function ``job(rank, world_size, *args)``; its results come back by rank. A
job that raises on any rank, or that is not done within its timeout, ends the processes, and the
next job gets fresh ones: a hang is a failure like any other.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

import torch.multiprocessing as mp

DEFAULT_TIMEOUT_S = 120.0
GROUP_TIMEOUT_S = 60.0
# A server that has imported these forks the ranks: an import of torch takes seconds. None of them
# starts a thread or computes, which a fork would not survive; fxcomm is each rank's own to import.
_IMPORTED_ONCE = ["torch._dynamo", "torch._inductor.compile_fx", "networkx", "pytest", "hypothesis"]


def forkserver() -> Any:
    """What starts processes that have imported nearly everything."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def spare_the_collector() -> None:
    """Leaves what was imported to itself: the collector needs 0.2 s to look through that, which it
    does again and again, and 0.01 s for the rest."""
    import fxcomm  # noqa: F401

    gc.freeze()


@dataclass
class RankError(Exception):
    """A job failed: the traceback of each rank that failed."""

    tracebacks: dict[int, str]

    def __str__(self) -> str:
        return "\n".join(f"--- rank {r} ---\n{t}" for r, t in sorted(self.tracebacks.items()))


def _serve(rank: int, world_size: int, rendezvous: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    spare_the_collector()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        task = pipe.recv()
        if task is None:
            break
        job, args, kwargs = task
        torch._dynamo.reset()
        gc.collect()  # the models of earlier jobs, whose process groups the next model closes
        torch.manual_seed(rank)
        try:
            pipe.send((True, job(rank, world_size, *args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """``world_size`` processes of one gloo group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        context = forkserver()
        rendezvous = os.path.join(tempfile.mkdtemp(), "rendezvous")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(
        self,
        job: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """The results by rank of ``job(rank, world_size, *args, **kwargs)``.

        Raises:
            RankError: the job raised, or did not end in time, on some rank.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, args, kwargs))
        results, failures = self._collect(time.monotonic() + timeout_s)
        if failures:
            self.stop(kill=True)
            raise RankError(failures)
        return [results[rank] for rank in range(self.world_size)]

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting:
            ready = wait_for(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(dict.fromkeys(waiting.values(), "timed out"))
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    good, value = False, "the process died"
                (results if good else failures)[rank] = value
            if failures:
                # The others may be waiting for the rank that failed: a moment to fail as well.
                deadline = min(deadline, time.monotonic() + 3.0)
        return results, failures

    def stop(self, *, kill: bool = False) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            if not kill:
                pipe.send(None)
        for process in self._processes:
            if not kill:
                process.join(timeout=20)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
