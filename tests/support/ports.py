"""A port of this machine for a server that another process starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserve_port() -> Iterator[int]:
    """A free port, which nobody else gets before the server listens there.

    The socket here is bound and does not listen. Servers of gRPC, such as JAX's coordinator, share a port like that.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
