"""What a far bucket costs a learner: 50 ms added to every call, steps of one second of compute, groups always ready.

    python bench/coordination.py                       # 226 steps, about five minutes, little CPU
    python bench/coordination.py --delay-ms 200 --steps 80
    chrt -f 5 python bench/coordination.py             # as root, where other programs are busy: a wait must end on time

`python bucket.py serve` serves a temporary folder; the learner of grpo_async.py talks to it through a bucket that waits
before each call. Its compute is replaced by a timed wait with a gradient of the right shapes. Coordination is all of a
step but that wait and apply(): at most 5 % of a step is promised. So is that the calls of a step stay the same however
long the run: counted over one checkpoint period early and one late. Exit 1 if either is missed.

Small timed pieces for the other benches are here too: `serve`, `new_learner`, `Feeder`, `timed_gradient`.
"""
import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import grpo_async  # noqa: E402
from bucket import FileBucket, S3Bucket, open_bucket  # noqa: E402

torch.set_num_threads(1)
grpo_async.TINY_STEPS = 40   # a base that cannot add will do here
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None   # for the folder: its disk is not what is measured
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret"}
PERIOD = 25                  # steps between checkpoints, and of each window


@contextlib.contextmanager
def serve(folder: str):
    """`python bucket.py serve FOLDER` on a free port; gives its URL."""
    os.environ.update(KEYS)
    command = [sys.executable, "-u", str(ROOT / "bucket.py"), "serve", folder, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process.stdout.readline().split("url=")[1].strip()
    finally:
        process.terminate()
        process.wait(10)


def new_learner(bucket, kind, *flags: str):
    """A learner of class `kind` on a bucket, which it makes a run of the tiny model if it is empty."""
    args = grpo_async.arguments(["--role", "learner", "--eval-steps", "-1", "--checkpoint-steps", str(PERIOD), *flags])
    run = grpo_async.join_run(bucket, args)
    policy = grpo_async.load_policy(bucket, run, args, slots=2)
    return kind(bucket, run, args, policy, grpo_async.load_task(bucket, run, args, policy.tokenizer))


def timed_gradient(group_s: float):
    """grpo_async.chunk_gradient with a wait of `group_s` seconds a group in place of forward and backward."""
    def wait(policy, groups, update, budget):
        time.sleep(group_s * len(groups))
        draw, rewards = torch.Generator().manual_seed(len(groups)), [x for g in groups for x in g.rewards]
        tokens = sum(n for g in groups for n in g.trained_tokens(update))
        sums = dict.fromkeys(("loss", "kl", "entropy", "clipped", "truncated"), 0.0)
        sums |= dict.fromkeys(("count", "ratio", "trained_tokens", "completion_tokens"), tokens)
        sums |= {"rollouts": len(rewards), "reward": sum(rewards)}
        return {name: torch.randn(shape, generator=draw) for name, shape in policy.lora.shapes.items()}, sums
    return wait


class Feeder(threading.Thread):
    """Writes a step's worth of groups whenever an entry appears, so that two more steps' worth always wait."""

    def __init__(self, folder: Path, run: dict, ahead: int = 2):
        super().__init__(daemon=True)
        self.bucket, self.run_json, self.ahead, self.written = FileBucket(folder), run, ahead, 0
        self.finished = threading.Event()

    def run(self) -> None:
        log, fed = grpo_async.Log(self.bucket, self.run_json), -self.ahead
        while not grpo_async.manifests(self.bucket, "adapters/"):
            time.sleep(0.02)
        while not self.finished.wait(0.02):
            for step in range(fed, log.refresh()):
                self.write(max(0, step))
            fed = max(fed, log.newest)

    def write(self, version: int) -> None:
        run, G = self.run_json, self.run_json["group_size"]
        for _ in range(run["groups_per_step"]):
            self.written += 1
            group = grpo_async.Group(
                prompt_id=0, prompt_ids=[7, 8, 3, 9, 7, 5], completion_ids=[[9, 8, 1, 4, 3, 2, 1]] * G,
                sampler_logprobs=[[-1.0] * 7] * G, rewards=[float(i % 2) for i in range(G)],
                versions=[version] * G, truncated=[False] * G, adapter_sha256={f"policy-v{version}": ""})
            key = f"groups/{version:06d}-feeder-{self.written:06d}.safetensors"
            self.bucket.put_new(key, grpo_async.write_group(group, run))


class Far(S3Bucket):
    """A bucket whose calls take longer and are counted: (kind, does the learner's own thread wait, seconds)."""
    delay_s, calls = 0.0, []

    def _call(self, method, key="", query={}, headers={}, data=b"", accept=()):
        began, where = time.monotonic(), key or query["prefix"].removeprefix(self.prefix)
        time.sleep(self.delay_s)
        try:
            return super()._call(method, key, query, headers, data, accept)
        finally:
            is_waiting, kind = threading.current_thread() is threading.main_thread(), "LIST" if query else method
            self.calls.append((f"{kind} {where.split('/')[0]}/", is_waiting, time.monotonic() - began))


class Watched(grpo_async.Learner):
    """Keeps of every step its seconds by phase, and the calls made meanwhile."""

    def step(self) -> None:
        first, began = len(self.bucket.calls), time.monotonic()
        self.spent = Counter()
        super().step()
        clock = self.clock | {"gradient": self.spent["chunk_gradient"], "apply": self.spent["apply"]}
        self.seen[self.state.step] = clock | {"step": time.monotonic() - began}, self.bucket.calls[first:]


def timed(learner: Watched, name: str) -> None:
    """Counts the seconds in a function of grpo_async into learner.spent."""
    function = getattr(grpo_async, name)

    def call(*args):
        began = time.monotonic()
        try:
            return function(*args)
        finally:
            learner.spent[name] += time.monotonic() - began
    setattr(grpo_async, name, call)


def print_phases(steps: list[dict]) -> float:
    """Where a step goes, medians; returns the median share that is coordination."""
    phases = {"gradient (timed wait)": lambda c: c["gradient"],
              "apply: fold, clip, AdamW": lambda c: c["apply"],
              "until the entry is there": lambda c: c["wait_s"],
              "groups and packing of a part": lambda c: c["fwd_bwd_s"] - c["gradient"],
              "digest, adapter to the model": lambda c: c["apply_s"] - c["apply"],
              "waiting for writes, publishing": lambda c: c["sync_s"],
              "the rest": lambda c: c["step"] - c["wait_s"] - c["fwd_bwd_s"] - c["apply_s"] - c["sync_s"],
              "a step": lambda c: c["step"]}
    print("| of a step | median ms | longest ms |\n|---|---|---|")
    for name, of in phases.items():
        values = [1e3 * of(clock) for clock in steps]
        print(f"| {name} | {statistics.median(values):.1f} | {max(values):.1f} |")
    return statistics.median(1 - (c["gradient"] + c["apply"]) / c["step"] for c in steps)


def print_calls(windows: list[list[list]]) -> bool:
    """Calls per step by kind in an early and in a late window; True unless the late one has a tenth more."""
    kinds = sorted({kind for window in windows for calls in window for kind, _, _ in calls})
    print("\n| calls a step | early | late | the learner waits, ms a step |\n|---|---|---|---|")
    totals = [0.0, 0.0]
    for kind in kinds:
        counts = [sum(k == kind for calls in window for k, _, _ in calls) / len(window) for window in windows]
        waits = sum(s for calls in windows[1] for k, is_own, s in calls if k == kind and is_own) / len(windows[1])
        totals = [a + b for a, b in zip(totals, counts)]
        print(f"| {kind} | {counts[0]:.2f} | {counts[1]:.2f} | {waits * 1e3:.1f} |")
    print(f"| all | {totals[0]:.2f} | {totals[1]:.2f} | |")
    return totals[1] <= 1.1 * totals[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--delay-ms", type=float, default=50.0, help="added to each call")
    parser.add_argument("--step-s", type=float, default=1.0, help="compute of a step")
    parser.add_argument("--groups", type=int, default=8, help="groups per step")
    parser.add_argument("--steps", type=int, default=226)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, serve(folder) as url:
        os.makedirs(f"{folder}/run")
        bucket = open_bucket(f"{url}/run")
        bucket.__class__ = Far
        learner = new_learner(bucket, Watched, "--steps", str(args.steps), "--groups-per-step", str(args.groups))
        learner.seen, learner.spent = {}, Counter()
        feeder = Feeder(Path(folder) / "run", learner.run)
        feeder.start()
        grpo_async.chunk_gradient = timed_gradient(args.step_s / args.groups)
        grpo_async.rescore = lambda *_: (0.0, 1)   # the groups are made up: nothing to score again
        timed(learner, "chunk_gradient")
        timed(learner, "apply")
        Far.delay_s = args.delay_ms / 1e3
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            learner.start()
            learner.train()
        learner.member.stop()
        feeder.finished.set()
        feeder.join()
    windows = [range(first, first + PERIOD) for first in (2 * PERIOD + 1, args.steps - PERIOD)]
    early, late = ([learner.seen[step] for step in window] for window in windows)
    print(f"{args.steps} steps of {args.step_s:g} s, {args.delay_ms:g} ms a call; early is steps "
          f"{' and late '.join(f'{window[0]} to {window[-1]}' for window in windows)}\n")
    share = print_phases([clock for clock, _ in late])
    is_flat = print_calls([[calls for _, calls in window] for window in (early, late)])
    print(f"\ncoordination: {share:.1%} of a step (promised: at most 5 %); calls a step "
          f"{'the same' if is_flat else 'GROW'}")
    return 0 if share <= 0.05 and is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
