"""Optimizers and their schedules. Importing the package loads nothing: `check` draws schedules without torch.

Each optimizer is one file and one row in build.py, and can be changed by itself.
Imports: clock, config, core.
"""
