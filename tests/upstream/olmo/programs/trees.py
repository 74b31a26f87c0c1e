"""Import several OLMo trees one after another in this process, with the plugins active.

Usage: ``trees.py wanted.json results.json``; wanted maps a name to a folder that holds ``olmo`` and
to environment variables. Each is imported from nothing, only its third-party imports are shared;
the result is the error's text, or what an LNS model of that tree has.
"""

import importlib
import json
import logging
import os
import sys


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] in ("olmo", "olmo_data", "olmo_lns")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "olmo_lns" not in type(finder).__module__]
    importlib.invalidate_caches()


def model_of_tree():
    import olmo.train
    from olmo.config import LayerNormType, ModelConfig
    from olmo.model import OLMo

    lns = not {"STOCK", "OLMO_LNS_DISABLE"} & set(os.environ)
    config = ModelConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=16, embedding_size=16, max_sequence_length=8)
    config.layer_norm_type = LayerNormType["lns_rms" if lns else "rms"]
    blocks = OLMo(config).transformer.blocks
    patched = hasattr(OLMo.__init__, "__wrapped__")
    return {
        "from": olmo.__path__[0],
        "patched": patched,
        "scales": [getattr(block.attn_norm, "lns_scale", None) for block in blocks],
    }


def main():
    with open(sys.argv[1]) as file:
        wanted = json.load(file)
    results = {}
    for name, (folder, variables) in wanted.items():
        forget()
        os.environ.update(variables)
        sys.path.insert(0, folder)
        messages, handler = [], logging.Handler()
        handler.emit = lambda record, messages=messages: messages.append(record.getMessage())
        logging.getLogger().addHandler(handler)
        try:
            from olmo_lns.integrations import autoload

            autoload.activate()
            results[name] = {"model": model_of_tree()}
        except Exception as error:  # the result; the test knows which tree must fail, and how
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        results[name]["log"] = messages
        logging.getLogger().removeHandler(handler)
        sys.path.remove(folder)
        for variable in variables:
            del os.environ[variable]
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
