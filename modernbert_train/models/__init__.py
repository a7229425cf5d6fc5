"""Encoders, heads, attention kernels and initial weights: packed tokens in, hidden states and sums of losses out.

Each encoder and each kernel is one file and one row of a table (build.py), and can be changed by itself.
Imports: batch, config, core.
"""
