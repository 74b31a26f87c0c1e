"""Starting runs, here or under Slurm, and how far they are."""
