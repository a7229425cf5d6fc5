"""One reader of texts and labels for every verb: files and hub datasets become rows.

A reader yields `Row`, and `LeftOut` for what is no row, with its reason; a corpus counts those, a task refuses them.
"""
