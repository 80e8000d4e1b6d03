"""A port that stays free until somebody of ours takes it: no other program gets it by chance."""

from __future__ import annotations

import random
import socket

BELOW_THE_EPHEMERAL = range(20_000, 32_000)
"""From 32768 on Linux gives ports to whoever connects, or asks for any."""


def quiet_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens."""
    for port in random.sample(BELOW_THE_EPHEMERAL, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("of a hundred ports none was free")
