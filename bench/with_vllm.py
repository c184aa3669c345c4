"""Real vLLM behind the proxy; started by bench/with_vllm.sh.

Three runs of the default task, equal but for who samples (and how long):

    ours      two of our samplers: the reward to compare with
    folder    two vLLM servers read the file bucket; one is killed (SIGKILL) after a quarter of the steps and restarted
    mirror    two vLLM servers; the bucket is an S3 store (`bucket.py serve`); `bucket.py mirror` brings the adapters

A watcher reads the proxy's /metrics ten times a second: who is ready, and for which versions it passed the canary.
Exit 0 if every line of the table at the end says ok.
"""
import argparse
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import requests

import peers

SHORT_STEPS = 40
S3 = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_REGION": "us-east-1"}


class Watcher(threading.Thread):
    """What the proxy says of its replicas: `proven` {url: versions ever served}, `now` {url: versions, if ready},
    `returned` {url: (its versions, the others') when it last became ready}."""

    def __init__(self, proxy: str):
        super().__init__(daemon=True)
        self.proxy, self.proven, self.now, self.finished = proxy, {}, {}, threading.Event()
        self.returned: dict[str, tuple[set[int], set[int]]] = {}

    def run(self) -> None:
        while not self.finished.wait(0.1):
            try:
                text = requests.get(f"{self.proxy}/metrics", timeout=5).text
            except requests.RequestException:
                continue
            ready = {url for url, value in re.findall(r'grpo:router_ready\{replica="([^"]+)"\} (\d)', text) if value == "1"}
            serves = {url: set() for url in ready}
            for url, version in re.findall(r'grpo:router_serves\{replica="([^"]+)",version="policy-v(\d+)"\} 1', text):
                self.proven.setdefault(url, set()).add(int(version))
                if url in ready:
                    serves[url].add(int(version))
            for url in ready - self.now.keys():
                self.returned[url] = serves[url], set().union(*(v for u, v in serves.items() if u != url))
            self.now = serves


def train(name: str, args, folder: Path) -> dict:
    """One run; what it measured."""
    bucket, env, ports = folder / "runs" / name, {}, peers.free_ports(4)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    base, address, servers, proxy_flags = peers.tiny_base(bucket), str(bucket), ("replica-0", "replica-1"), []
    with peers.Processes(folder / name) as run:
        if name == "mirror":
            run.script("store", "bucket.py", "serve", folder / "runs", "--listen", f"127.0.0.1:{ports[3]}", **S3)
            address, env = f"{urls[3]}/{name}", S3
            run.script("mirror", "bucket.py", "mirror", address, folder / "mirrored", "--every-s", "0.2", **env)
            proxy_flags = ["--adapter-dir", folder / "mirrored"]
        run.script("learner", "grpo_async.py", "--role", "learner", "--bucket", address, "--eval-steps", "-1",
                   "--steps", args.steps if name == "folder" else SHORT_STEPS,
                   "--groups-per-step", args.groups, "--lr-schedule", "constant", **env)
        for server, url, port in zip(servers, urls, ports):
            if name == "ours":
                run.script(server, "grpo_async.py", "--role", "sampler", "--bucket", address,
                           "--listen", f"127.0.0.1:{port}")
            else:
                run.start(server, peers.vllm_command(base, port), **peers.VLLM_ENV)
                proxy_flags += ["--replica", url]
        for server in servers:
            run.wait(server, "ready role=sampler|Application startup complete", 300)
        run.script("proxy", "grpo_async.py", "--role", "proxy", "--bucket", address,
                   "--listen", f"127.0.0.1:{ports[2]}", *proxy_flags, **env)
        run.wait("proxy", "ready role=proxy", 60)
        watcher, began = Watcher(urls[2]), time.monotonic()
        watcher.start()
        run.script("actor", "grpo_async.py", "--role", "actor", "--bucket", address, "--sampler", urls[2], **env)
        fall = kill_and_restart(run, servers[0], urls[0], base, args.steps // 4) if name == "folder" else {}
        run.wait("learner", r"^summary .*", 900)
        wall_s = time.monotonic() - began
        run.wait("actor", r"^actor groups_written=.*", 30)
        watcher.finished.set()
        text, logs = run.log("learner"), {each: run.log(each) for each in ("actor", "proxy", servers[0])}
    summary = dict(word.split("=", 1) for word in re.search(r"^summary (.*)", text, re.M)[1].split())
    return {"name": name, "steps": peers.lines(text), "summary": summary, "wall_s": wall_s, "urls": urls[:2],
            "watcher": watcher, "logs": logs, **fall}


def kill_and_restart(run: peers.Processes, server: str, url: str, base: Path, step: int) -> dict:
    """SIGKILL to a vLLM after a step, and the same command again. The rest of the run must last longer than its start."""
    run.wait("learner", rf"^step={step} ", 600)
    run.kill(server)
    down = time.monotonic()
    run.wait("proxy", rf"{url}: \w+ -> out", 30)
    seen = len(run.log("proxy"))
    run.start(server, peers.vllm_command(base, int(url.rpartition(":")[2])), **peers.VLLM_ENV)
    run.wait("proxy", rf"{url}: loading -> ready", 300, seen)
    return {"killed_at": step, "restart_s": time.monotonic() - down, "asked_before": completions(run.log(server))}


def completions(log: str) -> int:
    """Requests in a vLLM's log, canaries included."""
    return log.count('"POST /v1/completions')


def checks(result: dict, ours: dict | None) -> list[tuple[str, bool, str]]:
    """(claim, does it hold, what was measured) of one run."""
    name, steps, summary, watcher = result["name"], result["steps"], result["summary"], result["watcher"]
    rewards = [float(s["reward"]) for s in steps]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
    mismatch = max(float(s["mismatch"]) for s in steps)
    found = [(f"{name}: reward rises by at least 0.3", last - first >= 0.3,
              f"{first:.3f} -> {last:.3f} in {len(steps)} steps, {result['wall_s']:.0f} s")]
    if ours:
        a, b = (sum(float(s["reward"]) for s in each["steps"][SHORT_STEPS - 5:SHORT_STEPS]) / 5 for each in (result, ours))
        found.append((f"{name}: reward of steps {SHORT_STEPS - 4} to {SHORT_STEPS} within 0.05 of our samplers'",
                      abs(a - b) <= 0.05, f"{a:.3f} and {b:.3f}"))
    found.append((f"{name}: mismatch at most 2e-3", mismatch <= 2e-3, f"{mismatch:.2g} nats a token at most"))
    written, *kinds = (int(float(summary[f"groups_{key}"])) for key in ("written", "trained", "equal", "dropped", "pending"))
    left_out = re.search(r"rollouts_left_out=(\d+)", result["logs"]["actor"])[1]
    found.append((f"{name}: every group is accounted for, no rollout is lost", written == sum(kinds) and left_out == "0",
                  "{} groups: {} trained, {} equal, {} dropped, {} pending; {} rollouts left out".format(written, *kinds, left_out)))
    if name == "ours":
        return found
    refused = re.findall(r"does not serve .*canary.*", result["logs"]["proxy"])
    found.append((f"{name}: the canary refused nothing", not refused, "; ".join(refused[:2])))
    versions = set(range(len(steps)))  # the last one is published when nobody asks any more
    missed = {url: sorted(versions - watcher.proven.get(url, set())) for url in result["urls"]}
    away = set(range(result["killed_at"], len(steps))) if "killed_at" in result else set()
    is_right = not missed[result["urls"][1]] and set(missed[result["urls"][0]]) <= away
    found.append((f"{name}: every version passed the canary on both replicas", is_right, "; ".join(
        f"{len(versions) - len(m)} of {len(versions)}" + (f" ({min(m)} to {max(m)} came and went while it was away)" if m else "")
        for m in missed.values())))
    if "killed_at" in result:
        its, others = watcher.returned[result["urls"][0]]
        found.append((f"{name}: killed at step {result['killed_at']}, back with all live versions before traffic",
                      bool(its) and its >= others,
                      f"away {result['restart_s']:.0f} s; had {sorted(its)}, the other one {sorted(others)}"))
        canaries = 8 * (len(steps) - max(others))
        asked = completions(result["logs"]["replica-0"]) - result["asked_before"] - canaries
        found.append((f"{name}: it takes part again", asked > 0, f"{asked} requests, {canaries} canaries aside"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of the run in which one is killed; the others make 40")
    parser.add_argument("--groups", type=int, default=64, help="groups of 8 rollouts per step")
    parser.add_argument("--passes", nargs="+", choices=("ours", "folder", "mirror"), default=["ours", "folder", "mirror"])
    parser.add_argument("--keep", type=Path, help="folder for buckets and logs (default: a temporary one)")
    args = parser.parse_args()
    found, ours = [], None
    with tempfile.TemporaryDirectory() as temp:
        for name in args.passes:
            result = train(name, args, (args.keep or Path(temp)).resolve())
            rewards = [float(s["reward"]) for s in result["steps"]]
            print(f"{name}: reward by step {' '.join(f'{x:.2f}' for x in rewards)}", flush=True)
            wall_s = result["wall_s"]
            print(f"{name}: {wall_s:.0f} s from the actor's start, {wall_s / len(rewards):.1f} s a step", flush=True)
            found += checks(result, ours)
            ours = result if name == "ours" else ours
    return peers.verdict(found)


if __name__ == "__main__":
    sys.exit(main())
