"""The table of arms.

An arm is a scheme with an initialization, from which each engine derives the settings of its framework. There are three
ways to add an arm: a row of the table, :func:`define_arm` at run time, or the spelling of a scheme in a description.
"""

from __future__ import annotations

import colorsys
import re
from dataclasses import dataclass
from typing import NamedTuple

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.schemes import INITIALIZATIONS, LNS, PRE_LN, Scheme, definition, names, parse

#: The arm with which the others are compared, the same with scaled initialization, and the paper's method.
BASELINE, SCALED_BASELINE, LNS_ARM = "preln", "preln_scaled_init", "lns"


@dataclass(frozen=True)
class Arm:
    """An arm of a study.

    :param name: name of files and folders. It consists of lower-case letters, digits, ``_`` and ``.``.
    :param label: name in tables.
    :param color, line, marker: matplotlib's names of the style.
    :param initialization: one of :data:`olmo_lns.schemes.INITIALIZATIONS`, for the residual output projections.
    :param only_difference: what the arm changes with respect to :data:`BASELINE`, if it changes one thing only, such as
        ``scaled initialization``. It is ``""`` if there are several differences.
    :param init_fn: OLMo's initialization, for an arm that exists in OLMo only.
    """

    name: str
    label: str
    color: str
    line: str
    marker: str
    scheme: Scheme
    initialization: str
    only_difference: str
    init_fn: str = ""


#: Name -> arm. Colors of Okabe and Ito; lines and markers tell the arms apart without color.
ARMS: dict[str, Arm] = {}


def define_arm(arm: Arm) -> Arm:
    """Add an arm to :data:`ARMS` in this process.

    >>> define_arm(Arm("half", "Halved", "#123456", "--", "*", LNS, "scaled", ""))  # doctest: +SKIP

    :raises ValueError: if the name is taken or cannot name a folder, if the initialization is unknown, or if it
        contradicts ``init_fn``.
    """
    if arm.name in ARMS:
        raise ValueError(f"Arm {arm.name!r} exists already. Names of arms are unique. Choose another name.")
    if not re.fullmatch(r"[a-z0-9_.]+", arm.name):
        raise ValueError(
            f"Arm {arm.name!r} has a name that cannot be a folder. Use lower-case letters, digits, _ and . only."
        )
    if arm.initialization not in INITIALIZATIONS:
        raise ValueError(
            f"Arm {arm.name!r} has the unknown initialization {arm.initialization!r}. Use one of "
            f"{', '.join(INITIALIZATIONS)}."
        )
    if arm.init_fn and arm.initialization != ("upstream" if arm.scheme.is_pre_ln else "plain"):
        raise ValueError(
            f"Arm {arm.name!r} has init_fn {arm.init_fn!r} with initialization {arm.initialization!r}. A scheme "
            "removes the depth factor of an init_fn, and Pre-LN keeps it. Use upstream if the scheme is Pre-LN, and "
            "plain for every other scheme."
        )
    ARMS[arm.name] = arm
    return arm


class _Row(NamedTuple):
    """A row of the table: the fields of an :class:`Arm` without its style, which follows from the row's position."""

    name: str
    label: str
    scheme: Scheme
    initialization: str
    only_difference: str = ""
    init_fn: str = ""


def _plain(name: str) -> _Row:
    """Return the row of a scheme with plain initialization. A ``_depth`` scheme has more than one difference."""
    scheme = definition(name)
    return _Row(name, scheme.label, Scheme.of(name), "plain", "" if name.endswith("_depth") else scheme.title)


_TABLE: tuple[_Row, ...] = (
    _Row(BASELINE, "Pre-LN", PRE_LN, "plain", only_difference="nothing"),
    _Row(SCALED_BASELINE, "Pre-LN + scaled init", PRE_LN, "scaled", only_difference="scaled initialization"),
    _plain(LNS_ARM),
    _Row("preln_full_megatron", "Pre-LN, OLMo's full_megatron init", PRE_LN, "upstream", init_fn="full_megatron"),
    _Row("preln_mitchell", "Pre-LN, OLMo's mitchell init", PRE_LN, "upstream", init_fn="mitchell"),
    _Row("lns_scaled_init", "Pre-LN + LNS + scaled init", LNS, "scaled"),
    _Row("preln_depth_scaled_init", "Pre-LN + depth-scaled init", PRE_LN, "depth_scaled", "depth-scaled init"),
    # Only a scheme removes the depth factor of full_megatron, so preln_head is LNS with exponent 0. Its factors are all
    # 1, and the head at 1/sqrt(d) remains.
    _Row("preln_head", "Pre-LN, head at 1/sqrt(d)", Scheme.of("lns", exponent=0), "plain", "the head", "full_megatron"),
    _Row("lns_head", "Pre-LN + LNS, head at 1/sqrt(d)", LNS, "plain", init_fn="full_megatron"),
    *map(_plain, ("postln", "deepnorm", "mixln")),
    _Row("mixln_scaled_init", "Mix-LN + scaled init", Scheme.of("mixln"), "scaled"),
    *(
        _Row(f"mixln_{round(100 * alpha)}", f"Mix-LN {alpha:.1%}", Scheme.of("mixln", alpha=alpha), "plain", "Mix-LN")
        for alpha in (0.0625, 0.167, 0.33, 0.417, 0.5)
    ),
    *map(_plain, ("admin", "groupln", "sandwich", "sandwich_depth", "branchln", "branchln_depth", "layerscale")),
    *map(_plain, ("skipinit", "lnsbefore", "lnsafterbranch", "lnsafterattn", "lnsafterff", "lnsafterresidual")),
)
#: Okabe and Ito's colors for the first arms. The hues of the other arms are a golden ratio apart.
_COLORS = ("#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#009E73", "#56B4E9", "#000000")
_STYLES = (
    *(("-", "o"), ("--", "s"), ("-.", "^"), (":", "v"), (":", "D"), ("--", "P")),
    *((line, marker) for marker in "Xhp<>*8d" for line in ("-", "--", "-.", ":")),
)


def _style(index: int) -> tuple[str, str, str]:
    """Return color, line and marker of the arm at a position of the table."""
    if index < len(_COLORS):
        color = _COLORS[index]
    else:
        rgb = colorsys.hsv_to_rgb(index * 0.618 % 1, 0.75, 0.75)
        color = "#" + "".join(f"{round(255 * channel):02X}" for channel in rgb)
    return (color, *_STYLES[index % len(_STYLES)])


for _index, _row in enumerate(_TABLE):
    _fields = _row._asdict()
    define_arm(Arm(_fields.pop("name"), _fields.pop("label"), *_style(_index), **_fields))


def arm_from_text(name: str) -> Arm:
    """Return an arm by its name, or by the spelling of a scheme, which has plain initialization.

    An arm by a spelling that no arm of :data:`ARMS` has is new, and not in the table. :func:`define_arm` adds it.

    :raises LNSConfigError: if the arm is unknown, or the scheme does not have the parameter.

    >>> arm_from_text("lns:exponent=0.3").name
    'lns_exponent_0.3'
    """
    if name in ARMS:
        return ARMS[name]
    if ":" not in name and name not in names():
        raise LNSConfigError(
            f"Unknown arm {name!r}{did_you_mean(name, [*ARMS, *names()])}. Use a scheme, such as lns:exponent=0.3, or "
            f"one of {', '.join(ARMS)}."
        )
    scheme = parse(name)
    for arm in ARMS.values():
        if (arm.scheme, arm.initialization, arm.init_fn) == (scheme, "plain", ""):
            return arm
    label = scheme.definition.label + (f" ({scheme.arguments})" if scheme.arguments else "")
    slug = re.sub(r"[^a-z0-9.]+", "_", str(scheme).lower())
    return Arm(slug, label, *_style(len(ARMS)), scheme, "plain", label)


def check_environment() -> None:
    """Check that no environment variable changes the arms.

    :raises LNSConfigError: if ``OLMO_LNS_INITIALIZATION`` is set.
    """
    name = environment.INITIALIZATION
    if value := environment.read(name):
        raise LNSConfigError(
            f"{name}={value} would change the initialization of the arms. Each arm sets its initialization. Unset "
            f"{name}."
        )
