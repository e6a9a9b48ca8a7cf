"""Resident memory of this process and of everything it started."""

from collections import Counter

import psutil

_MODULES = {"tidegate_operator": "operator", "tidegate_engine": "engine"}


def resident_megabytes() -> dict[str, float]:
    """Return the resident memory by process name, this process first, then the largest first.

    Processes of one name are numbered. Pages that processes share count for each of them.
    """
    me = psutil.Process()
    sizes = []
    for child in me.children(recursive=True):
        try:
            sizes.append((child.memory_info().rss / 1e6, process_name(child.cmdline())))
        except psutil.NoSuchProcess:
            continue
    counts = Counter(name for _, name in sizes)
    numbers: Counter[str] = Counter()
    result = {"tidegate (command, kubelet, proxy)": me.memory_info().rss / 1e6}
    for size, name in sorted(sizes, reverse=True):
        numbers[name] += 1
        label = f"{name} {numbers[name]}" if counts[name] > 1 else name
        result[label] = size
    return result


def process_name(command: list[str]) -> str:
    """Return what a person calls a process: our module, the script, or the program."""
    if not command:
        return "(ended)"
    for argument in command[1:]:
        if argument in _MODULES:
            return _MODULES[argument]
        if argument.endswith(".py"):
            return argument.rpartition("/")[2].removesuffix(".py")
    # Programs may rewrite their title into one argument with spaces in it.
    return command[0].split()[0].rpartition("/")[2]
