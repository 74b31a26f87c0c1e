"""Fold a checkpoint's factors into its weights, so that stock software runs the model.

The checkpoint is opened by its own framework (:mod:`open`), folded in place (:mod:`olmo_lns.fold`) and saved by its own
framework, one module a format: :mod:`olmo`, :mod:`olmo_core`, :mod:`megatron`, :mod:`huggingface`. :mod:`verify`
compares a checkpoint with its export.
"""

#: Formats that a checkpoint can be written as.
FORMATS = OLMO, OLMO_CORE, HF, MEGATRON = ("olmo", "olmo-core", "hf", "megatron")
