"""Processes that live and die together, each on its own device: joining, signals, heartbeat, agreement, shared errors.

How ranks start, meet, wait and end changes here alone; nothing here knows what they train.
Imports: config, core.
"""
