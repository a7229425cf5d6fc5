"""The configuration of a run: schema, loading, and the rules that span several fields. Imports no torch."""
