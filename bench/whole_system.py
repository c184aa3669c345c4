"""The whole system against the published one, both on this machine's CPU.

    python bench/whole_system.py                                        # the tiny model and its additions
    python bench/whole_system.py --model ~/smollm2 --data ~/add2.jsonl  # SmolLM2-135M (bench/smollm2.py makes both)

    theirs    TRL's AsyncGRPOTrainer and one stock vLLM server (environments of their own, bench/peers.py)
    ours      grpo_async.py: a learner and an actor that samples in its own process, over a folder

Same base, prompts, reward, LoRA rank and alpha, learning rate, clip bounds, staleness limit, rollouts a step and in
flight, and threads per process. TRL runs as it is fastest here: all rollouts of a step in one packed forward, no
recomputation, fp32. Runs alternate, and vLLM is stopped (SIGSTOP) while ours runs. Figures, medians over the runs:

    tokens/s   completion tokens that optimizer steps consumed, per second of wall clock from the end of step 1 to
               the end of the last. Groups with equal rewards count on both sides, though ours need no forward.
    seconds    from the end of step 1 until the mean reward of five steps in a row reaches --target; inf if it never does, and
               their whole time then is what ours is compared with: a lower bound of the ratio
    whole      from the end of step 1 to the end of the last
    cold       from the command to the end of step 1: imports, servers, the first rollouts

Does not: measure on a GPU, where TRL's attention kernel and vLLM are at home.
"""
import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import requests

import peers

TINY = {"max_tokens": 7, "rank": 8, "alpha": 16.0, "lr": 2e-3, "staleness": 2, "warmup": 5, "steps": 40, "target": 0.8,
        "threads": 1}
REAL = {"max_tokens": 16, "rank": 4, "alpha": 16.0, "lr": 1e-3, "staleness": 1, "warmup": 2, "steps": 6, "target": 0.0,
        "threads": 1}  # two processes of two threads each on two cores spin at each other's barriers: TRL took 239 s a step


def words(flags: dict) -> list:
    """{"lr": 0.1} as --lr 0.1."""
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def ours(folder: Path, args, run: peers.Processes) -> tuple[float, list[tuple[float, float, float]]]:
    """(seconds until the end of step 1, [(seconds after that, tokens, reward) of each step])."""
    began, bucket = time.time(), folder / "bucket"
    if args.model:
        model = ["--model", args.model, "--data", args.data, "--task", "math", "--max-prompt-tokens", "64"]
    else:
        model = []
        peers.tiny_base(bucket)
    flags = {"steps": args.steps, "groups-per-step": args.rollouts // 8, "max-tokens": args.max_tokens, "eval-steps": -1,
             "lora-r": args.rank, "lora-alpha": args.alpha, "lr": args.lr, "lr-schedule": "constant",
             "warmup-steps": args.warmup, "max-staleness": args.staleness}
    queue = args.staleness * args.rollouts // 8  # as many in flight as TRL's default allows
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    run.script("learner", "grpo_async.py", "--role", "learner", "--bucket", bucket, *model, *words(flags), **threads)
    run.script("actor", "grpo_async.py", "--role", "actor", "--bucket", bucket, "--queue-groups", queue, **threads)
    run.wait("learner", r"^summary ", 1800)
    run.kill("actor")
    run.kill("learner")
    steps, rows, at = peers.lines(run.log("learner")), [], 0.0
    first = json.loads((bucket / "steps" / "000001.json").read_text())["unix_s"]
    for step in steps:
        at += float(step["step_s"])
        rows.append((at, float(step["completion_tokens"]) * args.rollouts, float(step["reward"])))
    cold = first - began + float(steps[0]["step_s"]) - float(steps[0]["wait_s"])
    return cold, [(t - rows[0][0], n, r) for t, n, r in rows]


def theirs(folder: Path, args, run: peers.Processes, url: str, base: Path) -> tuple[float, list[tuple[float, float, float]]]:
    """The same, of TRL with the vLLM server at `url`."""
    for card in requests.get(f"{url}/v1/models", timeout=30).json()["data"]:
        if card.get("parent"):  # of the run before: vLLM refuses a name that it holds
            requests.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": card["id"]}, timeout=30)
    began = time.time()
    flags = {"server": url, "model": base, "out": folder / "trl", "steps": args.steps, "rollouts": args.rollouts,
             "max-tokens": args.max_tokens, "rank": args.rank, "alpha": args.alpha, "lr": args.lr,
             "warmup-steps": args.warmup, "staleness": args.staleness, "save-steps": 100_000}
    flags |= {"data": args.data} if args.model else {}
    run.start("trl", [peers.environment("trl"), "bench/trl_client.py", *words(flags)], OMP_NUM_THREADS=str(args.threads))
    run.running["trl"].wait(1800)
    run.kill("trl")
    said = [json.loads(line) for line in run.log("trl").splitlines() if line.startswith("{\"")]
    rows = [(row["unix_s"], row["batch/trained_tokens_per_step"], row["reward"]) for row in said if "ratio" in row]
    if len(rows) != args.steps:
        raise SystemExit(f"TRL made {len(rows)} of {args.steps} steps:\n{run.log('trl')[-3000:]}")
    return rows[0][0] - began, [(t - rows[0][0], n, r) for t, n, r in rows]


def figures(cold: float, rows: list[tuple[float, float, float]], target: float) -> dict:
    fives = ((rows[i][0], sum(r for *_, r in rows[i - 4:i + 1]) / 5) for i in range(4, len(rows)))
    reached = {"seconds": next((at for at, reward in fives if reward >= target), math.inf)} if target else {}
    return {"tokens/s": sum(n for _, n, _ in rows[1:]) / rows[-1][0], **reached, "whole": rows[-1][0], "cold": cold,
            "s/step": rows[-1][0] / (len(rows) - 1), "last reward": sum(r for *_, r in rows[-5:]) / len(rows[-5:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: the tiny one")
    parser.add_argument("--data", help="JSON lines with chat prompts and an answer")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=64, help="per optimizer step, in groups of 8")
    for name, value in TINY.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=None)
    args = parser.parse_args()
    for name, value in (REAL if args.model else TINY).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    measured = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as temp, peers.Processes(Path(temp) / "logs") as servers:
        base, (port,) = Path(args.model) if args.model else peers.tiny_base(Path(temp)), peers.free_ports(1)
        command = peers.vllm_command(base, port, max_model_len=256 if args.model else 64)
        servers.start("vllm", command, OMP_NUM_THREADS=str(args.threads), **peers.VLLM_ENV)
        servers.wait("vllm", "Application startup complete", 300)
        for number in range(args.runs):
            for name in ("ours", "theirs"):
                folder = Path(temp) / f"{name}-{number}"
                servers.signal("vllm", "STOP" if name == "ours" else "CONT")
                with peers.Processes(folder) as run:
                    url = f"http://127.0.0.1:{port}"
                    cold, rows = ours(folder, args, run) if name == "ours" else theirs(folder, args, run, url, base)
                one = figures(cold, rows, args.target)
                measured[name].append(one)
                print(f"run {number + 1} {name:7}" + " ".join(f"{key}={value:.3g}" for key, value in one.items())
                      + "\n    reward by step " + " ".join(f"{r:.2f}" for *_, r in rows), flush=True)
    middle = {name: {key: statistics.median(one[key] for one in rows) for key in rows[0]} for name, rows in measured.items()}
    print(f"\n{'':12}{'ours':>10}{'theirs':>10}{'ratio':>10}    "
          f"medians of {args.runs}, {args.steps} steps of {args.rollouts} rollouts")
    ratio = {}
    for key, a in middle["ours"].items():
        b = middle["theirs"][key]
        is_bound = key == "seconds" and b == math.inf
        ratio[key] = a / b if key in ("tokens/s", "last reward") else (middle["theirs"]["whole"] if is_bound else b) / a
        print(f"{key:12}{a:10.3g}{b:10.3g}{ratio[key]:10.2f}{' or more' if is_bound else ''}")
    wanted = 3 if args.model else 5
    checks = [(f"tokens of a second at least {wanted} times theirs", ratio["tokens/s"] >= wanted, f"{ratio['tokens/s']:.2f}")]
    if args.target:
        checks.append((f"reward {args.target:g} in a third of their time", ratio["seconds"] >= 3, f"{ratio['seconds']:.2f}"))
    return peers.verdict(checks)


if __name__ == "__main__":
    sys.exit(main())
