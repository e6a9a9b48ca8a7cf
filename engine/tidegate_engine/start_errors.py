"""Why an engine can't start on this machine, beside what is wrong with its model's files."""


class StartError(Exception):
    """What the settings ask for isn't there; the message is one line that names the variable.

    Attributes:
        variable: The environment variable.
    """

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{variable}: {problem}")
        self.variable = variable


class DeviceError(StartError):
    """PyTorch can't compute on the device."""


class KvMemoryError(StartError):
    """The KV blocks don't fit into memory.

    Attributes:
        needed_bytes: Memory that they take.
        limit_bytes: Memory that there is for them.
    """

    def __init__(self, variable: str, what: str, *, needed_bytes: int, limit_bytes: int) -> None:
        needed, limit = size_text(needed_bytes), size_text(limit_bytes)
        super().__init__(variable, f"{what} take {needed}, but {limit} are there for them")
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


def size_text(num_bytes: float) -> str:
    """Write a size for people."""
    if num_bytes >= 10 << 30:
        return f"{num_bytes / 2**30:.1f} GiB"
    size = num_bytes / 2**20
    return f"{size:.2g} MiB" if size < 10 else f"{size:.0f} MiB"
