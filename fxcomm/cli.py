"""The command ``fxcomm``. It needs the extra ``fxcomm[cli]``; without it, it says so."""

from __future__ import annotations

import sys

from fxcomm.errors import FxcommError


def main() -> None:
    """Runs the command line. Exits with 0, with 1 for a finding (``diff``, ``doctor``) and with 2
    for an error, which is told on standard error."""
    try:
        from fxcomm.commands.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(
            "fxcomm: the command line needs typer and rich: pip install 'fxcomm[cli]'\n"
        )
        sys.exit(2)
    try:
        app()
    except FxcommError as error:
        sys.stderr.write(f"fxcomm: {error}\n")
        sys.exit(2)
