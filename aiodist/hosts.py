"""On which hosts the ranks of a world are, and whether they can reach each other there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiodist.errors import TransportError

if TYPE_CHECKING:  # loaded when a world has peers
    from aiodist.rendezvous.client import Membership

__all__ = ["check_one_host"]


def check_one_host(membership: Membership) -> None:
    """Refuse a world whose ranks are on several hosts, or in several network namespaces of one.

    Raises:
        TransportError: with the same text on all ranks; its ``ranks`` are those on other hosts than this one.
    """
    from aiodist.rendezvous.interfaces import is_loopback_address

    members, rank = membership.members, membership.rank
    hosts: dict[str, list[int]] = {}
    for one, info in enumerate(members):
        hosts.setdefault(str(info.get("identity")), []).append(one)
    if len(hosts) == 1:
        return
    elsewhere = [one for one, info in enumerate(members) if info.get("identity") != members[rank].get("identity")]
    blind = [one for one, info in enumerate(members) if is_loopback_address(str(info.get("address")))]
    if blind:
        text = (
            f"{_ranks(members, blind)}: that address leads other hosts to themselves. Let these ranks reach the rendezvous "
            "by an address that all hosts can reach, or name it or its network interface by interface= or AIODIST_INTERFACE"
        )
    else:
        where = "; ".join(_ranks(members, ranks) for ranks in hosts.values())
        text = f"{where}. There is no path between hosts yet: all ranks must be on one"
    raise TransportError(f"the ranks of the world are on {len(hosts)} hosts: {text}", rank=rank, ranks=elsewhere)


def _ranks(members: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    """``ranks 0, 1 on node-a (10.0.0.1)``."""
    from aiodist.rendezvous.job import listed, name_ranks

    places = dict.fromkeys(f"{str(members[rank].get('host'))[:80]} ({str(members[rank].get('address'))[:80]})" for rank in ranks)
    return f"{name_ranks(ranks)} on {listed(list(places))}"
