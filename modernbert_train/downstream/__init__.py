"""What is done with an exported encoder by libraries that are made for it: retrieval, GLiNER, SetFit.

They are optional: each file here imports its library when it is used, and says by which extra of this package it comes.
"""
