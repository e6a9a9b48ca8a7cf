"""Lets the wall clock of a process jump while it runs: Python imports this before anything else.

`JUMPING_CLOCK_FILE` names the file that says by how many seconds. Other clocks go on as they are.
"""

import datetime
import os
import time
from pathlib import Path

_FILE = Path(os.environ["JUMPING_CLOCK_FILE"])
_real_time = time.time
_RealDatetime = datetime.datetime


def _now() -> float:
    return _real_time() + float(_FILE.read_text())


class _Kind(type):
    """Takes every time for an instance, those included that C code has made."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RealDatetime)


class _Datetime(_RealDatetime, metaclass=_Kind):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return _RealDatetime.fromtimestamp(_now(), tz)


time.time = _now
time.time_ns = lambda: int(_now() * 1e9)
datetime.datetime = _Datetime  # type: ignore[misc]
