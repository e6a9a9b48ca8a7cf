"""Names of the parts of `tidegate bench propagation`."""

from enum import StrEnum


class Part(StrEnum):
    """What can be measured by itself.

    CHANGES: one by one. BURST: all policies at once. REST: what the operator needs while nothing
    changes. RESTART: of the operator.
    """

    CHANGES = "changes"
    BURST = "burst"
    REST = "rest"
    RESTART = "restart"
