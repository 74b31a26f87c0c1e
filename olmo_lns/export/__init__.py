"""Fold a checkpoint's factors into its weights, so that stock software runs the model.

The framework of a checkpoint opens it (:mod:`open`); :mod:`olmo_lns.folding` folds the weights in place; the framework
of the output format saves them. Each format has a module: :mod:`olmo`, :mod:`olmo_core`, :mod:`megatron`,
:mod:`huggingface`. :mod:`receipt` keeps what the exporter knew; :mod:`verify` compares an export with it and with the
checkpoint.
"""

#: Formats of an export.
FORMATS = OLMO, OLMO_CORE, HF, MEGATRON = ("olmo", "olmo-core", "hf", "megatron")
