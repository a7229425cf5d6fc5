"""Optimizers and their schedules. Importing the package loads nothing: `check` draws schedules without torch."""
