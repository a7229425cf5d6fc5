"""The folder of a run: checkpoints saved, found, verified, restored and pruned; its records, its replica in a store.

Only checkpoint.py, manifest.py and saved_state.py define the format of a checkpoint. store.py, copier.py and replica.py
keep the replica, in a process without torch; `tools/` is the verb `checkpoints`.
Imports: clock, config, core, data, distributed, models, optim.schedules.
"""
