"""``fxcomm explain``: why a step takes as long as it does, and what would help."""

from __future__ import annotations

from pathlib import Path

from fxcomm.analysis.account import Account
from fxcomm.analysis.report import html_report
from fxcomm.commands.document import Document, Table, mb, ms
from fxcomm.errors import FxcommError
from fxcomm.tuned import Tuned


def read_tuned(path: Path) -> Tuned:
    """The outcome of tuning in a dump directory (that of its first model), or in a file of one.

    Raises:
        FxcommError: there is none, or the file holds something else.
    """
    file = path
    if path.is_dir():
        found = sorted(path.glob("tuned-*.json"))
        if not found:
            raise FxcommError(
                f"explain: {path} holds no tuned-*.json. Rank 0 writes it when tuning has ended, "
                "about 45 steps after the start, with options={'dump': directory}."
            )
        file = found[0]
    try:
        return Tuned.from_json(file.read_text())
    except (OSError, ValueError) as error:
        raise FxcommError(f"explain: {file} cannot be read: {error}") from error


def explain(tuned: Tuned) -> Document:
    """What tuning found, what limits the step, and what would help.

    Raises:
        FxcommError: tuning ended before anything was measured.
    """
    account = tuned.account()
    if account is None:
        raise FxcommError(f"explain: nothing was measured ({tuned.why})")
    parts = [tuned.why.capitalize() + ".", *account_parts(account)]
    if tuned.measured:
        rows = [
            (name, ms(seconds), ms(tuned.predicted[name]) if name in tuned.predicted else "")
            for name, seconds in tuned.measured.items()
        ]
        parts.append(Table("Measured", ("plan", "step ms", "predicted ms"), tuple(rows)))
    data = {
        "why": tuned.why,
        "measured_s": tuned.measured,
        "predicted_s": tuned.predicted,
        **account_data(account),
    }
    return Document(data, parts)


def write_report(path: Path, tuned: Tuned) -> None:
    """Writes the HTML report of an outcome of tuning.

    Raises:
        FxcommError: nothing was measured, or the file cannot be written.
    """
    account = tuned.account()
    if account is None:
        raise FxcommError(f"report: nothing was measured ({tuned.why})")
    text = html_report(account, measured=tuned.timeline, measured_seconds=tuned.seconds)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FxcommError(f"report: {path} cannot be written: {error}") from error


def account_parts(account: Account) -> list[str | Table]:
    """An account as sentences and tables."""
    step, parts = account.step, [account.limit]
    reasons = "\n".join(f"- {wait.reason}." for wait in account.waits)
    parts.append(f"Waits, the longest first:\n{reasons}" if reasons else "It waits for nothing.")
    helps = tuple(
        (w.change, ms(w.seconds), f"{step.seconds / w.seconds:.2f}") for w in account.what_if
    )
    tables = [
        Table("What would help", ("change", "step ms", "times faster"), helps),
        Table(
            "Plans, simulated",
            ("plan", "step ms", "exposed ms", "in flight MB", "above the bound"),
            tuple(
                (
                    name,
                    ms(other.seconds),
                    ms(other.exposed),
                    mb(other.peak_bytes),
                    f"{other.seconds / account.bound.seconds - 1:.1%}",
                )
                for name, other in [(account.name, step), *account.baselines.items()]
            ),
        ),
    ]
    return [*parts, *(table for table in tables if table.rows)]


def account_data(account: Account) -> dict[str, object]:
    """An account as data; times in seconds, sizes in bytes."""
    step = account.step
    return {
        "plan": account.name,
        "buckets": len(account.schedule.buckets),
        "step_s": step.seconds,
        "compute_s": account.problem.compute,
        "communication_s": account.communication,
        "exposed_s": step.exposed,
        "bound_s": account.bound.seconds,
        "bound": account.bound.reason,
        "gap": account.gap,
        "peak_in_flight_bytes": step.peak_bytes,
        "waits": [
            {"kind": w.kind, "bucket": w.bucket, "seconds": w.seconds, "reason": w.reason}
            for w in account.waits
        ],
        "what_if": [{"change": w.change, "step_s": w.seconds} for w in account.what_if],
        "baselines": {
            name: {"step_s": other.seconds, "exposed_s": other.exposed}
            for name, other in account.baselines.items()
        },
    }
