"""Configurations that are not runs: specs of data and sweeps, translated configurations, the reference of all keys."""
