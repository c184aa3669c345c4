"""Does asynchronous training cost only its slower half? The same steps both ways, on emulated machines.

    python bench/pipeline.py              # about eight minutes, little CPU until the last table
    chrt -f 5 python bench/pipeline.py timed     # as root, where other programs are busy

Learner and actor of grpo_async.py, each a process, one folder between them. Forward + backward is a timed wait of 4.8 s
for 16 groups, and a sampler a timed wait a group, as published [1]: 8 completions of 990 tokens on average end with the
longest, 4.1 ms a token; 48 groups in flight (as in run 5, where training is slower) or 16 (runs 3 and 4, where sampling
is). All times are halved. The bound is what the slower half takes alone: 16 groups of training, or of sampling with
every place taken. Promised: asynchronous steps within 5 % of it; the published system pays 25 % for its syncs.
Synchronous is the same code with --max-staleness 0, where samplers and learner take turns.

Then the tiny model for real, one core each: bound = the longer of the two turns of its synchronous run. Not promised, as
two cores are shared by more than two processes. Steps count from the fifth on. Exit 1 where a promise is missed.

[1] https://huggingface.co/blog/asyncgrpo-lora-hfjobs (September 2026)
"""
import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

from coordination import MEMORY, new_learner, timed_gradient

import grpo_async
import lora
from bucket import FileBucket

SCALE, TRAIN_S, DECODE_S, MEAN_TOKENS, MAX_TOKENS, SPREAD = 0.5, 4.8, 4.1e-3, 990, 3000, 0.6
GROUPS, WARM_STEPS, LIMIT = 16, 4, 1.05
ASYNC, SYNC = ["--max-staleness", "4", "--sync-steps", "2"], ["--max-staleness", "0"]


def group_times() -> list[float]:
    """Seconds of 16 groups, each as long as its longest completion of lognormal lengths with the published mean.

    The means of the sixteenths of a large sample, so that every 16 groups take the same time together."""
    draw, log_median = random.Random(0), math.log(MEAN_TOKENS) - SPREAD ** 2 / 2
    sample = sorted(min(MAX_TOKENS, max(draw.lognormvariate(log_median, SPREAD) for _ in range(8))) for _ in range(4000))
    times = [SCALE * DECODE_S * statistics.mean(sample[at:at + 250]) for at in range(0, 4000, 250)]
    draw.shuffle(times)
    return times


class TimedSampler:
    """What an Actor asks: the newest version in the bucket, and completions after their time."""

    def __init__(self, bucket):
        self.bucket, self.times, self.problem = bucket, itertools.cycle(group_times()), ""

    def version(self) -> int:
        return max(grpo_async.manifests(self.bucket, "adapters/"), default=-1)

    def sample(self, prompt_ids, n, version, seed, timeout_s) -> list:
        time.sleep(next(self.times))
        return [lora.Completion([7, 8, 1], [-1.0] * 3, "stop", None) for _ in range(n)]


def play(role: str, folder: str, places: int, flags: list[str]) -> None:
    """A learner or an actor in this process; places 0 is the tiny model for real."""
    bucket = FileBucket(folder)
    grpo_async.rescore = lambda *_: (0.0, 1)
    if role == "learner":
        if places:
            grpo_async.chunk_gradient = timed_gradient(SCALE * TRAIN_S / GROUPS)
        learner = new_learner(bucket, grpo_async.Learner, *flags)
        learner.start()
        learner.train()
        learner.member.stop()
    else:
        args = grpo_async.arguments(["--role", "actor", "--inflight", str(places * 8)])
        run = grpo_async.join_run(bucket, args)
        tokenizer = lora.load_tokenizer(grpo_async.base_of(bucket, run, args))
        task = grpo_async.load_task(bucket, run, args, tokenizer)
        task.rewards = [("half", 1.0, lambda completions, **_: [float(i % 2) for i in range(len(completions))])]
        grpo_async.Actor(bucket, run, args, task, TimedSampler(bucket)).work()


def measure(places: int, flags: list[str]) -> dict[str, float]:
    """Mean seconds of a step, and of these waiting for groups and for writes, of one run."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, contextlib.ExitStack() as stack:
        quiet = stack.enter_context(open(f"{folder}/.tmp-log", "w+"))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        me = [sys.executable, __file__, "--places", str(places), "--folder", folder, "--play"]
        real_actor = [sys.executable, grpo_async.__file__, "--role", "actor", "--bucket", folder]
        learner = subprocess.Popen([*me, "learner", "--flags", *flags], stdout=quiet, stderr=quiet, env=env)
        stack.callback(learner.kill)
        actor = subprocess.Popen([*me, "actor"] if places else real_actor, stdout=quiet, stderr=quiet, env=env)
        stack.callback(actor.kill)
        if learner.wait():
            raise SystemExit(f"the learner failed:\n{quiet.seek(0) or quiet.read()[-3000:]}")
        bucket = FileBucket(folder)
        entries = [json.loads(bucket.get(key)) for key in bucket.list("steps/")]
        first, last = entries[WARM_STEPS], entries[-1]
        rows = [entry["previous"] for entry in entries[WARM_STEPS + 1:]]
        return {"step_s": (last["unix_s"] - first["unix_s"]) / len(rows)} | {
            name: statistics.mean(row[name] for row in rows) for name in ("wait_s", "sync_s", "staleness_mean")}


def table(title: str, places: int, flags: list[str], bound: float | None) -> float:
    """Prints an asynchronous and a synchronous row; the asynchronous step as a multiple of the bound."""
    print(f"\n{title}\n\n| | s/step | of it waiting for groups | for writes | staleness |\n|---|---|---|---|---|")
    rows = {}
    for name, more in (("synchronous", SYNC), ("asynchronous", ASYNC)):
        rows[name] = row = measure(places, [*flags, *more])
        print(f"| {name} | {row['step_s']:.3f} | {row['wait_s']:.3f} | {row['sync_s']:.3f} "
              f"| {row['staleness_mean']:.2f} |", flush=True)
    turn = rows["synchronous"]
    bound = bound or max(turn["wait_s"], turn["step_s"] - turn["wait_s"])
    ratio = rows["asynchronous"]["step_s"] / bound
    print(f"| the slower half alone | {bound:.3f} | | | |\n\nasynchronous / the slower half = {ratio:.3f}; "
          f"synchronous / asynchronous = {turn['step_s'] / rows['asynchronous']['step_s']:.2f}", flush=True)
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", default=["timed", "real"], help="timed, real (default: both)")
    parser.add_argument("--steps", type=int, default=16, help="of a timed run")
    for name, kind in (("--play", str), ("--folder", str), ("--places", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        play(args.play, args.folder, args.places, args.flags)
        return 0
    ratios = []
    if "timed" in args.tables:
        flags = ["--steps", str(args.steps), "--groups-per-step", str(GROUPS), "--group-size", "8"]
        for places in (48, 16):
            generation_s = GROUPS * statistics.mean(group_times()) / places
            bound = max(SCALE * TRAIN_S, generation_s)
            ratios.append(table(f"Timed, {places} groups in flight: a step's training takes {SCALE * TRAIN_S:.2f} s, "
                                f"its generation {generation_s:.2f} s", places, flags, bound))
    if "real" in args.tables:
        table("Tiny model for real, 64 groups of 8 a step", 0, ["--steps", "40", "--lr", "0"], None)
    return 0 if max(ratios, default=0) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
