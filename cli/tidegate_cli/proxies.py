"""Proxies of the environment: for what is on this machine there is no way through them."""

from collections.abc import Mapping, Sequence

LOOPBACK = ("127.0.0.1", "localhost")


def without_proxy(environ: Mapping[str, str], hosts: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that exempt loopback and `hosts` from the proxies in `environ`.

    Whatever was exempt stays so. Both spellings, as libraries differ in which they prefer.
    """
    found = [environ[name] for name in ("no_proxy", "NO_PROXY") if environ.get(name)]
    listed = ",".join(dict.fromkeys([*found, *LOOPBACK, *hosts]))
    # A star exempts everything, but only while it stands alone.
    exempt = "*" if "*" in found else listed
    return {"no_proxy": exempt, "NO_PROXY": exempt}
