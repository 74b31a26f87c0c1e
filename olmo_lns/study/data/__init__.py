"""Tokenized data: making, checking, and the corpora that need no download."""
