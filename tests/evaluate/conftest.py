"""The command line as a fixture."""

from tests.support.front_door import cli

__all__ = ["cli"]
