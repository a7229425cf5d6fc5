"""The corpus as tasks that anyone may do in any order."""
