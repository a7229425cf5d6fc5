"""Optimizers and their schedules. Importing the package loads nothing: `check` draws schedules without torch.

Each optimizer is one file and one row in optimizers.py, and can be changed by itself.
Imports: clock, config, core.
"""
