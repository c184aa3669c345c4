"""Does anything grow in a long run? 5,000 steps of the tiny model in small groups, each process watched from outside.

    python bench/growth.py                       # about 15 minutes on two quiet cores
    python bench/growth.py --steps 1000 --bucket /tmp/growth --rows rows.jsonl

A learner, a proxy, a sampler and an actor, each a process of its own as in a real run. Every two seconds: resident
memory and CPU seconds of each, objects in the bucket by prefix, and how long a listing takes. The learning rate is 0, so
that the policy, and with it the work of a step, is the same at the end as at the start. Prints the median over the first
tenth of the steps, over the last tenth, and their ratio; exit 1 where one is above 1.15.

steps/ may grow, as its entries are never deleted; so may its listing, in a folder (0.8 ms per 1,000 entries; a store
starts behind the newest). The proxy remembers up to 8,192 prompt blocks, 2 MB. Wall clock needs a quiet machine; CPU
time, shown and not judged, less so.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bucket import FileBucket  # noqa: E402

RUN = ["--groups-per-step", "4", "--group-size", "4", "--lr", "0", "--eval-steps", "-1"]
ANY_PORT = ["--listen", "127.0.0.1:0"]
ROLES = {"learner": RUN, "proxy": ANY_PORT, "sampler": ANY_PORT, "actor": ["--sampler", "bucket"]}
MAY_GROW, LIMIT, PERIOD_S = {"objects in steps/", "listing of steps/, ms"}, 1.15, 2.0


def start(role: str, flags: list[str], folder: str) -> subprocess.Popen:
    """A role of grpo_async.py as a process; what it prints goes to FOLDER/.tmp-ROLE.log, which is no object of the bucket."""
    out = open(Path(folder) / f".tmp-{role}.log", "w")
    command = [sys.executable, "-u", str(ROOT / "grpo_async.py"), "--role", role, "--bucket", folder, *flags]
    return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})


def use_of(pid: int) -> tuple[float, float]:
    """(resident MB, CPU seconds so far) of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


def listing_ms(bucket: FileBucket, prefix: str, start_after: str) -> float:
    """Median of five listings, milliseconds."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        list(bucket.list(prefix, start_after))
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def look(bucket: FileBucket, processes: dict) -> dict:
    """One row: {"step", "values": {measure: number}}."""
    keys = list(bucket.list(""))
    step = max((int(key[6:12]) for key in keys if key.startswith("steps/")), default=0)
    folders = Counter(key.split("/")[0] for key in keys if "/" in key)
    values = {f"objects in {name}/": n for name, n in folders.items()}
    for role, process in processes.items():
        values[f"memory of the {role}, MB"], values[f"CPU of the {role}, s"] = use_of(process.pid)
    for prefix, after in (("groups/", ""), ("parts/", ""), ("adapters/", ""), ("steps/", f"steps/{step:06d}.json")):
        values[f"listing of {prefix}, ms"] = listing_ms(bucket, prefix, after)
    return {"step": step, "values": values}


def watch(bucket: FileBucket, steps: int, save) -> None:
    """Runs the roles until the learner is done; `save` gets a row every PERIOD_S."""
    processes = {role: start(role, flags + (["--steps", str(steps)] if role == "learner" else []), bucket.address)
                 for role, flags in ROLES.items()}
    try:
        while (row := look(bucket, processes))["step"] < steps:
            if row["step"]:
                save(row)
            if dead := [role for role, process in processes.items() if process.poll() is not None]:
                raise SystemExit(f"{dead} died; see .tmp-*.log in {bucket.address}")
            time.sleep(PERIOD_S)
        processes["learner"].wait(300)   # it writes the report
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(10)


def step_times(bucket: FileBucket) -> dict[str, list[tuple[int, float]]]:
    """{measure: [(step, ms)]} from what the learner printed."""
    found = {"step, ms": [], "of it not waiting for groups, ms": []}
    for line in (bucket.root / ".tmp-learner.log").read_text().splitlines():
        if line.startswith("step="):
            row = dict(pair.split("=", 1) for pair in line.split())
            step, step_s, wait_s = int(row["step"]), float(row["step_s"]), float(row["wait_s"])
            found["step, ms"].append((step, step_s * 1e3))
            found["of it not waiting for groups, ms"].append((step, (step_s - wait_s) * 1e3))
    return found


def measures(rows: list[dict], bucket: FileBucket) -> dict[str, list[tuple[int, float]]]:
    """{measure: [(step, value)]}; CPU seconds become CPU milliseconds per step between two rows."""
    found = step_times(bucket)
    for before, row in zip([None] + rows, rows):
        for name, value in row["values"].items():
            if not name.startswith("CPU"):
                found.setdefault(name, []).append((row["step"], value))
            elif before and row["step"] > before["step"]:
                per_step = (value - before["values"][name]) / (row["step"] - before["step"])
                found.setdefault(name.replace(", s", ", ms a step"), []).append((row["step"], per_step * 1e3))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--bucket", help="an empty folder (default: a temporary one)")
    parser.add_argument("--rows", help="file that the rows are added to, as JSON lines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bucket, rows = FileBucket(args.bucket or temporary), []
        bucket.root.mkdir(parents=True, exist_ok=True)

        def save(row):
            rows.append(row)
            if args.rows:
                with open(args.rows, "a") as out:
                    out.write(json.dumps(row) + "\n")
        watch(bucket, args.steps, save)
        tenth, has_grown = args.steps // 10, False
        print(f"| median of | first {tenth} steps | last {tenth} steps | ratio |\n|---|---|---|---|")
        for name, points in measures(rows, bucket).items():
            first, last = ([v for step, v in points if low < step <= low + tenth] for low in (0, args.steps - tenth))
            if not first or not last:
                print(f"| {name} | {'-' if not first else f'{statistics.median(first):.3g}'} | "
                      f"{'-' if not last else f'{statistics.median(last):.3g}'} | - |")
                continue
            first, last = statistics.median(first), statistics.median(last)
            grew = last > first * LIMIT and name not in MAY_GROW and not name.startswith("CPU")
            has_grown |= grew
            print(f"| {name} | {first:.3g} | {last:.3g} | {last / first if first else 1:.2f}{' GROWN' * grew} |")
    return has_grown


if __name__ == "__main__":
    sys.exit(main())
