"""Runs the default run for several seeds, one after the other, and checks what the README says of it.

    python bench/seeds.py            # seeds 0 to 9, about 20 minutes on two cores
    python bench/seeds.py 0 1 2

Prints a row per seed; exit 1 when a seed misses: reward_first <= 0.5, reward_last >= 0.85, |ratio_mean - 1| <= 0.02,
mismatch <= 1e-3, at most 2 % of the groups dropped, at most 150 s in all, and a ten-step mean of the reward that never
falls below its first value.
"""
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(seed: int) -> tuple[dict, list[float], float]:
    """(summary, reward per step, seconds) of one default run in a fresh bucket."""
    with tempfile.TemporaryDirectory() as bucket:
        began = time.monotonic()
        done = subprocess.run([sys.executable, str(ROOT / "grpo_async.py"), "--bucket", bucket, "--seed", str(seed)],
                              capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"seed {seed}: exit {done.returncode}\n{done.stderr[-2000:]}")
        rewards = [float(line.split("reward=")[1].split()[0]) for line in done.stdout.splitlines() if line.startswith("step=")]
        return json.loads((Path(bucket) / "summary.json").read_text()), rewards, time.monotonic() - began


def main() -> int:
    failures = 0
    print("seed first last eval_before eval_after ratio_mean mismatch staleness dropped ten_min total_s")
    for seed in map(int, sys.argv[1:] or range(10)):
        s, rewards, total_s = run(seed)
        tens = [sum(rewards[i:i + 10]) / 10 for i in range(len(rewards) - 9)]
        dropped = s["groups_dropped"] / s["groups_written"]
        passed = (s["reward_first"] <= 0.5 and s["reward_last"] >= 0.85 and abs(s["ratio_mean"] - 1) <= 0.02
                  and s["mismatch"] <= 1e-3 and dropped <= 0.02 and total_s <= 150 and min(tens) >= tens[0])
        failures += not passed
        print(f"{seed} {s['reward_first']:.3f} {s['reward_last']:.3f} {s['eval_before']:.3f} {s['eval_after']:.3f} "
              f"{s['ratio_mean']:.4f} {s['mismatch']:.1e} {s['staleness_mean']:.2f} {dropped:.4f} {min(tens) - tens[0]:+.3f} "
              f"{total_s:.0f} {'ok' if passed else 'MISSED'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
