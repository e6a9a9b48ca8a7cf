"""Rate limits that hold over all engines of a pool."""
