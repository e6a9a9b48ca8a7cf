"""Names of the parts of `tidegate bench engine`."""

from enum import StrEnum


class Part(StrEnum):
    """What can be measured by itself.

    BURST: workload W at once, and the bound of it. POISSON: W as Poisson arrivals. STATIC: a
    recorded trace with continuous and with static batching.
    """

    BURST = "burst"
    POISSON = "poisson"
    STATIC = "static"
