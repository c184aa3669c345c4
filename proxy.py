"""HTTP: one vLLM-shaped API, spoken by a single replica (over an engine) and by a router over many replicas.

    python proxy.py --bucket runs/demo                                   # replicas come from members/ of the bucket
    python proxy.py --bucket s3://b/run --adapter-dir /mnt/run --replica http://10.0.0.5:8000 --listen 0.0.0.0:8000 --token T
    python proxy.py --replica http://gpu1:8000 --adapter-dir /shared     # no bucket: clients load adapters themselves

Policy version N is the adapter `policy-vN`; the alias `policy` is the newest one that is ready. The router reads the
published adapters from the bucket, has every replica load the newest few, and compares each one's answer to the canary
(top-20 logprobs after 8 prompts, stored at publish) before a request goes there. A replica is

    joining -> loading -> ready -> out        (out: health fails; back through loading, with every version checked again)

Requests of one prompt go to one replica, whose prefix cache is warm: the prompt's 16-token blocks are hashed in a chain
seeded with the adapter's name, and the replica that saw the deepest known block is chosen unless it is far busier.

Guarantees
 1. A request that names a version is answered under that version or not at all; never by the base or another one.
 2. Only a (replica, version) that holds the adapter and passed the canary gets requests; a connection error clears the marks.
 3. One slow or dead replica delays nobody: each has its own task, and its requests are retried elsewhere (bounded).
 4. A load through the API is served by all live replicas or by none. A forgotten pause ends by itself.
 5. A client that leaves cancels its work, down to the engine. In-flight counts return to 0 on every path.
 6. Every head, body, wait and retry has a limit; a client's bad input is a 4xx; the token is in no log and no error.

Status codes: 400 bad input, 401 token, 404 unknown route or version (naming the live ones), 405, 408 too slow, 411 chunked
request, 413 body, 431 head, 502 replica refused us, 503 not ready yet (Retry-After), 504 broadcast rolled back or time-out.

Does not: stream tokens, pipeline, speak HTTP/2 or TLS as a server (put a TLS terminator in front), keep state on disk.
Whoever can write to the bucket is trusted with the policy; the canary is against faults, not against an attacker.

[1] vLLM's OpenAI-compatible server and runtime LoRA API: docs.vllm.ai   [2] RFC 9112 (HTTP/1.1)
"""

import argparse
import asyncio
import concurrent.futures
import hashlib
import hmac
import html
import ipaddress
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

from bucket import BucketError, NotFound, open_bucket

log = logging.getLogger("proxy")

# ------------------------------------------------------------------------------------------------ limits and names

MAX_HEAD_BYTES = 32 << 10            # of a request or reply; more is 431
MAX_BODY_BYTES = 8 << 20             # of a request; a million token ids are about 7 MB
MAX_REPLY_BYTES = 256 << 20          # of a replica's reply
READ_AHEAD_BYTES = 1 << 20           # unread bytes after which a connection stops reading
MAX_CONNECTIONS = 8192               # clients; more are closed at once
IDLE_S, HEAD_S, BODY_S, WRITE_S, LINGER_S = 75.0, 10.0, 30.0, 60.0, 2.0   # of one client connection
POLL_S, POLL_LIMIT_S, POLL_FAILS = 1.0, 5.0, 3   # a replica's health: how often, how long, time-outs until it is out
LOAD_S, CANARY_S, CONNECT_S = 300.0, 60.0, 5.0   # limits of one call to a replica
TRIES = 4                            # of one completion, over all replicas
SETTLE_TRIES = 5                     # failed loads (15 s of back-off) after which a starting replica serves what it has
AHEAD_ROLLOUTS = 8                   # a warm prefix is worth this much more load
BLOCK_TOKENS, MAX_BLOCKS = 16, 100_000           # chooser: block size; remembered blocks (about 30 MB)
VERSION_WAIT_S = 10.0                # how long a request waits for a published version to be ready
DEAD_S, BEAT_S = 15.0, 1.0           # members: unmoved counter = dead; rewritten every
FP32_TOLERANCE, BF16_FLOOR, GARBLED = 1e-3, 0.01, 0.5   # canary: nats
MINUS_INFINITY = -9999.0             # vLLM's JSON for log 0
ALIAS, VERSION = "policy", re.compile(r"policy-v(\d{1,12})")
ADAPTER_KEY = re.compile(r"adapters/v(\d{6,12})")
# Parameters that would change the distribution sampled from, or the reply's form: only these values are accepted.
NEUTRAL = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
           "logit_bias": ({},), "stop": ([], ""), "echo": (False,), "suffix": ("",), "best_of": (1,), "min_tokens": (0,), "ignore_eos": (False,),
           "use_beam_search": (False,), "response_format": ({"type": "text"},), "tools": ([],), "prompt_logprobs": ()}


class ApiError(Exception):
    """Becomes the HTTP reply of that status, in vLLM's error JSON."""

    def __init__(self, status: int, message: str, **headers: str):
        super().__init__(message)
        self.status, self.message, self.headers = int(status), message, headers

    def reply(self) -> "Reply":
        kind = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}.get(self.status, HTTPStatus(self.status).phrase)
        error = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return json_reply({"error": error}, self.status, **self.headers)


class LoadError(ApiError):
    """Raised by an engine whose load failed: status 404 (not there), 400 (wrong adapter) or 500 (may pass), and why."""


@dataclass
class Reply:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict = field(default_factory=dict)


@dataclass
class Request:
    method: str
    path: str
    query: dict
    headers: dict
    is_last: bool                    # close the connection after the reply
    body: bytes = b""

    def json(self) -> dict:
        """The body as an object; 400 when it is not one."""
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {type(error).__name__}") from None
        if not isinstance(body, dict):
            raise ApiError(400, f"the body must be a JSON object, got {type(body).__name__}")
        return body


def json_reply(value, status: int = 200, **headers: str) -> Reply:
    return Reply(status, json.dumps(value, separators=(",", ":")).encode(), headers=headers)


def text_reply(text: str, content_type: str = "text/plain; charset=utf-8") -> Reply:
    return Reply(200, text.encode(), content_type)


# ------------------------------------------------------------------------------------------------ HTTP/1.1 by hand


class Wire(asyncio.Protocol):
    """One TCP connection, of either side: a buffer, reads with a deadline (loop time), bounded writes, no Nagle.

    Subtle: when the peer leaves, the serving task is cancelled; that is how a client's departure reaches the engine.
    """

    def __init__(self, serve=None):
        self.serve, self.task, self.transport, self.waiter = serve, None, None, None
        self.buffer = bytearray()
        self.is_closed = self.is_discarding = self.is_stuffed = self.has_received = False

    def connection_made(self, transport) -> None:
        self.transport = transport
        # Without it, Nagle's algorithm and delayed acknowledgements cost 44 ms a hop.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.serve:
            self.task = asyncio.ensure_future(self.serve(self))

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        if self.is_discarding:
            return
        self.buffer += data
        if len(self.buffer) > READ_AHEAD_BYTES:
            self.transport.pause_reading()
        self.wake()

    def connection_lost(self, error) -> None:
        self.is_closed = True
        self.wake()
        if self.task:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.is_stuffed = True

    def resume_writing(self) -> None:
        self.is_stuffed = False
        self.wake()

    def wake(self, error: Exception | None = None) -> None:
        if self.waiter and not self.waiter.done():
            self.waiter.set_exception(error) if error else self.waiter.set_result(None)

    async def wait(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        self.waiter = loop.create_future()
        timer = loop.call_at(deadline, self.wake, TimeoutError("the peer was too slow"))
        try:
            await self.waiter
        finally:
            timer.cancel()
            self.waiter = None

    async def more(self, deadline: float) -> None:
        """Waits for bytes. ConnectionError: the peer left; TimeoutError: the deadline passed."""
        if self.is_closed:
            raise ConnectionResetError("the peer closed the connection")
        self.transport.resume_reading()
        await self.wait(deadline)

    async def until(self, end: bytes, deadline: float, limit: int = MAX_HEAD_BYTES) -> bytes:
        while (at := self.buffer.find(end)) < 0 and len(self.buffer) <= limit:
            await self.more(deadline)
        if at < 0 or at > limit:
            raise ApiError(431, f"head over {limit} bytes")
        return self.cut(at + len(end))[:at]

    async def exactly(self, size: int, deadline: float) -> bytes:
        while len(self.buffer) < size:
            await self.more(deadline)
        return self.cut(size)

    def cut(self, size: int) -> bytes:
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    async def send(self, data: bytes, deadline: float) -> None:
        self.transport.write(data)
        while self.is_stuffed and not self.is_closed:
            await self.wait(deadline)


def parse_headers(lines: list[str]) -> dict[str, str]:
    """Lower-case names. 400 on what intermediaries disagree about: folding, bad names, a repeated length."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name) or "\r" in value or "\n" in value or "\0" in value:
            raise ApiError(400, "malformed header line")
        if name in headers and name in ("content-length", "transfer-encoding", "host", "authorization"):
            raise ApiError(400, f"repeated header {name}")
        headers[name] = value.strip(" \t")
    return headers


def content_length(headers: dict[str, str], limit: int) -> int:
    text = headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ApiError(400, "malformed content-length")
    if int(text) > limit:
        raise ApiError(413, f"body of {text} bytes, at most {limit} are accepted")
    return int(text)


class Server:
    """Accepts connections; checks token, route and size of every request before a handler sees it.

    routes: {path: (method, async handler(Request) -> Reply)}; only these exist. `/health` needs no token.
    """

    def __init__(self, routes: dict, token: str = "", head_s: float = HEAD_S, body_s: float = BODY_S):
        self.routes, self.token, self.head_s, self.body_s = routes, token.encode(), head_s, body_s
        self.tasks: set[asyncio.Task] = set()

    async def start(self, listen: str) -> str:
        """Binds, and returns the URL with the real port."""
        host, port = parse_listen(listen, bool(self.token))
        self.server = await asyncio.get_running_loop().create_server(lambda: Wire(self.serve), host, port, backlog=4096)
        port = self.server.sockets[0].getsockname()[1]
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

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
        except OSError:              # the client left, or did not read its reply in time: nobody to tell
            wire.transport.abort()
        finally:
            self.tasks.discard(task)
            wire.transport.close()

    async def answer(self, wire: Wire) -> bool:
        """One request and its reply. False: the connection is done."""
        now = asyncio.get_running_loop().time
        try:
            request = await self.read(wire)
        except ApiError as error:    # refused before its body was read: answer, drop what still comes, close
            await wire.send(render(error.reply(), is_last=True), now() + WRITE_S)
            wire.is_discarding = True
            wire.transport.write_eof()
            wire.transport.resume_reading()
            await wire.wait(now() + LINGER_S)
            return False
        if request is None:
            return False
        try:
            reply = await self.routes[request.path][1](request)
        except ApiError as error:
            reply = error.reply()
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            reply = ApiError(500, "internal error; the server's log says more").reply()
        await wire.send(render(reply, request.is_last), now() + WRITE_S)
        return not request.is_last

    async def read(self, wire: Wire) -> Request | None:
        """The next request, checked; None when the connection ended or idled out. ApiError: the body is unread."""
        now = asyncio.get_running_loop().time
        try:
            if not wire.buffer:
                await wire.more(now() + IDLE_S)
        except OSError:
            return None
        try:
            head = await wire.until(b"\r\n\r\n", now() + self.head_s)
        except TimeoutError:
            raise ApiError(408, f"the head did not arrive within {self.head_s:g} s") from None
        first, *lines = head.decode("latin-1").split("\r\n")
        match = re.fullmatch(r"([A-Z]{1,16}) ([!-~]{1,8192}) HTTP/1\.([01])", first)
        if not match:
            raise ApiError(400, "malformed request line")
        headers = parse_headers(lines)
        path, _, query = match[2].partition("?")
        if path != "/health" and self.token and not hmac.compare_digest(headers.get("authorization", "").encode(), b"Bearer " + self.token):
            raise ApiError(401, "missing or wrong bearer token", **{"WWW-Authenticate": "Bearer"})
        if path not in self.routes:
            raise ApiError(404, "no such route")
        if self.routes[path][0] != match[1]:
            raise ApiError(405, f"use {self.routes[path][0]}", Allow=self.routes[path][0])
        if "transfer-encoding" in headers:
            raise ApiError(400 if "content-length" in headers else 411, "send content-length, not transfer-encoding")
        size = content_length(headers, MAX_BODY_BYTES)
        if headers.get("expect", "").lower() == "100-continue":
            await wire.send(b"HTTP/1.1 100 Continue\r\n\r\n", now() + WRITE_S)
        try:
            body = await wire.exactly(size, now() + self.body_s)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.body_s:g} s") from None
        is_last = match[3] == "0" or headers.get("connection", "").lower() == "close"
        return Request(match[1], path, dict(parse_qsl(query, max_num_fields=32)) if query.count("&") < 32 else {}, headers, is_last, body)


def render(reply: Reply, is_last: bool) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", f"Content-Type: {reply.content_type}",
             f"Content-Length: {len(reply.body)}", "X-Content-Type-Options: nosniff"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in reply.headers.items()]
    lines += ["Connection: close"] if is_last else []
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + reply.body


def parse_listen(listen: str, has_token: bool) -> tuple[str, int]:
    """HOST:PORT, loopback unless there is a token. ValueError says what to do."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--listen wants HOST:PORT, got {listen!r}")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not has_token:
        raise ValueError(f"--listen {listen} is reachable from other machines: set --token or GRPO_TOKEN")
    return host, int(port)


class Pool:
    """HTTP client of one replica: keep-alive connections, last used first. Follows no redirect, so the token stays there."""

    def __init__(self, url: str, token: str = ""):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a replica's URL must be http(s)://HOST[:PORT], got {url!r}")
        self.is_tls = parts.scheme == "https"
        self.host, self.port, self.prefix = parts.hostname, parts.port or (443 if self.is_tls else 80), parts.path.rstrip("/")
        self.lines = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        self.idle: list[Wire] = []
        self.busy: set[Wire] = set()

    async def request(self, method: str, path: str, body: bytes = b"", timeout_s: float = POLL_LIMIT_S) -> Reply:
        """The replica's reply, whatever its status. OSError (TimeoutError among them): none came; the connection is closed."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n{self.lines}Content-Length: {len(body)}\r\n\r\n".encode()
        while True:
            while self.idle and self.idle[-1].is_closed:
                self.idle.pop()
            wire = self.idle.pop() if self.idle else None
            is_reused = wire is not None
            wire = wire or await self.connect(min(timeout_s, CONNECT_S))
            self.busy.add(wire)
            wire.has_received = False
            try:
                await wire.send(head + body, deadline)
                reply, is_last = await read_reply(wire, deadline)
            except BaseException as error:
                wire.transport.abort()
                # Subtle: an idle connection may be closed by the peer just as we reuse it. Nothing was answered: try anew.
                if is_reused and isinstance(error, ConnectionError) and not wire.has_received:
                    continue
                raise
            finally:
                self.busy.discard(wire)
            if is_last:
                wire.transport.close()
            else:
                self.idle.append(wire)
            return reply

    async def connect(self, timeout_s: float) -> Wire:
        loop = asyncio.get_running_loop()
        try:
            return (await asyncio.wait_for(loop.create_connection(Wire, self.host, self.port, ssl=self.is_tls or None), timeout_s))[1]
        except asyncio.TimeoutError:
            raise TimeoutError(f"no connection within {timeout_s:g} s") from None

    def close(self, with_busy: bool) -> None:
        for wire in [*self.idle, *(self.busy if with_busy else ())]:
            wire.transport.abort()
        self.idle.clear()


async def read_reply(wire: Wire, deadline: float) -> tuple[Reply, bool]:
    """A reply with content-length, chunked, or ended by close; and whether the connection is done. OSError if malformed."""
    try:
        status = 100
        while 100 <= status < 200:
            first, *lines = (await wire.until(b"\r\n\r\n", deadline)).decode("latin-1").split("\r\n")
            status = int(first.split(" ")[1])
            headers = parse_headers(lines)
        is_last = headers.get("connection", "").lower() == "close" or first.startswith("HTTP/1.0")
        if status in (204, 304):
            body = b""
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            pieces, size, total = [], 1, 0
            while size:
                size = int((await wire.until(b"\r\n", deadline)).split(b";")[0], 16)
                total += size
                if size < 0 or total > MAX_REPLY_BYTES:
                    raise ConnectionError("reply too large")
                pieces.append(await wire.exactly(size, deadline) if size else b"")
                while await wire.until(b"\r\n", deadline) and not size:
                    pass             # trailers, after the last chunk
            body = b"".join(pieces)
        elif "content-length" in headers:
            body = await wire.exactly(content_length(headers, MAX_REPLY_BYTES), deadline)
        else:
            is_last = True
            while not wire.is_closed and len(wire.buffer) <= MAX_REPLY_BYTES:
                await wire.more(deadline)
            body = wire.cut(len(wire.buffer))
    except (ValueError, IndexError, ApiError) as error:
        raise ConnectionError(f"malformed reply: {error}") from None
    return Reply(status, body, headers.get("content-type", "application/json")), is_last


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


# ------------------------------------------------------------------------------------------------ what requests mean


def take(body: dict, name: str, default, kind: type = int, low: float = 0, high: float = 2**63):
    """A checked number of the request; null means the default."""
    value = body.get(name)
    if value is None:
        return default
    is_right = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    if not is_right or not low <= value <= high:
        raise ApiError(400, f"{name} must be {'a number' if kind is float else 'an integer'} from {low:g} to {high:g}")
    return kind(value)


def check_neutral(body: dict) -> None:
    if body.get("stream") not in (None, False):
        raise ApiError(400, "stream is not supported: rollouts are needed whole; send stream=false")
    for name, allowed in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            raise ApiError(400, f"{name} must be {allowed[0] if allowed else 'left out'}: what is sampled must be what its logprobs say")


def is_token_list(value) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def model_name(body: dict) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model must be given: the name of a live version, or `policy` for the newest")
    return model


def newest(names) -> str | None:
    versions = [int(match[1]) for match in map(VERSION.fullmatch, names) if match]
    return f"policy-v{max(versions)}" if versions else None


def unknown_model(model: str, live) -> ApiError:
    return ApiError(404, f"The model `{model[:200]}` does not exist. Live: {', '.join(sorted(live)) or 'none'}")


def model_list(base: str, max_model_len: int | None, roots: dict[str, str]) -> Reply:
    """vLLM's /v1/models: the base first (clients read its max_model_len), then adapters, then the alias."""
    def card(name, root, parent):
        return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "async-grpo", "root": root, "parent": parent,
                "max_model_len": None if parent else max_model_len, "permission": []}
    cards = [card(base, base, None)] + [card(name, root, base) for name, root in sorted(roots.items())]
    head = newest(roots)
    return json_reply({"object": "list", "data": cards + ([card(ALIAS, head, base)] if head else [])})


def server_info(max_lora_rank: int | None, max_loras: int | None, max_model_len: int | None, dtype: str) -> Reply:
    return json_reply({"vllm_config": {"lora_config": {"max_lora_rank": max_lora_rank, "max_loras": max_loras},
                                       "parallel_config": {"data_parallel_size": 1},
                                       "model_config": {"max_model_len": max_model_len, "dtype": f"torch.{dtype}"}}})


def checked_path(path, roots) -> str:
    """A bucket key `adapters/vNNNNNN`, or the real path of a folder inside an allowed root; else 400."""
    if not isinstance(path, str) or len(path) > 4096:
        raise ApiError(400, "lora_path must be a string")
    if ADAPTER_KEY.fullmatch(path):
        return path
    try:
        real = os.path.realpath(path) if os.path.isabs(path) else ""
        if any(real.startswith(os.path.realpath(root) + os.sep) for root in roots):
            return real
    except ValueError:               # NUL, or characters the file system cannot encode
        pass
    raise ApiError(400, "lora_path must be a bucket key adapters/vNNNNNN, or an absolute path inside --adapter-dir or the bucket's folder")


def fingerprint(path: str) -> str:
    """What makes two loads the same: the key (its object never changes), or the files' hash; "" if they cannot be read here."""
    if ADAPTER_KEY.fullmatch(path):
        return path
    digest = hashlib.sha256()
    try:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            with open(os.path.join(path, name), "rb") as file:
                digest.update(hashlib.sha256(file.read()).digest())
    except OSError:
        return ""
    return digest.hexdigest()


def adapter_request(body: dict, needs_path: bool) -> tuple[str, object]:
    name, path = body.get("lora_name"), body.get("lora_path")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) or name == ALIAS:
        raise ApiError(400, f"lora_name must be 1 to 200 letters, digits, dots, dashes or underscores, and not `{ALIAS}`")
    if needs_path and not path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.")
    return name, path


def metrics_text(rows: list[tuple[str, str, dict, float]]) -> Reply:
    """Prometheus text from (name, type, labels, value)."""
    lines, seen = [], set()
    for name, kind, labels, value in rows:
        if name not in seen:
            lines.append(f"# TYPE {name} {kind}")
            seen.add(name)
        text = ",".join('{}="{}"'.format(k, str(v).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for k, v in labels.items())
        lines.append(f"{name}{{{text}}} {value:g}" if text else f"{name} {value:g}")
    return text_reply("\n".join(lines) + "\n", "text/plain; version=0.0.4; charset=utf-8")


def status_page(title: str, facts: dict, columns: list[str], rows: list[list]) -> Reply:
    def cells(tag, values):
        return "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values)
    text = f"""<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>{html.escape(title)}</title>
<style>body{{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#222}}h1{{font-size:1.2rem}}table{{border-collapse:collapse;margin:1rem 0}}
td,th{{border-bottom:1px solid #ddd;padding:.3rem .8rem;text-align:left;vertical-align:top}}th{{font-weight:600}}td{{max-width:40rem}}</style>
<h1>{html.escape(title)}</h1><table>{"".join("<tr>" + cells("th", [k]) + cells("td", [v]) + "</tr>" for k, v in facts.items())}</table>
<table><tr>{cells("th", columns)}</tr>{"".join("<tr>" + cells("td", row) + "</tr>" for row in rows)}</table>"""
    return text_reply(text, "text/html; charset=utf-8")


class Pause:
    """A pause that ends by itself after `limit_s` (0 = never): a client killed inside one must leave nobody paused."""

    def __init__(self, limit_s: float, resume):
        self.limit_s, self.resume, self.timer = limit_s, resume, None

    def start(self) -> None:
        self.stop()
        if self.limit_s:
            self.timer = asyncio.get_running_loop().call_later(self.limit_s, self.expire)

    def expire(self) -> None:
        log.warning("paused for %g s without a resume: resuming", self.limit_s)
        self.task = asyncio.ensure_future(self.resume(None))

    def stop(self) -> None:
        if self.timer:
            self.timer.cancel()


def pause_mode(request: Request) -> str:
    mode = request.query.get("mode", "abort")
    if mode not in ("keep", "abort", "wait"):
        raise ApiError(400, "mode must be keep, abort or wait")
    return mode


# ------------------------------------------------------------------------------------------------ a single replica


class ReplicaServer:
    """vLLM's API over one engine. The engine (grpo_async's adapter of lora.Sampler, or any object alike) has

    model_id, max_model_len, max_loras, max_lora_rank, dtype, vocab_size
    names() -> [str]; load(name, lora_path) raises LoadError; unload(name)
    submit(prompt_ids, n, max_tokens, temperature, name | None, seed, stop_ids, top_logprobs) -> concurrent Future of completions
        (token_ids, logprobs, finish_reason, top_logprobs); LookupError: unknown name; ValueError: the client's mistake
    cancel(future); encode(text); decode(ids); chat(messages) -> ids; token(id) -> str; pause(mode); resume(); is_paused; stats() -> dict
    """

    def __init__(self, engine, roots=(), pause_limit_s: float = 60.0):
        self.engine, self.roots, self.counts = engine, roots, Counter()
        self.loaded: dict[str, tuple[str, str]] = {}       # name -> (path, fingerprint)
        self.lock, self.pause_guard = asyncio.Lock(), Pause(pause_limit_s, self.resume)
        self.routes = {
            "/v1/completions": ("POST", self.completions), "/v1/chat/completions": ("POST", self.chat), "/v1/models": ("GET", self.models),
            "/v1/load_lora_adapter": ("POST", self.load), "/v1/unload_lora_adapter": ("POST", self.unload), "/pause": ("POST", self.pause),
            "/resume": ("POST", self.resume), "/is_paused": ("GET", self.is_paused), "/health": ("GET", self.health),
            "/server_info": ("GET", self.info), "/metrics": ("GET", self.metrics), "/": ("GET", self.page)}

    async def completions(self, request: Request) -> Reply:
        body = request.json()
        top = take(body, "logprobs", None, high=20)
        prompt = body.get("prompt")
        if not is_token_list(prompt) and not isinstance(prompt, str):
            raise ApiError(400, "prompt must be one string or one list of token ids")
        ids = prompt if isinstance(prompt, list) else self.tokens(self.engine.encode, prompt)
        name, done = await self.generate(body, ids, take(body, "max_tokens", 16, low=1), top or 0)
        choices = []
        for index, one in enumerate(done):
            choice = {"index": index, "text": self.engine.decode(one.token_ids), "finish_reason": one.finish_reason, "stop_reason": None,
                      "logprobs": None if top is None else self.logprobs(body, one)}
            if body.get("return_token_ids"):
                choice.update(token_ids=one.token_ids, prompt_token_ids=ids)
            choices.append(choice)
        return self.reply("cmpl", "text_completion", name, ids, done, choices)

    async def chat(self, request: Request) -> Reply:
        body = request.json()
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
            raise ApiError(400, "messages must be a list of {role, content}, both strings")
        ids = self.tokens(self.engine.chat, messages)
        top = take(body, "top_logprobs", 0, high=20) if body.get("logprobs") else None
        limit = take(body, "max_completion_tokens", None, low=1) or take(body, "max_tokens", None, low=1)
        name, done = await self.generate(body, ids, limit or max(1, self.engine.max_model_len - len(ids)), top or 0)
        choices = []
        for index, one in enumerate(done):
            choice = {"index": index, "message": {"role": "assistant", "content": self.engine.decode(one.token_ids)},
                      "finish_reason": one.finish_reason, "stop_reason": None, "logprobs": None}
            if top is not None:
                def entry(token, value):
                    return {"token": self.spell(body, token), "logprob": value, "bytes": list(self.engine.token(token).encode())}
                choice["logprobs"] = {"content": [{**entry(token, value), "top_logprobs": [entry(*pair) for pair in best.items()]}
                                                  for token, value, best in self.ranked(one, top)]}
            if body.get("return_token_ids"):
                choice["token_ids"] = one.token_ids
            choices.append(choice)
        return self.reply("chatcmpl", "chat.completion", name, ids, done, choices, **({"prompt_token_ids": ids} if body.get("return_token_ids") else {}))

    def tokens(self, encode, text) -> list[int]:
        try:
            json.dumps(text, ensure_ascii=False).encode()           # a lone surrogate is the client's mistake
            return list(encode(text))
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"the prompt cannot be encoded: {str(error)[:200]}") from None

    async def generate(self, body: dict, ids: list[int], max_tokens: int, top: int):
        """Checks what both kinds of completion share, and samples. Returns (name that is served, completions)."""
        check_neutral(body)
        model, live = model_name(body), self.engine.names()
        name = newest(live) if model == ALIAS else model
        if name not in live and name != self.engine.model_id:
            raise unknown_model(model, live)
        limit = self.engine.max_model_len
        if not ids or max(ids) >= self.engine.vocab_size:
            raise ApiError(400, f"the prompt must have token ids from 0 to {self.engine.vocab_size - 1}, at least one")
        if len(ids) + max_tokens > limit:
            raise ApiError(400, f"This model's maximum context length is {limit} tokens. However, you requested {len(ids)} in the prompt and {max_tokens} to complete.")
        stop = body.get("stop_token_ids") or []
        if not is_token_list(stop) or len(stop) > 128:
            raise ApiError(400, "stop_token_ids must be a list of at most 128 token ids")
        n, temperature = take(body, "n", 1, low=1, high=256), take(body, "temperature", 1.0, float, high=100)
        seed = take(body, "seed", None, low=-2**63, high=2**63 - 1)
        future = None
        try:
            future = self.engine.submit(ids, n, max_tokens, temperature, None if name == self.engine.model_id else name, seed, tuple(stop), top)
            done = await asyncio.wrap_future(future)
        except asyncio.CancelledError:                              # the client left
            if future:
                self.engine.cancel(future)
            self.counts["abort"] += n
            raise
        except LookupError:
            raise unknown_model(model, self.engine.names()) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        self.counts["prompt_tokens"] += len(ids)
        for one in done:
            self.counts["generation_tokens"] += len(one.token_ids)
            self.counts[one.finish_reason] += 1
        return name, done

    def reply(self, prefix: str, kind: str, name: str, ids, done, choices, **more) -> Reply:
        total = sum(len(one.token_ids) for one in done)
        usage = {"prompt_tokens": len(ids), "completion_tokens": total, "total_tokens": len(ids) + total}
        return json_reply({"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": name,
                           "choices": choices, "usage": usage, **more})

    def spell(self, body: dict, token: int) -> str:
        return f"token_id:{token}" if body.get("return_tokens_as_token_ids") else self.engine.token(token)

    def ranked(self, one, top: int):
        """(token, logprob, {token: logprob} of the sampled one and the top ones) at each position; -inf as vLLM writes it."""
        tops = one.top_logprobs if top and one.top_logprobs else [{}] * len(one.token_ids)
        for token, value, best in zip(one.token_ids, one.logprobs, tops):
            yield token, max(value, MINUS_INFINITY), {t: max(v, MINUS_INFINITY) for t, v in {token: value, **best}.items()}

    def logprobs(self, body: dict, one) -> dict:
        rows = [(self.spell(body, token), value, {self.spell(body, t): v for t, v in best.items()})
                for token, value, best in self.ranked(one, take(body, "logprobs", 0))]
        offsets, at = [], 0
        for text, _, _ in rows:
            offsets.append(at)
            at += len(text)
        return {"text_offset": offsets, "tokens": [row[0] for row in rows], "token_logprobs": [row[1] for row in rows], "top_logprobs": [row[2] for row in rows]}

    async def models(self, request: Request) -> Reply:
        return model_list(self.engine.model_id, self.engine.max_model_len, {name: self.loaded.get(name, (name, ""))[0] for name in self.engine.names()})

    async def load(self, request: Request) -> Reply:
        """200 also for the same files again. A client's own name may be given new files; a `policy-vN` never changes."""
        name, path = adapter_request(request.json(), needs_path=True)
        path = checked_path(path, self.roots)
        async with self.lock:
            print_of = await in_thread(fingerprint, path)
            if name in self.engine.names():
                if print_of and self.loaded.get(name, ("", ""))[1] == print_of:
                    return text_reply(f"Success: LoRA adapter '{name}' is loaded already, from the same files.")
                if VERSION.fullmatch(name):
                    raise ApiError(400, f"The lora adapter '{name}' has already been loaded, from other files: a version never changes.")
                await in_thread(self.engine.unload, name)
            await in_thread(self.engine.load, name, path)
            self.loaded[name] = (path, print_of)
        log.info("loaded %s", name)
        return text_reply(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Reply:
        name, _ = adapter_request(request.json(), needs_path=False)
        async with self.lock:
            if name not in self.engine.names():
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
            await in_thread(self.engine.unload, name)
            self.loaded.pop(name, None)
        log.info("unloaded %s", name)
        return text_reply(f"Success: LoRA adapter '{name}' removed successfully.")

    async def pause(self, request: Request) -> Reply:
        mode = pause_mode(request)
        self.pause_guard.start()
        await in_thread(self.engine.pause, mode)
        return json_reply({"status": "paused"})

    async def resume(self, request: Request | None) -> Reply:
        self.pause_guard.stop()
        self.engine.resume()
        return json_reply({"status": "resumed"})

    async def is_paused(self, request: Request) -> Reply:
        return json_reply({"is_paused": bool(self.engine.is_paused)})

    async def health(self, request: Request) -> Reply:
        self.engine.stats()          # raises when the engine is broken
        return text_reply("")

    async def info(self, request: Request) -> Reply:
        return server_info(self.engine.max_lora_rank, self.engine.max_loras, self.engine.max_model_len, self.engine.dtype)

    async def metrics(self, request: Request) -> Reply:
        stats, label = self.engine.stats(), {"model_name": self.engine.model_id}
        rows = [("vllm:num_requests_running", "gauge", label, stats.get("running", 0)), ("vllm:num_requests_waiting", "gauge", label, stats.get("waiting", 0)),
                ("vllm:prompt_tokens_total", "counter", label, self.counts["prompt_tokens"]),
                ("vllm:generation_tokens_total", "counter", label, self.counts["generation_tokens"])]
        rows += [("vllm:request_success_total", "counter", {**label, "finished_reason": why}, self.counts[why]) for why in ("stop", "length", "abort")]
        rows += [(f"grpo:engine_{key}", "gauge", label, value) for key, value in stats.items() if isinstance(value, (int, float))]
        return metrics_text(rows)

    async def page(self, request: Request) -> Reply:
        return status_page(f"sampler of {self.engine.model_id}", {"paused": self.engine.is_paused, **self.counts}, ["statistic", "value"],
                           [*map(list, self.engine.stats().items()), ["live versions", ", ".join(sorted(self.engine.names()))]])


# ------------------------------------------------------------------------------------------------ which replica, and is it right


def distance(expected: list[dict[int, float]], got: list[dict[int, float]]) -> float:
    """Mean |difference| of logprobs over the token ids that both list, over all prompts, in nats; inf if too few are shared."""
    gaps, smaller = [], 0
    for one, other in zip(expected, got, strict=True):
        shared = one.keys() & other.keys()
        smaller += min(len(one), len(other))
        gaps += [abs(max(one[token], MINUS_INFINITY) - max(other[token], MINUS_INFINITY)) for token in shared]
    return sum(gaps) / len(gaps) if gaps and 2 * len(gaps) >= smaller else math.inf


def canary_verdict(canary: dict, got: list[dict[int, float]], older: list[dict] | None = None) -> tuple[bool | None, str]:
    """Does a replica that answered `got` (top logprobs after each canary prompt) serve the adapter? (True | False | None, why).

    float32: every shared logprob within 1e-3, and at least half of the ids shared. Otherwise the distance to whatever is
    nearest is taken for the noise: a base or older version that is nearest and further than three times that noise from
    the adapter means the wrong weights (False); one that is not so far leaves it open (None: watch the mismatch).
    """
    def by_id(rows):
        return [{int(token): value for token, value in row.items()} for row in rows]
    known = {"the adapter": by_id(canary["adapter"]), "the base": by_id(canary["base"]), **({"an older version": by_id(older)} if older else {})}
    adapter = known["the adapter"]
    if len(got) != len(adapter):
        return False, f"expected {len(adapter)} canary answers, got {len(got)}"
    away = {what: distance(rows, got) for what, rows in known.items() if len(rows) == len(got)}
    nearest = min(away, key=away.get)
    wrong = [(abs(row[token] - other[token]), prompt, token) for prompt, (row, other) in enumerate(zip(adapter, got)) for token in row.keys() & other.keys()]
    worst, prompt, token = max(wrong, default=(math.inf, 0, -1))
    said = "no token in common" if token < 0 else (
        f"prompt {prompt} token {token}: expected {adapter[prompt][token]:.4f}, got {got[prompt][token]:.4f}; nearest is {nearest} ({away[nearest]:.2g} nats)")
    if "float32" in canary.get("dtype", "float32"):
        return worst <= FP32_TOLERANCE and math.isfinite(away["the adapter"]), said
    noise = max(away[nearest], BF16_FLOOR)
    apart = {what: distance(adapter, rows) for what, rows in known.items() if what in away and what != "the adapter"}
    if away["the adapter"] > GARBLED:
        return False, said
    if nearest != "the adapter":
        return (False if apart[nearest] > 3 * noise else None), said
    return (True if all(gap > 3 * noise for gap in apart.values()) else None), said


class Chooser:
    """Chained 16-token block hashes -> replica. O(prompt length) a request; remembers the MAX_BLOCKS last used blocks.

    A block is common, and says nothing, when every candidate has seen it or when two different blocks followed it.
    """
    MANY = object()                  # more than one successor

    def __init__(self, ahead: int = AHEAD_ROLLOUTS, max_blocks: int = MAX_BLOCKS):
        self.ahead, self.max_blocks, self.last = ahead, max_blocks, ""
        self.blocks: OrderedDict[int, list] = OrderedDict()        # hash -> [owners, successor]
        self.counts = Counter()

    def chain(self, name: str, prompt) -> list[int]:
        """Hashes of the blocks, each covering all before it; the last may be short. Text: 64 characters for 16 tokens."""
        step = BLOCK_TOKENS if isinstance(prompt, list) else 4 * BLOCK_TOKENS
        state, hashes = hash(name), []
        for at in range(0, len(prompt), step):
            block = prompt[at:at + step]
            state = hash((state, tuple(block) if isinstance(block, list) else block))
            hashes.append(state)
        return hashes

    def choose(self, name: str, prompt, loads: dict[str, int]) -> str:
        """The replica (a key of `loads`, rollouts in flight) for this prompt under this adapter, and counts why."""
        chain = self.chain(name, prompt)
        owners: tuple = ()
        for at, block in enumerate(chain):
            entry = self.blocks.get(block)
            if entry is None:
                break
            self.blocks.move_to_end(block)
            following = chain[at + 1] if at + 1 < len(chain) else None
            if following is not None and entry[1] is not following and entry[1] != following:
                entry[1] = self.MANY if entry[1] is not None else following
            here = tuple(owner for owner in entry[0] if owner in loads)
            if here and len(here) < len(loads) and entry[1] is not self.MANY:
                owners = here
        least = min(loads.values())
        warm = min(owners, key=loads.get) if owners else None
        if warm is not None and loads[warm] - least <= self.ahead:
            chosen, why = warm, "affinity"
        else:
            ties = sorted(url for url, load in loads.items() if load == least)
            chosen = next((url for url in ties if url > self.last), ties[0])
            self.last, why = chosen, "spill" if owners else "cold"
        self.counts[why] += 1
        for at, block in enumerate(chain):
            entry = self.blocks.setdefault(block, [(), chain[at + 1] if at + 1 < len(chain) else None])
            if chosen not in entry[0]:
                entry[0] = (*entry[0], chosen)[-64:]
        while len(self.blocks) > self.max_blocks:
            self.blocks.popitem(last=False)
        return chosen


# ------------------------------------------------------------------------------------------------ members of the bucket


class Member(threading.Thread):
    """This process's heartbeat: rewrites `members/<role>-<id>.json` every second with a counter one higher. Outlives a failing bucket."""

    def __init__(self, bucket, role: str, url: str = "", run_id: str = "", id: str = "", doing: str = "starting", beat_s: float = BEAT_S):
        super().__init__(daemon=True)
        self.bucket, self.beat_s, self.finished = bucket, beat_s, threading.Event()
        self.record = {"format": "async-grpo-member", "version": 1, "role": role, "id": id or secrets.token_hex(4), "url": url, "counter": 0,
                       "run_id": run_id, "doing": doing, "pid": os.getpid(), "host": socket.gethostname()}
        self.key = f"members/{role}-{self.record['id']}.json"

    def update(self, **fields) -> None:
        """New values (`doing`, `url`, …) for the next beat."""
        self.record = {**self.record, **fields}

    def beat(self, what: str, *args) -> None:
        try:
            getattr(self.bucket, what)(self.key, *args)
        except (BucketError, OSError) as error:
            log.warning("heartbeat %s: %s (going on)", self.key, error)

    def run(self) -> None:
        while not self.finished.is_set():
            self.update(counter=self.record["counter"] + 1)
            self.beat("put", json.dumps(self.record, sort_keys=True).encode() + b"\n")
            self.finished.wait(self.beat_s)
        self.beat("delete")

    def stop(self) -> None:
        """Ends the heartbeat and removes the file; waits at most a second for a slow bucket."""
        self.finished.set()
        if self.is_alive():
            self.join(1.0)


class LiveMembers:
    """Who is alive, by this reader's own clock: a member whose counter has not moved for `dead_s` is dead. No clock is compared."""

    def __init__(self, bucket, role: str = "", dead_s: float = DEAD_S, clock=time.monotonic):
        self.bucket, self.role, self.dead_s, self.clock = bucket, role, dead_s, clock
        self.seen: dict[str, tuple[int, float, dict]] = {}         # key -> counter, when it last moved, record

    def poll(self) -> dict[str, dict]:
        """Reads all members; returns the live ones by id. BucketError if the bucket cannot be read."""
        now, seen = self.clock(), {}
        for key in self.bucket.list(f"members/{self.role}-" if self.role else "members/"):
            try:
                record = json.loads(self.bucket.get(key))
                counter, moved, _ = self.seen.get(key, (None, now, None))
                seen[key] = (record["counter"], moved if counter == record["counter"] else now, {**record, "url": str(record["url"]), "id": str(record["id"])})
            except NotFound:         # it left between the two calls
                continue
            except (ValueError, TypeError, KeyError) as error:
                log.warning("%s is not a member record (%s): ignored", key, type(error).__name__)
        self.seen = seen
        return {record["id"]: record for _, moved, record in seen.values() if now - moved < self.dead_s}

    def missing(self) -> dict[str, float]:
        """Dead members that did not say goodbye: id -> seconds since their counter moved."""
        now = self.clock()
        return {record["id"]: now - moved for _, moved, record in self.seen.values() if now - moved >= self.dead_s}


# ------------------------------------------------------------------------------------------------ the router


@dataclass
class Adapter:
    """A name that every replica must serve. `key`: published in the bucket, with a canary; `path`: loaded by a client."""
    name: str
    key: str = ""
    path: str = ""
    fingerprint: str = ""
    canary: dict | None = None


@dataclass
class Replica:
    """What the router knows of one replica. `proven`: adapter names that may be asked for here."""
    url: str
    pool: Pool
    is_member: bool
    state: str = "joining"           # loading, ready, out
    in_flight: int = 0               # rollouts (n per request), exact on every path
    served: set = field(default_factory=set)
    proven: set = field(default_factory=set)
    tries: Counter = field(default_factory=Counter)
    due: dict = field(default_factory=dict)                # adapter name -> loop time of the next try
    base: str = ""
    max_model_len: int | None = None
    config: dict | None = None       # of /server_info; {} when it has none
    fails: int = 0
    last_error: str = ""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task | None = None
    filler: asyncio.Task | None = None

    def limit(self, key: str, default):
        return (self.config or {}).get("lora_config", {}).get(key) or default


class Router:
    """Keeps the fleet right and forwards completions. `wanted` is what every replica must hold, newest version first."""

    def __init__(self, bucket=None, replicas=(), replica_token: str = "", adapter_dir: str = "", pause_limit_s: float = 60.0, request_limit_s: float = 600.0):
        self.bucket, self.token, self.request_limit_s = bucket, replica_token, request_limit_s
        self.adapter_dir = os.path.abspath(adapter_dir or getattr(bucket, "root", None) or ".")
        self.roots = [str(root) for root in (adapter_dir, getattr(bucket, "root", None)) if root]
        self.wanted: dict[str, Adapter] = {}
        self.replicas: dict[str, Replica] = {}
        self.chooser, self.counts = Chooser(), Counter()
        self.changed, self.lock, self.tasks = asyncio.Event(), asyncio.Lock(), set()
        self.is_on_hold, self.pause_guard = False, Pause(pause_limit_s, self.resume)
        self.routes = {
            "/v1/completions": ("POST", self.complete), "/v1/chat/completions": ("POST", self.complete), "/v1/models": ("GET", self.models),
            "/v1/load_lora_adapter": ("POST", self.load), "/v1/unload_lora_adapter": ("POST", self.unload), "/pause": ("POST", self.pause),
            "/resume": ("POST", self.resume), "/is_paused": ("GET", self.is_paused), "/health": ("GET", self.health),
            "/server_info": ("GET", self.info), "/metrics": ("GET", self.metrics), "/": ("GET", self.page)}
        for url in replicas:
            self.add(url, is_member=False)

    # The fleet.

    def add(self, url: str, is_member: bool) -> None:
        replica = self.replicas[url] = Replica(url, Pool(url, self.token), is_member)
        replica.watcher = self.spawn(self.watch(replica))

    def remove(self, replica: Replica) -> None:
        log.info("replica %s left", replica.url)
        del self.replicas[replica.url]
        for task in (replica.watcher, replica.filler):
            if task:
                task.cancel()
        replica.pool.close(with_busy=False)

    def spawn(self, coroutine) -> asyncio.Task:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def news(self, published: list[Adapter], members: dict[str, dict]) -> None:
        """From the bucket: the live versions, newest first, and the samplers that are alive."""
        loaded = {name: adapter for name, adapter in self.wanted.items() if not adapter.key}
        if [adapter.name for adapter in published] != [name for name in self.wanted if name not in loaded]:
            self.wanted = {adapter.name: adapter for adapter in published} | loaded
            for replica in self.replicas.values():
                replica.wake.set()
        urls = {record["url"] for record in members.values() if record["url"]}
        for url in urls - self.replicas.keys():
            try:
                self.add(url, is_member=True)
            except ValueError as error:
                log.warning("member ignored: %s", error)
        for replica in list(self.replicas.values()):
            # A heartbeat may stop because the member cannot reach the bucket: while its HTTP is healthy it stays.
            if replica.is_member and replica.url not in urls and replica.state in ("joining", "out"):
                self.remove(replica)

    def set_state(self, replica: Replica, state: str, why: str = "") -> None:
        if state in ("out", "joining"):
            replica.proven.clear()
            replica.tries.clear()
            replica.due.clear()
            replica.last_error = why or replica.last_error
        if state != replica.state:
            log.info("replica %s: %s -> %s%s", replica.url, replica.state, state, f" ({why})" if why else "")
            replica.state = state
        self.announce()

    def announce(self) -> None:
        """Wakes every request that waits for a replica or a version."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def watch(self, replica: Replica) -> None:
        while True:
            try:
                await self.check(replica)
                replica.fails = 0
            except (OSError, ApiError) as error:
                replica.fails += 1
                # A refused connection is certain; a time-out may be a busy moment.
                if replica.fails >= POLL_FAILS or not isinstance(error, TimeoutError):
                    self.set_state(replica, "out", f"{type(error).__name__}: {error}")
                    replica.pool.close(with_busy=True)     # its requests go elsewhere now
            except Exception:
                log.exception("watching %s failed", replica.url)
            replica.wake.clear()
            try:
                await asyncio.wait_for(replica.wake.wait(), POLL_S)
            except asyncio.TimeoutError:
                pass

    async def call(self, replica: Replica, method: str, path: str, body: dict | None = None, limit_s: float = POLL_LIMIT_S) -> Reply:
        """One control call. ApiError for any status but 200, with what the replica said."""
        reply = await replica.pool.request(method, path, b"" if body is None else json.dumps(body).encode(), limit_s)
        if reply.status != 200:
            raise ApiError(reply.status, f"{method} {path}: {reply.status} {reply.body[:300].decode(errors='replace')}")
        return reply

    async def check(self, replica: Replica) -> None:
        """Health and models; notices a restart; starts loading what is missing."""
        await self.call(replica, "GET", "/health")
        try:
            cards = json.loads((await self.call(replica, "GET", "/v1/models")).body)["data"]
            replica.served = {str(card["id"]) for card in cards if card.get("parent")}
            replica.base, replica.max_model_len = str(cards[0]["id"]), cards[0].get("max_model_len")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ApiError(502, "/v1/models is not a model list") from None
        if replica.proven - replica.served:                # it forgot what it had: it is a new process
            self.set_state(replica, "joining", f"lost {', '.join(sorted(replica.proven - replica.served))}")
        if replica.state in ("joining", "out"):
            await self.greet(replica)
            self.set_state(replica, "loading")
        now = asyncio.get_running_loop().time()
        stale = {name for name in replica.served if self.bucket and VERSION.fullmatch(name) and name not in self.wanted}
        due = any(name not in replica.proven and replica.due.get(name, 0) <= now for name in self.wanted)
        if (stale or due) and (replica.filler is None or replica.filler.done()):
            replica.filler = self.spawn(self.fill(replica, stale))
        self.settle(replica)

    async def greet(self, replica: Replica) -> None:
        """Its limits, and the end of a pause that a killed proxy or client left behind. Both are vLLM's developer routes."""
        reply = await replica.pool.request("GET", "/server_info?config_format=json")
        paused = await replica.pool.request("GET", "/is_paused")
        try:
            replica.config = json.loads(reply.body)["vllm_config"] if reply.status == 200 else {}
            is_paused = paused.status == 200 and json.loads(paused.body)["is_paused"]
        except (ValueError, LookupError, TypeError):
            replica.config, is_paused = {}, False
        if is_paused and not self.is_on_hold:
            log.warning("replica %s was left paused: resuming it", replica.url)
            await self.call(replica, "POST", "/resume")

    def wanted_here(self, replica: Replica) -> list[Adapter]:
        return list(self.wanted.values())[:replica.limit("max_loras", None)]

    def settle(self, replica: Replica) -> None:
        """loading -> ready, once every wanted version is proven, or has failed for long while another is."""
        wanted = self.wanted_here(replica)
        missing = [adapter.name for adapter in wanted if adapter.name not in replica.proven]
        if replica.state == "loading" and not self.is_on_hold and all(replica.tries[name] >= SETTLE_TRIES for name in missing) \
                and len(missing) < max(1, len(wanted)) and (wanted or not self.bucket):
            self.set_state(replica, "ready")

    async def fill(self, replica: Replica, stale: set) -> None:
        """Unloads what nobody may want any more, then loads and proves what is missing, newest first."""
        now = asyncio.get_running_loop().time
        try:
            for name in stale:
                await self.drop(replica, name)
            for adapter in self.wanted_here(replica):
                if adapter.name in replica.proven or replica.due.get(adapter.name, 0) > now():
                    continue
                try:
                    await self.bring(replica, adapter)
                    log.info("replica %s serves %s", replica.url, adapter.name)
                except ApiError as error:
                    tries = replica.tries[adapter.name] = replica.tries[adapter.name] + 1
                    replica.due[adapter.name] = now() + min(60.0, 0.5 * 2**(tries - 1))
                    replica.last_error = f"{adapter.name}: {error.message}"
                    log.warning("replica %s does not serve %s (try %d): %s", replica.url, adapter.name, tries, error.message)
                self.settle(replica)
                self.announce()
        except OSError as error:
            self.suspect(replica, error)

    def suspect(self, replica: Replica, error: Exception) -> None:
        """A connection failed: it may have restarted. No traffic until the next check, which starts now."""
        if self.replicas.get(replica.url) is replica:
            self.set_state(replica, "joining", f"{type(error).__name__}: {error}")
            replica.wake.set()

    async def drop(self, replica: Replica, name: str) -> None:
        replica.proven.discard(name)
        replica.served.discard(name)
        try:
            await self.call(replica, "POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_S)
        except ApiError as error:
            log.warning("replica %s did not unload %s: %s", replica.url, name, error.message)

    async def put(self, replica: Replica, adapter: Adapter) -> None:
        path = adapter.path or (adapter.key if replica.is_member else os.path.join(self.adapter_dir, adapter.key))
        await self.call(replica, "POST", "/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": path}, LOAD_S)
        replica.served.add(adapter.name)

    async def bring(self, replica: Replica, adapter: Adapter) -> None:
        """Loads and proves one adapter; ApiError says why it cannot be served from there. A name that is there already is only
        trusted after its canary; without one it is loaded anew."""
        if adapter.name not in replica.served or not adapter.canary:
            try:
                await self.put(replica, adapter)
            except ApiError as error:
                if "already been loaded" not in error.message:
                    raise
                if not adapter.canary:
                    await self.drop(replica, adapter.name)
                    await self.put(replica, adapter)
        while self.is_on_hold:       # a paused replica would not answer its canary
            await self.changed.wait()
        is_right, why = await self.prove(replica, adapter) if adapter.canary else (True, "")
        if is_right is False:
            await self.drop(replica, adapter.name)
            raise ApiError(502, f"canary refused: {why}")
        if is_right is None:
            log.warning("replica %s: %s is unproven, watch the mismatch: %s", replica.url, adapter.name, why)
        replica.tries.pop(adapter.name, None)
        replica.proven.add(adapter.name)

    async def prove(self, replica: Replica, adapter: Adapter) -> tuple[bool | None, str]:
        async def ask(prompt):
            reply = await self.call(replica, "POST", "/v1/completions", {
                "model": adapter.name, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "logprobs": 20, "seed": 0,
                "return_token_ids": True, "return_tokens_as_token_ids": True}, CANARY_S)
            top = json.loads(reply.body)["choices"][0]["logprobs"]["top_logprobs"][0]
            return {int(token.removeprefix("token_id:")): value for token, value in top.items()}
        try:
            got = await asyncio.gather(*map(ask, adapter.canary["prompts"]))
            dtype = str((replica.config or {}).get("model_config", {}).get("dtype", "float32"))
            canary = {**adapter.canary, "dtype": adapter.canary["dtype"] if "float32" in dtype else dtype}
            older = [other.canary["adapter"] for other in self.wanted.values() if other.canary and other.name != adapter.name
                     and other.canary["prompts"] == canary["prompts"] and int(other.name[8:]) < int(adapter.name[8:])]
            return canary_verdict(canary, got, older[0] if older else None)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return False, f"the canary's answer cannot be read ({type(error).__name__}: {error})"

    # Completions.

    def ready(self, name: str | None) -> list[Replica]:
        """Replicas that may be asked for an adapter, or for the base (None)."""
        return [r for r in self.replicas.values() if r.state == "ready" and (name is None or name in r.proven)]

    def live(self) -> set[str]:
        return {name for name in self.wanted if self.ready(name)}

    async def until_ready(self, find):
        """What `find()` returns once it is not empty; 503 after VERSION_WAIT_S."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + VERSION_WAIT_S
        while not (found := find()):
            changed = self.changed
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, deadline - loop.time()))
            except asyncio.TimeoutError:
                states = ", ".join(f"{replica.url} {replica.state}" for replica in self.replicas.values()) or "no replica"
                raise ApiError(503, f"not ready yet: {states}", Retry_After="1") from None
        return found

    async def resolve(self, model: str) -> str | None:
        """The adapter that is meant (None: the base). 404 unless it is known."""
        if model == ALIAS and (self.bucket or newest(self.wanted)):
            return await self.until_ready(lambda: newest(self.live()))
        if model in self.wanted:
            return model
        if any(replica.base == model for replica in self.replicas.values()):
            return None
        raise unknown_model(model, self.live())

    async def complete(self, request: Request) -> Reply:
        """Forwards to the chosen replica; tries others after a connection error, 429, 5xx, or a version it forgot."""
        body = request.json()
        model = model_name(body)
        name = await self.resolve(model)
        data = request.body if name in (None, model) else json.dumps({**body, "model": name}).encode()
        prompt = body.get("prompt") or json.dumps(body.get("messages"))
        rollouts = body.get("n") if type(body.get("n")) is int and 0 < body["n"] <= 1024 else 1
        tried: set[str] = set()
        for attempt in range(TRIES):
            ready = await self.until_ready(lambda: self.ready(name) if name is None or name in self.wanted else [None])
            if ready == [None]:
                raise unknown_model(model, self.live())
            loads = {replica.url: replica.in_flight for replica in ready if replica.url not in tried} or {replica.url: replica.in_flight for replica in ready}
            url = min(loads, key=loads.get) if attempt else self.chooser.choose(name or model, prompt if isinstance(prompt, (list, str)) else "", loads)
            replica = self.replicas[url]
            tried.add(url)
            replica.in_flight += rollouts
            try:
                reply = await replica.pool.request("POST", request.path, data, self.request_limit_s)
            except TimeoutError:
                raise ApiError(504, f"no answer from {url} within {self.request_limit_s:g} s") from None
            except OSError as error:
                reply = None
                self.suspect(replica, error)
            finally:
                replica.in_flight -= rollouts
            if reply and (reply.status < 400 or reply.status in (400, 408, 413, 422) or reply.status == 404 and name is None):
                self.counts["forwarded"] += 1
                return Reply(reply.status, reply.body, reply.content_type)
            self.counts["retried"] += 1
            if reply:
                replica.last_error = f"{request.path}: {reply.status} {reply.body[:200].decode(errors='replace')}"
                if reply.status == 404:                    # it forgot the version: a new process
                    self.set_state(replica, "joining", replica.last_error)
                    replica.wake.set()
            if attempt and len(tried) >= len(ready):
                await asyncio.sleep(0.1 * 2**attempt)
        self.counts["failed"] += 1
        raise ApiError(502 if reply is None or reply.status != 429 else 429, f"no replica answered in {TRIES} tries; the last was {url}: {replica.last_error[:300]}")

    # The API's other routes.

    async def broadcast(self, method) -> tuple[list[Replica], list[str]]:
        """Runs `method(replica)` on all live replicas at once: (those that did it, why others refused). A replica whose
        connection fails counts as neither: it is suspect now, and will be brought back with all that is wanted."""
        targets = [replica for replica in self.replicas.values() if replica.state in ("loading", "ready")]
        results = await asyncio.gather(*map(method, targets), return_exceptions=True)
        done, failed = [], []
        for replica, result in zip(targets, results):
            if isinstance(result, ApiError):
                failed.append(f"{replica.url}: {result.message}")
            elif isinstance(result, OSError):
                self.suspect(replica, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                done.append(replica)
        if not done and not failed:
            raise ApiError(503, "no live replica", Retry_After="1")
        return done, failed

    async def load(self, request: Request) -> Reply:
        name, path = adapter_request(request.json(), needs_path=True)
        if self.bucket and VERSION.fullmatch(name):
            raise ApiError(400, f"`{name}` is the name of a version in the bucket; load it by publishing it there")
        path = checked_path(path, self.roots)
        # Shielded: a client that leaves must not leave half of the replicas loaded.
        return await asyncio.shield(self.spawn(self.load_everywhere(name, path)))

    async def load_everywhere(self, name: str, path: str) -> Reply:
        async with self.lock:
            adapter = Adapter(name, path=path, fingerprint=await in_thread(fingerprint, path))
            known = self.wanted.get(name)
            is_same = bool(known and adapter.fingerprint and known.fingerprint == adapter.fingerprint)

            async def load(replica):
                for attempt in range(SETTLE_TRIES):
                    try:
                        return await self.put(replica, adapter)
                    except ApiError as error:
                        if "already been loaded" in error.message and is_same:
                            return None
                        # 404 and 500 pass on a mount that lags behind the writer.
                        if error.status not in (404, 429, 500, 502, 503) or attempt == SETTLE_TRIES - 1:
                            raise
                    await asyncio.sleep(0.5 * 2**attempt)

            done, failed = await self.broadcast(load)
            if failed:
                if not is_same:
                    self.wanted.pop(name, None)
                    await asyncio.gather(*(self.drop(replica, name) for replica in done), return_exceptions=True)
                raise ApiError(504, f"`{name}` was not loaded, and is unloaded again where it was: {'; '.join(failed)}")
            self.wanted[name] = adapter
            for replica in done:
                replica.proven.add(name)
            self.announce()
        return text_reply(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Reply:
        """Nothing is routed to the name from here on; replicas that fail to unload it only keep a slot filled."""
        name, _ = adapter_request(request.json(), needs_path=False)
        if name not in self.wanted or self.wanted[name].key:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        del self.wanted[name]
        await asyncio.shield(self.spawn(self.broadcast(lambda replica: self.drop(replica, name))))
        return text_reply(f"Success: LoRA adapter '{name}' removed successfully.")

    async def pause(self, request: Request) -> Reply:
        mode = pause_mode(request)
        self.is_on_hold = True
        self.pause_guard.start()
        done, failed = await self.broadcast(lambda replica: self.call(replica, "POST", f"/pause?mode={mode}", limit_s=LOAD_S))
        if failed:
            await self.resume(None)
            raise ApiError(504, f"not paused, and resumed where it was: {'; '.join(failed)}")
        return json_reply({"status": "paused"})

    async def resume(self, request: Request | None) -> Reply:
        self.pause_guard.stop()
        self.is_on_hold = False
        self.announce()
        done, failed = await self.broadcast(lambda replica: self.call(replica, "POST", "/resume"))
        if failed:
            raise ApiError(504, f"not resumed: {'; '.join(failed)}")
        return json_reply({"status": "resumed"})

    async def is_paused(self, request: Request) -> Reply:
        return json_reply({"is_paused": self.is_on_hold})

    async def health(self, request: Request) -> Reply:
        if not self.ready(None):
            raise ApiError(503, "no replica is ready", Retry_After="1")
        return text_reply("")

    async def models(self, request: Request) -> Reply:
        ready = await self.until_ready(lambda: self.ready(None))
        lengths = [replica.max_model_len for replica in ready if replica.max_model_len]
        return model_list(ready[0].base, min(lengths, default=None), {name: self.wanted[name].path or self.wanted[name].key for name in self.live()})

    async def info(self, request: Request) -> Reply:
        ready = await self.until_ready(lambda: self.ready(None))
        ranks = [replica.limit("max_lora_rank", None) for replica in ready]
        loras = [replica.limit("max_loras", None) for replica in ready]
        lengths = [replica.max_model_len for replica in ready if replica.max_model_len]
        dtype = str((ready[0].config or {}).get("model_config", {}).get("dtype", "unknown")).removeprefix("torch.")
        return server_info(min(filter(None, ranks), default=None), min(filter(None, loras), default=None), min(lengths, default=None), dtype)

    async def metrics(self, request: Request) -> Reply:
        rows = [("vllm:num_requests_running", "gauge", {"replica": r.url}, r.in_flight) for r in self.replicas.values()]
        rows += [("grpo:router_replica_ready", "gauge", {"replica": r.url, "state": r.state}, int(r.state == "ready")) for r in self.replicas.values()]
        rows += [("grpo:router_version_ready", "gauge", {"replica": r.url, "version": name}, 1) for r in self.replicas.values() for name in sorted(r.proven)]
        rows += [("grpo:router_choices_total", "counter", {"kind": kind}, self.chooser.counts[kind]) for kind in ("affinity", "spill", "cold")]
        rows += [(f"grpo:router_{kind}_total", "counter", {}, self.counts[kind]) for kind in ("forwarded", "retried", "failed")]
        return metrics_text(rows)

    async def page(self, request: Request) -> Reply:
        facts = {"newest ready": newest(self.live()) or "none", "paused": self.is_on_hold,
                 **{kind: self.chooser.counts[kind] for kind in ("affinity", "spill", "cold")}, **self.counts}
        return status_page("router", facts, ["replica", "state", "versions", "in flight", "last error"],
                           [[r.url, r.state, ", ".join(sorted(r.proven)), r.in_flight, r.last_error] for r in self.replicas.values()])


class BucketWatch(threading.Thread):
    """Tells the router about published versions and living samplers, once a second; outlives a failing bucket."""

    def __init__(self, bucket, tell, live: int = 0):
        super().__init__(daemon=True)
        self.bucket, self.tell, self.live, self.url = bucket, tell, live, ""
        self.poll_s = 0.1 if bucket.root else POLL_S       # looking into a folder costs next to nothing
        self.finished, self.adapters, self.member = threading.Event(), {}, None

    def run(self) -> None:
        members, trouble = LiveMembers(self.bucket, "sampler"), ""
        while not self.finished.is_set():
            try:
                if not self.member:
                    self.join_run()
                if self.member:
                    self.tell(self.published(), members.poll())
                trouble = ""
            except (BucketError, OSError, ValueError, LookupError) as error:
                if str(error) != trouble:
                    log.warning("bucket: %s (going on)", error)
                trouble = str(error)
            self.finished.wait(self.poll_s)

    def join_run(self) -> None:
        if "run.json" not in self.bucket.list("run.json"):
            if self.live >= 0 and not getattr(self, "has_said", False):
                log.info("waiting for run.json in %s", self.bucket.address)
                self.has_said = True
            return
        run = json.loads(self.bucket.get("run.json"))
        self.live = self.live or int(run["max_staleness"]) + 2
        self.member = Member(self.bucket, "proxy", self.url, run_id=str(run.get("run_id", "")), doing="routing")
        self.member.start()

    def published(self) -> list[Adapter]:
        """The newest versions, newest first. Found by listing manifests, which are written last; read once each."""
        keys = sorted(key for key in self.bucket.list("adapters/") if key.endswith("/manifest.json"))[-self.live:]
        for key in keys:
            if key not in self.adapters:
                manifest = json.loads(self.bucket.get(key))
                folder = key.removesuffix("/manifest.json")
                self.adapters[key] = Adapter(f"policy-v{int(manifest['policy_version'])}", folder, fingerprint=str(manifest.get("sha256", "")), canary=manifest.get("canary"))
        self.adapters = {key: self.adapters[key] for key in reversed(keys)}
        return list(self.adapters.values())


# ------------------------------------------------------------------------------------------------ running


async def run_server(server: Server, listen: str, on_ready, stop: threading.Event | None) -> None:
    """Serves until SIGTERM, Ctrl-C or `stop`."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, done.set)
    if stop:
        threading.Thread(target=lambda: (stop.wait(), loop.call_soon_threadsafe(done.set)), daemon=True).start()
    url = await server.start(listen)
    if on_ready:
        on_ready(url)
    await done.wait()
    await server.stop()


def serve_replica(engine, listen: str, token: str = "", on_ready=None, roots=(), pause_limit_s: float = 60.0, stop: threading.Event | None = None) -> None:
    """Blocking: one engine behind the API. `roots`: folders that lora_path may point into."""
    async def serve():
        await run_server(Server(ReplicaServer(engine, roots, pause_limit_s).routes, token), listen, on_ready, stop)
    asyncio.run(serve())


def serve_router(bucket, replicas, listen: str, token: str = "", replica_token: str = "", adapter_dir: str = "", live: int = 0,
                 pause_limit_s: float = 60.0, request_limit_s: float = 600.0, on_ready=None, stop: threading.Event | None = None) -> None:
    """Blocking: the router over `replicas` (URLs) and the bucket's samplers. `live` versions (0: max_staleness + 2)."""
    async def serve():
        router, loop = Router(bucket, replicas, replica_token or token, adapter_dir, pause_limit_s, request_limit_s), asyncio.get_running_loop()
        watch = BucketWatch(bucket, lambda *news: loop.call_soon_threadsafe(router.news, *news), live) if bucket else None

        def ready(url):
            if watch:
                watch.url = url
                watch.start()
            if on_ready:
                on_ready(url)
        await run_server(Server(router.routes, token), listen, ready, stop)
        if watch:
            watch.finished.set()
            if watch.member:
                watch.member.stop()
        for task in list(router.tasks):
            task.cancel()
    asyncio.run(serve())


def arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="proxy.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--bucket", default="", help="folder, s3://bucket/prefix or URL of the run; none: clients load adapters")
    parser.add_argument("--replica", action="append", default=[], metavar="URL", help="a vLLM or sampler to route to (repeatable)")
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="port 0: any free one")
    parser.add_argument("--token", default=os.environ.get("GRPO_TOKEN", ""), help="bearer token that clients must send (default: GRPO_TOKEN; none: loopback only)")
    parser.add_argument("--replica-token", default="", help="bearer token sent to replicas (default: --token)")
    parser.add_argument("--adapter-dir", default="", metavar="DIR", help="where --replica servers see the bucket's objects, absolute (default: the file bucket itself)")
    parser.add_argument("--live", type=int, default=0, help="versions served at once (0: max_staleness + 2)")
    parser.add_argument("--pause-limit-s", type=float, default=60.0, help="seconds after which a pause ends by itself (0: never)")
    parser.add_argument("--request-limit-s", type=float, default=600.0, help="seconds a completion may take")
    args = parser.parse_args(argv)
    if not args.bucket and not args.replica:
        parser.error("give --bucket, --replica, or both")
    return args


def main(argv=None) -> int:
    args = arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    try:
        parse_listen(args.listen, bool(args.token))
        bucket = open_bucket(args.bucket) if args.bucket else None
        if args.replica and bucket and not (args.adapter_dir or getattr(bucket, "root", None)):
            raise ValueError("--replica with this bucket needs --adapter-dir: where those servers see its objects")
        for url in args.replica:
            Pool(url)
    except (ValueError, BucketError) as error:
        print(f"proxy.py: {error}", file=sys.stderr)
        return 2
    try:
        serve_router(bucket, args.replica, args.listen, args.token, args.replica_token, args.adapter_dir, args.live, args.pause_limit_s,
                     args.request_limit_s, on_ready=lambda url: print(f"ready role=proxy url={url}", flush=True))
    except OSError as error:
        print(f"proxy.py: cannot serve on {args.listen}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
