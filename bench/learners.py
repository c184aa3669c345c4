"""Do more learners pay? One, two, four and eight on the same steps, cut into chunks of one group.

    python bench/learners.py                 # about six minutes, little CPU until the last table
    python bench/learners.py timed --group-s 0.5 --counts 1 4
    chrt -f 5 python bench/learners.py timed     # as root, where other programs are busy

First each group's forward and backward is a timed wait: same code, same folder as bucket, a process for each learner, so
what is measured is what sharing a step costs. Promised: at least 3.6 times one learner's speed with four, 6.5 with
eight. Then real compute of the tiny model, one thread a learner: two on two cores must not be slower than one. All runs
train the same groups in the same chunks, so all must end in the same digest. Exit 1 where anything is missed.
"""
import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from coordination import MEMORY, Feeder, new_learner, timed_gradient

import grpo_async
from bucket import FileBucket

PROMISED = {4: 3.6, 8: 6.5}
WARM_STEPS = 2   # the first steps, in which the learners find each other, do not count


def flags(groups: int, group_size: int, steps: int) -> list[str]:
    return ["--groups-per-step", str(groups), "--chunks", str(groups), "--group-size", str(group_size),
            "--steps", str(steps)]


def learn(folder: str, group_s: float, run_flags: list[str]) -> None:
    """One learner, in a process of its own; 0 seconds a group is real compute."""
    grpo_async.rescore = lambda *_: (0.0, 1)
    if group_s:
        grpo_async.chunk_gradient = timed_gradient(group_s)
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        learner = new_learner(FileBucket(folder), grpo_async.Learner, *run_flags)
        learner.start()
        learner.train()
        learner.member.stop()


def measure(count: int, group_s: float, run_flags: list[str]) -> tuple[float, str]:
    """(median seconds between entries, digest before the last one) of `count` learners on a fresh run."""
    fork = multiprocessing.get_context("fork")   # torch is imported once, not eight times on two cores
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        bucket = FileBucket(folder)
        # Subtle: a process of its own trains the base, as autograd cannot be used on both sides of a fork.
        maker = fork.Process(target=new_learner, args=(bucket, grpo_async.Learner, *run_flags))
        maker.start()
        maker.join()
        learners = [fork.Process(target=learn, args=(folder, group_s, run_flags), daemon=True) for _ in range(count)]
        for process in learners:
            process.start()
        while len(list(bucket.list("members/learner-"))) < count:   # all at work before there is any
            time.sleep(0.1)
        feeder = Feeder(Path(folder), json.loads(bucket.get("run.json")))
        feeder.start()
        for process in learners:
            process.join()
            if process.exitcode:
                raise SystemExit("a learner failed; see above")
        feeder.finished.set()
        feeder.join()
        entries = [json.loads(bucket.get(key)) for key in bucket.list("steps/")][WARM_STEPS:]
        times = [b["unix_s"] - a["unix_s"] for a, b in itertools.pairwise(entries)]
        return statistics.median(times), entries[-1]["digest_before"]


def table(title: str, counts: list[int], promised: dict[int, float], group_s: float, run_flags: list[str]) -> bool:
    """Prints a row per number of learners; True when all promises hold."""
    print(f"\n{title}\n\n| learners | s/step | times one learner | promised | digest |\n|---|---|---|---|---|")
    first, digests, is_kept = None, set(), True
    for count in counts:
        step_s, digest = measure(count, group_s, run_flags)
        first = first or step_s
        digests.add(digest)
        is_kept &= first / step_s >= promised.get(count, 0)
        print(f"| {count} | {step_s:.3f} | {first / step_s:.2f} | {promised.get(count, '-')} | {digest[:12]} |",
              flush=True)
    return is_kept and len(digests) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", default=["timed", "real"], help="timed, real (default: both)")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--group-s", type=float, default=1.0, help="timed wait of a group's forward and backward")
    parser.add_argument("--groups", type=int, default=16, help="groups, and chunks, per step")
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    is_kept = True
    if "timed" in args.tables:
        is_kept &= table(f"Timed waits: {args.groups} groups of {args.group_s:g} s a step", args.counts, PROMISED,
                         args.group_s, flags(args.groups, 8, args.steps))
    if "real" in args.tables:
        is_kept &= table("Real compute: tiny model, 16 groups of 128, one thread a learner", [1, 2], {2: 1.0},
                         0.0, flags(16, 128, 20))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
