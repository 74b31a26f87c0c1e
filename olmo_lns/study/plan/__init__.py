"""From a description to a list of runs: what they are, what they cost, whether the arms are comparable."""
