"""Passes: small functions that rewrite captured graphs."""
