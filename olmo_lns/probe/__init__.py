"""Find the Pre-LN sites of a block by running a copy of the block.

The sites of a block are the norms through which its branches read the stream. A scheme multiplies the outputs of these
norms. The probe finds them by an experiment. It needs to know neither the class of a block nor the names of its
modules, so it also works for models that this package has never seen.

Take a block that computes ``y = x + attn(norm1(x))`` and returns ``y + mlp(norm2(y))``. The probe replaces the outputs
of ``norm1`` and ``norm2`` by fixed random tensors ``h1`` and ``h2``. We say that it *freezes* these two norms. It then
runs the block on two different streams x, and compares the two runs in two places:

* ``block(x) - x`` is ``attn(h1) + mlp(h2)`` in both runs, since neither branch sees x any more.
* The input of each frozen norm minus x is 0 for ``norm1`` and ``attn(h1)`` for ``norm2``, again in both runs.

Both are independent of x, so the branches read the stream through ``norm1`` and ``norm2`` and nowhere else. The probe
refuses a Post-LN block, ``norm1(x + attn(x))``, because its output is ``h1`` in both runs and ``block(x) - x`` differs.

Try it on a block of your own:

.. code-block:: python

    class Block(torch.nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.attn, self.mlp = torch.nn.Linear(width, width), torch.nn.Sequential(torch.nn.Linear(width, width))

        def forward(self, x):
            y = x + self.attn(self.norm1(x)).cumsum(1)
            return y + self.mlp(self.norm2(y))

    x = torch.randn(2, 8, 16)  # batch, positions, channels
    probe.pre_ln_sites(Block(), probe.Call((x,), {}, 0)).names  # ("norm1", "norm2")

Read the modules in this order. Each imports only those above it.

* ``call``: the arguments of a block in a forward, and how to run it again on them.
* ``recognize``: whether a module is a norm.
* ``copies``: a copy of the block with random parameters.
* ``replay``: run the copy while norms are frozen or outputs are changed, and compare.
* ``norms``: the norms of the block.
* ``branches``, ``checks``: refuse blocks that a scheme cannot scale, one function for each kind.
* ``projections``: the last matrices of the branches.
* ``search``: :func:`pre_ln_sites`, which uses all of these.
"""

from olmo_lns.probe.call import Call, converted, hooks, same_randomness, seed_generators, stream_of
from olmo_lns.probe.copies import random_copy, set_training
from olmo_lns.probe.recognize import has_vectors_only, is_leaf, is_norm, looks_like_norm
from olmo_lns.probe.replay import SAME, SAME_HALF, Replay, Result
from olmo_lns.probe.search import BlockSites, pre_ln_sites

__all__ = [
    "SAME",
    "SAME_HALF",
    "BlockSites",
    "Call",
    "Replay",
    "Result",
    "converted",
    "has_vectors_only",
    "hooks",
    "is_leaf",
    "is_norm",
    "looks_like_norm",
    "pre_ln_sites",
    "random_copy",
    "same_randomness",
    "seed_generators",
    "set_training",
    "stream_of",
]
