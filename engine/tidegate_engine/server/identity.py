"""Who calls: from an API key, or a gateway's word, to a tenant of the policy in force."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server.errors import (
    InvalidApiKeyError,
    InvalidHeaderError,
    NoPolicyError,
    TenantHeaderNotAllowedError,
)
from tidegate_policies.rules import UNKNOWN_TENANT, TenantRule, UnknownAction

AUTHORIZATION_HEADER = "authorization"
TENANT_HEADER = "x-tidegate-tenant"
"""Where a trusted gateway says for whom it calls."""

_SCHEME = "bearer "


class Identities:
    """The API keys of the policy in force.

    The policy holds SHA-256 digests of keys, never keys. They are looked up under a second digest
    with a secret of this process: how long a look-up takes then says nothing about the digests, as
    nobody outside can choose what is compared.

    A trusted gateway has a token in place of a key, and names a tenant. One that the policy doesn't
    declare is unknown, like a key that it doesn't, and its name is kept nowhere.
    """

    def __init__(self) -> None:
        """Know nobody until `use_policy`."""
        self._secret = secrets.token_bytes(32)
        self._gateway_token: bytes | None = None
        self._policy: PolicyInForce | None = None
        self._tenants: dict[bytes, str] = {}

    def trust_gateway(self, token: str) -> None:
        """Believe who presents `token` for whom it calls."""
        self._gateway_token = token.encode()

    def use_policy(self, policy: PolicyInForce) -> None:
        """Replace all keys by those of `policy`."""
        keys = policy.snapshot.tenant_by_key_digest
        self._tenants = {self._blind(digest): tenant for digest, tenant in keys.items()}
        self._policy = policy

    def tenant_of(self, authorization: str | None, named: Sequence[str] = ()) -> str:
        """Return who calls; `unknown` where such are let in.

        Args:
            authorization: The `Authorization` header.
            named: The values of all `x-tidegate-tenant` headers.

        Raises:
            NoPolicyError: Nothing is known yet.
            InvalidApiKeyError: Nobody who is declared, and the pool refuses unknown tenants.
            TenantHeaderNotAllowedError: A tenant is named by somebody else than the gateway.
            InvalidHeaderError: The gateway names several.
        """
        if self._policy is None:
            raise NoPolicyError
        key = bearer_key(authorization)
        is_gateway = self._gateway_token is not None and hmac.compare_digest(
            key, self._gateway_token
        )
        if named and not is_gateway:
            raise TenantHeaderNotAllowedError(TENANT_HEADER)
        tenant = self._named_tenant(named) if is_gateway else self._holder_of(key)
        if tenant is not None:
            return tenant
        if self._policy.snapshot.unknown_tenants.action is UnknownAction.ADMIT:
            return UNKNOWN_TENANT
        if is_gateway:
            message = f"The gateway names no tenant of this pool ({TENANT_HEADER})."
            raise InvalidApiKeyError(message)
        if not key:
            raise InvalidApiKeyError("No API key was given (Authorization: Bearer KEY).")
        raise InvalidApiKeyError

    def rule_of(self, tenant: str) -> TenantRule | None:
        """Return the rule of `tenant` in force; None for `unknown` and those that are gone."""
        if self._policy is None:
            return None
        return self._policy.snapshot.tenant_rules.get(tenant)

    def tiers_of(self, tenant: str) -> tuple[str, ...]:
        """Return the tiers that the requests of `tenant` may have, its own first."""
        if self._policy is None:
            return ()
        rule = self.rule_of(tenant)
        if rule is None:
            return (self._policy.snapshot.unknown_tenants.tier,)
        return (rule.tier, *rule.allowed_tiers)

    def _named_tenant(self, named: Sequence[str]) -> str | None:
        if len(named) > 1:
            # Which of them is the gateway's own, and which one its client has put in?
            raise InvalidHeaderError(TENANT_HEADER, "to be given once")
        try:
            name = "".join(named).encode("latin-1").decode()
        except UnicodeDecodeError:
            return None
        return name if self.rule_of(name) is not None else None

    def _holder_of(self, key: bytes) -> str | None:
        # An empty key is no key, whatever an empty Secret may have put into the policy.
        return self._tenants.get(self._blind(hashlib.sha256(key).hexdigest())) if key else None

    def _blind(self, digest: str) -> bytes:
        return hmac.digest(self._secret, digest.encode(), "sha256")


def bearer_key(authorization: str | None) -> bytes:
    """Return the key of an `Authorization: Bearer KEY` header; empty when there is none."""
    value = authorization or ""
    if not value.lower().startswith(_SCHEME):
        return b""
    # The framework reads header bytes as Latin-1; these are the bytes that were sent. As many a
    # letter of UTF-8 ends with what is a space in Latin-1, only those of ASCII are none of the key.
    return value[len(_SCHEME) :].strip(" \t").encode("latin-1")
