"""Fold the factor into the weights, so that stock software runs the model as it is.

With a gain, ``s * Norm(x)`` is ``Norm(x)`` with gain and bias multiplied by ``s``; without one it
is ``Norm(x)`` followed by a projection whose weight is multiplied by ``s``. Either way the result
is a plain Pre-LN checkpoint of the same shape.

One module a format (:mod:`olmo`, :mod:`olmo_core`, :mod:`megatron`, :mod:`model_folder`), each with a
:class:`~olmo_lns.export.sources.Source`; :mod:`cli` has their table and the commands, :mod:`fold` the arithmetic,
:mod:`huggingface` the stock class, :mod:`sources` what is written for it, :mod:`atomic` the folder that appears
complete or not at all, :mod:`comparison` what ``verify`` compares. :mod:`guards` stops converters of others that
would lose the factor.
"""

#: What a checkpoint can be written as.
OLMO, OLMO_UNSHARDED, OLMO_CORE, HF, MEGATRON = FORMATS = ("olmo", "olmo-unsharded", "olmo-core", "hf", "megatron")
