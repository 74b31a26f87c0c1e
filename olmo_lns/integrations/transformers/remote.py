"""The modeling file beside a saved model, for ``trust_remote_code`` where olmo-lns is not installed."""

from __future__ import annotations

import os
from pathlib import Path
from string import Template
from typing import Any

from olmo_lns import __version__
from olmo_lns.integrations.transformers.families import PREFIX, Family

__all__ = ["FILE", "auto_map", "write"]

FILE = "modeling_lns.py"


def _heads(family: Family) -> dict[str, str]:
    """transformers' class name -> auto class, for the heads that the installed transformers has."""
    import transformers

    from olmo_lns.integrations.transformers.models import HEADS

    names = {f"{family.stem}{head}": auto for head, auto in HEADS.items()}
    return {name: auto for name, auto in names.items() if hasattr(transformers, name)}


def auto_map(family: Family) -> dict[str, str]:
    """What ``config.json`` says about the file: auto class -> class in it."""
    module = FILE.removesuffix(".py")
    classes = {auto: f"{module}.LNS{name}" for name, auto in _heads(family).items()}
    return {"AutoConfig": f"{module}.LNS{family.stem}Config", **classes}


def write(folder: str | os.PathLike[str], family: Family) -> Path:
    """Write the file for ``family`` into ``folder``."""
    from olmo_lns.integrations.transformers.configs import NEEDS, SERVERS

    assert family.sub_layers is not None
    norms = {name: place.norm for name, place in family.sub_layers.items()}
    branches = {name: place.branch for name, place in family.sub_layers.items()}
    values: dict[str, Any] = {
        "stem": family.stem,
        "version": __version__,
        "needs": NEEDS,
        "places": {"norm": norms, "branch": branches if family.form.pre else norms},
        "outputs": [place.output for place in family.sub_layers.values()],
        "scaled": family.scaled,
        "servers": SERVERS,
        "heads": list(_heads(family)),
        "model_type": PREFIX + family.model_type,
        "activation": family.activation,
        "blocks": family.blocks,
    }
    template = Path(__file__).with_name(f"{FILE}.in").read_text(encoding="utf-8")
    path = Path(folder) / FILE
    path.write_text(Template(template).substitute(values), encoding="utf-8")
    return path
