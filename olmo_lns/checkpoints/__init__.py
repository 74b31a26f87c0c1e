"""Checkpoints of each framework as they lie on disk: config, record and weights, one tensor in memory at a time."""
