"""Cleaning: steps that a document passes before it is tokenised."""
