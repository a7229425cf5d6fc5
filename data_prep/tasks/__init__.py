"""The corpus as tasks that any process may do in any order."""
