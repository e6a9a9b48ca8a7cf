"""Who calls: from an API key to a tenant of the policy in force."""

import hashlib
import hmac
import secrets

from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server.errors import InvalidApiKeyError, NoPolicyError
from tidegate_policies.snapshot import UNKNOWN_TENANT, TenantRule, UnknownAction

_SCHEME = "bearer "


class Identities:
    """The API keys of the policy in force.

    The policy holds SHA-256 digests of keys, never keys. They are looked up under a second digest
    with a secret of this process: how long a look-up takes then says nothing about the digests, as
    nobody outside can choose what is compared.
    """

    def __init__(self) -> None:
        """Know nobody until `use_policy`."""
        self._secret = secrets.token_bytes(32)
        self._policy: PolicyInForce | None = None
        self._tenants: dict[bytes, str] = {}

    def use_policy(self, policy: PolicyInForce) -> None:
        """Replace all keys by those of `policy`."""
        keys = policy.snapshot.tenant_by_key_digest
        self._tenants = {self._blind(digest): tenant for digest, tenant in keys.items()}
        self._policy = policy

    def tenant_of(self, authorization: str | None) -> str:
        """Return whose key the `Authorization` header holds; `unknown` where such are let in.

        Raises:
            NoPolicyError: Nothing is known yet.
            InvalidApiKeyError: Nobody's, and the pool refuses unknown tenants.
        """
        if self._policy is None:
            raise NoPolicyError
        key = bearer_key(authorization)
        # An empty key is no key, whatever an empty Secret may have put into the policy.
        tenant = self._tenants.get(self._blind(hashlib.sha256(key).hexdigest())) if key else None
        if tenant is not None:
            return tenant
        if self._policy.snapshot.unknown_tenants.action is UnknownAction.ADMIT:
            return UNKNOWN_TENANT
        if not key:
            raise InvalidApiKeyError("No API key was given (Authorization: Bearer KEY).")
        raise InvalidApiKeyError

    def rule_of(self, tenant: str) -> TenantRule | None:
        """Return the rule of `tenant` in force; None for `unknown` and those that are gone."""
        if self._policy is None:
            return None
        return self._policy.snapshot.tenant_rules.get(tenant)

    def _blind(self, digest: str) -> bytes:
        return hmac.digest(self._secret, digest.encode(), "sha256")


def bearer_key(authorization: str | None) -> bytes:
    """Return the key of an `Authorization: Bearer KEY` header; empty when there is none."""
    value = authorization or ""
    if not value.lower().startswith(_SCHEME):
        return b""
    # The framework reads header bytes as Latin-1; these are the bytes that were sent.
    return value[len(_SCHEME) :].strip().encode("latin-1")
