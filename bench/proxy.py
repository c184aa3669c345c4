"""What the proxy costs: throughput and latency beside no proxy and beside vllm-router; how fast and how free a sync is.

    python bench/proxy.py                                    # all of it, about 6 minutes
    python bench/proxy.py --only load --seconds 20 --rounds 3 --in-flight 384 1024
    python bench/proxy.py --only sync tokens

load    Three replicas answer each completion after exactly 1 s (a timer), so N requests in flight can at best be
        answered N times a second. Every contestant has the second core for itself; load client and replicas share
        the first, in one process that parses nothing it need not. Rounds alternate; after each start `--warm-up`
        seconds are left out. p99 is of reply time − 1 s; "added" is that minus the direct one's in the same run.
        vllm-router (PyPI) is installed into a virtual environment of its own under the temporary folder.
sync    An adapter is published to 8 replicas, one of them dead; each takes its own time to load it. Printed: how long
        after the end of its load each is asked for the new version (by the proxy's metrics, read every 10 ms).
tokens  Tokens per second of one real sampler (lora.Sampler, the default run's tiny base) under a full load through the
        proxy, in windows with a new version every 2 s and without any, alternating. The second line, per second of the
        sampler's CPU time, is the one to read on a machine that is not quiet.
"""
import argparse, asyncio, contextlib, json, os, shutil, socket, statistics, subprocess, sys, tempfile, threading, time
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bucket import open_bucket

CORES = sorted(os.sched_getaffinity(0))
ANSWER_S, PROMPT_TOKENS, G, LOGPROBS = 1.0, 100, 8, {f"token_id:{token}": -1.0 - token / 8 for token in range(20)}
CANARY = [{str(token): -1.0 - token / 8 for token in range(20)}]
COMPLETION = {"model": "tiny", "choices": [{"index": 0, "text": "x" * 64, "finish_reason": "length", "token_ids": list(range(32)),
              "logprobs": {"tokens": ["x"] * 32, "token_logprobs": [-1.234567] * 32, "top_logprobs": [LOGPROBS]}}]}

def packed(value) -> bytes:
    data = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data

# ---- Replicas and load, as cheap as they get ------------------------------------------------------------------------

class Peer(asyncio.Protocol):
    """One connection of either side; calls `on_message(self, head, body)` for each message with a Content-Length."""
    def __init__(self, on_message):
        self.on_message, self.buffer = on_message, b""

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            end += 4 + (int(head[at + 15:].split(b"\r\n", 1)[0]) if at >= 0 else 0)
            if len(self.buffer) < end:
                return
            body, self.buffer = self.buffer[len(head) + 4:end], self.buffer[end:]
            self.on_message(self, head, body)

class Replica:
    """vLLM-shaped enough for both routers: completions after ANSWER_S, loads after `load_s`."""
    def __init__(self, load_s: float = 0.0):
        self.load_s, self.adapters, self.loaded_at = load_s, [], {}
        self.completion = packed(COMPLETION)

    async def start(self) -> str:
        self.loop = asyncio.get_running_loop()
        self.server = await self.loop.create_server(lambda: Peer(self.answer), "127.0.0.1", 0, backlog=4096)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    def answer(self, peer: Peer, head: bytes, body: bytes) -> None:
        path, reply, wait_s = head.split(b" ", 2)[1].partition(b"?")[0], packed({}), 0.0
        if path == b"/v1/completions":
            is_canary = b'"max_tokens": 1,' in body
            reply, wait_s = self.completion, 0.0 if is_canary else ANSWER_S
        elif path == b"/v1/models":
            cards = [{"id": "tiny", "object": "model", "owned_by": "x", "max_model_len": 4096}]
            reply = packed({"object": "list", "data": cards + [{"id": name, "parent": "tiny"} for name in self.adapters]})
        elif path == b"/v1/load_lora_adapter":
            name, wait_s = json.loads(body)["lora_name"], self.load_s
            self.adapters.append(name)
            self.loop.call_later(wait_s, lambda: self.loaded_at.setdefault(name, time.monotonic()))
        elif path == b"/v1/unload_lora_adapter":
            self.adapters.remove(json.loads(body)["lora_name"])
        self.loop.call_later(wait_s, peer.transport.write, reply) if wait_s else peer.transport.write(reply)

def requests_for(model: str) -> list[bytes]:
    """512 prompts, each asked for G times, as bytes on the wire."""
    made = []
    for prompt in range(512):
        body = json.dumps({"model": model, "prompt": [(prompt * 31 + i * i) % 30000 for i in range(PROMPT_TOKENS)], "max_tokens": 32,
                           "temperature": 1.0, "logprobs": 0, "return_token_ids": True, "seed": prompt}).encode()
        made += [b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                 % len(body) + body] * G
    return made

async def load(urls: list[str], in_flight: int, warm_up_s: float, seconds: float) -> list[float]:
    """Reply times [s] of the requests answered in the measured time, `in_flight` connections each asking without pause."""
    loop, requests, times, next_at = asyncio.get_running_loop(), requests_for("tiny"), [], 0
    begin = time.monotonic() + warm_up_s
    def ask(peer: Peer) -> None:
        nonlocal next_at
        peer.asked_at = time.monotonic()
        peer.transport.write(requests[next_at % len(requests)])
        next_at += 1
    def answered(peer: Peer, head: bytes, body: bytes) -> None:
        assert head.startswith(b"http/1.1 200"), head + body
        now = time.monotonic()
        if begin <= now < begin + seconds:
            times.append(now - peer.asked_at)
        if now < begin + seconds:
            ask(peer)
    peers = []
    for number in range(in_flight):
        host, port = urls[number % len(urls)].removeprefix("http://").split(":")
        peers.append((await loop.create_connection(lambda: Peer(answered), host, int(port)))[1])
    for peer in peers:
        ask(peer)
    await asyncio.sleep(warm_up_s + seconds + 2 * ANSWER_S)
    for peer in peers:
        peer.transport.close()
    return times

@contextlib.contextmanager
def started(command: list[str], is_ready, core: int = -1):
    """A process on one core, once `is_ready(line of its stdout)`; yields it and that line. Ended at the end."""
    process = subprocess.Popen(["taskset", "-c", str(CORES[core]), *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = next((line for line in process.stdout if is_ready(line)), None)
        assert line, f"{command[:3]} ended with {process.wait()}"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield process, line
    finally:
        process.terminate()
        process.wait(10)

def proxy_started(*args: str):
    return started([sys.executable, "-u", str(ROOT / "proxy.py"), "--listen", "127.0.0.1:0", *args], lambda line: line.startswith("ready "))

def url_of(line: str) -> str:
    return line.split("url=")[1].strip()

def fetched(url: str) -> str:
    try:
        return urlopen(url, timeout=5).read().decode()
    except OSError:
        return ""

async def until(url: str, is_there, limit_s: float = 60.0) -> str:
    """The text at `url` once `is_there(text)`."""
    end = time.monotonic() + limit_s
    while not is_there(text := await asyncio.to_thread(fetched, url)):
        assert time.monotonic() < end, f"waited {limit_s} s for {url}"
        await asyncio.sleep(0.01)
    return text

def cpu_s(process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

def vllm_router() -> str | None:
    """Its command, from a virtual environment of its own; None, with the reason printed, where it cannot be had."""
    folder = Path(tempfile.gettempdir()) / "bench-vllm-router"
    command = folder / "bin" / "vllm-router"
    if not command.exists():
        for step in ([sys.executable, "-m", "venv", str(folder)], [str(folder / "bin" / "pip"), "install", "-q", "vllm-router==0.1.17"]):
            if (done := subprocess.run(step, capture_output=True, text=True)).returncode:
                print(f"vllm-router cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
                return None
    return str(command)

# ---- The three measurements -----------------------------------------------------------------------------------------

async def measure_load(args) -> None:
    replicas = [Replica() for _ in range(3)]
    urls = [await replica.start() for replica in replicas]
    with contextlib.ExitStack() as stack:
        proxy, line = stack.enter_context(proxy_started(*(arg for url in urls for arg in ("--replica", url))))
        contestants = {"direct": (urls, None), "proxy.py": ([url_of(line)], proxy)}
        await until(url_of(line) + "/metrics", lambda text: text.count("router_ready{") == text.count("} 1\n") == 3)
        if router := vllm_router():
            with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as metrics:
                port, metrics_port = free.getsockname()[1], metrics.getsockname()[1]
            process = subprocess.Popen(["taskset", "-c", str(CORES[-1]), router, "--worker-urls", *urls, "--port", str(port), "--policy", "cache_aware",
                                        "--prometheus-port", str(metrics_port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            contestants["vllm-router"] = [f"http://127.0.0.1:{port}"], process
            await until(f"http://127.0.0.1:{port}/v1/models", bool)
        print("in flight  contestant    answered/s  of direct  p50 ms  p99 ms  p99 added  CPU us/request")
        for in_flight in args.in_flight:
            seen = {name: [] for name in contestants}
            for _ in range(args.rounds):
                for name, (targets, process) in contestants.items():
                    before = cpu_s(process) if process else 0.0
                    times = sorted(await load(targets, in_flight, args.warm_up, args.seconds))
                    spent = (cpu_s(process) - before if process else 0.0) * args.seconds / (args.warm_up + args.seconds)
                    seen[name].append((len(times) / args.seconds, (times[len(times) // 2] - ANSWER_S) * 1e3,
                                       (times[len(times) * 99 // 100] - ANSWER_S) * 1e3, spent / len(times) * 1e6))
            middle = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in seen.items()}
            for name, (rate, p50, p99, spent) in middle.items():
                print(f"{in_flight:9}  {name:12} {rate:11.1f} {rate / middle['direct'][0]:9.1%} {p50:8.1f} {p99:7.1f} {p99 - middle['direct'][2]:10.1f}"
                      f" {spent:15.0f}", flush=True)

async def measure_sync(args) -> None:
    replicas = [Replica(load_s=0.2 + 0.1 * number) for number in range(7)]
    urls = [await replica.start() for replica in replicas]
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        bucket = open_bucket(folder)
        bucket.put_new("run.json", json.dumps({"run_id": "bench", "max_staleness": 4}).encode())
        def publish(version: int) -> float:
            canary = {"prompts": [[1, 2]] , "dtype": "float32", "adapter": CANARY, "base": CANARY}
            bucket.publish(f"adapters/v{version:06d}", {"adapter_model.safetensors": b"w", "adapter_config.json": b"{}"},
                           {"policy_version": version, "canary": canary})
            return time.monotonic()
        publish(0)
        with proxy_started("--bucket", folder, *(arg for url in [*urls, dead] for arg in ("--replica", url))) as (_, line):
            def served(text: str, version: int) -> set[str]:
                return {url for url in urls if f'router_serves{{replica="{url}",version="policy-v{version}"}}' in text}
            await until(url_of(line) + "/metrics", lambda text: len(served(text, 0)) == 7)
            print("sync to 8 replicas, one dead     published -> load asked   end of load -> in use (each of the seven)")
            for version in range(1, args.rounds + 1):
                ready_at, published_at = {}, publish(version)
                while len(ready_at) < 7:
                    text = await asyncio.to_thread(fetched, url_of(line) + "/metrics")
                    for url in served(text, version) - ready_at.keys():
                        ready_at[url] = time.monotonic()
                    await asyncio.sleep(0.01)
                loaded = [(replica.loaded_at[f"policy-v{version}"], replica.load_s) for replica in replicas]
                asked = max(at - load_s - published_at for at, load_s in loaded)
                after = " ".join(f"{(ready_at[url] - at) * 1e3:4.0f}" for url, (at, _) in zip(urls, loaded))
                print(f"  version {version:2}                {asked * 1e3:18.0f} ms        {after} ms", flush=True)

async def measure_tokens(args) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if args.base:
            shutil.copytree(args.base, Path(folder) / "base")
        script = [sys.executable, "-u", str(ROOT / "grpo_async.py"), "--bucket", folder]
        bucket = open_bucket(folder)
        with started([*script, "--role", "learner", "--steps", "1"], lambda line: "run.json" in bucket.list("run.json")):
            while "adapters/v000000/manifest.json" not in bucket.list("adapters/"):
                await asyncio.sleep(0.1)
        _, files = bucket.fetch("adapters/v000000")
        meta = json.loads(bucket.get("adapters/v000000/manifest.json"))
        run = json.loads(bucket.get("run.json"))
        process, line = stack.enter_context(started([*script, "--role", "sampler", "--listen", "127.0.0.1:0"], lambda line: line.startswith("ready "), core=0))
        sampler = url_of(line)
        url = url_of(stack.enter_context(proxy_started("--bucket", folder))[1])
        await until(url + "/health", lambda text: bool(fetched(url + "/v1/models")))
        body = {"model": "policy", "prompt": [1, 2, 3, 4, 5], "n": run["group_size"], "max_tokens": run["max_tokens"], "temperature": 1.0}
        loop, over = asyncio.get_running_loop(), False
        def ask(peer: Peer, head: bytes = b"", reply: bytes = b"") -> None:
            if not over:
                data = json.dumps({**body, "prompt": [1 + (id(peer) // 64 + len(reply)) % 9, 2, 3]}).encode()
                peer.transport.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        host, port = url.removeprefix("http://").split(":")
        for _ in range(16):
            ask((await loop.create_connection(lambda: Peer(ask), host, int(port)))[1])
        def tokens() -> int:
            text = fetched(sampler + "/metrics")
            return int(next(line.split()[1] for line in text.splitlines() if line.startswith("grpo:engine_tokens")))
        rates, version = {"without": [], "with": []}, 0
        await asyncio.sleep(args.warm_up)
        for _ in range(2 * args.rounds):
            for kind in rates:
                before, start, cpu_before = await asyncio.to_thread(tokens), time.monotonic(), cpu_s(process)
                while time.monotonic() < start + 10:
                    if kind == "with":
                        version += 1
                        bucket.publish(f"adapters/v{version:06d}", files, {k: v for k, v in meta.items() if k != "files"} | {"policy_version": version})
                    await asyncio.sleep(2)
                made = await asyncio.to_thread(tokens) - before
                rates[kind].append((made / (time.monotonic() - start), made / (cpu_s(process) - cpu_before)))
        over = True
        held = {card["id"] for card in json.loads(fetched(sampler + "/v1/models"))["data"]} - {"policy"}
        print(f"one sampler, {2 * args.rounds} windows of 10 s each, medians; {version} versions published, {len(held) - 1} held at the end")
        for unit, column in (("tokens per second", 0), ("tokens per second of its CPU time", 1)):
            quiet, syncing = (statistics.median(rate[column] for rate in rates[kind]) for kind in ("without", "with"))
            print(f"  {unit:34} {quiet:7.0f} without syncs, {syncing:7.0f} with one every 2 s: {syncing / quiet:.1%}", flush=True)

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["load", "sync", "tokens"], default=["load", "sync", "tokens"])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[384, 1024])
    parser.add_argument("--seconds", type=float, default=15.0, help="measured, per round and contestant")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds left out before")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--base", help="folder of a tiny base for `tokens` (default: trained on the spot)")
    args = parser.parse_args()
    print(f"{len(CORES)} cores, Python {sys.version.split()[0]}; {args.rounds} rounds of {args.seconds:g} s; medians over rounds", flush=True)
    os.sched_setaffinity(0, {CORES[0]})
    for name in args.only:
        asyncio.run({"load": measure_load, "sync": measure_sync, "tokens": measure_tokens}[name](args))

if __name__ == "__main__":
    main()
