"""What a fleet does while it fails: policies change, requests are asked, revisions are watched."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping
from random import Random
from typing import Any

import httpx
import redis

from tidegate_policies.envelope import Envelope
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.failures import Endpoint, Kubelet
from tidegate_testing.fleet import NAMESPACE, POOL, Fleet
from tidegate_testing.operator_process import a_key_secret, a_policy, apply

TENANTS = tuple(f"tenant-{n}" for n in range(6))
GUESTS = tuple(f"guest-{n}" for n in range(6))
LOOK_SECONDS = 0.25
RETRY_SECONDS = 0.5
ANSWER_SECONDS = 90.0
"""Longer than an engine is stopped or cut off, and than its queue then."""

MAX_TOKENS = 60

Policy = Mapping[str, object]


def a_key_of_each_tenant(fleet: Fleet) -> None:
    """Make the Secret that the tenants' policies name."""
    secret = a_key_secret("keys", **{name: api_key(name) for name in TENANTS})
    apply(fleet.kubectl, NAMESPACE, secret)


def api_key(tenant: str) -> str:
    return f"sk-{tenant}"


class PolicyChanges:
    """Applies, changes and deletes policies, again until the API server has taken it.

    Attributes:
        wanted: What every policy should be, by its name.
        count: How many changes were made.
    """

    def __init__(self, fleet: Fleet, *, seed: int) -> None:
        self.wanted: dict[str, Policy] = {}
        self.count = 0
        self._fleet = fleet
        self._random = Random(f"{seed}/changes")

    def begin(self) -> None:
        """Give every tenant its first policy."""
        for tenant in TENANTS:
            self._put(tenant, self._a_spec(tenant))

    def run(self, stop: threading.Event) -> None:
        """Change one policy after the other until told to stop."""
        while not stop.wait(self._random.uniform(0.0, 1.0)):
            name = self._random.choice((*TENANTS, *GUESTS))
            if name in self.wanted and name in GUESTS and self._random.random() < 0.5:
                self._delete(name)
            else:
                self._put(name, self._a_spec(name))
            self.count += 1

    def _a_spec(self, name: str) -> Policy:
        spec: dict[str, object] = {"weight": self._random.randint(1, 1000)}
        if name in TENANTS:
            spec["apiKeySecretRefs"] = [{"name": "keys", "key": name}]
        return spec

    def _put(self, name: str, spec: Policy) -> None:
        self._until_taken("apply", "-f", "-", input=json.dumps(a_policy(name, **spec)))
        self.wanted[name] = spec

    def _delete(self, name: str) -> None:
        self._until_taken("delete", "tp", name, "--ignore-not-found", "--wait=false")
        del self.wanted[name]

    def _until_taken(self, *arguments: str, input: str | None = None) -> None:  # noqa: A002
        retry = threading.Event()
        while self._kubectl(*arguments, input=input).returncode != 0:
            retry.wait(RETRY_SECONDS)

    def _kubectl(
        self,
        *arguments: str,
        input: str | None = None,  # noqa: A002
    ) -> subprocess.CompletedProcess[str]:
        return self._fleet.kubectl(*arguments, "-n", NAMESPACE, input=input)


class Requests:
    """Asks ready engines, as clients behind a Service do.

    Attributes:
        answered: How many were answered whole.
        died: How many had no answer as their engine was killed meanwhile.
        late: How many were turned away by an engine that had left its Service since they chose it.
            A Service chooses as it connects, and would have led them elsewhere.
        lost: The others that had none.
    """

    def __init__(self, fleet: Fleet, kubelet: Kubelet) -> None:
        self.answered = 0
        self.died = 0
        self.late = 0
        self.lost: list[str] = []
        self._fleet = fleet
        self._kubelet = kubelet
        self._lock = threading.Lock()

    def run(self, stop: threading.Event, seed: int) -> None:
        """Ask one after the other until told to stop."""
        random = Random(seed)
        while not stop.wait(0.01):
            if ready := self._kubelet.ready():
                chosen = random.choice(ready)
                tenant, num_tokens = random.choice(TENANTS), random.randint(1, MAX_TOKENS)
                self._ask(chosen, tenant, num_tokens)

    def _ask(self, chosen: Endpoint, tenant: str, num_tokens: int) -> None:
        name = chosen.engine.name
        url, key = self._fleet.engine_url(chosen.engine), api_key(tenant)
        turned_away = False
        try:
            problem = ask(url, key, model="simulated", num_tokens=num_tokens)
        except TurnedAwayError as error:
            problem, turned_away = str(error), True
        with self._lock:
            if not problem:
                self.answered += 1
            elif self._kubelet.deaths[name] != chosen.deaths:
                self.died += 1
            elif turned_away and self._kubelet.left[name] != chosen.left:
                self.late += 1
            else:
                self.lost.append(f"{tenant} at {name}: {problem}")


class TurnedAwayError(Exception):
    """An engine has not taken a request as it ends."""


def ask(root: str, key: str, *, model: str, num_tokens: int) -> str:
    """Read a stream to its end; returns what was wrong with it.

    Raises:
        TurnedAwayError: Nobody listens, or nobody does for long.
    """
    body = {
        "model": model,
        "prompt": "tides",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {key}"}
    finish, last = None, ""
    try:
        with httpx.stream(
            "POST", f"{root}/v1/completions", json=body, headers=headers, timeout=ANSWER_SECONDS
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                said = f"status {answer.status_code}: {answer.read().decode()}"
                if "engine_draining" in said:
                    raise TurnedAwayError(said)
                return said
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    finish = finish_reason(event) or finish
                last = line or last
    except httpx.ConnectError as error:
        raise TurnedAwayError(repr(error)) from error
    except httpx.TransportError as error:
        return repr(error)
    is_whole = (finish, last) == ("length", "data: [DONE]")
    return "" if is_whole else f"finish reason {finish}, last line {last!r}"


def finish_reason(event: Mapping[str, Any]) -> str | None:
    choices = event.get("choices") or [{}]
    reason: str | None = choices[0].get("finish_reason")
    return reason


class Revisions:
    """Watches that no engine and no status goes back.

    Attributes:
        went_back: Where one did.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.went_back: list[str] = []
        self._fleet = fleet
        self._newest: dict[str, int] = {}

    def run(self, stop: threading.Event) -> None:
        """Look again and again until told to stop."""
        while not stop.wait(LOOK_SECONDS):
            for engine in self._fleet.engines:
                # 0: it has just been started and has none yet.
                self._note(engine.name, self._fleet.revision(engine) or 0)
            self._note("the pool's status", self._status())

    def _status(self) -> int:
        shown = self._fleet.kubectl(
            *("get", "epool", POOL, "-n", NAMESPACE),
            *("-o", "jsonpath={.status.policy.revision}", "--request-timeout=2s"),
        )
        return int(shown.stdout or "0") if shown.returncode == 0 else 0

    def _note(self, who: str, revision: int) -> None:
        newest = self._newest.get(who, 0)
        if 0 < revision < newest:
            self.went_back.append(f"{who} went back from revision {newest} to {revision}")
        self._newest[who] = max(newest, revision)


def unsettled(fleet: Fleet, wanted: Mapping[str, Policy]) -> list[str]:
    """Return what is not yet as it should be in the end."""
    shown = fleet.kubectl("get", "tp,epool", "-n", NAMESPACE, "-o", "json")
    if shown.returncode != 0:
        return [f"the API server says {shown.stderr}"]
    found = {
        (one["kind"], one["metadata"]["name"]): one for one in json.loads(shown.stdout)["items"]
    }
    policies = {name: one["spec"] for (kind, name), one in found.items() if kind == "TenantPolicy"}
    wrong = [f"{name} should not exist" for name in sorted(policies.keys() - wanted.keys())]
    for name, spec in wanted.items():
        stored = policies.get(name, {})
        wrong += [f"{name} is not as applied"] if stored.get("weight") != spec["weight"] else []
    wrong += [said for one in found.values() if (said := lacking(one))]
    pool = found["EnginePool", POOL]
    revision = int(pool.get("status", {}).get("policy", {}).get("revision") or 0)
    for engine in fleet.engines:
        if (runs := fleet.revision(engine)) != revision:
            wrong.append(f"{engine.name} runs revision {runs}, the newest is {revision}")
    return wrong + unlike_stored(fleet, wanted, revision)


def lacking(manifest: Mapping[str, Any]) -> str:
    """Return why an object is not at its newest generation and ready; nothing where it is."""
    metadata, status = manifest["metadata"], manifest.get("status", {})
    name = f"{manifest['kind']} {metadata['name']}"
    if status.get("observedGeneration") != metadata["generation"]:
        seen = status.get("observedGeneration")
        return f"{name} is at generation {metadata['generation']}, observed is {seen}"
    for one in status["conditions"]:
        if one["observedGeneration"] != metadata["generation"]:
            return f"{name}: {one['type']} is about generation {one['observedGeneration']}"
        if one["type"] == "Ready" and one["status"] != "True":
            return f"{name} is not ready: {one['message']}"
    return ""


def unlike_stored(fleet: Fleet, wanted: Mapping[str, Policy], revision: int) -> list[str]:
    """Return where the policy in Redis is not the one that was applied last."""
    if not revision or fleet.stored_revision() != revision:
        return [f"Redis has revision {fleet.stored_revision()}, status {revision}"]
    try:
        snapshot = PolicySnapshot.from_text(Envelope.from_json(fleet.stored_policy()).body)
    except redis.RedisError as error:
        return [f"Redis says {error}"]
    weights = {rule.tenant: rule.weight for rule in snapshot.tenants}
    expected = {f"{NAMESPACE}/{name}": spec["weight"] for name, spec in wanted.items()}
    return [] if weights == expected else [f"Redis has weights {weights}, applied were {expected}"]
