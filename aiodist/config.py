"""Every AIODIST_* environment variable, read and checked in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["DEFAULT_TIMEOUT", "Settings"]

DEFAULT_TIMEOUT: Final = 300.0
"""Seconds a call waits for its peers unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says; None where it says nothing.

    Attributes:
        rendezvous: AIODIST_RENDEZVOUS, ``http[s]://host:port`` (IPv6 in brackets).
        rank: AIODIST_RANK, this process's rank in the world.
        world_size: AIODIST_WORLD_SIZE, number of ranks.
        local_rank: AIODIST_LOCAL_RANK, rank among the launcher's ranks on this host.
        job: AIODIST_JOB, name of the job on the rendezvous service.
        token: AIODIST_TOKEN, the bearer token of the rendezvous service.
        tls_ca: AIODIST_TLS_CA, PEM file of the CAs that are trusted for an ``https`` rendezvous, in place of the system's.
        timeout: AIODIST_TIMEOUT, seconds that a call waits for its peers.
        device: AIODIST_DEVICE, ``cpu``; others are not built yet.
        backend: AIODIST_BACKEND, ``auto`` or ``shm``; others are not built yet.
        interface: AIODIST_INTERFACE, network interface or address to advertise.
        tuning: AIODIST_TUNING, path of a profile that `aiodist bench --tune` wrote.
    """

    rendezvous: str | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    job: str | None = None
    token: str | None = None
    tls_ca: str | None = None
    timeout: float | None = None
    device: str | None = None
    backend: str | None = None
    interface: str | None = None
    tuning: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; an empty one counts as absent.

        Raises:
            ValueError: a variable is not of its type; the text names it.
        """
        env = os.environ if environ is None else environ
        return cls(
            rendezvous=_text(env, "AIODIST_RENDEZVOUS"),
            rank=_whole(env, "AIODIST_RANK"),
            world_size=_whole(env, "AIODIST_WORLD_SIZE"),
            local_rank=_whole(env, "AIODIST_LOCAL_RANK"),
            job=_text(env, "AIODIST_JOB"),
            token=_text(env, "AIODIST_TOKEN"),
            tls_ca=_text(env, "AIODIST_TLS_CA"),
            timeout=_seconds(env, "AIODIST_TIMEOUT"),
            device=_text(env, "AIODIST_DEVICE"),
            backend=_text(env, "AIODIST_BACKEND"),
            interface=_text(env, "AIODIST_INTERFACE"),
            tuning=_text(env, "AIODIST_TUNING"),
        )


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = _text(env, name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None
    if value < 0:
        raise ValueError(f"{name}={text!r} is negative")
    return value


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = _text(env, name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number of seconds") from None
    if not 0 < value < 1e9:
        raise ValueError(f"{name}={text!r} must be a finite positive number of seconds")
    return value
