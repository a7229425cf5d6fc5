"""Processes that train together: joining, signals, heartbeat, agreement, shared errors, one device each.

How ranks start, meet, wait and end is decided here, independently of the training.
Imports: config, core.
"""
