"""Makes the credentials of an installation, once: signing key, Redis passwords, tokens.

    python -m tidegate_operator.credentials --namespace NAMESPACE --prefix RELEASE

What is there already is never changed: an upgrade, a rollback or a second installation finds it
and goes on with it, and so do credentials that were put there by hand. Three Secrets, so that
nobody can read more than its own part:

* `RELEASE-operator`: `signing-key`, `redis-password`, `console-token`;
* `RELEASE-engine`: `verify-key`, `redis-password`, `admin-token`;
* `RELEASE-redis`: SHA-256 of the two passwords, `operator-sha256` and `engine-sha256`.
"""

import argparse
import asyncio
import base64
import hashlib
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tidegate_operator.keys import (
    SigningKeyError,
    parse_signing_key,
    private_key_text,
    public_key_text,
)
from tidegate_operator.kube import ApiError, KubeApi

Credentials = Mapping[str, Mapping[str, str]]
"""Texts by part (`operator`, `engine`, `redis`) and key."""

PARTS = ("operator", "engine", "redis")
PASSWORD_BYTES = 32
NOT_FOUND = 404

_MERGE = "application/merge-patch+json"


class CredentialsError(ValueError):
    """Credentials that are there contradict each other.

    Attributes:
        part: The Secret in which one is wrong.
        key: The key in it.
    """

    def __init__(self, part: str, key: str, problem: str) -> None:
        super().__init__(
            f"Secret of the {part}, key {key!r}: {problem}; put back what belongs to it, or delete"
            " this Secret to have it made anew"
        )
        self.part = part
        self.key = key


def completed(found: Credentials) -> dict[str, dict[str, str]]:
    """Return all credentials: what was found as it is, and what was missing made anew.

    Raises:
        CredentialsError: What was found doesn't belong together; nothing can be made to fit.
    """
    operator, engine, redis = ({**found.get(part, {})} for part in PARTS)
    if "signing-key" not in operator and "verify-key" in engine:
        raise CredentialsError(
            "engine", "verify-key", "belongs to a signing key that the operator's Secret lacks"
        )
    operator.setdefault("signing-key", private_key_text(Ed25519PrivateKey.generate()))
    operator.setdefault("console-token", secrets.token_hex(PASSWORD_BYTES))
    try:
        verify_key = public_key_text(parse_signing_key(operator["signing-key"].encode()))
    except ValueError as error:
        raise CredentialsError("operator", "signing-key", str(error)) from error
    if engine.setdefault("verify-key", verify_key) != verify_key:
        raise CredentialsError("engine", "verify-key", "is not that of the operator's signing key")
    engine.setdefault("admin-token", secrets.token_hex(PASSWORD_BYTES))
    for part, own in (("operator", operator), ("engine", engine)):
        # Hexadecimal: it goes into a URL as it is.
        own.setdefault("redis-password", secrets.token_hex(PASSWORD_BYTES))
        digest = hashlib.sha256(own["redis-password"].encode()).hexdigest()
        if redis.setdefault(f"{part}-sha256", digest) != digest:
            raise CredentialsError(
                "redis", f"{part}-sha256", f"is not that of the {part}'s redis-password"
            )
    return {"operator": operator, "engine": engine, "redis": redis}


async def ensure(
    api: KubeApi, *, namespace: str, prefix: str, labels: Mapping[str, str]
) -> list[str]:
    """Make what is missing in the namespace; returns the names of the Secrets that changed.

    Raises:
        CredentialsError: What is there doesn't belong together; nothing is changed.
        ApiError: The API server refused.
    """
    collection = f"/api/v1/namespaces/{namespace}/secrets"
    found = {part: await _read(api, f"{collection}/{prefix}-{part}") for part in PARTS}
    wanted = completed({part: texts or {} for part, texts in found.items()})
    changed = []
    for part in PARTS:
        name, present = f"{prefix}-{part}", found[part]
        missing = {key: text for key, text in wanted[part].items() if key not in (present or {})}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": dict(labels)},
            "data": {
                key: base64.b64encode(text.encode()).decode() for key, text in missing.items()
            },
        }
        if present is None:
            await api.request("POST", collection, body=body)
        elif missing:
            await api.request(
                "PATCH",
                f"{collection}/{name}",
                body={"data": body["data"]},
                content_type=_MERGE,
            )
        else:
            continue
        changed.append(name)
    return changed


async def _read(api: KubeApi, path: str) -> dict[str, str] | None:
    try:
        secret = await api.request("GET", path)
    except ApiError as error:
        if error.status == NOT_FOUND:
            return None
        raise
    values = secret.get("data") or {}
    return {key: base64.b64decode(value).decode() for key, value in values.items()}


async def _run(arguments: argparse.Namespace) -> None:
    labels = dict(pair.split("=", 1) for pair in arguments.label)
    async with KubeApi.connected(arguments.kubeconfig) as api:
        changed = await ensure(
            api, namespace=arguments.namespace, prefix=arguments.prefix, labels=labels
        )
    sys.stdout.write(f"made: {', '.join(changed) or 'nothing, all are there'}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing, as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tidegate_operator.credentials", description=main.__doc__
    )
    parser.add_argument("--namespace", required=True, help="where the Secrets are")
    parser.add_argument("--prefix", required=True, help="what their names begin with")
    parser.add_argument(
        "--label", action="append", default=[], help="NAME=VALUE, for the Secrets; repeatable"
    )
    parser.add_argument("--kubeconfig", type=Path, help="without: the pod's service account")
    try:
        asyncio.run(_run(parser.parse_args(arguments)))
    except (CredentialsError, SigningKeyError, ApiError, aiohttp.ClientError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
