"""What earlier runs have found out, on disk: tuned plans and costs of links, each under what it
hangs on."""

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
class DiskCache:
    """Texts by kind and fingerprint in a folder (None: keeps nothing). What cannot be read or
    written is passed over: training goes on without."""

    folder: Path | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> DiskCache:
        """The cache that ``environment`` (variables) asks for: by default ``fxcomm`` in the user's
        cache folder (``XDG_CACHE_HOME``, or ``.cache`` in the home)."""
        named = environment.get(VARIABLE)
        if named is not None:
            return cls(Path(named) if named else None)
        base = environment.get("XDG_CACHE_HOME")
        home = environment.get("HOME")
        if not base and not home:
            return cls(None)
        return cls((Path(base) if base else Path(str(home)) / ".cache") / "fxcomm")

    def get(self, kind: str, fingerprint: str) -> str | None:
        """The text kept under a fingerprint."""
        if self.folder is None:
            return None
        try:
            return self._file(self.folder, kind, fingerprint).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def put(self, kind: str, fingerprint: str, text: str) -> None:
        """Keeps a text; readers see the old one or all of the new one."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.folder, delete=False
            ) as file:
                file.write(text)
            os.replace(file.name, self._file(self.folder, kind, fingerprint))
        except OSError as error:
            _log.info("a %s is not kept for later runs: %s", kind, error)

    @staticmethod
    def _file(folder: Path, kind: str, fingerprint: str) -> Path:
        return folder / f"{kind}-{fingerprint}.json"


def fingerprint(*parts: str) -> str:
    """Another text for other ``parts``, short enough for the name of a file."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()[:32]
