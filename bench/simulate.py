"""A discrete-event model of asynchronous GRPO over a bucket: checked against five published runs, then asked how far it scales.

    python bench/simulate.py                        # both tables as markdown, under a minute
    python bench/simulate.py --call-ms 5 --mb-per-s 1000 --sync-steps 1

Published [1]: TRL's AsyncGRPOTrainer, Qwen2.5-Math-1.5B, LoRA of rank 1, a trainer on two H200, two or three vLLM replicas
on one each, an adapter every 4 steps through a mounted bucket, 8 rollouts a prompt, staleness at most 4. Wall clocks of 500
steps are given for runs 1 and 5; runs 2 to 4 were stopped early: 500 times what is given of a step (its median, or forward +
backward + wait + 0.25 s of the rest, + sync / 4); run 4, bound by its samplers, is run 3 by their tokens per second.

The model. A sampler decodes one token for all its rows every token_s. A client keeps a number of rollouts in flight, a queue
holds finished groups, a learner takes a step's worth, computes, and every 4 steps publishes. *Published* stops learner and
samplers for a sync; *ours* stops neither: the version is served later. Fitted, to runs 1 to 3 only: the cost of a microbatch
and of a token (forward + backward of runs 1 and 2, forward of run 2), the seconds of a decoded token (run 3). Predicted: all
else, in particular runs 4 and 5.

Scaled to other models by parameters, layers and bytes (constants below), nothing of it measured on those machines; the CPU
side of a step (packing, reading, folding) was measured on two x86 cores. Does not model: prefill, rewards, failures, or a
learner over several GPUs other than as one that is as many times faster.

[1] https://huggingface.co/blog/asyncgrpo-lora-hfjobs (September 2026)
"""
import argparse
import heapq
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

G, MAX_TOKENS, PROMPT_TOKENS, SPREAD = 8, 3000, 120, 0.6   # rollouts a group; lengths are lognormal with this sigma, cut at MAX_TOKENS
EARLY_TOKENS, MEAN_TOKENS = 1245, 1112   # prompt and completion: published tokens of a step / its samples, first 150 steps and all 500
STEP_TOKENS = round(0.95 * 16384 * 6 * 2)   # published: rows of 16,384 tokens 95 % full, 6 a step on each of 2 GPUs


# ---------------------------------------------------------------- The model

@dataclass
class Run:
    """Who does what, how fast. Seconds; rollouts unless said otherwise."""
    steps: int
    samplers: int
    inflight: int                         # of all samplers together
    queue: int                            # published: finished ones; ours: finished and in flight
    samples: int                          # of a step; 0: as many as fill STEP_TOKENS
    tokens: int                           # mean of prompt + completion
    token_s: Callable[[float], float]     # rows -> seconds in which each gets a token
    step_s: Callable[[int, int], float]   # (samples, tokens) -> seconds of a step without waiting and sync
    sync_s: float
    is_published: bool = True             # a sync stops everybody
    sync_steps: int = 4
    max_staleness: int = 4


class Sampler:
    """Rows advance together, so a row that needs n tokens ends when the clock, in tokens, is n further."""

    def __init__(self):
        self.clock, self.rows = 0.0, []   # heap of (end, tie, group, completion tokens)


def lengths(mean: float, draw: random.Random):
    """Completion lengths without end, with this mean after the cut."""
    def cut(scale):
        return min(MAX_TOKENS, max(16, round(scale * draw.lognormvariate(0, SPREAD))))
    scale = mean
    for _ in range(8):
        scale *= mean / statistics.mean(cut(scale) for _ in range(4000))
    while True:
        yield cut(scale)


def simulate(run: Run, seed: int = 0) -> dict:
    """Means over a run: wall_s, and per step wait_s, samples, queue, staleness, dropped; tok_s of the samplers together."""
    draw = random.Random(seed)
    length, samplers = lengths(run.tokens - PROMPT_TOKENS, draw), [Sampler() for _ in range(run.samplers)]
    ready, served_at = deque(), deque()      # (version, tokens) of a rollout; (time, version)
    blocked = deque()                        # published: finished groups that a full queue keeps out; while there is one, none starts
    now = wait_s = 0.0
    served = published = inflight = generated = dropped = step = ties = 0
    until, doing, queues, stale, taken = None, "", [], [], []
    while step < run.steps:
        while inflight + G <= run.inflight and (not blocked if run.is_published else len(ready) + inflight + G <= run.queue):
            sampler, group = min(samplers, key=lambda s: len(s.rows)), [served]
            for n in (next(length) for _ in range(G)):
                ties += 1
                heapq.heappush(sampler.rows, (sampler.clock + n, ties, group, n))
            inflight += G
        if not doing:    # the learner takes a step's worth if it is there
            while ready and published - ready[0][0] > run.max_staleness:
                ready.popleft()
                dropped += 1
            samples = tokens = 0
            for _, n in ready:
                if samples == run.samples > 0 or not run.samples and tokens + n > STEP_TOKENS:
                    queues.append(len(ready))
                    stale += [published - ready.popleft()[0] for _ in range(samples)]
                    taken.append(samples)
                    until, doing = now + run.step_s(samples, tokens), "train"
                    break
                samples, tokens = samples + 1, tokens + n
        while blocked and len(ready) + G <= run.queue:
            ready += blocked.popleft()
        is_paused = doing == "sync"
        ends = [now + (s.rows[0][0] - s.clock) * run.token_s(len(s.rows)) for s in samplers if s.rows and not is_paused]
        then = min([*ends, *([until] if doing else []), *(t for t, _ in list(served_at)[:1])])
        for s in samplers:
            s.clock += 0 if is_paused or not s.rows else (then - now) / run.token_s(len(s.rows))
        wait_s, now = wait_s + (0 if doing else then - now), then
        if served_at and served_at[0][0] <= now:
            served = served_at.popleft()[1]
        if doing and until <= now:
            if doing == "train":
                step, doing = step + 1, ""
                if step % run.sync_steps == 0:
                    published += 1
                    until, doing = (now + run.sync_s, "sync") if run.is_published else (None, "")
                    served_at += [] if run.is_published else [(now + run.sync_s, published)]
            else:
                served, doing = published, ""
        for s in samplers:
            while s.rows and s.rows[0][0] <= s.clock + 1e-6:
                _, _, group, n = heapq.heappop(s.rows)
                group.append((group[0], n + PROMPT_TOKENS))
                generated += n
                inflight -= run.is_published   # its permits are of rollouts, ours of groups
                if len(group) == G + 1:
                    blocked.append(group[1:]) if run.is_published else ready.extend(group[1:])
                    inflight -= 0 if run.is_published else G
    return {"wall_s": now, "wait_s": wait_s / run.steps, "samples": statistics.mean(taken), "queue": statistics.median(queues),
            "staleness": statistics.mean(stale), "tok_s": generated / now, "dropped": dropped / (sum(taken) + dropped)}


# ---------------------------------------------------------------- Five published runs

# Forward + backward = microbatches x MICRO_S + tokens of a GPU x TOKEN_S, solved from runs 1 (64 microbatches of one sample, 21.9 s) and
# 2 (6 rows, 5.6 s), both with recomputation; without it a forward (1.34 s of run 2's 5.6 s) less a token.
MICRO_S, TOKEN_S = 0.293, 41.1e-6
FORWARD_TOKEN_S = 1.34 / (STEP_TOKENS / 2)
# Run 3: 128 in flight made 4 steps' completions in the 21.4 s of 29 s that the engines were not paused; the same at 43 rows and at 130.
DECODE_S = 4.1e-3


def published_run(number: int) -> Run:
    packed, recomputes, fast_retry = number > 1, number < 3, number > 3

    def step_s(samples, tokens):
        compute = (6 if packed else 64) * MICRO_S + tokens / 2 * (TOKEN_S - (0 if recomputes else FORWARD_TOKEN_S))
        return compute + (0.25 if packed else 1.0)     # the rest of a step: published step - forward and backward
    return Run(steps=500, samplers=3 if number > 3 else 2, inflight=384 if number == 5 else 128, queue=768 if number == 5 else 512,
               samples=0 if packed else 128, tokens=EARLY_TOKENS if number in (2, 3, 4) else MEAN_TOKENS, token_s=lambda rows: DECODE_S,
               step_s=step_s, sync_s={1: 8.5, 2: 8.5, 3: 7.6, 4: 5.8, 5: 6.2}[number])


# number: (name, wall clock of 500 steps in minutes, seconds a step waits, rollouts in the queue, mean staleness, 1,000 tokens/s)
PUBLISHED = {1: ("one sample a microbatch", 207, 0.02, 476, 1.5, 4.6), 2: ("packed", 500 * (5.9 + 8.5 / 4) / 60, 0.04, 420, None, 25),
             3: ("no recomputation", 500 * (4.6 + 0.25 + 0.6 + 7.6 / 4) / 60, 0.6, 71, None, 25),
             4: ("third sampler", 500 * (4.6 + 0.25 + 0.6 + 7.6 / 4) / 60 * 25 / 26, None, None, None, 26),
             5: ("384 in flight", 53, 0.03, 690, 2.0, None)}


def compare() -> float:
    """Prints the table; the largest error of a wall clock."""
    print("| run | wall clock of 500 steps, min: published | simulated | error | wait s/step | queue | staleness | 1,000 tok/s |")
    print("|---|---|---|---|---|---|---|---|")
    errors = []
    for number, (name, wall_min, *others) in PUBLISHED.items():
        got = simulate(published_run(number))
        errors.append(got["wall_s"] / 60 / wall_min - 1)
        shown = [f"{'-' if want is None else f'{want:g}'} / {value:.{digits}f}" for want, value, digits in zip(
            others, (got["wait_s"], got["queue"], got["staleness"], got["tok_s"] / 1e3), (2, 0, 1, 1))]
        is_given = "" if number in (1, 5) else " (from its parts)"
        print(f"| {number} {name} | {wall_min:.0f}{is_given} | {got['wall_s'] / 60:.0f} | {errors[-1]:+.1%} | {' | '.join(shown)} |")
    ours = simulate(replace(published_run(5), is_published=False))
    print(f"| 5, ours: a sync stops nobody | - | {ours['wall_s'] / 60:.0f} | | - / {ours['wait_s']:.2f} | - / {ours['queue']:.0f} "
          f"| - / {ours['staleness']:.1f} | - / {ours['tok_s'] / 1e3:.1f} |")
    return max(map(abs, errors))


# ---------------------------------------------------------------- How many machines, and what stops them

@dataclass
class Model:
    name: str
    parameters: float
    layers: int
    lora_width: int       # sum of in + out over the linear layers: adapter parameters at rank 1
    kv_bytes: int         # of a token, bf16
    gpus: int             # H200 that make one machine, sampler or learner


MODELS = [Model("1.5B", 1.54e9, 28, 28 * 41216, 28 * 2 * 256 * 2, 1), Model("8B", 8.03e9, 32, 32 * 81920, 32 * 2 * 1024 * 2, 1),
          Model("70B", 70.6e9, 80, 80 * 161792, 80 * 2 * 1024 * 2, 8)]
ROWS = 128                           # that a sampler decodes at once; twice as many are asked for, as groups end with their longest
LAYER_S = DECODE_S * 0.7 / 28        # of a decoded token: what is left of DECODE_S beside reading weights and cache, per layer
BYTES_S, FLOP_S = 0.8 * 4.8e12, 0.5 * 989e12    # H200, what decoding gets of it
TRAIN_S = 4.6 * 2 / STEP_TOKENS / 1.54e9        # seconds per token and parameter on one H200: run 3's forward + backward
PACK_S, READ_S, ADD_S, APPLY_S = 10e-9, 6.2e-9, 2.2e-9, 25e-9   # per adapter parameter, 2 x86 cores: pack_object; unpack_object; +; apply and digest
PROXY_S = 0.8e-3                     # CPU of the router per group of 8 x 1,000 tokens (229 kB of JSON), same cores, stub replica: 0.62 to 0.78 ms


def decode_s(model: Model, rows: float) -> float:
    read = 2 * model.parameters + rows * (PROMPT_TOKENS + MEAN_TOKENS) / 2 * model.kv_bytes
    return model.layers * LAYER_S + read / model.gpus / BYTES_S + rows * 2 * model.parameters / model.gpus / FLOP_S


def learner_s(model: Model, rank: int, learners: int, args) -> dict[str, float]:
    """Where a step of `learners` goes, without waiting for groups: {"compute", "CPU", "bucket"}, seconds."""
    n, groups = model.lora_width * rank, -(-args.groups // learners)
    transfer_s, call_s = 4 * n / args.mb_per_s / 1e6, args.call_ms / 1e3
    alone = learners == 1     # then the part is uploaded behind the next forward, and none is read
    return {"compute": groups * G * MEAN_TOKENS * TRAIN_S * model.parameters / model.gpus,
            "CPU": n * (PACK_S + APPLY_S + (learners - 1) * (READ_S + ADD_S)),
            "bucket": call_s * (4 if alone else 9) + (0 if alone else learners * transfer_s)}


def scale(model: Model, rank: int, learners: int, samplers: int, args) -> dict:
    parts = learner_s(model, rank, learners, args)
    queue = (args.max_staleness - 1) * args.groups * G * args.sync_steps
    got = simulate(Run(steps=12 * args.sync_steps, samplers=samplers, inflight=2 * samplers * ROWS, queue=queue, samples=args.groups * G,
                       tokens=MEAN_TOKENS, token_s=lambda rows: decode_s(model, rows), step_s=lambda samples, tokens: sum(parts.values()),
                       sync_s=4 * model.lora_width * rank / args.mb_per_s / 1e6 + 4 * args.call_ms / 1e3, is_published=False,
                       sync_steps=args.sync_steps, max_staleness=args.max_staleness))
    return got | parts | {"step_s": got["wall_s"] / (12 * args.sync_steps)}


def fewest_samplers(model: Model, rank: int, learners: int, args) -> tuple[int, dict]:
    """Samplers, doubled until the learners wait less than 5 % of a step or more samplers no longer help."""
    samplers, got = 1, scale(model, rank, learners, 1, args)
    while got["wait_s"] > 0.05 * got["step_s"]:
        more = scale(model, rank, learners, 2 * samplers, args)
        if more["step_s"] > 0.95 * got["step_s"]:
            break
        samplers, got = 2 * samplers, more
    return samplers, got


LIMITS = {"bucket": "bucket", "CPU": "folding on the CPU", "wait_s": "staleness"}


def most_learners(model: Model, rank: int, args) -> list[str]:
    """Cells: learners, doubled while that makes steps at least 1.4 times faster; samplers they need; s/step; what stops more."""
    learners, (samplers, got) = 1, fewest_samplers(model, rank, 1, args)
    why = f"{args.groups} groups are {args.groups} chunks"
    while learners < args.groups:
        more_samplers, more = fewest_samplers(model, rank, 2 * learners, args)
        if more["step_s"] * 1.4 > got["step_s"]:
            why = LIMITS[max(LIMITS, key=lambda share: more[share] - got[share])]
            break
        learners, samplers, got = 2 * learners, more_samplers, more
    return [f"{learners}", f"{samplers}", f"{got['step_s']:.2g}", f"{got['staleness']:.1f}", why]


def answer(args) -> None:
    """One row per model and rank: at this bucket, at one that costs nothing, and what one proxy carries."""
    free = argparse.Namespace(**{**vars(args), "call_ms": 0.0, "mb_per_s": 1e9})
    of = ["learners", "samplers", "s/step", "staleness", "what stops more"]
    head = ["model", "rank", "part, MB", *of, *(f"free bucket: {name}" for name in of), "samplers a proxy carries"]
    print("", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", sep="\n")
    for model in MODELS:
        for rank in (1, 16):
            group_s = decode_s(model, ROWS) * (MEAN_TOKENS - PROMPT_TOKENS) * G / ROWS    # of one busy sampler
            print("| " + " | ".join([model.name, str(rank), f"{4e-6 * model.lora_width * rank:.0f}", *most_learners(model, rank, args),
                                     *most_learners(model, rank, free), f"{0.8 * group_s / PROXY_S:.0f}"]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--call-ms", type=float, default=50, help="of a bucket call (default 50)")
    parser.add_argument("--mb-per-s", type=float, default=200, help="of one machine to and from the bucket (default 200)")
    parser.add_argument("--groups", type=int, default=16, help="per step (default 16, as published)")
    parser.add_argument("--sync-steps", type=int, default=4, help="steps per version (default 4, as published)")
    parser.add_argument("--max-staleness", type=int, default=4, help="versions (default 4, as published)")
    args = parser.parse_args()
    worst = compare()
    print(f"\nLargest error of a wall clock: {worst:.1%}")
    answer(args)
    raise SystemExit(worst > 0.10)


if __name__ == "__main__":
    main()
