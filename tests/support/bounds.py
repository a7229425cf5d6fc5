"""Bounds that a test checks and a page quotes."""

MAX_MODULES = 18  # of those imported with `train`, that take, keep or read a whole run
