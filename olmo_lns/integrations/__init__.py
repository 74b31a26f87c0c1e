"""Bindings of LayerNorm Scaling to training frameworks."""
