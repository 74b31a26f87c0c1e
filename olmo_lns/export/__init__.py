"""Fold a checkpoint's factors into its weights, so that stock software runs the model.

An export goes in one direction. :func:`formats.format_of` finds the :class:`interface.Format` of a checkpoint. Its
methods are called in this order: ``open`` opens the checkpoint with its framework, ``folded`` multiplies the factors
into the weights in place (:mod:`olmo_lns.folding`), and ``to_transformers`` converts the model if that is wanted. At
the end, ``save`` of the output format writes the folder.

Each format has a module: :mod:`olmo`, :mod:`olmo_core`, :mod:`megatron` and :mod:`huggingface`. :mod:`receipt` records
what the trained model computed, and :mod:`verify` compares an export with this record and with the checkpoint.
"""

#: Names of the formats.
FORMAT_NAMES = OLMO, OLMO_CORE, HF, MEGATRON = ("olmo", "olmo-core", "hf", "megatron")
