"""What the command line does, as functions that return documents; :mod:`fxcomm.cli` prints them."""
