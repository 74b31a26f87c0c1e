"""Find the blocks of a whole model by one forward, and check what the model does around them.

The probe (:mod:`olmo_lns.probe`) looks at one block. This package looks at the model: which modules are its blocks,
whether one stream goes through all of them, and whether they are its whole depth. All of this is measured by forwards
on an example. ``trace`` observes a forward, ``blocks`` finds the blocks in it, and ``user_norms`` checks norms that
the user passed instead. ``confirmation`` compares all blocks with those that were probed. ``depth``, ``stream`` and
``training`` refuse a model whose blocks a scheme cannot number, and ``lookalikes`` finds modules that may be further
blocks.
"""
