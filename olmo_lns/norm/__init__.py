"""y = s * Norm(x), with the factor folded into the norm."""

from __future__ import annotations

from olmo_lns.norm.torch import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
