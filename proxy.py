"""proxy.py: one vLLM-shaped HTTP API, spoken by a single replica (over an engine) and by a router over many replicas.

    python proxy.py --bucket runs/demo                                 # replicas come from members/ of the bucket
    python proxy.py --bucket s3://b/run --adapter-dir /mnt/run --replica http://gpu1:8000 --listen 0.0.0.0:8000 --token T
    python proxy.py --replica http://gpu1:8000 --adapter-dir /shared   # no bucket: a client loads the adapters (TRL)

Policy version N is the adapter `policy-vN`; the alias `policy` is the newest that is ready. The router keeps a list of what every
replica must hold: the newest versions published in the bucket, and what clients loaded. Each replica is brought there by a task of its
own, and its answers are compared with the canary (top-20 logprobs after 8 prompts, stored at publish) before requests go there:

    joining -> loading -> ready -> out      (out: it fails; it comes back through loading, with every version checked again)

Requests of one prompt go to one replica, whose prefix cache is warm: the prompt's 16-token blocks are hashed in a chain seeded with the
adapter's name, and the owner of the deepest known block is chosen unless it is far busier than the least busy.

Guarantees
 1. A request that names a version is answered under that version or not at all; never under the base or another one.
 2. Only a (replica, version) that passed the canary gets requests. A connection error takes the replica out until it is checked.
 3. One slow or dead replica delays nobody; its requests are tried again elsewhere (bounded).
 4. A load through the API is served by all live replicas or by none. A forgotten pause ends by itself.
 5. A client that leaves cancels its work, down to the engine. In-flight counts return to 0 on every path.
 6. Every head, body, wait and retry is bounded; bad input is a 4xx; the token is in no log, no error and no foreign request.

Statuses: 400 bad input, 401 token, 404 no such route or version (names the live ones), 405 method, 408 too slow, 413 body, 431 head;
502 no replica could, 503 not ready yet (Retry-After), 504 time-out, or a load or pause taken back.

Does not: stream tokens, pipeline, serve HTTP/2 or TLS (put a TLS terminator in front), keep state on disk, run on Python before 3.11
(asyncio.timeout). Whoever can write to the
bucket is trusted with the policy: the canary is against faults, not against an attacker.

[1] docs.vllm.ai: OpenAI-compatible server, LoRA adapters   [2] RFC 9112: HTTP/1.1
"""
import argparse
import asyncio
import concurrent.futures
import hashlib
import hmac
import html
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
from dataclasses import dataclass, field
from http.client import responses
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from bucket import BucketError, NotFound, open_bucket

log = logging.getLogger("proxy")
MAX_HEAD_BYTES, MAX_BODY_BYTES, MAX_REPLY_BYTES = 32 << 10, 8 << 20, 256 << 20   # 8 MiB: a million token ids
MAX_CONNECTIONS = 8192                               # of clients; more are closed at once
IDLE_S, HEAD_S, BODY_S, WRITE_S, LINGER_S = 75.0, 10.0, 30.0, 60.0, 2.0          # limits on a client's connection
POLL_S, POLL_LIMIT_S, POLL_FAILS = 1.0, 5.0, 3       # a replica's health: how often, how long, time-outs until it is out
LOAD_S, CANARY_S, CONNECT_S = 300.0, 60.0, 5.0       # limits on a call to a replica
TRIES, READY_WAIT_S = 4, 10.0                        # of one completion: tries, seconds it waits for a ready replica
LOAD_TRIES, MAX_BACKOFF_S = 8, 8.0                   # 30 s in all: mounts remember "not there" that long
AHEAD_ROLLOUTS, BLOCK_TOKENS, MAX_BLOCKS = 8, 16, 100_000   # routing: what a warm prefix is worth; about 30 MB
BEAT_S, DEAD_S = 1.0, 15.0                           # members: rewritten every; counter unmoved for = dead
FP32_TOLERANCE, BF16_FLOOR, GARBLED = 1e-3, 0.01, 0.5       # canary, nats
MINUS_INFINITY = -9999.0                             # vLLM's JSON for log 0
ALIAS, VERSION, ADAPTER_KEY = "policy", re.compile(r"policy-v(\d{1,12})"), re.compile(r"adapters/v\d{6,12}")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
# All there is. The handler is the method named like the last segment; / and /metrics show the app's rows.
ROUTES = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET", "/v1/load_lora_adapter": "POST", "/metrics": "GET",
          "/v1/unload_lora_adapter": "POST", "/pause": "POST", "/resume": "POST", "/is_paused": "GET", "/health": "GET", "/server_info": "GET", "/": "GET"}
# Parameters that change what is sampled, or the reply's form: only these values are accepted.
NEUTRAL = {"stream": (False,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "suffix": ("",),
           "repetition_penalty": (1,), "logit_bias": ({},), "stop": ([], ""), "echo": (False,), "best_of": (1,), "min_tokens": (0,), "tools": ([],),
           "ignore_eos": (False,), "response_format": ({"type": "text"},)}

class ApiError(Exception):
    """Becomes the reply with that status, in vLLM's error JSON."""
    def __init__(self, status: int, message: str, **headers: str):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers

    def reply(self) -> "Reply":
        kind = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}.get(self.status, responses[self.status])
        return to_json({"error": {"message": self.message, "type": kind, "param": None, "code": self.status}}, self.status, self.headers)

class LoadError(ApiError):
    """Raised by an engine whose load failed: 404 (not there yet), 400 (wrong adapter), 500 (may pass), and why."""

@dataclass
class Reply:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: dict = field(default_factory=dict)

@dataclass
class Request:
    path: str
    query: dict
    is_last: bool                                    # the connection closes after the reply
    body: bytes

    def json(self) -> dict:
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        return body

def to_json(value, status: int = 200, headers: dict | None = None) -> Reply:
    return Reply(json.dumps(value, separators=(",", ":")).encode(), status, headers=headers or {})

# ---- HTTP/1.1 by hand ----------------------------------------------------------------------------------------------------------------

class Wire(asyncio.StreamReaderProtocol):
    """One connection, of either side. When a client leaves, its serving task is cancelled, and through it the engine's work."""
    def __init__(self, serve=None):
        self.reader, self.serve, self.task, self.is_closed = asyncio.StreamReader(MAX_HEAD_BYTES), serve, None, False
        super().__init__(self.reader)

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        # Without it, Nagle's algorithm and delayed acknowledgements cost 44 ms a hop.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport, self.writer = transport, asyncio.StreamWriter(transport, self, self.reader, asyncio.get_running_loop())
        if self.serve:
            self.task = asyncio.ensure_future(self.serve(self))

    def eof_received(self) -> bool:
        super().eof_received()
        return False                                 # close: a client that shuts one side counts as gone

    def connection_lost(self, error) -> None:
        self.is_closed = True
        super().connection_lost(error)
        if self.task:
            self.task.cancel()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, end: bytes) -> str:
        try:
            return (await self.reader.readuntil(end))[:-len(end)].decode("latin-1")
        except asyncio.LimitOverrunError:
            raise ApiError(431, f"head or line over {MAX_HEAD_BYTES} bytes") from None

    async def head(self, start: str = "") -> tuple[str, dict[str, str]]:
        """First line and headers, names in lower case. 400 for what servers read differently: folding, repeated or double lengths."""
        (first, *lines), headers = (start + await self.until(b"\r\n\r\n")).split("\r\n"), {}
        for match in map(HEADER.fullmatch, lines):
            if not match or match[1].lower() in headers and match[1].lower() in ("content-length", "transfer-encoding", "authorization"):
                raise ApiError(400, "malformed or repeated header")
            headers[match[1].lower()] = match[2]
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError(400, "both content-length and transfer-encoding")
        return first, headers

    async def body(self, headers: dict[str, str], limit: int) -> bytes:
        """The body, by length or in chunks. 400 malformed, 413 over `limit` bytes."""
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise ApiError(400, "transfer-encoding must be chunked")
        if "transfer-encoding" not in headers:
            return await self.reader.readexactly(parse_length(headers.get("content-length", "0"), 10, limit))
        pieces = []
        while size := parse_length((await self.until(b"\r\n")).split(";")[0].strip(), 16, limit):
            pieces.append((await self.reader.readexactly(size + 2))[:-2])
            limit -= size
        while await self.until(b"\r\n"):
            pass                                         # trailers
        return b"".join(pieces)

def parse_length(text: str, base: int, limit: int) -> int:
    if not re.fullmatch("[0-9]{1,15}" if base == 10 else "[0-9a-fA-F]{1,15}", text):
        raise ApiError(400, "malformed length")
    if int(text, base) > limit:
        raise ApiError(413, "the body is too large")
    return int(text, base)

class Server:
    """Accepts connections; checks token, route and size of each request before the app (a ReplicaServer or a Router) sees it. A pause
    that is not resumed within `pause_limit_s` (0: never) is: a client killed inside one must leave nobody paused."""
    def __init__(self, app, token: str = "", pause_limit_s: float = 60.0, head_s: float = HEAD_S, body_s: float = BODY_S):
        self.app, self.token, self.pause_limit_s, self.head_s, self.body_s = app, f"Bearer {token}".encode() if token else b"", pause_limit_s, head_s, body_s
        self.tasks, self.expiry = set(), None

    async def start(self, listen: str) -> str:
        """Binds; returns the URL, with the real port."""
        host, port = parse_listen(listen, bool(self.token))
        self.server = await asyncio.get_running_loop().create_server(lambda: Wire(self.serve), host, port, backlog=4096)
        host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=1.0)

    async def serve(self, wire: Wire) -> None:
        task = asyncio.current_task()
        self.tasks.add(task)
        try:
            while len(self.tasks) <= MAX_CONNECTIONS and await self.answer(wire):
                pass
        except (OSError, asyncio.IncompleteReadError):   # the client left, idles, or does not read: there is nobody to tell
            wire.transport.abort()
        finally:
            self.tasks.discard(task)
            wire.transport.close()

    async def answer(self, wire: Wire) -> bool:
        """One request and its reply. False: the connection is done."""
        async with asyncio.timeout(IDLE_S):
            start = (await wire.reader.readexactly(1)).decode("latin-1")
        try:
            request = await self.read(wire, start)
        except ApiError as error:                        # before its body was read: answer, drop what still comes, close
            async with asyncio.timeout(LINGER_S):
                await wire.send(render(error.reply(), is_last=True))
                wire.transport.write_eof()
                while await wire.reader.read(1 << 16):
                    pass
            return False
        try:
            if request.path in ("/pause", "/resume"):
                self.limit_pause(request.path == "/pause")
            action = request.path.rpartition("/")[2]
            if action in ("", "metrics"):
                reply = metrics_text(self.app.rows()) if action else status_page(type(self.app).__name__, self.app.rows())
            else:
                reply = await getattr(self.app, action)(request)
        except ApiError as error:
            reply = error.reply()
        except Exception:
            log.exception("%s failed", request.path)
            reply = ApiError(500, "internal error; the server's log says more").reply()
        async with asyncio.timeout(WRITE_S):
            await wire.send(render(reply, request.is_last))
        return not request.is_last

    async def read(self, wire: Wire, start: str) -> Request:
        """One request, checked. ApiError: its body was not read to the end."""
        part = "head"
        try:
            async with asyncio.timeout(self.head_s):
                first, headers = await wire.head(start)
            match = re.fullmatch(r"([A-Z]{1,16}) ([!-~]{1,8192}) HTTP/1\.([01])", first)
            if not match:
                raise ApiError(400, "malformed request line")
            path, _, query = match[2].partition("?")
            if path != "/health" and self.token and not hmac.compare_digest(headers.get("authorization", "").encode(), self.token):
                raise ApiError(401, "missing or wrong bearer token", **{"WWW-Authenticate": "Bearer"})
            if ROUTES.get(path) != match[1]:
                raise ApiError(405, f"use {ROUTES[path]}", Allow=ROUTES[path]) if path in ROUTES else ApiError(404, "no such route")
            part = "body"
            async with asyncio.timeout(self.body_s):
                body = await wire.body(headers, MAX_BODY_BYTES)
        except TimeoutError:
            raise ApiError(408, f"the {part} came too slowly") from None
        return Request(path, dict(parse_qsl(query[:1000])), match[3] == "0" or headers.get("connection", "").lower() == "close", body)

    def limit_pause(self, is_paused: bool) -> None:
        async def expire():
            await asyncio.sleep(self.pause_limit_s)
            log.warning("paused for %g s and not resumed: resuming", self.pause_limit_s)
            await self.app.resume(None)
        if self.expiry:
            self.expiry.cancel()
        self.expiry = asyncio.ensure_future(expire()) if is_paused and self.pause_limit_s else None

def render(reply: Reply, is_last: bool) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in {**reply.headers, **({"Connection": "close"} if is_last else {})}.items())
    return (f"HTTP/1.1 {reply.status} {responses.get(reply.status, '')}\r\nContent-Type: {reply.content_type}\r\n"
            f"Content-Length: {len(reply.body)}\r\n{more}\r\n").encode("latin-1") + reply.body

def parse_listen(listen: str, has_token: bool) -> tuple[str, int]:
    """HOST:PORT; only loopback without a token. ValueError says what to do."""
    host, port = listen.rpartition(":")[0].strip("[]").replace("localhost", "127.0.0.1") or "127.0.0.1", listen.rpartition(":")[2]
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"--listen wants HOST:PORT, got {listen!r}")
    if not has_token and host != "::1" and not re.fullmatch(r"127\.\d+\.\d+\.\d+", host):
        raise ValueError(f"--listen {listen} can be reached from other machines: set --token or GRPO_TOKEN")
    return host, int(port)

class Pool:
    """HTTP client of one replica; keep-alive, last used first. It follows no redirect, so the token goes nowhere else."""
    def __init__(self, url: str, token: str = ""):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"a replica's URL must be http(s)://HOST[:PORT], got {url!r}")
        self.address, self.prefix = (parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]), parts.path.rstrip("/")
        self.headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        self.idle, self.busy, self.tls = [], set(), True if parts.scheme == "https" else None

    async def request(self, method: str, path: str, body: bytes = b"", limit_s: float = 0.0) -> Reply:
        """The reply, whatever its status. OSError (TimeoutError is one): there was none, and the connection is closed."""
        data = f"{method} {self.prefix}{path} HTTP/1.1\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
        async with asyncio.timeout(limit_s or POLL_LIMIT_S):
            while True:
                while self.idle and self.idle[-1].is_closed:
                    self.idle.pop()
                wire, is_reused = (self.idle.pop(), True) if self.idle else (await self.connect(), False)
                self.busy.add(wire)
                try:
                    await wire.send(data)
                    reply, is_last = await read_reply(wire)
                    self.idle.append(wire) if not is_last else wire.transport.close()
                    return reply
                except BaseException as error:
                    wire.transport.abort()
                    # Subtle: the peer may close an idle connection just as it is reused: again on a fresh one, unless we closed it.
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
        body = await wire.body(headers, MAX_REPLY_BYTES)
    except asyncio.IncompleteReadError:
        raise ConnectionError("the replica closed the connection") from None
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

# ---- What both sides say --------------------------------------------------------------------------------------------------------------

def take(body: dict, name: str, default, kind: type = int, low: float = 0, high: float = 2**63 - 1):
    """A number of the request, checked; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if not (type(value) is int or kind is float and type(value) is float) or not low <= value <= high:
        raise ApiError(400, f"{name} must be {'a number' if kind is float else 'an integer'} from {low:g} to {high:g}")
    return kind(value)

def is_token_list(value) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) < 2**31

def model_of(body: dict) -> str:
    if not isinstance(body.get("model"), str):
        raise ApiError(400, "model must be given: a live version, or `policy` for the newest")
    return body["model"]

def newest(names) -> str | None:
    versions = [int(match[1]) for match in map(VERSION.fullmatch, names) if match]
    return f"policy-v{max(versions)}" if versions else None

def unknown(model: str, live) -> ApiError:
    return ApiError(404, f"The model `{model[:200]}` does not exist. Live: {', '.join(sorted(live)) or 'none'}")

def model_list(base: str, max_model_len: int | None, roots: dict[str, str]) -> Reply:
    """As vLLM: the base first (clients read its max_model_len), then the adapters; last our alias."""
    cards = [(base, base, None, max_model_len), *((name, root, base, None) for name, root in roots.items())]
    cards += [(ALIAS, newest(roots), base, None)] if newest(roots) else []
    return to_json({"object": "list", "data": [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "async-grpo", "root": root,
                                                "parent": parent, "max_model_len": length} for name, root, parent, length in cards]})

def adapter_of(request: Request) -> tuple[str, str]:
    """lora_name and lora_path ("" if not given)."""
    body = request.json()
    name, path = body.get("lora_name"), body.get("lora_path") or ""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) or name == ALIAS or not isinstance(path, str):
        raise ApiError(400, f"lora_name must be of letters, digits, dots, dashes and underscores, and not `{ALIAS}`; lora_path a string")
    return name, path

def folder_inside(path: str, roots) -> str:
    """The real path of a folder inside one of the roots; else 400, which does not say what is where."""
    try:
        real = os.path.realpath(path) if os.path.isabs(path) else ""
    except ValueError:                                   # NUL, or what the file system cannot encode
        real = ""
    if not any(real.startswith(os.path.realpath(root) + os.sep) for root in roots):
        raise ApiError(400, "lora_path must be absolute, inside --adapter-dir or the bucket's folder (or, to a sampler, a key adapters/vNNNNNN)")
    return real

def fingerprint(path: str) -> str:
    """Equal for folders with equal adapter files; "" if they cannot be read here."""
    try:
        hashes = [hashlib.sha256(Path(path, name).read_bytes()).hexdigest() for name in ("adapter_config.json", "adapter_model.safetensors")]
    except OSError:
        return ""
    return " ".join(hashes)

def pause_mode(request: Request) -> str:
    if request.query.get("mode", "abort") not in ("keep", "abort", "wait"):
        raise ApiError(400, "mode must be keep, abort or wait")
    return request.query.get("mode", "abort")

def metrics_text(rows: list[tuple[str, dict, object]]) -> Reply:
    """Prometheus text of the rows (name, labels, value) that are numbers."""
    lines = {}
    for name, labels, value in rows:
        if type(value) in (int, float):
            text = ",".join(f"{key}={json.dumps(label, ensure_ascii=False)}" for key, label in labels.items())
            lines.setdefault(name, [f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"]).append(f"{name}{{{text}}} {value:.17g}")
    return Reply("".join(line + "\n" for group in lines.values() for line in group).encode(errors="replace"), content_type="text/plain; version=0.0.4; charset=utf-8")

def status_page(title: str, rows: list[tuple[str, dict, object]]) -> Reply:
    """A page that reloads itself: a line per replica for the rows labelled only with it, and one for each other row."""
    fleet = {}
    for name, labels, value in rows:
        if labels.keys() == {"replica"}:
            fleet.setdefault(labels["replica"], {"replica": labels["replica"]})[name] = value
    def line(cells, tag="td"):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
    head = [line(next(iter(fleet.values())), "th")] if fleet else []
    facts = [line([name, " ".join(labels.values()), value]) for name, labels, value in rows if "replica" not in labels]
    page = f"""<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=2><title>{title}</title><style>body{{font:14px/1.6 system-ui;margin:2rem;
color:#222}}table{{border-collapse:collapse;margin:1rem 0}}td,th{{border-bottom:1px solid #ddd;padding:.3rem .9rem;text-align:left;vertical-align:top}}</style>
<h1>{title}</h1><table>{"".join([*head, *(line(one.values()) for one in fleet.values())])}</table><table>{"".join(facts)}</table>"""
    return Reply(page.encode(errors="replace"), content_type="text/html; charset=utf-8")

# ---- A single replica -----------------------------------------------------------------------------------------------------------------

class ReplicaServer:
    """The API over one engine, which has: model_id, max_model_len, vocab_size, max_loras, max_lora_rank, dtype, is_paused; names(), load(name, path)
    (nothing for the same weights again, else LoadError), unload(name), pause(mode), resume(), stats(), cancel(future); encode(text) and chat(messages) -> ids, decode(ids),
    token(id) -> text; submit(ids, n, max_tokens, temperature, name | None, seed, stop_ids, top_logprobs) -> concurrent Future of completions
    (token_ids, logprobs, finish_reason, top_logprobs), which raises LookupError for an unknown name, ValueError for a client's mistake."""
    def __init__(self, engine, roots=()):
        self.engine, self.roots, self.lock, self.counts, self.paths = engine, roots, asyncio.Lock(), Counter(), {}

    async def completions(self, request: Request) -> Reply:
        body, is_chat = request.json(), "chat" in request.path
        for name, allowed in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in allowed:
                raise ApiError(400, f"{name} must be {json.dumps(allowed[0])}: replies come whole, and logprobs say what was sampled")
        if is_chat and body.get("logprobs"):
            raise ApiError(400, "logprobs come with /v1/completions only")
        ids = self.prompt_ids(body.get("messages" if is_chat else "prompt"), is_chat)
        top = None if is_chat else take(body, "logprobs", None, high=20)
        limit = take(body, "max_completion_tokens", None, low=1) or take(
            body, "max_tokens", max(1, self.engine.max_model_len - len(ids)) if is_chat else 16, low=1)
        name, done = await self.sample(body, ids, limit, top or 0)
        returned = {"prompt_token_ids": ids} if body.get("return_token_ids") else {}
        choices, total = [], sum(len(one.token_ids) for one in done)
        for index, one in enumerate(done):
            text = self.engine.decode(one.token_ids)
            choices.append({"index": index, "finish_reason": one.finish_reason, "stop_reason": None,
                            **({"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}),
                            "logprobs": None if top is None else self.logprobs(one, bool(body.get("return_tokens_as_token_ids"))),
                            **({"token_ids": one.token_ids, **returned} if returned else {})})
        return to_json({"id": f"cmpl-{secrets.token_hex(12)}", "object": "chat.completion" if is_chat else "text_completion", "created": int(time.time()),
                        "model": name, "choices": choices, "usage": {"prompt_tokens": len(ids), "completion_tokens": total, "total_tokens": len(ids) + total},
                        **(returned if is_chat else {})})

    def prompt_ids(self, prompt, is_chat: bool) -> list[int]:
        if is_token_list(prompt) and not is_chat:
            return prompt
        is_right = isinstance(prompt, list) and prompt and all(isinstance(turn, dict) and isinstance(turn.get("role"), str)
                                                               and isinstance(turn.get("content"), str) for turn in prompt)
        if not (is_right if is_chat else isinstance(prompt, str)):
            raise ApiError(400, "messages must be a list of {role, content} texts" if is_chat else "prompt must be one string or list of token ids")
        try:
            json.dumps(prompt, ensure_ascii=False).encode()   # fails for half a surrogate pair, which tokenizers do not survive
            return list((self.engine.chat if is_chat else self.engine.encode)(prompt))
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"the prompt cannot be encoded: {str(error)[:200]}") from None

    async def sample(self, body: dict, ids: list[int], limit: int, top: int) -> tuple[str, list]:
        """The name that served, and its completions. Cancelled with the client's connection."""
        model, live, stop = model_of(body), self.engine.names(), body.get("stop_token_ids") or []
        name = newest(live) if model == ALIAS else model
        if name not in live and name != self.engine.model_id:
            raise unknown(model, live)
        if not is_token_list(stop) or len(stop) > 128:
            raise ApiError(400, "stop_token_ids must be a list of at most 128 token ids")
        n, temperature, seed = take(body, "n", 1, low=1, high=1024), take(body, "temperature", 1.0, float, high=100), take(body, "seed", None, low=-2**63)
        try:
            future = self.engine.submit(ids, n, limit, temperature, None if name == self.engine.model_id else name, seed, tuple(stop),
                                        min(top, self.engine.vocab_size))
        except LookupError:
            raise unknown(model, self.engine.names()) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        try:
            done = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.engine.cancel(future)
            self.counts["abort"] += n
            raise
        self.counts.update(one.finish_reason for one in done)
        self.counts.update(prompt_tokens=len(ids), generation_tokens=sum(len(one.token_ids) for one in done))
        return name, done

    def logprobs(self, one, as_ids: bool) -> dict:
        """vLLM's shape: the sampled token is among the top ones; log 0 is -9999."""
        spell = "token_id:{}".format if as_ids else self.engine.token
        tops = [{token: value, **best} for token, value, best in zip(one.token_ids, one.logprobs, one.top_logprobs or [{}] * len(one.token_ids))]
        tokens = [spell(token) for token in one.token_ids]
        return {"tokens": tokens, "token_logprobs": [max(value, MINUS_INFINITY) for value in one.logprobs],
                "top_logprobs": [{spell(token): max(value, MINUS_INFINITY) for token, value in best.items()} for best in tops],
                "text_offset": [0, *itertools.accumulate(map(len, tokens))][:len(tokens)]}

    async def models(self, request: Request) -> Reply:
        return model_list(self.engine.model_id, self.engine.max_model_len, {name: self.paths.get(name, name) for name in sorted(self.engine.names())})

    async def load_lora_adapter(self, request: Request) -> Reply:
        """The same weights again: 200. A client's own name may get others (TRL counts from 1 in every run); a `policy-vN` never changes."""
        name, path = adapter_of(request)
        path = path if ADAPTER_KEY.fullmatch(path) else folder_inside(path, self.roots)
        if name == self.engine.model_id:
            raise ApiError(400, f"`{name}` is the base model")
        async with self.lock:
            try:
                await in_thread(self.engine.load, name, path)
            except LoadError as error:
                if error.status != 400 or name not in self.engine.names() or VERSION.fullmatch(name):
                    raise
                await in_thread(self.engine.unload, name)
                await in_thread(self.engine.load, name, path)
            self.paths[name] = path
        return to_json(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Reply:
        name, _ = adapter_of(request)
        async with self.lock:
            if name not in self.engine.names():
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
            await in_thread(self.engine.unload, name)
            self.paths.pop(name, None)
        return to_json(f"Success: LoRA adapter '{name}' removed successfully.")

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
        return to_json({"vllm_config": {"lora_config": {"max_lora_rank": engine.max_lora_rank, "max_loras": engine.max_loras}, "parallel_config": {
            "data_parallel_size": 1}, "model_config": {"max_model_len": engine.max_model_len, "dtype": f"torch.{engine.dtype}"}}})

    def rows(self) -> list[tuple]:
        stats, label = self.engine.stats(), {"model_name": self.engine.model_id}
        return [*((f"vllm:num_requests_{what}", label, stats.get(what, 0)) for what in ("running", "waiting")),
                *((f"vllm:{what}_total", label, self.counts[what]) for what in ("prompt_tokens", "generation_tokens")),
                *(("vllm:request_success_total", {**label, "finished_reason": why}, self.counts[why]) for why in ("stop", "length", "abort")),
                *((f"grpo:engine_{key}", {}, value) for key, value in stats.items()), ("adapters", {}, ", ".join(sorted(self.engine.names())))]

# ---- Which replica, and is it right? --------------------------------------------------------------------------------------------------

def distance(one: list[dict[int, float]], other: list[dict[int, float]]) -> float:
    """Mean |difference| of logprobs over the token ids that both list, in nats; inf if fewer than half are shared."""
    gaps = [abs(a[token] - b[token]) for a, b in zip(one, other) for token in a.keys() & b.keys()]
    return sum(gaps) / len(gaps) if gaps and 2 * len(gaps) >= sum(min(len(a), len(b)) for a, b in zip(one, other)) else math.inf

def canary_verdict(canary: dict, got: list[dict[int, float]], older: list[dict] | None = None) -> tuple[bool | None, str]:
    """Does a replica that answered `got` (top logprobs after each canary prompt) serve the adapter? (True | False | None, why).

    float32: every shared logprob within 1e-3. Else the distance to the nearest of adapter, base and older version is taken for the noise:
    if the nearest is not the adapter, and is further from it than three times that, the weights are wrong (False); if it is closer, nothing
    is proven (None: watch `mismatch`)."""
    def clean(rows):
        return [{int(token): max(value, MINUS_INFINITY) for token, value in row.items()} for row in rows]
    said = (("the adapter", canary["adapter"]), ("the base", canary["base"]), ("an older version", older))
    known, got = {what: clean(rows) for what, rows in said if rows and len(rows) == len(got)}, clean(got)
    if "the adapter" not in known:
        return False, f"expected {len(canary['adapter'])} canary answers, got {len(got)}"
    adapter, away = known["the adapter"], {what: distance(rows, got) for what, rows in known.items()}
    nearest = min(away, key=away.get)
    gaps = [(abs(row[token] - other[token]), prompt, token) for prompt, (row, other) in enumerate(zip(adapter, got)) for token in row.keys() & other.keys()]
    worst, prompt, token = max(gaps, default=(math.inf, 0, -1))
    why = (f"prompt {prompt} token {token}: expected {adapter[prompt][token]:.4f}, got {got[prompt][token]:.4f}" if gaps else "no token in common") + \
        f"; nearest is {nearest}, {away[nearest]:.2g} nats away"
    if "float32" in canary.get("dtype", "float32"):
        return worst <= FP32_TOLERANCE and away["the adapter"] < math.inf, why
    if not away["the adapter"] <= GARBLED:
        return False, why
    noise = 3 * max(away[nearest], BF16_FLOOR)
    is_apart = [distance(adapter, rows) > noise for what, rows in known.items() if what != "the adapter" and nearest in (what, "the adapter")]
    return (all(is_apart) or None) if nearest == "the adapter" else (False if is_apart[0] else None), why

class Chooser:
    """Chained block hashes -> replicas. O(prompt length) per request; remembers the MAX_BLOCKS blocks used last. A block is common, and says
    nothing, when every candidate owns it or two different blocks have followed it."""
    MANY = -1                                            # followed by several; hash() is never -1

    def __init__(self, max_blocks: int = MAX_BLOCKS):
        self.max_blocks, self.last, self.counts = max_blocks, "", Counter()
        self.blocks: OrderedDict[int, list] = OrderedDict()   # hash: [owners, hash that followed]

    def choose(self, name: str, prompt: list[int] | str, loads: dict[str, int]) -> str:
        """One of `loads` (replica: rollouts in flight) for this prompt under this adapter."""
        step, chain, owners = BLOCK_TOKENS if isinstance(prompt, list) else 4 * BLOCK_TOKENS, [hash(name)], ()   # text: 4 characters a token
        for at in range(0, len(prompt), step):
            chain.append(hash((chain[-1], *prompt[at:at + step])))
        for block, after in zip(chain[1:], chain[2:] + [None]):
            entry = self.blocks.setdefault(block, [(), after])
            self.blocks.move_to_end(block)
            if after is not None and entry[1] != after:
                entry[1] = after if entry[1] is None else self.MANY
            here = [owner for owner in entry[0] if owner in loads]
            if here and len(here) < len(loads) and entry[1] != self.MANY:
                owners = here
        least = min(loads.values())
        chosen = min(owners, key=loads.get, default=None)
        kind = "cold" if chosen is None else "affinity" if loads[chosen] - least <= AHEAD_ROLLOUTS else "spill"
        if kind != "affinity":
            ties = sorted(url for url, load in loads.items() if load == least)
            chosen = self.last = next((url for url in ties if url > self.last), ties[0])
        self.counts[kind] += 1
        for block in chain[1:]:
            owned = self.blocks[block][0]
            self.blocks[block][0] = owned if chosen in owned else (*owned[-31:], chosen)
        while len(self.blocks) > self.max_blocks:
            self.blocks.popitem(last=False)
        return chosen

# ---- Members of the bucket ------------------------------------------------------------------------------------------------------------

class Member(threading.Thread):
    """This process's heartbeat: `members/<role>-<id>.json`, rewritten every second, its counter one higher. Outlives a failing bucket."""
    def __init__(self, bucket, role: str, url: str = "", run_id: str = "", id: str = "", doing: str = "starting", beat_s: float = BEAT_S):
        super().__init__(daemon=True)
        self.bucket, self.beat_s, self.finished = bucket, beat_s, threading.Event()
        self.record = {"format": "async-grpo-member", "version": 1, "role": role, "id": id or secrets.token_hex(4), "url": url, "counter": 0,
                       "run_id": run_id, "doing": doing, "pid": os.getpid(), "host": socket.gethostname()}
        self.key = f"members/{role}-{self.record['id']}.json"

    def update(self, **fields) -> None:
        """New values (`doing`, `url`, …) for the next beat."""
        self.record = {**self.record, **fields}

    def run(self) -> None:
        counter = 0
        while not self.finished.is_set():
            counter += 1
            self.beat(self.bucket.put, json.dumps({**self.record, "counter": counter}, sort_keys=True).encode() + b"\n")
            self.finished.wait(self.beat_s)
        self.beat(self.bucket.delete)

    def beat(self, call, *data) -> None:
        try:
            call(self.key, *data)
        except (BucketError, OSError) as error:
            log.warning("heartbeat %s: %s (going on)", self.key, error)

    def stop(self) -> None:
        """Ends the heartbeat and removes the file; waits at most a second for a slow bucket."""
        self.finished.set()
        if self.is_alive():
            self.join(1.0)

class LiveMembers:
    """Who is alive by this reader's own clock: dead is whose counter has not moved for `dead_s`. No two clocks are compared."""
    def __init__(self, bucket, role: str = "", dead_s: float = DEAD_S, clock=time.monotonic):
        self.bucket, self.role, self.dead_s, self.clock = bucket, role, dead_s, clock
        self.seen: dict[str, tuple[int, float, dict]] = {}   # key: counter, when it moved, record
        self.read_at = -math.inf

    def poll(self, max_age_s: float = 0.0) -> dict[str, dict]:
        """The live records by id; read anew unless that was done within `max_age_s`. BucketError if the bucket cannot be read."""
        now, seen = self.clock(), {}
        is_fresh = now - self.read_at < max_age_s
        for key in () if is_fresh else self.bucket.list(f"members/{self.role}-" if self.role else "members/"):
            try:
                record = json.loads(self.bucket.get(key))
                counter, moved, _ = self.seen.get(key, (None, now, None))
                seen[key] = (record["counter"], moved if counter == record["counter"] else now, {**record, "id": str(record["id"]), "url": str(record["url"])})
            except NotFound:                             # it left between the two calls
                continue
            except (ValueError, TypeError, LookupError) as error:
                log.warning("%s is no member record (%s): ignored", key, type(error).__name__)
        if not is_fresh:
            self.seen, self.read_at = seen, now
        return {record["id"]: record for _, moved, record in self.seen.values() if now - moved < self.dead_s}

    def missing(self) -> dict[str, float]:
        """Who died without a goodbye: id -> seconds since the counter moved."""
        return {record["id"]: self.clock() - moved for _, moved, record in self.seen.values() if self.clock() - moved >= self.dead_s}

# ---- The router -----------------------------------------------------------------------------------------------------------------------

@dataclass
class Adapter:
    """What every replica must serve: published in the bucket under `key`, with a canary; or loaded by a client from `path`."""
    name: str
    key: str = ""
    path: str = ""
    mark: str = ""                                       # fingerprint of the files at `path`
    canary: dict | None = None

@dataclass
class Replica:
    """What the router knows of one replica."""
    url: str
    pool: Pool
    is_member: bool                                      # it reads the bucket itself; others are given paths
    state: str = "joining"
    in_flight: int = 0                                   # rollouts (n of each request)
    served: set = field(default_factory=set)             # adapter names in its /v1/models
    proven: set = field(default_factory=set)             # those that may be asked for
    holds: dict = field(default_factory=dict)            # name: mark, as loaded for a client
    tries: Counter = field(default_factory=Counter)      # name: failed loads
    due: dict = field(default_factory=dict)              # name: loop time of the next try
    base: tuple = ("", None)                             # model id, max_model_len
    config: dict = field(default_factory=dict)           # vllm_config in its /server_info
    fails: int = 0                                       # of health, in a row
    last_error: str = ""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: dict = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        return self.state in ("loading", "ready")

class Router:
    """Keeps the fleet right, and forwards completions. `wanted`: what every replica must hold, the bucket's newest version first."""
    def __init__(self, bucket=None, replicas=(), replica_token: str = "", adapter_dir: str = "", request_limit_s: float = 600.0, load_tries: int = LOAD_TRIES):
        self.bucket, self.token, self.request_limit_s, self.load_tries = bucket, replica_token, request_limit_s, load_tries
        self.roots = [os.path.abspath(root) for root in (adapter_dir, getattr(bucket, "root", None)) if root]
        self.wanted: dict[str, Adapter] = {}
        self.replicas: dict[str, Replica] = {}
        self.chooser, self.counts, self.lock, self.changed, self.is_on_hold = Chooser(), Counter(), asyncio.Lock(), asyncio.Event(), False
        for url in replicas:
            self.add(url, is_member=False)

    # The fleet.

    def add(self, url: str, is_member: bool) -> None:
        replica = self.replicas[url] = Replica(url, Pool(url, self.token), is_member)
        replica.tasks["watch"] = asyncio.ensure_future(self.watch(replica))

    def news(self, published: list[Adapter], urls: set[str]) -> None:
        """From the bucket: the versions to serve, newest first, and the samplers alive."""
        before, loaded = self.wanted.keys(), {name: adapter for name, adapter in self.wanted.items() if not adapter.key}
        self.wanted = {adapter.name: adapter for adapter in published} | loaded
        for url in urls - self.replicas.keys():
            try:
                self.add(url, is_member=True)
            except ValueError as error:
                log.warning("member ignored: %s", error)
        for replica in list(self.replicas.values()):
            replica.is_member |= replica.url in urls
            if self.wanted.keys() != before:
                replica.wake.set()
            # A heartbeat may stop because the member cannot reach the bucket: while its HTTP works it stays.
            if replica.is_member and replica.url not in urls and not replica.is_live:
                log.info("replica %s left", replica.url)
                del self.replicas[replica.url]
                for task in replica.tasks.values():
                    task.cancel()
                replica.pool.close()

    def move(self, replica: Replica, state: str, why: str = "") -> None:
        """To another state; all who wait for a replica look again."""
        if state in ("joining", "out"):
            replica.last_error = why
            for marks in (replica.proven, replica.holds, replica.tries, replica.due):
                marks.clear()
        if state != replica.state:
            log.info("replica %s: %s -> %s %s", replica.url, replica.state, state, why)
        replica.state = state
        self.announce()

    def announce(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def suspect(self, replica: Replica, why: str) -> None:
        """It may be a new process: no traffic until it is checked, which is now."""
        if replica.is_live:
            self.move(replica, "joining", why)
            replica.wake.set()

    async def watch(self, replica: Replica) -> None:
        while True:
            try:
                await self.check(replica)
                replica.fails = 0
            except (OSError, ApiError) as error:
                replica.fails += 1
                # A refused connection is certain; a time-out may be one busy moment.
                if replica.fails >= POLL_FAILS or not isinstance(error, TimeoutError):
                    self.move(replica, "out", f"{type(error).__name__}: {error}")
                    replica.pool.close()                 # its requests go elsewhere now
            except Exception:
                log.exception("watching %s failed", replica.url)
            replica.wake.clear()
            try:
                async with asyncio.timeout(POLL_S):
                    await replica.wake.wait()
            except TimeoutError:
                pass

    async def call(self, replica: Replica, method: str, path: str, body=None, limit_s: float = 0.0, is_strict: bool = True) -> dict:
        """A control call; its JSON object ({} if it is none). ApiError for any status but 200, with what the replica said."""
        reply = await replica.pool.request(method, path, b"" if body is None else json.dumps(body).encode(), limit_s)
        if reply.status != 200 and is_strict:
            raise ApiError(reply.status, f"{path}: {reply.status} {reply.body[:300].decode(errors='replace')}")
        try:
            value = json.loads(reply.body)
        except ValueError:
            value = {}
        return value if isinstance(value, dict) and reply.status == 200 else {}

    async def check(self, replica: Replica) -> None:
        """Health and models; notices a restart; greets; starts to load what is missing."""
        before = set(replica.proven)                     # what is proven meanwhile may be too new for the list
        await self.call(replica, "GET", "/health")
        try:
            cards = (await self.call(replica, "GET", "/v1/models"))["data"]
            replica.served = {str(card["id"]) for card in cards if card.get("parent")} - {ALIAS}
            replica.base = (str(cards[0]["id"]), cards[0].get("max_model_len"))
        except (LookupError, TypeError, AttributeError):
            raise ApiError(502, "/v1/models is no list of models") from None
        lost = before & replica.proven - replica.served
        if lost:                                         # it is a new process
            self.move(replica, "joining", f"it lost {', '.join(sorted(lost))}")
        if not replica.is_live:
            replica.config = (await self.call(replica, "GET", "/server_info?config_format=json", is_strict=False)).get("vllm_config") or {}
            # A client or a router killed inside a pause left it so.
            if not self.is_on_hold and (await self.call(replica, "GET", "/is_paused", is_strict=False)).get("is_paused"):
                await self.call(replica, "POST", "/resume")
            self.move(replica, "loading")
        foreign = {name for name in replica.served - self.wanted.keys() if not (self.bucket and VERSION.fullmatch(name))}
        replica.proven |= foreign                        # somebody else's adapters: nothing to check them against
        stale = replica.served - self.wanted.keys() - foreign if self.wanted else set()
        now, filling = asyncio.get_running_loop().time(), replica.tasks.get("fill")
        missing = [adapter for adapter in self.wanted_here(replica) if adapter.name not in replica.proven and replica.due.get(adapter.name, 0) <= now]
        if (stale or missing) and (not filling or filling.done()):
            replica.tasks["fill"] = asyncio.ensure_future(self.fill(replica, stale, missing))
        self.settle(replica)

    def wanted_here(self, replica: Replica) -> list[Adapter]:
        versions = [adapter for adapter in self.wanted.values() if adapter.key]
        return versions[:(replica.config.get("lora_config") or {}).get("max_loras")] + [adapter for adapter in self.wanted.values() if not adapter.key]

    def settle(self, replica: Replica) -> None:
        """loading -> ready, once all that is wanted is proven, or the rest has failed for long."""
        wanted = [adapter.name for adapter in self.wanted_here(replica)]
        is_done = all(name in replica.proven or replica.tries[name] >= self.load_tries for name in wanted)
        if replica.state == "loading" and is_done and not self.is_on_hold and (replica.proven or not wanted and not self.bucket):
            self.move(replica, "ready")
        self.announce()

    async def fill(self, replica: Replica, stale: set[str], missing: list[Adapter]) -> None:
        """Unloads what nobody may want any more; loads and proves what is missing."""
        try:
            for name in stale:
                await self.drop(replica, name)
            for adapter in missing:
                if self.wanted.get(adapter.name) is not adapter:
                    continue                             # overtaken while others loaded
                try:
                    await self.bring(replica, adapter)
                    log.debug("replica %s serves %s", replica.url, adapter.name)
                except ApiError as error:
                    # 404 and 5xx pass where a mount lags behind the writer; other refusals do not.
                    replica.tries[adapter.name] += 1 if error.status in (404, 429) or error.status >= 500 else self.load_tries
                    replica.due[adapter.name] = asyncio.get_running_loop().time() + min(MAX_BACKOFF_S, 0.25 * 2**replica.tries[adapter.name])
                    replica.last_error = f"{adapter.name}: {error.message}"
                    log.warning("replica %s does not serve %s", replica.url, replica.last_error)
                self.settle(replica)
        except OSError as error:
            self.suspect(replica, f"{type(error).__name__}: {error}")

    async def drop(self, replica: Replica, name: str) -> None:
        for marks in (replica.proven, replica.served):
            marks.discard(name)
        replica.holds.pop(name, None)
        await self.call(replica, "POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_S, is_strict=False)

    async def bring(self, replica: Replica, adapter: Adapter) -> None:
        """Loads and proves one adapter. What is there already must pass the canary; without one, it must be what we loaded ourselves."""
        if adapter.name not in replica.served or not adapter.canary and replica.holds.get(adapter.name) != (adapter.mark or None):
            path = adapter.path or (adapter.key if replica.is_member or not self.roots else os.path.join(self.roots[0], adapter.key))
            try:
                await self.call(replica, "POST", "/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": path}, LOAD_S)
            except ApiError as error:
                if not adapter.canary or "already been loaded" not in error.message:
                    raise
            replica.served.add(adapter.name)
            replica.holds[adapter.name] = adapter.mark
        while self.is_on_hold and adapter.canary:        # a paused replica would not answer
            await self.changed.wait()
        is_right, why = await self.prove(replica, adapter) if adapter.canary else (True, "")
        if is_right is False:
            await self.drop(replica, adapter.name)
            raise ApiError(502, f"the canary refused it: {why}")
        if is_right is None:
            log.warning("replica %s: %s is unproven, watch `mismatch`: %s", replica.url, adapter.name, why)
        if self.wanted.get(adapter.name) is adapter:
            replica.tries.pop(adapter.name, None)
            replica.proven.add(adapter.name)

    async def prove(self, replica: Replica, adapter: Adapter) -> tuple[bool | None, str]:
        async def ask(prompt):
            body = {"model": adapter.name, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "logprobs": 20, "seed": 0, "return_tokens_as_token_ids": True}
            reply = await self.call(replica, "POST", "/v1/completions", body, CANARY_S)
            return {int(token.removeprefix("token_id:")): value for token, value in reply["choices"][0]["logprobs"]["top_logprobs"][0].items()}
        try:
            canary, dtype = adapter.canary, str((replica.config.get("model_config") or {}).get("dtype") or "float32")
            older = [other.canary["adapter"] for other in self.wanted.values()
                     if other.canary and other.canary["prompts"] == canary["prompts"] and newest([other.name, adapter.name]) != other.name]
            got = await asyncio.gather(*map(ask, canary["prompts"]))
            return canary_verdict(canary if "float32" in dtype else {**canary, "dtype": dtype}, got, older[0] if older else None)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return False, f"its answer cannot be read ({type(error).__name__}: {error})"

    # Completions.

    def ready(self, name: str | None = None) -> list[Replica]:
        """Replicas that may be asked for an adapter, or for the base (None)."""
        return [replica for replica in self.replicas.values() if replica.state == "ready" and (name is None or name in replica.proven)]

    def live(self) -> list[str]:
        return sorted({name for replica in self.ready() for name in replica.proven})

    async def until(self, find, limit_s: float = 0.0):
        """What `find()` returns once it is not empty; 503 after the limit (READY_WAIT_S)."""
        try:
            async with asyncio.timeout(limit_s or READY_WAIT_S):
                while not (found := find()):
                    await self.changed.wait()
                return found
        except TimeoutError:
            states = ", ".join(f"{replica.url} is {replica.state}" for replica in self.replicas.values()) or "no replica is known"
            raise ApiError(503, f"not ready yet: {states}", **{"Retry-After": "1"}) from None

    async def completions(self, request: Request) -> Reply:
        """Forwards to the chosen replica. After a connection error, 429, 5xx, or a version it forgot, to another one."""
        body, data, tried = request.json(), request.body, set()
        model, n, prompt = model_of(body), body.get("n"), body.get("prompt")
        prompt = prompt if is_token_list(prompt) else json.dumps(prompt or body.get("messages"))
        rollouts, name = n if type(n) is int and 0 < n <= 1024 else 1, model
        if model == ALIAS and (self.bucket or newest(self.live())):
            name = await self.until(lambda: newest(self.live()))
            data = json.dumps({**body, "model": name}).encode()
        for attempt in range(TRIES):
            def candidates():
                is_base = name in (replica.base[0] for replica in self.replicas.values())
                if not is_base and name not in self.wanted and not any(name in replica.proven for replica in self.replicas.values()):
                    raise unknown(name, self.live())
                return [replica for replica in self.ready() if name == replica.base[0]] if is_base else self.ready(name)
            found = await self.until(candidates)
            loads = {replica.url: replica.in_flight for replica in found if replica.url not in tried} or {replica.url: replica.in_flight for replica in found}
            url = min(loads, key=loads.get) if attempt else self.chooser.choose(name, prompt, loads)
            replica, reply = self.replicas[url], None
            tried.add(url)
            replica.in_flight += rollouts
            try:
                reply = await replica.pool.request("POST", request.path, data, self.request_limit_s)
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
            if reply and reply.status == 404 and name in replica.proven:
                self.suspect(replica, replica.last_error)
            if len(tried) >= len(found):
                await asyncio.sleep(0.1 * 2**attempt)
        self.counts["failed"] += 1
        raise ApiError(429 if reply and reply.status == 429 else 502, f"{TRIES} tries failed, the last at {url}: {replica.last_error}", **{"Retry-After": "1"})

    # The API's other routes.

    async def load_lora_adapter(self, request: Request) -> Reply:
        name, path = adapter_of(request)
        if self.bucket and VERSION.fullmatch(name):
            raise ApiError(400, f"`{name}` is a version of the bucket: publish it there")
        # Shielded: a client that leaves must not leave half of the replicas loaded.
        return await asyncio.shield(asyncio.ensure_future(self.load(name, folder_inside(path, self.roots))))

    async def load(self, name: str, path: str) -> Reply:
        """Wants it everywhere and waits for every live replica; a lasting refusal takes it back. (vLLM's 404 would end a TRL run: 504.)"""
        async with self.lock:
            await self.until(lambda: any(replica.is_live for replica in self.replicas.values()))
            adapter, known = Adapter(name, path=path, mark=await in_thread(fingerprint, path)), self.wanted.get(name)
            if not known or not adapter.mark or known.mark != adapter.mark:
                self.wanted[name] = adapter
                for replica in self.replicas.values():
                    replica.proven.discard(name)
            for replica in self.replicas.values():
                replica.tries.pop(name, None)
                replica.due.pop(name, None)
                replica.wake.set()
            def settled():
                live = [replica for replica in self.replicas.values() if replica.is_live]
                return live if all(name in replica.proven or replica.tries[name] >= self.load_tries for replica in live) else []
            try:
                refused = "; ".join(f"{replica.url}: {replica.last_error}" for replica in await self.until(settled, LOAD_S) if name not in replica.proven)
            except ApiError as error:
                refused = error.message
            if refused:
                self.wanted.pop(name, None)
                await self.unload(name)
                raise ApiError(504, f"`{name}` is not loaded, and was unloaded where it had been: {refused}")
        return to_json(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, name: str) -> None:
        """From here on nothing is routed to the name; a replica that fails to unload it only keeps a slot filled."""
        holders = [replica for replica in self.replicas.values() if name in replica.served]
        for replica, result in zip(holders, await asyncio.gather(*(self.drop(replica, name) for replica in holders), return_exceptions=True)):
            if isinstance(result, Exception):
                self.suspect(replica, f"unloading {name}: {result}")

    async def unload_lora_adapter(self, request: Request) -> Reply:
        name, _ = adapter_of(request)
        if self.bucket and VERSION.fullmatch(name) or name not in self.wanted and not any(name in replica.served for replica in self.replicas.values()):
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        async with self.lock:
            self.wanted.pop(name, None)
            await self.unload(name)
        return to_json(f"Success: LoRA adapter '{name}' removed successfully.")

    async def everywhere(self, path: str) -> str:
        """POST to all live replicas at once; why some refused. One whose connection fails is suspect instead."""
        live = [replica for replica in self.replicas.values() if replica.is_live]
        results = await asyncio.gather(*(self.call(replica, "POST", path, limit_s=LOAD_S) for replica in live), return_exceptions=True)
        for replica, result in zip(live, results):
            if isinstance(result, OSError):
                self.suspect(replica, f"{path}: {result}")
        return "; ".join(f"{replica.url}: {result}" for replica, result in zip(live, results) if isinstance(result, ApiError))

    async def pause(self, request: Request) -> Reply:
        mode, self.is_on_hold = pause_mode(request), True
        if refused := await self.everywhere(f"/pause?mode={mode}"):
            await self.resume(None)
            raise ApiError(504, f"not paused, and resumed where it was: {refused}")
        return to_json({"status": "paused"})

    async def resume(self, request: Request | None) -> Reply:
        self.is_on_hold = False
        self.announce()
        if (refused := await self.everywhere("/resume")) and request:
            raise ApiError(504, f"not resumed: {refused}")
        return to_json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Reply:
        return to_json({"is_paused": self.is_on_hold})

    async def health(self, request: Request) -> Reply:
        if not self.ready():
            raise ApiError(503, "no replica is ready", **{"Retry-After": "1"})
        return Reply(b"")

    async def models(self, request: Request) -> Reply:
        ready = await self.until(self.ready)
        lengths = [replica.base[1] for replica in ready if replica.base[1]]
        known = {name: self.wanted.get(name, Adapter(name)) for name in self.live()}
        return model_list(ready[0].base[0], min(lengths, default=None), {name: adapter.path or adapter.key or name for name, adapter in known.items()})

    async def server_info(self, request: Request) -> Reply:
        """Of the replica with the fewest adapter slots: what a client may count on everywhere."""
        configs = [replica.config for replica in await self.until(self.ready)]
        return to_json({"vllm_config": min(configs, key=lambda config: (config.get("lora_config") or {}).get("max_loras") or math.inf)})

    def rows(self) -> list[tuple]:
        rows = [("newest ready", {}, newest(self.live())), ("paused", {}, self.is_on_hold)]
        rows += [("grpo:router_choices_total", {"kind": kind}, self.chooser.counts[kind]) for kind in ("affinity", "spill", "cold")]
        rows += [(f"grpo:router_{kind}_total", {}, self.counts[kind]) for kind in ("forwarded", "retried", "failed")]
        for replica in self.replicas.values():
            label = {"replica": replica.url}
            rows += [("state", label, replica.state), ("grpo:router_ready", label, int(replica.state == "ready")), ("vllm:num_requests_running", label, replica.in_flight),
                     ("adapters", label, ", ".join(sorted(replica.proven))), ("last error", label, replica.last_error)]
            rows += [("grpo:router_serves", {**label, "version": name}, 1) for name in sorted(replica.proven)]
        return rows

def published(key: str, manifest: bytes) -> Adapter:
    """The version that a manifest announces; without a name, and reported, if it cannot be read."""
    try:
        said = json.loads(manifest)
        return Adapter(f"policy-v{int(said['policy_version'])}", key.removesuffix("/manifest.json"), canary={what: said["canary"][what] for what in ("prompts", "dtype", "adapter", "base")})
    except (ValueError, LookupError, TypeError) as error:
        log.warning("%s is set aside: %s: %s", key, type(error).__name__, error)
        return Adapter("")

def follow(bucket, router: Router, live: int, loop, url: str, finished: threading.Event) -> None:
    """Thread: tells the router again and again what is published and which samplers live. Outlives a failing bucket."""
    members, member, adapters, said = LiveMembers(bucket, "sampler"), None, {}, ""
    while not finished.is_set():
        trouble = ""
        try:
            if not member and "run.json" in bucket.list("run.json"):
                run = json.loads(bucket.get("run.json"))
                live = live or int(run["max_staleness"]) + 2
                member = Member(bucket, "proxy", url, str(run.get("run_id", "")), doing="routing")
                member.start()
            if member:
                # Found by listing, a manifest being written last; read once each.
                keys = sorted(key for key in bucket.list("adapters/") if key.endswith("/manifest.json"))[:-live - 1:-1]
                adapters = {key: adapters.get(key) or published(key, bucket.get(key)) for key in keys}
                loop.call_soon_threadsafe(router.news, [adapter for adapter in adapters.values() if adapter.name],
                                          {record["url"] for record in members.poll(max_age_s=POLL_S).values() if record["url"]})
            else:
                trouble = f"waiting for run.json in {bucket.address}"
        except (BucketError, OSError, ValueError, LookupError, TypeError) as error:
            trouble = f"bucket: {type(error).__name__}: {error} (going on)"
        if trouble and trouble != said:
            log.warning("%s", trouble)
        said = trouble
        finished.wait(POLL_S if bucket.root is None else POLL_S / 5)   # a listing costs nothing in a folder
    if member:
        member.stop()

# ---- Running --------------------------------------------------------------------------------------------------------------------------

async def run_server(server: Server, listen: str, on_ready, stop: threading.Event | None) -> None:
    """Serves until SIGTERM, Ctrl-C or `stop`."""
    loop, done, most = asyncio.get_running_loop(), asyncio.Event(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))   # a completion in flight takes two connections
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, done.set)
    if stop:
        threading.Thread(target=lambda: stop.wait() and loop.call_soon_threadsafe(done.set), daemon=True).start()
    on_ready(await server.start(listen))
    await done.wait()
    await server.stop()

def serve_replica(engine, listen: str, token: str = "", on_ready=print, roots=(), pause_limit_s: float = 60.0, stop: threading.Event | None = None) -> None:
    """Blocking: the API over one engine. `roots`: folders that a lora_path may be in."""
    async def serve():
        await run_server(Server(ReplicaServer(engine, roots), token, pause_limit_s), listen, on_ready, stop)
    asyncio.run(serve())

def serve_router(bucket, replicas, listen: str, token: str = "", replica_token: str = "", adapter_dir: str = "", live: int = 0, pause_limit_s: float = 60.0,
                 request_limit_s: float = 600.0, on_ready=print, stop: threading.Event | None = None, load_tries: int = LOAD_TRIES) -> None:
    """Blocking: the router over these replicas and the bucket's samplers. `live`: versions served at once (0: max_staleness + 2)."""
    finished, threads = threading.Event(), []
    async def serve():
        router, loop = Router(bucket, replicas, replica_token or token, adapter_dir, request_limit_s, load_tries), asyncio.get_running_loop()
        def ready(url):
            on_ready(url)
            if bucket:
                threads.append(threading.Thread(target=follow, args=(bucket, router, live, loop, url, finished), daemon=True))
                threads[0].start()
        await run_server(Server(router, token, pause_limit_s), listen, ready, stop)
        finished.set()
        for thread in threads:
            thread.join(1.0)
    asyncio.run(serve())

def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="proxy.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--bucket", default="", help="the run's folder, s3://bucket/prefix or URL (none: a client loads the adapters)")
    parser.add_argument("--replica", action="append", default=[], metavar="URL", dest="replicas", help="a vLLM or sampler to route to (repeatable)")
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="port 0: any free one")
    parser.add_argument("--token", default=os.environ.get("GRPO_TOKEN", ""), help="bearer token clients must send (default: GRPO_TOKEN; none: loopback only)")
    parser.add_argument("--replica-token", default="", help="bearer token sent to the replicas (default: --token)")
    parser.add_argument("--adapter-dir", default="", metavar="DIR", help="where the --replica servers see the bucket's objects (default: the file bucket itself)")
    parser.add_argument("--live", type=int, default=0, help="versions served at once (0: max_staleness + 2)")
    parser.add_argument("--pause-limit-s", type=float, default=60.0, help="seconds after which a pause ends by itself (0: never)")
    parser.add_argument("--request-limit-s", type=float, default=600.0, help="seconds a completion may take")
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
            Pool(url)
    except (ValueError, BucketError) as error:
        print(f"proxy.py: {error}", file=sys.stderr)
        return 2
    try:
        serve_router(**{**vars(args), "bucket": bucket}, on_ready=lambda url: print(f"ready role=proxy url={url}", flush=True))
    except OSError as error:
        print(f"proxy.py: cannot serve on {args.listen}: {error}", file=sys.stderr)
        return 1
    return 0

if __name__ == "__main__":
    sys.exit(main())
