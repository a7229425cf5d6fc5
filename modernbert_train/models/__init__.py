"""Encoders, heads, attention kernels and initial weights: packed tokens in, hidden states and sums of losses out.

An encoder or a kernel is a file and a row, and changes alone; build.py has the tables.
Imports: batch, config, core.
"""
