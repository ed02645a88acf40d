"""Start a SuperLink or a SuperNode that takes orders from its own user only.

    python -m fedvit.network.flower.guard [--own-app] flower-superlink|flower-supernode ARGUMENTS...

Flower asks neither `flwr run` nor the processes that fetch work for a password: whoever reaches the port may start an
app, which is code, or take over a site's work. Here every request must come from a process of the same user on this
machine; the kernel's table of connections says whose it is. With --enable-supernode-auth, the requests that
SuperNodes sign with their keys may come from anybody, such as a proxy in front of the SuperLink.

With --own-app, a SuperNode runs FedViT's own app and no other, whatever the server sends.
"""

import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from fedvit.core.errors import UserError

log = logging.getLogger("flwr")  # where Flower's own lines go
OWN_APP = "--own-app"
GUARDED = ("flower-superlink", "flower-supernode")
SIGNED = tuple(  # what a SuperNode asks a SuperLink for; not register-node, by which anybody could join
    f"/v1/fleet/{name}"
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run",
        "get-fab", "pull-object", "push-object", "confirm-message-received",
    )
)  # fmt: skip
CONNECTIONS = Path("/proc/net/tcp")
ESTABLISHED, LISTENING = "01", "0A"  # a connection that its process has closed is listed as root's: do not look there
REFUSAL = b"only the user who started this SuperLink or SuperNode may do this"

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


def owner_of(near: tuple[str, int], far: tuple[str, int], state: str = ESTABLISHED) -> int | None:
    """Return the user ID of the process at the end `near` of an open connection on this machine."""
    wanted = [_as_listed(*near), _as_listed(*far), state]
    for line in CONNECTIONS.read_text().splitlines()[1:]:
        words = line.split()
        if words[1:4] == wanted:
            return int(words[7])
    return None


def listener_at(host: str, port: int) -> int | None:
    """Return the user ID of the process that listens at this IPv4 address."""
    return owner_of((host, port), ("0.0.0.0", 0), LISTENING)


def _as_listed(host: str, port: int) -> str:
    """Spell an IPv4 address as the kernel does: the number in this machine's own order of bytes."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def is_own(scope: Scope) -> bool:
    """Return whether a request comes from a process of this user."""
    near, far = scope.get("client"), scope.get("server")
    try:
        return bool(near and far) and owner_of(tuple(near), tuple(far)) == os.geteuid()  # type: ignore[arg-type]
    except (OSError, ValueError):  # not an IPv4 address, or no such table
        return False


def guarded(app: App, *, open_to_all: tuple[str, ...] = ()) -> App:
    """Return a web application that refuses requests of other users, except for these paths."""

    async def answer(
        scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in open_to_all or is_own(scope):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})

    return answer


def guard_servers(open_to_all: tuple[str, ...]) -> None:
    """Guard every web server that this process will start, whichever part of Flower starts it."""
    import uvicorn

    load = uvicorn.Config.load

    def load_guarded(self: uvicorn.Config) -> None:
        self.proxy_headers = False  # a header must not say where a request comes from
        load(self)
        self.loaded_app = guarded(self.loaded_app, open_to_all=open_to_all)

    uvicorn.Config.load = load_guarded  # type: ignore[method-assign]


def run_own_app_only() -> None:
    """Let the SuperNode in this process ignore the runs of any other app than FedViT's own."""
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode import fleet_http_connection

    from fedvit.network.flower.own_app import foreign

    names = vars(fleet_http_connection)
    unpack, own = names["fab_from_proto"], version("fedvit")

    def checked(packed: Any) -> Any:
        fab = unpack(packed)
        wrong = foreign(fab.content)
        if wrong is not None:
            log.error("the server's app is not the one that FedViT %s writes, so it is not run: %s", own, wrong)
            raise RunNotRunningException
        return fab

    names["fab_from_proto"] = checked


def main(words: list[str]) -> None:
    own_app, words = words[:1] == [OWN_APP], words[1:] if words[:1] == [OWN_APP] else words
    if not words or words[0] not in GUARDED:
        raise SystemExit(f"expected {' or '.join(GUARDED)} and its arguments")
    if not os.access(CONNECTIONS, os.R_OK):
        raise UserError(f"{CONNECTIONS} cannot be read: a guarded SuperLink or SuperNode needs Linux with /proc")
    (command,) = entry_points(group="console_scripts", name=words[0])
    guard_servers(SIGNED if "--enable-supernode-auth" in words else ())
    if own_app:
        run_own_app_only()
    sys.argv = words
    command.load()()


if __name__ == "__main__":
    main(sys.argv[1:])
