"""Fold the factor into the weights, so that stock software runs the model as it is.

With a gain, ``s * Norm(x)`` is ``Norm(x)`` with gain and bias multiplied by ``s``; without one it
is ``Norm(x)`` followed by a projection whose weight is multiplied by ``s``. Either way the result
is a plain Pre-LN checkpoint of the same shape.

The modules, in the direction of their imports: :mod:`fold` (arithmetic), :mod:`atomic`
(all-or-nothing output); :mod:`archive`, :mod:`shards`, :mod:`distributed` (three file formats, one
tensor at a time); :mod:`architecture`, :mod:`olmo`, :mod:`huggingface`, :mod:`tokenizer`,
:mod:`jobs`, :mod:`megatron`, :mod:`authors` (layouts); :mod:`unfold` (the inverse), :mod:`cli`,
:mod:`hooked` and :mod:`verify`; :mod:`guards` stands alone.
"""
