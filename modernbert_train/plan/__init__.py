"""What a run would cost, from its configuration alone: arithmetic on a login node, without torch and without a GPU."""
