"""The fixture that calls verbs."""

from tests.support.verbs import says

__all__ = ["says"]
