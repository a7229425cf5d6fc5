"""One reader of texts and labels for every verb: files and hub datasets become rows.

A reader yields `Row`, and `LeftOut` with a reason for unusable items; a corpus counts those, a task refuses them.
"""
