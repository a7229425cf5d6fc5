"""The configuration of a run: schema, YAML and overrides, and the rules that span several keys. Imports no torch.

A key, its bounds and its rules change here alone; `tools/` has the specs that are not runs.
Imports: core.
"""
