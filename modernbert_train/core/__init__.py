"""Small parts that know nothing of training: files, JSON, text, tensors on disk, keyed random numbers, versions.

Each file changes alone, with its test in tests/core. errors.py belongs here and is outside for its public name.
Imports: nothing.
"""
