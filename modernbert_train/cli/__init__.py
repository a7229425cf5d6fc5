"""The command line: `verbs.py` has a row for each verb; its arguments and its call are in the file of its group."""
