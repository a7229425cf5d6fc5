"""Weights in and out: where they come from, how they are gathered, grown, averaged, exported."""
