"""Leader election by a Lease: of several operators one works, the others stand by.

Clocks of different machines are never compared: a Lease counts as expired when it was seen to be
unchanged for its duration, by the clock of whoever looks. Every write names the version that was
read, so that two that want the same Lease can't both get it.
"""

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import aiohttp

from tidegate_operator.kube import ApiError, KubeApi
from tidegate_operator.tasks import in_a_line

_LOG = logging.getLogger(__name__)

LEASE_SECONDS = 10
"""A leader that is gone without a word is followed after this, and one look, at the latest."""

GIVE_UP_SECONDS = 7.0
"""A leader that could not renew for so long stops working: well before others may begin."""

RELEASE_SECONDS = 3.0
"""How long one that stops waits for the Lease to be given back."""

RENEW_SECONDS = 2.0
LOOK_SECONDS = 1.0

NOT_FOUND, CONFLICT = 404, 409

_ERRORS = (ApiError, aiohttp.ClientError, OSError, TimeoutError)


class LeadershipLostError(Exception):
    """This process is no leader any more; another one works, or soon will.

    Attributes:
        lease: `namespace/name`.
    """

    def __init__(self, lease: str, problem: str) -> None:
        super().__init__(f"lease {lease}: {problem}")
        self.lease = lease


@dataclass(frozen=True, slots=True)
class LeaseName:
    """Where the Lease is."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `namespace/name`.

        Raises:
            ValueError: It is something else.
        """
        namespace, slash, name = text.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise ValueError(f"must be namespace/name, got {text!r}")
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def collection(self) -> str:
        """Path of all Leases of the namespace."""
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"

    @property
    def path(self) -> str:
        """Path of this one."""
        return f"{self.collection}/{self.name}"


class Election:
    """One candidate."""

    def __init__(self, api: KubeApi, lease: LeaseName, identity: str) -> None:
        """Prepare.

        Args:
            api: Owned by the caller.
            lease: The same for all candidates.
            identity: Unique to this process: one that restarts must not take itself for the leader.
        """
        self._api = api
        self._lease = lease
        self._identity = identity
        self._held: Any = None
        self._seen: tuple[object, object] = (None, None)
        self._seen_at = 0.0
        self._holder: object = None

    async def can_read(self) -> None:
        """Wait until the API server answers about the Lease: a candidate that can't is no help."""
        while True:
            try:
                await self._read()
            except _ERRORS as error:
                _LOG.warning("lease %s can't be read: %s", self._lease, in_a_line(error))
                await asyncio.sleep(LOOK_SECONDS)
            else:
                return

    async def acquire(self) -> None:
        """Stand by until this process is the leader; from then on `keep` must run."""
        while True:
            try:
                if await self._try_to_take():
                    _LOG.info("leader by lease %s as %s", self._lease, self._identity)
                    return
            except _ERRORS as error:
                if not (isinstance(error, ApiError) and error.status == CONFLICT):
                    _LOG.warning("lease %s can't be taken: %s", self._lease, in_a_line(error))
            await asyncio.sleep(LOOK_SECONDS)

    async def keep(self) -> None:
        """Renew until cancelled.

        Raises:
            LeadershipLostError: Others may work now; this process must not.
        """
        loop = asyncio.get_running_loop()
        renewed_at = loop.time()
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            asked_at = loop.time()
            try:
                # However long a request hangs, the end comes before others begin.
                async with asyncio.timeout_at(renewed_at + GIVE_UP_SECONDS):
                    await self._renew()
            except _ERRORS as error:
                if loop.time() >= renewed_at + GIVE_UP_SECONDS - RENEW_SECONDS:
                    raise LeadershipLostError(
                        str(self._lease),
                        f"not renewed for {GIVE_UP_SECONDS:g} s: {in_a_line(error)}",
                    ) from error
                _LOG.warning("lease %s is not renewed: %s", self._lease, in_a_line(error))
            else:
                renewed_at = asked_at

    async def release(self) -> None:
        """Let the next one begin at once; does nothing where that fails, as leases expire."""
        if self._held is None:
            return
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._write({**self._held["spec"], "holderIdentity": "", "renewTime": _now()})
        except _ERRORS as error:
            _LOG.warning("lease %s is not released: %s", self._lease, in_a_line(error))
        self._held = None

    async def _try_to_take(self) -> bool:
        found = await self._read()
        if found is None:
            body = self._body({}, self._spec(transitions=0))
            self._held = await self._api.request("POST", self._lease.collection, body=body)
            return True
        spec = found.get("spec") or {}
        if not self._is_free(spec):
            self._note_holder(spec.get("holderIdentity"))
            return False
        self._held = found
        try:
            await self._write(self._spec(transitions=int(spec.get("leaseTransitions") or 0) + 1))
        except BaseException:
            self._held = None
            raise
        return True

    def _note_holder(self, holder: object) -> None:
        if holder != self._holder:
            self._holder = holder
            _LOG.info("lease %s is held by %s; standing by", self._lease, holder)

    def _is_free(self, spec: Any) -> bool:  # noqa: ANN401
        holder = spec.get("holderIdentity")
        if not holder:
            return True
        now = asyncio.get_running_loop().time()
        if self._seen != (holder, spec.get("renewTime")):
            self._seen = (holder, spec.get("renewTime"))
            self._seen_at = now
        return bool(now - self._seen_at >= (spec.get("leaseDurationSeconds") or LEASE_SECONDS))

    async def _renew(self) -> None:
        try:
            await self._write({**self._held["spec"], "renewTime": _now()})
        except ApiError as error:
            if error.status not in {NOT_FOUND, CONFLICT}:
                raise
            await self._look_who_changed_it()

    async def _look_who_changed_it(self) -> None:
        """Go on with the Lease as it is now, if it is still this process's."""
        found = await self._read()
        holder = (found or {}).get("spec", {}).get("holderIdentity")
        if holder != self._identity:
            self._held = None
            now_with = f"taken by {holder}" if holder else "taken away"
            raise LeadershipLostError(str(self._lease), now_with)
        self._held = found
        await self._write({**found["spec"], "renewTime": _now()})

    async def _read(self) -> Any:  # noqa: ANN401
        """Return the Lease; None where there is none."""
        try:
            return await self._api.request("GET", self._lease.path)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _write(self, spec: Any) -> None:  # noqa: ANN401
        """Replace what was read last, unless it has changed since."""
        body = self._body(self._held["metadata"], spec)
        self._held = await self._api.request("PUT", self._lease.path, body=body)

    def _body(self, metadata: Any, spec: Any) -> Any:  # noqa: ANN401
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**metadata, "name": self._lease.name},
            "spec": spec,
        }

    def _spec(self, *, transitions: int) -> Any:  # noqa: ANN401
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": _now(),
            "renewTime": _now(),
            "leaseTransitions": transitions,
        }


def _now() -> str:
    """Return the present time as Leases have it; people read it, nothing is computed with it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
