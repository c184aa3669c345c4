"""Asynchronous GRPO over a bucket as discrete events: checked against five published runs, then asked how far it scales.

    python bench/simulate.py                                      # both tables as markdown, under a minute
    python bench/simulate.py --sync-steps 1 --max-staleness 2     # this project's defaults
    python bench/simulate.py --call-ms 5 --mb-per-s 1000          # another bucket

Published [1]: TRL's AsyncGRPOTrainer, Qwen2.5-Math-1.5B, LoRA of rank 1, a trainer on two H200, two or three vLLM
replicas on one each, an adapter every 4 steps through a mounted bucket, 8 rollouts a prompt, staleness at most 4. Wall
clocks of 500 steps are given for runs 1 and 5; runs 2 to 4 were stopped early: 500 times what is given of a step (its
median, or forward + backward + wait + 0.25 s of the rest, and sync / 4); run 4, bound by its samplers, is run 3 by
their tokens per second.

The model. A sampler decodes one token for all its rows every token_s. A client keeps a number of rollouts in flight, a
queue holds finished groups, a learner takes a step's worth, computes, and every few steps publishes. *Published* stops
learner and samplers for a sync; *ours* stops neither: the version is served a little later. Fitted, to runs 1 to 3
only: the cost of a microbatch and of a token (forward + backward of runs 1 and 2, forward of run 2), the seconds of a
decoded token (run 3). Predicted: all else, in particular runs 4 and 5.

Scaled to other models by parameters, layers and bytes (constants below): nothing of it is measured on those machines.
The CPU side of a step (packing, reading, folding) and the proxy were measured on two x86 cores. Does not model:
prefill, rewards, failures; a machine of several GPUs is one that is as many times faster.

[1] https://huggingface.co/blog/asyncgrpo-lora-hfjobs (September 2026)
"""
import argparse
import heapq
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

G = 8                                    # rollouts a group
PROMPT_TOKENS, MAX_TOKENS = 120, 3000
SPREAD = 0.6                             # sigma of the lognormal completion lengths, which are cut at MAX_TOKENS
STEP_TOKENS = round(0.95 * 16384 * 6 * 2)   # published: rows of 16,384 tokens, 95 % full, 6 a step on each of 2 GPUs
EARLY_TOKENS, MEAN_TOKENS = 1245, 1112   # of a rollout with its prompt: STEP_TOKENS / samples; first 150 steps, all 500


# ---------------------------------------------------------------- The model

@dataclass
class Run:
    """Who does what, how fast. Seconds; rollouts unless said otherwise."""
    steps: int
    samplers: int
    inflight: int                         # of all samplers together; published: rollouts, ours: whole groups
    queue: int                            # published: finished ones; ours: finished and in flight
    samples: int                          # of a step; 0: as many as fill STEP_TOKENS
    tokens: int                           # mean of prompt + completion
    token_s: Callable[[float], float]     # rows -> seconds in which each gets a token
    step_s: Callable[[int, int], float]   # (samples, tokens) -> seconds of a step without waiting and sync
    sync_s: float
    is_published: bool = True
    sync_steps: int = 4
    max_staleness: int = 4


class Sampler:
    """Rows advance together, so a row that needs n tokens ends when the clock, in tokens, is n further."""

    def __init__(self):
        self.clock, self.rows = 0.0, []   # heap of (end, tie, group, completion tokens)


def lengths(mean: float, draw: random.Random) -> Iterator[int]:
    """Completion lengths without end, with this mean after the cut."""
    def cut(scale):
        return min(MAX_TOKENS, max(16, round(scale * draw.lognormvariate(0, SPREAD))))
    scale = mean
    for _ in range(8):
        scale *= mean / statistics.mean(cut(scale) for _ in range(4000))
    while True:
        yield cut(scale)


def filling(ready: deque) -> int:
    """How many of the oldest rollouts fill STEP_TOKENS; 0 if all do not."""
    total = 0
    for count, (_, tokens) in enumerate(ready):
        total += tokens
        if total > STEP_TOKENS:
            return count
    return 0


class World:
    """A run between two events: what is in flight, ready, being trained, on its way to the samplers."""

    def __init__(self, run: Run, seed: int = 0):
        self.run, self.length = run, lengths(run.tokens - PROMPT_TOKENS, random.Random(seed))
        self.samplers = [Sampler() for _ in range(run.samplers)]
        self.ready = deque()              # (version, tokens) of finished rollouts, oldest first
        self.blocked = deque()            # published: finished groups kept out by a full queue; meanwhile none starts
        self.coming = deque()             # ours: (time, version) that will be served then
        self.now = self.wait_s = 0.0
        self.step = self.version = self.served = self.inflight = self.started = self.generated = self.dropped = 0
        self.doing, self.until = "", 0.0  # the learner: "" waits, "train", "sync"
        self.queues, self.staleness, self.taken = [], [], []   # at each step; of each rollout; rollouts of each step

    def take(self) -> None:
        """The learner takes a step's worth, if that is there and the learner free."""
        while self.ready and self.version - self.ready[0][0] > self.run.max_staleness:
            self.ready.popleft()
            self.dropped += 1
        samples = self.run.samples or filling(self.ready)
        if not self.doing and 0 < samples <= len(self.ready):
            self.queues.append(len(self.ready))
            rollouts = [self.ready.popleft() for _ in range(samples)]
            self.staleness += [self.version - version for version, _ in rollouts]
            self.taken.append(samples)
            self.doing, self.until = "train", self.now + self.run.step_s(samples, sum(n for _, n in rollouts))

    def start(self) -> None:
        """Groups start at the least busy sampler, under the version served, while more may be in flight."""
        run = self.run
        while self.blocked and len(self.ready) + G <= run.queue:
            self.ready += self.blocked.popleft()
        while self.inflight + G <= run.inflight and (
                not self.blocked if run.is_published else len(self.ready) + self.inflight + G <= run.queue):
            sampler, group = min(self.samplers, key=lambda s: len(s.rows)), [self.served]
            for _ in range(G):
                n, self.started = next(self.length), self.started + 1
                heapq.heappush(sampler.rows, (sampler.clock + n, self.started, group, n))
            self.inflight += G

    def advance(self) -> None:
        """To the next event: a row ends, the learner is done, a version comes to be served."""
        busy = [] if self.doing == "sync" else [s for s in self.samplers if s.rows]   # only published ever syncs
        times = [self.now + (s.rows[0][0] - s.clock) * self.run.token_s(len(s.rows)) for s in busy]
        times += [self.until] if self.doing else []
        then = min(times + [time for time, _ in self.coming])
        for s in busy:
            s.clock += (then - self.now) / self.run.token_s(len(s.rows))
        self.wait_s += 0 if self.doing else then - self.now
        self.now = then
        while self.coming and self.coming[0][0] <= then:
            self.served = self.coming.popleft()[1]
        if self.doing and self.until <= then:
            self.end_training() if self.doing == "train" else self.end_sync()
        for s in busy:
            self.end_rows(s)

    def end_training(self) -> None:
        self.step, self.doing = self.step + 1, ""
        if self.step % self.run.sync_steps == 0:
            self.version += 1
            if self.run.is_published:
                self.doing, self.until = "sync", self.now + self.run.sync_s
            else:
                self.coming.append((self.now + self.run.sync_s, self.version))

    def end_sync(self) -> None:
        self.served, self.doing = self.version, ""

    def end_rows(self, sampler: Sampler) -> None:
        while sampler.rows and sampler.rows[0][0] <= sampler.clock + 1e-6:
            _, _, group, n = heapq.heappop(sampler.rows)
            group.append((group[0], n + PROMPT_TOKENS))
            self.generated += n
            is_whole = len(group) == G + 1
            self.inflight -= 1 if self.run.is_published else G * is_whole
            if is_whole:
                self.blocked.append(group[1:]) if self.run.is_published else self.ready.extend(group[1:])


def simulate(run: Run) -> dict[str, float]:
    """Wall clock in s; per step: seconds waited, rollouts in the queue, mean staleness; tokens/s of all samplers."""
    world = World(run)
    while world.step < run.steps:
        world.take()
        world.start()
        world.advance()
    return {"wall_s": world.now, "wait_s": world.wait_s / run.steps, "queue": statistics.median(world.queues),
            "staleness": statistics.mean(world.staleness), "tok_s": world.generated / world.now,
            "dropped": world.dropped / (sum(world.taken) + world.dropped)}


# ---------------------------------------------------------------- Five published runs

# Forward + backward = microbatches x MICRO_S + tokens of a GPU x TOKEN_S. Solved from run 1 (64 microbatches of one
# sample, 21.9 s) and run 2 (6 rows, 5.6 s), both with recomputation; without it, a forward less (1.34 s of run 2).
MICRO_S, TOKEN_S, FORWARD_TOKEN_S = 0.293, 41.1e-6, 1.34 / (STEP_TOKENS / 2)
# Run 3: 128 rollouts in flight made the completions of 4 steps in the 21.4 of 29 s in which the engines were not
# paused. "Almost the same cost per token" at 43 and at 130 rows.
DECODE_S = 4.1e-3
SYNC_S = {1: 8.5, 2: 8.5, 3: 7.6, 4: 5.8, 5: 6.2}
# number: name, wall clock of 500 steps in minutes, seconds a step waits, queue, mean staleness, 1,000 tokens/s
PUBLISHED = {1: ("one sample a microbatch", 207, 0.02, 476, 1.5, 4.6),
             2: ("packed", 500 * (5.9 + 8.5 / 4) / 60, 0.04, 420, None, 25),
             3: ("no recomputation", 500 * (4.6 + 0.25 + 0.6 + 7.6 / 4) / 60, 0.6, 71, None, 25),
             4: ("third sampler", 500 * (4.6 + 0.25 + 0.6 + 7.6 / 4) / 60 * 25 / 26, None, None, None, 26),
             5: ("384 in flight", 53, 0.03, 690, 2.0, None)}


def published_run(number: int) -> Run:
    is_packed = number > 1
    token_s = TOKEN_S if number < 3 else TOKEN_S - FORWARD_TOKEN_S

    def step_s(samples, tokens):
        rest_s = 0.25 if is_packed else 1.0   # published step - forward and backward
        return (6 if is_packed else 64) * MICRO_S + tokens / 2 * token_s + rest_s
    return Run(steps=500, samplers=3 if number > 3 else 2, inflight=384 if number == 5 else 128,
               queue=768 if number == 5 else 512, samples=0 if is_packed else 128,
               tokens=EARLY_TOKENS if number in (2, 3, 4) else MEAN_TOKENS,
               token_s=lambda rows: DECODE_S, step_s=step_s, sync_s=SYNC_S[number])


def compare() -> float:
    """Prints published / simulated; the largest error of a wall clock."""
    print("| run | 500 steps, min | simulated | error | wait, s/step | queue | staleness | 1,000 tok/s |")
    print("|---" * 8 + "|")
    errors = []
    for number, (name, wall_min, *others) in PUBLISHED.items():
        got = simulate(published_run(number))
        errors.append(got["wall_s"] / 60 / wall_min - 1)
        values = got["wait_s"], got["queue"], got["staleness"], got["tok_s"] / 1e3
        cells = [f"{'-' if want is None else f'{want:g}'} / {value:.{digits}f}"
                 for want, value, digits in zip(others, values, (2, 0, 1, 1))]
        wall = f"{wall_min:.0f}" + ("" if number in (1, 5) else " (from its parts)")
        print(f"| {number} {name} | {wall} | {got['wall_s'] / 60:.0f} | {errors[-1]:+.1%} | {' | '.join(cells)} |")
    got = simulate(replace(published_run(5), is_published=False))
    print(f"| 5 where a sync stops nobody | - | {got['wall_s'] / 60:.0f} | - | - / {got['wait_s']:.2f} "
          f"| - / {got['queue']:.0f} | - / {got['staleness']:.1f} | - / {got['tok_s'] / 1e3:.1f} |")
    return max(map(abs, errors))


# ---------------------------------------------------------------- How many machines, and what stops them

@dataclass
class Model:
    name: str
    parameters: float
    layers: int
    lora_width: int       # adapter parameters at rank 1: layers x the sum of in + out over a layer's linear maps
    kv_bytes: int         # of a token, bf16
    gpus: int             # H200 that make one machine, sampler or learner


MODELS = [Model("1.5B", 1.54e9, 28, 28 * 41216, 28 * 2 * 256 * 2, 1),
          Model("8B", 8.03e9, 32, 32 * 81920, 32 * 2 * 1024 * 2, 1),
          Model("70B", 70.6e9, 80, 80 * 161792, 80 * 2 * 1024 * 2, 8)]
ROWS = 128                                      # of a sampler; twice as many are asked for: a group ends with its longest
LAYER_S = DECODE_S * 0.7 / 28                   # of a decoded token, per layer: DECODE_S less reading weights and cache
BYTES_S, FLOP_S = 0.8 * 4.8e12, 0.5 * 989e12    # of an H200, what decoding gets of its memory and its arithmetic
TRAIN_S = 4.6 * 2 / STEP_TOKENS / 1.54e9        # per token and parameter on one H200: run 3's forward + backward
# Per adapter parameter on two x86 cores: pack_object; unpack_object; adding a part; apply, with the digest.
PACK_S, READ_S, ADD_S, APPLY_S = 10e-9, 6.2e-9, 2.2e-9, 25e-9
PROXY_S = 0.8e-3                                # CPU of the router per group of 8 x 1,000 tokens, 229 kB of JSON


def decode_s(model: Model, rows: float) -> float:
    cached = rows * (PROMPT_TOKENS + MEAN_TOKENS) / 2 * model.kv_bytes
    return (model.layers * LAYER_S + (2 * model.parameters + cached) / model.gpus / BYTES_S
            + rows * 2 * model.parameters / model.gpus / FLOP_S)


def learner_s(model: Model, rank: int, learners: int, args) -> dict[str, float]:
    """Where a step of `learners` goes, without waiting for groups: {"compute", "CPU", "bucket"}, seconds.

    Alone, a learner uploads its part behind the next forward and reads none; else it sends one and reads all others."""
    n, groups, others = model.lora_width * rank, -(-args.groups // learners), learners - 1
    calls, transfers = (12, learners) if others else (0.4, 0)   # measured at 50 ms: 0.54 and 0.66 s with 2 and 4; 0.02 s
    return {"compute": groups * G * MEAN_TOKENS * TRAIN_S * model.parameters / model.gpus,
            "CPU": n * (PACK_S + APPLY_S + others * (READ_S + ADD_S)),
            "bucket": calls * args.call_ms / 1e3 + transfers * 4 * n / args.mb_per_s / 1e6}


def scale(model: Model, rank: int, learners: int, samplers: int, args) -> dict[str, float]:
    parts, steps = learner_s(model, rank, learners, args), 12 * args.sync_steps
    upload_s = 4 * model.lora_width * rank / args.mb_per_s / 1e6
    got = simulate(Run(
        steps=steps, samplers=samplers, inflight=2 * samplers * ROWS, samples=args.groups * G, tokens=MEAN_TOKENS,
        queue=max(1, args.max_staleness - 1) * args.groups * G * args.sync_steps,
        token_s=lambda rows: decode_s(model, rows), step_s=lambda samples, tokens: sum(parts.values()),
        sync_s=2 * upload_s + 4 * args.call_ms / 1e3,   # up by the learner, down by each sampler
        is_published=False, sync_steps=args.sync_steps, max_staleness=args.max_staleness))
    return got | parts | {"step_s": got["wall_s"] / steps}


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


def most_learners(model: Model, rank: int, args) -> str:
    """Learners, doubled while that makes steps at least 1.4 times faster, the samplers they need, what stops more."""
    learners, (samplers, got) = 1, fewest_samplers(model, rank, 1, args)
    why = f"chunks: {args.groups} groups"
    while learners < args.groups:
        more_samplers, more = fewest_samplers(model, rank, 2 * learners, args)
        if more["step_s"] * 1.4 > got["step_s"]:
            why = LIMITS[max(LIMITS, key=lambda share: more[share] - got[share])]
            break
        learners, samplers, got = 2 * learners, more_samplers, more
    return f"{learners} + {samplers} | {got['step_s']:.2g} s | {why}"


def answer(args) -> None:
    """One row per model and rank: on this bucket, on one that costs nothing, and what one proxy carries."""
    free = argparse.Namespace(**{**vars(args), "call_ms": 0.0, "mb_per_s": 1e9})
    print(f"\nSimulated: {args.groups} groups of {G} a step, {args.call_ms:g} ms a call and {args.mb_per_s:g} MB/s to "
          f"the bucket, an adapter every {args.sync_steps} steps, staleness at most {args.max_staleness}.\n")
    print("| model | rank | part | learners + samplers | step | limit | on a free bucket | step | limit "
          "| one proxy carries |")
    print("|---" * 10 + "|")
    for model in MODELS:
        for rank in (1, 16):
            group_s = decode_s(model, ROWS) * (MEAN_TOKENS - PROMPT_TOKENS) * G / ROWS    # of one busy sampler
            part_mb = 4e-6 * model.lora_width * rank
            print(f"| {model.name} | {rank} | {part_mb:.0f} MB | {most_learners(model, rank, args)} "
                  f"| {most_learners(model, rank, free)} | {0.8 * group_s / PROXY_S:.0f} samplers |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--call-ms", type=float, default=50, help="of a bucket call (default 50)")
    parser.add_argument("--mb-per-s", type=float, default=200, help="of one machine and the bucket (default 200)")
    parser.add_argument("--groups", type=int, default=16, help="per step (default 16, as published)")
    parser.add_argument("--sync-steps", type=int, default=4, help="steps per version (default 4, as published)")
    parser.add_argument("--max-staleness", type=int, default=4, help="versions (default 4, as published)")
    args = parser.parse_args()
    worst = compare()
    print(f"\nLargest error of a wall clock: {worst:.1%} (fitted to runs 1 to 3)")
    answer(args)
    raise SystemExit(worst > 0.10)


if __name__ == "__main__":
    main()
