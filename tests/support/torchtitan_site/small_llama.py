"""A config registry for ``--module small_llama``: torchtitan's debug model of Llama 3 with two blocks."""

from torchtitan.models.llama3 import config_registry


def two_blocks():
    """Return the config of the debug model, cut to its first two blocks, which Inductor compiles in less time."""
    config = config_registry.llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    return config
