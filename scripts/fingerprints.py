"""Print the fingerprint of each symbol that the OLMo plugin replaces, per source tree.

Usage: python scripts/fingerprints.py LABEL=TREE [LABEL=TREE ...], one tree per upstream version
(a checkout, or the site-packages that holds it). Each tree is read in a process of its own.
Paste the result into olmo_lns/integrations/olmo/upstream.py after reading what changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict

CHILD = """
import inspect, json
from olmo_lns.integrations.olmo.upstream import TARGETS
from olmo_lns.integrations.patching import fingerprint
out = {}
for target in TARGETS:
    owner, name = target.locate()
    function = inspect.getattr_static(owner, name)
    out[target.path] = fingerprint(getattr(function, "__func__", function))
print(json.dumps(out))
"""


def main(pairs: list[str]) -> int:
    table: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for pair in pairs:
        label, _, tree = pair.partition("=")
        env = {**os.environ, "PYTHONPATH": tree, "OLMO_LNS_DISABLE": "1"}
        output = subprocess.run([sys.executable, "-c", CHILD], env=env, check=True, capture_output=True, text=True)
        for path, digest in json.loads(output.stdout.splitlines()[-1]).items():
            table[path][digest].append(label)
    for path, digests in table.items():
        print(path)
        for digest, labels in digests.items():
            print(f'    "{digest}": "{", ".join(labels)}",')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
