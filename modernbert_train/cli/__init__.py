"""The command line: `verbs.py` is the table of verbs, one row each; a verb's arguments and call are in its group's file."""
