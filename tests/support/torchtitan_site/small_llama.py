"""A config registry for ``--module small_llama``: torchtitan's debug model of Llama 3 with two blocks.

Inductor compiles it for a CPU without vector instructions. It would compile and run a program for each kind of them first.
"""

from torch._inductor import cpu_vec_isa
from torchtitan.models.llama3 import config_registry

cpu_vec_isa.supported_vec_isa_list.clear()


def two_blocks():
    """Return the config of the debug model, cut to its first two blocks."""
    config = config_registry.llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    return config
