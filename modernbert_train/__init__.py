"""Pretraining of ModernBERT-class encoders: raw text to a published Hugging Face model."""

__version__ = "0.1.0"
