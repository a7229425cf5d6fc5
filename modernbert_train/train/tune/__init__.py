"""`python -m modernbert_train tune`: which settings train a run fastest on this device, and compute the same.

candidates.py asks the questions: which kernel, whether to compile, how many threads. worker.py is a process that trains
with one answer and says how long its steps took; process.py starts it, and what it does wrong ends nothing but itself.
parity.py holds an answer against the plain form before it is timed. search.py halves the answers until one is left, and
journal.py remembers each measurement, so that a tune that was killed resumes. findings.py writes what was found; what a
run takes of it is in plan/tuned.py. The process that asks never touches the device.
"""
