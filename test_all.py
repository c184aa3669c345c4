"""The specification: `pytest -v test_all.py` prints what is promised, one sentence a test, in the order of the files.

Real files, real sockets on port 0, real processes killed with SIGKILL, a real S3 server (SeaweedFS, from PyPI), PEFT,
boto3, openai and torch.optim as oracles; none of our own code is replaced by a mock.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import errno
import fcntl
import functools
import hashlib
import http.client
import http.server
import importlib.util
import io
import itertools
import json
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import os
import pty
import random
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import boto3
import botocore.exceptions
import openai
import pytest
import requests
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings, strategies
from safetensors.torch import load as load_tensors
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.pytorch_utils import Conv1D

import bucket
import grpo_async
import lora
import proxy
from bucket import BucketError, Corrupt, open_bucket
from grpo_async import Group, UserError
from lora import AdapterError, Lora, Sampler, UnknownVersion


# ================================================================ 1. Buckets


# ---- bucket.py -------------------------------------------------------------------------------------------------------



BUCKET_PY = str(Path(bucket.__file__).resolve())
BUCKET_KEYS = {"AWS_ACCESS_KEY_ID": "K" * 16, "AWS_SECRET_ACCESS_KEY": "S" * 32}     # rclone wants keys of such lengths

def bucket_env(**more):
    """The environment without anybody's own AWS settings, but with the test keys."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("AWS_")}, **BUCKET_KEYS, **more}

@pytest.fixture
def bucket_aws(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in BUCKET_KEYS.items():
        monkeypatch.setenv(name, value)

@pytest.fixture
def bucket_fast(monkeypatch):
    monkeypatch.setattr(bucket, "PAUSE_S", 0.001)

def bucket_port():
    """A port whose port + 10000, SeaweedFS's gRPC, is free as well; below the range that port 0 is served from."""
    while True:
        port = random.SystemRandom().randrange(11000, 22000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10000))
            return port

@contextlib.contextmanager
def bucket_process(*command, limit_s=60, **options):
    """A process that is killed in the end, and after `limit_s`, so that a test that waits for its output fails instead of hanging."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()

@pytest.fixture(scope="module", autouse=True)
def bucket_weed(tmp_path_factory):
    """SeaweedFS starts with the first test, so that it is ready (4 s) when it is needed: a function that waits for its URL."""
    folder = tmp_path_factory.mktemp("weed")
    key = {"accessKey": BUCKET_KEYS["AWS_ACCESS_KEY_ID"], "secretKey": BUCKET_KEYS["AWS_SECRET_ACCESS_KEY"]}
    (folder / "weed.json").write_text(json.dumps({"identities": [
        {"name": "test", "credentials": [key], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}))
    port = bucket_port()
    command = [Path(sys.executable).with_name("weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3",
               f"-s3.port={port}", f"-s3.config={folder}/weed.json", f"-master.port={bucket_port()}", f"-volume.port={bucket_port()}",
               f"-filer.port={bucket_port()}", "-master.volumeSizeLimitMB=64", "-volume.max=8", "-master.telemetry=false",
               "-s3.port.iceberg=0", "-s3.port.lance=0"]     # else on fixed ports, and a second SeaweedFS on the machine dies of it

    @functools.cache
    def url():
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                bucket_boto(f"http://127.0.0.1:{port}").create_bucket(Bucket="tests")
                return f"http://127.0.0.1:{port}"
            assert time.monotonic() < until and process.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    with open(folder / "log", "w") as log, bucket_process(*command, limit_s=3600, stderr=log, cwd=folder) as process:
        # Its log goes to a file, so that a full pipe never stops it.
        yield url

@pytest.fixture(scope="module")
def bucket_served(tmp_path_factory):
    """Our server as its users start it: (url, folder)."""
    folder = tmp_path_factory.mktemp("served")
    with bucket_serving(folder) as url:
        yield url, folder

@contextlib.contextmanager
def bucket_serving(folder, **env):
    with bucket_process(sys.executable, BUCKET_PY, "serve", str(folder), "--listen", "127.0.0.1:0", limit_s=3600,
                        env=bucket_env(**env)) as process:
        ready = process.stdout.readline()
        assert ready.startswith("ready role=serve url=http://127.0.0.1:"), ready
        yield ready.split("url=")[1].strip()

def bucket_boto(url):
    return boto3.client("s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id=BUCKET_KEYS["AWS_ACCESS_KEY_ID"],
                        aws_secret_access_key=BUCKET_KEYS["AWS_SECRET_ACCESS_KEY"],
                        config=boto3.session.Config(retries={"max_attempts": 0}, connect_timeout=1, proxies={}))

@pytest.fixture(params=["file", "serve", "seaweedfs", "faults"])
def any_bucket(request, bucket_aws, tmp_path):
    """A fresh, empty bucket of each kind: every test that takes it states a guarantee of all of them. `faults` is our server
    behind one that fails every fifth request (500, 503, time-out, dropped before or after it landed, cut) and repeats writes."""
    name = f"{request.node.name.split('[')[0]}-{os.urandom(4).hex()}"
    if request.param == "file":
        yield bucket.open_bucket(tmp_path / "run")
    elif request.param == "faults":
        request.getfixturevalue("bucket_fast")
        with bucket_faulty(request.getfixturevalue("bucket_served"), rate=0.2) as faults:
            yield faults.bucket
    elif request.param == "serve":
        yield bucket.open_bucket(f"{request.getfixturevalue('bucket_served')[0]}/tests/{name}")
    else:
        yield bucket.open_bucket(f"{request.getfixturevalue('bucket_weed')()}/tests/{name}")

class BucketFaults:
    """A store that misbehaves: a real server in front of ours. `script` holds one fault (or None) for each request to come;
    of all requests `rate` fail; `habits` are what the store does always, on `clock`:
    late: what is written is listed `seconds` later. unseen: who is told "not there" is told so again for `seconds`.
    reordered: what is written is seen after a delay of its own, up to `seconds`. empty: objects of no bytes are not kept.
    twice: each PUT arrives once more, after the next three requests. careless: If-None-Match is ignored."""

    def __init__(self, url, folder, rate=0.0, habits=(), seconds=30.0, clock=time.monotonic):
        self.script, self.requests, self.rate, self.habits, self.seconds, self.clock = [], [], rate, habits, seconds, clock
        self.folder, self.again, self.asked_early, outer = bucket.FileBucket(folder), [], [], self
        self.listed_from, self.seen_from = {}, {}          # path -> time
        self.random, self.lock, self.target = random.Random(1), threading.Lock(), url.removeprefix("http://")

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def log_message(self, *args):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                with outer.lock:
                    outer.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                    fault = outer.script.pop(0) if outer.script else None
                    if outer.random.random() < outer.rate:
                        fault = outer.random.choice(["500", "503", "408", "drop", "lost", "cut"])
                if callable(fault):
                    return fault(self)
                if fault == "drop":
                    return self.hang_up()
                if fault and fault.isdigit():
                    return self.reply(int(fault), {}, b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
                status, headers, data = outer.habitual(self.command, self.path, self.headers, body)
                if fault == "lost":
                    return self.hang_up()
                if fault == "500 landed":
                    return self.reply(500, {}, b"<Error><Code>InternalError</Code></Error>")
                self.reply(status, headers, data, cut=fault == "cut")

            def reply(self, status, headers, body, cut=False):
                self.send_response(status)
                for header in headers.items():
                    self.send_header(*header)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body[:len(body) // 2] if cut else body)
                self.close_connection = cut

            def hang_up(self):
                self.close_connection = True

            do_GET = do_HEAD = do_PUT = do_DELETE = answer

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.request_queue_size = 128
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def forward(self, method, path, headers, body):
        """The real store's (status, headers, body)."""
        with contextlib.closing(http.client.HTTPConnection(self.target, timeout=30)) as upstream:
            upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for header in headers.items():
                upstream.putheader(*header)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return answer.status, {k: v for k, v in answer.getheaders() if k.lower() not in (
                "content-length", "connection", "date", "server")}, answer.read()

    def habitual(self, method, path, headers, body):
        """The same after the store's habits."""
        path, query, now = path.partition("?")[0], path.partition("?")[2], self.clock()
        if method == "PUT" and not body and "empty" in self.habits:
            return 200, {}, b""
        if "twice" in self.habits:
            with self.lock:
                due = [again for count, again in self.again if count == 0]
                self.again = [(count - 1, again) for count, again in self.again if count]
            for again in due:
                self.forward(*again)
        if method in ("GET", "HEAD") and not query and self.seen_from.get(path, now) > now:
            self.asked_early.append(path)
            return 404, {}, b""
        status, back, data = self.forward(method, f"{path}?{query}".rstrip("?"), headers, body)
        if method == "PUT" and "twice" in self.habits:
            self.again.append((3, (method, path, headers, body)))
        if method == "PUT" and status == 412 and "careless" in self.habits:
            self.folder.put(bucket.unquote(path[1:]), body)
            status = 200
        if method == "PUT" and status == 200:
            delay = self.seconds * ("late" in self.habits) + self.random.uniform(0, self.seconds) * ("reordered" in self.habits)
            self.listed_from[path] = now + delay
            self.seen_from.setdefault(path, now + delay * ("reordered" in self.habits))
        if method == "GET" and query:
            hidden = lambda item: self.listed_from.get(f"{path}/{bucket.quote(bucket.html.unescape(item[1]))}", now) > now
            data = re.sub("<Contents><Key>(.*?)</Key>.*?</Contents>", lambda item: item[0] * (not hidden(item)), data.decode()).encode()
        if status == 404 and "unseen" in self.habits:
            self.asked_early.append(path)
            self.seen_from[path] = now + self.seconds
        return status, back, data

@contextlib.contextmanager
def bucket_faulty(served, **how):
    faults = BucketFaults(*served, **how)
    faults.bucket = bucket.open_bucket(f"{faults.url}/faults/{os.urandom(4).hex()}")
    try:
        yield faults
    finally:
        faults.server.shutdown()
        faults.server.server_close()

@pytest.fixture
def bucket_faults(bucket_served, bucket_aws, bucket_fast):
    with bucket_faulty(bucket_served) as faults:
        yield faults

BUCKET_BAD_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/.", "a\\b", "a\nb", "a\0b", "\x7f", "\ud800", "\uffff",
                   ".tmp-a", "a/.tmp-b", "a" * 256, "/".join(["a" * 200] * 5), None, 7, b"a"]

@pytest.mark.parametrize("key", BUCKET_BAD_KEYS, ids=lambda key: ascii(key)[:12])
def test_a_bad_key_is_refused_before_any_io(key, tmp_path, bucket_aws):
    """Nothing listens at the S3 address, and the folder does not exist: an attempt at I/O would fail otherwise, or show."""
    for store in bucket.open_bucket(tmp_path / "none"), bucket.open_bucket("http://127.0.0.1:9/bucket/prefix"):
        for attempt in (lambda: store.put_new(key, b""), lambda: store.put(key, b""), lambda: store.get(key), lambda: store.delete(key)):
            with pytest.raises(bucket.BadKey):
                attempt()
    assert not (tmp_path / "none").exists()

@given(strategies.text(max_size=20) | strategies.text("./\\~%+ aü\0", max_size=12))
@settings(max_examples=80, deadline=None)
def test_any_text_is_a_key_that_stays_inside_the_folder_or_is_refused(tmp_path_factory, key):
    folder = tmp_path_factory.getbasetemp() / "any_text"
    store = bucket.open_bucket(folder / "in")
    try:
        bucket.key_check(key)
    except bucket.BadKey:
        return
    assert store.put_new(key, b"1") and store.get(key) == b"1" and list(store.list()) == [key]
    assert os.listdir(folder) == ["in"]
    store.delete(key)
    assert os.listdir(folder / "in") == []

def test_an_address_says_which_kind_of_bucket_and_where(bucket_aws, monkeypatch, tmp_path):
    assert bucket.open_bucket(str(tmp_path / "a b")).root == tmp_path / "a b"
    assert bucket.open_bucket(f"file://{tmp_path}/a%20b").root == tmp_path / "a b"
    assert bucket.open_bucket("runs/demo").root == Path.cwd() / "runs/demo"
    assert bucket.open_bucket("~/demo").root == Path.home() / "demo"

    def parts(address):
        store = bucket.open_bucket(address)
        return store.scheme, store.host, store.path, store.prefix

    assert parts("s3://b/p/q") == ("https", "s3.us-east-1.amazonaws.com", "/b", "p/q/")
    assert parts("https://h:443/b/p%20q/") == ("https", "h", "/b", "p q/")
    assert parts("http://h:9000/b") == ("http", "h:9000", "/b", "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other")
    assert parts("s3://b/p") == ("http", "other", "/b", "p/")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://h/storage/v1/s3/")
    assert parts("s3://b/p") == ("https", "h", "/storage/v1/s3/b", "p/")
    assert parts("http://h/b/p") == ("http", "h", "/b", "p/")
    for address in "", "ftp://h/b", "http://", "http://h", "http://u:p@h/b", "s3://", "s3://b/../c", "http://h/b?x", "s3://b//p":
        with pytest.raises(bucket.BadKey):
            bucket.open_bucket(address)

# Every kind of bucket

@pytest.mark.parametrize("data", [b"", b"a", bytes(range(256)) * 8192], ids=["empty", "byte", "2MiB"])
def test_an_object_reads_back_as_written(any_bucket, data):
    assert any_bucket.put_new("groups/x", data)
    any_bucket.put("members/x", data + b"!")
    any_bucket.put("members/x", data)
    assert any_bucket.get("groups/x") == any_bucket.get("members/x") == data

def test_odd_keys_are_kept_and_listed_in_byte_order(any_bucket):
    keys = ["+", "a b", "a%2Fb", "a&b=c", "a'<b>", "a+b", "a..b", "a~b", "b/~/c d/%7E", "...", "é", "漢字/🙂"]
    for key in keys:
        assert any_bucket.put_new(key, key.encode())
    assert {key: any_bucket.get(key) for key in keys} == {key: key.encode() for key in keys}
    assert list(any_bucket.list()) == sorted(keys, key=str.encode)

def test_a_taken_key_is_refused_and_keeps_its_bytes(any_bucket):
    assert any_bucket.put_new("steps/000001.json", b"first") is True
    assert any_bucket.put_new("steps/000001.json", b"second, and longer") is False
    assert any_bucket.put_new("steps/000001.json", b"first") is False
    assert any_bucket.get("steps/000001.json") == b"first"

def test_of_32_racing_writers_one_wins_and_its_bytes_stay(any_bucket):
    start = threading.Barrier(32)

    def write(writer):
        start.wait()
        return any_bucket.put_new("steps/000001.json", b"%d" % writer * 1000)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        won = list(pool.map(write, range(32)))
    assert sum(won) == 1 and any_bucket.get("steps/000001.json") == b"%d" % won.index(True) * 1000

def test_what_is_missing_is_not_found_and_deleting_it_is_no_error(any_bucket):
    with pytest.raises(bucket.NotFound):
        any_bucket.get("steps/000001.json")
    any_bucket.delete("steps/000001.json")
    assert list(any_bucket.list("steps/")) == []
    any_bucket.put_new("steps/000001.json", b"1")
    any_bucket.delete("steps/000001.json")
    any_bucket.delete("steps/000001.json")
    assert list(any_bucket.list()) == [] and any_bucket.put_new("steps/000001.json", b"2")

def test_2500_keys_are_listed_in_order_over_pages_and_followed_from_any(any_bucket, bucket_served, request):
    """A page has 1,000. Folders are filled directly, as only listing is the matter here; SeaweedFS in pages of 250, to be quick."""
    keys = [f"groups/{i:06d}-actor" for i in range(2500)]
    folder = any_bucket.root or bucket_served[1] / f"{any_bucket.path[1:]}/{any_bucket.prefix}"
    if "seaweedfs" not in request.node.name:
        (folder / "groups").mkdir(parents=True)
        for key in keys:
            (folder / key).touch()
    else:
        keys, any_bucket.page_keys = keys[:625], 250
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: any_bucket.put(key, b""), keys))
    any_bucket.put("groupz", b"")
    assert list(any_bucket.list("groups/")) == keys
    assert list(any_bucket.list("groups/", start_after=keys[123])) == keys[124:]
    assert list(any_bucket.list("groups/", start_after=f"{keys[-9]}~")) == keys[-8:]
    assert list(any_bucket.list("groups/0006")) == keys[600:700]

def test_publishing_twice_changes_nothing_and_other_bytes_are_refused(any_bucket):
    files = {"adapter_model.safetensors": b"weights" * 1000, "adapter_config.json": b"{}", "more/a b": b""}
    assert any_bucket.publish("adapters/v000007", files, {"step": 7}) is True
    assert any_bucket.publish("adapters/v000007/", files, {"step": 8}) is False
    for other in {**files, "adapter_config.json": b"[]"}, {**files, "new": b""}, {"adapter_config.json": b"{}"}:
        with pytest.raises(bucket.Conflict, match="adapters/v000007"):
            any_bucket.publish("adapters/v000007", other)
    manifest, got = any_bucket.fetch("adapters/v000007")
    assert got == files and manifest["step"] == 7 and manifest["format"] == "async-grpo-manifest" and manifest["version"] == 1
    assert manifest["files"]["adapter_config.json"] == {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    with pytest.raises(ValueError):
        any_bucket.publish("adapters/v000008", files, {"canary": float("nan")})

def test_of_8_racing_publishers_one_creates_and_the_rest_agree(any_bucket):
    start, files = threading.Barrier(8), {"a": b"1" * 100_000, "b": b"2"}

    def publish(publisher):
        start.wait()
        return any_bucket.publish("adapters/v000001", files, {"publisher": publisher})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(publish, range(8))) == [False] * 7 + [True]
    assert any_bucket.fetch("adapters/v000001")[1] == files
    assert list(any_bucket.list()) == [f"adapters/v000001/{name}" for name in ("a", "b", "manifest.json")]

def test_a_manifest_seen_before_its_files_is_waited_for(any_bucket, tmp_path):
    """A store that reorders. The file is written when, and only when, the reader has missed it."""
    source = bucket.open_bucket(tmp_path / "source")
    source.publish("p", {"a": b"1", "b": b"22"})
    for name in "a", "manifest.json":
        any_bucket.put(f"p/{name}", source.get(f"p/{name}"))
    missed, get = threading.Event(), any_bucket.get

    def watched(key):
        try:
            return get(key)
        except bucket.NotFound:
            missed.set()
            raise

    any_bucket.get = watched
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(any_bucket.fetch, "p", wait_s=30)
        assert missed.wait(30) and not fetched.done()
        any_bucket.put("p/b", b"22")
        assert fetched.result(30)[1] == {"a": b"1", "b": b"22"}

@pytest.mark.parametrize("damage", [b"", b"2", b"333", b"22222"], ids=["empty", "short", "flipped", "long"])
def test_damaged_files_are_never_returned(any_bucket, damage):
    any_bucket.publish("p", {"a": b"1", "b": b"222"})
    any_bucket.put("p/b", damage)
    with pytest.raises(bucket.Corrupt, match=r"p/b"):
        any_bucket.fetch("p", wait_s=0.1)

@pytest.mark.parametrize("manifest", [
    b"", b"[]", b"{}", b"null", b"\xff", b'{"format": "async-grpo-manifest", "version": 2, "files": {}}',
    b'{"format": "async-grpo-manifest", "version": 1, "files": []}',
    b'{"format": "async-grpo-manifest", "version": 1, "files": {"../../evil": {"size": 1, "sha256": "0"}}}',
    b'{"format": "async-grpo-manifest", "version": 1, "files": {"manifest.json": {"size": 1, "sha256": "0"}}}',
    b'{"format": "async-grpo-manifest", "version": 1, "files": {"a": {"size": 1}}}'], ids=range(10))
def test_a_manifest_that_is_not_ours_is_corrupt(tmp_path, manifest):
    store = bucket.open_bucket(tmp_path)
    store.put("p/manifest.json", manifest)
    with pytest.raises(bucket.Corrupt, match="p/manifest.json"):
        store.fetch("p", wait_s=0)

def test_what_is_pruned_during_a_fetch_is_not_found_and_not_waited_for(any_bucket):
    any_bucket.publish("adapters/v000001", {"a": b"1", "b": b"2"})
    get = any_bucket.get

    def prune_after_the_manifest(key):
        data = get(key)
        any_bucket.get = get
        any_bucket.delete_prefix("adapters/v000001/")
        return data

    any_bucket.get = prune_after_the_manifest
    with pytest.raises(bucket.NotFound):
        any_bucket.fetch("adapters/v000001", wait_s=60)

def test_pruning_takes_the_manifest_first(any_bucket):
    any_bucket.publish("adapters/v000001", {"a": b"1", "z": b"2"})
    any_bucket.put("adapters/v000002/a", b"other")
    deleted, delete = [], any_bucket.delete
    any_bucket.delete = lambda key: deleted.append(key) or delete(key)
    any_bucket.delete_prefix("adapters/v000001/")
    assert deleted == [f"adapters/v000001/{name}" for name in ("manifest.json", "a", "z")]
    assert list(any_bucket.list()) == ["adapters/v000002/a"]

def test_the_probe_finds_that_create_if_absent_is_honoured_and_leaves_nothing(any_bucket):
    assert any_bucket.probe() is True and any_bucket.conditional and list(any_bucket.list()) == []

def test_check_prints_a_table_of_guarantees_that_all_hold(any_bucket, capsys):
    assert bucket.main(["check", any_bucket.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"check {any_bucket.address} ") and len(lines) == 12 and all(line.startswith("ok  ") for line in lines[1:])
    assert list(any_bucket.list()) == []

# A folder

def test_a_file_listing_equals_sorting_all_keys_by_their_bytes(tmp_path):
    """Oracle: list = sort, filter by prefix, filter by start_after; also where a folder's name begins a neighbour's."""
    store, draw = bucket.open_bucket(tmp_path), random.Random(0)
    for _ in range(150):
        with contextlib.suppress(FileExistsError, IsADirectoryError, NotADirectoryError):
            store.put_new("/".join(draw.choice(["a", "a-", "a0", "b", "é", "a b", "a.b"]) for _ in range(draw.randint(1, 4))), b"")
    keys = sorted((path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()), key=str.encode)
    assert len(keys) > 40
    for _ in range(300):
        key, other = draw.choice(keys), draw.choice(keys)
        prefix, after = key[:draw.randint(0, len(key))], draw.choice(["", other, other[:-1], other + "/", other + "~", "zz", key])
        assert list(store.list(prefix, after)) == [key for key in keys if key.startswith(prefix) and key > after]

def test_listing_a_prefix_reads_no_other_folder(tmp_path, monkeypatch):
    store = bucket.open_bucket(tmp_path)
    for key in "groups/a", "steps/000001.json", "parts/000001/000", "parts/000002/000", "parts/000003/000", "parts2/x":
        store.put_new(key, b"")
    read, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(Path(path).relative_to(tmp_path).as_posix()) or scandir(path))
    assert list(store.list("steps/")) == ["steps/000001.json"] and read == ["steps"]
    read.clear()
    assert list(store.list("parts/", start_after="parts/000002/000")) == ["parts/000003/000"]
    assert read == ["parts", "parts/000002", "parts/000003"]

def test_32_writers_in_4_processes_have_one_winner_per_key(tmp_path):
    code = """if True:
        import sys, bucket
        from concurrent.futures import ThreadPoolExecutor
        store, me = bucket.open_bucket(sys.argv[1]), int(sys.argv[2])
        print("ready", flush=True)
        sys.stdin.readline()
        with ThreadPoolExecutor(8) as pool:
            jobs = [(key, me * 8 + thread) for key in range(20) for thread in range(8)]
            for (key, writer), won in zip(jobs, pool.map(lambda job: store.put_new(f"steps/{job[0]}", b"%d" % job[1]), jobs)):
                if won:
                    print(key, writer)
        """
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(bucket_process(sys.executable, "-c", code, str(tmp_path), str(i), stdin=subprocess.PIPE,
                                                      cwd=Path(BUCKET_PY).parent)) for i in range(4)]
        assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 4
        won = [line.split() for writer in writers for line in writer.communicate("go\n")[0].splitlines()]
    assert sorted(int(key) for key, _ in won) == list(range(20))
    store = bucket.open_bucket(tmp_path)
    assert all(store.get(f"steps/{key}") == writer.encode() for key, writer in won)

@pytest.mark.parametrize("call", ["put", "put_new"])
def test_a_killed_writer_leaves_the_old_object(tmp_path, call):
    code = f"""if True:
        import sys, bucket
        class Half:
            is_read = False
            def read(self, size):
                if self.is_read:
                    print("half", flush=True)
                    sys.stdin.read()
                self.is_read = True
                return b"half of the new object"
        bucket.open_bucket({str(tmp_path)!r}).{call}("members/a", Half())
        """
    store = bucket.open_bucket(tmp_path)
    if call == "put":
        store.put("members/a", b"old")
    with bucket_process(sys.executable, "-c", code, stdin=subprocess.PIPE, cwd=Path(BUCKET_PY).parent) as writer:
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdin.close()
    assert len(os.listdir(tmp_path / "members")) == (2 if call == "put" else 1), "the temp file is there, or this tested nothing"
    if call == "put":
        assert store.get("members/a") == b"old" and list(store.list()) == ["members/a"]
    else:
        assert list(store.list()) == [] and store.put_new("members/a", b"new")

def test_a_learners_probe_and_a_starting_server_sweep_what_killed_writers_left(tmp_path):
    """After a day: no write takes that long. What is younger may be in the making."""
    def started():
        with bucket_serving(tmp_path):
            pass

    for sweep in bucket.open_bucket(tmp_path).probe, started:
        for name in "old", "young":
            (tmp_path / f"a/.tmp-{name}-folder").mkdir(parents=True, exist_ok=True)
            (tmp_path / f"a/.tmp-{name}-folder/file").write_bytes(b"half")
            (tmp_path / f"a/.tmp-{name}").write_bytes(b"half")
        for path in (tmp_path / "a").glob(".tmp-old*"):
            os.utime(path, (time.time() - 90_000,) * 2)
        sweep()
        assert sorted(os.listdir(tmp_path / "a")) == [".tmp-young", ".tmp-young-folder"]

def test_a_killed_publisher_leaves_nothing_and_the_next_succeeds(tmp_path):
    code = f"""if True:
        import os, sys, bucket
        os.rename = lambda *names: (print("all but the rename", flush=True), sys.stdin.read())
        bucket.open_bucket({str(tmp_path)!r}).publish("adapters/v000001", {{"a": b"1"}})
        """
    with bucket_process(sys.executable, "-c", code, stdin=subprocess.PIPE, cwd=Path(BUCKET_PY).parent) as publisher:
        assert publisher.stdout.readline() == "all but the rename\n"
        publisher.send_signal(signal.SIGKILL)
        publisher.wait()
        publisher.stdin.close()
    store = bucket.open_bucket(tmp_path)
    assert list(store.list()) == [] and store.publish("adapters/v000001", {"a": b"2"})
    assert store.fetch("adapters/v000001")[1] == {"a": b"2"}

def test_bytes_are_durable_before_their_name_and_the_folder_after_it(tmp_path, monkeypatch):
    """The order is the crash-safety argument, so it is recorded at the system calls."""
    calls = []

    def recorded(name, call):
        def record(*args, **options):
            target = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[1])
            calls.append((name, Path(target).relative_to(tmp_path).as_posix()))
            return call(*args, **options)
        return record

    for name in "fsync", "link", "replace", "rename":
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    store = bucket.open_bucket(tmp_path)
    store.put_new("steps/1", b"1")
    assert [(name, re.sub(r"\.tmp-\w+", "TEMP", path)) for name, path in calls] == [
        ("fsync", "."), ("fsync", "steps/TEMP"), ("link", "steps/1"), ("fsync", "steps")]
    calls.clear()
    store.put("steps/1", b"2")
    assert [name for name, _ in calls] == ["fsync", "replace", "fsync"]
    calls.clear()
    store.publish("adapters/v1", {"a": b"1"})
    assert calls[-2:] == [("rename", "adapters/v1"), ("fsync", "adapters")]
    assert ("fsync", "whole") in [(name, Path(path).name) for name, path in calls]

def test_listings_never_show_an_unfinished_object_or_adapter(tmp_path):
    """A reader lists and reads as fast as it can while a writer publishes: whatever it sees is complete."""
    store, done, seen = bucket.open_bucket(tmp_path), threading.Event(), 0

    def write():
        for i in range(40):
            store.put_new(f"groups/{i:06d}", b"%d" % i * 50_000)
            store.publish(f"adapters/v{i:06d}", {"a": b"1", "b": b"2"})
        done.set()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not done.is_set() and not writing.done():
            for key in store.list("groups/"):
                assert store.get(key) == b"%d" % int(key[-6:]) * 50_000
                seen += 1
            for name in (tmp_path / "adapters").glob("v*"):
                assert sorted(os.listdir(name)) == ["a", "b", "manifest.json"]
        writing.result()
    assert seen > 40

def test_writing_goes_on_while_emptied_folders_vanish(tmp_path):
    """`delete` removes a folder with its last object; a writer that had just made sure of it must not fail."""
    store = bucket.open_bucket(tmp_path)

    def churn(writer):
        for _ in range(100):
            assert store.put_new(f"parts/000001/{writer}", b"x")
            store.delete(f"parts/000001/{writer}")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert os.listdir(tmp_path) == []

@pytest.mark.parametrize("lacking", [["link"], ["link", "rename", "replace", "chmod"]], ids=["links", "links, rename and chmod"])
def test_a_mount_without(tmp_path, monkeypatch, lacking, caplog):
    """As on FAT and mountpoint-s3: objects and adapters are written all the same, and the probe says one learner only."""
    def refuse(*args, **options):
        raise OSError(95, "Operation not supported")

    for name in lacking:
        monkeypatch.setattr(os, name, refuse)
    store = bucket.open_bucket(tmp_path)
    assert store.put_new("steps/1", b"1") and not store.put_new("steps/1", b"2") and store.get("steps/1") == b"1"
    store.put("members/a", b"1")
    store.put("members/a", b"2")
    assert store.publish("adapters/v1", {"a": b"1"}) and not store.publish("adapters/v1", {"a": b"1"})
    with pytest.raises(bucket.Conflict):
        store.publish("adapters/v1", {"a": b"2"})
    assert store.get("members/a") == b"2" and store.fetch("adapters/v1")[1] == {"a": b"1"}
    assert list(store.list()) == ["adapters/v1/a", "adapters/v1/manifest.json", "members/a", "steps/1"]
    assert store.probe() is False and store.conditional is False
    assert [record.levelname for record in caplog.records].count("WARNING") == 1

def test_an_object_and_objects_below_it_cannot_share_a_folder_bucket(tmp_path):
    store = bucket.open_bucket(tmp_path)
    store.put("a", b"")
    store.put("b/c", b"")
    for key in "a/b", "b":
        with pytest.raises((FileExistsError, IsADirectoryError, NotADirectoryError), match=f"{key[0]}"):
            store.put(key, b"")
    for key in "a/b", "b":
        with pytest.raises(bucket.NotFound):
            store.get(key)
        store.delete(key)
    assert list(store.list()) == ["a", "b/c"]

# The S3 client

def test_the_signature_is_that_of_amazons_worked_examples():
    """The examples of [2] and its sibling pages, on examplebucket at 20130524T000000Z."""
    signed = {"host": "examplebucket.s3.amazonaws.com", "x-amz-date": "20130524T000000Z",
              "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    sign = lambda path, query, headers: bucket.authorization(
        "id", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1", ("GET", path, query), headers).partition(" Signature=")[2]
    assert sign("/test.txt", {}, {**signed, "range": "bytes=0-9"}) == "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    assert sign("/", {"lifecycle": ""}, signed) == "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
    assert sign("/", {"prefix": "J", "max-keys": "2"}, signed) == "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"

@pytest.mark.parametrize("fault", ["500", "503", "502", "429", "409", "408", "drop", "cut", "lost"])
def test_a_passing_fault_is_tried_again(bucket_faults, fault, caplog):
    store = bucket_faults.bucket
    store.put("groups/a", b"1" * 1000)
    reads = [(lambda: store.get("groups/a"), b"1" * 1000), (lambda: list(store.list("groups/")), ["groups/a"])]
    writes = [(lambda: store.put("groups/a", b"1" * 1000), None), (lambda: store.delete("groups/b"), None),
              (lambda: store.put_new("steps/1", b"mine"), True)]
    # An answer to a write has no body that could be cut.
    for call, want in reads if fault == "cut" else reads + writes:
        caplog.clear()
        bucket_faults.requests.clear()
        bucket_faults.script[:] = [fault, fault]
        assert call() == want
        # Two faults are two log lines. A put_new whose reply was lost reads the object back: one request more.
        assert len(bucket_faults.requests) in (3, 4) and "try 2 of 10" in caplog.text and "try 3 of 10" in caplog.text
    assert fault == "cut" or store.get("steps/1") == b"mine"

@pytest.mark.parametrize("fault", ["lost", "500 landed"])
def test_the_412_of_ones_own_earlier_try_is_a_success(bucket_faults, fault):
    """The first try landed, its reply was lost; the retry is refused by our own object."""
    bucket_faults.script[:] = [fault]
    assert bucket_faults.bucket.put_new("steps/1", b"mine") is True
    assert [method for method, *_ in bucket_faults.requests] == ["PUT", "PUT", "GET"]
    assert bucket_faults.bucket.put_new("steps/1", b"mine") is False, "a 412 at the first try is somebody else's object, whatever its bytes"
    bucket_faults.script[:] = ["drop"]
    assert bucket_faults.bucket.put_new("steps/1", b"theirs") is False
    assert bucket_faults.bucket.get("steps/1") == b"mine"

def test_a_store_that_stays_down_is_given_up_after_bounded_tries(bucket_faults, monkeypatch):
    monkeypatch.setattr(bucket, "TRIES", 4)
    bucket_faults.script[:] = ["503"] * 9
    with pytest.raises(bucket.BucketError, match=r"^GET http://127.*/steps/1: 503 SlowDown injected \(try 4\); check endpoint") as caught:
        bucket_faults.bucket.get("steps/1")
    assert len(bucket_faults.requests) == 4 and "\n" not in str(caught.value)
    with pytest.raises(bucket.BucketError, match="Connection refused"):
        bucket.open_bucket("http://127.0.0.1:9/b").get("a")

def test_refusals_are_not_tried_again_and_say_what_to_do(bucket_faults, monkeypatch):
    store = bucket_faults.bucket
    with pytest.raises(bucket.NotFound):
        store.get("steps/1")
    store.secret = "wrong"
    with pytest.raises(bucket.BucketError, match="403 SignatureDoesNotMatch .*check the AWS_"):
        store.get("steps/1")
    store.key_id = ""
    with pytest.raises(bucket.BucketError, match="403 AccessDenied .*set AWS_ACCESS_KEY_ID"):
        store.put("steps/1", b"1" * 3_000_000)
    missing = lambda handler: handler.reply(404, {}, b"<Error><Code>NoSuchBucket</Code></Error>")
    bucket_faults.script[:] = [missing]
    with pytest.raises(bucket.BucketError, match="NoSuchBucket") as caught:
        store.get("steps/1")
    assert not isinstance(caught.value, bucket.NotFound), "a bucket that does not exist must not look like an empty one"
    assert len(bucket_faults.requests) == 4

def test_a_body_that_trickles_or_stalls_is_cut_off_and_read_again(bucket_faults, monkeypatch):
    monkeypatch.setattr(bucket, "STALL_S", 0.2)
    monkeypatch.setattr(bucket, "SLOWEST_BYTES_PER_S", 1e9)
    ended = []

    def trickle(handler, stalls):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not ended and not (stalls and handler.wfile.write(b"x")):
                handler.wfile.write(b"x")
                time.sleep(0.02)
            handler.connection.recv(1)
        handler.hang_up()

    bucket_faults.bucket.put("a", b"whole")
    for stalls in False, True:
        bucket_faults.script[:] = [lambda handler: trickle(handler, stalls)]
        start = time.monotonic()
        assert bucket_faults.bucket.get("a") == b"whole" and 0.15 < time.monotonic() - start < 5
    ended.append(True)

def test_an_upload_may_take_longer_than_a_time_out(bucket_faults, monkeypatch):
    """A body handed over as bytes would have to leave within CONNECT_S as a whole: 168 MB at 10 MB/s never did."""
    monkeypatch.setattr(bucket, "CONNECT_S", 0.3)
    received = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)

    def slow_store():
        connection, _ = listener.accept()
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(1024)
            length = int(re.search(rb"(?i)content-length: (\d+)", data)[1])
            body = len(data.split(b"\r\n\r\n", 1)[1])
            while body < length:
                body += len(connection.recv(500_000))
                time.sleep(0.005)
            received.append(body)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=slow_store, daemon=True)
    thread.start()
    start = time.monotonic()
    bucket.open_bucket(f"http://127.0.0.1:{listener.getsockname()[1]}/b").put("a", bytes(16_000_000))
    assert received == [16_000_000] and time.monotonic() - start > 0.3
    thread.join()
    listener.close()

@pytest.mark.parametrize("skew_s", [3600, -3600])
@pytest.mark.parametrize("any_bucket", ["serve", "seaweedfs"], indirect=True)
def test_a_wrong_clock_is_corrected_by_the_stores_date(any_bucket, skew_s, bucket_fast, caplog):
    any_bucket.skew_s = skew_s
    assert any_bucket.put_new("a", b"1") and any_bucket.get("a") == b"1"
    assert abs(any_bucket.skew_s) < 5 and caplog.text.count("RequestTimeTooSkewed") == 1

@pytest.mark.parametrize("status, headers, body", [
    (301, {"x-amz-bucket-region": "eu-west-3"}, b""),
    (400, {}, b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-3</Region></Error>")])
def test_a_wrong_region_is_corrected_by_the_stores_answer(bucket_faults, status, headers, body):
    bucket_faults.script[:] = [lambda handler: handler.reply(status, headers, body)]
    assert bucket_faults.bucket.put_new("a", b"1") is True
    scopes = [re.search("Credential=K+/[0-9]+/([^/]+)/", headers["authorization"])[1] for _, _, headers, _ in bucket_faults.requests]
    assert scopes == ["us-east-1", "eu-west-3"] and bucket_faults.bucket.region == "eu-west-3"
    amazon = bucket.open_bucket("s3://b")
    reply = bucket.requests.Response()
    reply.status_code, reply.headers["x-amz-bucket-region"], reply._content = 301, "eu-west-3", b""
    assert amazon._corrected(reply) and amazon.host == "s3.eu-west-3.amazonaws.com" and not amazon._corrected(reply)

def test_netrc_does_not_replace_the_signature(bucket_served, bucket_aws, monkeypatch, tmp_path):
    """requests puts ~/.netrc's password over the Authorization header of a session that trusts the environment."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert bucket.requests.utils.get_netrc_auth("http://127.0.0.1/") == ("me", "secret"), "or this tests nothing"
    assert bucket.open_bucket(f"{bucket_served[0]}/netrc").put_new(os.urandom(4).hex(), b"1")

def test_requests_carry_the_encoded_key_the_session_token_and_no_dot_segments(bucket_faults, monkeypatch):
    """`~` stays, `%7E` in a key is encoded again, a `..` never gets here; the endpoint's own path stays in front."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"{bucket_faults.url}/storage/v1")
    store = bucket.open_bucket("s3://b/p q")
    empty = lambda handler: handler.reply(200, {}, b"")
    bucket_faults.script[:] = [empty, empty]
    store.put("a~/%7E/+ é/..x", b"1")
    store.get("b")
    (method, path, headers, body), (_, _, plain, _) = bucket_faults.requests
    assert (method, path, body) == ("PUT", "/storage/v1/b/p%20q/a~/%257E/%2B%20%C3%A9/..x", b"1")
    signed = re.search("SignedHeaders=([^,]*)", headers["authorization"])[1]
    assert signed == "host;x-amz-content-sha256;x-amz-date;x-amz-security-token" and headers["x-amz-security-token"] == "token"
    assert headers["x-amz-content-sha256"] == hashlib.sha256(b"1").hexdigest() and headers["host"] == bucket_faults.url[7:]
    assert "content-encoding" not in headers and plain["accept-encoding"] == "identity"

def test_credentials_come_from_the_environment_else_from_the_profile(bucket_aws, monkeypatch, tmp_path):
    assert bucket.credentials() == [*BUCKET_KEYS.values(), ""]
    (tmp_path / ".aws").mkdir()
    file = tmp_path / ".aws/credentials"
    file.write_text("[default]\naws_access_key_id = D\naws_secret_access_key = x%y\n"
                    "[other]\naws_access_key_id=O\naws_secret_access_key=Z\naws_session_token=T\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert bucket.credentials() == [*BUCKET_KEYS.values(), ""]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert bucket.credentials() == ["O", "Z", "T"]
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(bucket.BadKey, match="absent"):
        bucket.credentials()
    monkeypatch.delenv("AWS_PROFILE")
    assert bucket.credentials() == ["D", "x%y", ""]
    file.write_text("no section")
    with pytest.raises(bucket.BadKey, match="credentials"):
        bucket.credentials()
    file.unlink()
    assert bucket.credentials() == ["", "", ""]

def test_an_answer_that_is_no_listing_is_an_error_and_no_empty_bucket(bucket_faults):
    bucket_faults.script[:] = [lambda handler: handler.reply(200, {}, b"<html>Sign in<br></html>")]
    with pytest.raises(bucket.BucketError, match="no S3 listing"):
        list(bucket_faults.bucket.list())

@pytest.fixture
def bucket_clock(monkeypatch):
    """The clock of the client and of a store: waiting moves it, and takes no time."""
    clock = SimpleNamespace(**{name: getattr(time, name) for name in dir(time)}, now_s=0.0)
    clock.monotonic, clock.sleep = lambda: clock.now_s, lambda seconds: setattr(clock, "now_s", clock.now_s + seconds)
    monkeypatch.setattr(bucket, "time", clock)
    return clock

@pytest.mark.parametrize("habit, wrong", [
    ("late", {"list has every key at once, in byte order, over pages", "list starts after a key"}), ("unseen", set()), ("twice", set()),
    ("empty", {"an empty object is kept"}), ("careless", {"put_new creates once, and the first bytes stay", "of 16 racing writers one wins, and its bytes stay", "publish creates once"})])
def test_check_names_exactly_what_a_store_gets_wrong(bucket_served, bucket_aws, bucket_clock, habit, wrong):
    with bucket_faulty(bucket_served, habits=[habit], clock=bucket_clock.monotonic) as faults:
        assert {claim for claim, holds, _ in bucket.check(faults.bucket) if not holds} == wrong
        assert faults.bucket.probe() is (habit != "careless")

@pytest.mark.parametrize("habits", ["late", "unseen", "reordered", "empty", "twice", "late unseen reordered empty twice errors"])
def test_one_writer_wins_and_readers_get_its_bytes_whatever_the_store_does(bucket_served, bucket_aws, bucket_clock, habits):
    """A reader elsewhere finds the manifest by listing, perhaps before its files, and waits for them; 60 s later all is listed."""
    with bucket_faulty(bucket_served, habits=habits, clock=bucket_clock.monotonic, rate=0.2 * ("errors" in habits)) as faults:
        store, reader = faults.bucket, bucket.open_bucket(faults.bucket.address)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda writer: store.put_new("steps/000001.json", b"%d" % writer), range(8)))
        # On a store that hides what it has, a winner whose reply was lost cannot know that it won: it reads the truth.
        assert sum(won) == 1 or sum(won) == 0 and "errors" in habits
        files = {"a": b"1" * 1000, "b": b"2", "none": b""}
        for version in range(3):
            store.publish(f"adapters/v{version}", files)
        started = bucket_clock.now_s
        while "adapters/v2/manifest.json" not in reader.list("adapters/"):
            assert bucket_clock.now_s < started + 70
            bucket_clock.sleep(1)
        assert reader.fetch("adapters/v2")[1] == files
        bucket_clock.sleep(60)
        assert list(reader.list()) == [f"adapters/v{version}/{name}" for version in range(3) for name in ("a", "b", "manifest.json", "none")
                                       if name != "none" or "empty" not in habits] + ["steps/000001.json"]
        assert sum(won) == 0 or reader.get("steps/000001.json") == b"%d" % won.index(True)

def test_a_store_that_lacks_conditions_serves_one_writer(bucket_faults, caplog):
    """501 as from B2: put_new looks first instead, and says so once."""
    lacking = lambda handler: handler.reply(501, {}, b"<Error><Code>NotImplemented</Code></Error>")
    bucket_faults.script[:] = [lacking]
    store = bucket_faults.bucket
    assert store.put_new("a", b"1") and not store.put_new("a", b"2") and store.get("a") == b"1"
    assert store.conditional is False and store.probe() is False and caplog.text.count("one learner only") == 1

def test_rclone_ignores_conditions_and_the_probe_finds_it(bucket_aws, tmp_path, capsys):
    """After the probe put_new looks before it writes, so that one writer is safe."""
    (tmp_path / "b").mkdir()
    port = bucket_port()
    command = [Path(sys.executable).with_name("rclone"), "serve", "s3", tmp_path, "--addr", f"127.0.0.1:{port}",
               "--auth-key", ",".join(BUCKET_KEYS.values())]
    with bucket_process(*command, stderr=subprocess.DEVNULL):
        store = bucket.open_bucket(f"http://127.0.0.1:{port}/b/run")
        assert store.conditional and store.probe() is False and not store.conditional
        assert store.put_new("steps/1", b"1") and not store.put_new("steps/1", b"2") and store.get("steps/1") == b"1"
        assert store.publish("adapters/v1", {"a": b"1"}) and not store.publish("adapters/v1", {"a": b"1"})
        assert bucket.main(["check", store.address]) == 1
    out = capsys.readouterr().out
    assert "NO  put_new creates once" in out and "ok  list has every key" in out

def test_where_conditions_are_ignored_one_learner_works_and_a_second_is_refused(grpo_template, grpo_start, bucket_aws, tmp_path):
    """rclone's S3 server answers 200 to every conditional write: two learners could decide one step twice."""
    shutil.copytree(grpo_template, tmp_path / "b" / "run")
    port = bucket_port()
    with bucket_process(Path(sys.executable).with_name("rclone"), "serve", "s3", tmp_path, "--addr", f"127.0.0.1:{port}",
                        "--auth-key", ",".join(BUCKET_KEYS.values()), stderr=subprocess.DEVNULL):
        flags = ["--role", "learner", "--bucket", f"http://127.0.0.1:{port}/b/run", "--eval-steps", -1]
        first = grpo_start(*flags, "--steps", 99, **BUCKET_KEYS)
        first.until("^step=8 ")
        second = grpo_start(*flags, **BUCKET_KEYS)
        assert second.end() == 1 and "ignores create-if-absent, so it can have one learner" in second.text
        assert first.process.is_alive()

# The server

def test_boto3_agrees_with_our_server(bucket_served):
    """boto3 as an oracle: what Amazon's own client writes, reads, lists and is refused."""
    client, keys = bucket_boto(bucket_served[0]), ["a b+c%25", "ä/ö~", "n/1", "n/2", "n/3"]
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        client.head_bucket(Bucket="boto")
    assert caught.value.response["Error"]["Code"] == "404"
    client.create_bucket(Bucket="boto")
    client.head_bucket(Bucket="boto")
    for key in keys:
        client.put_object(Bucket="boto", Key=key, Body=key.encode(), IfNoneMatch="*")
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        client.put_object(Bucket="boto", Key="n/1", Body=b"other", IfNoneMatch="*")
    assert caught.value.response["Error"]["Code"] == "PreconditionFailed"
    client.put_object(Bucket="boto", Key="n/2", Body=b"")
    head = client.head_object(Bucket="boto", Key="n/1")
    assert head["ContentLength"] == 3 and abs(head["LastModified"].timestamp() - time.time()) < 60
    assert [client.get_object(Bucket="boto", Key=key)["Body"].read() for key in keys[:4]] == [*map(str.encode, keys[:3]), b""]
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="boto", PaginationConfig={"PageSize": 2})
    assert [item["Key"] for page in pages for item in page["Contents"]] == sorted(keys, key=str.encode)
    page = client.list_objects_v2(Bucket="boto", Prefix="n/", StartAfter="n/1")
    assert [(item["Key"], item["Size"]) for item in page["Contents"]] == [("n/2", 0), ("n/3", 3)] and not page["IsTruncated"]
    client.delete_object(Bucket="boto", Key="n/1")
    client.delete_object(Bucket="boto", Key="n/1")
    with pytest.raises(client.exceptions.NoSuchKey):
        client.get_object(Bucket="boto", Key="n/1")
    assert "Contents" not in client.list_objects_v2(Bucket="boto", Prefix="none")
    for unsupported in (lambda: client.copy_object(Bucket="boto", Key="c", CopySource="boto/n/3"), lambda: client.get_object(Bucket="boto", Key="n/3", Range="bytes=0-1"), lambda: client.delete_bucket(Bucket="boto"),
                        lambda: client.create_multipart_upload(Bucket="boto", Key="m"), lambda: client.get_object_acl(Bucket="boto", Key="n/3"),
                        lambda: client.list_objects_v2(Bucket="boto", Delimiter="/")):
        with pytest.raises(botocore.exceptions.ClientError) as caught:
            unsupported()
        assert caught.value.response["Error"]["Code"] in ("NotImplemented", "501")

def bucket_request(url, method, path, headers={}, body=b"", secret=BUCKET_KEYS["AWS_SECRET_ACCESS_KEY"], date=None, signed_body=None, omit=()):
    """A request with each part of its signature open to falsification: (status, S3 code)."""
    host = url.removeprefix("http://")
    stamp = bucket.stamp_at(date or time.time())
    signed = {"host": host, "x-amz-date": stamp, "x-amz-content-sha256": hashlib.sha256(body if signed_body is None else signed_body).hexdigest()}
    authorization = bucket.authorization(BUCKET_KEYS["AWS_ACCESS_KEY_ID"], secret, "us-east-1", (method, path.partition("?")[0], {}), signed)
    for name in omit:
        authorization = re.sub(f"{name};|;{name}(?=,)", "", authorization)
    connection = http.client.HTTPConnection(host, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body, {**signed, "Authorization": authorization, **headers})
        reply = connection.getresponse()
        return reply.status, (re.findall(r"<Code>(\w+)</Code>", reply.read().decode()) or [""])[0]

def test_only_what_the_keys_signed_passes(bucket_served):
    url, folder = bucket_served
    assert bucket_request(url, "PUT", "/auth/a", body=b"1") == (200, "")
    assert bucket_request(url, "PUT", "/auth/b", body=b"1", secret="wrong") == (403, "SignatureDoesNotMatch")
    assert bucket_request(url, "PUT", "/auth/b", body=b"1", headers={"Authorization": "Basic eDp5"}) == (403, "AccessDenied")
    assert bucket_request(url, "PUT", "/auth/b", body=b"1", headers={"x-amz-meta-unsigned": "1"}) == (403, "AccessDenied")
    assert bucket_request(url, "PUT", "/auth/b?x-id=unsigned", body=b"1") == (403, "SignatureDoesNotMatch")
    assert bucket_request(url, "PUT", "/auth/b", body=b"2", signed_body=b"1") == (400, "XAmzContentSHA256Mismatch")
    assert bucket_request(url, "PUT", "/auth/b", body=b"1", date=time.time() - 1000) == (403, "RequestTimeTooSkewed")
    assert bucket_request(url, "PUT", "/auth/b", body=b"1", date=time.time() + 1000) == (403, "RequestTimeTooSkewed")
    assert bucket_request(url, "PUT", "/auth/c", body=b"1", date=time.time() - 800) == (200, "")
    for name in "host", "x-amz-date", "x-amz-content-sha256":
        assert bucket_request(url, "GET", "/auth/a", omit=[name]) == (403, "AccessDenied")
    assert sorted(path.name for path in (folder / "auth").iterdir()) == ["a", "c"]

@pytest.mark.parametrize("path", ["/../secret", "/b/../../secret", "/b/..%2f..%2fsecret", "/%2e%2e/secret", "/b/%2e%2e/%2e%2e/secret", "//../secret",
                                  "/b/..\\..\\secret", "/b/%5c..%5csecret", "/b/%00", "/b/.tmp-x", "/b//secret", "/b/%ff/..", "/..", "/.", "b", "*",
                                  "/b?list-type=2&prefix=../../", "/b?list-type=2&prefix=/", "/..?list-type=2", "/b?list-type=2&max-keys=x"])
def test_no_path_leads_out_of_the_served_folder(path, tmp_path, bucket_open):
    """On a server without keys, so that nothing but the path check stands in the way."""
    url, folder = bucket_open
    (folder.parent / "secret").write_text("secret")
    before = sorted(folder.parent.iterdir())
    for method in "GET", "PUT", "DELETE", "HEAD":
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        with contextlib.closing(connection):
            connection._validate_path = lambda url: None
            connection.request(method, path, b"evil" if method == "PUT" else None)
            reply = connection.getresponse()
            assert reply.status in (400, 404, 501) or (method, path[:3], reply.status) == ("GET", "/b?", 200)
            assert reply.read() != b"secret"
    assert sorted(folder.parent.iterdir()) == before and (folder.parent / "secret").read_text() == "secret"
    assert not [path for path in folder.rglob("*") if path.is_file()]

@pytest.fixture(scope="module")
def bucket_open(tmp_path_factory):
    """Our server without keys, which loopback may have: (url, folder)."""
    folder = tmp_path_factory.mktemp("open") / "folder"
    folder.mkdir()
    with bucket_serving(folder, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="") as url:
        yield url, folder

@pytest.mark.parametrize("request_text, status", [
    (b"GET /b/k HTTP/1.1\r\nHost: h\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431), (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
    (b"GET /b/k HTTP/1.1\r\nx: " + b"a" * 70000 + b"\r\n\r\n", 431), (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400), (b"BREW /b/k HTTP/1.1\r\n\r\n", 501),
    (b"PUT /b/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 501), (b"PUT /b/k HTTP/1.1\r\n\r\n", 501),
    (b"PUT /b/k HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 501), (b"PUT /b/k HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 501),
    (b"PUT /b/k HTTP/1.1\r\nContent-Length: 3\r\nIf-None-Match: \"etag\"\r\n\r\nabc", 501)])
def test_requests_out_of_bounds_are_refused(request_text, status, bucket_open):
    with socket.create_connection(bucket_open[0].removeprefix("http://").split(":"), timeout=10) as connection:
        connection.sendall(request_text)
        assert re.search(rb"(?s)^HTTP/1.1 %d |<p>Error code: %d</p>|Error code: %d" % (status, status, status), connection.recv(65536))

def test_an_upload_cut_short_stores_nothing(bucket_open):
    url, folder = bucket_open
    with socket.create_connection(url.removeprefix("http://").split(":"), timeout=10) as connection:
        connection.sendall(b"PUT /cut/k HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf")
        connection.shutdown(socket.SHUT_WR)
        assert b" 400 " in connection.recv(65536)
    assert os.listdir(folder / "cut") == []
    (folder / "cut").rmdir()

def test_a_refused_upload_keeps_the_connection_and_a_call_takes_no_40_ms(bucket_served, bucket_aws):
    """Nagle's algorithm against delayed acknowledgements would cost 40 ms a call; an unread body would garble the next request."""
    store, took = bucket.open_bucket(f"{bucket_served[0]}/latency"), []
    store.put("a", b"1" * 1_000_000)
    for _ in range(15):
        start = time.monotonic()
        assert store.put_new("a", b"2" * 100_000) is False and store.get("a")[:1] == b"1"
        took.append((time.monotonic() - start) / 2)
    connection = http.client.HTTPConnection(bucket_served[0].removeprefix("http://"), timeout=10)
    with contextlib.closing(connection):
        for _ in range(3):
            connection.request("PUT", "/latency/unsigned", bytes(3_000_000))
            reply = connection.getresponse()
            assert reply.status == 403 and b"AccessDenied" in reply.read() and connection.sock
    pools = store._session.get_adapter("http://").poolmanager.pools
    assert [pools[key].num_connections for key in pools.keys()] == [1] and sorted(took)[7] < 0.03

def test_a_large_object_passes_client_and_server_in_bounded_memory(tmp_path, size=256 << 20):
    """256 MiB here, 2 GiB by hand; peak memory, over that of the started program, is the kernel's count. Who asks for the object
    in memory pays for it once: a reply that was searched for its error code, though it was none, once took four times as much."""
    piece, file, back = random.Random(0).randbytes(1 << 20), tmp_path / "in", tmp_path / "out"
    with open(file, "wb") as out:
        out.writelines(itertools.repeat(piece, size >> 20))
    peak_of = lambda pid: int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10
    code = """if True:
        import bucket, sys
        peak = lambda: [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
        before = peak()
        if sys.argv[1] == "memory":
            assert len(bucket.open_bucket(sys.argv[2]).get(sys.argv[3])) == int(sys.argv[4])
        else:
            assert bucket.main(sys.argv[1:]) == 0
        print(peak() - before)
        """
    with bucket_process(sys.executable, BUCKET_PY, "serve", str(tmp_path), "--listen", "127.0.0.1:0", env=bucket_env()) as server:
        address = server.stdout.readline().split("url=")[1].strip() + "/b"
        grown, before = [], peak_of(server.pid)
        for command, path in ("put", file), ("get", back), ("memory", size):
            with bucket_process(sys.executable, "-c", code, command, address, "large", str(path), env=bucket_env(), cwd=Path(BUCKET_PY).parent) as client:
                grown.append(int(client.stdout.read()))
        in_memory = grown.pop()
        grown.append(peak_of(server.pid) - before)
    assert max(grown) < 32 << 20 and in_memory < 1.25 * size, (grown, in_memory)
    with open(back, "rb") as got:
        assert all(got.read(1 << 20) == piece for _ in range(size >> 20)) and got.read() == b""

def test_connections_beyond_the_limit_wait_for_a_place(tmp_path):
    code = "import bucket, sys, threading; bucket.Server.places = threading.Semaphore(2); sys.exit(bucket.main())"
    with bucket_process(sys.executable, "-c", code, "serve", str(tmp_path), "--listen", "127.0.0.1:0", cwd=Path(BUCKET_PY).parent,
                        env=bucket_env(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")) as server, contextlib.ExitStack() as stack:
        host = server.stdout.readline().split("http://")[1].strip().split(":")
        first, second, third = (stack.enter_context(socket.create_connection(host, timeout=10)) for _ in range(3))
        for connection in first, second, third:
            connection.sendall(b"HEAD /b HTTP/1.1\r\n\r\n")
        assert b" 404 " in first.recv(4096) and b" 404 " in second.recv(4096)
        third.settimeout(0.3)
        with pytest.raises(TimeoutError):
            third.recv(4096)
        first.close()
        third.settimeout(10)
        assert b" 404 " in third.recv(4096)

def test_a_served_folder_that_lacks_links_says_so_to_its_clients(tmp_path, bucket_aws):
    """Without links our server could not make one of two racing writers lose: 501 lets the client fall back to one learner."""
    code = """if True:
        import bucket, os, sys
        def link(*names):
            raise OSError(95, "Operation not supported")
        os.link = link
        sys.exit(bucket.main())
        """
    with bucket_process(sys.executable, "-c", code, "serve", str(tmp_path), "--listen", "127.0.0.1:0", cwd=Path(BUCKET_PY).parent,
                        env=bucket_env()) as server:
        store = bucket.open_bucket(server.stdout.readline().split("url=")[1].strip() + "/b")
        assert store.put_new("a", b"1") and not store.put_new("a", b"2") and store.get("a") == b"1"
        assert store.conditional is False and store.probe() is False

def test_an_open_server_is_refused_without_keys(tmp_path):
    for listen, env in [("0.0.0.0:0", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}), ("127.0.0.1:0", {"AWS_SECRET_ACCESS_KEY": ""}),
                        ("127.0.0.1", {}), ("127.0.0.1:x", {}), (":0", {}), ("127.0.0.1:70000", {})]:
        result = subprocess.run([sys.executable, BUCKET_PY, "serve", tmp_path, "--listen", listen], env=bucket_env(**env),
                                capture_output=True, text=True, timeout=20)
        assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1 and listen in result.stderr

# The command line

@pytest.mark.parametrize("main, flags", [(bucket.main, "mirror b l --every-s -1"), (bucket.main, "mirror b l --every-s nan"), (proxy.main, "--bucket b --pause-limit-s -1")])
def test_a_time_below_0_is_refused(main, flags, capfd):
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    assert ended.value.code == 2 and re.search("--(every|pause-limit)-s: invalid seconds value: '(-1|nan)'", capfd.readouterr().err)

def test_a_client_that_is_killed_leaves_no_traceback(tmp_path, capfd):
    with bucket.Server(("127.0.0.1", 0), bucket.Handler) as server:
        server.bucket, server.key_id, server.secret = bucket.FileBucket(tmp_path), "", ""
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen, server.handle_error = threading.Event(), lambda *a: (bucket.Server.handle_error(server, *a), seen.set())
        with socket.create_connection(server.server_address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
            client.send(b"GET")
        assert seen.wait(10)
        server.shutdown()
    assert capfd.readouterr().err == ""

def test_commands_copy_list_and_remove(bucket_served, bucket_aws, tmp_path, capfdbinary):
    address = f"{bucket_served[0]}/commands"
    (tmp_path / "in").write_bytes(b"\x00\xff" * 1000)
    assert bucket.main(["put", address, "d/a b", str(tmp_path / "in")]) == 0
    assert bucket.main(["put", address, "d/c", str(tmp_path / "in")]) == 0
    assert bucket.main(["ls", address]) == 0 and capfdbinary.readouterr().out == b"d/a b\nd/c\n"
    assert bucket.main(["ls", address, "d/c"]) == 0 and capfdbinary.readouterr().out == b"d/c\n"
    assert bucket.main(["get", address, "d/a b", str(tmp_path / "out")]) == 0 and (tmp_path / "out").read_bytes() == b"\x00\xff" * 1000
    assert bucket.main(["get", address, "d/c"]) == 0 and capfdbinary.readouterr().out == b"\x00\xff" * 1000
    assert bucket.main(["rm", address, "d/c"]) == 0 and list(bucket.open_bucket(address).list()) == ["d/a b"]
    assert bucket.main(["rm", address, "d/"]) == 0 and list(bucket.open_bucket(address).list()) == []

@pytest.mark.parametrize("arguments, code", [
    ([], 2), (["fly"], 2), (["ls"], 2), (["ls", "ftp://x/y"], 2), (["get", "DIR", "../a"], 2), (["get", "DIR", "a"], 1), (["mirror", "DIR"], 2),
    (["put", "DIR", "a", "DIR/none"], 1), (["get", "DIR", "a", "--what"], 2), (["--help"], 0), (["serve", "--help"], 0)])
def test_a_mistake_is_one_line_and_exit_2_and_a_failing_world_is_exit_1(arguments, code, tmp_path):
    arguments = [argument.replace("DIR", str(tmp_path)) for argument in arguments]
    result = subprocess.run([sys.executable, BUCKET_PY, *arguments], env=bucket_env(), capture_output=True, text=True, timeout=20)
    assert result.returncode == code and "Traceback" not in result.stderr
    assert result.stderr.count("\n") == (1 if code else 0)

def test_a_mirror_holds_whole_verified_adapters_and_prunes_them(any_bucket, tmp_path, capsys):
    local = tmp_path / "local"
    for version in 1, 2, 3:
        any_bucket.publish(f"adapters/v{version:06d}", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"%d" % version * 1000})
    any_bucket.put("adapters/v000004/adapter_model.safetensors", b"announced by no manifest")
    (local / "adapters/mine").mkdir(parents=True)
    assert bucket.main(["mirror", any_bucket.address, str(local), "--once"]) == 0
    names = lambda: sorted(os.listdir(local / "adapters"))
    assert names() == ["mine", "v000001", "v000002", "v000003"]
    assert (local / "adapters/v000002/adapter_model.safetensors").read_bytes() == b"2" * 1000
    assert sorted(os.listdir(local / "adapters/v000003")) == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    any_bucket.delete_prefix("adapters/v000001/")
    assert bucket.main(["mirror", any_bucket.address, str(local), "--once"]) == 0 and names() == ["mine", "v000002", "v000003"]
    any_bucket.delete_prefix("adapters/")
    assert bucket.main(["mirror", any_bucket.address, str(local), "--once"]) == 0
    assert names() == ["mine", "v000002", "v000003"], "an empty listing is rather a wrong address than a pruned run"

def test_a_mirror_never_shows_a_damaged_adapter_and_resumes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(bucket, "LATE_FILE_S", 0.0)
    store, local = bucket.open_bucket(tmp_path / "run"), tmp_path / "local"
    for version in 1, 2:
        store.publish(f"adapters/v{version:06d}", {"a": b"1", "b": b"2"}, {"canary": [0.1, -1e-7]})
    store.put("adapters/v000001/b", b"3")
    mirror = lambda: bucket.main(["mirror", str(tmp_path / "run"), str(local), "--once"])
    assert mirror() == 0 and os.listdir(local / "adapters") == ["v000002"]
    assert "v000001 is not mirrored" in caplog.text
    # Repaired, it is fetched by the next start; the other is not read again, which shows because the bucket has lost its files.
    store.put("adapters/v000001/b", b"2")
    store.delete("adapters/v000002/a")
    assert mirror() == 0 and sorted(os.listdir(local / "adapters/v000001")) == ["a", "b", "manifest.json"]
    assert sorted(os.listdir(local / "adapters")) == ["v000001", "v000002"]

def test_a_mirror_sweeps_what_a_killed_one_left_and_takes_back_what_a_listing_missed(tmp_path, capsys):
    """Listings of mounts are cached, so an adapter may seem pruned for a while."""
    store, local, known = bucket.open_bucket(tmp_path / "run"), bucket.open_bucket(tmp_path / "local"), set()
    (tmp_path / "local/adapters/.tmp-killed/whole").mkdir(parents=True)
    os.utime(tmp_path / "local/adapters/.tmp-killed", (0, 0))
    for version in 1, 2:
        store.publish(f"adapters/v{version}", {"a": b"1"})
    manifest = store.get("adapters/v1/manifest.json")
    for change in lambda: None, lambda: store.delete("adapters/v1/manifest.json"), lambda: store.put("adapters/v1/manifest.json", manifest):
        change()
        bucket.mirror(store, local, known)
    assert capsys.readouterr().out.splitlines() == ["mirrored v1", "mirrored v2", "removed v1", "mirrored v1"]
    assert sorted(os.listdir(tmp_path / "local/adapters")) == ["v1", "v2"]

def test_a_mirror_refuses_a_folder_of_another_run(tmp_path, capsys):
    for run in "one", "other":
        bucket.open_bucket(tmp_path / run).publish("adapters/v000001", {"a": run.encode()})
    assert bucket.main(["mirror", str(tmp_path / "one"), str(tmp_path / "local"), "--once"]) == 0
    assert bucket.main(["mirror", str(tmp_path / "other"), str(tmp_path / "local"), "--once"]) == 1
    assert "another run" in capsys.readouterr().err and (tmp_path / "local/adapters/v000001/a").read_bytes() == b"one"

def test_a_running_mirror_follows_the_bucket_and_outlives_an_outage(tmp_path):
    """The server of the bucket is killed and started again between two adapters."""
    with bucket_process(sys.executable, BUCKET_PY, "serve", str(tmp_path), "--listen", "127.0.0.1:0", env=bucket_env()) as server:
        url = server.stdout.readline().split("url=")[1].strip()
        store = bucket.open_bucket(tmp_path / "run")
        store.publish("adapters/v000001", {"a": b"1"})
        code = "import bucket, sys; bucket.TRIES, bucket.PAUSE_S = 2, 0.01; sys.exit(bucket.main())"
        command = [sys.executable, "-c", code, "mirror", f"{url}/run", str(tmp_path / "local"), "--every-s", "0.05"]
        with bucket_process(*command, env=bucket_env(), cwd=Path(BUCKET_PY).parent, stderr=subprocess.PIPE) as follower:
            assert follower.stdout.readline() == "mirrored v000001\n"
            server.kill()
            assert any("trying again" in line for line in follower.stderr)
            store.publish("adapters/v000002", {"a": b"2"})
            with bucket_process(sys.executable, BUCKET_PY, "serve", str(tmp_path), "--listen", url[7:], env=bucket_env()):
                assert follower.stdout.readline() == "mirrored v000002\n"
                follower.send_signal(signal.SIGINT)
                assert follower.wait(10) == 0
            follower.stderr.close()


# ================================================================ 2. LoRA, adapter files, sampler


# ---------------------------------------------------------------- lora.py: layers, files, sampler



LORA_MODELS = ("llama", "qwen2", "gemma3", "gpt2")
LORA_LISTS = {"llama": ["q_proj", "down_proj"], "qwen2": ["v_proj", "up_proj"], "gemma3": ["self_attn.o_proj"], "gpt2": ["c_attn"]}
LORA_V = 96

def lora_model(kind="llama", **changes):
    """A tiny random model. Weights are large (std 0.2 to 0.3), so that attention and adapters matter to the logits."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    shape = dict(vocab_size=LORA_V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=False) | changes
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=LORA_V, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2,
                                         bos_token_id=1, eos_token_id=1)
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "gemma3":
        shape = dict(layer_types=["full_attention"] * 2, head_dim=16) | shape
    name = {"llama": "Llama", "qwen2": "Qwen2", "gemma3": "Gemma3"}[kind]
    config = getattr(transformers, name + ("TextConfig" if kind == "gemma3" else "Config"))(**shape)
    return getattr(transformers, name + "ForCausalLM")(config).eval()

def lora_adapter(shapes, seed, size=0.3):
    """A and B both non-zero."""
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) * size for key, shape in sorted(shapes.items())}

def lora_sampler(kind="llama", versions=3, slots=None, r=4, **options):
    model = lora_model(kind)
    layers = Lora(model, r, 2 * r, slots=slots or versions)
    sampler = Sampler(model, layers, **({"eos_ids": {1}, "max_rows": 32, "max_len": 64} | options))
    for version in range(1, versions + 1):
        sampler.load(f"policy-v{version}", lora_adapter(layers.shapes, version))
    return sampler

def lora_drain(sampler):
    while sampler.step():
        pass

def lora_oracle(sampler, name, prompt, completion, temperature):
    """log softmax(logits / temperature) of a completion's tokens by one plain forward of prompt + completion."""
    with torch.no_grad(), sampler.lora.use(None if name is None else sampler._versions[name][0]):
        logits = sampler.model(torch.tensor([list(prompt) + completion.token_ids])).logits[0, len(prompt) - 1:-1].float()
    return (logits / (temperature or 1.0)).log_softmax(-1)

IDS = torch.tensor([[3, 14, 15, 92, 65, 35], [8, 9, 79, 32, 38, 46], [27, 18, 28, 18, 28, 45]])

# -- layers

@pytest.mark.parametrize("kind", LORA_MODELS)
def test_a_fresh_adapter_changes_nothing(kind):
    model = lora_model(kind)
    with torch.no_grad():
        before = model(IDS).logits
        layers = Lora(model, r=4, alpha=8)
        layers.load(0, lora.init_adapter(layers.shapes, seed=0))
        with layers.use(0):
            assert torch.equal(model(IDS).logits, before)
        assert torch.equal(model(IDS).logits, before)

def test_the_base_keeps_its_names_and_only_the_trained_slot_gets_gradients():
    model = lora_model()
    names = list(model.state_dict())
    layers = Lora(model, r=4, alpha=8, slots=2)
    assert list(model.state_dict()) == names and not any(p.requires_grad for p in model.parameters())
    for slot in (0, 1):
        layers.load(slot, lora_adapter(layers.shapes, slot))
    layers.train(1)
    with layers.use(1):
        model(IDS).logits.square().mean().backward()
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is None for p in layers.parameters(0).values())
    assert all(p.grad.abs().max() > 0 for p in layers.parameters(1).values())

@pytest.mark.parametrize("conv", [False, True])
def test_gradients_equal_autograd_of_the_written_formula(conv):
    """y = x W^T + b + (alpha / r) (x A^T) B^T, in float64-free fp32: equal up to the order of additions."""
    torch.manual_seed(0)
    base = Conv1D(5, 7) if conv else torch.nn.Linear(7, 5)
    base.bias.data.normal_()
    model = torch.nn.ModuleDict({"layer": base})
    model.get_output_embeddings = lambda: None
    layers = Lora(model, r=3, alpha=6)
    layers.load(0, lora_adapter(layers.shapes, 1))
    layers.train(0)
    x, target = torch.randn(2, 4, 7, requires_grad=True), torch.randn(2, 4, 5)
    with layers.use(0):
        y = base(x)
    ((y - target) ** 2).sum().backward()
    A, B = (layers.parameters(0)[f"base_model.model.layer.lora_{side}.weight"] for side in "AB")
    a, b, x2 = (t.detach().clone().requires_grad_() for t in (A, B, x))
    W = base.weight.T if conv else base.weight
    written = x2 @ W.T + base.bias + (6 / 3) * (x2 @ a.T) @ b.T
    ((written - target) ** 2).sum().backward()
    for ours, oracle in ((y, written), (A.grad, a.grad), (B.grad, b.grad), (x.grad, x2.grad)):
        torch.testing.assert_close(ours, oracle, rtol=1e-5, atol=1e-4)

@pytest.mark.parametrize("kind", LORA_MODELS)
def test_a_batch_of_mixed_versions_equals_each_version_alone(kind):
    model = lora_model(kind)
    layers = Lora(model, r=4, alpha=8, slots=4)
    for slot in (0, 1, 3):
        layers.load(slot, lora_adapter(layers.shapes, slot))
    with torch.no_grad():
        with layers.use([3, -1, 0]):
            mixed = model(IDS).logits
        with layers.use([1, 1, -1]):
            other = model(IDS).logits
        alone = {}
        for slot in (0, 1, 3, None):
            with layers.use(slot):
                alone[slot] = model(IDS).logits
    torch.testing.assert_close(mixed, torch.stack([alone[3][0], alone[None][1], alone[0][2]]), rtol=0, atol=1e-4)
    torch.testing.assert_close(other, torch.stack([alone[1][0], alone[1][1], alone[None][2]]), rtol=0, atol=1e-4)
    assert (alone[0] - alone[1]).abs().max() > 1e-2

def test_an_overflow_in_one_version_stays_out_of_the_others():
    model = lora_model()
    layers = Lora(model, r=4, alpha=8, slots=2)
    layers.load(0, lora_adapter(layers.shapes, 0))
    layers.load(1, {key: torch.full(shape, 3e38) for key, shape in layers.shapes.items()})
    with torch.no_grad():
        with layers.use([0, 1, 0]):
            mixed = model(IDS).logits
        with layers.use(0):
            alone = model(IDS).logits
    assert not mixed[1].isfinite().all()
    torch.testing.assert_close(mixed[[0, 2]], alone[[0, 2]], rtol=0, atol=1e-4)

@pytest.mark.parametrize("kind", LORA_MODELS)
def test_merged_equals_unmerged(kind):
    model = lora_model(kind)
    merged = copy.deepcopy(model)
    layers = Lora(model, r=4, alpha=8)
    tensors = lora_adapter(layers.shapes, 1)
    layers.load(0, tensors)
    lora.merge(merged, tensors, alpha=8, r=4, dtype=torch.float32)
    with torch.no_grad(), layers.use(0):
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=0, atol=1e-4)

def test_an_update_too_small_for_bf16_weights_survives_because_merging_is_in_fp32():
    """1 + 2^-9 is no bf16 number: added to a bf16 weight a first half vanishes; merged in fp32 from both it stays."""
    layer = torch.nn.ModuleDict({"layer": torch.nn.Linear(1, 1, bias=False)})
    layer["layer"].weight.data.fill_(1.0)
    tensors = {"base_model.model.layer.lora_A.weight": torch.full((2, 1), 2.0 ** -8), "base_model.model.layer.lora_B.weight": torch.ones(1, 2)}
    assert lora.merge(layer, tensors, alpha=2, r=2, dtype=torch.bfloat16)["layer"].weight.item() == 1 + 2 ** -7

def test_a_forward_with_the_adapter_off_adds_no_operation():
    model = lora_model()
    with torch.no_grad(), torch.profiler.profile() as plain:
        model(IDS)
    layers = Lora(model, r=4, alpha=8)
    with torch.no_grad(), torch.profiler.profile() as off, layers.use(None):
        model(IDS)
    assert sum(e.count for e in off.key_averages()) == sum(e.count for e in plain.key_averages())

# -- files

@pytest.mark.parametrize("r", [1, 4, 8])
@pytest.mark.parametrize("targets", ["all-linear", "list"])
@pytest.mark.parametrize("kind", LORA_MODELS)
def test_our_adapter_in_peft_and_pefts_in_ours_give_equal_logits(kind, targets, r, tmp_path):
    peft = pytest.importorskip("peft")
    warnings.simplefilter("ignore")
    targets = LORA_LISTS[kind] if targets == "list" else targets
    model = lora_model(kind)
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=r, lora_alpha=2 * r, target_modules=targets, task_type="CAUSAL_LM"))
    for key, parameter in theirs.named_parameters():
        if "lora_B" in key:
            parameter.data.normal_(std=0.2)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    tensors, config = lora.read_adapter({p.name: p.read_bytes() for p in (tmp_path / "theirs").iterdir() if p.is_file()})
    ours = copy.deepcopy(model)
    layers = Lora(ours, r, config["lora_alpha"], targets)
    layers.load(0, tensors)
    with torch.no_grad(), layers.use(0):
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=0, atol=1e-5)

    tensors = lora_adapter(layers.shapes, 1)
    layers.load(0, tensors)
    (tmp_path / "ours").mkdir()
    for name, data in lora.adapter_files(layers.parameters(0), r, 2 * r, targets, "base").items():
        (tmp_path / "ours" / name).write_bytes(data)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "ours")
    with torch.no_grad(), layers.use(0):
        torch.testing.assert_close(loaded(IDS).logits, ours(IDS).logits, rtol=0, atol=1e-5)

def test_adapter_files_are_equal_bytes_and_come_back_bit_identical():
    layers = Lora(lora_model(), r=4, alpha=8)
    tensors = lora_adapter(layers.shapes, 1)
    files = lora.adapter_files(tensors, 4, 8, "all-linear", "base")
    assert files == lora.adapter_files(dict(reversed(tensors.items())), 4, 8, "all-linear", "base")
    back, config = lora.read_adapter(files)
    assert back.keys() == tensors.keys() and all(torch.equal(back[key], tensors[key]) for key in back)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]

def test_a_fresh_adapter_is_the_same_for_the_same_seed_and_bounded_as_in_peft():
    shapes = {"base_model.model.x.lora_A.weight": (8, 400), "base_model.model.x.lora_B.weight": (5, 8)}
    one, two = lora.init_adapter(shapes, 7), lora.init_adapter(shapes, 7)
    assert all(torch.equal(one[key], two[key]) for key in shapes)
    A = one["base_model.model.x.lora_A.weight"]
    assert -0.05 <= A.min() < -0.0495 and 0.0495 < A.max() <= 0.05 and not one["base_model.model.x.lora_B.weight"].any()
    assert not torch.equal(A, lora.init_adapter(shapes, 8)["base_model.model.x.lora_A.weight"])

LORA_FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
@pytest.mark.parametrize("says, change", [
    ("use_dora", {"use_dora": True}), ("bias", {"bias": "all"}), ("modules_to_save", {"modules_to_save": ["lm_head"]}),
    ("use_rslora", {"use_rslora": True}), ("rank_pattern", {"rank_pattern": {"q_proj": 2}}), ("peft_type", {"peft_type": "IA3"}),
    ("use_bdlora", {"use_bdlora": {"target_modules_bd_a": ["o_proj"]}}), ("init_lora_weights is 'pissa_niter_4'", {"init_lora_weights": "pissa_niter_4"}),
    ("init_lora_weights is 'olora'", {"init_lora_weights": "olora"}),
    ("r is", {"r": None}), ("expected rank 2", {"r": 2}), ("lora_alpha", {"lora_alpha": 0})])
def test_an_adapter_that_is_not_plain_lora_is_refused_by_name(says, change):
    layers = Lora(lora_model(), r=4, alpha=8)
    files = lora.adapter_files(lora_adapter(layers.shapes, 1), 4, 8, "all-linear", "base")
    files["adapter_config.json"] = json.dumps(json.loads(files["adapter_config.json"]) | change).encode()
    with pytest.raises(AdapterError, match=says):
        lora.read_adapter(files)

@pytest.mark.parametrize("says, damage", [
    ("no tensors", lambda t: t.clear()),
    ("lora_B.weight: the other half", lambda t: t.pop(LORA_FIRST)),
    ("NaN or infinity", lambda t: t[LORA_FIRST].fill_(math.nan)),
    ("NaN or infinity", lambda t: t[LORA_FIRST].view(-1)[-1:].fill_(math.inf)),
    ("expected rank 4", lambda t: t.update({LORA_FIRST: torch.zeros(3, 48)})),
    ("expected base_model.model", lambda t: [t.update({key.removeprefix("base_model."): t.pop(key)}) for key in list(t)]),
    ("expected base_model.model", lambda t: t.update({"base_model.model.model.norm.weight": torch.ones(32)})),
    ("output head", lambda t: t.update({f"base_model.model.lm_head.lora_{x}.weight": torch.zeros(s) for x, s in (("A", (4, 32)), ("B", (96, 4)))})),
    ("output head or the embeddings", lambda t: t.update({"base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(4, 96)}))])
def test_a_publisher_and_a_reader_refuse_a_damaged_adapter_naming_the_tensor(says, damage):
    layers = Lora(lora_model(), r=4, alpha=8)
    tensors = lora_adapter(layers.shapes, 1)
    files = lora.adapter_files(tensors, 4, 8, "all-linear", "base")
    damage(tensors)
    with pytest.raises(AdapterError, match=says):
        lora.adapter_files(tensors, 4, 8, "all-linear", "base")
    files["adapter_model.safetensors"] = safetensors.torch.save({key: t.contiguous() for key, t in tensors.items()})
    with pytest.raises(AdapterError, match=says):
        lora.read_adapter(files)

def test_files_that_are_cut_short_or_missing_are_refused():
    files = lora.adapter_files(lora_adapter(Lora(lora_model(), r=4, alpha=8).shapes, 1), 4, 8, "all-linear", "base")
    for name, data in files.items():
        for broken in ({**files, name: data[:len(data) // 2]}, {k: v for k, v in files.items() if k != name}):
            with pytest.raises(AdapterError, match="incomplete or damaged"):
                lora.read_adapter(broken)

def test_a_slot_refuses_what_does_not_fit_the_model_and_stays_as_it_was():
    layers = Lora(lora_model(), r=4, alpha=8)
    held = lora_adapter(layers.shapes, 1)
    layers.load(0, held)
    good, first = lora_adapter(layers.shapes, 2), min(layers.shapes)
    wide, nan = dict(good), dict(good)
    wide[first], nan[first] = torch.zeros(4, 33), torch.full(layers.shapes[first], math.nan)
    missing = {key: t for key, t in good.items() if key != first}
    for says, bad in ((r"shape \(4, 33\), expected \(4, 48\)", wide), ("NaN", nan), ("missing", missing), ("unknown", {**good, "x": torch.ones(1)})):
        with pytest.raises(AdapterError, match=says):
            layers.load(0, bad)
        assert all(torch.equal(t, held[key]) for key, t in layers.parameters(0).items())
    with pytest.raises(AdapterError, match="no such linear layer"):
        Lora(lora_model(), r=4, alpha=8, target_modules=["lm_head"])

# -- logprobs of chosen tokens

@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_token_logprobs_equal_autograd_of_log_softmax_in_chunks_of_any_size(temperature, bias):
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(7, 16, requires_grad=True), torch.randn(50, 16), torch.randint(50, (7,))
    b, upstream = torch.randn(50) if bias else None, torch.randn(7)
    full = ((hidden @ weight.T + (b if bias else 0)) / temperature).log_softmax(-1)
    oracle = full.gather(-1, targets[:, None])[:, 0]
    (gradient,) = torch.autograd.grad((oracle * upstream).sum(), hidden)
    for chunk in (1, 3, 7, 100):
        logprobs, entropy = lora.token_logprobs(hidden, weight, b, targets, temperature, chunk)
        torch.testing.assert_close(logprobs, oracle, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1).detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.autograd.grad((logprobs * upstream).sum(), hidden)[0], gradient, rtol=1e-4, atol=1e-5)
        assert not entropy.requires_grad

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_confident_token_keeps_its_gradient_in_the_bases_dtype(dtype):
    """What is left of 1 at a probability of 0.99 or 0.9999 must be formed before it is rounded: near 1 bf16 has steps of 0.004."""
    torch.manual_seed(0)
    weight, targets = torch.randn(4096, 64).to(dtype), torch.randint(4096, (64,))
    hidden = (weight[targets] * torch.linspace(0.2, 0.32, 64)[:, None]).to(dtype).requires_grad_()
    left = F.one_hot(targets, 4096) - F.linear(hidden, weight).double().softmax(-1).detach()
    confident = ((rest := left.gather(-1, targets[:, None])[:, 0]) > 1e-4) & (rest < 1e-2)
    expected = left @ weight.double()
    lora.token_logprobs(hidden, weight, None, targets)[0].sum().backward()
    assert confident.sum() > 10
    assert ((hidden.grad - expected).norm(dim=-1) / expected.norm(dim=-1))[confident].max() < 0.01

def test_token_logprobs_never_hold_all_logits():
    """65,536 logits per token, 256 tokens: 64 MB at once. In chunks of 8 the largest array alive is 2 MB (and hidden's 16 KB)."""
    hidden, weight = torch.randn(256, 16, requires_grad=True), torch.randn(65536, 16)
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        lora.token_logprobs(hidden, weight, None, torch.zeros(256, dtype=torch.long), 1.0, 8)[0].sum().backward()
    assert max(math.prod(shape) for e in profile.events() for shape in e.input_shapes if shape and shape != list(weight.shape)) <= 8 * 65536 + 16 * 65536

def test_token_logprobs_of_no_token_are_empty_and_have_a_gradient():
    hidden = torch.zeros(0, 16, requires_grad=True)
    logprobs, entropy = lora.token_logprobs(hidden, torch.randn(50, 16), None, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,) and hidden.grad.shape == (0, 16)

def test_a_model_that_scales_or_caps_its_logits_is_refused():
    for kind in LORA_MODELS:
        lora.check_head(lora_model(kind))
    config = transformers.CohereConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                                       logit_scale=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ValueError, match="scales or caps"):
        lora.check_head(transformers.CohereForCausalLM(config).eval())

# -- sampler

@pytest.mark.parametrize("kind", LORA_MODELS)
def test_sampler_logprobs_equal_a_full_forward_of_the_same_tokens_and_version(kind):
    """Mixed versions, prompts, temperatures and lengths in one batch, ended by stop token and by length; fp32, 1e-4."""
    sampler, rng, jobs = lora_sampler(kind, max_rows=20), random.Random(0), []
    for seed in range(24):
        prompt = [rng.randrange(LORA_V) for _ in range(rng.randint(1, 20))]
        name, temperature = rng.choice([None, "policy-v1", "policy-v2", "policy-v3"]), (0.6, 1.0, 1.3, 0.0)[seed % 4]
        jobs.append((prompt, name, temperature, sampler.submit(prompt, rng.randint(1, 20), rng.randint(1, 30), temperature, name, seed, stop_ids=(5, 6))))
    lora_drain(sampler)
    reasons = set()
    for prompt, name, temperature, future in jobs:
        for completion in future.result(0):
            oracle = lora_oracle(sampler, name, prompt, completion, temperature)
            ids = torch.tensor(completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), oracle.gather(-1, ids[:, None])[:, 0], rtol=0, atol=1e-4)
            if temperature == 0:
                assert torch.equal(oracle.argmax(-1), ids)
            stops = [t in (1, 5, 6) for t in completion.token_ids]
            assert not any(stops[:-1]) and stops[-1] == (completion.finish_reason == "stop")
            reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}
    assert sampler.stats()["running"] == sampler.stats()["waiting"] == sampler.stats()["errors"] == 0

def test_a_completion_does_not_depend_on_the_rows_that_join_and_leave_beside_it():
    sampler = lora_sampler()
    ask = lambda: sampler.submit([7, 8, 9], 2, 20, 1.0, "policy-v2", seed=11, ignore_eos=True)
    alone = ask()
    lora_drain(sampler)
    crowded, rng = ask(), random.Random(1)
    for turn in range(15):
        sampler.submit([rng.randrange(LORA_V) for _ in range(rng.randint(1, 30))], rng.randint(1, 4), rng.randint(1, 5), 1.0, f"policy-v{1 + turn % 3}")
        sampler.step()
    lora_drain(sampler)
    for a, b in zip(alone.result(0), crowded.result(0)):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-4)

def test_equal_seeds_give_equal_completions_and_the_completions_of_a_group_differ():
    sampler = lora_sampler()
    futures = [sampler.submit([7, 8, 9], n, 12, 1.3, "policy-v1", seed=seed) for n, seed in ((4, 5), (4, 5), (2, 5), (4, 6))]
    lora_drain(sampler)
    one, two, fewer, other = ([c.token_ids for c in future.result(0)] for future in futures)
    assert one == two and fewer == one[:2] and other != one and len({tuple(ids) for ids in one}) == 4

def test_the_sampled_frequencies_are_those_of_the_distribution():
    """20,000 first tokens; chi-square over 96 outcomes has mean 95 and standard deviation 14: below 165 but for 1 in 10^5."""
    sampler = lora_sampler(max_rows=1000)
    futures = [sampler.submit([7, 8], 1000, 1, 1.3, "policy-v1", seed=seed, top_logprobs=LORA_V) for seed in range(20)]
    lora_drain(sampler)
    completions = [c for future in futures for c in future.result(0)]
    expected = torch.tensor([completions[0].top_logprobs[0][token] for token in range(LORA_V)]).double().exp() * 20000
    seen = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=LORA_V)
    frequent = expected >= 5
    chi2 = ((seen - expected) ** 2 / expected)[frequent].sum() + (seen[~frequent].sum() - expected[~frequent].sum()) ** 2 / max(expected[~frequent].sum(), 1)
    assert frequent.sum() > 60 and chi2 < 165

def test_a_token_of_probability_zero_is_never_drawn_at_any_point_of_the_distribution():
    V = 1000
    logits = torch.full((6, V), -math.inf)
    logits[:, [3, 255, 256, 700]] = torch.tensor([0.0, -1.0, 2.0, -3.0]) + 1000
    tokens, logprobs, tops = lora.draw(logits, [1.0] * 5 + [0], [0.0, 1e-300, 0.5, 1 - 2 ** -53, 0.9999999, 0.0], top=2)
    assert tokens.tolist() == [3, 3, 256, 700, 700, 256] and logprobs.isfinite().all()
    assert tops[1][0].tolist() == [256, 3]
    wide = torch.randn(4, 50257) * 3
    for points in torch.rand(50, 4, dtype=torch.float64).tolist() + [[0.0] * 4, [1 - 2 ** -53] * 4]:
        tokens, logprobs, _ = lora.draw(wide.clone(), [1.0] * 4, points)
        oracle = wide.double().softmax(-1).cumsum(-1)
        found = torch.searchsorted(oracle, torch.tensor(points, dtype=torch.float64)[:, None], right=True)[:, 0].clamp(max=50256)
        assert (oracle.gather(-1, tokens[:, None]) - oracle.gather(-1, found[:, None])).abs().max() < 1e-5

def test_top_logprobs_are_the_likeliest_tokens_under_the_same_distribution():
    sampler = lora_sampler()
    future = sampler.submit([7, 8, 9], 1, 4, 0.6, "policy-v1", seed=0, top_logprobs=5, ignore_eos=True)
    sampler.submit([7, 8], 1, 4, 1.0, seed=0)
    lora_drain(sampler)
    (completion,) = future.result(0)
    oracle = lora_oracle(sampler, "policy-v1", [7, 8, 9], completion, 0.6).topk(5)
    for top, values, ids in zip(completion.top_logprobs, oracle.values, oracle.indices, strict=True):
        assert list(top) == ids.tolist()
        torch.testing.assert_close(torch.tensor(list(top.values())), values, rtol=0, atol=1e-4)

def test_a_completion_of_one_token_and_one_that_is_only_a_stop_token():
    sampler = lora_sampler()
    length = sampler.submit([7], 1, 1, 1.0, seed=0, ignore_eos=True)
    stop = sampler.submit([7], 1, 9, 1.0, seed=0, stop_ids=range(LORA_V))
    lora_drain(sampler)
    (a,), (b,) = length.result(0), stop.result(0)
    assert (a.finish_reason, b.finish_reason) == ("length", "stop") and a.token_ids == b.token_ids and len(a.logprobs) == 1

def test_the_prompt_of_a_group_is_computed_once_even_when_its_requests_come_one_by_one():
    sampler = lora_sampler()
    whole = sampler.submit([7, 8, 9], 6, 8, 1.0, "policy-v1", seed=3)
    lora_drain(sampler)
    assert sampler.stats()["prompts"] == 1
    for seed in range(4):
        sampler.submit([7, 8, 9], 1, 8, 1.0, "policy-v1", seed=seed)
        sampler.step()
    lora_drain(sampler)
    assert sampler.stats()["prompts"] == 1 and sampler.stats()["prefix_hits"] == 4
    again = sampler.submit([7, 8, 9], 6, 8, 1.0, "policy-v1", seed=3)
    sampler.submit([7, 8, 9], 1, 8, 1.0, "policy-v2", seed=3)
    lora_drain(sampler)
    assert [c.token_ids for c in again.result(0)] == [c.token_ids for c in whole.result(0)] and sampler.stats()["prompts"] == 2

def test_eight_completions_read_one_copy_of_their_prompt():
    """Keys and values of 30 prompt tokens (held as 32) once for 8 rows and twice for 9, and never again for each row."""
    sampler = lora_sampler()
    for n, copies in ((8, 1), (9, 2)):
        sampler.submit([7] * 30, n, 4, 1.0, "policy-v1", ignore_eos=True)
        lora_drain(sampler)
        # Two layers, key and value, two heads of 8 in fp32; each row holds its own tokens, 4 at most.
        rows = 1 << (n - 1).bit_length()
        assert sampler.stats()["kv_bytes"] <= 2 * 2 * 2 * 8 * 4 * (copies * 32 + rows * 8)

def test_kept_prompts_are_bounded_and_a_name_loaded_anew_never_meets_the_old_ones():
    sampler = lora_sampler(versions=1, prefix_tokens=10)
    for first in range(8):
        sampler.submit([first, 8, 9], 1, 2, 1.0, "policy-v1")
        lora_drain(sampler)
        assert sum(len(prompt) for _, prompt in sampler.prefixes) <= 10
    old = sampler.submit([7, 8, 9], 1, 8, 0.0, "policy-v1", ignore_eos=True)
    lora_drain(sampler)
    sampler.unload("policy-v1")
    sampler.load("policy-v1", lora_adapter(sampler.lora.shapes, 77))
    new = sampler.submit([7, 8, 9], 1, 8, 0.0, "policy-v1", ignore_eos=True)
    lora_drain(sampler)
    oracle = lora_oracle(sampler, "policy-v1", [7, 8, 9], new.result(0)[0], 0.0)
    assert oracle.argmax(-1).tolist() == new.result(0)[0].token_ids != old.result(0)[0].token_ids

def test_an_unknown_version_is_refused_with_the_names_of_the_live_ones():
    sampler = lora_sampler(versions=2)
    with pytest.raises(UnknownVersion, match="policy-v1, policy-v2") as caught:
        sampler.submit([7], 1, 4, 1.0, "policy-v9")
    assert caught.value.names == ["policy-v1", "policy-v2"]
    with pytest.raises(UnknownVersion):
        sampler.unload("policy-v9")

def test_a_completion_ends_under_the_version_it_began_with():
    sampler = lora_sampler(versions=2, slots=2)
    alone = sampler.submit([7, 8], 2, 12, 1.0, "policy-v1", seed=0, ignore_eos=True)
    lora_drain(sampler)
    future = sampler.submit([7, 8], 2, 12, 1.0, "policy-v1", seed=0, ignore_eos=True)
    sampler.step()
    sampler.unload("policy-v1")
    with pytest.raises(UnknownVersion):
        sampler.submit([7, 8], 1, 4, 1.0, "policy-v1")
    with pytest.raises(TimeoutError, match="all 2 slots are in use; live: policy-v2"):
        sampler.load("policy-v3", lora_adapter(sampler.lora.shapes, 3))
    lora_drain(sampler)
    assert [c.token_ids for c in future.result(0)] == [c.token_ids for c in alone.result(0)]
    sampler.load("policy-v3", lora_adapter(sampler.lora.shapes, 3))
    assert sampler.names() == ["policy-v2", "policy-v3"]

def test_a_name_means_one_set_of_weights():
    sampler = lora_sampler(versions=1, slots=2)
    sampler.load("policy-v1", lora_adapter(sampler.lora.shapes, 1))
    assert sampler.stats()["loads"] == 1 and sampler.stats()["free_slots"] == 1
    with pytest.raises(AdapterError, match="one set of weights for ever"):
        sampler.load("policy-v1", lora_adapter(sampler.lora.shapes, 2))

def test_a_thousand_versions_leave_slots_and_memory_as_they_were():
    sampler = lora_sampler(versions=0, slots=3)
    adapters, sizes = [lora_adapter(sampler.lora.shapes, seed) for seed in range(3)], set()
    for version in range(1000):
        sampler.load(f"policy-v{version}", adapters[version % 3])
        if version >= 2:
            sampler.unload(f"policy-v{version - 2}")
        if version % 10 == 0:
            sampler.submit([7, 8, 9], 2, 3, 1.0, f"policy-v{version}")
            lora_drain(sampler)
        stats = sampler.stats()
        sizes.add((stats["kv_bytes"], sum(len(prompt) for _, prompt in sampler.prefixes) <= 4096))
        assert len(stats["versions"]) <= 2 and stats["free_slots"] >= 1
    assert len(sizes) <= 2 and stats["loads"] == 1000

def test_cancelling_frees_the_rows_before_the_next_token_and_others_go_on():
    sampler = lora_sampler(max_rows=4)
    gone = sampler.submit([7, 8], 3, 50, 1.0, "policy-v1", seed=0, ignore_eos=True)
    stays = sampler.submit([9, 8], 1, 10, 1.0, "policy-v2", seed=1, ignore_eos=True)
    waits = sampler.submit([9, 9], 3, 10, 1.0, "policy-v3", seed=2, ignore_eos=True)
    sampler.step()
    assert (sampler.stats()["running"], sampler.stats()["waiting"]) == (4, 1)
    sampler.cancel(gone)
    sampler.step()
    assert (sampler.stats()["running"], sampler.stats()["waiting"]) == (4, 0)
    lora_drain(sampler)
    with pytest.raises(CancelledError):
        gone.result(0)
    for future, name, prompt in ((stays, "policy-v2", [9, 8]), (waits, "policy-v3", [9, 9])):
        for completion in future.result(0):
            oracle = lora_oracle(sampler, name, prompt, completion, 1.0).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), oracle, rtol=0, atol=1e-4)
    assert sampler.stats()["free_slots"] == 0 and sampler.stats()["kv_tokens"] == 0

def test_requests_that_could_never_run_are_refused_at_once():
    sampler = lora_sampler()
    for bad in (dict(prompt_ids=[]), dict(prompt_ids=[LORA_V]), dict(prompt_ids=[-1]), dict(prompt_ids=["a"]), dict(n=0), dict(n=33),
                dict(max_tokens=0), dict(max_tokens=64), dict(temperature=-0.1), dict(temperature=math.nan), dict(top_logprobs=-1)):
        with pytest.raises(ValueError, match="expected"):
            sampler.submit(**({"prompt_ids": [7], "name": "policy-v1"} | bad))
    assert not sampler.step()

def test_a_version_with_infinite_logits_fails_its_own_requests_only():
    sampler = lora_sampler(versions=2, slots=3)
    sampler.load("bad", {key: torch.full(shape, 3e38) for key, shape in sampler.lora.shapes.items()})
    ask = lambda: sampler.submit([7, 8], 2, 10, 1.0, "policy-v1", seed=4, ignore_eos=True)
    before = ask()
    lora_drain(sampler)
    bad = sampler.submit([7] * 20, 4, 10, 1.0, "bad")
    good = ask()
    lora_drain(sampler)
    # Later rows stand where the bad ones stood, and beside a longer one, so that what was left behind them is masked but read.
    long, after = sampler.submit([9] * 30, 1, 10, 1.0, "policy-v1"), ask()
    lora_drain(sampler)
    assert len(long.result(0)) == 1
    with pytest.raises(FloatingPointError, match="not finite"):
        bad.result(0)
    assert [c.token_ids for c in before.result(0)] == [c.token_ids for c in good.result(0)] == [c.token_ids for c in after.result(0)]

def test_pause_keep_holds_the_rows_and_resume_goes_on_with_the_same_tokens():
    sampler = lora_sampler()
    ask = lambda: sampler.submit([7, 8], 2, 12, 1.0, "policy-v1", seed=0, ignore_eos=True)
    alone = ask()
    lora_drain(sampler)
    future = ask()
    sampler.step()
    sampler.pause("keep")
    tokens = sampler.stats()["tokens"]
    assert not sampler.step() and sampler.stats()["tokens"] == tokens and sampler.is_paused
    sampler.resume()
    lora_drain(sampler)
    assert future.result(0) == alone.result(0)

def test_a_pause_between_joining_and_the_first_token_loses_nothing():
    """Whether the rows are held was asked after they had joined: a pause just then left rows without a token to go on from."""
    sampler = lora_sampler()
    ask = lambda: sampler.submit([7, 8], 2, 5, 1.0, "policy-v1", seed=0, ignore_eos=True)
    alone, regroup = ask(), sampler._regroup
    lora_drain(sampler)
    def regroup_and_pause():
        running = regroup()
        sampler.pause("keep")
        return running
    late, sampler._regroup = ask(), regroup_and_pause
    sampler.step()
    sampler._regroup = regroup
    sampler.resume()
    lora_drain(sampler)
    assert late.result(0) == alone.result(0)

def test_pause_abort_ends_the_rows_as_they_are_and_holds_what_waits():
    sampler = lora_sampler(max_rows=2)
    running = sampler.submit([7, 8], 2, 12, 1.0, "policy-v1", ignore_eos=True)
    waiting = sampler.submit([7, 9], 2, 3, 1.0, "policy-v1", ignore_eos=True)
    sampler.step()
    sampler.pause("abort")
    assert not sampler.step()
    assert [(c.finish_reason, len(c.token_ids)) for c in running.result(0)] == [("abort", 1)] * 2 and not waiting.done()
    sampler.resume()
    lora_drain(sampler)
    assert [c.finish_reason for c in waiting.result(0)] == ["length"] * 2

def test_the_loop_serves_many_threads_and_pause_wait_returns_when_the_rows_have_ended():
    sampler, stop, results = lora_sampler(max_rows=8), threading.Event(), {}
    loop = threading.Thread(target=sampler.run, args=(stop,))
    loop.start()
    try:
        def client(i):
            results[i] = sampler.submit([7, i], 2, 10, 1.0, f"policy-v{1 + i % 3}", seed=i).result(30)
        threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(results) == list(range(12)) and all(len(r) == 2 for r in results.values())
        last = sampler.submit([7, 8], 2, 30, 1.0, "policy-v1", seed=0, ignore_eos=True)
        sampler.submit([7, 8], 1, 1, 1.0).result(30)
        sampler.pause("wait")
        assert last.done() and sampler.stats()["running"] == 0
        held = sampler.submit([7, 8], 1, 2, 1.0)
        sampler.unload("policy-v2")
        sampler.load("policy-v4", lora_adapter(sampler.lora.shapes, 4))
        assert not held.done()
        sampler.resume()
        assert len(held.result(30)) == 1
    finally:
        stop.set()
        loop.join(10)
    assert not loop.is_alive()

def test_an_error_in_a_step_reaches_the_requests_under_way_and_the_loop_lives(capfd):
    sampler, stop = lora_sampler(), threading.Event()
    loop = threading.Thread(target=sampler.run, args=(stop,))
    def broken(module, inputs, output):
        raise RuntimeError("out of memory")
    hook = sampler.model.model.layers[0].mlp.register_forward_hook(broken)
    loop.start()
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            sampler.submit([7, 8], 2, 10, 1.0, "policy-v1").result(30)
        hook.remove()
        assert len(sampler.submit([7, 8], 2, 10, 1.0, "policy-v1").result(30)) == 2
    finally:
        stop.set()
        loop.join(10)
    err = capfd.readouterr().err
    assert "out of memory; lower --max-rows" in err and "Traceback" not in err and sampler.stats()["errors"] == 1

def test_in_bf16_a_batch_of_one_and_of_eight_give_the_same_logprobs_within_a_tenth():
    """bf16 keeps 8 bits: one rounding is 0.4 % of a logit; logits here are within ±12, so 0.1 is two such roundings."""
    model = lora_model(initializer_range=0.1).to(torch.bfloat16)
    layers = Lora(model, 4, 8, slots=2)
    sampler = Sampler(model, layers, {1}, max_rows=8, max_len=64)
    for version in (1, 2):
        sampler.load(f"policy-v{version}", lora_adapter(layers.shapes, version, 0.1))
    alone = sampler.submit([7, 8, 9], 1, 1, 0.0, "policy-v1", seed=0)
    lora_drain(sampler)
    crowd = [sampler.submit([7, 8, 9], 1, 16, 0.0, "policy-v1", seed=0, ignore_eos=True)]
    crowd += [sampler.submit([i, 8], 1, 16, 1.0, "policy-v2", seed=i) for i in range(7)]
    lora_drain(sampler)
    (one,), (eight,) = alone.result(0), crowd[0].result(0)
    oracle = lora_oracle(sampler, "policy-v1", [7, 8, 9], eight, 1.0).gather(-1, torch.tensor(eight.token_ids)[:, None])[:, 0]
    assert abs(one.logprobs[0] - eight.logprobs[0]) < 0.1
    torch.testing.assert_close(torch.tensor(eight.logprobs), oracle, rtol=0, atol=0.1)

def test_a_model_that_does_not_attend_to_everything_is_refused_with_the_reason():
    for changes, says in ((dict(layer_types=["full_attention", "sliding_attention"], sliding_window=32), "needs full attention and at most 32"),
                          (dict(max_position_embeddings=48), "at most 48")):
        model = lora_model("gemma3", **changes)
        with pytest.raises(ValueError, match=says):
            Sampler(model, Lora(model, 4, 8), {1}, max_len=64)
    model = lora_model("gemma3", layer_types=["full_attention", "sliding_attention"], sliding_window=64)
    Sampler(model, Lora(model, 4, 8), {1}, max_len=64)

def test_the_sampler_leaves_the_models_own_attention_as_it_was():
    sampler = lora_sampler()
    before = sampler.model(IDS).logits
    sampler.submit([7, 8], 1, 3, 1.0)
    lora_drain(sampler)
    assert sampler.model.config._attn_implementation == "sdpa" and torch.equal(sampler.model(IDS).logits, before)


# ================================================================ 3. GRPO: mathematics, log, roles
# Section: grpo_async.py. Mathematics, the log, roles, liveness.


# ================================================================ grpo_async.py: processes and fixtures
# Learners, actors and samplers run as real processes, killed by real signals. Most are forked from a server that has
# imported torch once (0.5 s to start instead of 5); the local run and the report start from the command line.

GRPO_FORK = multiprocessing.get_context("forkserver")
GRPO_FLAGS = ("--steps 8 --groups-per-step 3 --group-size 4 --lora-r 2 --lora-alpha 4 --max-staleness 9 --checkpoint-steps 4 "
              "--lr-schedule constant --warmup-steps 1 --chunks 1 --eval-steps -1").split()

def grpo_child(output, argv, env):
    """What a forked process does: `python grpo_async.py *argv`, with both outputs in a pipe."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.environ.update(env)
    sys.exit(grpo_async.main(argv))

def grpo_train_base(folder):
    open_bucket(str(folder)).publish("base", grpo_async.base_files(grpo_async.train_tiny_base(0)), {})

class GrpoProcess:
    """A running role: its lines as they come, its exit code."""

    def __init__(self, argv, env, by_command=False):
        argv, self.lines, self.is_over, self.changed = [str(a) for a in argv], [], False, threading.Condition()
        if by_command:
            self.process = subprocess.Popen([sys.executable, grpo_async.__file__, *argv], env=os.environ | env, text=True,
                                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
            stream = self.process.stdout
        else:
            reader, writer = GRPO_FORK.Pipe(duplex=False)
            self.process = GRPO_FORK.Process(target=grpo_child, args=(writer, argv, env), daemon=True)
            self.process.start()
            writer.close()
            stream = os.fdopen(os.dup(reader.fileno()), errors="replace")
        self.pid = self.process.pid
        threading.Thread(target=self.read, args=(stream,), daemon=True).start()

    def read(self, stream):
        for line in stream:
            with self.changed:
                self.lines.append(line.rstrip("\n"))
                self.changed.notify_all()
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    @property
    def text(self):
        return "\n".join(self.lines)

    def tail(self):
        return "\n".join(self.lines[-40:])

    def until(self, pattern, timeout_s=40.0, after=0):
        """The first line from number `after` on in which the regular expression is found."""
        def found():
            return next((line for line in self.lines[after:] if re.search(pattern, line)), None)
        with self.changed:
            self.changed.wait_for(lambda: found() is not None or self.is_over, timeout_s)
            assert found() is not None, f"{pattern!r} was not said by:\n{self.tail()}"
            return found()

    def end(self, timeout_s=60.0):
        """The exit code; negative for a signal."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait(timeout_s)
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"still running after {timeout_s} s:\n{self.tail()}"
        with self.changed:
            self.changed.wait_for(lambda: self.is_over, 10)
        return self.process.exitcode

    def done(self, timeout_s=60.0):
        """The summary's values of a process that must end well."""
        code = self.end(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.tail()}"
        return dict(pair.split("=", 1) for pair in self.until("^summary ").split()[1:])

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

@contextmanager
def grpo_processes():
    """start(*argv, **environment) of processes that end with the block."""
    running = []

    def start(*argv, by_command=False, **env):
        running.append(GrpoProcess(argv, env, by_command))
        return running[-1]
    try:
        yield start
    finally:
        for p in running:
            if isinstance(p.process, subprocess.Popen):
                for pid in grpo_session(p.pid):
                    os.kill(pid, signal.SIGKILL)
                p.process.wait()
            elif p.process.is_alive():
                p.kill()
                p.process.join()

def grpo_session(leader):
    """The processes of a session that still run: the leader's children, whoever is their parent now."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, fields = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(pid)
    return found

def grpo_wait(condition, what, timeout_s=30.0):
    """Waits for something in a folder (which has no events of its own)."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"no {what} within {timeout_s} s"
        time.sleep(0.02)

@pytest.fixture
def grpo_start():
    with grpo_processes() as start:
        yield start

@pytest.fixture(scope="session", autouse=True)
def grpo_training(tmp_path_factory):
    """The tiny base, trained once by the product's own function beside the first tests."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    multiprocessing.forkserver.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
        multiprocessing.forkserver.ensure_running()
    folder = tmp_path_factory.mktemp("grpo-base")
    process = GRPO_FORK.Process(target=grpo_train_base, args=(folder,), daemon=True)
    starting = threading.Thread(target=process.start)  # returns when the server has imported torch
    starting.start()
    yield starting, process, folder / "base"
    starting.join()
    process.kill()

@pytest.fixture(scope="session")
def grpo_base(grpo_training):
    starting, process, folder = grpo_training
    starting.join()
    process.join(180)
    assert process.exitcode == 0
    return folder

@pytest.fixture(scope="session")
def grpo_template(grpo_base, tmp_path_factory):
    """A bucket just before its first entry: made by a learner killed there, and an actor that wrote 30 groups."""
    folder = tmp_path_factory.mktemp("grpo") / "template"
    shutil.copytree(grpo_base, folder / "base")
    with grpo_processes() as start:
        learner = start("--role", "learner", "--bucket", folder, *GRPO_FLAGS, GRPO_CRASH="before-entry:1")
        start("--role", "actor", "--bucket", folder, "--queue-groups", 30, "--inflight", 16)
        assert learner.end() == -signal.SIGKILL, learner.text
        grpo_wait(lambda: len(grpo_keys(folder)) >= 30, "thirty groups")
    for key in grpo_keys(folder)[30:]:
        (folder / key).unlink()
    shutil.rmtree(folder / "members")
    # Every step of three groups has a gradient: about one in seventy had equal rewards throughout, and then no part counts.
    grpo_rewrite(folder, grpo_keys(folder)[::3], rewards=[0.0, 1.0, 0.0, 1.0])
    return folder

@pytest.fixture(scope="session")
def grpo_finished(grpo_template, tmp_path_factory):
    """The same bucket after eight uninterrupted steps."""
    folder = tmp_path_factory.mktemp("grpo") / "finished"
    shutil.copytree(grpo_template, folder)
    with grpo_processes() as start:
        learner = start("--role", "learner", "--bucket", folder, *GRPO_FLAGS)
        summary = learner.done()
    return folder, summary["digest"], grpo_entries(folder), learner.text

@pytest.fixture
def grpo_bucket(grpo_template, tmp_path):
    return Path(shutil.copytree(grpo_template, tmp_path / "bucket"))

def grpo_keys(folder, prefix="groups"):
    return sorted(f"{prefix}/{p.name}" for p in (folder / prefix).glob("[!.]*")) if (folder / prefix).exists() else []

def grpo_entries(folder):
    """The log, in order; there is exactly one entry per step."""
    entries = [json.loads((folder / key).read_text()) for key in grpo_keys(folder, "steps")]
    assert [e["step"] for e in entries] == list(range(1, len(entries) + 1))
    return entries

def grpo_account(folder, written):
    """Every group ever written is named by one entry or pending, and none is named twice."""
    named = [key for e in grpo_entries(folder) for key in grpo_async.named_groups(e)]
    pending = [key for key in grpo_keys(folder) if key not in named]
    assert len(named) == len(set(named))
    assert sorted(named + pending) == sorted(written)

def grpo_fold(start, run, groups, into, *flags):
    """Digest of a new learner that has only run.json, checkpoint 0, the entries and the groups."""
    for name in ("base", "checkpoints/000000", "adapters/v000000", "steps"):
        shutil.copytree(run / name, into / name)
    shutil.copytree(groups / "groups", into / "groups", dirs_exist_ok=True)
    shutil.copy(run / "run.json", into / "run.json")
    n = len(grpo_entries(into))
    return start("--role", "learner", "--bucket", into, "--steps", n, "--eval-steps", -1, *flags).done()["digest"]


# ================================================================ grpo_async.py: tiny models and groups

def grpo_policy(kind="llama", seed=0):
    """A tiny random model with random adapters in slots 0 and 1; the base itself answers with slot None."""
    torch.manual_seed(seed)
    small = dict(vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3)
    model = {"llama": lambda: LlamaForCausalLM(LlamaConfig(**small)),
             "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**small)),
             "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)),
             "sliding": lambda: MistralForCausalLM(MistralConfig(**small, sliding_window=4))}[kind]().eval()
    policy = grpo_async.Policy(model, lora.Lora(model, 2, 4.0, "all-linear", slots=2), None, [1])
    draw = torch.Generator().manual_seed(seed)
    for slot in (0, 1):
        policy.lora.load(slot, {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in policy.lora.shapes.items()})
    policy.lora.train(0)
    return policy

def grpo_plain(policy, slot, prompt, completion, temperature=1.0):
    """Oracle: logprobs of one completion by one plain forward of prompt and completion."""
    with policy.lora.use(slot):
        logits = policy.model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1:-1]
    return (logits.float() / temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]

def grpo_groups(policy, n, size=3, temperature=1.0, seed=0):
    """Groups of random tokens, their sampler logprobs near the policy's, so that some ratios are clipped and some not."""
    draw, groups = random.Random(seed), []
    for i in range(n):
        prompt = [draw.randrange(24) for _ in range(draw.randrange(2, 10))]
        ids = [[draw.randrange(24) for _ in range(draw.randrange(1, 8))] for _ in range(size)]
        with torch.no_grad():
            logprobs = [[min(0.0, x + draw.gauss(0, 0.3)) for x in grpo_plain(policy, 0, prompt, c, temperature).tolist()] for c in ids]
        groups.append(Group(i, prompt, ids, logprobs, [float(draw.randrange(3)) for _ in ids], [0] * size,
                            [draw.random() < 0.3 for _ in ids], {"prompt": "p", "completions": ["c"] * size}))
    return groups

def grpo_update(loss="dapo", **more):
    _, low, high = grpo_async.LOSSES[loss]
    return {"loss": loss, "clip_low": low, "clip_high": high, "kl": 0.0, "tis": 0.0, "temperature": 1.0, "max_tokens": 8,
            "mask_truncated": False, "clip_norm": 1.0, "weight_decay": 0.0, "lr": 1e-2, "normaliser": 1.0,
            "beta1": 0.9, "beta2": 0.999, "eps": 1e-8} | more

def grpo_gradient(policy, groups, update, budget=64):
    return grpo_async.chunk_gradient(policy, groups, update, budget)

def grpo_near(got, want, tolerance=1e-5):
    """Gradients equal up to rounding: the difference against the larger one's size."""
    scale = max(w.abs().max().item() for w in want.values())
    assert scale > 0
    assert max((got[name] - want[name]).abs().max().item() for name in want) <= tolerance * scale


# ================================================================ grpo_async.py: the mathematics

def test_advantages_are_deviations_over_the_population_std():
    """[1, 0, 0, 0]: mean 0.25, std sqrt(0.75 * 0.25) = 0.4330; without std just the deviations."""
    assert grpo_async.advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.7320, -0.57735, -0.57735, -0.57735], abs=1e-4)
    assert grpo_async.advantages([3.0, 1.0]) == pytest.approx([1.0, -1.0], abs=2e-6)
    assert grpo_async.advantages([1.0, 0.0, 0.0, 0.0], scale_by_std=False) == [0.75, -0.25, -0.25, -0.25]

def test_equal_rewards_and_a_single_reward_give_exactly_zero():
    """In fp32 the mean of eight 0.1 is not 0.1: the formula alone would give every rollout an advantage of 0.0074."""
    assert grpo_async.advantages([0.1] * 8) == [0.0] * 8
    assert grpo_async.advantages(torch.tensor([0.1] * 8).tolist()) == [0.0] * 8
    assert grpo_async.advantages([5.0]) == [0.0] and grpo_async.advantages([]) == []

@pytest.mark.parametrize("loss, clip, total, count", [
    ("dapo", (0.2, 0.28), -0.28, 3),     # -1.28 - 0.5 + 1.5: of A = -1 the worse, unclipped one counts
    ("grpo", (0.2, 0.2), 0.65, 2),       # (-1.2 - 0.5) / 2 + 1.5
    ("dr_grpo", (0.2, 0.2), -0.2, 20),   # -1.2 - 0.5 + 1.5; two rollouts of at most 10 tokens
    ("gspo", (3e-4, 4e-4), 0.5, 2),      # r = exp((ln 2 + ln 0.5) / 2) = 1: -1; and 1.5
])
def test_each_loss_is_its_equation_worked_by_hand(loss, clip, total, count):
    """Completion 0 has ratios 2 and 0.5 and A = 1; completion 1 has one token, ratio 1.5 and A = -1."""
    log_r = torch.tensor([[math.log(2), math.log(0.5)], [math.log(1.5), 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    more = {"max_tokens": 10} if loss == "dr_grpo" else {}
    got = grpo_async.LOSSES[loss][0](log_r, mask, torch.tensor([1.0, -1.0]), *clip, math.inf, torch.zeros(2, 2), **more)
    assert (got[0].item(), int(got[1])) == (pytest.approx(total, abs=1e-6), count)

def test_the_clip_stops_the_gradient_only_where_moving_on_would_pay():
    """dapo's bounds 0.8 and 1.28: A > 0 has no gradient above 1.28, A < 0 none below 0.8; the other sides keep theirs."""
    ratio = torch.tensor([1.3, 0.7, 1.3, 0.7])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    log_r = ratio.log()[:, None].requires_grad_()
    total, _ = grpo_async.dapo_loss(log_r, torch.ones(4, 1, dtype=torch.bool), advantage, 0.2, 0.28, math.inf, torch.zeros(4, 1))
    total.backward()
    assert log_r.grad[:, 0].tolist() == pytest.approx([0.0, -0.7, 1.3, 0.0])  # -A r where it is not clipped

@pytest.mark.parametrize("loss", grpo_async.LOSSES)
def test_masked_tokens_change_neither_sum_nor_count(loss):
    generator = torch.Generator().manual_seed(0)
    log_r, mask = torch.randn(2, 4, generator=generator), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    more = {"max_tokens": 10} if loss == "dr_grpo" else {}

    def value(log_r, mask, advantage, penalty):
        total, count = grpo_async.LOSSES[loss][0](log_r * mask, mask, advantage, 0.2, 0.2, math.inf, penalty, **more)
        return total.item(), int(count)
    advantage, penalty = torch.tensor([1.0, -1.0]), torch.rand(2, 4, generator=generator)
    wider = [torch.cat([x, torch.full_like(x[:1], fill)]) for x, fill in ((log_r, 3), (mask, 0), (advantage, 9), (penalty, 7))]
    longer = [F.pad(log_r, (0, 3), value=5.0), F.pad(mask, (0, 3)), advantage, F.pad(penalty, (0, 3), value=9.0)]
    want = value(log_r, mask, advantage, penalty)
    assert value(*wider) == pytest.approx(want) and value(*longer) == pytest.approx(want)

def test_k3_is_the_written_estimate_and_never_negative():
    """A reference twice as likely: d = ln 2, exp(d) - d - 1 = 0.3069; half as likely: 0.1931; equal: exactly 0."""
    learner = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    reference = learner + torch.tensor([[math.log(2), -math.log(2), 0.0, 300.0]])
    got = grpo_async.k3(learner, reference, torch.tensor([[True, True, True, False]]))
    assert got[0].tolist() == pytest.approx([1 - math.log(2), math.log(2) - 0.5, 0.0, 0.0], abs=1e-6)

def test_the_tis_cap_bounds_what_a_negative_advantage_can_do():
    """r = exp(5) = 148 and A = -1: the clip does not help (the worse one counts), the cap makes it 2, with no gradient."""
    log_r = torch.tensor([[5.0]], requires_grad=True)
    arguments = log_r, torch.tensor([[True]]), torch.tensor([-1.0]), 0.2, 0.2
    assert grpo_async.dapo_loss(*arguments, math.inf, torch.zeros(1, 1))[0].item() == pytest.approx(148.41, abs=0.01)
    for loss in (grpo_async.dapo_loss, grpo_async.grpo_loss, grpo_async.gspo_loss):
        total, _ = loss(*arguments, 2.0, torch.zeros(1, 1))
        total.backward()
        assert total.item() == 2.0 and log_r.grad.item() == 0.0

@pytest.mark.parametrize("loss", grpo_async.LOSSES)
def test_a_log_ratio_of_200_at_a_masked_position_stays_finite(loss):
    learner = torch.tensor([[-1.0, 200.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    more = {"max_tokens": 10} if loss == "dr_grpo" else {}
    log_r = grpo_async.log_ratio(learner, torch.tensor([[-1.1, 0.0]]), mask)
    penalty = grpo_async.k3(learner, torch.tensor([[-1.0, -400.0]]), mask)
    total, _ = grpo_async.LOSSES[loss][0](log_r, mask, torch.tensor([1.0]), 0.2, 0.2, math.inf, penalty, **more)
    total.backward()
    assert total.isfinite() and learner.grad.isfinite().all() and learner.grad[0, 1] == 0
    assert grpo_async.log_ratio(learner, learner.detach() - 200, ~mask)[0, 1] == 20  # a trained one is clamped

def test_the_sequence_weight_is_a_mean_not_a_sum():
    """2,000 tokens: of identical policies exactly 1; each 0.001 off gives exp(0.001), where a sum would give 7.4."""
    logprobs = -torch.rand(1, 2000, generator=torch.Generator().manual_seed(0)) * 3
    mask = torch.ones(1, 2000, dtype=torch.bool)
    for shift, want in ((0.0, 1.0), (0.001, math.exp(0.001))):
        log_r = grpo_async.log_ratio(logprobs + shift, logprobs, mask)
        total, _ = grpo_async.gspo_loss(log_r, mask, torch.tensor([1.0]), 0.5, 0.5, math.inf, torch.zeros(1, 2000))
        assert -total.item() == pytest.approx(want, abs=1e-5 if shift else 0)

@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "sliding"])
def test_packed_logprobs_equal_one_plain_forward_per_completion(kind):
    """Prompts shared by a group's completions, several groups in a row, several rows, several forwards; padded rows
    where the layers slide. 1e-5 is fp32 rounding of sums in another order."""
    policy = grpo_policy(kind)
    groups = grpo_groups(policy, 5)
    share, update = kind != "sliding", grpo_update(kl=1.0)
    for budget in (30, 64, 512):
        want = {(tuple(c), a): (g.prompt_ids, s) for g in groups for c, s, a in
                zip(g.completion_ids, g.sampler_logprobs, grpo_async.advantages(g.rewards))}
        with torch.no_grad():
            for rows in grpo_async.pack(groups, update, budget, share):
                assert rows.ids.numel() <= budget
                got, entropy = grpo_async.row_logprobs(policy, rows, 0, 0.7)
                assert len(entropy) == int(rows.mask.sum())
                for c, n in enumerate(rows.mask.sum(1).tolist()):
                    ids = rows.targets[c, :n].tolist()
                    key = next(k for k in want if k[0] == tuple(ids) and k[1] == pytest.approx(rows.advantage[c].item()))
                    prompt, sampler = want.pop(key)
                    assert (got[c, :n] - grpo_plain(policy, 0, prompt, ids, 0.7)).abs().max() < 1e-5
                    assert rows.sampler_logprobs[c, :n].tolist() == pytest.approx(sampler) and not got[c, n:].any()
        assert not want  # every completion stands in exactly one row

def test_flex_attention_gives_what_the_sdpa_mask_gives():
    """What a CUDA device runs, here without compiling it."""
    policy = grpo_policy()
    groups = grpo_groups(policy, 3)
    rows, = grpo_async.pack(groups, grpo_update(kl=1.0), 128, True)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        want, _ = grpo_async.row_logprobs(policy, rows, 0, 1.0)
        policy.model.set_attn_implementation("flex_attention")
        got, _ = grpo_async.row_logprobs(policy, rows, 0, 1.0)
    assert (got - want).abs().max() < 1e-5

@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_attention_of_a_packed_row_equals_a_mask_over_all_of_it(dtype, tolerance):
    """Oracle: every score written out, both passes; three pieces, completions of one token (no place of their own), fewer
    key heads than query heads. Relative to the largest entry: rounding, and bf16's 8 bits."""
    torch.manual_seed(0)
    pieces = [[5, 3, 0, 7], [4, 0, 0, 0], [1, 2, 9, 0]]
    piece, segment = (torch.tensor([x for i, p in enumerate(pieces) for j, n in enumerate(p) for x in [(i, j)[which]] * n]) for which in (0, 1))
    at = torch.arange(len(piece))
    sees = (at <= at[:, None]) & (piece == piece[:, None]) & ((segment == 0) | (segment == segment[:, None]))
    q, k, v = (torch.randn(1, len(at), heads, 8, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (6, 2, 2))
    got = lora.branch_attention(None, q, k, v, torch.tensor(pieces)[None, None], 0.5)[0].transpose(1, 2)
    scores = (q.float() @ k.float().repeat_interleave(3, 1).mT * 0.5).masked_fill(~sees, -math.inf)
    want, grad = scores.softmax(-1) @ v.float().repeat_interleave(3, 1), torch.randn(got.shape)
    pairs = zip((got, *torch.autograd.grad(got, (q, k, v), grad.to(dtype))), (want, *torch.autograd.grad(want, (q, k, v), grad)))
    assert all((a - b).abs().max() <= tolerance * b.abs().max() for a, b in pairs)

@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding"])
def test_recomputing_layers_changes_no_gradient_and_keeps_less(kind):
    """--recompute; the reference of --kl runs between a forward and its backward, under another slot."""
    policy, update = grpo_policy(kind), grpo_update(kl=0.1)
    groups, kept, got = grpo_groups(policy, 3), [], []
    for _ in range(2):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.data_ptr(): t}) or t, lambda t: t):
            got.append(grpo_gradient(policy, groups, update)[0])
        kept.append(sum(t.nbytes for t in saved.values()))
        lora.recompute_layers(policy.model)
    assert all(torch.equal(got[0][name], got[1][name]) for name in got[0])
    assert kept[1] < kept[0] / 2

def test_a_step_keeps_what_its_backward_reads_and_nothing_that_grows_faster_than_tokens():
    """Numbers per token and layer of width 32, MLP 48: the inputs of norms and of adapters (4 × 32), q and the output
    (2 × 32), k and v (2 × 16), the MLP's four (4 × 48), x A^T of seven adapters, log-sum-exps and scales: 436. Outside the
    layers at most 100. So there is no mask, no logits, no second copy of a layer's output, and no weight has a gradient."""
    policy = grpo_policy()
    for n in (4, 16):
        saved, tokens = {}, 10 + n * 39
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.untyped_storage().data_ptr(): t}) or t, lambda t: t):
            grpo_gradient(policy, [Group(0, [3] * 10, [[4] * 40] * n, [[-3.0] * 40] * n, [0.0, 1.0] * (n // 2), [0] * n, [False] * n)],
                          grpo_update(), 4096)
        weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
        kept = sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in weights) / 4
        assert kept <= tokens * (2 * 436 + 100)
    assert all(p.grad is None for p in policy.model.parameters())

@pytest.mark.parametrize("loss", grpo_async.LOSSES)
def test_the_gradient_of_packed_groups_is_autograd_of_the_written_formula(loss):
    """Everything at once, completion by completion: temperature, --kl against the base (adapter off), --tis, truncated
    completions left out, dr_grpo without std."""
    policy = grpo_policy()
    groups = grpo_groups(policy, 4, temperature=0.7)
    update = grpo_update(loss, kl=0.05, tis=1.2, temperature=0.7, mask_truncated=True)
    total, count, low, high = 0.0, 0, update["clip_low"], update["clip_high"]
    for g in groups:
        mean = sum(g.rewards) / len(g.rewards)
        std = math.sqrt(sum((x - mean) ** 2 for x in g.rewards) / len(g.rewards))
        for ids, sampler, reward, cut in zip(g.completion_ids, g.sampler_logprobs, g.rewards, g.truncated):
            if cut:
                continue
            learner = grpo_plain(policy, 0, g.prompt_ids, ids, 0.7)
            reference = grpo_plain(policy, None, g.prompt_ids, ids, 0.7).detach()
            a = (reward - mean) / (1 if loss == "dr_grpo" else std + 1e-6)
            log_r, d = learner - torch.tensor(sampler), reference - learner
            kl = 0.05 * (d.exp() - d - 1) * log_r.detach().exp().clamp(max=1.2)
            r = (log_r.mean() if loss == "gspo" else log_r).exp().clamp(max=1.2)
            terms = -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)
            terms = (terms + kl) if loss != "gspo" else terms + kl.mean()
            total = total + (terms.sum() if loss in ("dapo", "dr_grpo") else terms.mean())
            count += {"dapo": len(ids), "dr_grpo": 8}.get(loss, 1)
    parameters = policy.lora.parameters(0)
    want = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values()))))
    got, sums = grpo_gradient(policy, groups, update)
    grpo_near(got, want, 1e-4)
    assert (sums["loss"], sums["count"]) == (pytest.approx(total.item(), rel=1e-4), count)

def test_the_kl_reference_is_the_base_with_the_adapter_switched_off():
    """Equal rewards, so that only the KL term is left: none without --kl, none for an adapter that changes nothing."""
    policy = grpo_policy()
    groups = [replace(g, rewards=[1.0] * 3) for g in grpo_groups(policy, 2)]
    none, sums = grpo_gradient(policy, groups, grpo_update())
    assert sums["count"] == 0 and not any(g.any() for g in none.values())
    some, sums = grpo_gradient(policy, groups, grpo_update(kl=0.1))
    assert sums["kl"] > 0.01 and any(g.any() for g in some.values())
    policy.lora.load(0, lora.init_adapter(policy.lora.shapes, 0))
    fresh, sums = grpo_gradient(policy, groups, grpo_update(kl=0.1))
    assert sums["kl"] == pytest.approx(0, abs=1e-9) and max(g.abs().max() for g in fresh.values()) < 1e-6

@pytest.mark.parametrize("loss", grpo_async.LOSSES)
def test_a_step_cut_in_one_two_three_or_eight_chunks_has_the_same_gradient(loss):
    policy, update = grpo_policy(), grpo_update(loss)
    groups = grpo_groups(policy, 8)
    whole, sums = grpo_gradient(policy, groups, update)
    for n in (2, 3, 8):
        cuts = [len(groups) * i // n for i in range(n + 1)]
        parts = [grpo_gradient(policy, groups[a:b], update) for a, b in zip(cuts, cuts[1:])]
        grpo_near({name: sum(grads[name] for grads, _ in parts) for name in whole}, whole)
        assert sum(s["count"] for _, s in parts) == sums["count"]

def test_the_normaliser_of_an_entry_is_the_count_that_the_loss_returns():
    """An entry is written before its gradient is computed; both must count the same tokens."""
    policy = grpo_policy()
    groups = grpo_groups(policy, 5)
    groups[1] = replace(groups[1], rewards=[1.0] * 3)
    for loss, kl, masks in itertools.product(grpo_async.LOSSES, (0.0, 0.1), (False, True)):
        update = grpo_update(loss, kl=kl, mask_truncated=masks)
        _, sums = grpo_gradient(policy, groups, update)
        assert grpo_async.normaliser(update, [n for g in groups for n in g.trained_tokens(update)]) == sums["count"] > 0

def test_truncated_completions_are_not_trained_with_mask_truncated():
    """Its tokens can be anything: the gradient and the count are those of the others, whose advantages it still moves."""
    policy, update = grpo_policy(), grpo_update(mask_truncated=True)
    group = replace(grpo_groups(policy, 1)[0], rewards=[1.0, 0.0, 0.5], truncated=[False, True, False])
    other = replace(group, completion_ids=[group.completion_ids[0], [3, 2, 1, 0], group.completion_ids[2]],
                    sampler_logprobs=[group.sampler_logprobs[0], [-9.0] * 4, group.sampler_logprobs[2]])
    (got, sums), (want, wanted) = grpo_gradient(policy, [group], update), grpo_gradient(policy, [other], update)
    assert sums["count"] == wanted["count"] == len(group.completion_ids[0]) + len(group.completion_ids[2])
    grpo_near(got, want)
    _, all_of_them = grpo_gradient(policy, [other], grpo_update())
    assert all_of_them["count"] == sums["count"] + 4

@pytest.mark.parametrize("loss", grpo_async.LOSSES)
def test_completions_of_one_token_are_trained(loss):
    """Of one ordinary token, and of the stop token alone."""
    policy = grpo_policy()
    group = Group(0, [5, 6], [[7], [1], [8]], [[-1.0], [-2.0], [-3.0]], [1.0, 0.0, 0.0], [0] * 3, [True, False, True])
    grads, sums = grpo_gradient(policy, [group], grpo_update(loss))
    assert sums["count"] == (24 if loss == "dr_grpo" else 3) and sums["trained_tokens"] == 3
    assert all(g.isfinite().all() for g in grads.values()) and any(g.any() for g in grads.values())

@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_ratio_is_one_while_sampler_and_learner_have_the_same_weights(temperature):
    """Our own sampler's logprobs against the learner's packed forward: 1e-4 in fp32."""
    policy = grpo_policy()
    sampler = lora.Sampler(policy.model, policy.lora, {1}, max_rows=8, max_len=32)
    sampler.load("policy-v0", {name: t.detach().clone() for name, t in policy.lora.parameters(0).items()})
    asked = [(prompt, sampler.submit(prompt, 4, 8, temperature, "policy-v0", seed)) for seed, prompt in enumerate(([3, 4], [5, 6, 7]))]
    while sampler.step():
        pass
    groups = [Group(i, prompt, [c.token_ids for c in done], [c.logprobs for c in done], [1.0, 0.0, 0.0, 0.0], [0] * 4,
                    [c.finish_reason == "length" for c in done])
              for i, (prompt, done) in enumerate((prompt, future.result()) for prompt, future in asked)]
    _, sums = grpo_gradient(policy, groups, grpo_update(temperature=temperature))
    assert sums["ratio"] / sums["trained_tokens"] == pytest.approx(1, abs=1e-4) and sums["clipped"] == 0

def test_the_written_adamw_is_torch_optim_adamw_to_rounding():
    """Twenty steps of summed parts, clipping (sometimes) and weight decay against the library: 1e-6 is fp32 rounding.
    The gradients of c are as small as eps."""
    draw = torch.Generator().manual_seed(0)
    start, size = {name: torch.randn(3, 4, generator=draw) for name in "abc"}, {"a": 1.0, "b": 1.0, "c": 1e-8}
    zeros = {name: torch.zeros_like(t) for name, t in start.items()}
    state = grpo_async.State(0, 0, start, zeros, zeros)
    oracle = {name: torch.nn.Parameter(t.clone()) for name, t in start.items()}
    optimizer = torch.optim.AdamW(oracle.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(1, 21):
        parts = [{name: torch.randn(t.shape, generator=draw) * size[name] * 10 ** (step % 3 - 1) for name, t in start.items()} for _ in range(3)]
        for name, p in oracle.items():
            p.grad = sum(part[name] for part in parts) / 7.0
        want = torch.nn.utils.clip_grad_norm_(oracle.values(), 1.0).item()
        optimizer.step()
        state, norm = grpo_async.apply(state, grpo_update(normaliser=7.0, weight_decay=0.1), parts)
        assert (state.step, state.updates) == (step, step) and norm == pytest.approx(want, rel=1e-5)
    assert max((state.adapter[name] - oracle[name]).abs().max().item() for name in start) < 1e-6

@pytest.mark.parametrize("value, normaliser", [(math.nan, 4.0), (math.inf, 4.0), (1.0, 0.0)])
def test_a_sum_that_is_not_finite_or_counts_nothing_changes_no_state(value, normaliser):
    one, zero = {"a": torch.ones(2)}, {"a": torch.zeros(2)}
    state = grpo_async.State(6, 2, one, zero, one)
    after, _ = grpo_async.apply(state, grpo_update(normaliser=normaliser), [{"a": torch.tensor([1.0, value])}, one])
    assert after.step == 7 and grpo_async.digest(after.tensors()) == grpo_async.digest(state.tensors())
    moved, _ = grpo_async.apply(state, grpo_update(normaliser=4.0), [one, one])
    assert moved.step == 7 and grpo_async.digest(moved.tensors()) != grpo_async.digest(state.tensors())

def test_a_digest_is_sha256_over_name_shape_and_fp32_bytes_in_name_order():
    tensors = {"b": torch.tensor([[1.0], [2.0]]), "a": torch.tensor([-0.0])}
    written = b"a [1]\n" + struct.pack("<f", -0.0) + b"b [2, 1]\n" + struct.pack("<2f", 1, 2)
    assert grpo_async.digest(tensors) == hashlib.sha256(written).hexdigest()
    assert grpo_async.digest(dict(reversed(tensors.items()))) == grpo_async.digest(tensors)
    assert grpo_async.digest({"b": tensors["b"].T, "a": tensors["a"]}) != grpo_async.digest(tensors)
    assert grpo_async.digest({"c": tensors["b"], "a": tensors["a"]}) != grpo_async.digest(tensors)

def test_a_digest_changes_with_any_bit():
    values = torch.tensor([0.0, 1.0, -2.5, 1e-30])
    seen = {grpo_async.digest({"a": values})}
    for i, bit in itertools.product(range(4), range(32)):
        flipped = values.clone()
        flipped.view(torch.int32)[i] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
        seen.add(grpo_async.digest({"a": flipped}))
    assert len(seen) == 1 + 4 * 32

def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    run = {"lr": 1.0, "warmup_steps": 4, "lr_schedule": "linear"}
    assert [grpo_async.learning_rate(t, 14, run) for t in (1, 4, 9, 14)] == pytest.approx([0.25, 1.0, 0.55, 0.1])
    constant = run | {"lr_schedule": "constant"}
    assert [grpo_async.learning_rate(t, 14, constant) for t in (2, 4, 14, 99)] == [0.5, 1.0, 1.0, 1.0]
    assert [grpo_async.policy_version(t, {"sync_steps": 3}) for t in (0, 2, 3, 8, 9)] == [0, 0, 1, 2, 3]


# ================================================================ grpo_async.py: the log and resume

def grpo_spoil(kind, data, run_id, way):
    """The bytes of a group or part with one fault; but for the first two, one that its own sha256 does not show."""
    if way == "a flipped byte":
        return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    if way == "cut short":
        return data[:len(data) // 2]
    tensors, header = grpo_async.unpack_object(kind, data, run_id)
    name = "rewards" if kind == "group" else min(tensors)
    if way == "a missing tensor":
        del tensors[name]
    elif way == "a wrong shape":
        tensors[name] = tensors[name][:-1].clone()
    elif way == "a token out of range":
        tensors["completion_ids"][0] = 16
    else:
        tensors[name].view(-1)[0] = float(way)
    return grpo_async.pack_object(kind, tensors, **{k: v for k, v in header.items() if k not in ("format", "version", "sha256")})

def grpo_rewrite(folder, keys, **changes):
    """Writes groups anew with some fields changed; of another version: as new groups, whose keys are returned."""
    run, written = json.loads((folder / "run.json").read_text()), []
    for key in keys:
        group = replace(grpo_async.read_group((folder / key).read_bytes(), key, run), **changes)
        written.append(f"groups/{min(group.versions):06d}{key[13:]}")
        (folder / written[-1]).write_bytes(grpo_async.write_group(group, run))
    return written

GRPO_FAULTS = ("a flipped byte", "cut short", "a missing tensor", "a wrong shape", "nan", "inf")

def test_a_learner_killed_at_any_point_ends_in_the_same_state(grpo_start, grpo_template, grpo_finished, tmp_path):
    """Six learners, each killed by SIGKILL at another point, started again with the same command; then without any
    part: the same eight entries over the same groups, each group in one entry, and the same bits as never killed."""
    _, digest, entries, _ = grpo_finished
    points = ("before-entry:3", "after-entry:3", "after-part:3", "during-publish:3", "during-checkpoint:4", "before-cleanup:4")
    folders = [Path(shutil.copytree(grpo_template, tmp_path / str(i))) for i in range(len(points))]

    def begin(i, **env):
        return grpo_start("--role", "learner", "--bucket", folders[i], *GRPO_FLAGS, **env)
    for i, killed in enumerate([begin(i, GRPO_CRASH=point) for i, point in enumerate(points)]):
        assert killed.end() == -signal.SIGKILL, killed.text
        done = len(grpo_keys(folders[i], "steps"))
        again = begin(i)
        assert f"decided={done} " in again.until("^resumed ") and done in (2, 3, 4, 5)
        assert again.done()["digest"] == digest, points[i]
        assert [e["chunks"] for e in grpo_entries(folders[i])] == [e["chunks"] for e in entries]  # oldest first:
        assert [key for e in entries for chunk in e["chunks"] for key in chunk] == grpo_keys(grpo_template)[:24]
        grpo_account(folders[i], grpo_keys(grpo_template))
        first = int(re.search(r"step=(\d+)", again.until("^step=")).group(1))
        assert first in (done, done + 1) and "staleness_max=" in again.text
    (tmp_path / "fold").mkdir()
    assert grpo_fold(grpo_start, folders[0], grpo_template, tmp_path / "fold") == digest

def test_runs_on_every_kind_of_bucket_complete_and_another_kind_folds_their_entries_to_the_same_state(
        grpo_base, bucket_served, bucket_weed, bucket_aws, bucket_fast, tmp_path):
    """Ten steps each, by a learner and an actor: in a folder, on our server, on SeaweedFS, where every fifth call fails, and where
    writes are listed late, repeated late, dropped if empty, and who asks too early is told so for the rest of the run.
    Then the start, the entries and the groups are copied to another kind of bucket, and a learner there folds them."""
    flags = "--steps 10 --groups-per-step 2 --group-size 4 --lora-r 2 --lora-alpha 4 --checkpoint-steps 20 --eval-steps -1".split()
    manifest, files = open_bucket(grpo_base.parent).fetch("base")
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(grpo_processes())
        faults = stack.enter_context(bucket_faulty(bucket_served, rate=0.2))
        habits = stack.enter_context(bucket_faulty(bucket_served, habits=["late", "unseen", "empty", "twice"], seconds=0.5))
        places = [tmp_path, f"{bucket_served[0]}/tests", f"{bucket_weed()}/tests", faults.bucket.address, habits.bucket.address]
        runs, folds = ([open_bucket(f"{place}/{name}-{os.urandom(4).hex()}") for place in places] for name in ("run", "fold"))
        learn = lambda store, *flags: start("--role", "learner", "--bucket", store.address, "--eval-steps", -1, *flags, **BUCKET_KEYS)
        for store in runs + folds:
            store.publish("base", files, manifest)
        learners = [learn(store, *flags) for store in runs]
        actors = [start("--role", "actor", "--bucket", store.address, **BUCKET_KEYS) for store in runs]
        digests = []
        for learner, actor, store in zip(learners, actors, runs):
            summary = learner.done(150)
            assert actor.end(60) == 0, actor.text
            assert summary["steps"] == "10" and int(summary["groups_trained"]) + int(summary["groups_equal"]) == 20, store.address
            digests.append(summary["digest"])
        assert set(habits.asked_early) == set()
        for store, fold in zip(runs, folds[1:] + folds[:1]):
            for prefix in "checkpoints/000000/", "adapters/v000000/", "steps/", "groups/", "run.json":
                for key in store.list(prefix):
                    fold.put_new(key, store.get(key))
        learners = [learn(fold, "--steps", 10) for fold in folds[1:] + folds[:1]]
        assert [learner.done(150)["digest"] for learner in learners] == digests

def test_a_learner_killed_at_version_7_goes_on_from_there(grpo_start, grpo_bucket):
    """Not from 0, and with the rollouts it had: none becomes stale by the crash."""
    assert grpo_start("--role", "learner", "--bucket", grpo_bucket, *GRPO_FLAGS, GRPO_CRASH="before-entry:8").end() == -9
    again = grpo_start("--role", "learner", "--bucket", grpo_bucket, *GRPO_FLAGS)
    again.done()
    assert re.search(r"step=8 version=8 .* dropped=0 ", again.until("^step="))

def test_a_higher_step_count_goes_on_and_a_lower_one_is_complete(grpo_start, grpo_bucket, grpo_finished):
    _, digest, entries, _ = grpo_finished
    flags = ["--role", "learner", "--bucket", grpo_bucket, "--eval-steps", -1]  # all else is in run.json
    half = grpo_start(*flags, "--steps", 5).done()
    assert half["steps"] == "5" and half["digest"] == entries[5]["digest_before"]
    again = grpo_start(*flags, "--steps", 3)
    assert again.done()["digest"] == half["digest"] and "complete" in again.text
    assert again.done()["wall_s"] == half["wall_s"]  # of the run, not of the look at it
    assert grpo_start(*flags, "--steps", 8).done()["digest"] == digest
    assert json.loads((grpo_bucket / "final/manifest.json").read_text())["digest"] == digest

def test_another_runs_flags_are_refused_by_name(grpo_start, grpo_bucket):
    """By a learner and by a joiner; nothing in the bucket changes."""
    for role, flags, names in (("learner", ["--lora-r", 4, "--lr", 0.5, "--steps", 9], {"--lora-r", "--lr"}),
                               ("actor", ["--temperature", 0.5], {"--temperature"}), ("actor", ["--model", "other"], {"--model"})):
        refused = grpo_start("--role", role, "--bucket", grpo_bucket, *flags)
        assert refused.end() == 2
        line = refused.lines[-1]
        assert line.startswith("error: ") and {f for f in re.findall(r"--[a-z-]+(?= is )", line)} == names
    assert not (grpo_bucket / "steps").exists()
    base = grpo_bucket / "base/model.safetensors"
    base.write_bytes(base.read_bytes()[:-256] + bytes(256))  # the last 64 weights, of the last layer's norm
    other = grpo_start("--role", "actor", "--bucket", grpo_bucket)
    assert other.end() == 2 and "not the run's base" in other.lines[-1]

@pytest.mark.parametrize("fault", ["missing", "flipped"])
def test_a_spoilt_checkpoint_is_passed_over_and_said(grpo_start, grpo_finished, tmp_path, fault):
    folder = Path(shutil.copytree(grpo_finished[0], tmp_path / "bucket"))
    state, = (folder / "checkpoints/000004").glob("*/state.safetensors")
    state.unlink() if fault == "missing" else state.write_bytes(grpo_spoil("state", state.read_bytes(), "", "a flipped byte"))
    again = grpo_start("--role", "learner", "--bucket", folder, *GRPO_FLAGS)
    assert again.done()["digest"] == grpo_finished[1]
    assert "checkpoint 4 is passed over" in again.text and "resumed checkpoint=0 " in again.text
    for state in (folder / "checkpoints").glob("*/*/state.safetensors"):
        state.unlink()
    refused = grpo_start("--role", "learner", "--bucket", folder, *GRPO_FLAGS)
    assert refused.end() == 1 and "no checkpoint" in refused.lines[-1]

def test_a_state_that_the_log_contradicts_is_said_loudly(grpo_start, grpo_finished, tmp_path):
    """A part of step 6 replaced by a valid one of other values: entry 7 was not written on that state."""
    folder = Path(shutil.copytree(grpo_finished[0], tmp_path / "bucket"))
    part, run_id = folder / "parts/000006/000.safetensors", json.loads((folder / "run.json").read_text())["run_id"]
    part.write_bytes(grpo_spoil("part", part.read_bytes(), run_id, "5.0"))
    learner = grpo_start("--role", "learner", "--bucket", folder, *GRPO_FLAGS[2:], "--steps", 9)
    assert learner.end() == 1 and "DIVERGED" in learner.text and len(grpo_entries(folder)) == 8

def test_an_entry_that_cannot_be_read_ends_the_run_with_one_line(grpo_start, grpo_finished, tmp_path):
    folder = Path(shutil.copytree(grpo_finished[0], tmp_path / "bucket"))
    (folder / "steps/000006.json").write_text('{"format": "async')
    learner = grpo_start("--role", "learner", "--bucket", folder, *GRPO_FLAGS)
    assert learner.end() == 1 and "Traceback" not in learner.text and "000006" in learner.lines[-1]

def test_corrupted_groups_are_set_aside_and_the_run_goes_on(grpo_start, grpo_bucket):
    """Seven kinds of fault in 30 groups, and seven steps of three from the rest."""
    run_id, faults = json.loads((grpo_bucket / "run.json").read_text())["run_id"], (*GRPO_FAULTS, "a token out of range")
    keys = grpo_keys(grpo_bucket)
    for key, way in zip(keys[::4], faults):
        (grpo_bucket / key).write_bytes(grpo_spoil("group", (grpo_bucket / key).read_bytes(), run_id, way))
    learner = grpo_start("--role", "learner", "--bucket", grpo_bucket, "--steps", 7, "--eval-steps", -1)
    summary, entries = learner.done(), grpo_entries(grpo_bucket)
    for key, way in zip(keys[::4], faults):
        assert f"{key} is set aside" in learner.text, way
        assert "invalid" in entries[0]["dropped"][key] and all(key not in chunk for e in entries for chunk in e["chunks"])
    assert summary["groups_dropped"] == "7" and summary["groups_pending"] == "2"
    grpo_account(grpo_bucket, keys)

def test_a_corrupted_group_does_not_starve_the_queue(grpo_start, grpo_base, tmp_path):
    """By default the queue holds one step's groups; one of them spoilt must not leave learner and actor waiting for
    each other."""
    shutil.copytree(grpo_base, tmp_path / "base")
    flags = "--steps 4 --groups-per-step 3 --group-size 4 --lora-r 2 --max-staleness 1 --eval-steps -1".split()
    learner = grpo_start("--role", "learner", "--bucket", tmp_path, *flags, GRPO_CRASH="before-entry:2")
    actor = grpo_start("--role", "actor", "--bucket", tmp_path)
    assert learner.end() == -signal.SIGKILL
    key = [k for k in grpo_keys(tmp_path) if k not in grpo_async.named_groups(grpo_entries(tmp_path)[0])][0]
    (tmp_path / key).write_bytes(grpo_spoil("group", (tmp_path / key).read_bytes(), "", "a flipped byte"))
    again = grpo_start("--role", "learner", "--bucket", tmp_path, *flags)
    again.until("^summary ", 20)
    assert actor.end() == 0 and key in again.text

def test_corrupted_parts_are_set_aside_and_computed_anew(grpo_start, grpo_finished, tmp_path):
    """The parts of steps 1 to 6 each with another fault; without the later checkpoints they must be folded again."""
    folder = Path(shutil.copytree(grpo_finished[0], tmp_path / "bucket"))
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    for step, way in enumerate(GRPO_FAULTS, 1):
        part = folder / f"parts/{step:06d}/000.safetensors"
        part.write_bytes(grpo_spoil("part", part.read_bytes(), run_id, way))
    for step in (4, 8):
        shutil.rmtree(folder / f"checkpoints/{step:06d}")
    learner = grpo_start("--role", "learner", "--bucket", folder, *GRPO_FLAGS)
    assert learner.done()["digest"] == grpo_finished[1]
    for step, way in enumerate(GRPO_FAULTS, 1):
        assert f"parts/{step:06d}/000.safetensors is set aside" in learner.text, way

@pytest.mark.parametrize("every", [1, 2])
def test_what_no_restart_can_need_is_deleted(grpo_start, grpo_bucket, grpo_finished, every):
    """Parts, and groups that an entry names, below the checkpoint before the newest confirmed one; what is left is
    enough to go on from."""
    run = json.loads((grpo_bucket / "run.json").read_text()) | {"checkpoint_steps": every}
    (grpo_bucket / "run.json").write_text(json.dumps(run))
    keys, flags = grpo_keys(grpo_bucket), ["--role", "learner", "--bucket", grpo_bucket, "--eval-steps", -1, "--steps"]
    assert grpo_start(*flags, 8).done()["digest"] == grpo_finished[1]
    assert len(list((grpo_bucket / "parts").glob("*/*.safetensors"))) <= 3 * every
    assert not any((grpo_bucket / key).exists() for key in grpo_async.named_groups(grpo_entries(grpo_bucket)[0]))
    assert grpo_start(*flags, 10).done()["groups_dropped"] == "0"
    assert [k for e in grpo_entries(grpo_bucket) for k in grpo_async.named_groups(e)] == keys

@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_late_second_put_of_a_consumed_group_changes_nothing(grpo_start, grpo_bucket, tmp_path, is_restarted):
    """The writer's retry lands after the group was trained and deleted: one so old that it is not listed any more, and
    one of a version that still counts as young. Neither is trained, nor recorded as a drop."""
    run = json.loads((grpo_bucket / "run.json").read_text()) | {"checkpoint_steps": 1, "max_staleness": 3}
    (grpo_bucket / "run.json").write_text(json.dumps(run))
    keys = []
    for i, key in enumerate(grpo_keys(grpo_bucket)):
        keys += grpo_rewrite(grpo_bucket, [key], versions=[i // 3] * 4)
        if i >= 3:
            (grpo_bucket / key).unlink()
    saved = Path(shutil.copytree(grpo_bucket / "groups", tmp_path / "groups"))
    for key in keys[24:]:
        (grpo_bucket / key).unlink()
    flags = ["--role", "learner", "--bucket", grpo_bucket, "--eval-steps", -1, "--steps", 10]
    learner = grpo_start(*flags)
    learner.until("^step=8 ")
    gone = keys[:3] + keys[15:18] + keys[24:]
    grpo_wait(lambda: not any((grpo_bucket / key).exists() for key in gone), "cleaning")
    if is_restarted:
        learner.kill()
        learner.end()
        learner = grpo_start(*flags)
        learner.until("^ready ")
    for key in gone:
        open_bucket(str(grpo_bucket)).put_new(key, (saved / key[7:]).read_bytes())
    learner.done()
    assert [k for e in grpo_entries(grpo_bucket) for k in grpo_async.named_groups(e)] == keys
    assert is_restarted or not any((grpo_bucket / key).exists() for key in keys[:3])  # the dead one, alive for 15 s, may have had the cleaning

def test_two_learners_end_in_the_state_of_one(grpo_start, grpo_template, tmp_path):
    """Both from the first step on, the second with no flags but the bucket: one entry each step, the parts of either,
    the same bits as one alone with the same three chunks, and as a third that folds entries and groups."""
    both, alone, fold = (tmp_path / name for name in ("both", "alone", "fold"))
    for folder in (both, alone):
        shutil.copytree(grpo_template, folder)
    fold.mkdir()
    first = grpo_start("--role", "learner", "--bucket", both, *GRPO_FLAGS, "--chunks", 3)
    second = grpo_start("--role", "learner", "--bucket", both, "--chunks", 3, "--eval-steps", -1)
    digests = {p.done()["digest"] for p in (first, second)}
    digests.add(grpo_start("--role", "learner", "--bucket", alone, *GRPO_FLAGS, "--chunks", 3).done()["digest"])
    digests.add(grpo_fold(grpo_start, both, grpo_template, fold))
    assert len(digests) == 1
    assert [e["chunks"] for e in grpo_entries(both)] == [e["chunks"] for e in grpo_entries(alone)]
    grpo_account(both, grpo_keys(grpo_template))

def test_a_learner_that_joins_or_stops_midway_ends_in_the_same_state(grpo_start, grpo_bucket, grpo_finished, tmp_path):
    """Groups for three steps; a second learner joins, is stopped, and wakes when the first has done all eight; a third
    one is killed on its way. Chunks are fixed to one, so the state is the uninterrupted one."""
    later = tmp_path / "later"
    later.mkdir()
    for key in grpo_keys(grpo_bucket)[9:]:
        shutil.move(grpo_bucket / key, later)
    first = grpo_start("--role", "learner", "--bucket", grpo_bucket, *GRPO_FLAGS, "--chunks", 1)
    first.until("^step=3 ")
    second = grpo_start("--role", "learner", "--bucket", grpo_bucket, "--chunks", 1, "--eval-steps", -1)
    second.until("^step=3 |^ready ")
    second.kill(signal.SIGSTOP)
    third = grpo_start("--role", "learner", "--bucket", grpo_bucket, "--chunks", 1, "--eval-steps", -1, GRPO_CRASH="during-publish:5")
    third.until("^ready ")
    for path in sorted(later.iterdir()):
        shutil.move(path, grpo_bucket / "groups")
    want = first.done()["digest"]
    second.kill(signal.SIGCONT)
    assert second.done()["digest"] == want == grpo_finished[1]
    third.end()

class GrpoRival(bucket.FileBucket):
    """A bucket where somebody else is quicker: `rivals[key]` makes other bytes of ours and writes them just before."""

    def __init__(self, folder, **rivals):
        super().__init__(folder)
        self.rivals = rivals

    def put_new(self, key, data):
        name = re.sub(r"\W", "_", key.partition(".")[0])
        if name in self.rivals:
            assert super().put_new(key, self.rivals.pop(name)(data))
        return super().put_new(key, data)

def grpo_other_entry(data):
    entry = json.loads(data)
    return json.dumps(entry | {"chunks": [entry["chunks"][0][::-1][:2]], "written_by": "rival"}).encode()

def grpo_other_part(data):
    header, tensors = grpo_async.read_header(data), load_tensors(data)
    keep = {k: v for k, v in header.items() if k not in ("format", "version", "sha256", "header_sha256")}
    return grpo_async.pack_object("part", {n: t + 1 for n, t in tensors.items()}, **keep)

@pytest.mark.parametrize("rivals, said", [({"steps_000003": grpo_other_entry}, ""), ({"parts_000003_000": grpo_other_part}, "DIVERGED")])
def test_a_learner_that_went_ahead_alone_yields_to_what_landed_first(grpo_start, grpo_bucket, capsys, rivals, said):
    """It computes while its entry is on the way, and goes on while its part is. When a rival's entry was there first,
    that one is computed; when a rival's part was, the state is folded again with it. Either way: the log's state."""
    bucket = GrpoRival(grpo_bucket, **rivals)
    learner = grpo_learner(bucket)
    try:
        learner.train()
    finally:
        learner.member.stop()
    assert not bucket.rivals and said in capsys.readouterr().err
    assert [e["written_by"] for e in grpo_entries(grpo_bucket)].count("rival") == (0 if said else 1)
    assert grpo_start("--role", "learner", "--bucket", grpo_bucket, *GRPO_FLAGS).done()["digest"] == learner.digest
    grpo_account(grpo_bucket, grpo_keys(grpo_bucket) + [k for k in learner.consumed if k not in grpo_keys(grpo_bucket)])

def test_a_learner_that_waits_alone_hears_that_the_run_went_on(grpo_start, grpo_finished, tmp_path):
    """As one that wakes when the others have made the last steps and left: no group will come, so none of its own
    entries can tell it."""
    folder, later = Path(shutil.copytree(grpo_finished[0], tmp_path / "bucket")), tmp_path / "later"
    shutil.rmtree(folder / "groups")
    later.mkdir()
    for key in [f"steps/{step:06d}.json" for step in range(5, 9)]:
        shutil.move(folder / key, later)
    shutil.move(folder / "checkpoints/000008", tmp_path)
    learner = grpo_start("--role", "learner", "--bucket", folder, *GRPO_FLAGS)
    learner.until("^ready ")
    shutil.move(tmp_path / "000008", folder / "checkpoints")
    for path in sorted(later.iterdir()):
        shutil.move(path, folder / "steps")
    assert learner.done()["digest"] == grpo_finished[1]

def grpo_learner(bucket, *flags):
    """A learner in this process, started; what --role learner does before its first step."""
    args = grpo_async.arguments(["--role", "learner", "--bucket", str(bucket.root), *GRPO_FLAGS, *flags])
    run = grpo_async.join_run(bucket, args)
    policy = grpo_async.load_policy(bucket, run, args, slots=2)
    learner = grpo_async.Learner(bucket, run, args, policy, grpo_async.load_task(bucket, run, args, policy.tokenizer))
    learner.start()
    return learner

def test_a_write_that_fails_behind_ends_the_wait_for_groups(grpo_bucket):
    """No groups come because the adapter they need could not be written: the reason is that, not missing actors."""
    class Full(bucket.FileBucket):
        def publish(self, prefix, files, meta=None):
            raise BucketError("no space left")
    shutil.rmtree(grpo_bucket / "groups")
    shutil.rmtree(grpo_bucket / "adapters")
    learner = grpo_learner(Full(grpo_bucket), "--wait-s", "20")
    try:
        with pytest.raises(BucketError, match="no space left"):
            learner.train()
    finally:
        learner.member.stop()

def test_a_version_is_the_state_of_one_step_only(grpo_base, grpo_start, tmp_path):
    """With three steps a version, a learner that ends at step 4 publishes what step 3 made, and nothing else as v1, not
    even where v1 is missing."""
    shutil.copytree(grpo_base, tmp_path / "base")
    learner = grpo_start("--role", "learner", "--bucket", tmp_path, *GRPO_FLAGS, "--steps", 4, "--sync-steps", 3)
    actor = grpo_start("--role", "actor", "--bucket", tmp_path)
    learner.done()
    actor.end()
    entries, keys = grpo_entries(tmp_path), grpo_keys(tmp_path, "adapters")
    assert keys == ["adapters/v000000", "adapters/v000001"]
    manifest = json.loads((tmp_path / keys[1] / "manifest.json").read_text())
    assert (manifest["step"], manifest["digest"]) == (3, entries[3]["digest_before"])
    shutil.rmtree(tmp_path / keys[1])
    grpo_start("--role", "learner", "--bucket", tmp_path, "--eval-steps", -1).done()
    assert grpo_keys(tmp_path, "adapters") == keys[:1]

def test_a_learner_three_times_slower_than_the_fastest_is_given_no_chunk(grpo_bucket):
    """Others would wait for it. One whose pace is not known yet is; one alone always is."""
    bucket = open_bucket(str(grpo_bucket))
    args = grpo_async.arguments(["--role", "learner", "--bucket", str(grpo_bucket), *GRPO_FLAGS])
    run = grpo_async.join_run(bucket, args)
    policy = grpo_async.load_policy(bucket, run, args, slots=2)

    def company(own, **others):
        learner = grpo_async.Learner(bucket, run, args, policy, None)
        for name, pace_s in others.items():
            bucket.put(f"members/learner-{name}.json", json.dumps(
                {"id": name, "url": "", "counter": 1} | ({"pace_s": pace_s} if pace_s else {})).encode())
        learner.id, learner.pace_s = "m", own
        return "".join(learner.find_company())
    assert company(5.0) == "m"
    assert company(1.0, a=2.0, z=4.0) == "am"
    assert company(1.0, a=None, z=0.3) == "az"
    assert company(0.0, a=None, z=0.3) == "amz"

def test_a_policy_that_does_not_move_is_said(grpo_start, grpo_bucket):
    """Every group with equal rewards: consumed and counted, version after version with the same digest."""
    grpo_rewrite(grpo_bucket, grpo_keys(grpo_bucket), rewards=[0.1] * 4)
    learner = grpo_start("--role", "learner", "--bucket", grpo_bucket, *GRPO_FLAGS)
    summary, entries = learner.done(), grpo_entries(grpo_bucket)
    assert "not moving" in learner.text and len({e["digest_before"] for e in entries} | {summary["digest"]}) == 1
    assert summary["groups_equal"] == "24" and "step=8 version=8 reward=0.1 " in learner.text

def test_staleness_is_decided_by_the_entry_and_recorded(grpo_start, grpo_bucket):
    """30 groups of version 0, --max-staleness 2, --sync-steps 2: six steps (versions 0 to 2) use 18; the seventh, at
    version 3, drops the other twelve and trains the three that are of its version."""
    run = json.loads((grpo_bucket / "run.json").read_text()) | {"max_staleness": 2, "sync_steps": 2}
    (grpo_bucket / "run.json").write_text(json.dumps(run))
    flags = ["--role", "learner", "--bucket", grpo_bucket, "--eval-steps", -1, "--steps"]
    assert grpo_start(*flags, 6).done()["groups_pending"] == "12"
    keys = grpo_keys(grpo_bucket)
    fresh = grpo_rewrite(grpo_bucket, keys[:3], versions=[3, 3, 3, 4])
    summary, entry = grpo_start(*flags, 7).done(), grpo_entries(grpo_bucket)[-1]
    assert entry["chunks"] == [fresh] and sorted(entry["dropped"]) == keys[18:] and summary["groups_dropped"] == "12"
    assert all("stale" in reason for reason in entry["dropped"].values())
    assert [p.name for p in sorted((grpo_bucket / "adapters").iterdir())] == ["v000000", "v000001", "v000002", "v000003"]

def test_a_sampler_with_other_weights_shows_in_mismatch(grpo_start, grpo_bucket):
    """The learner scores a group again under the version that it names: half a nat off is no rounding."""
    run = json.loads((grpo_bucket / "run.json").read_text())
    for key in grpo_keys(grpo_bucket):
        group = grpo_async.read_group((grpo_bucket / key).read_bytes(), key, run)
        grpo_rewrite(grpo_bucket, [key], sampler_logprobs=[[x - 0.5 for x in row] for row in group.sampler_logprobs])
    learner = grpo_start("--role", "learner", "--bucket", grpo_bucket, *GRPO_FLAGS, "--steps", 1)
    assert float(learner.done()["mismatch"]) == pytest.approx(0.5, abs=1e-3) and "MISMATCH" in learner.text

def test_a_group_is_read_as_it_was_written(grpo_template):
    run = json.loads((grpo_template / "run.json").read_text())
    key = grpo_keys(grpo_template)[0]
    data = (grpo_template / key).read_bytes()
    group = grpo_async.read_group(data, key, run)
    assert grpo_async.write_group(group, run) == data
    assert len(group.rewards) == 4 and {len(group.prompt_ids)} == {6} and set(group.rewards) <= {0.0, 1.0}
    for wrong_key, wrong_run in ((key.replace("000000", "000001", 1), run), (key, run | {"run_id": "another"}), (key, run | {"max_tokens": 1})):
        with pytest.raises(Corrupt):
            grpo_async.read_group(data, wrong_key, wrong_run)


# ================================================================ grpo_async.py: roles

def test_published_adapters_are_pefts_and_export_copies_and_merges(grpo_start, grpo_finished, tmp_path):
    """PEFT on final/, on adapters/v000008 and on the exported copy, and the merged model without PEFT: the same logits
    as the learner's own layers, and not the base's."""
    peft = pytest.importorskip("peft")
    folder = grpo_finished[0]
    for name, more in (("copy", []), ("merged", ["--merge"])):
        assert grpo_start("--role", "export", "--bucket", folder, "--out", tmp_path / name, *more).end() == 0
    ids = torch.tensor([[8, 7, 3, 9, 6, 5, 4, 7]])

    def base():
        return AutoModelForCausalLM.from_pretrained(folder / "base")

    def logits(model):
        with torch.no_grad():
            return model(ids).logits
    model = base()
    ours = lora.Lora(model, 2, 4.0, "all-linear", slots=1)
    ours.load(0, lora.read_adapter({p.name: p.read_bytes() for p in (folder / "final").iterdir()})[0])
    with ours.use(0):
        want = logits(model)
    assert (logits(base()) - want).abs().max() > 0.1
    for path in (folder / "final", folder / "adapters/v000008", tmp_path / "copy"):
        assert (logits(peft.PeftModel.from_pretrained(base(), path)) - want).abs().max() < 1e-4
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - want).abs().max() < 1e-4

def test_eval_scores_the_version_that_is_asked_for(grpo_start, grpo_finished):
    runs = [grpo_start("--role", "eval", "--bucket", grpo_finished[0], *more) for more in ([], ["--policy-version", 0])]
    assert [p.end() for p in runs] == [0, 0]
    newest, untouched = (dict(x.split("=") for x in p.until("^eval version").split()[1:]) for p in runs)
    assert (newest["version"], untouched["version"]) == ("8", "0") and newest["sampled"] != untouched["sampled"]
    unknown = grpo_start("--role", "eval", "--bucket", grpo_finished[0], "--policy-version", 77)
    assert unknown.end() == 2 and "77" in unknown.lines[-1]

def test_a_report_needs_no_torch_and_no_completion_can_end_its_script(grpo_start, grpo_finished, tmp_path):
    folder = Path(shutil.copytree(grpo_finished[0], tmp_path / "bucket"))
    entry = json.loads((folder / "steps/000002.json").read_text())
    entry["previous"]["sample"]["best"]["text"] = "</script><b>"
    (folder / "steps/000002.json").write_text(json.dumps(entry))
    (tmp_path / "torch.py").write_text("raise ImportError('the report must not import torch')")
    report = grpo_start("--role", "report", "--bucket", folder, by_command=True, PYTHONPATH=str(tmp_path))
    assert report.end() == 0, report.text
    html = (folder / "report.html").read_text()
    template = (Path(grpo_async.__file__).parent / "docs/report.html").read_text()
    assert html.count("</script>") == template.count("</script>") and "\\u003c/script>\\u003cb>" in html
    data, _ = json.JSONDecoder().raw_decode(html, html.index('{"run": '))
    assert [s["step"] for s in data["steps"]] == list(range(1, 9)) and data["steps"][0]["sample"] and "NaN" not in html

def test_scripts_copied_without_their_page_say_so_and_write_the_metrics(grpo_finished, tmp_path):
    for name in ("grpo_async", "lora", "bucket", "proxy"):
        shutil.copy(Path(grpo_async.__file__).parent / f"{name}.py", tmp_path)
    folder = Path(shutil.copytree(grpo_finished[0], tmp_path / "bucket", ignore=shutil.ignore_patterns("report.html", "metrics.jsonl")))
    command = [sys.executable, tmp_path / "grpo_async.py", "--role", "report", "--bucket", folder]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and re.fullmatch(rf"warning: {tmp_path}/docs/report.html is missing, .*\n", run.stderr), run.stderr
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 8 and not (folder / "report.html").exists()

@pytest.mark.parametrize("staleness", [0, 1])
def test_a_learner_and_an_actor_started_in_either_order_learn(grpo_start, grpo_base, tmp_path, staleness):
    """Nothing between them but a folder. Greedy held-out accuracy rises by 0.2 at least (by 0.48 to 0.89 in 16 tries).
    With --max-staleness 0 it is the synchronous loop: every group is of the learner's version, and none is dropped."""
    shutil.copytree(grpo_base, tmp_path / "base")
    asking = ["--role", "actor", "--bucket", tmp_path, "--queue-groups", 100]  # not the queue but staleness sets the pace
    actor = grpo_start(*asking) if staleness else None
    if actor:
        actor.until("^start ")
    flags = "--steps 10 --groups-per-step 12 --warmup-steps 3 --lr-schedule constant --lr 0.006".split()
    learner = grpo_start("--role", "learner", "--bucket", tmp_path, *flags, "--max-staleness", staleness)
    actor = actor or grpo_start(*asking)
    summary = learner.done()
    assert actor.end() == 0, actor.text
    assert float(summary["eval_after_greedy"]) > float(summary["eval_before_greedy"]) + 0.2, summary
    assert float(summary["mismatch"]) < 1e-3 and summary["groups_dropped"] == "0"
    assert float(summary["staleness_mean"]) <= staleness and re.findall(r"staleness_max=(\d+)", learner.text) != []
    assert max(map(int, re.findall(r"staleness_max=(\d+)", learner.text))) <= staleness
    if not staleness:
        assert float(summary["ratio_mean"]) == pytest.approx(1, abs=1e-4)

def test_any_process_of_a_deployment_may_die_and_come_back(grpo_start, grpo_base, tmp_path):
    """Learner, actor, proxy and two samplers, each started by hand. Each but the learner is killed by SIGKILL in mid
    run and started again (the actor and one sampler as new ones, the proxy at its old port), and the learner at last.
    The run completes; no group is lost or trained twice; a fold of the log is the same state."""
    shutil.copytree(grpo_base, tmp_path / "base")
    at = ["--bucket", tmp_path]
    flags = "--steps 20 --groups-per-step 6 --group-size 4 --lora-r 2 --max-staleness 6 --checkpoint-steps 100 --lr 0.001 --eval-steps -1".split()
    learner = grpo_start("--role", "learner", *at, *flags, GRPO_CRASH="after-entry:15")
    samplers = [grpo_start("--role", "sampler", *at, "--listen", "127.0.0.1:0") for _ in range(2)]
    proxy = grpo_start("--role", "proxy", *at, "--listen", "127.0.0.1:0")
    url = re.search(r"url=(http://(\S+))", proxy.until("^ready role=proxy"))
    asking = ["--sampler", url[1], "--queue-groups"]  # the second may queue more than the first, whose work in flight counts for 15 s
    actor = grpo_start("--role", "actor", *at, *asking, 12)
    for step, name in ((3, "sampler"), (6, "proxy"), (9, "actor")):
        learner.until(f"^step={step} ", 60)
        victim = {"sampler": samplers[0], "proxy": proxy, "actor": actor}[name]
        victim.kill()
        victim.end()
        listen = url[2] if name == "proxy" else "127.0.0.1:0"
        again = grpo_start("--role", name, *at, *([*asking, 24] if name == "actor" else ["--listen", listen]))
        actor = again if name == "actor" else actor
    assert learner.end() == -signal.SIGKILL, learner.text
    again = grpo_start("--role", "learner", *at, *flags)
    summary = again.done()
    assert actor.end() == 0, actor.text
    assert summary["steps"] == "20" and float(summary["mismatch"]) < 1e-3
    grpo_account(tmp_path, grpo_keys(tmp_path))
    (tmp_path / "fold").mkdir()
    assert grpo_fold(grpo_start, tmp_path, tmp_path, tmp_path / "fold") == summary["digest"]

def test_the_local_run_restarts_what_dies_and_ends_within_five_seconds_of_ctrl_c(grpo_start, grpo_base, tmp_path):
    """`python grpo_async.py` itself: a killed sampler, actor and proxy come back; SIGINT leaves no process and a bucket
    that a learner and an actor finish."""
    shutil.copytree(grpo_base, tmp_path / "base")
    flags = ["--bucket", tmp_path, *"--steps 300 --groups-per-step 4 --group-size 4 --lora-r 2 --eval-steps -1".split()]
    local = grpo_start(*flags, "--samplers", 1, by_command=True)
    local.until("step=3 ", 90)
    members = {}
    for path in (tmp_path / "members").glob("*.json"):
        members[path.name.split("-")[0]] = json.loads(path.read_text())["pid"]
    assert len(members) == 4 and len(grpo_session(local.pid)) == 5
    seen = len(local.lines)
    for role, number in (("sampler", signal.SIGKILL), ("actor", signal.SIGTERM), ("proxy", signal.SIGTERM)):
        os.kill(members[role], number)  # by SIGTERM they end in order
    for role in ("sampler", "actor", "proxy"):
        local.until(f"warning: {role}.* died", after=seen)
    local.until("ready role=actor", 60, after=seen)
    local.until("^step=", 60, after=len(local.lines) + 1)
    began = time.monotonic()
    os.killpg(local.pid, signal.SIGINT)
    assert local.end(10) != 0
    grpo_wait(lambda: not grpo_session(local.pid), "end of every process", 5 - (time.monotonic() - began))
    assert "Traceback" not in local.text
    done = len(grpo_keys(tmp_path, "steps"))
    learner = grpo_start("--role", "learner", "--bucket", tmp_path, "--steps", done + 2, "--eval-steps", -1)
    grpo_start("--role", "actor", "--bucket", tmp_path)
    assert learner.done()["steps"] == str(done + 2)
    grpo_account(tmp_path, set(grpo_keys(tmp_path)) | {k for e in grpo_entries(tmp_path) for k in grpo_async.named_groups(e)})


# ================================================================ grpo_async.py: liveness

def test_a_learner_without_actors_says_so_and_goes_on_when_one_comes(grpo_start, grpo_bucket):
    for key in grpo_keys(grpo_bucket):
        (grpo_bucket / key).unlink()
    learner = grpo_start("--role", "learner", "--bucket", grpo_bucket, *GRPO_FLAGS)
    line = learner.until("waiting .*actor", 30)
    assert "0 of 3" in line and "step 1" in line and "--role actor" in line
    grpo_start("--role", "actor", "--bucket", grpo_bucket)
    learner.done()

def test_every_role_says_that_it_waits_for_a_run_and_gives_up_at_its_limit(grpo_start, tmp_path):
    waiting = [grpo_start("--role", role, "--bucket", tmp_path, "--out", tmp_path / "out", "--wait-s", 6) for role in ("actor", "sampler", "eval", "report", "export")]
    for p in waiting:
        assert "--role learner" in p.until("waiting .*run.json")
        assert p.end() == 1 and "6 s" in p.lines[-1]

@contextmanager
def grpo_peer(*plan):
    """A sampler of somebody else's at a URL that answers completions by plan, the last item for ever: a status, "hang",
    "drop" (the connection), or how many of the n asked for. Yields (url, [(time, request body)])."""
    plan, asked, over = list(plan), [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def answer(self, status, value):
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer(200, {"data": [{"id": "tiny"}, {"id": "policy-v0"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((time.monotonic(), body))
            what = plan.pop(0) if len(plan) > 1 else plan[0]
            if what == "hang":
                over.wait(30)
            elif what == "drop":
                self.close_connection = True
            elif what >= 400:
                self.answer(what, {"error": {"message": f"planned {what}"}})
            else:
                self.answer(200, {"choices": [{"token_ids": [6 + i, 7, 1], "logprobs": {"token_logprobs": [-0.5] * 3},
                                               "finish_reason": "stop"} for i in range(min(what, body["n"]))]})

        def log_message(self, *_):
            pass
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        over.set()
        server.shutdown()
        server.server_close()

def grpo_asking(start, folder, url, *more):
    """An actor with one group in flight, in a bucket with a run and no groups."""
    for key in grpo_keys(folder):
        (folder / key).unlink()
    return start("--role", "actor", "--bucket", folder, "--sampler", url, "--inflight", 4, *more)

def test_a_group_closes_at_its_deadline_with_the_survivors(grpo_start, grpo_bucket):
    """Three of four answered, then silence: a group of three, of which nothing is kept twice; one of one is dropped."""
    with grpo_peer(3, "hang") as (url, asked):
        actor = grpo_asking(grpo_start, grpo_bucket, url, "--group-deadline-s", 1.5)
        grpo_wait(lambda: grpo_keys(grpo_bucket), "group", 10)
        assert [body["n"] for _, body in asked[:2]] == [4, 1]
        group = grpo_async.read_group((grpo_bucket / grpo_keys(grpo_bucket)[0]).read_bytes(), grpo_keys(grpo_bucket)[0],
                                      json.loads((grpo_bucket / "run.json").read_text()))
        assert group.completion_ids == [[6, 7, 1], [7, 7, 1], [8, 7, 1]]
        assert "dropped: 0 of 4" in actor.until("dropped", 10)  # the next one has no survivors

def test_404_429_503_and_lost_connections_back_off_and_then_go_on(grpo_start, grpo_bucket):
    with grpo_peer(404, 429, 503, "drop", 500, 4) as (url, asked):
        actor = grpo_asking(grpo_start, grpo_bucket, url)
        grpo_wait(lambda: grpo_keys(grpo_bucket), "group", 20)
        gaps = [b[0] - a[0] for a, b in zip(asked[:5], asked[1:6])]
        assert min(gaps) > 0.02 and gaps[-1] > 0.3 and sum(gaps) < 6, gaps  # from 0.05 s on, doubled, with jitter
        assert not actor.is_over

def test_400_drops_the_prompt_and_401_stops_the_actor(grpo_start, grpo_bucket):
    with grpo_peer(400, 400, 4) as (url, asked):
        actor = grpo_asking(grpo_start, grpo_bucket, url)
        actor.until("left out.*planned 400")
        grpo_wait(lambda: grpo_keys(grpo_bucket), "group", 10)
        assert asked[0][1]["prompt"] != asked[1][1]["prompt"]
        actor.kill()  # its groups would fill the queue, and the next one would not ask
    with grpo_peer(401) as (url, asked):
        actor = grpo_asking(grpo_start, grpo_bucket, url)
        assert actor.end() == 2 and "401" in actor.lines[-1] and "--token" in actor.lines[-1] and len(asked) == 1

def test_what_an_editor_or_a_mount_leaves_in_a_folder_is_passed_over(grpo_base, tmp_path):
    store = bucket.open_bucket(tmp_path)
    for key in ("groups/.DS_Store", "groups/.nfs000000001", "steps/Thumbs.db", "steps/000002.json~", "checkpoints/.DS_Store", "groups/000003-a-000001.safetensors"):
        store.put(key, b"x")
    assert grpo_async.listed(store, "groups/") == ["groups/000003-a-000001.safetensors"]
    assert grpo_async.listed(store, "steps/") == [] and grpo_async.manifests(store, "checkpoints/") == []

def test_a_mistyped_sampler_is_refused_and_a_silent_one_is_named(grpo_start, grpo_bucket):
    actor = grpo_asking(grpo_start, grpo_bucket, "localhost:8000")
    assert actor.end() == 2 and "--sampler localhost:8000: expected http://HOST:PORT" in actor.lines[-1]
    with socket.socket() as closed:  # bound, so that nobody else takes it, and not listening
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        actor = grpo_asking(grpo_start, grpo_bucket, url, "--wait-s", 6)
        assert actor.end() == 1 and f"for a sampler that serves a version of the policy ({url}: ConnectionError)" in actor.lines[-1]

@pytest.mark.parametrize("choice", [{}, {"token_ids": None}, {"token_ids": [10 ** 30]}, {"token_ids": [-1]}, {"logprobs": {"token_logprobs": [None]}}])
def test_a_reply_that_cannot_be_used_is_asked_for_again(monkeypatch, choice):
    good = {"token_ids": [6], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    replies, run = iter([{"choices": [{"finish_reason": "stop"} | choice]}, {"choices": [good | choice, good]}, {"choices": [good]}]), \
        {"vocabulary": 16, "max_tokens": 7, "temperature": 1.0, "stop_ids": [1], "group_size": 1, "seed": 0}
    sampler = grpo_async.HttpSampler(None, run, "http://127.0.0.1:9", "")
    monkeypatch.setattr(sampler, "call", lambda *_: next(replies))
    actor = SimpleNamespace(run=run, args=SimpleNamespace(group_deadline_s=20), done=threading.Event(), id="a", version=0, sampler=sampler)
    assert [c.token_ids for c, _ in grpo_async.Actor.collect(actor, [3], 0)] == [[6]]

@pytest.mark.parametrize("answer", [0, 400])
def test_a_sampler_that_never_gives_anything_is_not_asked_in_a_hot_loop(grpo_start, grpo_bucket, answer):
    """200 with no completion (a server paused in mode abort), and 400 to everything."""
    with grpo_peer(answer) as (url, asked):
        grpo_asking(grpo_start, grpo_bucket, url)
        grpo_wait(lambda: asked, "request", 10)
        threading.Event().wait(2)
        assert len(asked) < 40

@pytest.fixture
def grpo_score(grpo_base):
    """score(function): what a task makes of one reward function for four completions "42" of one prompt."""
    row, done = {"prompt": "27+15=", "answer": 42, "unused": 1}, [lora.Completion([10, 8, 1], [-1.0] * 3, "stop", None)] * 4
    task = grpo_async.Task([], [], [], lora.load_tokenizer(str(grpo_base)))

    def score(function, timeout_s=60.0):
        task.rewards, task.timeout_s = [("mine", 2.0, function)], timeout_s
        return task.score(row, done)
    return score

def test_a_reward_function_gets_what_trls_would(grpo_score):
    seen = {}

    def reward(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, **columns)
        return [1, 0.5, None, True]
    assert grpo_score(reward) == [2.0, 1.0, None, 2.0]
    assert (seen["prompts"], seen["completions"], seen["ids"], seen["answer"]) == (["27+15="] * 4, ["42"] * 4, [[10, 8, 1]] * 4, [42] * 4)
    assert grpo_score(lambda completions, answer: [float(c == str(a)) for c, a in zip(completions, answer)]) == [2.0] * 4

@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_reward_that_is_no_number_leaves_its_rollout_out(grpo_score, value):
    assert grpo_score(lambda completions: [value] * 4) == [None] * 4
    assert grpo_score(lambda completions: [value, value, 1.0, 0.0]) == [None, None, 2.0, 0.0]

@pytest.mark.parametrize("values", [[1.0], None, ["good"] * 4, [1.0, [2.0], 3.0, 4.0]])
def test_a_reward_of_the_wrong_length_or_kind_is_the_users_mistake(grpo_score, values):
    """At once, or after three groups left out; the message names the function."""
    with pytest.raises(UserError, match="mine"):
        for _ in range(3):
            assert grpo_score(lambda completions: values) == [None] * 4

def test_a_reward_that_hangs_or_raises_costs_its_group_and_three_in_a_row_stop_the_actor(grpo_score, capsys):
    forever, began = threading.Event(), time.monotonic()
    assert grpo_score(lambda completions: forever.wait(60), timeout_s=0.1) == [None] * 4
    forever.set()
    assert time.monotonic() - began < 2
    assert re.search("mine.*0.1 s", capsys.readouterr().err)
    assert grpo_score(lambda completions: [1.0] * 4) == [2.0] * 4

    def broken(completions):
        raise ZeroDivisionError("no such luck")
    assert grpo_score(broken) == grpo_score(broken) == [None] * 4
    assert re.search("mine.*no such luck", capsys.readouterr().err)
    with pytest.raises(UserError, match="mine.*ZeroDivisionError.*no such luck"):
        grpo_score(broken)

def test_a_line_separator_inside_a_string_is_part_of_the_row_and_absurd_lines_are_refused():
    assert grpo_async.read_rows(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False), "d.jsonl") == [{"prompt": "a\u2028b\x85c"}]
    for text in ("[" * 100_000, '{"prompt": ' + "9" * 5000 + "}"):
        with pytest.raises(UserError, match="d.jsonl line 1: not JSON"):
            grpo_async.read_rows(text, "d.jsonl")

def test_a_reward_that_fp32_cannot_hold_leaves_its_rollout_out(grpo_score):
    assert grpo_score(lambda completions: [1e39, 1.0, -1e39, 2.0]) == [None, 2.0, None, 4.0]

def test_a_reward_file_is_part_of_the_run(grpo_start, grpo_base, tmp_path):
    """A joiner without it, or with another version of it, is told; one that raises stops its actor with exit code 2."""
    shutil.copytree(grpo_base, tmp_path / "base")
    file, data = tmp_path / "reward.py", tmp_path / "data.txt"
    file.write_text("def mine(completions, **_):\n    raise ValueError('not today')\n")
    data.write_text("\n".join(json.dumps({"prompt": f"{a}+15="}) for a in range(10, 20)))
    flags = ["--bucket", tmp_path, "--reward", f"{file}:mine"]
    learner = grpo_start("--role", "learner", *flags, "--task", "math", "--data", data, "--groups-per-step", 2, "--steps", 2, "--eval-steps", -1)
    learner.until("^ready ")
    broken = grpo_start("--role", "actor", *flags)
    assert broken.end() == 2 and re.search("mine.*ValueError.*not today", broken.lines[-1])
    without = grpo_start("--role", "actor", "--bucket", tmp_path)
    assert without.end() == 2 and "--reward" in without.lines[-1]
    file.write_text("def mine(completions, **_):\n    return [float(len(c)) for c in completions]\n")
    other = grpo_start("--role", "actor", *flags)
    assert other.end() == 2 and "--reward" in other.lines[-1]

def test_a_reward_that_never_gives_a_number_stops_the_actor(grpo_start, grpo_base, tmp_path):
    shutil.copytree(grpo_base, tmp_path / "base")
    (tmp_path / "reward.py").write_text("def nothing(completions, **_):\n    return [None, float('nan')] + [None] * (len(completions) - 2)\n")
    flags = ["--bucket", tmp_path, "--reward", f"{tmp_path}/reward.py:nothing"]
    grpo_start("--role", "learner", *flags, "--groups-per-step", 2, "--steps", 2, "--eval-steps", -1).until("^ready ")
    actor = grpo_start("--role", "actor", *flags)
    assert actor.end() == 2 and re.search(r"error: 1\d\d groups in a row without one finite reward", actor.lines[-1])

def test_ctrl_c_while_torch_is_imported_and_later_ends_in_order_and_says_so(grpo_start, tmp_path):
    early = subprocess.Popen([sys.executable, grpo_async.__file__, "--role", "actor", "--bucket", tmp_path], stderr=subprocess.PIPE, text=True)
    grpo_wait(lambda: "libtorch" in Path(f"/proc/{early.pid}/maps").read_text(), "torch", 30)
    early.send_signal(signal.SIGINT)
    assert early.communicate(timeout=30)[1] == "" and early.returncode == 1
    actor = grpo_start("--role", "actor", "--bucket", tmp_path)
    actor.until("waiting 5 s for run.json")
    os.kill(actor.pid, signal.SIGINT)
    assert actor.end() == 1 and actor.lines[-1].startswith("warning: stopped; the same command goes on"), actor.text

@pytest.mark.parametrize("answer, completion, want", [
    ("42", "so 41 or \\boxed{42}", 1), ("42", "\\boxed{41} 42", 0), ("42", "is 42.", 1), ("1234.5", "it is 1,234.50", 1), ("-3", "x = -3", 1),
    ("3", "x = -3", 0), ("#### 7", "text\n#### 7", 1), ("7", "#### 7 apples\nno: 8", 0), ("B", "The answer is (B).", 1), ("B", "A or C", 0), ("5", "", 0)])
def test_math_answers_are_compared_as_numbers_or_letters(answer, completion, want):
    assert grpo_async.math_reward(completions=[completion], answer=[answer]) == [want]
    assert grpo_async.math_reward(completions=[[{"role": "assistant", "content": completion}]], answer=[answer]) == [want]

def test_an_addition_counts_when_it_stops_by_itself_on_the_sum():
    assert grpo_async.add_reward(["42", ",12,42", "421", ",12,42", ""], [42] * 5, ["stop", "stop", "stop", "length", "stop"]) == [1, 1, 0, 0, 0]

@pytest.mark.parametrize("text, problem", [
    ('{"prompt": "1+1="}\n\n{"prompt": "1+', "data.txt.*line 3"), ('{"prompt": "1+1=", "answer": 2}\n[1]', "data.txt.*line 2"),
    ('{"answer": 2}', "line 1.*prompt"), ('{"prompt": 5}', "line 1"), ('{"prompt": []}', "line 1"), ("\n \n", "no rows"),
    ('{"prompt": "1+1="}', "answer"), ('{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+1="}', "answer")])
def test_a_data_file_that_cannot_be_used_is_one_line_and_exit_2(grpo_start, grpo_base, tmp_path, text, problem):
    """And a mended one is accepted in the same bucket."""
    shutil.copytree(grpo_base, tmp_path / "base")
    (tmp_path / "data.txt").write_text(text)
    flags = ["--role", "learner", "--bucket", tmp_path, "--task", "math", "--data", tmp_path / "data.txt"]
    refused = grpo_start(*flags)
    assert refused.end() == 2 and re.search(problem, refused.lines[-1]) and "Traceback" not in refused.text
    (tmp_path / "data.txt").write_text('{"prompt": "1+1=", "answer": 2}\n')
    grpo_start(*flags).until("^ready role=learner")

def test_a_data_file_with_empty_lines_one_prompt_and_one_too_long_trains(grpo_start, grpo_base, tmp_path):
    shutil.copytree(grpo_base, tmp_path / "base")
    rows = [{"prompt": "27+15=", "answer": 42}, {"prompt": "27+15=" * 9, "answer": 42}]
    (tmp_path / "data.txt").write_text("\n\n".join(map(json.dumps, rows)) + "\n\n")
    learner = grpo_start("--role", "learner", "--bucket", tmp_path, "--task", "math", "--data", tmp_path / "data.txt",
                         *"--steps 2 --groups-per-step 2 --group-size 4 --lora-r 2".split())
    actor = grpo_start("--role", "actor", "--bucket", tmp_path)
    assert learner.done()["steps"] == "2" and actor.end() == 0 and "data of 2 rows is too little" in learner.text
    assert int(re.search(r"prompts_too_long=(\d+)", actor.text)[1]) == 1  # a row counts once, however many workers meet it
    (tmp_path / "long").mkdir()
    shutil.copytree(grpo_base, tmp_path / "long/base")
    (tmp_path / "data.txt").write_text(json.dumps(rows[1]))
    grpo_start("--role", "learner", "--bucket", tmp_path / "long", "--task", "math", "--data", tmp_path / "data.txt", "--steps", 1, "--eval-steps", -1)
    actor = grpo_start("--role", "actor", "--bucket", tmp_path / "long")
    assert actor.end() == 2 and "--max-prompt-tokens" in actor.lines[-1]


# ================================================================ 4. HTTP: replica and router


# ---- proxy.py: HTTP ---------------------------------------------------------------------------------------------------------




PROXY_TOKENS = 16                                    # vocabulary of the fake engine: fewer than the canary's 20 logprobs, as the tiny model's

def proxy_table(prompt, version: int) -> dict[int, float]:
    """log p of each token after a prompt, under a version (0 and None: the base); any two differ by more than 0.1 somewhere."""
    raw = [((sum(prompt) * 7 + token * 13 + version * 5) % 11) / 3.0 for token in range(PROXY_TOKENS)]
    total = math.log(sum(map(math.exp, raw)))
    return {token: value - total for token, value in enumerate(raw)}

class ProxyEngine:
    """Answers at once, and the same for the same prompt and version; `hold` keeps the futures for the test to resolve."""
    model_id, max_model_len, vocab_size, max_loras, max_lora_rank, dtype, is_paused = "tiny", 256, PROXY_TOKENS, 8, 16, "float32", False

    def __init__(self, hold=False):
        self.hold, self.paths, self.asked, self.pending = hold, {}, [], []
        self.arrived, self.cancelled, self.resumed = threading.Semaphore(0), threading.Event(), threading.Event()
        self.load_error = self.load_gate = None

    def names(self):
        return list(self.paths)

    def load(self, name, path):
        if self.load_gate:
            self.load_gate.wait(20)
        if self.load_error:
            raise proxy.LoadError(*self.load_error)
        if name in self.paths and self.paths[name] != path:
            raise proxy.LoadError(400, f"{name} has already been loaded with other weights")
        self.paths[name] = path

    def unload(self, name):
        del self.paths[name]

    def submit(self, ids, n, max_tokens, temperature, name, seed, stop_ids, top):
        if not all(0 <= token < PROXY_TOKENS for token in ids) or len(ids) + max_tokens > self.max_model_len:
            raise ValueError("this sampler takes 256 tokens, ids from 0 to 15")
        if top > PROXY_TOKENS:
            raise ValueError("top_logprobs: out of range")
        version, future = int(name.rpartition("v")[2]) if name else 0, concurrent.futures.Future()
        table = proxy_table(ids, version)
        best = dict(sorted(table.items(), key=lambda pair: -pair[1])[:top]) if top else None
        token = version % PROXY_TOKENS
        done = [SimpleNamespace(token_ids=[token] * max_tokens, logprobs=[table[token]] * max_tokens, finish_reason="length",
                                top_logprobs=[best] * max_tokens if top else None) for _ in range(n)]
        self.asked.append((name, max_tokens, seed))
        if self.hold and max_tokens > 1:
            self.pending.append((future, done))
        else:
            future.set_result(done)
        self.arrived.release()
        return future

    def release(self):
        for future, done in self.pending:
            if not future.done():
                future.set_result(done)
        self.pending.clear()

    def cancel(self, future):
        self.cancelled.set()

    def encode(self, text):
        return [ord(letter) % PROXY_TOKENS for letter in text]

    def chat(self, messages):
        return self.encode("".join(turn["content"] for turn in messages))

    def decode(self, ids):
        return "".join(map(self.token, ids))

    def token(self, token):
        return chr(97 + token)

    def pause(self, mode):
        self.is_paused = True

    def resume(self):
        self.is_paused = False
        self.resumed.set()

    def stats(self):
        return {"running": len(self.pending), "waiting": 0}

@contextlib.contextmanager
def proxy_running(serve, *args, **more):
    """The URL of a server of proxy.py in a thread; stopped at the end, which must take under two seconds."""
    urls, ready, stop = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=serve, args=args, kwargs={**more, "stop": stop, "on_ready": lambda url: (urls.append(url), ready.set())}, daemon=True)
    thread.start()
    assert ready.wait(10), "the server did not start"
    try:
        yield urls[0]
    finally:
        stop.set()
        thread.join(2.5)
        assert not thread.is_alive(), "the server did not stop"

def proxy_replica(engine, token="", **more):
    return proxy_running(proxy.serve_replica, engine, more.pop("listen", "127.0.0.1:0"), token, **more)

def proxy_router(bucket, replicas=(), token="", **more):
    return proxy_running(proxy.serve_router, bucket, replicas, "127.0.0.1:0", token, **more)

def proxy_raw(url, data: bytes, limit_s=10.0) -> bytes:
    """All a server says to raw bytes until it closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=limit_s) as sock:
        said = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            while piece := sock.recv(65536):
                said += piece
        return said

def proxy_until(condition, limit_s=15.0):
    """Waits for a state that only another process or thread can bring about."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {limit_s} s in vain"
        time.sleep(0.01)
    return value

def proxy_metric(url, name, **headers) -> dict[str, float]:
    text = requests.get(f"{url}/metrics", headers=headers, timeout=5).text
    return {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if line.startswith(name)}

def proxy_ask(url, model="policy", prompt=(1, 2, 3), limit_s=30, **more):
    return requests.post(f"{url}/v1/completions", json={"model": model, "prompt": list(prompt), "max_tokens": 4, "return_token_ids": True, **more}, timeout=limit_s)

@pytest.fixture
def proxy_one():
    """(url, engine) of one replica that serves policy-v1 and policy-v2."""
    engine = ProxyEngine()
    engine.paths = {"policy-v1": "adapters/v000001", "policy-v2": "adapters/v000002"}
    with proxy_replica(engine) as url:
        yield url, engine

def test_only_listed_routes_exist_and_each_by_its_method(proxy_one):
    url, _ = proxy_one
    for path in ("/v1/embeddings", "/..%2f..%2fetc/passwd", "/v1/../metrics", "//", "/v1/models/", "/__init__", "/sample"):
        assert b" 404 " in proxy_raw(url, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()).split(b"\r\n")[0], path
    reply = requests.get(url + "/v1/completions", timeout=5)
    assert (reply.status_code, reply.headers["Allow"]) == (405, "POST")

def test_a_connection_serves_many_requests_and_http_1_0_closes(proxy_one):
    url, _ = proxy_one
    one = b"GET /is_paused HTTP/1.1\r\nHost: x\r\n\r\n"
    assert proxy_raw(url, one * 3 + b"GET /is_paused HTTP/1.0\r\n\r\n").count(b'{"is_paused":false}') == 4

@pytest.mark.parametrize("data, status", [
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10485760\r\n\r\n" + bytes(10 << 20), 413),
    (b"GET /health HTTP/1.1\r\nX: " + b"a" * 40000 + b"\r\n\r\n", 431),
    (b"GET /health HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    (b"POST /pause HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST /pause HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    (b"POST /pause HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc", 400),
    (b"POST /pause HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n\r\n", 400),
    (b"POST /pause HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n\r\n", 413),
    (b"GET /health HTTP/1.1\r\nX: a\r\n folded\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nX : a\r\n\r\n", 400),
    (b"GET  /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/2.0\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
])
def test_a_malformed_or_oversized_request_is_refused_and_closed(proxy_one, data, status):
    url, _ = proxy_one
    assert proxy_raw(url, data).split(b" ")[1] == str(status).encode()

def test_a_chunked_body_is_read(proxy_one):
    url, _ = proxy_one
    body = json.dumps({"model": "policy-v1", "prompt": [1], "max_tokens": 2}).encode()
    reply = requests.post(url + "/v1/completions", data=iter([body[:7], body[7:]]), timeout=5)
    assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == "bb"

def test_slow_heads_and_bodies_end_with_408(monkeypatch):
    monkeypatch.setattr(proxy, "HEAD_S", 0.2), monkeypatch.setattr(proxy, "BODY_S", 0.2)
    with proxy_replica(ProxyEngine()) as url:
        for data in (b"GET /health HT", b"POST /pause HTTP/1.1\r\nContent-Length: 5\r\n\r\nab"):
            start = time.monotonic()
            assert b" 408 " in proxy_raw(url, data).split(b"\r\n")[0]
            assert time.monotonic() - start < 2.5    # 0.2 s, and the client that does not close is left after 2 s

def test_every_route_but_health_wants_the_token_and_nothing_shows_it(caplog):
    caplog.set_level(logging.DEBUG)
    secret = "t0p-s3cret-token"
    with proxy_replica(ProxyEngine(), token=secret) as url:
        said = ""
        for path, method in proxy.ROUTES.items():
            for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {secret}x"}, {"Authorization": f"Basic {secret}"}):
                reply = requests.request(method, url + path, headers=wrong, timeout=5)
                assert reply.status_code == (200 if path == "/health" else 401), (path, wrong)
                said += reply.text + str(reply.headers)
        right = requests.get(url + "/v1/models", headers={"Authorization": f"Bearer {secret}"}, timeout=5)
        assert right.status_code == 200 and secret not in said + right.text + caplog.text
        assert requests.get(url + "/nothing", timeout=5).status_code == 401   # does not even say what exists

@pytest.mark.parametrize("listen, has_token, is_right", [
    ("127.0.0.1:0", False, True), ("localhost:80", False, True), ("[::1]:80", False, True), (":8000", False, True), ("127.9.9.9:1", False, True),
    ("0.0.0.0:80", False, False), ("0.0.0.0:80", True, True), ("[::]:80", False, False), ("127.0.0.1.evil.com:80", False, False),
    ("10.0.0.1:80", False, False), ("here", True, False), ("127.0.0.1:99999", True, False), ("127.0.0.1:x", True, False)])
def test_an_address_beyond_loopback_needs_a_token(listen, has_token, is_right):
    with contextlib.nullcontext() if is_right else pytest.raises(ValueError):
        proxy.parse_listen(listen, has_token)

def proxy_random_value(dice, depth=0):
    kind = dice.randrange(10 if depth < 3 else 8)
    return (None, True, dice.randrange(-3, 300), dice.choice([0, -1, 2**31, 2**64, 10**30]), dice.uniform(-2, 2), dice.choice(["policy", "policy-v1", "tiny", "/etc", ""]),
            "".join(chr(dice.choice([0, 10, 65, 233, 0x2028, 0x1f600])) for _ in range(dice.randrange(6))), dice.choice([math.nan, math.inf]))[kind] if kind < 8 else \
        [proxy_random_value(dice, depth + 1) for _ in range(dice.randrange(4))] if kind == 8 else \
        {dice.choice(["role", "content", "a"]): proxy_random_value(dice, depth + 1) for _ in range(dice.randrange(3))}

PROXY_FIELDS = ["model", "prompt", "messages", "n", "max_tokens", "temperature", "logprobs", "seed", "stop", "stop_token_ids", "top_p", "stream", "lora_name",
                "lora_path", "logit_bias", "return_token_ids", "max_completion_tokens", "return_tokens_as_token_ids"]
PROXY_STARTS = [{}, {"model": "policy-v1", "prompt": [1]}, {"lora_name": "a", "lora_path": "/etc"}, {"model": "policy", "messages": [{"role": "u", "content": "x"}]}]

def proxy_random_request(dice, token: str) -> bytes:
    """Near the truth, then bent: a JSON body that is right or random, by length or in chunks, with some bytes exchanged or cut off."""
    body = {**dice.choice(PROXY_STARTS), **{dice.choice(PROXY_FIELDS): proxy_random_value(dice) for _ in range(dice.randrange(4))}}
    data = dice.choice([json.dumps(body).encode()] * 6 + [b"", dice.randbytes(dice.randrange(200)), b"[" * 3000])
    path = dice.choice([*proxy.ROUTES] * 3 + ["/v1/../metrics", "/..%2f..%2fetc/passwd", "//", "*", "http://x/health", "/pause?mode=%00", "/" + "a" * dice.randrange(9000)])
    lines = [f"{dice.choice([proxy.ROUTES.get(path, 'GET')] * 6 + ['GET', 'PUT', 'get', 'POST '])} {path} HTTP/1.{dice.choice('1110')}", "Host: x", "Connection: close"]
    lines += dice.choice([[f"Authorization: Bearer {token}"]] * 8 + [["Authorization: Basic " + "Og==" * dice.randrange(3)], [], ["Authorization: Bearer x"] * 2])
    if dice.random() < 0.3:
        size = dice.choice(["%x"] * 6 + ["-%x", "%x;a=b", "0x%x", "%x\r\n"])
        data = b"".join((size % len(piece)).encode() + b"\r\n" + piece + b"\r\n" for piece in (data[:9], data[9:]) if piece) + b"0\r\n" + dice.choice([b"", b"T: x\r\n"]) + b"\r\n"
        lines += ["Transfer-Encoding: " + dice.choice(["chunked"] * 6 + ["gzip", "chunked, chunked"])]
    if dice.random() < 0.8 and "Transfer-Encoding" not in lines[-1] or dice.random() < 0.05:
        lines += [f"Content-Length: {dice.choice([str(len(data))] * 8 + [str(len(data) + 3), '-1', '+2', '9' * 20, '20000000', 'x'])}"] * dice.choice([1] * 9 + [2])
    lines += [dice.choice(["X: " + "a" * dice.choice([10, 40000]), " folded", "no colon", "\u00e9: \u00e9", "A:\0"])] * (dice.random() < 0.1)
    raw = bytearray("\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + data)
    for _ in range(dice.choice([0] * 6 + [1, 5])):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw[:dice.randrange(len(raw))] if dice.random() < 0.05 else raw)

def test_ten_thousand_random_requests_give_no_500_no_hang_and_no_token_away(monkeypatch, caplog):
    """Half to a replica, half to a router over it and over a relay, which keeps what the router sends. Every request is answered with a status
    that blames the client, or says that its own pause or unload left nobody to ask (503); or it is cut off without a word."""
    caplog.set_level(logging.DEBUG)
    for name, limit_s in {"IDLE_S": 1.0, "HEAD_S": 0.5, "BODY_S": 0.5, "LINGER_S": 0.5, "READY_WAIT_S": 0.1}.items():
        monkeypatch.setattr(proxy, name, limit_s)
    engine, statuses, texts, sent = ProxyEngine(), Counter(), set(), bytearray()
    engine.paths = {"policy-v1": "adapters/v000001"}

    async def relay(reader, writer, to):
        with contextlib.suppress(OSError):
            there, away = await asyncio.open_connection(*to)
            async def copy(source, target, keep):
                with contextlib.suppress(OSError):
                    while data := await source.read(65536):
                        keep.extend(data)
                        target.write(data)
                target.close()
            await asyncio.gather(copy(reader, away, sent), copy(there, writer, bytearray()))

    async def ask(url, data, gate):
        host, port = url.removeprefix("http://").split(":")
        async with gate, asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            said = b""
            with contextlib.suppress(OSError):
                said = await reader.read()
            writer.close()
        statuses[said.split(b" ")[1].decode() if said else "none"] += 1
        texts.add(said)

    async def all_of_it(replica, started):
        there = replica.removeprefix("http://").split(":")
        server = await asyncio.start_server(lambda reader, writer: relay(reader, writer, there), "127.0.0.1", 0)
        urls = [replica, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]
        router = await asyncio.to_thread(started.enter_context, proxy_router(None, urls, token="outer-secret", replica_token="inner-secret"))
        await asyncio.to_thread(proxy_until, lambda: proxy_metric(router, "grpo:router_serves", Authorization="Bearer outer-secret"))
        gate, dice = asyncio.Semaphore(100), random.Random(0)
        asks = [ask(url, proxy_random_request(dice, token), gate) for _ in range(5000) for url, token in ((replica, "inner-secret"), (router, "outer-secret"))]
        await asyncio.gather(*asks)
        for url, token in ((replica, "inner-secret"), (router, "outer-secret")):
            reply = await asyncio.to_thread(requests.get, url + "/is_paused", headers={"Authorization": f"Bearer {token}"}, timeout=5)
            assert reply.status_code == 200
        await asyncio.to_thread(started.close)

    with proxy_replica(engine, token="inner-secret") as replica:
        asyncio.run(all_of_it(replica, contextlib.ExitStack()))
    assert statuses.keys() <= {"none", "200", "400", "401", "404", "405", "408", "413", "431", "503"}, statuses
    assert statuses["200"] > 500 and statuses["400"] > 1000 and statuses["none"] < 500, statuses
    assert b"Bearer inner-secret" in sent and b"outer-secret" not in sent
    assert not any(b"-secret" in text for text in texts) and "-secret" not in caplog.text

def test_deep_or_huge_json_is_the_clients_mistake(proxy_one):
    url, _ = proxy_one
    for body in (b"[" * 200_000, b'{"n":' + b"9" * 6000 + b"}", b"\xff\xfe", b'"x"', b""):
        assert requests.post(url + "/v1/completions", data=body, timeout=5).status_code == 400
    assert proxy_ask(url, "policy-v1", prompt=[1, 10**30]).status_code == 400
    assert requests.post(url + "/v1/completions", data=b'{"model":"policy-v1","prompt":"\\ud800"}', timeout=5).status_code == 400

# ---- proxy.py: a single replica ---------------------------------------------------------------------------------------------

def test_models_lists_the_base_first_then_adapters_then_the_alias(proxy_one):
    url, _ = proxy_one
    cards = requests.get(url + "/v1/models", timeout=5).json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "policy-v1", "policy-v2", "policy"]
    assert cards[0]["max_model_len"] == 256 and cards[0]["parent"] is None and cards[1]["parent"] == "tiny" and cards[3]["root"] == "policy-v2"

def test_a_completion_carries_ids_logprobs_and_the_real_version(proxy_one):
    url, engine = proxy_one
    reply = proxy_ask(url, "policy", n=3, max_tokens=2, logprobs=2, seed=7, return_tokens_as_token_ids=True).json()
    table = proxy_table([1, 2, 3], 2)
    best = sorted(table, key=lambda token: -table[token])[:2]
    assert reply["model"] == "policy-v2" and reply["object"] == "text_completion" and engine.asked == [("policy-v2", 2, 7)]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for choice in reply["choices"]:
        assert choice["token_ids"] == [2, 2] and choice["prompt_token_ids"] == [1, 2, 3] and choice["text"] == "cc" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [table[2]] * 2
        assert choice["logprobs"]["tokens"] == ["token_id:2"] * 2 and choice["logprobs"]["text_offset"] == [0, 10]
        assert choice["logprobs"]["top_logprobs"][0] == {f"token_id:{token}": table[token] for token in (2, *best)}
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    plain = requests.post(url + "/v1/completions", json={"model": "tiny", "prompt": "ab"}, timeout=5).json()
    assert len(plain["choices"][0]["text"]) == 16 and plain["choices"][0]["logprobs"] is None and "token_ids" not in plain["choices"][0]

def test_minus_infinity_is_written_as_vllm_writes_it(proxy_one):
    one = SimpleNamespace(token_ids=[3], logprobs=[-0.5], top_logprobs=[{3: -0.5, 4: -math.inf}])
    assert proxy.ReplicaServer(ProxyEngine()).logprobs(one, as_ids=False)["top_logprobs"] == [{"d": -0.5, "e": -9999.0}]

def test_what_would_change_the_sampled_distribution_is_refused_by_name(proxy_one):
    url, engine = proxy_one
    for name, value in {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "stream": True, "repetition_penalty": 1.1, "stop": ["x"], "echo": True,
                        "temperature": -1, "n": 0, "max_tokens": 0, "logprobs": 21, "seed": "a", "stop_token_ids": [-1], "max_tokens ": 1}.items():
        reply = proxy_ask(url, "policy-v1", **{name: value})
        assert (reply.status_code, name in reply.text) == ((400, True) if name.strip() == name else (200, False)), (name, reply.text)
    assert proxy_ask(url, "policy-v1", top_p=1, top_k=-1, stop=[], stream=False, logit_bias=None).status_code == 200

def test_an_unknown_version_is_404_naming_the_live_ones_and_never_the_base(proxy_one):
    url, engine = proxy_one
    for model in ("policy-v7", "policy-v", "Tiny", "", "policy-v01"):
        reply = proxy_ask(url, model)
        assert reply.status_code == 404 and "policy-v1, policy-v2" in reply.json()["error"]["message"], model
    assert proxy_ask(url, None).status_code == 400 and engine.asked == []

@pytest.mark.parametrize("is_routed", [False, True], ids=["a replica", "a router"])
def test_openais_client_works_and_sees_its_own_exception_types(proxy_one, monkeypatch, is_routed):
    monkeypatch.setattr(proxy, "READY_WAIT_S", 0.2)
    with proxy_router(None, [proxy_one[0]]) as router, proxy_router(None, ["http://127.0.0.1:9"]) as empty:
        proxy_until(lambda: requests.get(router + "/health", timeout=5).ok)
        client = openai.OpenAI(base_url=(router if is_routed else proxy_one[0]) + "/v1", api_key="x", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny", "policy-v1", "policy-v2", "policy"]
        done = client.completions.create(model="policy", prompt=[1, 2, 3], max_tokens=3, n=2, logprobs=1)
        assert done.model == "policy-v2" and done.choices[1].text == "ccc" and len(done.choices[0].logprobs.token_logprobs) == 3
        chat = client.chat.completions.create(model="policy-v1", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3)
        assert chat.choices[0].message.content == "bbb" and chat.usage.prompt_tokens == 2 and chat.object == "chat.completion"
        with pytest.raises(openai.NotFoundError, match="policy-v1, policy-v2"):
            client.completions.create(model="policy-v9", prompt="a")
        for streamed in (lambda: client.completions.create(model="policy-v1", prompt="a", stream=True),
                         lambda: client.chat.completions.create(model="policy-v1", messages=[{"role": "user", "content": "hi"}], stream=True)):
            with pytest.raises(openai.BadRequestError, match="stream must be false"):
                streamed()
        with pytest.raises(openai.InternalServerError, match="not ready yet"):
            openai.OpenAI(base_url=empty + "/v1", api_key="x", max_retries=0).completions.create(model="tiny", prompt="a")
    serve, args = (proxy_router, (None, [proxy_one[0]])) if is_routed else (proxy_replica, (ProxyEngine(),))
    with serve(*args, token="right") as guarded, pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=guarded + "/v1", api_key="wrong", max_retries=0).models.list()

def proxy_load(url, name, path, **more):
    return requests.post(url + "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), "load_inplace": False}, timeout=40, **more)

def proxy_folder(path: Path, weights=b"w") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_bytes(b"{}")
    (path / "adapter_model.safetensors").write_bytes(weights)
    return path

def test_the_same_weights_load_again_and_others_never_under_the_same_name(tmp_path):
    """A name is one set of weights for ever; whoever wants others under it, as a router for a client does, unloads it first."""
    engine = ProxyEngine()
    with proxy_replica(engine, roots=[tmp_path]) as url:
        assert proxy_load(url, "mine", proxy_folder(tmp_path / "a")).status_code == proxy_load(url, "mine", tmp_path / "a").status_code == 200
        assert proxy_load(url, "mine", proxy_folder(tmp_path / "b", b"other")).status_code == 400 and engine.paths == {"mine": str(tmp_path / "a")}
        for status in (200, 404):
            assert requests.post(url + "/v1/unload_lora_adapter", json={"lora_name": "mine"}, timeout=5).status_code == status
        assert proxy_load(url, "policy-v2", "adapters/v000002").status_code == 200 and engine.paths == {"policy-v2": "adapters/v000002"}

def test_no_lora_path_leads_outside_the_allowed_folders(tmp_path):
    engine, root = ProxyEngine(), tmp_path / "root"
    proxy_folder(tmp_path / "outside"), proxy_folder(root / "inside")
    (root / "link").symlink_to(tmp_path / "outside")
    with proxy_replica(engine, roots=[root]) as url:
        for path in ("/etc", tmp_path / "outside", root / "link", f"{root}/../outside", f"{root}", "inside", "adapters/../../etc", "adapters/v1", "\0", "",
                     f"{root}/a\0b", f"{tmp_path}/rootbeer", "hub-user/hub-repo", "\ud800"):
            reply = proxy_load(url, "x", path)
            assert reply.status_code == 400 and "outside" not in reply.text, (path, reply.text)
        for name in ("", "../x", "policy", "a b", "tiny", 5):
            assert proxy_load(url, name, root / "inside").status_code == 400, name
        assert engine.paths == {}
        assert proxy_load(url, "x", f"{root}/./inside/../inside").status_code == 200

def test_a_load_that_the_engine_refuses_keeps_its_status_and_reason(tmp_path):
    engine = ProxyEngine()
    engine.load_error = (404, "No adapter found for x")
    with proxy_replica(engine, roots=[tmp_path]) as url:
        reply = proxy_load(url, "x", tmp_path / "a")
        assert (reply.status_code, reply.json()["error"]["message"]) == (404, "No adapter found for x")

@pytest.mark.parametrize("size", [10, 100_000])
def test_a_client_that_leaves_frees_the_engine(size):
    """Also after a body so large that reading was paused meanwhile."""
    engine = ProxyEngine(hold=True)
    with proxy_replica(engine) as url:
        with pytest.raises(requests.Timeout):
            proxy_ask(url, "tiny", limit_s=0.3, user="x" * size)
        assert engine.cancelled.wait(5) and engine.pending[0][0].cancelled()

def test_a_forgotten_pause_ends_by_itself_and_health_stays_well():
    engine = ProxyEngine()
    with proxy_replica(engine, pause_limit_s=0.4) as url:
        assert requests.post(url + "/pause?mode=sideways", timeout=5).status_code == 400
        assert requests.post(url + "/pause?mode=keep", timeout=5).status_code == 200
        assert requests.get(url + "/is_paused", timeout=5).json() == {"is_paused": True} and requests.get(url + "/health", timeout=5).status_code == 200
        assert engine.resumed.wait(5)
        assert requests.get(url + "/is_paused", timeout=5).json() == {"is_paused": False}
        engine.resumed.clear()
        requests.post(url + "/pause?mode=keep", timeout=5), requests.post(url + "/resume", timeout=5)
        engine.resumed.clear()
        assert not engine.resumed.wait(0.6)          # resumed in time: the limit is off

def test_server_info_metrics_and_page_say_what_clients_read(proxy_one):
    url, _ = proxy_one
    proxy_ask(url, "policy-v1", n=2)
    config = requests.get(url + "/server_info?config_format=json", timeout=5).json()["vllm_config"]
    assert config["lora_config"] == {"max_lora_rank": 16, "max_loras": 8} and config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["dtype"] == "torch.float32"
    assert proxy_metric(url, "vllm:generation_tokens_total") == {'vllm:generation_tokens_total{model_name="tiny"}': 8}
    assert "policy-v1, policy-v2" in requests.get(url, timeout=5).text

# ---- proxy.py: canary, choice, members --------------------------------------------------------------------------------------

def proxy_canary(version: int, dtype="float32", noise=0.0, prompts=((1, 2), (5,), (7, 7, 7))) -> dict:
    rows = {what: [{str(token): value + noise for token, value in proxy_table(prompt, number).items()} for prompt in prompts]
            for what, number in (("adapter", version), ("base", 0))}
    return {"prompts": [list(prompt) for prompt in prompts], "dtype": dtype, **rows}

def proxy_answers(version: int, shift=lambda prompt, token: 0.0, prompts=((1, 2), (5,), (7, 7, 7))) -> list[dict[int, float]]:
    return [{token: value + shift(prompt, token) for token, value in proxy_table(prompt, version).items()} for prompt in prompts]

def test_the_fp32_canary_passes_the_adapter_and_refuses_all_else():
    canary = proxy_canary(3)
    assert proxy.canary_verdict(canary, proxy_answers(3))[0] is True
    assert proxy.canary_verdict(canary, proxy_answers(3, lambda prompt, token: 9e-4))[0] is True
    assert proxy.canary_verdict(canary, proxy_answers(3, lambda prompt, token: 2e-3 * (token == 5)))[0] is False
    is_right, why = proxy.canary_verdict(canary, proxy_answers(0))
    assert is_right is False and "the base" in why and "expected" in why and "got" in why
    assert "an older version" in proxy.canary_verdict(canary, proxy_answers(2), proxy_canary(2)["adapter"])[1]
    for broken in ([], proxy_answers(3)[:2], [{}] * 3, [{100: -1.0}] * 3, [{0: row[0]} | {t + 50: v for t, v in row.items()} for row in proxy_answers(3)],
                   proxy_answers(3, lambda prompt, token: math.nan)):
        assert proxy.canary_verdict(canary, broken)[0] is False
    assert proxy.canary_verdict(proxy_canary(0), proxy_answers(0))[0] is True   # version 0: B = 0, equal to the base

def test_log_zero_counts_the_same_on_both_sides():
    canary = {"adapter": [{"1": -math.inf, "2": -0.1}], "base": [{"1": -math.inf, "2": -0.3}], "dtype": "float32"}
    assert proxy.canary_verdict(canary, [{1: -9999.0, 2: -0.1}])[0] is True

def test_the_bf16_canary_says_right_wrong_or_unproven():
    """Noise of 0.05 nats, far below the distance between versions here (about 1): right and wrong can be told apart. Where the adapter
    has hardly moved, nothing is proven; garbage is refused although it is nearest to nothing."""
    dice = random.Random(0)
    noisy = lambda prompt, token: dice.gauss(0, 0.05)  # noqa: E731
    canary, older = proxy_canary(3, "bfloat16"), proxy_canary(2)["adapter"]
    assert proxy.canary_verdict(canary, proxy_answers(3, noisy), older)[0] is True
    assert proxy.canary_verdict(canary, proxy_answers(0, noisy), older)[0] is False
    assert proxy.canary_verdict(canary, proxy_answers(2, noisy), older)[0] is False
    assert proxy.canary_verdict(canary, proxy_answers(9, noisy), older)[0] is False
    hardly = {**canary, "base": [{token: value + 0.02 for token, value in row.items()} for row in canary["adapter"]]}
    assert proxy.canary_verdict(hardly, proxy_answers(3, noisy))[0] is None
    assert proxy.canary_verdict(hardly, proxy_answers(3, lambda prompt, token: 0.02))[0] is None
    near = {**canary, "base": [{token: value + 0.3 for token, value in row.items()} for row in canary["adapter"]]}
    for away, verdict in ((0.02, True), (0.29, False), (0.12, None), (0.18, None)):   # 0.3 apart: told apart up to 0.1 from either
        assert proxy.canary_verdict(near, proxy_answers(3, lambda prompt, token: away))[0] is verdict, away  # noqa: B023

def proxy_choices(prompts, group=8, replicas=4, in_flight=64, seed=0, versions=1):
    """A queue simulation: `group` requests per prompt, answered after random times; (counts, requests per replica, chooser)."""
    dice, chooser, heap, now = random.Random(seed), proxy.Chooser(), [], 0.0
    loads = {f"http://10.0.0.{i}:8000": 0 for i in range(replicas)}
    got = dict.fromkeys(loads, 0)
    for at, prompt in enumerate(prompts):
        for _ in range(group):
            if len(heap) >= in_flight:
                now, url = heap.pop(heap.index(min(heap)))
                loads[url] -= 1
            url = chooser.choose(f"policy-v{at * versions // len(prompts)}", prompt, loads)
            loads[url] += 1
            got[url] += 1
            heap.append((now + dice.lognormvariate(1, 0.7), url))
    return chooser.counts, got, chooser

def proxy_prompts(count, template=23, seed=1):
    dice = random.Random(seed)
    head = [dice.randrange(32000) for _ in range(template)]
    return [head + [dice.randrange(32000) for _ in range(max(3, int(dice.lognormvariate(4, 0.7))))] for _ in range(count)]

@pytest.mark.parametrize("template", [0, 23, 200])
def test_a_groups_requests_meet_on_one_replica_and_load_stays_even(template):
    counts, got, _ = proxy_choices(proxy_prompts(64, template))   # 8 × 64 on 4
    total = 8 * 64
    assert abs(counts["cold"] / total - 0.125) <= 0.02 and counts["spill"] / total <= 0.05, counts
    assert all(abs(one / total * 4 - 1) <= 0.10 for one in got.values()), got

def test_a_prompt_goes_elsewhere_when_its_replica_is_far_ahead():
    chooser, prompt = proxy.Chooser(), list(range(40))
    first = chooser.choose("policy-v1", prompt, {"a": 0, "b": 0})
    other = {"a": "b", "b": "a"}[first]
    assert chooser.choose("policy-v1", prompt, {first: 8, other: 0}) == first
    assert chooser.choose("policy-v1", prompt, {first: 9, other: 0}) == other
    assert chooser.choose("policy-v1", prompt, {other: 0}) == other   # the owner is gone
    assert dict(chooser.counts) == {"cold": 2, "affinity": 1, "spill": 1}   # with every candidate an owner, a block says nothing

def test_blocks_that_different_prompts_share_say_nothing():
    chooser, loads, head = proxy.Chooser(), {"a": 0, "b": 0, "c": 0, "d": 0}, list(range(16))
    chosen = [chooser.choose("policy-v1", head + [100 + number] * 20, loads) for number in range(4)]
    assert sorted(chosen) == ["a", "b", "c", "d"] and chooser.counts == {"cold": 4}
    assert [chooser.choose("policy-v1", head + [100 + number] * 20, loads) for number in range(4)] == chosen and chooser.counts["affinity"] == 4

def test_another_version_of_the_same_prompt_is_cold_and_ties_rotate():
    chooser, loads = proxy.Chooser(), {"a": 0, "b": 0, "c": 0}
    assert sorted(chooser.choose(f"policy-v{version}", [1, 2, 3], loads) for version in range(3)) == ["a", "b", "c"]
    assert chooser.counts["cold"] == 3

def test_the_chooser_remembers_a_bounded_number_of_blocks():
    chooser = proxy.Chooser(max_blocks=100)
    for number in range(2000):
        chooser.choose("policy-v1", [number] * 50, {"a": 0, "b": 0})
        assert len(chooser.blocks) <= 100

class ProxyFlakyBucket:
    """A real bucket whose puts fail while `is_broken`."""
    def __init__(self, bucket):
        self.bucket, self.is_broken, self.beats = bucket, False, threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self.bucket, name)

    def put(self, key, data):
        self.beats.release()
        if self.is_broken:
            raise BucketError("503 SlowDown")
        self.bucket.put(key, data)

def test_a_heartbeat_counts_outlives_a_failing_bucket_and_says_goodbye(tmp_path):
    bucket = ProxyFlakyBucket(open_bucket(str(tmp_path)))
    member = proxy.Member(bucket, "actor", "http://x", "run1", beat_s=0.02)
    member.start()
    assert bucket.beats.acquire(timeout=5) and bucket.beats.acquire(timeout=5)
    member.update(doing="sampling", serving=[3])
    proxy_until(lambda: json.loads(bucket.get(member.key))["doing"] == "sampling")
    bucket.is_broken = True
    before = json.loads(bucket.get(member.key))["counter"]
    assert all(bucket.beats.acquire(timeout=5) for _ in range(5))
    bucket.is_broken = False
    record = proxy_until(lambda: (one := json.loads(bucket.get(member.key)))["counter"] > before + 2 and one)
    assert record | {"counter": 0} == {"format": "async-grpo-member", "version": 1, "role": "actor", "id": member.record["id"], "url": "http://x", "counter": 0,
                                       "run_id": "run1", "doing": "sampling", "serving": [3], "pid": os.getpid(), "host": socket.gethostname()}
    assert member.key == f"members/actor-{record['id']}.json"
    member.stop()
    assert list(bucket.list("members/")) == []

def test_a_member_is_dead_when_its_counter_stands_still_on_the_readers_clock(tmp_path):
    bucket, now = open_bucket(str(tmp_path)), [100.0]
    live = proxy.LiveMembers(bucket, "sampler", dead_s=15, clock=lambda: now[0])
    put = lambda id, counter, role="sampler": bucket.put(f"members/{role}-{id}.json", json.dumps(  # noqa: E731
        {"id": id, "counter": counter, "url": "u", "unix_s": -1}).encode())
    put("a", 7), put("b", 1), put("c", 1, "actor")
    bucket.put("members/sampler-broken.json", b"{nonsense")
    assert live.poll().keys() == {"a", "b"}          # a first look cannot tell: both get their 15 s
    now[0] += 14
    put("a", 6)                                      # any other value counts as moved: a member may restart from 1
    assert live.poll().keys() == {"a", "b"} and live.missing() == {}
    now[0] += 2
    assert live.poll().keys() == {"a"} and live.missing() == {"b": 16.0}
    bucket.delete("members/sampler-b.json")
    assert live.poll(max_age_s=1.0).keys() == {"a"} and live.missing() == {"b": 16.0}   # as read before
    assert live.poll().keys() == {"a"} and live.missing() == {}   # a goodbye is no death

# ---- proxy.py: the router ---------------------------------------------------------------------------------------------------

class ProxyPeer:
    """A vLLM-like server, by http.server: chunked replies, 404 and 400 as vLLM words them. `lies`: name -> version it really serves.
    `script`: path -> list of (status, text) said before it behaves; `hang`: paths that wait; `log`: (path, body, authorization)."""

    def __init__(self, port=0):
        self.adapters, self.lies, self.script, self.hang, self.log, self.sockets = {}, {}, {}, set(), [], set()
        self.is_paused, self.arrived, self.go = False, threading.Event(), threading.Event()
        peer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                peer.sockets.add(self.connection)

            def log_message(self, *_):
                pass

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                peer.log.append((path, json.loads(body or b"{}"), self.headers.get("Authorization")))
                with contextlib.suppress(OSError):
                    if path in peer.hang:
                        peer.arrived.set()
                        peer.go.wait(30)
                    said = peer.script.get(path)
                    status, text = said.pop(0) if said else peer.answer(path, json.loads(body or b"{}"))
                    data = text.encode() if isinstance(text, str) else json.dumps(text).encode()
                    self.send_response(status)
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    for piece in (data[:9], data[9:]):
                        if piece:
                            self.wfile.write(b"%x;x=y\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.write(b"0\r\nTrailer: x\r\n\r\n")

            do_POST = do_GET

        class Server(http.server.ThreadingHTTPServer):
            allow_reuse_address, daemon_threads, request_queue_size = True, True, 64

            def handle_error(self, *_):
                pass
        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path, body):
        name = body.get("lora_name") or body.get("model")
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "max_model_len": 256}] + [{"id": one, "parent": "tiny"} for one in self.adapters]}
        if path == "/v1/load_lora_adapter":
            if name in self.adapters:
                return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
            self.adapters[name] = body["lora_path"]
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        if path == "/v1/unload_lora_adapter":
            return (200, "Success") if self.adapters.pop(name, None) else (404, "not found")
        if path == "/v1/completions":
            if name not in self.adapters and name != "tiny":
                return 404, {"error": {"message": f"The model `{name}` does not exist."}}
            table = proxy_table(body["prompt"], self.lies.get(name, int(name.rpartition("v")[2]) if name != "tiny" else 0))
            if (body.get("logprobs") or 0) > len(table):   # as vLLM, whose engine dies of more than its vocabulary
                return 500, {"error": {"message": "EngineCore encountered an issue."}}
            return 200, {"model": name, "served_by": self.port, "choices": [{"logprobs": {"top_logprobs": [{f"token_id:{t}": v for t, v in table.items()}]}}]}
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        return 200, {"is_paused": self.is_paused} if path == "/is_paused" else {"status": "ok"} if path in ("/pause", "/resume", "/health") else {}

    def kill(self):
        """As SIGKILL: the port refuses, every connection is reset."""
        self.server.shutdown()
        self.server.server_close()
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.go.set()

    def paths(self, path):
        return [body for where, body, _ in self.log if where == path]

@pytest.fixture
def proxy_peers():
    peers = [ProxyPeer(), ProxyPeer()]
    yield peers
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.kill()

@pytest.fixture
def proxy_bucket(tmp_path):
    bucket = open_bucket(str(tmp_path / "bucket"))
    bucket.put_new("run.json", json.dumps({"run_id": "r1", "max_staleness": 1}).encode())   # 3 versions live
    return bucket

def proxy_publish(bucket, version: int):
    bucket.publish(f"adapters/v{version:06d}", {"adapter_model.safetensors": b"w%d" % version, "adapter_config.json": b"{}"},
                   {"policy_version": version, "canary": proxy_canary(version)})

def proxy_serves(url) -> dict[int, set[str]]:
    """port -> versions that the router would ask there."""
    rows = {}
    for line in proxy_metric(url, "grpo:router_serves"):
        rows.setdefault(int(line.split('"')[1].rpartition(":")[2]), set()).add(line.split('"')[3])
    return rows

def test_published_versions_reach_every_replica_and_the_alias_follows(proxy_bucket, proxy_peers):
    proxy_publish(proxy_bucket, 0)
    with proxy_router(proxy_bucket, [peer.url for peer in proxy_peers]) as url:
        proxy_until(lambda: requests.get(url + "/health", timeout=5).ok)
        assert proxy_ask(url).json()["model"] == "policy-v0"
        for version in (1, 2, 3):
            proxy_publish(proxy_bucket, version)
        want = {"policy-v1", "policy-v2", "policy-v3"}
        proxy_until(lambda: proxy_serves(url) == {peer.port: want for peer in proxy_peers})
        proxy_until(lambda: all(peer.adapters.keys() == want for peer in proxy_peers))   # version 0 is told to leave
        assert proxy_ask(url).json()["model"] == "policy-v3"
        assert [card["id"] for card in requests.get(url + "/v1/models", timeout=5).json()["data"]] == ["tiny", *sorted(want), "policy"]
        assert proxy_peers[0].adapters["policy-v3"] == str(proxy_bucket.root / "adapters" / "v000003")   # a path, not a key: not a member
        reply = proxy_ask(url, "policy-v0")
        assert reply.status_code == 404 and "policy-v1, policy-v2, policy-v3" in reply.text
        record = json.loads(proxy_bucket.get(next(proxy_bucket.list("members/proxy-"))))
        assert record["url"] == url and record["run_id"] == "r1"
    assert list(proxy_bucket.list("members/")) == []

def test_a_manifest_that_cannot_be_read_is_set_aside_and_hides_no_other(proxy_bucket, proxy_peers, caplog):
    proxy_publish(proxy_bucket, 1)
    proxy_bucket.publish("adapters/v000002", {"adapter_model.safetensors": b"w"}, {"policy_version": 2, "canary": None})
    with proxy_router(proxy_bucket, [proxy_peers[0].url]) as url:
        proxy_until(lambda: proxy_serves(url).get(proxy_peers[0].port) == {"policy-v1"})
    assert [line for line in caplog.messages if "set aside" in line] == ["adapters/v000002/manifest.json is set aside: TypeError: 'NoneType' object is not subscriptable"]

def test_later_versions_that_the_bucket_does_not_know_are_told_to_leave(proxy_bucket, proxy_peers):
    """The learner went back to version 1; a sampler still holds version 9. It also held a wrong version 1: replaced."""
    peer = proxy_peers[0]
    peer.adapters, peer.lies = {"policy-v9": "x", "policy-v1": "x", "mine": "x"}, {"policy-v1": 9}
    original = peer.answer
    peer.answer = lambda path, body: (peer.lies.pop("policy-v1", None) if path == "/v1/unload_lora_adapter" and body["lora_name"] == "policy-v1" else 0, original(path, body))[1]
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket, [peer.url]) as url:
        proxy_until(lambda: proxy_serves(url).get(peer.port) == {"policy-v1", "mine"})
        assert peer.adapters == {"policy-v1": str(proxy_bucket.root / "adapters" / "v000001"), "mine": "x"}
        assert proxy_ask(url, "policy-v9").status_code == 404

@pytest.mark.parametrize("lie", [0, 1, 9])
def test_a_replica_that_serves_the_base_an_old_or_a_garbled_adapter_gets_no_request(proxy_bucket, proxy_peers, caplog, monkeypatch, lie):
    caplog.set_level(logging.INFO)
    bad, good = proxy_peers
    bad.lies = {"policy-v2": lie}
    proxy_publish(proxy_bucket, 1), proxy_publish(proxy_bucket, 2)
    monkeypatch.setattr(proxy, "LOAD_TRIES", 2)
    with proxy_router(proxy_bucket, [bad.url, good.url]) as url:
        proxy_until(lambda: proxy_serves(url) == {bad.port: {"policy-v1"}, good.port: {"policy-v1", "policy-v2"}}, 20)
        assert {proxy_ask(url, "policy-v2", prompt=[one]).json()["served_by"] for one in range(20)} == {good.port}
        proxy_until(lambda: {proxy_ask(url, "policy-v1", prompt=[one]).json()["served_by"] for one in range(20)} == {bad.port, good.port})
    text = next(line for line in caplog.messages if "the canary refused it" in line)
    assert bad.url in text and "policy-v2" in text and "expected" in text and "got" in text

def test_a_slow_or_dead_replica_delays_no_other(proxy_bucket, proxy_peers):
    slow, fast = proxy_peers
    slow.hang = {"/v1/load_lora_adapter"}
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket, [slow.url, "http://127.0.0.1:9", fast.url]) as url:
        start = time.monotonic()
        proxy_until(lambda: requests.get(url + "/health", timeout=5).ok)
        assert proxy_ask(url).json()["served_by"] == fast.port and time.monotonic() - start < 5
        slow.go.set()
        proxy_until(lambda: len(proxy_serves(url)) == 2)

def test_a_version_nobody_holds_yet_is_waited_for_then_503(proxy_bucket, proxy_peers, monkeypatch):
    monkeypatch.setattr(proxy, "READY_WAIT_S", 1.0)
    peer = proxy_peers[0]
    peer.hang = {"/v1/load_lora_adapter"}
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket, [peer.url]) as url:
        assert peer.arrived.wait(10)
        for model in ("policy", "policy-v1"):
            reply = proxy_ask(url, model)
            assert reply.status_code == 503 and reply.headers["Retry-After"] == "1" and "is loading" in reply.text
        assert requests.get(url + "/health", timeout=5).status_code == 503 and proxy_ask(url, "policy-v5").status_code == 404
        monkeypatch.setattr(proxy, "READY_WAIT_S", 10.0)
        threading.Timer(0.3, peer.go.set).start()
        assert proxy_ask(url, "policy-v1").status_code == 200

def test_a_replica_that_dies_mid_request_costs_the_client_nothing(proxy_bucket, proxy_peers):
    dying, other = proxy_peers
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket, [peer.url for peer in proxy_peers]) as url:
        proxy_until(lambda: len(proxy_serves(url)) == 2)
        dying.hang = {"/v1/completions"}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = [pool.submit(proxy_ask, url, prompt=[one], n=3) for one in range(8)]
            assert dying.arrived.wait(10)
            in_flight = proxy_until(lambda: proxy_metric(url, "vllm:num_requests_running").get(f'vllm:num_requests_running{{replica="{dying.url}"}}'))
            assert in_flight % 3 == 0                # rollouts, not requests
            dying.kill()
            assert {reply.result().json()["served_by"] for reply in replies} == {other.port}
        assert set(proxy_metric(url, "vllm:num_requests_running").values()) == {0}
        assert in_flight / 3 <= proxy_metric(url, "grpo:router_retried_total")["grpo:router_retried_total{}"] <= 8
        proxy_until(lambda: f'["state", {{"replica": "{dying.url}"}}, "out"]' in requests.get(url, timeout=5).text)

def test_a_replica_that_restarts_empty_gets_no_request_before_all_is_loaded_and_checked(proxy_bucket, proxy_peers):
    peer = proxy_peers[0]
    for version in (1, 2, 3):
        proxy_publish(proxy_bucket, version)
    with proxy_router(proxy_bucket, [peer.url]) as url:
        proxy_until(lambda: len(proxy_serves(url).get(peer.port, ())) == 3 and requests.get(url + "/health", timeout=5).ok)
        peer.kill()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(proxy_ask, url, "policy-v2", prompt=[20, 20, 20], max_tokens=9) for _ in range(4)]
            proxy_until(lambda: requests.get(url + "/health", timeout=5).status_code == 503)
            again = ProxyPeer(peer.port)
            proxy_peers.append(again)
            assert all(reply.result().status_code == 200 for reply in replies)
        first = next(at for at, (path, body, _) in enumerate(again.log) if path == "/v1/completions" and body["max_tokens"] == 9)
        before = [(path, body.get("model") or body.get("lora_name")) for path, body, _ in again.log[:first] if path != "/health"]
        for name in ("policy-v1", "policy-v2", "policy-v3"):
            assert before.count(("/v1/load_lora_adapter", name)) == 1 and before.count(("/v1/completions", name)) == 3   # 3 canary prompts

def test_a_hanging_replica_is_left_and_its_requests_go_elsewhere(proxy_bucket, proxy_peers, monkeypatch):
    monkeypatch.setattr(proxy, "POLL_LIMIT_S", 0.3)
    stuck, other = proxy_peers
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket, [peer.url for peer in proxy_peers]) as url:
        proxy_until(lambda: len(proxy_serves(url)) == 2)
        stuck.hang = {"/v1/completions", "/health", "/v1/models"}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert {reply.json()["served_by"] for reply in pool.map(lambda one: proxy_ask(url, prompt=[one]), range(4))} == {other.port}
        stuck.hang = set()
        stuck.go.set()
        proxy_until(lambda: len(proxy_serves(url)) == 2)

def test_statuses_are_tried_elsewhere_or_passed_on_as_they_deserve(proxy_bucket, proxy_peers):
    one, two = proxy_peers
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket, [one.url, two.url]) as url:
        proxy_until(lambda: len(proxy_serves(url)) == 2)
        for status in (500, 503, 429, 401):
            one.script["/v1/completions"] = [(status, "no")] * 2
            assert proxy_ask(url, prompt=[status % 20, 1]).status_code == proxy_ask(url, prompt=[status % 20, 2]).status_code == 200
        one.script = {"/v1/completions": [(400, {"error": {"message": "bad"}})] * 9}
        two.script = {"/v1/completions": [(400, {"error": {"message": "bad"}})] * 9}
        assert proxy_ask(url).status_code == 400 and len(one.script["/v1/completions"]) + len(two.script["/v1/completions"]) == 17
        one.script, two.script = {"/v1/completions": [(500, "broken")] * 9}, {"/v1/completions": [(500, "broken")] * 9}
        reply = proxy_ask(url)
        assert reply.status_code == 502 and "broken" in reply.text and len(one.script["/v1/completions"]) + len(two.script["/v1/completions"]) == 14
        assert set(proxy_metric(url, "vllm:num_requests_running").values()) == {0}

def test_a_version_that_a_replica_forgot_is_answered_elsewhere_and_loaded_again(proxy_bucket, proxy_peers):
    one, two = proxy_peers
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket, [one.url, two.url]) as url:
        proxy_until(lambda: len(proxy_serves(url)) == 2)
        one.adapters.clear()                         # found by the poll, before any request meets it
        proxy_until(lambda: "policy-v1" in one.adapters and len(proxy_serves(url)) == 2)
        assert proxy_metric(url, "grpo:router_retried_total") == {"grpo:router_retried_total{}": 0}
        one.adapters.clear()                         # found by a request
        assert {proxy_ask(url, prompt=[at]).json()["served_by"] for at in range(4)} <= {one.port, two.port}
        proxy_until(lambda: "policy-v1" in one.adapters and len(proxy_serves(url)) == 2)

def test_a_client_that_leaves_cancels_its_work_through_the_router():
    engine = ProxyEngine(hold=True)
    with proxy_replica(engine) as replica, proxy_router(None, [replica]) as url:
        proxy_until(lambda: requests.get(url + "/health", timeout=5).ok)
        with pytest.raises(requests.Timeout):
            proxy_ask(url, "tiny", limit_s=0.5)
        assert engine.cancelled.wait(5) and engine.pending[0][0].cancelled()
        proxy_until(lambda: set(proxy_metric(url, "vllm:num_requests_running").values()) == {0})

def test_samplers_join_by_their_heartbeat_and_leave_with_their_process(proxy_bucket):
    engine = ProxyEngine()
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket) as url:
        assert requests.get(url + "/health", timeout=5).status_code == 503
        with proxy_replica(engine) as replica:
            member = proxy.Member(proxy_bucket, "sampler", replica, "r1", beat_s=0.1)
            actor = proxy.Member(proxy_bucket, "actor", "http://127.0.0.1:9", "r1", beat_s=0.1)
            member.start(), actor.start()
            proxy_until(lambda: requests.get(url + "/health", timeout=5).ok)
            assert engine.paths == {"policy-v1": "adapters/v000001"}   # members read the bucket themselves: a key
            assert proxy_ask(url).json()["choices"][0]["token_ids"] == [1] * 4
            member.stop(), actor.stop()
            time.sleep(1.2)
            assert requests.get(url + "/health", timeout=5).ok   # a silent heartbeat is no reason to leave a healthy server
        proxy_until(lambda: not proxy_metric(url, "grpo:router_ready"))

@pytest.mark.parametrize("event", ["joins by --replica", "joins by its lease", "leaves", "restarts empty", "hangs", "answers 500",
                                   "serves the base as version 3", "serves version 2 as version 3"])
def test_whatever_a_replica_does_no_rollout_is_wrong_or_lost_and_nobody_else_waits(proxy_bucket, proxy_peers, monkeypatch, event):
    """Six clients ask without pause while it happens, every time with another prompt; each reply's logprobs say which weights it
    came from. Version 3 is published amid the trouble: the two other replicas serve it at once."""
    monkeypatch.setattr(proxy, "POLL_S", 0.2), monkeypatch.setattr(proxy, "POLL_LIMIT_S", 0.3), monkeypatch.setattr(proxy, "LOAD_TRIES", 2)
    odd, over, replies, numbers = ProxyPeer(), threading.Event(), [], itertools.count()
    proxy_peers.append(odd)
    for version in (1, 2):
        proxy_publish(proxy_bucket, version)

    def client():
        while not over.is_set():
            prompt, model, start = [next(numbers) % 16] * 5 + [7], dice.choice(["policy-v1", "policy-v2", "policy"]), time.monotonic()
            reply = proxy_ask(url, model, prompt)
            replies.append((model, prompt, reply.status_code, reply.json(), time.monotonic() - start))
    dice, is_member = random.Random(0), event in ("joins by its lease", "leaves")
    member = proxy.Member(proxy_bucket, "sampler", odd.url, "r1", beat_s=0.05)
    if event == "leaves":
        member.start()
    if "version 3" in event:
        odd.lies = {"policy-v3": 0 if "base" in event else 2}
    urls = [peer.url for peer in proxy_peers[:2]] + ([] if is_member else [odd.url])
    if event == "joins by --replica":                # the flag named it before it was there
        odd.kill()
    with proxy_router(proxy_bucket, urls) as url, concurrent.futures.ThreadPoolExecutor(6) as pool:
        present = 2 if event.startswith("joins") else 3
        proxy_until(lambda: len(proxy_serves(url)) == present and len(replies) >= 0)
        clients = [pool.submit(client) for _ in range(6)]
        try:
            proxy_until(lambda: len(replies) > 50)
            if event in ("leaves", "restarts empty"):
                member.stop()
                odd.kill()
            if event in ("restarts empty", "joins by --replica"):
                proxy_peers.append(ProxyPeer(odd.port))
            if event == "joins by its lease":
                member.start()
            if event == "hangs":
                odd.hang = {"/v1/completions", "/health", "/v1/models", "/v1/load_lora_adapter"}
            if event == "answers 500":
                odd.answer = lambda path, body: (500, "no") if path == "/v1/completions" else ProxyPeer.answer(odd, path, body)
            proxy_publish(proxy_bucket, 3)
            good = {peer.port for peer in proxy_peers[:2]}
            proxy_until(lambda: good <= {port for port, names in proxy_serves(url).items() if "policy-v3" in names}, 3)
            before = len(replies)
            proxy_until(lambda: len(replies) > before + 100)
            if event in ("hangs", "leaves"):
                proxy_until(lambda: odd.port not in proxy_serves(url))
            if event.startswith(("joins", "restarts")):
                proxy_until(lambda: "policy-v3" in proxy_serves(url).get(odd.port, ()))
                proxy_until(lambda: odd.port in {reply["served_by"] for _, _, _, reply, _ in replies[-50:]})
        finally:
            over.set()
            odd.go.set()
            member.stop()
        for one in clients:
            one.result()
        assert set(proxy_metric(url, "vllm:num_requests_running").values()) == {0}
        for model, prompt, status, reply, _ in replies:
            assert status == 200, reply
            version = int(reply["model"].rpartition("v")[2])
            assert model in ("policy", reply["model"]) and version in (1, 2, 3)
            assert reply["choices"][0]["logprobs"]["top_logprobs"][0] == {f"token_id:{t}": v for t, v in proxy_table(prompt, version).items()}
        assert sum(waited_s > 2 for *_, waited_s in replies) <= (6 if event == "hangs" else 0)   # at most those it held
        if "version 3" in event:
            assert odd.port not in {reply["served_by"] for *_, reply, _ in replies if reply["model"] == "policy-v3"}

def test_the_replica_token_goes_to_replicas_only_and_is_never_shown(proxy_peers, caplog):
    caplog.set_level(logging.DEBUG)
    peer, client = proxy_peers[0], {"Authorization": "Bearer outer-secret"}
    with proxy_router(None, [peer.url], token="outer-secret", replica_token="inner-secret") as url:
        proxy_until(lambda: requests.get(url + "/health", timeout=5).ok)
        assert requests.post(url + "/v1/completions", json={"model": "tiny", "prompt": [1]}, timeout=5).status_code == 401
        peer.script = {"/v1/completions": [(401, "go away")] * 9}
        reply = requests.post(url + "/v1/completions", json={"model": "tiny", "prompt": [1]}, headers=client, timeout=9)
        assert reply.status_code == 502 and "secret" not in reply.text
        page = requests.get(url, headers=client, timeout=5).text + requests.get(url + "/metrics", headers=client, timeout=5).text
    assert {token for _, _, token in peer.log} == {"Bearer inner-secret"} and "secret" not in caplog.text + page

def test_a_load_is_on_all_live_replicas_or_on_none(tmp_path, proxy_peers, monkeypatch):
    """One replica refuses for good: the other is rolled back, and the client sees 504 with the reason, never the 404 (which
    ends a TRL run). A replica that is dead is no reason to refuse."""
    monkeypatch.setattr(proxy, "LOAD_TRIES", 3)
    one, two = proxy_peers
    path = proxy_folder(tmp_path / "a1")
    with proxy_router(None, [one.url, two.url, "http://127.0.0.1:9"], adapter_dir=str(tmp_path)) as url:
        proxy_until(lambda: proxy_metric(url, "grpo:router_ready") and sum(proxy_metric(url, "grpo:router_ready").values()) == 2)
        for refusal in ((404, "No adapter found for /secret/path"), (500, "Error while deserializing header"), (400, "rank 64 is too big")):
            two.script["/v1/load_lora_adapter"] = [refusal] * 20
            reply = proxy_load(url, "trl-policy-v1", path)
            assert reply.status_code == 504 and refusal[1] in reply.text and two.url in reply.text, reply.text
            assert one.adapters == two.adapters == {} and proxy_ask(url, "trl-policy-v1").status_code == 404
        two.script["/v1/load_lora_adapter"] = [(404, "No adapter found"), (500, "doesn't contain tensors")]   # a mount that lags
        assert proxy_load(url, "trl-policy-v1", path).status_code == 200
        assert one.adapters == two.adapters == {"trl-policy-v1": str(path)}
        assert {proxy_ask(url, "trl-policy-v1", prompt=[at]).json()["served_by"] for at in range(9)} == {one.port, two.port}
        # Again, with other weights for all the router knows: unloaded first, and asked for under another salt of the prefix
        # cache, which vLLM keeps by an adapter's name alone.
        assert proxy_load(url, "trl-policy-v1", path).status_code == 200 and one.adapters == {"trl-policy-v1": str(path)}
        proxy_ask(url, "trl-policy-v1")
        salts = [body["cache_salt"] for peer in proxy_peers for body in peer.paths("/v1/completions")]
        assert len(salts) == 10 and len(set(salts)) == 2
        assert requests.post(url + "/v1/unload_lora_adapter", json={"lora_name": "trl-policy-v1"}, timeout=5).status_code == 200
        assert one.adapters == two.adapters == {} and proxy_ask(url, "trl-policy-v1").status_code == 404
        assert requests.post(url + "/v1/unload_lora_adapter", json={"lora_name": "trl-policy-v1"}, timeout=5).status_code == 404
        assert proxy_load(url, "x", "/etc").status_code == proxy_load(url, "x", "adapters/v000001").status_code == 400

def test_a_resumed_trl_run_reuses_its_names_with_new_files_on_our_samplers(tmp_path):
    engines, path = [ProxyEngine(), ProxyEngine()], proxy_folder(tmp_path / "a1")
    with proxy_replica(engines[0], roots=[tmp_path]) as one, proxy_replica(engines[1], roots=[tmp_path]) as two:
        for weights in (b"first run", b"second run, another proxy", b"third"):
            proxy_folder(path, weights)
            with proxy_router(None, [one, two], adapter_dir=str(tmp_path)) as url:
                proxy_until(lambda: sum(proxy_metric(url, "grpo:router_ready").values()) == 2)
                assert requests.get(url + "/server_info", timeout=5).json()["vllm_config"]["lora_config"]["max_loras"] == 8
                assert proxy_load(url, "trl-policy-v1", path).status_code == 200
                proxy_folder(path, weights + b" again")
                assert proxy_load(url, "trl-policy-v1", path).status_code == 200
                assert proxy_ask(url, "trl-policy-v1").json()["choices"][0]["token_ids"] == [1] * 4

def test_a_client_that_counts_from_1_again_finds_room_where_a_dead_one_left_its_adapters(tmp_path):
    """A TRL run killed or finished leaves its last versions loaded; the next one's fourth load found every slot taken."""
    engine = ProxyEngine()
    with proxy_replica(engine, roots=[tmp_path]) as one, proxy_router(None, [one], adapter_dir=str(tmp_path)) as url:
        proxy_until(lambda: sum(proxy_metric(url, "grpo:router_ready").values()) == 1)
        for run, version in [("old", 7), ("old", 8), ("old", 9), *(("new", version) for version in range(1, 9))]:
            path = proxy_folder(tmp_path / f"{run}{version}", run.encode())
            assert proxy_load(url, f"trl-policy-v{version}", path).status_code == 200
            assert len(engine.paths) <= engine.max_loras
        assert engine.paths == {f"trl-policy-v{version}": str(tmp_path / f"new{version}") for version in range(1, 9)}

def test_a_restarted_replica_gets_the_clients_adapters_back(tmp_path, proxy_peers):
    peer, path = proxy_peers[0], proxy_folder(tmp_path / "a1")
    with proxy_router(None, [peer.url], adapter_dir=str(tmp_path)) as url:
        proxy_until(lambda: requests.get(url + "/health", timeout=5).ok)
        assert proxy_load(url, "trl-policy-v1", path).status_code == 200
        peer.kill()
        proxy_peers.append(ProxyPeer(peer.port))
        assert proxy_ask(url, "trl-policy-v1").status_code == 200 and proxy_peers[-1].adapters == {"trl-policy-v1": str(path)}

def test_versions_of_the_bucket_cannot_be_loaded_through_the_api(proxy_bucket, proxy_peers):
    proxy_publish(proxy_bucket, 1)
    with proxy_router(proxy_bucket, [proxy_peers[0].url]) as url:
        proxy_until(lambda: requests.get(url + "/health", timeout=5).ok)
        assert proxy_load(url, "policy-v2", proxy_bucket.root / "adapters" / "v000001").status_code == 400
        assert requests.post(url + "/v1/unload_lora_adapter", json={"lora_name": "policy-v1"}, timeout=5).status_code == 404

def test_a_pause_is_for_all_and_a_client_killed_inside_one_leaves_nobody_paused(proxy_peers):
    one, two = proxy_peers
    two.is_paused = True                             # left so by a router that was killed
    with proxy_router(None, [one.url, two.url], pause_limit_s=0.6) as url:
        proxy_until(lambda: sum(proxy_metric(url, "grpo:router_ready").values()) == 2)
        assert not two.is_paused
        assert requests.post(url + "/pause?mode=keep", timeout=5).status_code == 200 and one.is_paused and two.is_paused
        assert requests.get(url + "/is_paused", timeout=5).json()["is_paused"]
        proxy_until(lambda: not one.is_paused and not two.is_paused)
        assert not requests.get(url + "/is_paused", timeout=5).json()["is_paused"]
        two.script["/pause"] = [(500, "cannot")]
        reply = requests.post(url + "/pause?mode=keep", timeout=5)
        assert reply.status_code == 504 and "cannot" in reply.text and not one.is_paused

def test_nothing_grows_over_many_publishes(proxy_bucket, proxy_peers):
    """The proxy's part: 60 versions through one replica; three live at a time in it and in the router."""
    with proxy_router(proxy_bucket, [proxy_peers[0].url]) as url:
        for version in range(60):
            proxy_publish(proxy_bucket, version)
        proxy_until(lambda: proxy_serves(url).get(proxy_peers[0].port) == {"policy-v57", "policy-v58", "policy-v59"})
        proxy_until(lambda: proxy_peers[0].adapters.keys() == {"policy-v57", "policy-v58", "policy-v59"})

def test_the_router_page_shows_replicas_and_escapes_what_they_say(proxy_peers):
    peer = proxy_peers[0]
    peer.adapters["<script>alert(1)"] = "x"
    with proxy_router(None, [peer.url]) as url:
        proxy_until(lambda: requests.get(url + "/health", timeout=5).ok)
        page = requests.get(url, timeout=5)
        assert peer.url in page.text and "script>alert" not in page.text.replace("\\u003cscript>alert", "") and page.headers["Content-Type"].startswith("text/html")

def test_a_proxy_copied_without_its_page_says_which_file_is_missing(proxy_peers, tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "__file__", str(tmp_path / "proxy.py"))
    with proxy_router(None, [proxy_peers[0].url]) as url:
        page = requests.get(url, timeout=5)
        assert page.status_code == 404 and f"{tmp_path}/docs/status.html is missing" in page.json()["error"]["message"]
        assert requests.get(url + "/metrics", timeout=5).ok

def proxy_command(*args, **more):
    return subprocess.Popen([sys.executable, proxy.__file__, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_where_it_is_and_what_it_waits_for_and_ends_in_two_seconds(tmp_path, number):
    process = proxy_command("--bucket", str(tmp_path / "b"), "--listen", "127.0.0.1:0")
    url = process.stdout.readline().strip().removeprefix("ready role=proxy url=")
    assert requests.get(url + "/health", timeout=5).status_code == 503
    assert "waiting for run.json" in process.stderr.readline()
    start = time.monotonic()
    process.send_signal(number)
    assert process.wait(5) == 0 and time.monotonic() - start < 2.0
    assert "Traceback" not in process.stderr.read()

@pytest.mark.parametrize("args, why", [
    ([], "give --bucket"), (["--replica", "ftp://x"], "URL"), (["--replica", "http://a", "--listen", "0.0.0.0:1"], "--token"),
    (["--bucket", "s3://b/p", "--replica", "http://a"], "--adapter-dir")])
def test_a_users_mistake_is_one_line_and_exit_2(args, why):
    process = proxy_command(*args, env={**os.environ, "GRPO_TOKEN": ""})
    _, said = process.communicate(timeout=20)
    assert process.returncode == 2 and why in said and len(said.strip().splitlines()) == 1


# ================================================================ 5. For people: README, examples, report, errors

PEOPLE_ROOT = Path(grpo_async.__file__).resolve().parent
PEOPLE_README = (PEOPLE_ROOT / "README.md").read_text(encoding="utf-8")
PEOPLE_BLOCKS = re.findall(r"(?:<!-- run: (\w+) -->\n)?```(\w+)\n(.*?)```", PEOPLE_README, re.DOTALL)

def people_commands(block):
    """The commands of a bash block as word lists, without comments and leading VAR=value, and the exported variables."""
    commands, env = [], {}
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            env |= dict(word.split("=", 1) for word in words[1:])
            continue
        for part in " ".join(map(shlex.quote, words)).split(" '&&' "):
            words = shlex.split(part)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            commands += [words] if words else []
    return commands, env

@pytest.mark.parametrize("block", [b for _, kind, b in PEOPLE_BLOCKS if kind == "bash"], ids=lambda b: b.split("\n")[0][:40])
def test_every_command_of_the_readme_is_one(block, tmp_path):
    """Valid bash; and flags, subcommands and files that exist, by the real parsers."""
    assert subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0
    commands, _ = people_commands(block)
    for words in commands:
        program = words[1] if words[0] == "python" else words[0]
        assert words[0] in ("python", "pip", "pytest", "vllm") or os.access(PEOPLE_ROOT / program, os.X_OK), words
        if program.endswith((".py", ".sh", ".txt")):
            assert (PEOPLE_ROOT / program).is_file(), program
        if program == "grpo_async.py" and "proxy" not in words:
            args = grpo_async.arguments(words[2:])
            assert all(grpo_async.load_reward(str(PEOPLE_ROOT / spec)) for spec in args.reward)
        elif program in ("grpo_async.py", "bucket.py"):
            # An unknown flag, or a missing address, is status 2 before anything is done; what is right waits or fails later.
            process = subprocess.Popen([sys.executable, PEOPLE_ROOT / program, *words[2:], "--no-such-flag"], cwd=tmp_path,
                                       stderr=subprocess.PIPE, text=True)
            assert "unrecognized arguments: --no-such-flag\n" in process.communicate(timeout=30)[1].replace("; try --help", "")

@pytest.mark.parametrize("way", ["folder", "serve", "s3"])
def test_two_machines_run_as_the_readme_says(way, grpo_start, grpo_base, bucket_weed, tmp_path, monkeypatch):
    """The block's own commands, with this machine's addresses in place of the README's and 2 steps in place of 200."""
    block, = [b for name, _, b in PEOPLE_BLOCKS if name == way]
    port = bucket_port()
    here = {"/mnt/run": f"{tmp_path}/run", "/data/runs": f"{tmp_path}/served", "0.0.0.0:9000": f"127.0.0.1:{port}",
            "http://thathost:9000": f"http://127.0.0.1:{port}", "s3://my-bucket/run1": "s3://tests/readme", "--steps 200": "--steps 2"}
    for theirs, ours in here.items():
        block = block.replace(theirs, ours)
    commands, env = people_commands(block)
    for name, value in ({**BUCKET_KEYS, "AWS_ENDPOINT_URL_S3": bucket_weed()} if way == "s3" else env).items():
        monkeypatch.setenv(name, value)
    address = next(words[words.index("--bucket") + 1] for words in commands if "--bucket" in words)
    files = {p.name: p.read_bytes() for p in grpo_base.iterdir() if p.name != "manifest.json"}
    with contextlib.ExitStack() as stack:
        roles = {}
        for words in commands:
            if "serve" in words:
                server = stack.enter_context(bucket_process(sys.executable, *words[1:], cwd=PEOPLE_ROOT))
                assert server.stdout.readline().startswith("ready role=serve")
            elif "check" in words:
                assert subprocess.run([sys.executable, *words[1:]], cwd=PEOPLE_ROOT).returncode == 0
            else:
                if not roles:  # the tiny base, which takes half a minute, is already there
                    open_bucket(address).publish("base", files, {})
                role = words[words.index("--role") + 1]
                roles[role] = grpo_start(*words[2:], *(["--eval-steps", -1] if role == "learner" else []),
                                         **{k: v for k, v in os.environ.items() if k.startswith("AWS_")})
        assert roles["learner"].done(90)["steps"] == "2" and roles["actor"].end() == 0
    assert way != "serve" or (tmp_path / "served/team/run1/summary.json").is_file()

def test_the_readme_links_to_files_and_headings_that_exist():
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", PEOPLE_README)
    assert len(links) >= 10 and [link for link in links if not link.startswith("http") and not (PEOPLE_ROOT / link).is_file()] == []
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", PEOPLE_README, re.M)}
    assert [a for a in re.findall(r"\]\(#([^)]+)\)", PEOPLE_README) if a not in anchors] == []

def test_the_errors_in_the_readme_are_those_that_are_said():
    files = "".join((PEOPLE_ROOT / name).read_text() for name in ("grpo_async.py", "bucket.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", files) + os.strerror(errno.EADDRINUSE).lower() + os.strerror(errno.ENOSPC)
    table = PEOPLE_README.partition("## When it says error")[2].partition("## ")[0]
    phrases = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(phrases) >= 10 and [p for p in phrases if max(re.split(r"warning: |--task math| --lora-r|…|[\d.]+", p), key=len).strip() not in said] == []

def test_the_readmes_python_snippets_do_what_they_say(grpo_finished, tmp_path):
    """Its lines to trackio and to TensorBoard get the run's numbers (the packages are stand-ins, their calls are real);
    PEFT loads the adapter; the reward has TRL's signature."""
    snippets = {next(word for word in ("trackio", "SummaryWriter", "PeftModel", "def mine") if word in b): b for _, kind, b in PEOPLE_BLOCKS if kind == "python"}
    folder, seen = grpo_finished[0], []
    modules = {"trackio": SimpleNamespace(init=lambda **k: None, log=lambda row, step: seen.append((step, row))),
               "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=lambda to: SimpleNamespace(add_scalar=lambda *a: seen.append(a)))}
    (tmp_path / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(sys, "stdin", io.StringIO(grpo_finished[3]))
        exec(snippets["trackio"], {})
        assert [step for step, _ in seen] == list(range(1, 9)) and all(0 <= row["reward"] <= 1 for _, row in seen)
        seen.clear()
        exec(snippets["SummaryWriter"].replace("runs/demo", str(tmp_path)), {})
        assert len(seen) == 6 * 8 and {key for key, *_ in seen} >= {"reward", "tok_s"}
    exec(snippets["PeftModel"].replace("runs/demo/base", str(folder / "base")).replace("/tmp/adapter", str(folder / "final")), space := {})
    assert type(space["model"]).__name__ == "PeftModelForCausalLM" and any("lora_B" in name for name, _ in space["model"].named_parameters())
    exec(snippets["def mine"], space)
    assert space["mine"]([], [[{"role": "assistant", "content": " 4 "}]] * 2, [], ["4", "5"], more=1) == [1.0, 0.0]

# -- examples

def people_dry_run(**env):
    """The commands that examples/hf_jobs.sh would run, as word lists."""
    keys = {"DRY_RUN": "1", "NAMESPACE": "me", "MODEL": "org/model", "DATA": "d.jsonl", "HF_TOKEN": "t", **BUCKET_KEYS}
    done = subprocess.run(["bash", PEOPLE_ROOT / "examples/hf_jobs.sh"], env={"PATH": os.environ["PATH"], **keys, **env}, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return [people_bash_words(line[2:]) for line in done.stderr.splitlines()]

def people_bash_words(line):
    return subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]

def test_hugging_face_jobs_are_started_with_the_right_slots_and_all_cancelled():
    """max-staleness 4 means 6 versions at once; rank 12 is served by vLLM's 16. Every job that was started is cancelled."""
    commands = people_dry_run(SAMPLERS="3", MAX_STALENESS="4", RANK="12")
    started, cancelled = ([c for c in commands if c[:3] == ["hf", "jobs", verb]] for verb in ("run", "cancel"))
    assert len(started) == len(cancelled) == 4 and commands[-4:] == cancelled
    for i, words in enumerate(started[:3]):
        value = dict(itertools.pairwise(words))
        assert (value["--max-loras"], value["--max-cpu-loras"], value["--max-lora-rank"], value["--network-alias"]) == ("6", "12", "16", f"s{i}")
    roles = [shlex.split(line.rstrip("& ")) for line in started[3][-1].splitlines()[1:]]
    assert [words[words.index("--role") + 1] for words in roles] == ["proxy", "actor", "learner"] and roles[0].count("--replica") == 3
    args = grpo_async.arguments(roles[2][roles[2].index("--role"):])
    assert (args.bucket, args.max_staleness, args.lora_r) == ("s3://async-grpo/run1", 4, 12)

def test_hugging_face_jobs_are_cancelled_when_the_trainer_fails_and_show_no_secret(tmp_path):
    """The script for real, against an `hf` that records how it is called."""
    (tmp_path / "hf").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/log\n[ "$2" = run ] && echo "id$RANDOM"\n[ "$2" != wait ]\n')
    (tmp_path / "hf").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NAMESPACE": "me", "MODEL": "m", "DATA": "d", "HF_TOKEN": "hf-secret", "GRPO_TOKEN": "grpo-secret", **BUCKET_KEYS}
    done = subprocess.run(["bash", PEOPLE_ROOT / "examples/hf_jobs.sh"], env=env, text=True, capture_output=True)
    log = (tmp_path / "log").read_text()
    assert done.returncode == 1 and re.findall(r"jobs cancel me/id\d+\n", log)[-3:] == log.splitlines(keepends=True)[-3:]
    assert not re.search(f"hf-secret|grpo-secret|{BUCKET_KEYS['AWS_SECRET_ACCESS_KEY']}", log + done.stderr)

def test_the_commands_of_hf_jobs_are_accepted_by_the_real_cli():
    click, cli = pytest.importorskip("click"), pytest.importorskip("huggingface_hub.cli.hf")
    for words in people_dry_run():
        command, words = cli.app, words[1:]
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0))
        context = command.make_context(command.name, list(words))
        # Subtle: `jobs run` takes an option that it does not know for the image.
        assert not context.params.get("image", "").startswith("-"), words
    with pytest.raises(Exception, match="no-such"):
        command.make_context(command.name, [*words, "--no-such"])

def people_reward(file, name):
    return grpo_async.load_reward(f"{PEOPLE_ROOT}/examples/rewards/{file}.py:{name}")[2]

@pytest.mark.parametrize("file, name, cases", [
    ("numeric", "correct", [("so 1,234.50", {"answer": "1234.5"}, 1), ("7 or 8", {"answer": 7}, 0), ("none", {"answer": 7}, 0)]),
    ("numeric", "near", [("100", {"answer": 100}, 1), ("110", {"answer": 100}, math.exp(-1)), ("no", {"answer": 100}, 0)]),
    ("choice", "letter", [("Answer: B", {"answer": "B"}, 1), ("the answer is (b)? No. Answer: C", {"answer": "C"}, 1), ("so B.", {"answer": "B"}, 1),
                          ("Answer: A. Answer: B", {"answer": "B"}, 0), ("A B C D", {"answer": "A"}, 0), ("", {"answer": "A"}, 0)]),
    ("valid_json", "valid", [('{"a": "x", "n": 2.5}', {"schema": {"a": "string", "n": "number"}}, 1), ('```json\n{"a": "x"}\n```', {"schema": {"a": "string"}}, 1),
                             ('{"a": true}', {"schema": {"a": "number"}}, 0.2), ('{"a": 1, "b": 2}', {"schema": {"a": "number"}}, 0.6), ("[1]", {"schema": {"a": "number"}}, 0.2),
                             ('{"a": 1', {"schema": {"a": "number"}}, 0), ('{"a": 1} done', {"schema": {"a": "number"}}, 0)]),
    ("customer_service", "action", [("ACTION: REFUND\nSorry.", {"action": "REFUND"}, 1), ("ACTION: TRACK\nSorry.", {"action": "REFUND"}, 0.1), ("REFUND", {"action": "REFUND"}, 0)]),
    ("customer_service", "reply", [("ACTION: REFUND\nOrder A1 is refunded.", {"order": "A1", "finish_reasons": "stop"}, 1), ("ACTION: REFUND\nRefunded.", {"order": "A1", "finish_reasons": "stop"}, 0),
                                   ("ACTION: REFUND\nOrder A1", {"order": "A1", "finish_reasons": "length"}, 0)])])
def test_the_example_rewards_score_worked_examples(file, name, cases):
    for text, columns, want in cases:
        for completion in (text, [{"role": "assistant", "content": text}]):
            assert people_reward(file, name)(completions=[completion], **{k: [v] for k, v in columns.items()}) == [pytest.approx(want)], text

def test_the_length_rewards_fall_from_short_to_long():
    ids = [[0] * n for n in (1, 64, 384, 448, 512, 600)]
    assert people_reward("length", "overlong")(completion_ids=ids) == [0, 0, 0, -0.5, -1, -1]
    assert people_reward("length", "short")(completion_ids=ids[:2]) == [1, 0]

def test_the_customer_service_rows_are_what_their_rewards_need():
    rows = grpo_async.read_rows((PEOPLE_ROOT / "examples/customer_service.jsonl").read_text(), "customer_service.jsonl")
    assert len(rows) == 60 and {row["action"] for row in rows} == {"REFUND", "TRACK", "EXCHANGE", "HUMAN"}
    assert all(row["order"] in row["prompt"][-1]["content"] for row in rows)

@pytest.mark.parametrize("name, text", [
    ("a.jsonl", '{"question": "1+1?", "answer": "so\\n#### 1,002"}\n\n{"question": "", "answer": "3"}\n'),
    ("a.json", '[{"question": "1+1?", "answer": "so\\n#### 1,002"}, {"question": "x"}]'), ("a.csv", 'question,answer\n"1+1?","so\n#### 1,002"\nx,\n')],
    ids=["JSON lines", "JSON", "CSV"])
def test_gsm8k_in_its_common_formats_becomes_data(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, PEOPLE_ROOT / "examples/gsm8k.py", tmp_path / name], text=True, capture_output=True)
    row, = grpo_async.read_rows(done.stdout, name)
    assert done.returncode == 0 and row["answer"] == "1002" and row["prompt"][0]["content"].startswith("1+1?") and "1 of 2" in done.stderr
    assert grpo_async.math_reward(completions=["\\boxed{1002}"], answer=[row["answer"]]) == [1]

# -- terminal, report, teaching page

def test_a_step_is_a_plain_line_in_a_pipe_and_a_line_that_redraws_itself_on_a_terminal(grpo_finished, monkeypatch):
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", grpo_finished[3]) and grpo_finished[3].count("\nstep=") == 8
    row = {"step": 9, "reward": 0.5, "ratio": None, "staleness_mean": 1.0, "queue_groups": 64, "tok_s": 1234.5}

    def shown(step, **env):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
        monkeypatch.setenv("COLUMNS", "50")
        monkeypatch.setenv("TERM", "xterm")
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with open(slave, "w") as terminal, contextlib.redirect_stdout(terminal):
            grpo_async.show_step(row | {"step": step}, 100, 2.0)
            text = os.read(master, 10000).decode()
        os.close(master)
        return text
    assert shown(9) == "\r\033[Kstep 9/100 reward 0.5 ratio nan staleness 1 queue"[:4 + 49]
    assert shown(10).endswith("\r\n") and not shown(11).endswith("\n")
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert shown(9, **plain).startswith("step=9 reward=0.5 ratio=nan ")
        monkeypatch.delenv("NO_COLOR", raising=False)

def test_help_fits_a_screen_and_a_wrong_flag_is_one_line(grpo_start, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        grpo_async.arguments(["--help"])
    said = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and len(said) <= 50 and max(map(len, said)) <= 100
    with pytest.raises(SystemExit):
        grpo_async.arguments(["--help-all"])
    everything = capsys.readouterr().out
    for name in [*(f[0] for f in grpo_async.RUN_FLAGS), *(f[0] for f in grpo_async.PROCESS_FLAGS), "reward", "mask-truncated", "merge"]:
        assert f"--{name} " in everything or f"--{name}\n" in everything, name

def test_a_report_elsewhere_writes_nothing_to_the_run(grpo_start, grpo_finished, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in grpo_finished[0].rglob("*") if p.is_file()}
    assert grpo_start("--role", "report", "--bucket", grpo_finished[0], "--out", tmp_path / "theirs").end() == 0
    assert {p: p.stat().st_mtime_ns for p in grpo_finished[0].rglob("*") if p.is_file()} == before
    rows = [json.loads(line) for line in (tmp_path / "theirs/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:  # a sample of each step, to read
        assert row["sample"]["best"]["reward"] >= row["sample"]["worst"]["reward"] and "+" in row["sample"]["prompt"]

@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_draws_the_report_and_names_the_bottleneck(grpo_finished, tmp_path):
    page = subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                           "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}", "--virtual-time-budget=2000", "--window-size=1280,2000",
                           "--dump-dom", f"file://{grpo_finished[0]}/report.html"], capture_output=True, text=True, timeout=60).stdout
    page = page.rpartition("</script>")[2]  # what the script has drawn, without the script
    assert page.count('role="img"') >= 10 and "of the learner's time was" in page and re.search(r"--(inflight|token-budget|lora-r|sync-steps|checkpoint-steps)", page)
    assert "best, reward" in page and "NaN" not in page

def test_the_walkthrough_of_one_step_is_made_from_a_run(grpo_finished):
    """Its numbers are recomputed and compared with the log's while it is written; the page in docs/ has the same words."""
    spec = importlib.util.spec_from_file_location("walkthrough", PEOPLE_ROOT / "docs/walkthrough.py")
    walkthrough = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walkthrough)
    page = walkthrough.page(str(grpo_finished[0]), 7)
    assert page.count("\n| `") == 4 and "nan" not in page

    def words(text):
        return re.findall(r"^#.*|\b[a-z]{4,}\b", re.sub(r"```.*?```|`[^`]*`", "", text.replace("cut to", "under the limit of"), flags=re.DOTALL), re.M)[1:]
    assert words(page) == words((PEOPLE_ROOT / "docs/one-step.md").read_text())

# -- errors as a user meets them

@pytest.fixture(scope="session")
def people_models(grpo_base, tmp_path_factory):
    """Variants of the tiny base that users come with."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("whole", "cut", "no_weights", "other_tokenizer", "no_pad"):
        shutil.copytree(grpo_base, folder / name)
        (folder / name / "manifest.json").unlink()
    weights = folder / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (folder / "no_weights/model.safetensors").unlink()
    tokenizer = json.loads((folder / "whole/tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"1": 70, "x1": 7}
    (folder / "other_tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "no_pad/tokenizer_config.json").read_text())
    (folder / "no_pad/tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "pad_token"}))
    (folder / "no_pad/special_tokens_map.json").unlink()
    return folder

def people_data(folder, **columns):
    rows = [{"prompt": f"{a}+15=", "answer": a + 15} | columns for a in range(10, 40)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "d.jsonl"

@pytest.mark.parametrize("code, says, flags", [
    (2, "unrecognized arguments: --stepz 3; try --help", "--stepz 3"), (2, "--task: invalid choice: 'foo'", "--task foo"), (2, "--group-size must be at least 2", "--group-size 1"),
    (2, "--max-staleness must be at least 0 .* got -1", "--max-staleness -1"), (2, "--lr must be at least 0 .* got nan", "--lr nan"),
    (2, "--learners must be at least 1", "--learners 0"), (2, "--temperature must be above 0", "--temperature 0"),
    (2, "missing.jsonl: .*No such file", "--data {at}/missing.jsonl --task math"), (2, "want s3://bucket/prefix", "--bucket s3://"), (2, "address 'ftp://x'", "--bucket ftp://x"),
    (2, "d.jsonl is a file, want a folder", "--bucket {at}/d.jsonl"), (1, "/proc/nope/probe: this folder cannot be made", "--bucket /proc/nope"),
    (2, "no_such_folder: there is no such folder", "--model {at}/no_such_folder"), (2, "cut on cpu: Error while deserializing", "--model {models}/cut"),
    (2, "no_weights on cpu: .*model.safetensors", "--model {models}/no_weights"), (2, "tokenizer of another model", "--model {models}/other_tokenizer"),
    (2, "--max-tokens add up to 516, the context of .* is 256", "--model {models}/whole --max-tokens 500"), (2, "on cuda: .*CUDA", "--model {models}/whole --device cuda"),
    (2, "no such linear layer", "--model {models}/whole --target-modules nope"), (2, "column named answer; got columns", "--model {models}/whole --data {at}/nocolumn.jsonl"),
    (2, "chat messages need a model with a chat template", "--model {models}/whole --data {at}/chat.jsonl"), (2, "--reward {at}/r.py:f: ZeroDivisionError", "--reward {at}/r.py:f"),
    (2, "of a file that exists", "--reward {at}/none.py:f"), (2, "can't allocate memory.*--token-budget.*--max-rows", "--model {models}/whole --lora-r 1000000000000")])
def test_a_users_mistake_is_one_line_that_says_what_to_do(code, says, flags, grpo_start, people_models, tmp_path):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is one here")
    people_data(tmp_path)
    (tmp_path / "nocolumn.jsonl").write_text('{"prompt": "1+1=", "solution": 2}\n')
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}], "answer": 2}\n')
    (tmp_path / "r.py").write_text("1 / 0\n")
    flags = [f.format(at=tmp_path, models=people_models) for f in flags.split()]
    usual = {"--bucket": tmp_path / "b", "--max-tokens": 7, "--max-prompt-tokens": 16, "--data": tmp_path / "d.jsonl"}
    learner = grpo_start("--role", "learner", *itertools.chain(*((k, v) for k, v in usual.items() if k not in flags)), *flags)
    assert learner.end() == code, learner.text
    lines = [line for line in learner.lines if not line.startswith("start ")]
    assert len(lines) == 1 and re.search(says.format(at=tmp_path), lines[0]), learner.text

def test_running_out_of_gpu_memory_is_recognised():
    assert grpo_async.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not grpo_async.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) and not grpo_async.is_out_of_memory(ValueError("out of memory"))

def test_a_model_without_a_pad_token_trains(grpo_start, people_models, tmp_path):
    learner = grpo_start("--role", "learner", "--bucket", tmp_path / "b", "--model", people_models / "no_pad", "--data", people_data(tmp_path), "--max-tokens", 7,
                         "--max-prompt-tokens", 16, *"--steps 1 --groups-per-step 2 --lora-r 2 --eval-steps -1".split())
    actor = grpo_start("--role", "actor", "--bucket", tmp_path / "b")
    assert learner.done()["steps"] == "1" and actor.end() == 0

def test_wrong_credentials_are_the_users_and_named_as_such(grpo_start, bucket_served):
    actor = grpo_start("--role", "actor", "--bucket", f"{bucket_served[0]}/none/run", **{**BUCKET_KEYS, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert actor.end() == 2 and re.search("error: .*403.*AWS_… keys", actor.lines[-1]) and "Traceback" not in actor.text

def test_a_full_disk_is_the_worlds_and_names_the_place(grpo_start, grpo_base, tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    try:
        shutil.copytree(grpo_base, tmp_path / "base")
        learner = grpo_start("--role", "learner", "--bucket", tmp_path, "--steps", 1)
        assert learner.end() == 1 and re.search(f"error: .*No space.*{tmp_path}.*--bucket", learner.lines[-1]) and "Traceback" not in learner.text
    finally:
        subprocess.run(["umount", tmp_path])

def test_a_taken_port_names_the_flag_that_helps(grpo_start, grpo_finished):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        sampler = grpo_start("--role", "sampler", "--bucket", grpo_finished[0], "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert sampler.end() == 1 and re.search("error: .*address already in use.*--listen HOST:0", sampler.lines[-1]) and "Traceback" not in sampler.text

def test_a_joiner_with_another_torch_is_told_and_joins(grpo_start, grpo_bucket):
    run = json.loads((grpo_bucket / "run.json").read_text())
    (grpo_bucket / "run.json").write_text(json.dumps(run | {"torch": "2.4.1"}))
    actor = grpo_start("--role", "actor", "--bucket", grpo_bucket)
    assert "torch 2.4.1" in actor.until("^warning: ") and "pip install torch==2.4.1" in actor.text
    actor.until("^ready role=actor")

def test_a_reward_that_is_always_the_same_is_said(grpo_start, grpo_base, tmp_path):
    shutil.copytree(grpo_base, tmp_path / "base")
    (tmp_path / "r.py").write_text("def same(completions, **_):\n    return [1.0] * len(completions)\n")
    flags = ["--bucket", tmp_path, "--reward", f"{tmp_path}/r.py:same"]
    learner = grpo_start("--role", "learner", *flags, *"--steps 6 --groups-per-step 2 --group-size 2 --lora-r 2 --eval-steps -1".split())
    grpo_start("--role", "actor", *flags)
    assert "equal rewards" in learner.until("policy is not moving") and learner.done()["groups_equal"] == "12"

def test_a_model_is_found_where_hf_home_says(grpo_start, people_models, tmp_path):
    """A hub id and a cache folder laid out as huggingface_hub does, without any network."""
    at = tmp_path / "home/hub/models--org--tiny"
    shutil.copytree(people_models / "whole", at / "snapshots/abc")
    (at / "refs").mkdir()
    (at / "refs/main").write_text("abc")
    flags = ["--role", "learner", "--bucket", tmp_path / "b", "--model", "org/tiny", "--data", people_data(tmp_path), *"--max-tokens 7 --max-prompt-tokens 16 --eval-steps -1".split()]
    learner = grpo_start(*flags, by_command=True, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    learner.until("^ready role=learner")
