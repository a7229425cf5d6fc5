"""Configurations and weight names of other libraries, one file an architecture."""
