"""Fold a checkpoint's factors into its weights, so that stock software runs the model.

An export has four steps. :mod:`open` opens the checkpoint with its framework, :mod:`olmo_lns.folding` folds the weights
in place, :mod:`convert` brings them into the model of the output format, and its framework saves them.
Each format has a module: :mod:`olmo`, :mod:`olmo_core`, :mod:`megatron` and :mod:`huggingface`. :mod:`receipt`
records what the trained model computed.
:mod:`verify` compares an export with this record and with the checkpoint.
"""

#: Formats of an export.
FORMATS = OLMO, OLMO_CORE, HF, MEGATRON = ("olmo", "olmo-core", "hf", "megatron")
