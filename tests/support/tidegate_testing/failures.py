"""The failures that a fleet must survive, done to its real parts one after the other."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tidegate_testing.cluster import eventually
from tidegate_testing.fleet import Fleet
from tidegate_testing.helm import OPERATOR_LEASE
from tidegate_testing.members import Member

ROUTERS_SECONDS = 3.0
"""The pause between a pod that leaves its Service and the signal to end, as by `preStop`."""

CLOCK_SECONDS = 30 * 86400.0
RESTART_SECONDS = 0.2
READY_SECONDS = 120.0
OPERATORS_ENDS = (1, -signal.SIGTERM)
"""It loses its lease in the same moment, or has just been started and leads nothing yet."""


class Endpoint(NamedTuple):
    """An engine that takes requests, and what had happened to it by then.

    Attributes:
        engine: The engine.
        deaths: How often it had been killed.
        left: How often it had been taken from its Service.
    """

    engine: Member
    deaths: int
    left: int


class Kubelet:
    """Starts what has ended, and knows which engines may be asked.

    Attributes:
        deaths: How often each engine was killed, by name, counted before it happens.
        left: How often each engine was taken from its Service, by name, before it ended.
        problems: What it found that should not be.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.deaths: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.problems: list[str] = []
        self._fleet = fleet
        self._ready: set[str] = set()
        self._leaving = {member.name for member in fleet.members}
        self._lock = threading.RLock()

    def run(self, stop: threading.Event) -> None:
        """Start what is not running until told to stop."""
        while not stop.wait(RESTART_SECONDS):
            for member in self._fleet.members:
                with self._lock:
                    if not member.is_running:
                        self._start(member)
            for engine in self._fleet.engines:
                if not self.is_ready(engine):
                    self._look(engine)

    def is_ready(self, engine: Member) -> bool:
        """Whether the engine takes requests."""
        return engine.name in self._ready

    def ready(self) -> list[Endpoint]:
        """Return the engines that take requests."""
        with self._lock:
            return [
                Endpoint(one, deaths=self.deaths[one.name], left=self.left[one.name])
                for one in self._fleet.engines
                if self.is_ready(one)
            ]

    def kill(self, member: Member) -> None:
        """End a member without warning."""
        with self._lock:
            self._take_out(member)
            self.deaths[member.name] += 1
            member.kill()

    def end(self, member: Member) -> None:
        """Let a member end in peace."""
        with self._lock:
            self._take_out(member)
        time.sleep(ROUTERS_SECONDS)
        code = member.stop()
        if code and (member in self._fleet.engines or code not in OPERATORS_ENDS):
            self.problems.append(f"{member.name} ended with {code} when it was asked to")

    def _take_out(self, member: Member) -> None:
        self.left[member.name] += 1
        self._leaving.add(member.name)
        self._ready.discard(member.name)

    def _start(self, member: Member) -> None:
        if member in self._fleet.engines and member.name not in self._leaving:
            self.problems.append(f"{member.name} ended by itself")
        self._leaving.discard(member.name)
        self._ready.discard(member.name)
        member.start()

    def _look(self, engine: Member) -> None:
        starts = engine.starts
        if self._fleet.is_ready(engine):
            with self._lock:
                if engine.starts == starts and engine.name not in self._leaving:
                    self._ready.add(engine.name)


class Failures:
    """Does one failure after the other, chosen by a seed; of each target one at a time.

    Attributes:
        done: How often each was done, by its name.
    """

    def __init__(
        self, fleet: Fleet, kubelet: Kubelet, *, seed: int, tell: Callable[[str], None]
    ) -> None:
        self.done: Counter[str] = Counter()
        self._fleet = fleet
        self._kubelet = kubelet
        self._seed = seed
        self._tell = tell
        self._server, self._store = threading.Lock(), threading.Lock()
        self._busy = {m.name: threading.Lock() for m in fleet.members}
        self._all = (
            *(self._operator_killed, self._operator_ended, self._operator_paused),
            *(self._operator_cut_off, self._lease_stolen, self._clock_put),
            *(self._api_server_killed, self._history_forgotten),
            *(self._redis_replaced, self._redis_flushed),
            *(self._engine_killed, self._engine_ended, self._engine_paused),
            self._engine_cut_off,
        )

    def run(self, stop: threading.Event, number: int) -> None:
        """Do them until told to stop; the last one is undone before it returns."""
        random = Random(f"{self._seed}/{number}")
        while not stop.wait(random.uniform(0.5, 3.0)):
            failure = random.choice(self._all)
            name = failure.__name__.strip("_").replace("_", " ")
            self._tell(f"  {name}")
            failure(random)
            self.done[name] += 1

    # -- operators --------------------------------------------------------------------------------

    def _operator_killed(self, random: Random) -> None:
        """In mid-change: changes come all the time."""
        operator = random.choice(self._fleet.operators)
        with self._busy[operator.name]:
            self._kubelet.kill(operator)

    def _operator_ended(self, random: Random) -> None:
        operator = random.choice(self._fleet.operators)
        with self._busy[operator.name]:
            self._kubelet.end(operator)

    def _operator_paused(self, random: Random) -> None:
        self._pause(random.choice(self._fleet.operators), random.uniform(1.0, 14.0))

    def _operator_cut_off(self, random: Random) -> None:
        self._cut_off(random.choice(self._fleet.operators), random.uniform(1.0, 14.0))

    def _clock_put(self, random: Random) -> None:
        for member in self._fleet.members:
            member.set_clock(random.uniform(-CLOCK_SECONDS, CLOCK_SECONDS))

    def _lease_stolen(self, _random: Random) -> None:
        namespace, name = OPERATOR_LEASE.split("/")
        stolen = json.dumps({"spec": {"holderIdentity": "thief"}})
        self._fleet.kubectl("patch", "lease", name, "-n", namespace, "--type=merge", "-p", stolen)

    # -- servers ----------------------------------------------------------------------------------

    def _api_server_killed(self, random: Random) -> None:
        with self._server:
            self._fleet.control_plane.stop_api_server()
            time.sleep(random.uniform(0.0, 5.0))
            self._fleet.control_plane.restart_api_server()

    def _history_forgotten(self, random: Random) -> None:
        """While the operators sleep, so that the point that they watch from is gone."""
        operators = self._fleet.operators
        for operator in operators:
            self._busy[operator.name].acquire()
        try:
            for operator in operators:
                operator.pause()
            time.sleep(random.uniform(0.0, 2.0))
            with self._server:
                self._fleet.forget_history()
                self._fleet.control_plane.restart_api_server()
        finally:
            for operator in operators:
                operator.resume()
                self._busy[operator.name].release()

    def _redis_replaced(self, random: Random) -> None:
        with self._store:
            self._fleet.redis_server.stop()
            time.sleep(random.uniform(0.0, 8.0))
            self._fleet.redis_server.restart()

    def _redis_flushed(self, _random: Random) -> None:
        with self._store:
            self._fleet.redis.flushall()

    # -- engines ----------------------------------------------------------------------------------

    def _engine_killed(self, random: Random) -> None:
        engine = random.choice(self._fleet.engines)
        with self._busy[engine.name]:
            self._kubelet.kill(engine)
            self._await_ready(engine)

    def _engine_ended(self, random: Random) -> None:
        engine = random.choice(self._fleet.engines)
        with self._busy[engine.name]:
            self._kubelet.end(engine)
            self._await_ready(engine)

    def _engine_paused(self, random: Random) -> None:
        self._pause(random.choice(self._fleet.engines), random.uniform(1.0, 8.0))

    def _engine_cut_off(self, random: Random) -> None:
        self._cut_off(random.choice(self._fleet.engines), random.uniform(1.0, 8.0))

    # -- what they share --------------------------------------------------------------------------

    def _pause(self, member: Member, seconds: float) -> None:
        with self._busy[member.name]:
            member.pause()
            time.sleep(seconds)
            member.resume()

    def _cut_off(self, member: Member, seconds: float) -> None:
        if not member.can_be_cut_off:
            return
        with self._busy[member.name]:
            member.cut_off()
            time.sleep(seconds)
            member.reconnect()

    def _await_ready(self, engine: Member) -> None:
        """Other engines may be killed meanwhile: this one must not depend on them."""
        what = f"{engine.name} ready after its restart"
        eventually(lambda: self._kubelet.is_ready(engine), what, timeout_seconds=READY_SECONDS)
