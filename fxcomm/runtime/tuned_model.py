"""A managed model in tuning: what :mod:`fxcomm.runtime.tuning` asks of it, and when it runs."""

from __future__ import annotations

import logging
import os
import platform
import sys
import weakref
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fxcomm.analysis.costs import LinkCosts
from fxcomm.analysis.measured import MeasuredStep
from fxcomm.analysis.search import Limits
from fxcomm.plan import OverlapPlan, misfits
from fxcomm.runtime.arena import ShardedArena
from fxcomm.runtime.disk_cache import DiskCache, fingerprint
from fxcomm.runtime.tuning import Named, Searched, tune
from fxcomm.tuned import Tuned

if TYPE_CHECKING:
    from fxcomm.runtime.model import ManagedModel

_log = logging.getLogger("fxcomm")

_SEARCH_S = 1.0


class Tuning:
    """Tunes the plan of a model's only arena, step by step; ``outcome`` is None until it is done.

    It ends at once if the model gets another arena or optimizer on the way.
    """

    def __init__(self, model: ManagedModel) -> None:
        self.outcome: Tuned | None = None
        # Gathers in flight hold the meter and so this: a dropped model must not wait for them.
        self._known = weakref.ref(model)
        self._said = False
        arena = self._arena
        limits = Limits(
            in_flight_bytes=arena.plan.in_flight_bytes,
            in_backward=model.options.update == "in_backward",
            commshift=arena.plan.commshift,
        )
        self._cache = DiskCache.of(os.environ)
        self._topology = self._describe_ranks()
        self._fingerprint = self._describe()
        self._steps: Generator[None, MeasuredStep, Tuned]
        forced = model.options.plan if model.options.plan != "auto" else None
        choose = Searched(limits, _SEARCH_S) if forced is None else Named(forced, limits)
        self._steps = tune(self, choose, self._say, forced=forced)
        if self._take_known():
            return
        next(self._steps)
        model.meter.listeners.append(self._step_ended)

    def _describe(self) -> str:
        """What the outcome hangs on, but for how busy link and machine are: what is trained, by
        which first plan, how, on which ranks."""
        model = self._model
        uses = [self.slots.get(index) for index in model.uses]
        return fingerprint(
            model.options.describe(), self.plan.to_json(), f"{uses}", f"{self._topology}"
        )

    def _describe_ranks(self) -> str:
        """What the costs of the link hang on. Collective."""
        hosts = self.gather_objects(_machine(self._device))
        # Which ranks are on one host matters, what it is called does not.
        places = [[hosts.index(host), host[1:]] for host in hosts]
        return fingerprint(torch.__version__, type(self._arena.communicator).__name__, f"{places}")

    def _take_known(self) -> bool:
        """Takes the plan of an earlier run that was the same. Collective."""
        known = self._cache.get("plan", self._fingerprint) if self.rank == 0 else None
        text = self.from_rank_zero("a plan tuned earlier", known or "")
        try:
            outcome = Tuned.from_json(text)
        except ValueError:
            return False
        plan = outcome.plan
        specs = [p.spec for p in self._arena.parameters]
        world_size = self._model.environment.world_size
        if misfits(plan, specs, world_size=world_size, split=True):
            return False
        self.switch(plan)
        self.forget_plans()
        self.outcome = replace(outcome, why=f"{plan.name!r} is from an earlier run's tuning")
        self._model.dump.tuned(self._model.number, self.outcome)
        return True

    @staticmethod
    def possible(model: ManagedModel) -> bool:
        """Whether this rank's part of the model can be tuned: one arena, updated by one optimizer,
        all of whose buckets start in one backward graph."""
        observed, arenas = model.observed, model.arenas
        return (
            len(arenas) == 1
            and isinstance(arenas[0], ShardedArena)
            and len(arenas[0].updaters) == 1
            and all(arenas[0].plan.in_graph)
            and len(observed.executions) == 1
            and not observed.eager
        )

    def _step_ended(self, step: MeasuredStep) -> None:
        if len(self._model.arenas) != 1 or len(self._arena.updaters) != 1:
            self._end(Tuned(self.plan, "not tuned: the model has changed", {}, {}))
            return
        try:
            self._steps.send(step)
        except StopIteration as end:
            self._end(end.value)

    def _end(self, outcome: Tuned) -> None:
        self.outcome = outcome
        self._model.meter.listeners.remove(self._step_ended)
        self._say(outcome.why, last=True)
        if self.rank == 0:
            _log.info("tuning: %s; measured %s", outcome.why, outcome.measured)
            self._model.dump.tuned(self._model.number, outcome)
            if outcome.measured:
                self._cache.put("plan", self._fingerprint, outcome.to_json())

    def _say(self, what: str, last: bool = False) -> None:
        """A progress line on rank 0's terminal."""
        if self.rank == 0 and sys.stderr.isatty():
            end = "\n" if last else ""
            sys.stderr.write(f"\r\x1b[Kfxcomm: tuning the overlap plan: {what}{end}")
            sys.stderr.flush()

    # --- Tunable ---

    @property
    def _model(self) -> ManagedModel:
        model = self._known()
        assert model is not None, "only the model's own steps come here"
        return model

    @property
    def _device(self) -> torch.device:
        return self._arena.parameters[0].parameter.device

    @property
    def _arena(self) -> ShardedArena:
        arena = self._model.arenas[0]
        assert isinstance(arena, ShardedArena)
        return arena

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._model.rank

    @property
    def plan(self) -> OverlapPlan:
        """The present plan."""
        return self._arena.plan

    @property
    def slots(self) -> dict[int, int]:
        """The place of a parameter in the plan's layout, by its number."""
        return {p.index: p.slot for p in self._arena.parameters}

    @property
    def held(self) -> float:
        """Bytes that a reduction holds in flight, by byte of its bucket."""
        arena = self._arena
        return sum(arena.reduce_bytes) / sum(bucket.nbytes for bucket in arena.plan.layout.buckets)

    @property
    def reads(self) -> Mapping[str, int]:
        """Buckets launched before the last read of a parameter in the backward, by its name."""
        return self._model.reads

    def measure_link(self) -> LinkCosts:
        """Costs of collectives like the arena's, measured now or by an earlier run. Collective."""
        known = self._cache.get("link", self._topology) if self.rank == 0 else None
        text = self.from_rank_zero("the costs of the link", known or "")
        try:
            return LinkCosts.from_json(text)
        except ValueError:
            pass
        self._arena.finish_gathers()  # of the step that has just ended
        measure = self._model.environment.measure_link
        assert measure is not None
        costs = measure(self._arena.communicator, self._device)
        if self.rank == 0:
            self._cache.put("link", self._topology, costs.to_json())
        return costs

    def gather_objects(self, mine: Any) -> list[Any]:
        """Every rank's ``mine``. Collective."""
        return self._model.gather_objects(mine)

    def from_rank_zero(self, topic: str, text: str) -> str:
        """Rank 0's ``text``. Collective."""
        model = self._model
        return model.environment.agreement.from_rank_zero(model.topic(topic), text)

    def switch(self, plan: OverlapPlan) -> None:
        """Trains by ``plan`` from the next step on. Collective."""
        self._model.switch_plan(0, plan)

    def forget_plans(self) -> None:
        """Frees what was kept to switch back."""
        self._model.forget_plans()


def _machine(device: torch.device) -> tuple[str, str, str, int]:
    """The host, and what it computes with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return platform.node(), device.type, name, torch.get_num_threads()
