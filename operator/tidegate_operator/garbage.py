"""How an operator collects garbage: seldom, and not among what it knows of the cluster."""

import gc

GC_THRESHOLDS = 50_000, 20, 20
"""Allocations between two looks at the young objects, and how many of those make an older look."""


def spare_garbage_collection() -> None:
    """Leave alone what is known by now, and look for cycles less often.

    Thousands of objects of the cluster live long, and hold no cycles; walking over all of them amid
    a compile would take several times as long as the compile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
