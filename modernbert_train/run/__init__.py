"""A run on disk and on screen."""
