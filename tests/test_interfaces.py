"""Network interfaces and addresses of this host, and which of them a rank tells others."""

from __future__ import annotations

import re

import pytest

import aiodist
from aiodist.rendezvous.interfaces import address_of, interfaces, is_loopback_address

pytestmark = pytest.mark.timeout(30)


def test_an_interface_is_named_or_one_of_its_addresses() -> None:
    there = interfaces()
    assert there["lo"][0] == "127.0.0.1"
    for name, addresses in there.items():
        assert address_of(name) == addresses[0]
        assert [address_of(address) for address in addresses] == addresses
        assert [address_of(f"[{address}]") for address in addresses if ":" in address] == [one for one in addresses if ":" in one]
    assert address_of("127.0.0.5") == "127.0.0.5"  # all of 127.0.0.0/8 is here


@pytest.mark.parametrize("wrong", ["no-such0", "198.51.100.7", "2001:db8::7", "0.0.0.0", "::", "", "l" * 300, "lo\0"])
def test_a_wrong_interface_is_refused_with_those_that_there_are(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = re.escape(f"lo ({', '.join(interfaces()['lo'])})")
    text = rf"{re.escape(repr(wrong))} \(interface=, AIODIST_INTERFACE\).*there are .*{there}"
    with pytest.raises(ValueError, match=text):
        aiodist.init(interface=wrong)
    if wrong and "\0" not in wrong:
        monkeypatch.setenv("AIODIST_INTERFACE", wrong)
        with pytest.raises(ValueError, match=text):
            aiodist.init()
        aiodist.init(interface="lo")  # what is said outright counts
    with pytest.raises(TypeError, match="interface must be a string, not int"):
        aiodist.init(interface=5)  # type: ignore[arg-type]


def test_loopback_addresses_are_known() -> None:
    assert all(is_loopback_address(address) for address in ("127.0.0.1", "127.0.1.1", "::1"))
    assert not any(is_loopback_address(address) for address in ("10.0.0.1", "fe80::1%eth0", "localhost", ""))
