"""Do more learners pay? One, two, four and eight on the same steps, cut into chunks of one group.

    python bench/learners.py                 # about six minutes, little CPU until the last table
    python bench/learners.py timed --group-s 0.5 --counts 1 4
    chrt -f 5 python bench/learners.py timed     # as root, where other programs are busy

First each group's forward and backward is a timed wait: same code, same folder as bucket, a process for each learner, so
what is measured is what sharing a step costs. Promised: at least 3.6 times one learner's speed with four, 6.5 with
eight. Then learners come and go in a run of 30 steps: one joins, one is killed, one is five times slower. Then real
compute of the tiny model, one thread a learner: two on two cores must not be slower than one. All runs train the same
groups in the same chunks, so all must end in the same digest. Exit 1 where anything is missed.
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


FORK = multiprocessing.get_context("fork")   # torch is imported once, not eight times on two cores


def members(bucket) -> set[str]:
    return set(bucket.list("members/learner-"))


def wait_for(condition) -> float:
    """The time when it came true; a folder has no events."""
    while not condition():
        time.sleep(0.01)
    return time.time()


@contextlib.contextmanager
def running(group_times_s: list[float], run_flags: list[str]):
    """(bucket, start, processes) of a fresh run on which a learner for each of the times has started."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        bucket, processes = FileBucket(folder), []
        # Subtle: a process of its own trains the base, as autograd cannot be used on both sides of a fork.
        maker = FORK.Process(target=new_learner, args=(bucket, grpo_async.Learner, *run_flags))
        maker.start()
        maker.join()

        def start(group_s: float) -> str:
            """Starts one; the key of its heartbeat, which is there when it has loaded its model."""
            before = members(bucket)
            processes.append(FORK.Process(target=learn, args=(folder, group_s, run_flags), daemon=True))
            processes[-1].start()
            wait_for(lambda: members(bucket) - before)
            return (members(bucket) - before).pop()
        for group_s in group_times_s:   # all at work before there is any
            start(group_s)
        feeder = Feeder(Path(folder), json.loads(bucket.get("run.json")))
        feeder.start()
        yield bucket, start, processes
        for process in processes:
            process.join()
            if process.exitcode not in (0, -9):
                raise SystemExit("a learner failed; see above")
        feeder.finished.set()
        feeder.join()


def step_times(bucket) -> list[float]:
    """Seconds between the entries of a run, in order."""
    times = [json.loads(bucket.get(key))["unix_s"] for key in bucket.list("steps/")]
    return [b - a for a, b in itertools.pairwise(times)]


def measure(group_times_s: list[float], run_flags: list[str], warm_steps: int = WARM_STEPS) -> tuple[float, str]:
    """(median seconds between entries, digest before the last one) of these learners on a fresh run."""
    with running(group_times_s, run_flags) as (bucket, _, processes):
        for process in processes:
            process.join()
        last = json.loads(bucket.get(list(bucket.list("steps/"))[-1]))
        return statistics.median(step_times(bucket)[warm_steps:]), last["digest_before"]


def come_and_go(group_s: float) -> bool:
    """Prints what a learner that joins, one that is killed and one five times slower do to a run of 30 steps."""
    groups, run_flags = 12, flags(12, 8, 30)
    print(f"\nLearners that come and go: {groups} groups of {group_s:g} s a step, 30 steps\n")
    with running([group_s] * 2, run_flags) as (bucket, start, processes):
        steps = lambda: list(bucket.list("steps/"))   # noqa: E731
        wait_for(lambda: len(steps()) >= 10)
        joiner = start(group_s)
        began, joiner = time.time(), joiner.split("-", 1)[1].removesuffix(".json")
        parts = lambda: [k for k in bucket.list("parts/") if k > f"parts/{len(steps()) - 1:06d}"]   # noqa: E731
        joined_s = wait_for(lambda: any(
            grpo_async.read_header(bucket.get(k))["written_by"] == joiner for k in parts())) - began
        wait_for(lambda: len(steps()) >= 20)
        processes[0].kill()
        killed_at = len(steps())
        for process in processes:
            process.join()
        times = step_times(bucket)
    two_s, three_s = statistics.median(times[2:9]), statistics.median(times[14:19])
    lost_s, slow_s = max(times[killed_at - 1:killed_at + 2]), measure([group_s, group_s, 5 * group_s], run_flags, 10)[0]
    rows = (("two learners, a step", two_s, 0), ("a third, from its start to its first part", joined_s, two_s + 2 * group_s),
            ("three learners, a step", three_s, 0), ("the step in which one is killed", lost_s, 2 * three_s + group_s + 15),
            ("two and one five times slower, a step", slow_s, 1.15 * two_s))
    print("| what | s | at most |\n|---|---|---|")
    for what, got_s, limit_s in rows:
        print(f"| {what} | {got_s:.2f} | {f'{limit_s:.2f}' if limit_s else '-'} |", flush=True)
    return all(got_s <= limit_s for _, got_s, limit_s in rows if limit_s)


def table(title: str, counts: list[int], promised: dict[int, float], group_s: float, run_flags: list[str]) -> bool:
    """Prints a row per number of learners; True when all promises hold."""
    print(f"\n{title}\n\n| learners | s/step | times one learner | promised | digest |\n|---|---|---|---|---|")
    first, digests, is_kept = None, set(), True
    for count in counts:
        step_s, digest = measure([group_s] * count, run_flags)
        first = first or step_s
        digests.add(digest)
        is_kept &= first / step_s >= promised.get(count, 0)
        print(f"| {count} | {step_s:.3f} | {first / step_s:.2f} | {promised.get(count, '-')} | {digest[:12]} |",
              flush=True)
    return is_kept and len(digests) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", default=["timed", "change", "real"], help="timed, change, real (default: all)")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--group-s", type=float, default=1.0, help="timed wait of a group's forward and backward")
    parser.add_argument("--groups", type=int, default=16, help="groups, and chunks, per step")
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    is_kept = True
    if "timed" in args.tables:
        is_kept &= table(f"Timed waits: {args.groups} groups of {args.group_s:g} s a step", args.counts, PROMISED,
                         args.group_s, flags(args.groups, 8, args.steps))
    if "change" in args.tables:
        is_kept &= come_and_go(args.group_s / 4)
    if "real" in args.tables:
        is_kept &= table("Real compute: tiny model, 16 groups of 128, one thread a learner", [1, 2], {2: 1.0},
                         0.0, flags(16, 128, 20))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
