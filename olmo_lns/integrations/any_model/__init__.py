"""Apply a scheme to any PyTorch model.

One forward on an example shows which modules are the blocks. The probe (:mod:`olmo_lns.probe`) then finds the norms of
each block, and these norms are scaled. The blocks must be Pre-LN, and the norms must be modules.

Read the modules in this order. Each imports only those above it.

* ``located``: the result of the search.
* ``refusals``: models that cannot be measured.
* ``state``: save and restore what a forward may change.
* ``example``: run a model on the example, and leave no trace of the forward in it.
* ``fused_kernels``: kernels that read the weights of a norm and do not call it.
* ``norm_check``: check that the norms of all blocks compute norms.
* ``probing``: probe one block of each structure.
* ``finding``: find the norms.
* ``scaling``: scale them and measure them.
* ``line``: the start-up line.
"""

from olmo_lns.integrations.any_model.example import forward, undisturbed
from olmo_lns.integrations.any_model.finding import locate, locate_on_first_rank
from olmo_lns.integrations.any_model.fused_kernels import ArithmeticOf, check_without_hooks
from olmo_lns.integrations.any_model.line import write_start_up_line
from olmo_lns.integrations.any_model.located import Located
from olmo_lns.integrations.any_model.probing import structure
from olmo_lns.integrations.any_model.refusals import (
    refuse_adapted,
    refuse_offloaded,
    refuse_wrappers,
    require_unwrapped,
    require_weights,
)
from olmo_lns.integrations.any_model.scaling import describe_initialization, scale_norms, why_trained_of

__all__ = [
    "ArithmeticOf",
    "Located",
    "check_without_hooks",
    "describe_initialization",
    "forward",
    "locate",
    "locate_on_first_rank",
    "refuse_adapted",
    "refuse_offloaded",
    "refuse_wrappers",
    "require_unwrapped",
    "require_weights",
    "scale_norms",
    "structure",
    "undisturbed",
    "why_trained_of",
    "write_start_up_line",
]
