"""Split learning between machines: a gRPC service whose messages are plain bytes, with certificates on both sides.

A client opens one stream, `attend`, on which it introduces itself and receives its tasks; when the stream breaks, the
client counts as disconnected. `call` carries one message of a batch and its answer, and `done` reports the end of a
task. The handlers only put events into a queue; a single thread answers them all, so that no sum depends on timing.
"""

import json
import queue
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from fedvit.core.errors import UserError, one_line
from fedvit.network.boundary import TOKEN, read_introduction, read_welcome
from fedvit.network.grpc.identity import Identity, host_and_port
from fedvit.split.messages import Message

try:
    import grpc
except ImportError as missing:
    raise UserError("split learning over a network needs grpcio: pip install fedvit[split]") from missing

SERVICE = "fedvit.Split"
UNLIMITED = -1
LONGEST_TEXT = 300
ALIVE = (  # a peer whose machine is down is noticed within half a minute
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


class ConnectionRefusedByServerError(Exception):
    """A refusal by the server, in words that the client may read."""


class LateError(ConnectionRefusedByServerError):
    """A message that belongs to another round, step or task."""


class GarbageError(ConnectionRefusedByServerError):
    """A message that a correct client never sends."""


class LostError(Exception):
    """A lost connection."""


class TakenError(UserError):
    """A name that is already connected: by another client, or by our own old connection that the server still holds."""


# The server's side.


@dataclass
class Session:
    """One client's stream, from its hello to its end."""

    name: str
    hello: Mapping[str, Any]
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    tasks: "queue.SimpleQueue[bytes | None]" = field(default_factory=queue.SimpleQueue)  # None ends the stream
    alive: bool = True


@dataclass
class Event:
    """An event for the answering thread; the sender of a call or done waits for `reply`."""

    kind: Literal["came", "gone", "call", "done"]
    session: Session
    content: bytes = b""
    reply: "Future[bytes]" = field(default_factory=Future)


class Listener:
    """The service. `admit` raises ConnectionRefusedByServerError for a bad hello; others first receive `welcome`."""

    def __init__(
        self,
        address: str,
        identity: Identity | None,
        admit: Callable[[Mapping[str, Any]], None],
        welcome: Mapping[str, Any],
        *,
        clients: int,
        longest: int = UNLIMITED,
    ):
        self.identity, self.admit, self.welcome = identity, admit, welcome
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.sessions: dict[str, Session] = {}  # by name
        self.lock = threading.Lock()
        self.declined: dict[str, str] = {}  # by name: the reason why a client does not take part
        self.closed = False
        options = (
            *ALIVE,
            ("grpc.so_reuseport", 0),  # a second server on the same port is an error
            ("grpc.max_receive_message_length", longest),
            ("grpc.max_send_message_length", UNLIMITED),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        )
        handlers = {
            "attend": grpc.unary_stream_rpc_method_handler(self.attend),
            "call": grpc.unary_unary_rpc_method_handler(self.call),
            "done": grpc.unary_unary_rpc_method_handler(self.done),
        }
        threads = 3 * clients + 8  # a stream and a call for each client, and room to refuse strangers
        self.server = grpc.server(ThreadPoolExecutor(threads), options=options)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if identity is None:
                self.port = self.server.add_insecure_port(address)
            else:
                cert, key, ca = identity.read()
                credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
                self.port = self.server.add_secure_port(address, credentials)
        except RuntimeError as problem:
            raise UserError(
                f"cannot listen on {address}: the port is in use, or the address is not on this machine; choose another"
            ) from problem
        self.server.start()

    def attend(self, request: bytes, context: Any) -> Iterator[bytes]:
        try:
            hello = read_introduction(request)
        except ValueError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not the hello of a fedvit split-client")
        name = str(hello["name"])
        self.check_certificate(context, name)
        try:
            if "declined" in hello:
                self.declined[name] = one_line(hello["declined"], LONGEST_TEXT)
                raise ConnectionRefusedByServerError("noted")
            self.admit(hello)
        except ConnectionRefusedByServerError as problem:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(problem))
        session = Session(name, hello)
        with self.lock:
            known = self.sessions.get(name)
            if known is None or not known.alive:
                self.sessions[name] = session
        if self.sessions[name] is not session:
            text = f"a client named {name!r} is already connected: every client needs its own name"
            context.abort(grpc.StatusCode.ALREADY_EXISTS, text)
        if not context.add_callback(lambda: self.leave(session)):
            self.leave(session)
            return
        self.events.put(Event("came", session))
        yield json.dumps({**self.welcome, TOKEN: session.token}).encode()
        while (task := session.tasks.get()) is not None:
            yield task

    def leave(self, session: Session) -> None:
        session.alive = False
        session.tasks.put(None)
        self.events.put(Event("gone", session))

    def call(self, request: bytes, context: Any) -> bytes:
        return self.answered("call", request, context)

    def done(self, request: bytes, context: Any) -> bytes:
        return self.answered("done", request, context)

    def answered(self, kind: Literal["call", "done"], request: bytes, context: Any) -> bytes:
        """Queue an event for the answering thread, and return its reply."""
        token = dict(context.invocation_metadata()).get(TOKEN, "")
        session = next((s for s in list(self.sessions.values()) if s.alive and s.token == token), None)
        if session is None or self.closed:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no such session: connect again")
            raise AssertionError  # abort has raised
        self.check_certificate(context, session.name)
        event = Event(kind, session, request)
        self.events.put(event)
        try:
            return event.reply.result()
        except LateError as problem:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(problem))
        except GarbageError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        raise AssertionError

    def check_certificate(self, context: Any, name: str) -> None:
        """Refuse a client whose certificate was not issued for its name."""
        if self.identity is None:
            return
        found = context.auth_context()
        names = [*found.get("x509_common_name", ()), *found.get("x509_subject_alternative_name", ())]
        if name.encode() not in names:
            mine = ", ".join(sorted({n.decode(errors="replace") for n in names}))
            text = f"the certificate is for {mine or 'nobody'}, not for {name!r}: use --name {mine}, or another --cert"
            context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    def close(self, last: bytes | None = None) -> None:
        """Send the last message, if there is one, to all connected clients, and stop."""
        self.closed = True
        for session in list(self.sessions.values()):
            if session.alive and last is not None:
                session.tasks.put(last)
            session.tasks.put(None)
        stopped = self.server.stop(5)
        while not stopped.wait(0.05):
            self.refuse_all()
        self.refuse_all()

    def refuse_all(self) -> None:
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return
            if event.kind in ("call", "done"):
                event.reply.set_exception(LateError("the server has stopped"))


# The client's side.


class Connection:
    """The client's side of the service."""

    def __init__(self, address: str, identity: Identity | None):
        self.address, self.identity = address, identity
        options = (
            *ALIVE,
            ("grpc.max_receive_message_length", UNLIMITED),
            ("grpc.max_send_message_length", UNLIMITED),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 2_000),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        )
        if identity is None:
            self.channel = grpc.insecure_channel(address, options)
        else:
            cert, key, ca = identity.read()
            self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)
        self.metadata: tuple[tuple[str, str], ...] = ()
        self.calls = {way: self.channel.unary_unary(f"/{SERVICE}/{way}") for way in ("call", "done")}

    def attend(self, hello: Mapping[str, Any]) -> tuple[dict[str, str], Iterator[Message]]:
        """Say hello, and return the welcome and an iterator over the tasks; raise LostError if the server is gone."""
        stream = self.channel.unary_stream(f"/{SERVICE}/attend")(json.dumps(hello).encode())
        self.stream = stream  # gRPC ends a stream that nothing refers to
        try:
            welcome = read_welcome(next(stream))
        except ValueError as problem:
            raise UserError(
                f"the server at {self.address} sent something that is not a welcome: {problem}"
            ) from problem
        except StopIteration:
            raise LostError from None
        except grpc.RpcError as problem:
            raise self.error_of(problem) from problem
        self.metadata = ((TOKEN, welcome[TOKEN]),)
        return welcome, self.tasks(stream)

    def decline(self, name: str, reason: str) -> None:
        """Tell the server that this client does not take part."""
        try:
            self.attend({"name": name, "declined": reason})
        except LateError:
            return

    def tasks(self, stream: Any) -> Iterator[Message]:
        try:
            for task in stream:
                yield Message.from_bytes(task)
        except grpc.RpcError as problem:
            raise self.error_of(problem) from problem
        except ValueError as problem:
            raise UserError(f"the server at {self.address} sent something that is not a task: {problem}") from problem

    def call(self, request: bytes) -> bytes:
        return self.send("call", request)

    def send(self, way: str, request: bytes) -> bytes:
        try:
            reply: bytes = self.calls[way](request, metadata=self.metadata)
        except grpc.RpcError as problem:
            raise self.error_of(problem) from problem
        return reply

    def error_of(self, problem: Any) -> Exception:
        code, details = problem.code(), one_line(problem.details() or "", 1000)
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            return LateError(details)
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return GarbageError(details)
        if code in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.UNAUTHENTICATED):
            kind = TakenError if code == grpc.StatusCode.ALREADY_EXISTS else UserError
            return kind(f"the server at {self.address} says: {details}")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return LostError(details)
        return UserError(f"the server at {self.address} could not handle the request ({code.name}: {details})")

    def close(self) -> None:
        self.channel.close()


def why_no_connection(address: str, identity: Identity | None) -> tuple[str, bool]:
    """Explain why a server cannot be reached, and return whether waiting may help."""
    host, port = host_and_port(address)
    try:
        plain = socket.create_connection((host, port), timeout=5)
    except socket.gaierror as problem:
        if problem.errno == socket.EAI_AGAIN:
            return f"the name {host} cannot be resolved at the moment ({problem.strerror}): check the network", True
        return f"there is no host named {host}: check --server", False
    except OSError as problem:
        return f"no server at {address} ({problem.strerror or problem}): start it, or check --server", True
    with plain:
        try:
            if identity is None:
                if _greets(plain):
                    return f"the server at {address} does not answer", True
                return f"the server at {address} does not accept a plain connection: give --cert, --key and --ca", False
            with identity.context(server=False).wrap_socket(plain, server_hostname=host) as safe:
                if _greets(safe):  # otherwise, reading may raise the reason why our certificate is refused
                    return f"the server at {address} does not answer", True
                return (
                    f"the server at {address} closed the connection: its --ca must have signed our certificate",
                    False,
                )
        except ssl.SSLCertVerificationError as problem:
            return f"the certificate of the server at {address} does not match: {problem.verify_message}", False
        except ssl.SSLError as problem:
            if problem.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"):
                return f"the server at {address} does not speak TLS: was it started with --insecure?", False
            text = f"the server at {address} rejects our certificate ({problem.reason}): its --ca must have signed it"
            return text, False
        except OSError as problem:
            return f"the server at {address} closed the connection ({problem}): it may not accept our certificate", True


def _greets(connection: socket.socket) -> bool:
    """Return whether the other side answers an HTTP/2 preface with its settings, as every gRPC server does."""
    connection.settimeout(5)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    return connection.recv(9)[3:4] == b"\x04"
