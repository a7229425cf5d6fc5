"""Optimizers and their schedules. Importing the package loads nothing: `check` draws schedules without torch.

An optimizer is a file and a row in build.py, and changes alone.
Imports: clock, config, core.
"""
