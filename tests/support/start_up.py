"""Take the start-up hook out of an interpreter, as if this package had never been installed."""

import sys


def remove_start_up_hook():
    """Remove its finder and its path hook; before the first import of a framework."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "olmo_lns_finder")]
    sys.path_hooks[:] = [
        hook
        for hook in sys.path_hooks
        if not any(hasattr(each, "olmo_lns_finder") for each in getattr(hook, "__defaults__", None) or ())
    ]
