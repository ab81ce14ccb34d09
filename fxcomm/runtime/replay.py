"""Replays a plan from a file: rank 0 reads it, every rank checks that it fits the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fxcomm.errors import PlanError
from fxcomm.layout import ParameterSpec
from fxcomm.plan import OverlapPlan, misfits
from fxcomm.runtime.agreement import Agreement

_SHOWN = 5  # differences that an error lists


def replayed_plan(
    path: str,
    parameters: Sequence[ParameterSpec],
    agreement: Agreement,
    topic: str,
    *,
    world_size: int,
    split: bool,
) -> OverlapPlan:
    """The plan in rank 0's file ``path``, for ``parameters``; see :func:`fxcomm.plan.misfits`.

    Every rank calls it; the other ranks need no file. ``topic`` must be new and equal on all ranks.

    Raises:
        PlanError: on every rank, if rank 0 cannot read the file, it holds no plan, or its plan does
            not fit. The message lists the first differences.
        RankMismatchError: rank 0 did not come within the deadline.
    """
    mine = _read(path) if agreement.rank == 0 else {}
    read = json.loads(agreement.from_rank_zero(topic, json.dumps(mine)))
    if "error" in read:
        raise PlanError(
            f"rank 0 cannot read the plan {path!r}: {read['error']}. options={{'plan': ...}} takes "
            "a file that options={'dump': directory} wrote; only rank 0 needs it."
        )
    try:
        plan = OverlapPlan.from_json(read["text"])
    except ValueError as error:
        raise PlanError(
            f"{path!r} on rank 0 is not a plan: {error}. Write it anew with "
            "options={'dump': directory}."
        ) from error
    _require_fit(path, misfits(plan, parameters, world_size=world_size, split=split))
    return plan


def _read(path: str) -> dict[str, str]:
    try:
        return {"text": Path(path).read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _require_fit(path: str, differences: Sequence[str]) -> None:
    if not differences:
        return
    listed = "\n".join(f"  {line}" for line in differences[:_SHOWN])
    rest = len(differences) - _SHOWN
    more = f"\n  ... and {rest} more" if rest > 0 else ""
    raise PlanError(
        f"the plan {path!r} does not fit the model. Differences ({len(differences)}):\n"
        f"{listed}{more}\n"
        "Use the plan with the model and the ranks for which it was made, or leave out "
        "options={'plan': ...} and let fxcomm plan anew."
    )
