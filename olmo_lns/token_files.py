"""Files of token ids: how to recognize NumPy's format, and the record beside a file.

``olmo-lns data`` writes and checks these files, and ``olmo-lns analyze`` reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSConfigError

#: The first bytes of a file that ``numpy.save`` has written. OLMo's files of token ids do not have them.
NUMPY_HEADER = b"\x93NUMPY"


def read_record(path: Path) -> dict[str, Any]:
    """Return the record ``NAME.json`` that ``data prepare`` wrote beside ``NAME-00000.npy``; empty without a record.

    :raises LNSConfigError: if a record cannot be read.
    """
    for record in (path.with_name(f"{path.stem}.json"), path.with_name(f"{path.stem.rpartition('-')[0]}.json")):
        if record.is_file() and record.name != "tokenizer.json":
            try:
                return dict(json.loads(record.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise LNSConfigError(
                    f"{record} is not a record of `data prepare`: {error}. Restore the file, or move it away."
                ) from None
    return {}
