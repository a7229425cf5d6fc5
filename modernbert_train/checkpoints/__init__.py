"""The folder of a run: checkpoints saved, found, verified, restored and pruned; its records, its replica in a store.

The format of a checkpoint changes here alone: checkpoint.py, manifest.py and saved_state.py. store.py, copier.py and
replica.py keep the replica, by a process that knows no torch; `tools/` is the verb `checkpoints`.
Imports: clock, config, core, data, distributed, models, optim.schedules.
"""
