"""Find the blocks of a whole model by one forward, and check what the model does around them.

The probe (:mod:`olmo_lns.probe`) looks at one block. This package looks at the model: which modules are its blocks,
whether one stream goes through all of them, and whether they are its whole depth. It measures all of this by forwards
on an example.

Take a GPT whose list ``h`` has twelve blocks:

.. code-block:: python

    class GPT(torch.nn.Module):
        def forward(self, ids):
            x = self.wte(ids)
            for block in self.h:
                x = block(x)
            return self.head(self.norm(x))

    found = blocks.find_blocks(model, lambda: model(ids))
    found.path, len(found.blocks)  # ("h", 12)

The elements of ``h`` are the blocks, because each of them runs once and reads what the element before it returned. The
package refuses this model if it also calls a module that looks like a thirteenth block, if it normalizes x between two
blocks, or if it runs the blocks in another order in training mode. In each of these cases the factor of a block, which
depends on the number of the block, would be wrong or unknown.

Read the modules in this order:

* ``trace``: observe one forward.
* ``names``: names of modules in messages.
* ``stream``: check that one stream goes through all blocks.
* ``further_blocks``: find modules outside of the blocks that look like blocks.
* ``depth``: check that the blocks are the whole depth of the model.
* ``blocks``: find the blocks. ``user_norms``: check the norms that a user passed instead.
* ``confirmation``: compare all blocks with those that were probed.
* ``training``: repeat the checks in training mode.
"""
