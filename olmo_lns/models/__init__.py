"""Models as they are opened and taken apart: one loader for ``analyze`` and ``verify``."""
