"""Plans that earlier runs have been tuned to, on disk, under what they were tuned for."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("fxcomm")

VARIABLE = "FXCOMM_CACHE"
"""The environment variable that names the folder; empty for no cache."""


@dataclass(frozen=True)
class PlanCache:
    """Texts by fingerprint in a folder (None: keeps nothing). What cannot be read or written is
    passed over: training goes on without."""

    folder: Path | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> PlanCache:
        """The cache that ``environment`` (variables) asks for: by default ``fxcomm/plans`` in the
        user's cache folder (``XDG_CACHE_HOME``, or ``.cache`` in the home)."""
        named = environment.get(VARIABLE)
        if named is not None:
            return cls(Path(named) / "plans" if named else None)
        base = environment.get("XDG_CACHE_HOME")
        home = environment.get("HOME")
        if not base and not home:
            return cls(None)
        return cls((Path(base) if base else Path(str(home)) / ".cache") / "fxcomm" / "plans")

    def get(self, fingerprint: str) -> str | None:
        """The text kept under a fingerprint."""
        if self.folder is None:
            return None
        try:
            return self._file(self.folder, fingerprint).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def put(self, fingerprint: str, text: str) -> None:
        """Keeps a text; readers see the old one or all of the new one."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.folder, delete=False
            ) as file:
                file.write(text)
            os.replace(file.name, self._file(self.folder, fingerprint))
        except OSError as error:
            _log.info("the tuned plan is not kept for later runs: %s", error)

    @staticmethod
    def _file(folder: Path, fingerprint: str) -> Path:
        return folder / f"{fingerprint}.json"


def fingerprint(*parts: str) -> str:
    """Another text for other ``parts``, short enough for the name of a file."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()[:32]
