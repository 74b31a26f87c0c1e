"""Fold the factor into the weights, so that stock software runs the model as it is.

With a gain, ``s * Norm(x)`` is ``Norm(x)`` with gain and bias multiplied by ``s``; without one it
is ``Norm(x)`` followed by a projection whose weight is multiplied by ``s``. Either way the result
is a plain Pre-LN checkpoint of the same shape.

One module a format (:mod:`olmo`, :mod:`olmo_core`, :mod:`megatron`, :mod:`transformers_folder`, :mod:`authors`),
each with a class of what can be done to its checkpoints; :mod:`sources` is their table, :mod:`fold` the arithmetic,
:mod:`huggingface` what is written for transformers, :mod:`atomic` the folder that appears complete or not at all.
:mod:`guards` stands alone.
"""
