"""Helpers independent of training: files, JSON, text, tensors on disk, keyed random numbers, versions.

Each file has its test in tests/core. errors.py belongs here, but is outside for its public name.
Imports: nothing.
"""
