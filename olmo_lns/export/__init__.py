"""Fold the factor into the weights, so that stock software runs the model as it is.

With a gain, ``s * Norm(x)`` is ``Norm(x)`` with gain and bias multiplied by ``s``; without one it
is ``Norm(x)`` followed by a projection whose weight is multiplied by ``s``. Either way the result
is a plain Pre-LN checkpoint of the same shape.

The modules, in the direction of their imports: :mod:`fold` and :mod:`fold_schemes` (arithmetic), :mod:`atomic`
(all-or-nothing output), :mod:`options` (what is asked for, and the protocols of source and target); :mod:`olmo`,
:mod:`huggingface`, :mod:`gemma2`, :mod:`tokenizer` (what is written); :mod:`from_olmo`, :mod:`olmo_core`,
:mod:`megatron`, :mod:`transformers_folder`, :mod:`authors` (what each source becomes), :mod:`unfold` (the inverse),
:mod:`as_trained` (into transformers, to train on); :mod:`sources` (the table of them), :mod:`cli`, :mod:`hooked`,
:mod:`stock` and :mod:`verify`; :mod:`hf_cli` and :mod:`hf_folders` (``olmo-lns hf``); :mod:`guards` stands alone.
Checkpoints are read by :mod:`olmo_lns.checkpoints`.
"""
