"""Encoders, their attention kernels and their initial weights. Imports torch, `batch` and `config`, nothing else."""
