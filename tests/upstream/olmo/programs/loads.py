"""Run OLMo's unmodified ``scripts/train.py`` several times in this process, with other settings each time.

Usage: ``loads.py scripts/train.py launches.json results.json``. A launch is a list of arguments
and a dict of environment variables; its result is null, or the exception's class and message.
"""

import json
import os
import runpy
import sys

if __name__ == "__main__":
    script, launches, results = sys.argv[1:]
    with open(launches) as file:
        wanted = json.load(file)
    found = {}
    for name, (arguments, variables) in wanted.items():
        print(f"=== {name}", flush=True)
        os.environ.update(variables)
        sys.argv = [script, *arguments]
        try:
            runpy.run_path(script, run_name="__main__")
            found[name] = None
        except Exception as error:  # the result of this launch; the test knows which may fail
            found[name] = [type(error).__name__, str(error)]
        for variable in variables:
            del os.environ[variable]
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    with open(results, "w") as file:
        json.dump(found, file)
