"""Whose connection it is: a guarded server answers its own user only."""

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fedvit.network.flower import guard

pytestmark = pytest.mark.attack
NEAR, FAR = ("127.0.0.1", 40000), ("127.0.0.1", 8000)


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = listener.accept()
            with server:
                yield client, server


def asked(path: str, near: Any, far: Any = FAR, kind: str = "http", **told: Any) -> int:
    """The status that a guarded application answers with."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "client": near, "server": far}
    asyncio.run(guard.guarded(app, **told)(scope, None, send))  # type: ignore[arg-type]
    return int(sent[0].get("status", 0))


def test_the_owner_of_a_connection_is_the_user_of_the_process_at_its_other_end(connection: Any) -> None:
    _, server = connection
    assert guard.owner_of(server.getpeername(), server.getsockname()) == os.geteuid()
    assert guard.is_own({"client": server.getpeername(), "server": server.getsockname()})
    assert guard.owner_of(server.getsockname(), ("127.0.0.1", 1)) is None
    assert guard.listener_at(*server.getsockname()) == os.geteuid()


def test_a_connection_that_its_sender_has_closed_belongs_to_nobody(connection: Any) -> None:
    """The kernel then lists root as its user, and root may be the one who is guarded."""
    client, server = connection
    ends = server.getpeername(), server.getsockname()
    client.close()
    assert guard.owner_of(*ends) is None


@pytest.mark.parametrize("near", [None, NEAR, ("::1", 40000), ("127.0.0.1", 0), ("", 0)])
def test_a_request_from_an_unknown_place_is_refused(near: Any) -> None:
    assert asked("/v1/control/start-run", near) == 403
    assert asked("/v1/fleet/pull-messages", near) == 403


def test_other_users_are_refused_and_ones_own_processes_are_not(connection: Any, monkeypatch: Any) -> None:
    _, server = connection
    ends = server.getpeername(), server.getsockname()
    assert asked("/v1/control/start-run", *ends) == 200
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert asked("/v1/control/start-run", *ends) == 403
    assert asked("/v1/control/start-run", *ends, kind="websocket") == 0  # closed


def test_signed_requests_pass_where_sites_sign_and_nothing_like_them_does() -> None:
    assert {asked(path, NEAR, open_to_all=guard.SIGNED) for path in guard.SIGNED} == {200}
    for path in ("register-node", "unregister-node", "pull-messages/", "../control/start-run", "PULL-MESSAGES"):
        assert asked(f"/v1/fleet/{path}", NEAR, open_to_all=guard.SIGNED) == 403


def test_only_flowers_servers_can_be_guarded() -> None:
    with pytest.raises(SystemExit, match="flower-superlink or flower-supernode"):
        guard.main(["flwr", "run"])
