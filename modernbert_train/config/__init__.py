"""The configuration of a run: schema, YAML and overrides, and rules across several keys. Imports no torch.

Each key has its bounds and rules here, once; `tools/` holds the specs of other verbs.
Imports: core.
"""
