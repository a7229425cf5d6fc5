"""Trained weights as Hugging Face models, and back."""
