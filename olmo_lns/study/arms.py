"""The arms that are compared: the one table of them, and the rule that two arms may differ in nothing else.

An arm is a scheme with an initialization; what a framework has to be told follows from the two.
A new arm is one line of the table, or one :func:`define` at run time.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from typing import Any, Collection, Mapping

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.schemes import INITIALIZATIONS, LNS, PRE_LN, Scheme
from olmo_lns.study.engines import ENGINES, Engine

__all__ = [
    "ARMS",
    "BASELINE",
    "Arm",
    "arm_named",
    "arm_problems",
    "check_environment",
    "define",
    "differences",
    "identity",
    "init_problems",
    "settings_of",
    "start_of",
]

#: The arm that the others are compared with.
BASELINE = "preln"

_IN_WORDS = {
    "plain": "every matrix at std 0.02",
    "scaled": "residual output projections at std 0.02/sqrt(2 L)",
    "depth_scaled": "residual output projections at std 0.02/sqrt(2 l)",
    "upstream": "the framework's own initialization",
}


@dataclass(frozen=True)
class Arm:
    """:param name: lower-case letters, digits and ``_``: it names files and folders. :param label: for tables.

    :param colour: with ``line`` and ``marker`` in matplotlib's words.
    :param initialization: of the residual output projections, one of :data:`olmo_lns.schemes.INITIALIZATIONS`.
    :param isolates: the one thing in which the arm differs from :data:`BASELINE`; ``""`` for an arm that changes
        more than one and is reported beside the others.
    :param init_fn: an initialization of OLMo's own, for an arm that exists there only.
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

    @property
    def about(self) -> str:
        """In words: scheme, initialization, and what a comparison with the baseline says."""
        init = f"OLMo's init_fn {self.init_fn}" if self.init_fn else _IN_WORDS[self.initialization]
        if self.init_fn and not self.scheme.is_pre_ln:
            init += " without its depth factor"
        purpose = f"isolates {self.isolates}" if self.isolates else "changes more than one thing"
        scheme = self.scheme.definition.label + (f" with {self.scheme.arguments}" if self.scheme.arguments else "")
        return f"{scheme}, {init}; {'the baseline' if self.name == BASELINE else purpose}"


#: Name -> arm. Colours of Okabe and Ito; lines and markers tell the arms apart without colour.
ARMS: dict[str, Arm] = {}


def define(arm: Arm) -> Arm:
    """Add an arm.

    :raises ValueError: its name is taken or cannot name a folder, its initialization is unknown, or is not what
        becomes of an ``init_fn`` of OLMo's: a scheme takes the depth factor out of it.
    """
    if arm.name in ARMS or not re.fullmatch(r"[a-z0-9_]+", arm.name):
        raise ValueError(f"arm name {arm.name!r}: taken, or not lower-case letters, digits and _")
    if arm.initialization not in INITIALIZATIONS:
        raise ValueError(f"arm {arm.name!r}: initialization {arm.initialization!r}, expected one of {INITIALIZATIONS}")
    if arm.init_fn and arm.initialization != ("upstream" if arm.scheme.is_pre_ln else "plain"):
        raise ValueError(
            f"arm {arm.name!r}: init_fn {arm.init_fn!r} is for Pre-LN with initialization upstream, or, without its "
            "depth factor, for another scheme with plain"
        )
    ARMS[arm.name] = arm
    return arm


#: name, label, scheme, initialization, what it isolates, OLMo's init_fn; the style of each follows from its place.
_TABLE: tuple[tuple[str, str, Scheme, str, str, str], ...] = (
    ("preln", "Pre-LN", PRE_LN, "plain", "nothing", ""),
    ("preln_scaled_init", "Pre-LN + scaled init", PRE_LN, "scaled", "scaled initialization", ""),
    ("lns", "Pre-LN + LNS", LNS, "plain", "LayerNorm Scaling", ""),
    ("preln_full_megatron", "Pre-LN, OLMo's full_megatron init", PRE_LN, "upstream", "", "full_megatron"),
    ("preln_mitchell", "Pre-LN, OLMo's mitchell init", PRE_LN, "upstream", "", "mitchell"),
    ("lns_scaled_init", "Pre-LN + LNS + scaled init", LNS, "scaled", "", ""),
    (
        "preln_depth_scaled_init",
        "Pre-LN + depth-scaled init",
        PRE_LN,
        "depth_scaled",
        "depth-scaled initialization",
        "",
    ),
    # Under a scheme the depth factor of full_megatron is taken out: what is left is the head at 1/sqrt(d).
    ("preln_head", "Pre-LN, head at 1/sqrt(d)", Scheme.of("lns", exponent=0), "plain", "the head", "full_megatron"),
    ("lns_head", "Pre-LN + LNS, head at 1/sqrt(d)", LNS, "plain", "", "full_megatron"),
    ("postln", "Post-LN", Scheme.of("postln"), "plain", "Post-LN", ""),
    ("deepnorm", "DeepNorm", Scheme.of("deepnorm"), "plain", "DeepNorm", ""),
    ("mixln", "Mix-LN", Scheme.of("mixln"), "plain", "Mix-LN", ""),
    ("mixln_scaled_init", "Mix-LN + scaled init", Scheme.of("mixln"), "scaled", "", ""),
    *(
        (f"mixln_{round(100 * alpha)}", f"Mix-LN {alpha:.1%}", Scheme.of("mixln", alpha=alpha), "plain", "Mix-LN", "")
        for alpha in (0.0625, 0.167, 0.33, 0.417, 0.5)
    ),
    ("admin", "Admin", Scheme.of("admin"), "plain", "Admin", ""),
    ("groupln", "Group-LN", Scheme.of("groupln"), "plain", "Group-LN", ""),
    ("sandwich", "Sandwich-LN", Scheme.of("sandwich"), "plain", "Sandwich-LN", ""),
    ("sandwich_depth", "Sandwich-LN / l^0.5", Scheme.of("sandwich_depth"), "plain", "", ""),
    ("branchln", "OLMo 2's order", Scheme.of("branchln"), "plain", "OLMo 2's order", ""),
    ("branchln_depth", "OLMo 2's order / l^0.5", Scheme.of("branchln_depth"), "plain", "", ""),
    ("layerscale", "LayerScale", Scheme.of("layerscale"), "plain", "LayerScale", ""),
    ("skipinit", "SkipInit", Scheme.of("skipinit"), "plain", "SkipInit", ""),
    ("lnsbefore", "LNS before LN", Scheme.of("lnsbefore"), "plain", "LNS before the norm", ""),
    ("lnsafterbranch", "LNS after Attn/FFN", Scheme.of("lnsafterbranch"), "plain", "LNS after both branches", ""),
    ("lnsafterattn", "LNS after Attn", Scheme.of("lnsafterattn"), "plain", "LNS after attention", ""),
    ("lnsafterff", "LNS after FFN", Scheme.of("lnsafterff"), "plain", "LNS after the feed-forward", ""),
    ("lnsvalue", "LNS, logits unscaled", Scheme.of("lnsvalue"), "plain", "LNS but for the logits", ""),
    ("lnsafterresidual", "LNS after residual", Scheme.of("lnsafterresidual"), "plain", "LNS after the sum", ""),
)
_COLOURS = (
    "#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#009E73", "#56B4E9", "#000000", "#B8860B", "#00008B", "#7F7F7F",
    "#8C564B", "#9467BD", "#C5B0D5", "#E377C2", "#F7B6D2", "#AD494A", "#D6616B", "#7B4173", "#17BECF", "#BCBD22",
    "#2CA02C", "#98DF8A", "#637939", "#B5CF6B", "#8C6D31", "#E7BA52", "#1F77B4", "#AEC7E8", "#6B6ECF", "#9C9EDE",
    "#393B79", "#A55194",
)  # fmt: skip
_STYLES = (
    *(("-", "o"), ("--", "s"), ("-.", "^"), (":", "v"), (":", "D"), ("--", "P")),
    *((line, marker) for marker in "Xhp<>*8d" for line in ("-", "--", "-.", ":")),
)
for (_name, _label, _scheme, _init, _isolates, _init_fn), _colour, (_line, _marker) in zip(
    _TABLE, _COLOURS, _STYLES, strict=False
):
    define(Arm(_name, _label, _colour, _line, _marker, _scheme, _init, _isolates, _init_fn))


def arm_named(name: str) -> Arm:
    """:raises LNSConfigError: an unknown arm, with the nearest known one."""
    if name not in ARMS:
        raise LNSConfigError(f"unknown arm {name!r}{did_you_mean(name, ARMS)}: expected one of {', '.join(ARMS)}")
    return ARMS[name]


def check_environment() -> None:
    """:raises LNSConfigError: a variable that would change an arm into another under the same name."""
    for name in (environment.SCHEME, environment.INITIALIZATION):
        if value := environment.read(name):
            raise LNSConfigError(
                f"{name}={value}: an arm says itself which scheme and initialization it has. Unset it."
            )


def settings_of(arm: Arm, engine: Engine) -> dict[str, Any]:
    """What makes a run of ``engine`` this arm.

    :raises LNSConfigError: there is no such arm in this framework.
    """
    found = engine.arm(arm)
    if found is None:
        others = " and ".join(other.title for other in ENGINES.values() if other.arm(arm) is not None)
        raise LNSConfigError(f"arm {arm.name!r} exists for {others} only")
    return found


def arm_problems(name: str, settings: Mapping[str, Any], engine: Engine) -> list[str]:
    """What contradicts the arm's definition in flat settings; empty when nothing does."""
    arm = arm_named(name)
    try:
        wanted = engine.defining(settings_of(arm, engine))
    except LNSConfigError as error:
        return [str(error)]
    found = engine.defining(settings)
    return [
        f"{key}={found[key]!r}, but arm {name!r} is {key}={value!r}"
        for key, value in wanted.items()
        if found[key] != value
    ]


def init_problems(settings: Mapping[str, Any], engine: Engine, arm: str = "") -> list[str]:
    """A scheme that wants plain initialization with a scaled one, unless that is what the arm is for.

    For LNS the paper (footnote 1, section 6) finds the two together worse.
    """
    scheme = engine.scheme(settings)
    if scheme.definition.initialization != "plain" or (arm in ARMS and ARMS[arm].initialization != "plain"):
        return []
    found = engine.scaled(settings)
    return [f"{scheme.definition.label} with {found}"] if found else []


def differences(first: Mapping[str, Any], second: Mapping[str, Any], engine: Engine) -> list[tuple[str, Any, Any]]:
    """Keys other than the arm's own, the data, names and folders in which two runs differ: ``(key, first, second)``."""
    keys = sorted(key for key in {*first, *second} if not _aside(key, engine, engine.arm_keys))
    found = [(engine.start[0], start_of(first, engine), start_of(second, engine))]
    found += [(key, first.get(key), second.get(key)) for key in keys]
    return [(key, one, other) for key, one, other in found if one != other]


def identity(settings: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """The settings that a run's result follows from: the arm's own among them, names and folders not."""
    kept = {key: value for key, value in sorted(settings.items()) if not _aside(key, engine)}
    return kept | {engine.start[0]: start_of(settings, engine)}


def _aside(key: str, engine: Engine, more: Collection[str] = ()) -> bool:
    return key in more or key == engine.data_key or key.startswith(engine.bookkeeping)


def start_of(settings: Mapping[str, Any], engine: Engine) -> str | None:
    """The checkpoint that a run starts from; None where it starts anew or goes on from one of its own.

    A start inside the run's own folders is a restart, any other makes another run.
    """
    key, own = engine.start
    start = settings.get(key)
    if not start:
        return None
    path = os.path.normpath(str(start))
    folders = [os.path.normpath(str(settings[name])) for name in own if settings.get(name)]
    return None if any(path == folder or path.startswith(folder + os.sep) for folder in folders) else str(start)
