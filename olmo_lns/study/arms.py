"""The table of the compared arms.

An arm is a scheme with an initialization; the framework's settings follow from the two.
A new arm is one line of the table, one :func:`define` at run time, or a scheme's spelling in a description.
"""

from __future__ import annotations

import colorsys
import re
from dataclasses import dataclass

from olmo_lns import settings
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import INITIALIZATIONS, LNS, PRE_LN, Scheme, definition, names, parse

#: The arm with which the others are compared.
BASELINE = "preln"


@dataclass(frozen=True)
class Arm:
    """An arm. :param name: lower-case letters, digits and ``_``, for files and folders. :param label: for tables.

    :param colour: matplotlib name, as ``line`` and ``marker``.
    :param initialization: one of :data:`olmo_lns.schemes.INITIALIZATIONS`, for the residual output projections.
    :param isolates: the only difference of the arm to :data:`BASELINE`; ``""`` for an arm with several differences,
        which is reported beside the others.
    :param init_fn: OLMo's initialization, for an arm that exists in OLMo only.
    """

    name: str
    label: str
    colour: str
    line: str
    marker: str
    scheme: Scheme
    initialization: str
    isolates: str
    init_fn: str = ""


#: Name -> arm. Colours of Okabe and Ito; lines and markers tell the arms apart without colour.
ARMS: dict[str, Arm] = {}


def define(arm: Arm) -> Arm:
    """Add an arm in this process.

    >>> define(Arm("half", "Halved", "#123456", "--", "*", LNS, "scaled", ""))  # doctest: +SKIP

    :raises ValueError: the name is taken or cannot name a folder, the initialization is unknown, or it contradicts
        OLMo's ``init_fn``, whose depth factor a scheme removes.
    """
    if arm.name in ARMS or not re.fullmatch(r"[a-z0-9_.]+", arm.name):
        raise ValueError(f"arm name {arm.name!r}: taken, or not lower-case letters, digits, _ and .")
    if arm.initialization not in INITIALIZATIONS:
        raise ValueError(f"arm {arm.name!r}: initialization {arm.initialization!r}, expected one of {INITIALIZATIONS}")
    if arm.init_fn and arm.initialization != ("upstream" if arm.scheme.is_pre_ln else "plain"):
        raise ValueError(
            f"arm {arm.name!r}: init_fn {arm.init_fn!r} needs Pre-LN with initialization upstream, or another "
            "scheme, which removes its depth factor, with plain"
        )
    ARMS[arm.name] = arm
    return arm


def _plain(name: str) -> tuple[str, str, Scheme, str, str, str]:
    """Return the row of a scheme's arm, named like the scheme. A scheme with a depth factor isolates nothing."""
    found = definition(name)
    return name, found.label, Scheme.of(name), "plain", "" if name.endswith("_depth") else found.title, ""


#: name, label, scheme, initialization, the isolated difference, OLMo's init_fn; the style follows from the place.
_TABLE: tuple[tuple[str, str, Scheme, str, str, str], ...] = (
    ("preln", "Pre-LN", PRE_LN, "plain", "nothing", ""),
    ("preln_scaled_init", "Pre-LN + scaled init", PRE_LN, "scaled", "scaled initialization", ""),
    _plain("lns"),
    ("preln_full_megatron", "Pre-LN, OLMo's full_megatron init", PRE_LN, "upstream", "", "full_megatron"),
    ("preln_mitchell", "Pre-LN, OLMo's mitchell init", PRE_LN, "upstream", "", "mitchell"),
    ("lns_scaled_init", "Pre-LN + LNS + scaled init", LNS, "scaled", "", ""),
    ("preln_depth_scaled_init", "Pre-LN + depth-scaled init", PRE_LN, "depth_scaled", "depth-scaled init", ""),
    # A scheme removes the depth factor of full_megatron; the head at 1/sqrt(d) remains.
    ("preln_head", "Pre-LN, head at 1/sqrt(d)", Scheme.of("lns", exponent=0), "plain", "the head", "full_megatron"),
    ("lns_head", "Pre-LN + LNS, head at 1/sqrt(d)", LNS, "plain", "", "full_megatron"),
    *map(_plain, ("postln", "deepnorm", "mixln")),
    ("mixln_scaled_init", "Mix-LN + scaled init", Scheme.of("mixln"), "scaled", "", ""),
    *(
        (f"mixln_{round(100 * alpha)}", f"Mix-LN {alpha:.1%}", Scheme.of("mixln", alpha=alpha), "plain", "Mix-LN", "")
        for alpha in (0.0625, 0.167, 0.33, 0.417, 0.5)
    ),
    *map(_plain, ("admin", "groupln", "sandwich", "sandwich_depth", "branchln", "branchln_depth", "layerscale")),
    *map(_plain, ("skipinit", "lnsbefore", "lnsafterbranch", "lnsafterattn", "lnsafterff", "lnsafterresidual")),
)
#: Okabe and Ito's colours for the first arms; the others have hues a golden ratio apart.
_COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#009E73", "#56B4E9", "#000000")
_STYLES = (
    *(("-", "o"), ("--", "s"), ("-.", "^"), (":", "v"), (":", "D"), ("--", "P")),
    *((line, marker) for marker in "Xhp<>*8d" for line in ("-", "--", "-.", ":")),
)


def _style(place: int) -> tuple[str, str, str]:
    hue = colorsys.hsv_to_rgb(place * 0.618 % 1, 0.75, 0.75)
    colour = _COLOURS[place] if place < len(_COLOURS) else "#" + "".join(f"{round(255 * part):02X}" for part in hue)
    return (colour, *_STYLES[place % len(_STYLES)])


for _place, (_name, _label, _scheme, _init, _isolates, _init_fn) in enumerate(_TABLE):
    define(Arm(_name, _label, *_style(_place), _scheme, _init, _isolates, _init_fn))


def arm_named(name: str) -> Arm:
    """Return an arm of the table, or the arm of a spelled scheme with plain initialization.

    :raises LNSConfigError: an unknown arm, or a parameter that the scheme lacks.

    >>> arm_named("lns:exponent=0.3").name
    'lns_exponent_0.3'
    """
    if name in ARMS:
        return ARMS[name]
    if ":" not in name and name not in names():
        raise LNSConfigError(
            f"unknown arm {name!r}: expected a scheme, such as lns:exponent=0.3, or one of {', '.join(ARMS)}"
        )
    scheme = parse(name)
    for arm in ARMS.values():
        if (arm.scheme, arm.initialization, arm.init_fn) == (scheme, "plain", ""):
            return arm
    label = f"{scheme.definition.label} ({scheme.arguments})"
    slug = re.sub(r"[^a-z0-9.]+", "_", str(scheme).lower())
    return define(Arm(slug, label, *_style(len(ARMS)), scheme, "plain", label))


def check_environment() -> None:
    """Check the environment. :raises LNSConfigError: a variable that would change the arms."""
    if value := settings.read(name := settings.INITIALIZATION):
        raise LNSConfigError(f"{name}={value}: each arm sets its own scheme and initialization: unset the variable")
