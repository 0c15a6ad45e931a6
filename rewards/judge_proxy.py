"""The proxy that requests to a judge take: that of the environment, as for every client, but none to this machine."""

import ipaddress
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


class Proxy(NamedTuple):
    """address: without user and password. variable: the environment's, in small letters."""

    address: str
    variable: str

    def __str__(self) -> str:
        return f"the proxy {self.address} ({self.variable})"


def is_here(url: str) -> bool:
    """Whether the host of a URL is this machine, by its name or number."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def proxy_to(url: str) -> Proxy | None:
    """The one that the environment has for a URL; None: it is asked directly."""
    place, proxies = urlsplit(url), getproxies()
    kind = next((kind for kind in (place.scheme, "all") if proxies.get(kind)), None)
    if kind is None or is_here(url) or proxy_bypass(place.hostname or ""):
        return None
    given = proxies[kind] if "://" in proxies[kind] else f"http://{proxies[kind]}"
    before, _, after = given.partition("://")
    return Proxy(f"{before}://{after.rpartition('@')[2]}", f"{kind}_proxy")
