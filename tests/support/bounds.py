"""Bounds that a test checks and a page quotes."""

MAX_MODULES = 14  # that get the whole run between the call of `train` and the first step
