"""The papers' diagnostics: output variance, angular distance, layer removal, Jacobians, gradient norms.

Definitions and the layout of the result files are in ``docs/diagnostics.md``; every diagnostic is
``olmo-lns analyze <what>`` and a function here that takes a model and an iterable of batches.
"""
