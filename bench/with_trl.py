"""TRL's AsyncGRPOTrainer in front: a foreign trainer drives two of our samplers through the proxy.

    python bench/with_trl.py            # 4 minutes on two cores, after TRL's environment is made (1.5 GB, once)

TRL runs in an environment of its own (bench/peers.py, bench/trl_client.py) and takes the proxy for a vLLM server. Four
things are looked at, one after the other, against the same two samplers:

    train     10 steps with a sync at each: the adapter alone is sent; ratio: the samplers serve what TRL trained
    resume    from the checkpoint of step 5; the samplers still hold the adapters of steps 6 to 10, under the same names
    kill      a fresh client is killed (SIGKILL) between /pause and /resume: nobody may stay paused
    again     a new run, counting its versions from 1 again, trains 10 steps, though the samplers' slots are full

Exit 0 if every line of the table at the end says ok.
"""
import json
import sys
import tempfile
import time
from pathlib import Path

import requests

import peers

PAUSE_LIMIT_S = 5
STEPS, SAVED = 10, 5


def client(run: peers.Processes, name: str, url: str, bucket: Path, *flags) -> list[dict]:
    """Runs TRL to its end; the JSON objects that it printed."""
    # The samplers read adapters only from inside their bucket's folder.
    run.start(name, [peers.environment("trl"), "bench/trl_client.py", "--server", url, "--model", bucket / "base",
                     "--out", bucket / "trl" / name.split("-")[0], "--steps", STEPS, "--save-steps", SAVED,
                     "--lr", "5e-5", *flags])
    run.running[name].wait(300)
    return [json.loads(line) for line in run.log(name).splitlines() if line.startswith("{\"")]


def is_paused(url: str) -> bool:
    return requests.get(f"{url}/is_paused", timeout=5).json()["is_paused"]


def judge(name: str, said: list[dict], first: int) -> list[tuple[str, bool, str]]:
    """The checks of a training: adapters only, a sync at each step, the ratios."""
    steps = [row for row in said if "ratio" in row]
    off = [abs(row["ratio"] - 1) for row in steps] or [float("nan")]
    syncs = [row["perf/weight_sync_s"] for row in steps]
    is_whole = [row["step"] for row in steps] == list(range(first, STEPS + 1))
    return [
        (f"{name}: TRL chose to sync the adapter alone", said[0] == {"adapter_only_sync": True}, str(said[0])),
        (f"{name}: steps {first} to {STEPS}, a sync at each", is_whole,
         f"{len(steps)} steps, sync {sorted(syncs)[len(syncs) // 2]:.2f} s (median)" if syncs else "none"),
        (f"{name}: ratio within 1e-4 of 1 on the first step, 1e-2 after", off[0] <= 1e-4 and max(off) <= 1e-2,
         f"{off[0]:.1g}, {max(off):.2g}")]


def main() -> int:
    found = []
    with tempfile.TemporaryDirectory() as temp, peers.Processes(Path(temp) / "logs") as run:
        bucket, ports = Path(temp) / "run", peers.free_ports(3)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        peers.tiny_base(bucket)
        # Samplers want a run; a learner makes one, and is not needed after that.
        run.script("learner", "grpo_async.py", "--role", "learner", "--bucket", bucket, "--steps", 1,
                   "--eval-steps", "-1")
        run.wait("learner", "ready role=learner", 120)
        run.kill("learner")
        for name, port in zip(("sampler-0", "sampler-1"), ports):
            run.script(name, "grpo_async.py", "--role", "sampler", "--bucket", bucket,
                       "--listen", f"127.0.0.1:{port}")
        for name in ("sampler-0", "sampler-1"):
            run.wait(name, "ready role=sampler", 120)
        run.script("proxy", "proxy.py", "--replica", urls[0], "--replica", urls[1], "--adapter-dir", bucket / "trl",
                   "--listen", f"127.0.0.1:{ports[2]}", "--pause-limit-s", PAUSE_LIMIT_S)
        run.wait("proxy", "ready role=proxy", 60)

        found += judge("train", client(run, "train", urls[2], bucket), 1)
        checkpoint = bucket / "trl" / "train" / f"checkpoint-{SAVED}"
        found += judge("resume", client(run, "train-resume", urls[2], bucket, "--resume", checkpoint), SAVED + 1)

        client(run, "kill", urls[2], bucket, "--die-in-pause", 3)
        died = time.monotonic()
        was_paused = [is_paused(url) for url in urls]
        while any(map(is_paused, urls)) and time.monotonic() < died + 3 * PAUSE_LIMIT_S:
            time.sleep(0.1)
        paused_s, now = time.monotonic() - died, [is_paused(url) for url in urls]
        run.kill("kill")  # its rollout worker is an orphan that would go on asking
        found.append(("kill: paused when the client died, nobody is a little later", all(was_paused) and not any(now),
                      f"{was_paused} -> {now} after {paused_s:.1f} s (the limit is {PAUSE_LIMIT_S} s)"))
        found += judge("again", client(run, "again", urls[2], bucket), 1)
        if not all(holds for _, holds, _ in found):
            for name in ("train", "train-resume", "kill", "again", "proxy"):
                print(f"--- end of {name}.log\n{run.log(name)[-2500:]}")
    return peers.verdict(found)


if __name__ == "__main__":
    sys.exit(main())
