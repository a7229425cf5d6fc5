"""Configurations that are not runs: specs of data and sweeps, and translated configurations."""
