"""What a command has to say, before it is printed: sentences, tables, and the same as data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows of text under ``columns``; columns of numbers are aligned right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Of each column, whether all that it holds begins with a digit or a sign."""
        return tuple(
            bool(self.rows) and all(row[c][:1] in "+-0123456789" for row in self.rows if row[c])
            for c in range(len(self.columns))
        )


@dataclass(frozen=True)
class Document:
    """``data`` is what ``--json`` prints; ``parts`` are sentences and tables for people.
    ``exit_code`` is the command's."""

    data: Mapping[str, Any]
    parts: Sequence[str | Table] = field(default_factory=tuple)
    exit_code: int = 0

    def to_json(self) -> str:
        """The data as JSON text."""
        return json.dumps(self.data, indent=2)

    def to_text(self) -> str:
        """The parts as plain text without colours, lines of any length."""
        return "\n".join(line for part in self.parts for line in _lines(part)).rstrip() + "\n"


def _lines(part: str | Table) -> Iterator[str]:
    if isinstance(part, str):
        yield part
        yield ""
        return
    cells = [part.columns, *part.rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(part.columns))]
    yield part.title
    for row in cells:
        padded = (
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(row, widths, part.numeric, strict=True)
        )
        yield "  ".join(["", *padded]).rstrip()
    yield ""


def ms(seconds: float) -> str:
    """Seconds as milliseconds, to be read under a heading that says so."""
    return f"{seconds * 1e3:.1f}"


def mb(nbytes: float) -> str:
    """Bytes as megabytes (2**20)."""
    return f"{nbytes / 2**20:.1f}"
