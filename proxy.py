"""proxy.py: one vLLM-shaped HTTP API, spoken by a single replica (over an engine) and by a router over many replicas.

    python proxy.py --bucket runs/demo                    # replicas come from members/ of the bucket
    python proxy.py --bucket s3://b/run --adapter-dir /mnt/run --replica http://gpu1:8000 --listen 0.0.0.0:80 --token T
    python proxy.py --replica http://gpu1:8000 --adapter-dir /shared   # no bucket: a client loads the adapters (TRL)

Policy version N is the adapter `policy-vN`; the alias `policy` is the newest that is ready. The router knows what every
replica must hold: the newest versions published in the bucket, and what clients loaded. Each replica is brought there
by tasks of its own, and compared with the canary (top-20 logprobs after 8 prompts, stored at publish) before use:

    joining -> loading -> ready -> out      (out: it fails; it comes back through loading, every version checked again)

Requests of one prompt go to one replica, whose prefix cache is warm: the prompt's 16-token blocks are hashed in a chain
seeded with the adapter's name; the owner of the deepest known block is chosen unless it is far ahead of the least busy.

Guarantees
 1. A request that names a version is answered under that version or not at all; never under the base or another one.
 2. Only a (replica, version) that passed the canary gets requests. A connection error takes the replica out until it
    is checked.
 3. One slow or dead replica delays nobody; its requests are tried again elsewhere (bounded).
 4. A load through the API is served by all live replicas or by none. A forgotten pause ends by itself.
 5. A client that leaves cancels its work, down to the engine. In-flight counts return to 0 on every path.
 6. Every head, body, wait and retry is bounded; bad input is a 4xx; the token is in no log, error or foreign request.

Statuses: 400 bad input, 401 token, 404 no such route or version (names the live ones), 405 method, 408 too slow,
413 body, 431 head; 502 no replica could, 503 not ready yet (Retry-After), 504 time-out, or a load or pause taken back.

Does not: stream tokens, pipeline, serve HTTP/2 or TLS (put a TLS terminator in front), keep state on disk. Whoever can
write to the bucket is trusted with the policy: the canary is against faults, not against an attacker.

[1] docs.vllm.ai: OpenAI-compatible server, LoRA adapters   [2] RFC 9112: HTTP/1.1
"""
import asyncio
import base64
import concurrent.futures
import errno
import hmac
import itertools
import json
import logging
import math
import os
import re
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import responses
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from bucket import Arguments, BucketError, NotFound, open_bucket, seconds

log = logging.getLogger("proxy")
MAX_HEAD_BYTES, MAX_BODY_BYTES, MAX_REPLY_BYTES = 32 << 10, 8 << 20, 256 << 20   # 8 MiB: a million token ids
MAX_CONNECTIONS = 8192                               # of clients; more are closed at once
IDLE_S, HEAD_S, BODY_S, LINGER_S = 75.0, 10.0, 30.0, 2.0   # limits on a client's connection
POLL_S, POLL_LIMIT_S, POLL_FAILS = 1.0, 5.0, 3       # a replica's health: how often, how long, time-outs until out
LOAD_S, CANARY_S, CONNECT_S = 300.0, 60.0, 5.0       # limits on a call to a replica
TRIES, READY_WAIT_S, LOOK_S = 4, 10.0, 0.02          # a completion: tries; waits for a ready replica, looking every
LOAD_TRIES, MAX_BACKOFF_S = 8, 8.0                   # 30 s in all: mounts remember "not there" that long
AHEAD_ROLLOUTS, BLOCK_TOKENS, MAX_BLOCKS = 8, 16, 8_192   # routing: what a warm prefix is worth; about 2 MB
BEAT_S, DEAD_S = 1.0, 15.0                           # members: rewritten every; counter unmoved for = dead
FP32_TOLERANCE, BF16_FLOOR, GARBLED = 1e-3, 0.01, 0.5       # canary, nats
MINUS_INFINITY = -9999.0                             # vLLM's JSON for log 0
ALIAS, VERSION, ADAPTER_KEY = "policy", re.compile(r"policy-v(\d{1,12})"), re.compile(r"adapters/v\d{6,12}")
CHUNK = re.compile(r"([0-9a-fA-F]+)[ \t]*(?:;[^\r\n\0]*)?\Z")   # the line before a chunk: its size, and extensions
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
# All there is. The handler is the method named like the last segment; / and /metrics show the app's rows.
ROUTES = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET", "/v1/load_lora_adapter": "POST",
          "/v1/unload_lora_adapter": "POST", "/pause": "POST", "/resume": "POST", "/is_paused": "GET", "/health": "GET",
          "/server_info": "GET", "/metrics": "GET", "/": "GET"}
# Parameters that change what is sampled, or the reply's form: only these values are accepted.
NEUTRAL = {"stream": (False,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "presence_penalty": (0,),
           "frequency_penalty": (0,), "suffix": ("",), "repetition_penalty": (1,), "logit_bias": ({},), "stop": ([], ""),
           "echo": (False,), "best_of": (1,), "min_tokens": (0,), "tools": ([],), "ignore_eos": (False,),
           "response_format": ({"type": "text"},)}

class ApiError(Exception):
    """Becomes the reply with that status, in vLLM's error JSON."""
    def __init__(self, status: int, message: str, **headers: str):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers

    def reply(self) -> "Reply":
        kind = responses.get(self.status, "").replace(" ", "") + "Error"   # NotFoundError
        error = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return to_json({"error": error}, self.status, self.headers)

class LoadError(ApiError):
    """Raised by an engine whose load failed: 404 (not there yet), 400 (wrong adapter), 500 (may pass), and why."""

@dataclass
class Reply:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: dict = field(default_factory=dict)

    def render(self, is_last: bool) -> bytes:
        headers = {"Content-Type": self.content_type, "Content-Length": len(self.body), **self.headers}
        headers |= {"Connection": "close"} if is_last else {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {self.status} {responses.get(self.status, '')}\r\n{lines}\r\n".encode("latin-1") + self.body

@dataclass
class Request:
    path: str
    query: dict
    is_last: bool                                    # the connection closes after the reply
    body: bytes

    def json(self) -> dict:
        if (body := json_object(self.body)) is None:
            raise ApiError(400, "the body must be a JSON object")
        return body

def json_object(data: bytes) -> dict | None:
    """The JSON object that the bytes are, or None."""
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(data), dict):
            return value
    return None

def to_json(value, status: int = 200, headers: dict | None = None) -> Reply:
    return Reply(json.dumps(value, separators=(",", ":")).encode(), status, headers=headers or {})

# ---- HTTP/1.1 by hand -----------------------------------------------------------------------------------------------

class Wire(asyncio.Protocol):
    """One connection, of either side: the bytes that came and are not yet read; `until` (loop time) is when waiting for
    more of them ends. asyncio itself switches off Nagle's algorithm, which would cost 44 ms a hop.

    When a client leaves, its serving task is cancelled, and through it the engine's work."""
    def __init__(self, serve=None):
        self.serve, self.task, self.is_closed = serve, None, False
        self.buffer, self.came = bytearray(), asyncio.Event()
        self.loop, self.until = asyncio.get_running_loop(), 0.0

    def connection_made(self, transport) -> None:
        self.transport = transport
        if self.serve:
            self.task = self.loop.create_task(self.serve(self))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.came.set()
        if len(self.buffer) > MAX_HEAD_BYTES:
            self.transport.pause_reading()               # until somebody reads: let the kernel hold it

    def connection_lost(self, error) -> None:
        self.is_closed = True
        self.came.set()
        if self.task:
            self.task.cancel()

    async def more(self) -> None:
        """Returns when something happened: look again. TimeoutError after `until`; ConnectionError if closed."""
        if self.is_closed:
            raise ConnectionError("the connection was closed")
        if self.loop.time() >= self.until:
            raise TimeoutError("nothing more came")
        self.came.clear()
        self.transport.resume_reading()
        timer = self.loop.call_at(self.until, self.came.set)
        try:
            await self.came.wait()
        finally:
            timer.cancel()

    async def take(self, count: int) -> bytes:
        while len(self.buffer) < count:
            await self.more()
        data = bytes(memoryview(self.buffer)[:count])
        del self.buffer[:count]
        self.transport.resume_reading()                  # else nobody notices that the client leaves
        return data

    async def line(self, end: bytes) -> str:
        """Text up to `end`, which is taken, too."""
        while (at := self.buffer.find(end)) < 0 and len(self.buffer) <= MAX_HEAD_BYTES:
            await self.more()
        if not 0 <= at <= MAX_HEAD_BYTES:
            raise ApiError(431, f"head or line over {MAX_HEAD_BYTES} bytes")
        return (await self.take(at + len(end)))[:at].decode("latin-1")

    async def head(self) -> tuple[str, dict[str, str]]:
        """First line and headers, names in lower case. 400 for what servers read differently: folding, double lengths."""
        first, *lines = (await self.line(b"\r\n\r\n")).split("\r\n")
        headers: dict[str, str] = {}
        for match in map(HEADER.fullmatch, lines):
            name = match[1].lower() if match else ""
            if not match or name in headers and name in ("content-length", "transfer-encoding", "authorization"):
                raise ApiError(400, "malformed or repeated header")
            headers[name] = match[2]
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError(400, "both content-length and transfer-encoding")
        return first, headers

    async def body(self, headers: dict[str, str], limit: int) -> bytes:
        """The body, by length or in chunks. 400 malformed, 413 over `limit` bytes."""
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise ApiError(400, "transfer-encoding must be chunked")
        if "transfer-encoding" not in headers:
            return await self.take(parse_length(headers.get("content-length", "0"), 10, limit))
        pieces = []
        while size := parse_length(CHUNK.sub(r"\1", await self.line(b"\r\n")), 16, limit):
            pieces.append((piece := await self.take(size + 2))[:-2])
            if piece[-2:] != b"\r\n":
                raise ApiError(400, "malformed chunk")
            limit -= size
        while trailer := await self.line(b"\r\n"):
            if not HEADER.fullmatch(trailer):
                raise ApiError(400, "malformed trailer")
        return b"".join(pieces)

def parse_length(text: str, base: int, limit: int) -> int:
    if not re.fullmatch("[0-9]{1,15}" if base == 10 else "[0-9a-fA-F]{1,15}", text):
        raise ApiError(400, "malformed length")
    if int(text, base) > limit:
        raise ApiError(413, "the body is too large")
    return int(text, base)

class Server:
    """Accepts connections; checks token, route and size of each request before the app (a ReplicaServer or a Router)
    sees it. A pause that is not resumed within `pause_limit_s` (0: never) is: a client killed inside one must leave
    nobody paused."""
    def __init__(self, app, token: str, pause_limit_s: float):
        self.app, self.token, self.pause_limit_s = app, f"Bearer {token}".encode() if token else b"", pause_limit_s
        self.tasks, self.expiry = set(), None

    async def start(self, listen: str) -> str:
        """Binds; returns the URL, with the real port."""
        host, port = parse_listen(listen, bool(self.token))
        self.listener = await asyncio.get_running_loop().create_server(lambda: Wire(self.serve), host, port, backlog=4096)
        host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.listener.sockets[0].getsockname()[1]}"

    async def serve(self, wire: Wire) -> None:
        self.tasks.add(wire.task)
        try:
            while len(self.tasks) <= MAX_CONNECTIONS and await self.answer(wire):
                pass
        except OSError:                                  # the client left, idles, or does not read: nobody to tell
            wire.transport.abort()
        finally:
            self.tasks.discard(wire.task)
            wire.transport.close()

    async def answer(self, wire: Wire) -> bool:
        """One request and its reply. False: the connection is done."""
        if wire.transport.get_write_buffer_size() > MAX_BODY_BYTES:
            raise ConnectionError("it sends requests and does not read the replies")
        wire.until = wire.loop.time() + IDLE_S
        while not wire.buffer:
            await wire.more()
        try:
            request = await self.read(wire)
        except ApiError as error:                        # its body is unread: answer, drop what still comes, close
            wire.transport.write(error.reply().render(is_last=True))
            wire.transport.write_eof()
            wire.until = wire.loop.time() + LINGER_S
            while True:                                  # ends with the client's close, or at `until`
                wire.buffer.clear()
                await wire.more()
        try:
            action = request.path.rpartition("/")[2]
            if action in ("pause", "resume"):
                self.limit_pause(False)
            if action in ("", "metrics"):
                reply = (metrics_text if action else status_page)(self.app.rows())
            else:
                reply = await getattr(self.app, action)(request)
        except ApiError as error:
            reply = error.reply()
        except Exception:
            log.exception("%s failed", request.path)
            reply = ApiError(500, "internal error; the server's log says more").reply()
        finally:
            if request.path == "/pause":                 # its time begins when it stands, or when its client has left
                self.limit_pause(True)
        wire.transport.write(reply.render(request.is_last))
        return not request.is_last

    async def read(self, wire: Wire) -> Request:
        """One request, checked. ApiError: its body was not read to the end."""
        try:
            wire.until = wire.loop.time() + HEAD_S
            first, headers = await wire.head()
            match = re.fullmatch(r"([A-Z]{1,16}) ([!-~]{1,8192}) HTTP/1\.([01])", first)
            if not match:
                raise ApiError(400, "malformed request line")
            path, _, query = match[2].partition("?")
            if not self.is_allowed(path, headers.get("authorization", "").encode("latin-1")):
                how = "Basic" if path == "/" else "Bearer"   # Basic: a browser asks its user
                raise ApiError(401, "missing or wrong bearer token", **{"WWW-Authenticate": f'{how} realm="grpo"'})
            if path not in ROUTES:
                raise ApiError(404, "no such route")
            if ROUTES[path] != match[1]:
                raise ApiError(405, f"use {ROUTES[path]}", Allow=ROUTES[path])
            wire.until = wire.loop.time() + BODY_S
            body = await wire.body(headers, MAX_BODY_BYTES)
        except TimeoutError:
            raise ApiError(408, "the request came too slowly") from None
        is_last = match[3] == "0" or headers.get("connection", "").lower() == "close"
        return Request(path, dict(parse_qsl(query[:1000])), is_last, body)

    def is_allowed(self, path: str, given: bytes) -> bool:
        """The bearer token, compared in constant time; on the page also as the password of Basic, whatever the user:
        that is what browsers can ask for. Nowhere else, as they would send it from foreign pages, too."""
        if path == "/" and given.startswith(b"Basic "):
            with suppress(ValueError):
                given = b"Bearer " + base64.b64decode(given[6:]).partition(b":")[2]
        return not self.token or path == "/health" or hmac.compare_digest(given, self.token)

    def limit_pause(self, is_paused: bool) -> None:
        async def expire():
            await asyncio.sleep(self.pause_limit_s)
            log.warning("paused for %g s and not resumed: resuming", self.pause_limit_s)
            await self.app.resume(None)
        if self.expiry:
            self.expiry.cancel()
        self.expiry = asyncio.ensure_future(expire()) if is_paused and self.pause_limit_s else None

def parse_listen(listen: str, has_token: bool) -> tuple[str, int]:
    """HOST:PORT; only loopback without a token. ValueError says what to do."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]").replace("localhost", "127.0.0.1") or "127.0.0.1"
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"--listen wants HOST:PORT, got {listen!r}")
    if not has_token and host != "::1" and not re.fullmatch(r"127\.\d+\.\d+\.\d+", host):
        raise ValueError(f"--listen {listen} can be reached from other machines: set --token or GRPO_TOKEN")
    return host, int(port)

class Replica:
    """The router's side of one replica: an HTTP client with keep-alive, last used first, and what is known of it.

    It follows no redirect, so the token goes nowhere else."""
    def __init__(self, url: str, token: str = ""):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"a replica's URL must be http(s)://HOST[:PORT], got {url!r}")
        self.url, self.prefix, self.tls = url, parts.path.rstrip("/"), True if parts.scheme == "https" else None
        self.address = parts.hostname, parts.port or (443 if self.tls else 80)
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        self.headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n{authorization}"
        self.idle, self.busy = [], set()                 # connections
        self.is_member = False                           # it reads the bucket itself; others are given paths
        self.state, self.fails, self.last_error = "joining", 0, ""   # fails: of health, in a row
        self.in_flight = 0                               # rollouts (n of each request)
        self.base, self.max_model_len, self.config = "", None, {}    # what it says of itself; config: its vllm_config
        self.served: set[str] = set()                    # adapter names in its /v1/models
        self.proven: set[str] = set()                    # those that may be asked for
        self.refused: set[str] = set()                   # those that it failed to load for long
        self.loads: dict[str, asyncio.Task] = {}         # the tasks that load and prove
        self.wake = asyncio.Event()                      # check it now

    @property
    def is_live(self) -> bool:
        return self.state in ("loading", "ready")

    async def request(self, method: str, path: str, body: bytes = b"", limit_s: float = 0.0) -> Reply:
        """The reply, whatever its status. OSError (TimeoutError is one): there was none; the connection is closed."""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n"
        until = asyncio.get_running_loop().time() + (limit_s or POLL_LIMIT_S)
        while True:
            wire, is_reused = (self.idle.pop(), True) if self.idle else (await self.connect(), False)
            if wire.is_closed or wire.buffer:            # bytes nobody asked for: never take them for a reply
                wire.transport.abort()
                continue
            self.busy.add(wire)
            try:
                wire.until = until
                wire.transport.write(head.encode() + body)
                reply, is_last = await read_reply(wire)
                self.idle.append(wire) if not is_last else wire.transport.close()
                return reply
            except BaseException as error:
                wire.transport.abort()
                # Subtle: the peer may close an idle connection just as it is reused: again, unless we closed it.
                if not (is_reused and isinstance(error, ConnectionError) and wire in self.busy):
                    raise
            finally:
                self.busy.discard(wire)

    async def connect(self) -> Wire:
        try:
            async with asyncio.timeout(CONNECT_S):
                return (await asyncio.get_running_loop().create_connection(Wire, *self.address, ssl=self.tls))[1]
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_S:g} s") from None

    async def call(self, method: str, path: str, body=None, limit_s: float = 0.0) -> dict:
        """A control call; its JSON object ({} if it is none). ApiError for any status but 200, with what was said."""
        reply = await self.request(method, path, b"" if body is None else json.dumps(body).encode(), limit_s)
        if reply.status != 200:
            raise ApiError(reply.status, f"{path}: {reply.status} {reply.body[:300].decode(errors='replace')}")
        return json_object(reply.body) or {}

    def close(self) -> None:
        wires, self.idle, self.busy = [*self.idle, *self.busy], [], set()
        for wire in wires:
            wire.transport.abort()

async def read_reply(wire: Wire) -> tuple[Reply, bool]:
    """A reply, and whether the connection is done. ConnectionError if it is cut or malformed."""
    try:
        status = 100
        while 100 <= status < 200:
            first, headers = await wire.head()
            status = int(first[9:12])
        if status == 200 and not headers.keys() & {"content-length", "transfer-encoding"}:
            raise ValueError("it does not say its length")
        body = await wire.body(headers, MAX_REPLY_BYTES)
    except (ValueError, ApiError) as error:
        raise ConnectionError(f"malformed reply: {error}") from None
    return Reply(body, status, headers.get("content-type", "")), headers.get("connection", "").lower() == "close"

async def in_thread(function, *args):
    """A blocking call on a daemon thread. Subtle: an executor's threads would be joined at exit, and hold it up."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    def run():
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
    future.set_running_or_notify_cancel()
    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)

# ---- What both sides say --------------------------------------------------------------------------------------------

def take(body: dict, name: str, default, kind: type = int, low: float = 0, high: float = 2**63 - 1):
    """A number of the request, checked; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if not (type(value) is int or kind is float and type(value) is float) or not low <= value <= high:
        what = "a number" if kind is float else "an integer"
        raise ApiError(400, f"{name} must be {what} from {low:g} to {high:g}")
    return kind(value)

def is_token_list(value) -> bool:
    return (isinstance(value, list) and set(map(type, value)) <= {int}
            and min(value, default=0) >= 0 and max(value, default=0) < 2**31)

def model_of(body: dict) -> str:
    if not isinstance(body.get("model"), str):
        raise ApiError(400, "model must be given: a live version, or `policy` for the newest")
    return body["model"]

def newest(names) -> str | None:
    versions = [int(match[1]) for match in map(VERSION.fullmatch, names) if match]
    return f"policy-v{max(versions)}" if versions else None

def unknown(model: str, live) -> ApiError:
    return ApiError(404, f"The model `{model[:200]}` does not exist. Live: {', '.join(sorted(live)) or 'none'}")

def model_list(base: str, max_model_len: int | None, adapters) -> Reply:
    """As vLLM: the base first (clients read its max_model_len), then the adapters; last our alias."""
    cards = [(base, base, None, max_model_len), *((name, name, base, None) for name in sorted(adapters))]
    cards += [(ALIAS, newest(adapters), base, None)] if newest(adapters) else []
    said = {"object": "model", "created": int(time.time()), "owned_by": "async-grpo"}
    return to_json({"object": "list", "data": [
        {**said, **dict(zip(("id", "root", "parent", "max_model_len"), card))} for card in cards]})

def adapter_of(request: Request) -> tuple[str, str]:
    """lora_name and lora_path ("" if not given)."""
    body = request.json()
    name, path = body.get("lora_name"), body.get("lora_path") or ""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) or name == ALIAS:
        raise ApiError(400, f"lora_name must be of letters, digits, dots, dashes and underscores, and not `{ALIAS}`")
    if not isinstance(path, str):
        raise ApiError(400, "lora_path must be a string")
    return name, path

def folder_inside(path: str, roots) -> str:
    """The real path of a folder inside one of the roots; else 400, which does not say what is where."""
    try:
        real = os.path.realpath(path) if os.path.isabs(path) else ""
    except ValueError:                                   # NUL, or what the file system cannot encode
        real = ""
    if not any(real.startswith(os.path.realpath(root) + os.sep) for root in roots):
        raise ApiError(400, "lora_path must be absolute, inside --adapter-dir or the bucket's folder "
                            "(or, to a sampler, a key adapters/vNNNNNN)")
    return real

def pause_mode(request: Request) -> str:
    mode = request.query.get("mode", "abort")
    if mode not in ("keep", "abort", "wait"):
        raise ApiError(400, "mode must be keep, abort or wait")
    return mode

def done(what: str, name: str) -> Reply:
    return to_json(f"Success: LoRA adapter '{name}' {what} successfully.")

def metrics_text(rows: list[tuple[str, dict, object]]) -> Reply:
    """Prometheus text of the rows (name, labels, value) that are numbers."""
    groups: dict[str, list[str]] = {}
    for name, labels, value in rows:
        if type(value) in (int, float):
            kind = "counter" if name.endswith("_total") else "gauge"
            text = ",".join(f"{key}={json.dumps(label, ensure_ascii=False)}" for key, label in labels.items())
            groups.setdefault(name, [f"# TYPE {name} {kind}\n"]).append(f"{name}{{{text}}} {value:.17g}\n")
    text = "".join(line for lines in groups.values() for line in lines)
    return Reply(text.encode(errors="replace"), content_type="text/plain; version=0.0.4; charset=utf-8")

def status_page(rows: list[tuple[str, dict, object]]) -> Reply:
    """docs/status.html with the rows inside; it asks for itself again and again."""
    template = Path(__file__).with_name("docs") / "status.html"
    if not template.is_file():
        raise ApiError(404, f"{template} is missing: copy it there; /metrics has the same numbers")
    # Subtle: a "</script>" in what a replica says would end the page's script; in JSON "<" is found in strings only.
    text = template.read_text(encoding="utf-8").replace("/*ROWS*/[]", json.dumps(rows).replace("<", "\\u003c"))
    return Reply(text.encode(), content_type="text/html; charset=utf-8")

# ---- A single replica -----------------------------------------------------------------------------------------------

class ReplicaServer:
    """The API over one engine, which has: model_id, max_model_len, vocab_size, max_loras, max_lora_rank, dtype, is_paused;
    names(), load(name, path) (nothing for the same weights again, else LoadError), unload(name), pause(mode), resume(),
    stats(), cancel(future); encode(text) and chat(messages) -> ids, decode(ids), token(id) -> text; submit(ids, n,
    max_tokens, temperature, name | None, seed, stop_ids, top_logprobs) -> concurrent Future of completions (token_ids,
    logprobs, finish_reason, top_logprobs), raising LookupError for an unknown name, ValueError for a client's mistake.
    `roots`: folders that a lora_path may be in."""
    def __init__(self, engine, roots=()):
        self.engine, self.roots, self.lock, self.counts = engine, roots, asyncio.Lock(), Counter()

    async def completions(self, request: Request) -> Reply:
        """Both kinds: a prompt, or (the path says chat) messages."""
        body, is_chat = request.json(), "chat" in request.path
        for name, allowed in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in allowed:
                right = json.dumps(allowed[0])
                raise ApiError(400, f"{name} must be {right}: replies come whole, and logprobs say what was sampled")
        if is_chat and body.get("logprobs"):
            raise ApiError(400, "logprobs come with /v1/completions only")
        ids = self.prompt_ids(body.get("messages" if is_chat else "prompt"), is_chat)
        top = None if is_chat else take(body, "logprobs", None, high=20)
        default_tokens = max(1, self.engine.max_model_len - len(ids)) if is_chat else 16   # as OpenAI's
        name, samples = await self.sample(body, ids, default_tokens, top or 0)
        returned = {"prompt_token_ids": ids} if body.get("return_token_ids") else {}
        choices = []
        for index, one in enumerate(samples):
            text = self.engine.decode(one.token_ids)
            choice = {"index": index, "finish_reason": one.finish_reason, "stop_reason": None, "logprobs": None}
            choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            if top is not None:
                choice["logprobs"] = self.logprobs(one, bool(body.get("return_tokens_as_token_ids")))
            choices.append(choice | ({"token_ids": one.token_ids, **returned} if returned else {}))
        total = sum(len(one.token_ids) for one in samples)
        usage = {"prompt_tokens": len(ids), "completion_tokens": total, "total_tokens": len(ids) + total}
        return to_json({"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name,
                        "object": "chat.completion" if is_chat else "text_completion", "choices": choices, "usage": usage,
                        **(returned if is_chat else {})})

    def prompt_ids(self, prompt, is_chat: bool) -> list[int]:
        if is_token_list(prompt) and not is_chat:
            return prompt
        def is_turn(turn) -> bool:
            return isinstance(turn, dict) and all(isinstance(turn.get(what), str) for what in ("role", "content"))
        if is_chat and not (isinstance(prompt, list) and prompt and all(map(is_turn, prompt))):
            raise ApiError(400, "messages must be a list of {role, content} texts")
        if not is_chat and not isinstance(prompt, str):
            raise ApiError(400, "prompt must be one string or list of token ids")
        try:
            json.dumps(prompt, ensure_ascii=False).encode()   # fails for half a surrogate pair, as tokenizers do
            return list((self.engine.chat if is_chat else self.engine.encode)(prompt))
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"the prompt cannot be encoded: {str(error)[:200]}") from None

    async def sample(self, body: dict, ids: list[int], default_tokens: int, top: int) -> tuple[str, list]:
        """The name that served, and its completions. Cancelled with the client's connection."""
        engine, model, stop = self.engine, model_of(body), body.get("stop_token_ids") or []
        name = newest(engine.names()) if model == ALIAS else model
        if name not in engine.names() and name != engine.model_id:
            raise unknown(model, engine.names())
        if not is_token_list(stop) or len(stop) > 128:
            raise ApiError(400, "stop_token_ids must be a list of at most 128 token ids")
        limit = take(body, "max_completion_tokens", None, low=1) or take(body, "max_tokens", default_tokens, low=1)
        n, temperature = take(body, "n", 1, low=1, high=1024), take(body, "temperature", 1.0, float, high=100)
        adapter, seed = None if name == engine.model_id else name, take(body, "seed", None, low=-2**63)
        try:
            future = engine.submit(ids, n, limit, temperature, adapter, seed, tuple(stop), min(top, engine.vocab_size))
        except LookupError:
            raise unknown(model, engine.names()) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        try:
            samples = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            engine.cancel(future)
            self.counts["abort"] += n
            raise
        self.counts.update(one.finish_reason for one in samples)
        self.counts.update(prompt_tokens=len(ids), generation_tokens=sum(len(one.token_ids) for one in samples))
        return name, samples

    def logprobs(self, one, as_ids: bool) -> dict:
        """vLLM's shape: the sampled token is among the top ones; log 0 is -9999."""
        spell = "token_id:{}".format if as_ids else self.engine.token
        tokens = [spell(token) for token in one.token_ids]
        tops = one.top_logprobs or [{}] * len(tokens)
        tops = [{token: value, **best} for token, value, best in zip(one.token_ids, one.logprobs, tops)]
        return {"tokens": tokens, "token_logprobs": [max(value, MINUS_INFINITY) for value in one.logprobs],
                "top_logprobs": [{spell(token): max(value, MINUS_INFINITY) for token, value in best.items()} for best in tops],
                "text_offset": [0, *itertools.accumulate(map(len, tokens))][:len(tokens)]}

    async def follow(self, url: str) -> None:
        """Nothing: a replica is told what to load."""

    async def models(self, request: Request) -> Reply:
        return model_list(self.engine.model_id, self.engine.max_model_len, self.engine.names())

    async def load_lora_adapter(self, request: Request) -> Reply:
        name, path = adapter_of(request)
        path = path if ADAPTER_KEY.fullmatch(path) else folder_inside(path, self.roots)
        if name == self.engine.model_id:
            raise ApiError(400, f"`{name}` is the base model")
        async with self.lock:
            await in_thread(self.engine.load, name, path)
        return done("added", name)

    async def unload_lora_adapter(self, request: Request) -> Reply:
        name, _ = adapter_of(request)
        async with self.lock:
            if name not in self.engine.names():
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
            await in_thread(self.engine.unload, name)
        return done("removed", name)

    async def pause(self, request: Request) -> Reply:
        await in_thread(self.engine.pause, pause_mode(request))
        return to_json({"status": "paused"})

    async def resume(self, request: Request | None) -> Reply:
        self.engine.resume()
        return to_json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Reply:
        return to_json({"is_paused": bool(self.engine.is_paused)})

    async def health(self, request: Request) -> Reply:
        self.engine.stats()                              # raises if the engine is broken
        return Reply(b"")

    async def server_info(self, request: Request) -> Reply:
        engine = self.engine
        return to_json({"vllm_config": {
            "lora_config": {"max_lora_rank": engine.max_lora_rank, "max_loras": engine.max_loras},
            "model_config": {"max_model_len": engine.max_model_len, "dtype": f"torch.{engine.dtype}"},
            "parallel_config": {"data_parallel_size": 1}}})

    def rows(self) -> list[tuple]:
        """What /metrics and / show: (name, labels, value)."""
        stats, label, counts = self.engine.stats(), {"model_name": self.engine.model_id}, self.counts
        rows = [(f"vllm:num_requests_{what}", label, stats.get(what, 0)) for what in ("running", "waiting")]
        rows += [(f"vllm:{what}_total", label, counts[what]) for what in ("prompt_tokens", "generation_tokens")]
        rows += [("vllm:request_success_total", {**label, "finished_reason": why}, counts[why])
                 for why in ("stop", "length", "abort")]
        rows += [(f"grpo:engine_{key}", {}, value) for key, value in stats.items()]
        return [*rows, ("adapters", {}, ", ".join(sorted(self.engine.names()))), ("paused", {}, self.engine.is_paused)]

# ---- Which replica, and is it right? --------------------------------------------------------------------------------

def distance(one: list[dict[int, float]], other: list[dict[int, float]]) -> float:
    """Mean |difference| of logprobs over the token ids that both list, in nats; inf if fewer than half are shared."""
    gaps = [abs(a[token] - b[token]) for a, b in zip(one, other) for token in a.keys() & b.keys()]
    listed = sum(min(len(a), len(b)) for a, b in zip(one, other))
    return sum(gaps) / len(gaps) if gaps and 2 * len(gaps) >= listed else math.inf

def canary_verdict(canary: dict, got: list[dict[int, float]], older: list[dict] | None = None) -> tuple[bool | None, str]:
    """Does a replica that answered `got` (top logprobs after each canary prompt) serve the adapter? (True | False |
    None, why).

    float32: every shared logprob within 1e-3. Else the distance to the nearest of adapter, base and older version is
    taken for the noise: if the nearest is not the adapter, and is further from it than three times that, the weights
    are wrong (False); if it is closer, nothing is proven (None: watch `mismatch`)."""
    def clean(rows):
        return [{int(token): max(value, MINUS_INFINITY) for token, value in row.items()} for row in rows]
    if len(got) != len(canary["adapter"]):
        return False, f"expected {len(canary['adapter'])} canary answers, got {len(got)}"
    got, adapter, others = clean(got), clean(canary["adapter"]), {"the base": clean(canary["base"])}
    if older and len(older) == len(got):
        others["an older version"] = clean(older)
    away = {what: distance(rows, got) for what, rows in {"the adapter": adapter, **others}.items()}
    nearest = min(away, key=away.get)
    gaps = [(abs(want[token] - row[token]),
             f"prompt {number} token {token}: expected {want[token]:.4f}, got {row[token]:.4f}")
            for number, (want, row) in enumerate(zip(adapter, got)) for token in want.keys() & row.keys()]
    worst, why = max(gaps, default=(math.inf, "no token in common"))
    why += f"; nearest is {nearest}, {away[nearest]:.2g} nats away"
    if "float32" in canary.get("dtype", "float32"):
        return worst <= FP32_TOLERANCE and away["the adapter"] < math.inf, why
    if not away["the adapter"] <= GARBLED:
        return False, why
    noise = 3 * max(away[nearest], BF16_FLOOR)
    if nearest != "the adapter":
        return (False if distance(adapter, others[nearest]) > noise else None), why
    return (all(distance(adapter, rows) > noise for rows in others.values()) or None), why

class Chooser:
    """Chained block hashes -> replicas. O(prompt length) per request. A block is common, and says nothing, when every
    candidate owns it or two different blocks have followed it.

    It remembers the `max_blocks` blocks used last. A block saves a prefill only while requests of its prompt under its
    version are still to come: as many prompts matter as groups are in flight. 8,192 blocks are those of 128 groups (eight
    actors with 128 rollouts each, G = 8) with prompts of 1,024 tokens. What is forgotten is prefilled once more."""
    MANY = -1                                            # followed by several; hash() is never -1

    def __init__(self, max_blocks: int = MAX_BLOCKS):
        self.max_blocks, self.last, self.counts = max_blocks, "", Counter()
        self.blocks: OrderedDict[int, list] = OrderedDict()   # hash: [owners, hash that followed]

    def choose(self, name: str, prompt: list[int] | str, loads: dict[str, int]) -> str:
        """One of `loads` (replica: rollouts in flight) for this prompt under this adapter."""
        step = BLOCK_TOKENS if isinstance(prompt, list) else 4 * BLOCK_TOKENS   # text: 4 characters a token
        before, entry, entries, owners = hash(name), None, [], ()
        for at in range(0, len(prompt), step):
            block = hash((before, *prompt[at:at + step]))
            if entry and entry[1] != block:
                entry[1] = block if entry[1] is None else self.MANY
            entry = self.blocks.setdefault(block, [(), None])
            self.blocks.move_to_end(block)
            entries.append(entry)
            before = block
        for entry in reversed(entries):
            owners = [owner for owner in entry[0] if owner in loads]
            if owners and len(owners) < len(loads) and entry[1] != self.MANY:
                break
            owners = ()
        least = min(loads.values())
        chosen = min(owners, key=loads.get, default=None)
        kind = "cold" if chosen is None else "affinity" if loads[chosen] - least <= AHEAD_ROLLOUTS else "spill"
        if kind != "affinity":
            ties = sorted(url for url, load in loads.items() if load == least)
            chosen = self.last = next((url for url in ties if url > self.last), ties[0])
        self.counts[kind] += 1
        for entry in entries:
            if chosen not in entry[0]:
                entry[0] = *entry[0][-31:], chosen
        while len(self.blocks) > self.max_blocks:
            self.blocks.popitem(last=False)
        return chosen

# ---- Members of the bucket ------------------------------------------------------------------------------------------

class Member(threading.Thread):
    """This process's heartbeat: `members/<role>-<id>.json`, rewritten every second, its counter one higher. Outlives a
    failing bucket."""
    def __init__(self, bucket, role: str, url: str = "", run_id: str = "", id: str = "", doing: str = "starting",
                 beat_s: float = BEAT_S):
        super().__init__(daemon=True)
        self.bucket, self.beat_s, self.finished = bucket, beat_s, threading.Event()
        self.record = {"format": "async-grpo-member", "version": 1, "role": role, "id": id or secrets.token_hex(4),
                       "url": url, "counter": 0, "run_id": run_id, "doing": doing, "pid": os.getpid(),
                       "host": socket.gethostname()}
        self.key = f"members/{role}-{self.record['id']}.json"

    def update(self, **fields) -> None:
        """New values (`doing`, `url`, …) for the next beat."""
        self.record = {**self.record, **fields}

    def run(self) -> None:
        for counter in itertools.count(1):
            is_over = counter > 1 and self.finished.is_set()
            data = json.dumps({**self.record, "counter": counter}, sort_keys=True).encode() + b"\n"
            try:
                self.bucket.delete(self.key) if is_over else self.bucket.put(self.key, data)
            except OSError as error:
                log.warning("heartbeat %s: %s (going on)", self.key, error)
            if is_over:
                return
            self.finished.wait(self.beat_s)

    def stop(self) -> None:
        """Ends the heartbeat and removes the file; waits at most a second for a slow bucket."""
        self.finished.set()
        if self.is_alive():
            self.join(1.0)

class LiveMembers:
    """Who is alive by this reader's own clock: dead is whose counter has not moved for `dead_s`. No two clocks are
    compared."""
    def __init__(self, bucket, role: str = "", dead_s: float = DEAD_S, clock=time.monotonic):
        self.bucket, self.prefix = bucket, f"members/{role}-" if role else "members/"
        self.dead_s, self.clock, self.read_at = dead_s, clock, -math.inf
        self.seen: dict[str, tuple[float, dict]] = {}    # key: when the counter moved, record

    def poll(self, max_age_s: float = 0.0) -> dict[str, dict]:
        """The live records by id; read anew unless that was done within `max_age_s`. BucketError if it cannot be read."""
        now = self.clock()
        if now - self.read_at >= max_age_s:
            seen = {}
            for key in self.bucket.list(self.prefix):
                try:
                    record = json.loads(self.bucket.get(key))
                    record |= {"id": str(record["id"]), "url": str(record["url"])}
                    moved, before = self.seen.get(key, (now, record))
                    seen[key] = moved if before["counter"] == record["counter"] else now, record
                except NotFound:                         # it left between the two calls
                    continue
                except (ValueError, TypeError, LookupError, RecursionError) as error:
                    log.warning("%s is no member record (%s): ignored", key, type(error).__name__)
            self.seen, self.read_at = seen, now
        return {record["id"]: record for moved, record in self.seen.values() if now - moved < self.dead_s}

    def missing(self) -> dict[str, float]:
        """Who died without a goodbye: id -> seconds since the counter moved."""
        silent = {record["id"]: self.clock() - moved for moved, record in self.seen.values()}
        return {id: silent_s for id, silent_s in silent.items() if silent_s >= self.dead_s}

# ---- The router -----------------------------------------------------------------------------------------------------

@dataclass
class Adapter:
    """What every replica must hold: a version of the bucket, or what a client loaded (then there is no canary)."""
    name: str
    source: str                                          # key adapters/vNNNNNN, or the client's folder
    canary: dict | None = None
    salt: str = ""                                       # of a client's load: another one may bring other weights

class Router:
    """Keeps the fleet right, and forwards completions. `wanted`: what every replica must hold, the bucket's newest
    version first."""
    def __init__(self, bucket, replicas: list[str], replica_token: str, adapter_dir: str, request_limit_s: float):
        self.bucket, self.token, self.request_limit_s = bucket, replica_token, request_limit_s
        self.roots = [os.path.abspath(root) for root in (adapter_dir, getattr(bucket, "root", None)) if root]
        self.wanted: dict[str, Adapter] = {}
        self.replicas: dict[str, Replica] = {}
        self.chooser, self.counts, self.lock, self.is_on_hold = Chooser(), Counter(), asyncio.Lock(), False
        for url in replicas:
            self.add(url)

    # The fleet.

    def add(self, url: str) -> None:
        replica = self.replicas[url] = Replica(url, self.token)
        replica.watch = asyncio.ensure_future(self.watch(replica))   # kept: a task nobody refers to may be collected

    def news(self, published: list[Adapter], urls: set[str]) -> None:
        """From the bucket: the versions to serve, newest first, and the samplers alive."""
        before, loaded = self.wanted, {name: adapter for name, adapter in self.wanted.items() if not adapter.canary}
        self.wanted = {adapter.name: adapter for adapter in published} | loaded
        for url in urls - self.replicas.keys():
            try:
                self.add(url)
            except ValueError as error:
                log.warning("member ignored: %s", error)
        for replica in list(self.replicas.values()):
            replica.is_member |= replica.url in urls
            if self.wanted.keys() != before.keys():
                replica.wake.set()
            # A heartbeat may stop because the member cannot reach the bucket: while its HTTP works it stays.
            if replica.is_member and replica.url not in urls and not replica.is_live:
                self.move(replica, "out", "it left")
                del self.replicas[replica.url]
                replica.watch.cancel()

    async def follow(self, url: str) -> None:
        """Hears again and again what is published and who lives; announces itself as `url`. Outlives a failing bucket."""
        bucket, members, adapters, said = self.bucket, LiveMembers(self.bucket, "sampler"), {}, ""
        me, live_versions = None, 0
        def look() -> tuple[list[Adapter], set[str]]:
            """In a thread, for a bucket may take its time."""
            nonlocal me, live_versions, adapters
            if not me:
                if "run.json" not in bucket.list("run.json"):
                    raise NotFound(f"waiting for run.json in {bucket.address}")
                run = json.loads(bucket.get("run.json"))
                live_versions = int(run["max_staleness"]) + 2
                me = Member(bucket, "proxy", url, run["run_id"], doing="routing")
                me.start()
            # Found by listing, a manifest being written last; read once each.
            keys = sorted((key for key in bucket.list("adapters/") if key.endswith("/manifest.json")), reverse=True)
            adapters = {key: adapters.get(key) or published(key, bucket.get(key)) for key in keys[:live_versions]}
            urls = {record["url"] for record in members.poll(POLL_S).values() if record["url"]}
            return [adapter for adapter in adapters.values() if adapter.name], urls
        try:
            while bucket:
                try:
                    self.news(*await in_thread(look))
                    trouble = ""
                except NotFound as error:                # too early
                    trouble = str(error)
                except Exception as error:               # whatever lies in the bucket: this task must outlive it
                    trouble = f"bucket: {type(error).__name__}: {error} (going on)"
                if trouble not in ("", said):
                    log.warning("%s", trouble)
                said = trouble
                await asyncio.sleep(POLL_S if bucket.root is None else POLL_S / 5)   # a folder's listing costs nothing
        finally:
            if me:
                me.stop()

    def move(self, replica: Replica, state: str, why: str = "") -> None:
        """To another state. Out of service, it must prove everything again."""
        if state in ("joining", "out"):
            replica.last_error = why
            replica.proven.clear()
            replica.refused.clear()
            self.stop_loads(replica, list(replica.loads))
        if state == "out":
            replica.close()                         # its requests go elsewhere now
        if state != replica.state:
            log.info("replica %s: %s -> %s %s", replica.url, replica.state, state, why)
        replica.state = state

    def stop_loads(self, replica: Replica, names) -> None:
        for name in names:
            if task := replica.loads.pop(name, None):
                task.cancel()

    def suspect(self, replica: Replica, why: str) -> None:
        """It may be a new process: no traffic until it is checked, which is now."""
        if replica.is_live:
            self.move(replica, "joining", why)
            replica.wake.set()

    async def watch(self, replica: Replica) -> None:
        """Task: checks a replica every second, and at once when woken."""
        while True:
            replica.wake.clear()
            try:
                await self.check(replica)
                replica.fails = 0
            except (OSError, ApiError) as error:
                replica.fails += 1
                # A refused connection is certain; a time-out may be one busy moment.
                if replica.fails >= POLL_FAILS or not isinstance(error, TimeoutError):
                    self.move(replica, "out", f"{type(error).__name__}: {error}")
            except Exception:
                log.exception("watching %s failed", replica.url)
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.wake.wait(), POLL_S)

    async def check(self, replica: Replica) -> None:
        """Health and models; notices a restart; starts to load what is missing, and unloads what is out of date."""
        before = set(replica.proven)                     # what is proven meanwhile may be too new for the list
        await replica.call("GET", "/health")
        try:
            cards = (await replica.call("GET", "/v1/models"))["data"]
            replica.served = {str(card["id"]) for card in cards if card.get("parent")} - {ALIAS}
            replica.base, replica.max_model_len = str(cards[0]["id"]), cards[0].get("max_model_len")
        except (LookupError, TypeError, AttributeError):
            raise ApiError(502, "/v1/models is no list of models") from None
        if lost := before & replica.proven - replica.served:
            self.move(replica, "joining", f"it lost {', '.join(sorted(lost))}")
        if not replica.is_live:
            await self.greet(replica)
        self.stop_loads(replica, replica.loads.keys() - self.wanted.keys())
        for name in replica.served - self.wanted.keys():
            if not (self.bucket and VERSION.fullmatch(name)):
                replica.proven.add(name)                 # somebody else's: there is nothing to check it against
            elif self.wanted:
                await self.drop(replica, name)
        for adapter in self.wanted.values():
            if adapter.name not in replica.proven and adapter.name not in replica.loads:
                replica.loads[adapter.name] = asyncio.ensure_future(self.bring(replica, adapter))
        self.settle(replica)

    async def greet(self, replica: Replica) -> None:
        """joining, out -> loading."""
        with suppress(ApiError):                         # a server need not have these routes
            config = (await replica.call("GET", "/server_info?config_format=json")).get("vllm_config")
            replica.config = config if isinstance(config, dict) else {}
            # A client or a router killed inside a pause left it so.
            if not self.is_on_hold and (await replica.call("GET", "/is_paused")).get("is_paused"):
                await replica.call("POST", "/resume")
        self.move(replica, "loading")

    def settle(self, replica: Replica) -> None:
        """loading -> ready, once all that is wanted is proven, or the rest has failed for long."""
        is_done = self.wanted.keys() <= replica.proven | replica.refused and (replica.proven or not self.bucket)
        if replica.state == "loading" and is_done and not self.is_on_hold:
            self.move(replica, "ready")

    async def drop(self, replica: Replica, name: str) -> None:
        replica.proven.discard(name)
        replica.served.discard(name)
        with suppress(ApiError):                         # it does not know the name
            await replica.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def bring(self, replica: Replica, adapter: Adapter) -> None:
        """Task: loads and proves one adapter, again and again until it is proven, or wanted no more."""
        for attempt in itertools.count(1):
            try:
                await self.load_and_prove(replica, adapter)
                replica.refused.discard(adapter.name)
                replica.proven.add(adapter.name)
                return self.settle(replica)
            except OSError as error:
                return self.suspect(replica, f"{adapter.name}: {type(error).__name__}: {error}")
            except ApiError as error:
                replica.last_error = f"{adapter.name}: {error.message}"
                log.warning("replica %s does not serve %s", replica.url, replica.last_error)
                # 404 and 5xx pass where a mount lags behind the writer; other refusals do not.
                if attempt >= LOAD_TRIES or error.status < 500 and error.status not in (404, 429):
                    replica.refused.add(adapter.name)
            self.settle(replica)
            await asyncio.sleep(min(MAX_BACKOFF_S, 0.25 * 2**attempt))

    async def load_and_prove(self, replica: Replica, adapter: Adapter) -> None:
        """What is there already must pass the canary; what has none is loaded anew, as nothing else could prove it."""
        if adapter.name in replica.served and not adapter.canary:
            await self.drop(replica, adapter.name)
        if adapter.name not in replica.served:
            # Subtle: a client's folder is absolute, and join() then leaves it as it is.
            path = adapter.source if replica.is_member or not self.roots else os.path.join(self.roots[0], adapter.source)
            body = {"lora_name": adapter.name, "lora_path": path}
            await replica.call("POST", "/v1/load_lora_adapter", body, LOAD_S)
            replica.served.add(adapter.name)
        if adapter.canary:
            while self.is_on_hold:                       # a paused replica would not answer
                await asyncio.sleep(LOOK_S)
            is_right, why = await self.prove(replica, adapter)
            if is_right is False:
                await self.drop(replica, adapter.name)
                raise ApiError(502, f"the canary refused it: {why}")
            if is_right is None:
                log.warning("replica %s: %s is unproven, watch `mismatch`: %s", replica.url, adapter.name, why)

    async def prove(self, replica: Replica, adapter: Adapter) -> tuple[bool | None, str]:
        async def ask(prompt):
            # Subtle: as many as the canary has, because a vLLM asked for more than its vocabulary dies.
            body = {"model": adapter.name, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "seed": 0,
                    "logprobs": len(adapter.canary["adapter"][0]), "return_tokens_as_token_ids": True}
            reply = await replica.call("POST", "/v1/completions", body, CANARY_S)
            best = reply["choices"][0]["logprobs"]["top_logprobs"][0]
            return {int(token.removeprefix("token_id:")): value for token, value in best.items()}
        try:
            canary, dtype = adapter.canary, str((replica.config.get("model_config") or {}).get("dtype") or "float32")
            versions = list(self.wanted.values())        # the newest first: the next one is the one before
            older = next((other.canary["adapter"] for other in versions[versions.index(adapter) + 1:]
                          if other.canary and other.canary["prompts"] == canary["prompts"]), None)
            got = await asyncio.gather(*map(ask, canary["prompts"]))
            return canary_verdict(canary if "float32" in dtype else {**canary, "dtype": dtype}, got, older)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return False, f"its answer cannot be read ({type(error).__name__}: {error})"

    # Completions.

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state == "ready"]

    def live(self) -> set[str]:
        return {name for replica in self.ready() for name in replica.proven}

    def holders(self, name: str) -> list[Replica]:
        """Ready replicas that may be asked for an adapter, or for their base. 404 if the live ones know of no such name."""
        known = [replica for replica in self.replicas.values() if name in replica.proven or name == replica.base]
        if not known and name not in self.wanted and any(replica.is_live for replica in self.replicas.values()):
            raise unknown(name, self.live())
        return [replica for replica in known if replica.state == "ready"]

    async def until(self, find, limit_s: float = 0.0):
        """What `find()` returns once it is not empty; 503 after the limit (READY_WAIT_S)."""
        end = time.monotonic() + (limit_s or READY_WAIT_S)
        while not (found := find()):
            if time.monotonic() > end:
                states = ", ".join(f"{replica.url} is {replica.state}" for replica in self.replicas.values())
                raise ApiError(503, f"not ready yet: {states or 'no replica is known'}", **{"Retry-After": "1"})
            await asyncio.sleep(LOOK_S)
        return found

    async def completions(self, request: Request) -> Reply:
        """Forwards to the chosen replica. After a connection error, 429, 5xx, or a version it forgot, to another one."""
        body, tried, changes = request.json(), set(), {}
        name, n, prompt = model_of(body), body.get("n"), body.get("prompt")
        prompt = prompt if is_token_list(prompt) else json.dumps(prompt or body.get("messages"))
        rollouts = n if type(n) is int and 0 < n <= 1024 else 1
        if name == ALIAS and (self.bucket or newest(self.live())):
            changes["model"] = name = await self.until(lambda: newest(self.live()))
        if name in self.wanted and self.wanted[name].salt:
            changes["cache_salt"] = self.wanted[name].salt   # vLLM's prefix cache knows an adapter by its name alone
        data = json.dumps(body | changes).encode() if changes else request.body
        for attempt in range(TRIES):
            found = await self.until(lambda: self.holders(name))
            loads = {replica.url: replica.in_flight for replica in found}
            loads = {url: load for url, load in loads.items() if url not in tried} or loads
            url = min(loads, key=loads.get) if attempt else self.chooser.choose(name, prompt, loads)
            replica, reply = self.replicas[url], None
            tried.add(url)
            replica.in_flight += rollouts
            try:
                reply = await replica.request("POST", request.path, data, self.request_limit_s)
            except TimeoutError:
                raise ApiError(504, f"no answer from {url} within {self.request_limit_s:g} s") from None
            except OSError as error:
                self.suspect(replica, f"{type(error).__name__}: {error}")
            finally:
                replica.in_flight -= rollouts
            if reply and (reply.status < 400 or reply.status in (400, 408, 413, 422)):
                self.counts["forwarded"] += 1
                return reply
            self.counts["retried"] += 1
            if reply:
                replica.last_error = f"{request.path}: {reply.status} {reply.body[:200].decode(errors='replace')}"
                if reply.status == 404 and name in replica.proven:
                    self.suspect(replica, replica.last_error)
            if len(tried) >= len(found):
                await asyncio.sleep(0.1 * 2**attempt)
        self.counts["failed"] += 1
        status = 429 if reply and reply.status == 429 else 502
        raise ApiError(status, f"{TRIES} tries failed, the last at {url}: {replica.last_error}", **{"Retry-After": "1"})

    # The API's other routes.

    async def load_lora_adapter(self, request: Request) -> Reply:
        name, path = adapter_of(request)
        if self.bucket and VERSION.fullmatch(name):
            raise ApiError(400, f"`{name}` is a version of the bucket: publish it there")
        path = folder_inside(path, self.roots)
        # Shielded: a client that leaves must not leave half of the replicas loaded.
        await asyncio.shield(self.load(name, path))
        return done("added", name)

    async def load(self, name: str, path: str) -> None:
        """Wants it everywhere and waits for every live replica; a lasting refusal takes it back. (vLLM's 404 would end
        a TRL run: 504.) What was there under the name is replaced."""
        async with self.lock:
            await self.until(lambda: any(replica.is_live for replica in self.replicas.values()))
            await self.make_room(name)
            self.wanted[name] = Adapter(name, path, salt=secrets.token_hex(8))
            for replica in self.replicas.values():
                self.stop_loads(replica, [name])
                replica.proven.discard(name)
                replica.refused.discard(name)
                replica.wake.set()
            def settled():
                live = [replica for replica in self.replicas.values() if replica.is_live]
                return live if all(name in replica.proven | replica.refused for replica in live) else []
            try:
                live = await self.until(settled, LOAD_S)
                refused = "; ".join(f"{one.url}: {one.last_error}" for one in live if name not in one.proven)
            except ApiError as error:
                refused = error.message
            if refused:
                await self.forget(name)
                raise ApiError(504, f"`{name}` is not loaded, and was unloaded where it had been: {refused}")

    async def make_room(self, name: str) -> None:
        """As in vLLM, one adapter more than fits takes the place of the oldest: a client that died leaves its own behind."""
        live = [replica for replica in self.replicas.values() if replica.is_live]
        slots = min((replica.config.get("lora_config") or {}).get("max_loras") or math.inf for replica in live)
        self.wanted.pop(name, None)                      # what comes back under its old name is new
        held = [*sorted(set().union(*(replica.served for replica in live)) - self.wanted.keys() - {name}), *self.wanted]
        held = [one for one in held if not (self.bucket and VERSION.fullmatch(one))]
        while len(held) >= slots:
            await self.forget(held.pop(0))

    async def forget(self, name: str) -> None:
        """From here on nothing is routed to the name; a replica that fails to unload it only keeps a slot filled."""
        self.wanted.pop(name, None)
        for replica in self.replicas.values():
            self.stop_loads(replica, [name])
        holders = [replica for replica in self.replicas.values() if name in replica.served]
        await asyncio.gather(*(self.drop(replica, name) for replica in holders), return_exceptions=True)

    async def unload_lora_adapter(self, request: Request) -> Reply:
        name, _ = adapter_of(request)
        is_known = name in self.wanted or any(name in replica.served for replica in self.replicas.values())
        if self.bucket and VERSION.fullmatch(name) or not is_known:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        async with self.lock:
            await self.forget(name)
        return done("removed", name)

    async def everywhere(self, path: str) -> dict[Replica, Exception]:
        """POST to all live replicas at once; those that failed, and why."""
        live = [replica for replica in self.replicas.values() if replica.is_live]
        calls = (replica.call("POST", path, limit_s=LOAD_S) for replica in live)
        results = zip(live, await asyncio.gather(*calls, return_exceptions=True))
        return {replica: result for replica, result in results if isinstance(result, Exception)}

    async def pause(self, request: Request) -> Reply:
        mode, self.is_on_hold = pause_mode(request), True
        if refused := await self.everywhere(f"/pause?mode={mode}"):
            await self.resume(None)
            raise ApiError(504, f"not paused, and resumed where it was: {told(refused)}")
        return to_json({"status": "paused"})

    async def resume(self, request: Request | None) -> Reply:
        self.is_on_hold = False
        refused = await self.everywhere("/resume")
        for replica, error in refused.items():
            self.suspect(replica, f"not resumed: {error}")   # when it is checked, it is resumed
        if refused and request:
            raise ApiError(504, f"not resumed: {told(refused)}")
        return to_json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Reply:
        return to_json({"is_paused": self.is_on_hold})

    async def health(self, request: Request) -> Reply:
        if not self.ready():
            raise ApiError(503, "no replica is ready", **{"Retry-After": "1"})
        return Reply(b"")

    async def models(self, request: Request) -> Reply:
        first = (await self.until(self.ready))[0]
        return model_list(first.base, first.max_model_len, self.live())

    async def server_info(self, request: Request) -> Reply:
        """Of the first ready replica: they should be alike."""
        return to_json({"vllm_config": (await self.until(self.ready))[0].config})

    def rows(self) -> list[tuple]:
        """What /metrics and / show: (name, labels, value)."""
        rows = [("newest ready", {}, newest(self.live())), ("paused", {}, self.is_on_hold)]
        rows += [("grpo:router_choices_total", {"kind": kind}, self.chooser.counts[kind])
                 for kind in ("affinity", "spill", "cold")]
        rows += [(f"grpo:router_{kind}_total", {}, self.counts[kind]) for kind in ("forwarded", "retried", "failed")]
        for replica in self.replicas.values():
            label = {"replica": replica.url}
            rows += [("state", label, replica.state), ("grpo:router_ready", label, int(replica.state == "ready")),
                     ("vllm:num_requests_running", label, replica.in_flight), ("last error", label, replica.last_error)]
            rows += [("grpo:router_serves", {**label, "version": name}, 1) for name in sorted(replica.proven)]
        return rows

def told(refused: dict[Replica, Exception]) -> str:
    return "; ".join(f"{replica.url}: {error}" for replica, error in refused.items())

def published(key: str, manifest: bytes) -> Adapter:
    """The version that a manifest announces; without a name, and reported, if it cannot be read."""
    try:
        said = json.loads(manifest)
        canary = {what: said["canary"][what] for what in ("prompts", "dtype", "adapter", "base")}
        return Adapter(f"policy-v{int(said['policy_version'])}", key.removesuffix("/manifest.json"), canary)
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        log.warning("%s is set aside: %s: %s", key, type(error).__name__, error)
        return Adapter("", key)

# ---- Running --------------------------------------------------------------------------------------------------------

def serve(make_app, listen: str, token: str = "", on_ready=print, pause_limit_s: float = 60.0,
          stop: threading.Event | None = None) -> None:
    """Blocking: serves an app until SIGTERM, Ctrl-C or `stop`; `on_ready` gets its URL."""
    async def run():
        loop, end, app = asyncio.get_running_loop(), asyncio.Event(), make_app()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, end.set)
        if stop:
            threading.Thread(target=lambda: stop.wait() and loop.call_soon_threadsafe(end.set), daemon=True).start()
        server = Server(app, token, pause_limit_s)
        url = await server.start(listen)
        on_ready(url)
        following = asyncio.ensure_future(app.follow(url))
        await end.wait()
        server.listener.close()
        following.cancel()                           # as asyncio.run now does with all tasks, and awaits them
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]       # a completion in flight takes two connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 10240) if sys.platform == "darwin" else most, most))   # macOS: OPEN_MAX
    asyncio.run(run())

def serve_replica(engine, listen: str, token: str = "", roots=(), **how) -> None:
    """`serve` of the API over one engine. `roots`: folders that a lora_path may be in."""
    serve(lambda: ReplicaServer(engine, roots), listen, token, **how)

def serve_router(bucket, replicas, listen: str, token: str = "", replica_token: str = "", adapter_dir: str = "",
                 request_limit_s: float = 600.0, **how) -> None:
    """`serve` of the router over these replicas and the bucket's samplers."""
    serve(lambda: Router(bucket, replicas, replica_token or token, adapter_dir, request_limit_s), listen, token, **how)

def main(argv=None) -> int:
    parser = Arguments(prog="proxy.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    flag = parser.add_argument
    flag("--bucket", default="", help="the run's folder, s3://bucket/prefix or URL (none: a client loads the adapters)")
    flag("--replica", action="append", default=[], metavar="URL", dest="replicas", help="a vLLM or sampler (repeatable)")
    flag("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="port 0: any free one")
    flag("--token", default=os.environ.get("GRPO_TOKEN", ""),
         help="bearer token clients must send; for / in a browser, the password (default: GRPO_TOKEN; none: loopback only)")
    flag("--replica-token", default="", help="bearer token sent to the replicas (default: --token)")
    flag("--adapter-dir", default="", metavar="DIR",
         help="where the --replica servers see the bucket's objects (default: the file bucket itself)")
    flag("--pause-limit-s", type=seconds, default=60.0, help="seconds after which a pause ends by itself (0: never)")
    flag("--request-limit-s", type=seconds, default=600.0, help="seconds a completion may take")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        parse_listen(args.listen, bool(args.token))
        bucket = open_bucket(args.bucket) if args.bucket else None
        if not bucket and not args.replicas:
            raise ValueError("give --bucket, --replica, or both")
        if args.replicas and bucket and not (args.adapter_dir or getattr(bucket, "root", None)):
            raise ValueError("--replica beside this bucket needs --adapter-dir: where those servers see its objects")
        for url in args.replicas:
            Replica(url)
    except (ValueError, BucketError) as error:
        print(f"proxy.py: {error}", file=sys.stderr)
        return 2
    try:
        on_ready = lambda url: print(f"ready role=proxy url={url}", flush=True)  # noqa: E731
        serve_router(**{**vars(args), "bucket": bucket}, on_ready=on_ready)
    except OSError as error:
        advice = "; --listen HOST:0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        print(f"proxy.py: cannot serve on {args.listen}: {error}{advice}", file=sys.stderr)
        return 1
    return 0

if __name__ == "__main__":
    sys.exit(main())
