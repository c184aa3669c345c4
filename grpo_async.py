"""Asynchronous GRPO with LoRA, on machines that share nothing but a bucket.

    python grpo_async.py                                       # everything on this machine: a tiny model, two minutes
    python grpo_async.py --role learner --bucket /mnt/run --model meta-llama/Meta-Llama-3-8B --data d.jsonl --task math
    python grpo_async.py --role actor --bucket /mnt/run        # any number, anywhere; samples in its own process
    python grpo_async.py --role report --bucket /mnt/run       # also: sampler, proxy, eval, export

The idea. Actors ask the newest policy for a group of G completions of one prompt, score them and write the group to
the bucket. A learner that finds enough groups writes the log entry of the next step (which groups, which scalars),
computes the gradient of each chunk of groups, writes it as a part, and applies the parts. Nobody waits for anybody by
name: the bucket is a write-ahead log, and the state after step t is a fold of it,

    state_t = apply(state_{t-1}, entry_t, parts_t)

so a learner that dies, restarts or joins replays the log and arrives at the same bits.

Guarantees
 1. steps/t is created once, by create-if-absent, before a part of it is written or applied: no group is trained twice.
 2. A part is the fp32 gradient of a chunk; the first valid one counts. All learners apply the same bits.
 3. Every entry carries the sha256 of the state before it: divergence is seen at the next step.
 4. Nothing is deleted that a restart from the previous trusted checkpoint could need.

Glossary: B rows of packed tokens, W tokens per row, G completions of a group, C completions of a batch, T tokens of
the longest one, N targets, d hidden width, r LoRA rank.

Does NOT train anything but LoRA matrices, split a model over GPUs, or defend against a malicious writer to the bucket.

[1] GRPO: Shao et al. 2024, arXiv:2402.03300   [2] DAPO: Yu et al. 2025, arXiv:2503.14476   [3] Dr. GRPO: Liu et al.
2025, arXiv:2503.20783   [4] GSPO: Zheng et al. 2025, arXiv:2507.18071   [5] k3: Schulman 2020, "Approximating KL
Divergence"   [6] AdamW: Loshchilov & Hutter 2019, arXiv:1711.05101
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))  # Ctrl-C while torch is imported; `main` sets its own

import requests

import proxy
from bucket import Arguments, BadKey, BucketError, Conflict, Corrupt, Denied, FileBucket, NotFound, open_bucket

ROLE = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
ROLE.add_argument("--role", default="all")
# The supervisor of a local run, a proxy and a report start in 0.2 s and need no torch: it is used inside functions only.
if __name__ != "__main__" or ROLE.parse_known_args()[0].role not in ("all", "proxy", "report"):
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load as load_tensors, save as save_tensors
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    import lora
    disable_progress_bar()

VERSION = "0.1.0"
LOG_RATIO_LIMIT = 20.0  # exp(20) is finite in fp32 and far beyond any ratio that still means something
UNSCORED_LIMIT = 100    # a reward may pass over many prompts, not this many in a row
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

class UserError(Exception):
    """The user's mistake: one line on stderr, exit code 2."""

class Diverged(Exception):
    """This learner's state is not the one that the log's next entry was written on; reload and fold again."""

class Lost(Exception):
    """Another learner decided this step first; its entry counts, and what was computed for ours is forgotten."""

class Busy(Exception):
    """A sampler cannot answer now (404 of a version just gone, 429, 5xx, transport): ask again, with back-off."""

class Stopped(SystemExit):
    """Ctrl-C or SIGTERM."""

class Refused(Exception):
    """A sampler will never answer this request (400): leave the prompt out."""

def say(word: str, /, **values) -> None:
    """Prints one key=value line; floats with 4 significant digits, nan for what was not measured."""
    tell(" ".join([word, *(f"{k}={number(v)}" for k, v in values.items())]).strip(), sys.stdout)

def number(value):
    return "nan" if value is None else f"{value:.4g}" if isinstance(value, float) else value

def is_terminal(stream) -> bool:
    """True where a line may redraw itself; NO_COLOR or TERM=dumb ask for plain lines."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

def tell(line: str, stream) -> None:
    """One line; on a terminal it takes the place of a live line that may stand there."""
    print(f"\r\033[K{line}" if is_terminal(stream) else line, file=stream, flush=True)

def show_step(row: dict, steps: int, mean_step_s: float) -> None:
    """A finished step: all its values as key=value; on a terminal one short line that redraws itself, each tenth stays."""
    if not is_terminal(sys.stdout):
        return say("", **row)
    step, left_s = row["step"], int((steps - row["step"]) * mean_step_s)
    line = (f"step {step}/{steps} reward {number(row['reward'])} ratio {number(row['ratio'])} staleness {number(row['staleness_mean'])}"
            f" queue {row['queue_groups']} {row['tok_s']:.0f} tok/s {datetime.timedelta(seconds=left_s)} left")
    stays = step % 10 == 0 or step >= steps
    print(f"\r\033[K{line[:shutil.get_terminal_size().columns - 1]}", end="\n" if stays else "", flush=True)

def warn(message: str) -> None:
    tell(f"warning: {message}", sys.stderr)

def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

def is_out_of_memory(error: BaseException) -> bool:
    """torch says it in two ways, on CUDA and on the CPU."""
    return isinstance(error, RuntimeError) and re.search("out of memory|can't allocate memory", str(error)) is not None

def crash_point(name: str, step: int) -> None:
    """Dies like a lost machine at one named point of one step, when GRPO_CRASH=name:step asks for it (for tests)."""
    if os.environ.get("GRPO_CRASH") == f"{name}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)

class Wait:
    """A wait that is never silent: says what it waits for after 5 s, then every 15 s, and gives up at its limit.

    What is awaited mostly comes soon: the first look follows after a `share` of the pause, each later one 1.5 times as late."""

    def __init__(self, limit_s: float, share: float = 0.2):
        self.start, self.limit_s, self.next_word_s, self.share = time.monotonic(), limit_s, 5.0, share

    def tick(self, what: str, pause_s: float) -> None:
        """Pauses. BucketError when the limit (seconds; 0 is none) has passed."""
        waited = time.monotonic() - self.start
        if self.limit_s and waited > self.limit_s:
            raise BucketError(f"waited {waited:.0f} s for {what}; --wait-s sets this limit")
        if waited > self.next_word_s:
            self.next_word_s += 15
            tell(f"waiting {waited:.0f} s for {what}", sys.stderr)
        time.sleep(pause_s * self.share)
        self.share = min(1.0, 1.5 * self.share)

# ---------------------------------------------------------------- 1. Tasks and rewards

@dataclass
class Task:
    """What is asked and how answers are scored. rows: {"prompt": text or chat messages, other columns}."""
    rows: list[dict]
    eval_rows: list[dict]
    rewards: list[tuple]        # (name, weight, function with TRL's signature)
    tokenizer: object
    timeout_s: float = 60.0
    failures: dict = field(default_factory=dict)  # reward name: calls in a row that raised or hung

    def encode(self, prompt) -> list[int]:
        """Token ids of a prompt: text as it is, chat messages through the tokenizer's template."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def score(self, row: dict, completions: list) -> list[float | None]:
        """Weighted sum of the reward functions for each lora.Completion; None where no function gave a number."""
        n, ids = len(completions), [c.token_ids for c in completions]
        texts = [self.tokenizer.decode(i, skip_special_tokens=True) for i in ids]
        answers = texts if isinstance(row["prompt"], str) else [[{"role": "assistant", "content": t}] for t in texts]
        columns = {k: [v] * n for k, v in row.items() if k != "prompt"}
        columns |= {"prompts": [row["prompt"]] * n, "completions": answers, "completion_ids": ids,
                    "finish_reasons": [c.finish_reason for c in completions]}
        totals: list[float | None] = [None] * n
        for name, weight, function in self.rewards:
            values = self.call(name, function, columns, n)
            if values is None:
                return [None] * n
            for i, value in enumerate(values):
                totals[i] = totals[i] if value is None else (totals[i] or 0.0) + weight * value
        return [x if x is not None and abs(x) < 3e38 else None for x in totals]  # a group holds fp32

    def call(self, name: str, function, columns: dict, n: int) -> list[float | None] | None:
        """One reward function, in a thread of its own so that a hang costs `timeout_s` and not the actor.

        An exception or a hang (None) leaves the n rollouts out, and three in a row are the user's mistake; so is a result of
        the wrong length, at once. NaN and infinities count as None."""
        accepts, box = inspect.signature(function).parameters, {}
        if not any(p.kind is p.VAR_KEYWORD for p in accepts.values()):
            columns = {k: v for k, v in columns.items() if k in accepts}

        def work():
            try:
                box["values"] = [None if v is None else float(v) for v in function(**columns)]
            except BaseException as error:  # whatever a user's function raises, exit() too, is reported under its name
                box["error"] = f"raised {type(error).__name__}: {one_line(error)}"
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if "values" not in box:
            self.failures[name] = self.failures.get(name, 0) + 1
            problem = f"reward {name} {box.get('error', f'did not return within {self.timeout_s:g} s')}"
            if self.failures[name] >= 3:
                raise UserError(f"{problem}, for the third time in a row; mend it and take an empty bucket: a run keeps its reward")
            warn(f"{problem}; the {n} rollouts of this group are left out")
            return None
        self.failures[name], values = 0, box["values"]
        if len(values) != n:
            raise UserError(f"reward {name} returned {len(values)} values for {n} completions; return one for each")
        finite = [v if v is not None and math.isfinite(v) else None for v in values]
        if any(v is not None and f is None for v, f in zip(values, finite)):
            warn(f"reward {name} returned {values}: rollouts without a finite reward are left out")
        return finite

NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")

def add_reward(completions, answer, finish_reasons, **_) -> list[float]:
    """1 when the completion ended by itself and its last number is the sum."""
    return [float(reason == "stop" and re.findall(r"\d+", text)[-1:] == [str(want)])
            for text, want, reason in zip(completions, answer, finish_reasons)]

def math_reward(completions, answer, **_) -> list[float]:
    """1 when the completion's final answer equals the `answer` column: the last \\boxed{}, else what follows the last
    ####, else the last number (or, where the answer is a letter A to J, the last such letter standing alone)."""
    def canonical(text: str) -> str:
        text = text.strip().strip("$. ").replace(",", "")
        return repr(float(text)) if re.fullmatch(r"[-+]?\d*\.?\d+", text) else text.upper()

    def final(text: str, is_letter: bool) -> str:
        boxed, hashed = re.findall(r"\\boxed\{([^{}]*)\}", text), re.findall(r"####[ \t]*([^\n]*)", text)
        found = re.findall(r"(?<![A-Za-z])[A-J](?![A-Za-z])", text) if is_letter else NUMBER.findall(text)
        return next((x[-1] for x in (boxed, hashed, found) if x), "")
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    wants = [final(a, False) if "####" in a else a for a in map(str, answer)]  # GSM8K's answers end in "#### n"
    return [float(canonical(final(t, re.fullmatch(r"\s*[A-J]\s*", w) is not None)) == canonical(w))
            for t, w in zip(texts, wants)]

def read_rows(text: str, name: str) -> list[dict]:
    """The rows of a JSON-lines file; UserError naming file and line for what is not one."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also cut at U+2028, which JSON allows in a string
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} line {number}: not JSON ({getattr(error, 'msg', error)}); expected one object per line") from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
        if not prompt or not (is_chat or isinstance(prompt, str)):
            raise UserError(f'{name} line {number}: expected "prompt" as text or chat messages, got {line if prompt is None else repr(prompt):.80}')
        rows.append(row)
    if not rows:
        raise UserError(f"{name}: no rows; expected JSON lines with a prompt column")
    return rows

def load_reward(spec: str) -> tuple[str, float, object, str]:
    """FILE.py:FUNCTION[=WEIGHT] as (name, weight, function, sha256 of the file)."""
    match = re.fullmatch(r"(.+\.py):(\w+)(?:=([-+.\deE]+))?", spec)
    if not match or not Path(match[1]).is_file():
        raise UserError(f"--reward {spec}: expected FILE.py:FUNCTION or FILE.py:FUNCTION=WEIGHT, of a file that exists")
    path, name, weight = match[1], match[2], float(match[3] or 1)
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises
        raise UserError(f"--reward {spec}: {type(error).__name__}: {one_line(error)}") from None
    if not callable(getattr(module, name, None)):
        raise UserError(f"--reward {spec}: {path} has no function {name}")
    return name, weight, getattr(module, name), hashlib.sha256(Path(path).read_bytes()).hexdigest()

# ---------------------------------------------------------------- 2. The mathematics of GRPO

def advantages(rewards: list[float], scale_by_std: bool = True) -> list[float]:
    """(reward - mean) / (std + 1e-6) over one group [1], population std (ddof 0).

    Exactly 0 for fewer than two rewards or max == min: the formula alone would turn fp noise into advantages."""
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((x - mean) ** 2 for x in rewards) / len(rewards))
    return [(x - mean) / (std + 1e-6 if scale_by_std else 1.0) for x in rewards]

def log_ratio(learner_logprobs, sampler_logprobs, mask):
    """log of r = pi_learner / pi_sampler per token [C, T], clamped to +-20.

    Subtle: masked before exp. exp(200) * 0 is NaN, and so is its gradient."""
    return (learner_logprobs - sampler_logprobs).masked_fill(~mask, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

def surrogate(ratio, advantage, low: float, high: float):
    """-min(r A, clip(r, 1 - low, 1 + high) A), elementwise [1]."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)

def k3(learner_logprobs, reference_logprobs, mask):
    """Estimate of KL(learner || reference) per token [C, T]: exp(d) - d - 1 with d = reference - learner [5].

    Subtle: over the learner's own samples its mean gradient is that of KL(reference || learner), as in GRPO [1]."""
    d = log_ratio(reference_logprobs, learner_logprobs, mask)
    return d.exp() - d - 1

def completion_means(per_token, mask):
    """Mean over each completion's trained tokens, [C, T] -> [C]; 0 for a completion without any."""
    return (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)

# Each loss takes log ratios [C, T], the mask of trained tokens [C, T], advantages [C], the clip bounds, the cap on r
# (inf: none) and a penalty per token [C, T] (beta k3 r; 0 without --kl). It returns (sum, count); a step divides the sum
# over all its chunks by the sum of their counts, so it adds up exactly however it is cut.

def dapo_loss(log_r, mask, advantage, low, high, cap, penalty):
    """Token-level loss [2]: sum over all trained tokens / their number."""
    ratio = log_r.exp().clamp(max=cap)
    return ((surrogate(ratio, advantage[:, None], low, high) + penalty) * mask).sum(), mask.sum()

def grpo_loss(log_r, mask, advantage, low, high, cap, penalty):
    """Mean over completions of the mean over their tokens [1]."""
    ratio = log_r.exp().clamp(max=cap)
    per_token = surrogate(ratio, advantage[:, None], low, high) + penalty
    return completion_means(per_token, mask).sum(), mask.any(1).sum()

def dr_grpo_loss(log_r, mask, advantage, low, high, cap, penalty, max_tokens):
    """No length and no std normalisation [3]: token sum / (trained rollouts x max tokens); advantages come without std."""
    return dapo_loss(log_r, mask, advantage, low, high, cap, penalty)[0], mask.any(1).sum() * max_tokens

def gspo_loss(log_r, mask, advantage, low, high, cap, penalty):
    """Sequence-level ratio [4]: r = exp(mean log ratio of the completion), so its length never enters r."""
    ratio = completion_means(log_r, mask).exp().clamp(max=cap)
    per_completion = surrogate(ratio, advantage, low, high) * mask.any(1) + completion_means(penalty, mask)
    return per_completion.sum(), mask.any(1).sum()

LOSSES = {"dapo": (dapo_loss, 0.2, 0.28), "grpo": (grpo_loss, 0.2, 0.2), "dr_grpo": (dr_grpo_loss, 0.2, 0.2),
          "gspo": (gspo_loss, 3e-4, 4e-4)}  # name: function, default clip distance below and above 1

def normaliser(update: dict, trained_tokens: list[int]) -> float:
    """The count that the loss will return, known beforehand from the trained tokens of each completion."""
    completions = sum(n > 0 for n in trained_tokens)
    by_loss = {"dapo": sum(trained_tokens), "dr_grpo": completions * update["max_tokens"]}
    return float(by_loss.get(update["loss"], completions))

# ---------------------------------------------------------------- 3. Packing and gradients

@dataclass
class Group:
    """One prompt's completions: what an actor writes and a learner trains on. Lists have one item per rollout."""
    prompt_id: int
    prompt_ids: list[int]
    completion_ids: list[list[int]]
    sampler_logprobs: list[list[float]]
    rewards: list[float]
    versions: list[int]
    truncated: list[bool]
    text: dict = field(default_factory=dict)            # {"prompt", "completions", "rewards"}: for people
    adapter_sha256: dict = field(default_factory=dict)  # of each version's weights
    key: str = ""

    @property
    def is_equal(self) -> bool:
        return len(self.rewards) < 2 or max(self.rewards) == min(self.rewards)

    def trained_tokens(self, update: dict) -> list[int]:
        """Tokens of each completion that enter the loss: 0 for one that has no gradient or is masked."""
        if self.is_equal and not update["kl"]:
            return [0] * len(self.rewards)
        return [0 if update["mask_truncated"] and is_cut else len(ids)
                for ids, is_cut in zip(self.completion_ids, self.truncated)]

@dataclass
class Policy:
    """A frozen base with LoRA slots. In a learner slot 0 trains and slot 1 re-scores under a rollout's own version.

    Where every layer is full attention, and the model lets us compute it, completions stand behind one shared prompt."""
    model: object
    lora: object
    tokenizer: object
    stop_ids: list[int]
    shares_prompts: bool = field(init=False)

    def __post_init__(self):
        config, kind = self.model.config.get_text_config(), "branches" if self.model.device.type == "cpu" else "flex_attention"
        kinds = getattr(config, "layer_types", None)
        if set(kinds) <= {"full_attention"} if kinds else not getattr(config, "sliding_window", None):
            lora.AttentionInterface.register("branches", lora.branch_attention)
            self.model.set_attn_implementation(kind)
        self.shares_prompts = config._attn_implementation == kind

@dataclass
class Rows:
    """Packed completions. One row holds all pieces: a prompt once, its completions behind it; a token sees the prompt and
    its own completion. Where prompts cannot be shared every completion has a row. The last token of a completion is only
    a target, so it takes no place."""
    ids: object               # [B, W] token ids
    positions: object         # [B, W] position in its own sequence: every completion continues after the prompt
    lengths: list             # of each piece: tokens of its prompt, then of its completions
    predictor: object         # [C, T] index into B*W of the token whose output predicts target [c, t]
    targets: object           # [C, T] token ids
    mask: object              # [C, T] bool, true where there is a target
    sampler_logprobs: object  # [C, T]
    advantage: object         # [C]

def pieces(groups: list[Group], update: dict, budget: int, share: bool) -> list[tuple]:
    """Cuts groups into (prompt ids, [(ids, sampler logprobs, advantage)]) of at most `budget` tokens where possible;
    with share=False one completion each, for models whose layers are not all full attention."""
    found = []
    for g in groups:
        size = budget + 1  # more than a piece: the first completion opens one
        scaled = advantages(g.rewards, update["loss"] != "dr_grpo")
        for ids, sampler, a, n in zip(g.completion_ids, g.sampler_logprobs, scaled, g.trained_tokens(update)):
            if n and (size + n - 1 > budget or not share):
                found.append((g.prompt_ids, []))
                size = len(g.prompt_ids)
            if n:
                found[-1][1].append((ids, sampler, a))
                size += n - 1
    return found

def pack(groups: list[Group], update: dict, budget: int, share: bool, device="cpu") -> list[Rows]:
    """First-fit decreasing of the groups' pieces into forwards of at most `budget` tokens, padding included, or of one piece."""
    def tokens(batch):
        lengths = [len(prompt) + sum(len(ids) - 1 for ids, _, _ in completions) for prompt, completions in batch]
        return sum(lengths) if share else len(lengths) * max(lengths)
    batches, found = [], pieces(groups, update, budget, share)
    for piece in sorted(found, key=lambda piece: tokens([piece]), reverse=True):  # stable: keeps the groups' order
        batch = next((b for b in batches if tokens([*b, piece]) <= budget), None)
        if batch is None:
            batches.append(batch := [])
        batch.append(piece)
    return [fill(batch, 1 if share else tokens(batch[:1]), device) for batch in batches]

def fill(batch: list[tuple], width: int, device) -> Rows:
    """The tensors of a batch of pieces: one behind another in one row (width 1), or each padded to a row of `width`."""
    ids, positions, lengths, predictor, targets, sampler, advantage = ([] for _ in range(7))
    for prompt_ids, completions in batch:
        P = len(prompt_ids)
        last = len(ids) + P - 1
        ids += prompt_ids
        positions += range(P)
        for tokens, logprobs, a in completions:
            n = len(tokens) - 1
            predictor.append([last, *range(len(ids), len(ids) + n)])
            targets.append(tokens)
            sampler.append(logprobs)
            advantage.append(a)
            ids += tokens[:-1]
            positions += range(P, P + n)
        lengths.append([P, *(len(tokens) - 1 for tokens, _, _ in completions)])
        for column in (ids, positions):
            column += [0] * (-len(column) % width)

    def padded(lists, dtype):
        T = max(map(len, lists))
        return torch.tensor([list(x) + [0] * (T - len(x)) for x in lists], dtype=dtype, device=device)  # [C, T]
    mask = padded([[1] * len(t) for t in targets], torch.bool)
    ids, positions = (torch.tensor(x, device=device).view(-1, width if width > 1 else len(x)) for x in (ids, positions))
    return Rows(ids, positions, lengths, padded(predictor, torch.long), padded(targets, torch.long), mask,
                padded(sampler, torch.float32), torch.tensor(advantage, dtype=torch.float32, device=device))

def attention_mask(rows: Rows, policy: Policy):
    """Which token sees which: lora.branch_attention's table of lengths, or flex attention's BlockMask of the same rule.

    None without shared prompts: one sequence per row, padding behind it, so causality is enough, windows or not."""
    if not policy.shares_prompts:
        return None
    longest, device = max(map(len, rows.lengths)), rows.ids.device
    table = torch.tensor([x + [0] * (longest - len(x)) for x in rows.lengths], device=device)  # [pieces, segments]
    if policy.model.config._attn_implementation != "flex_attention":
        return table[None, None]
    from torch.nn.attention.flex_attention import create_block_mask
    segment = torch.arange(table.numel(), device=device).repeat_interleave(table.flatten())  # [W]
    piece, is_prompt = segment // longest, segment % longest == 0

    def sees(b, h, q, k):
        return (k <= q) & (piece[q] == piece[k]) & (is_prompt[k] | (segment[q] == segment[k]))
    return create_block_mask(sees, None, None, len(segment), len(segment), device=device)

def row_logprobs(policy: Policy, rows: Rows, slot: int | None, temperature: float):
    """Learner logprobs [C, T] (0 where there is no target) and entropies [N] of the targets under a slot (None: base)."""
    with policy.lora.use(slot):
        hidden = lora.backbone(policy.model)(
            input_ids=rows.ids, position_ids=rows.positions, use_cache=False,
            attention_mask=attention_mask(rows, policy)).last_hidden_state  # [B, W, d]
    head = lora.head(policy.model)
    taken = hidden.flatten(0, 1)[rows.predictor[rows.mask]]  # [N, d]
    logprobs, entropy = lora.token_logprobs(taken, head.weight, head.bias, rows.targets[rows.mask], temperature)
    return torch.zeros(rows.mask.shape, device=logprobs.device).masked_scatter(rows.mask, logprobs), entropy

def chunk_gradient(policy: Policy, groups: list[Group], update: dict, budget: int) -> tuple[dict, dict]:
    """The gradient of the summed loss of some groups under the adapter in slot 0: ({name: fp32 CPU tensor}, sums).
    `update` holds the scalars of the step's entry.

    sums are what a step's metrics are made of: ratio, kl, entropy and clipped run over trained tokens."""
    policy.lora.train(0)
    parameters = policy.lora.parameters(0)
    for p in parameters.values():
        p.grad = None
    rewards = [x for g in groups for x in g.rewards]
    sums = dict.fromkeys(("count", "loss", "ratio", "kl", "entropy", "clipped", "trained_tokens"), 0.0)
    sums |= {"rollouts": len(rewards), "reward": sum(rewards), "truncated": sum(sum(g.truncated) for g in groups),
             "completion_tokens": sum(len(i) for g in groups for i in g.completion_ids)}
    loss_function, low, high, cap = LOSSES[update["loss"]][0], update["clip_low"], update["clip_high"], update["tis"] or math.inf
    extra = {"max_tokens": update["max_tokens"]} if update["loss"] == "dr_grpo" else {}
    for rows in pack(groups, update, budget, policy.shares_prompts, policy.model.device):
        learner_logprobs, entropy = row_logprobs(policy, rows, 0, update["temperature"])
        log_r = log_ratio(learner_logprobs, rows.sampler_logprobs, rows.mask)
        kl = penalty = torch.zeros_like(log_r)
        if update["kl"]:
            with torch.no_grad():
                reference_logprobs, _ = row_logprobs(policy, rows, None, update["temperature"])
            kl = k3(learner_logprobs, reference_logprobs, rows.mask)
            penalty = update["kl"] * kl * log_r.detach().exp().clamp(max=cap)
        loss, count = loss_function(log_r, rows.mask, rows.advantage, low, high, cap, penalty, **extra)
        with policy.lora.use(0):  # --recompute runs the layers again in here
            loss.backward()
        ratio, a = log_r.detach().exp(), rows.advantage[:, None]
        judged = completion_means(log_r.detach(), rows.mask).exp()[:, None] if update["loss"] == "gspo" else ratio
        clipped = rows.mask & (((judged > 1 + high) & (a > 0)) | ((judged < 1 - low) & (a < 0)))
        for name, value in (("count", count), ("loss", loss), ("ratio", ratio[rows.mask].sum()), ("kl", kl[rows.mask].sum()),
                            ("entropy", entropy.sum()), ("clipped", clipped.sum()), ("trained_tokens", rows.mask.sum())):
            sums[name] += value.item()
    return {n: torch.zeros(p.shape) if p.grad is None else p.grad.float().cpu() for n, p in parameters.items()}, sums

def rescore(policy: Policy, group: Group, tensors: dict, run: dict, budget: int) -> tuple[float, int]:
    """Sum of |learner - sampler logprob| over a group's tokens under the adapter that sampled them, and their number."""
    policy.lora.load(1, tensors)
    everything, total, n = run | {"kl": 1.0, "mask_truncated": False}, 0.0, 0
    with torch.no_grad():
        for rows in pack([group], everything, budget, policy.shares_prompts, policy.model.device):
            logprobs, _ = row_logprobs(policy, rows, 1, run["temperature"])
            total += (logprobs - rows.sampler_logprobs)[rows.mask].abs().sum().item()
            n += int(rows.mask.sum())
    return total, n

# ---------------------------------------------------------------- 4. The log: objects, entries, state

def digest(tensors: dict) -> str:
    """sha256 over tensors in name order: name, shape, values as little-endian fp32 (integers as int64)."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu()
        t = t.to(torch.float32 if t.is_floating_point() else torch.int64).contiguous()
        h.update(f"{name} {list(t.shape)}\n".encode())
        h.update(memoryview(t.numpy()).cast("B") if t.numel() else b"")
    return h.hexdigest()

def pack_object(kind: str, tensors: dict, **header) -> bytes:
    """A safetensors object with a named, versioned JSON header that holds the sha256 of its tensors."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header = {"format": f"async-grpo-{kind}", "version": 1, "sha256": digest(tensors), **header}
    header["header_sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    return save_tensors(tensors, {"json": json.dumps(header, sort_keys=True)})

def read_header(data: bytes) -> dict:
    return json.loads(json.loads(data[8:8 + int.from_bytes(data[:8], "little")])["__metadata__"]["json"])

def unpack_object(kind: str, data: bytes, run_id: str) -> tuple[dict, dict]:
    """(tensors, header) of an object of `pack_object`; Corrupt when anything about it is not as written."""
    try:
        header, tensors = read_header(data), load_tensors(data)
        if header.pop("header_sha256") != hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest():
            raise ValueError("its header was changed")
    except Exception as error:  # safetensors, JSON, key and unicode errors alike: these bytes are not an object of ours
        raise Corrupt(f"not a {kind}: {type(error).__name__}: {error}") from None
    if (got := (header.get("format"), header.get("version"), header.get("run_id"))) != (f"async-grpo-{kind}", 1, run_id):
        raise Corrupt(f"not a {kind} of this run: got {got}")
    if digest(tensors) != header.get("sha256"):
        raise Corrupt(f"{kind}: its tensors do not have the sha256 in its header")
    return tensors, header

def write_group(g: Group, run: dict) -> bytes:
    flat_ids, flat_logprobs = (list(itertools.chain(*x)) for x in (g.completion_ids, g.sampler_logprobs))
    tensors = {"prompt_ids": g.prompt_ids, "lengths": [len(i) for i in g.completion_ids], "completion_ids": flat_ids,
               "versions": g.versions, "truncated": [int(x) for x in g.truncated]}
    floats = {"sampler_logprobs": flat_logprobs, "rewards": g.rewards}
    tensors = {k: torch.tensor(v) for k, v in tensors.items()} | {k: torch.tensor(v, dtype=torch.float32) for k, v in floats.items()}
    return pack_object("group", tensors, run_id=run["run_id"], prompt_id=g.prompt_id, text=g.text, adapter_sha256=g.adapter_sha256)

def read_group(data: bytes, key: str, run: dict) -> Group:
    """The group, or Corrupt for anything a learner must not train on: shapes, ranges, finiteness, versions."""
    t, header = unpack_object("group", data, run["run_id"])
    try:
        lengths, K = t["lengths"].tolist(), len(t["rewards"])
        ids, logprobs = t["completion_ids"].split(lengths), t["sampler_logprobs"].split(lengths)
        vocabulary = torch.cat([t["prompt_ids"], t["completion_ids"]])
        is_sane = (all(x.ndim == 1 and x.is_floating_point() == (name in ("sampler_logprobs", "rewards")) for name, x in t.items()) and 1 <= K <= run["group_size"] and len(lengths) == len(t["versions"]) == len(t["truncated"]) == K
                   and 1 <= min(lengths) and max(lengths) <= run["max_tokens"] and 0 < len(t["prompt_ids"]) <= run["max_prompt_tokens"]
                   and t["sampler_logprobs"].isfinite().all() and (t["sampler_logprobs"] <= 1e-4).all()
                   and t["rewards"].isfinite().all() and 0 <= vocabulary.min() and vocabulary.max() < run["vocabulary"]
                   and int(t["versions"].min()) == number_in(key))
    except (KeyError, RuntimeError, ValueError) as error:
        raise Corrupt(f"tensors do not fit together: {error}") from None
    if not is_sane:
        raise Corrupt("a shape, range, version or finiteness check fails")
    return Group(header["prompt_id"], t["prompt_ids"].tolist(), [i.tolist() for i in ids], [x.tolist() for x in logprobs],
                 t["rewards"].tolist(), t["versions"].tolist(), t["truncated"].bool().tolist(), header["text"],
                 header["adapter_sha256"], key)

def read_twice(bucket, key: str, parse):
    """What `parse` makes of an object, or why it is invalid: judged after a second read, as a transfer may fail."""
    for _ in range(2):
        try:
            return parse(bucket.get(key))
        except Corrupt as error:
            problem = f"invalid: {error}"
    return problem

def number_in(key: str) -> int:
    """The version of a group's or an adapter's key, the step of any other: the six digits of its second segment."""
    return int(key.split("/")[1].lstrip("v")[:6])

def listed(bucket, prefix: str, start_after: str = "") -> list[str]:
    """The keys of the log below a prefix; what else lies in a folder (.DS_Store, .nfs…) is no business of ours."""
    return [k for k in bucket.list(prefix, start_after=start_after) if re.match(r"[a-z]+/v?\d{6}\b(?!.*~$)", k)]

def manifests(bucket, prefix: str) -> list[int]:
    """Versions of adapters/ or steps of checkpoints/ whose manifest is there, in order."""
    return sorted(number_in(k) for k in listed(bucket, prefix) if k.endswith("/manifest.json"))

class Log:
    """The entries of steps/, read once each."""

    def __init__(self, bucket, run: dict):
        self.bucket, self.run, self.newest, self.entries, self.listed_at = bucket, run, 0, {}, -math.inf

    def refresh(self, max_age_s: float = 0.0) -> int:
        """The newest step decided so far; listed anew unless that was done within `max_age_s`."""
        if time.monotonic() - self.listed_at < max_age_s:
            return self.newest
        self.listed_at = time.monotonic()
        for key in listed(self.bucket, "steps/", f"steps/{self.newest:06d}.json"):
            self.newest = max(self.newest, number_in(key))
        return self.newest

    def read(self, step: int) -> dict:
        """The entry that decides a step. An unreadable one ends the run: nothing can be folded past it."""
        if step not in self.entries:
            try:
                entry = dict(json.loads(self.bucket.get(f"steps/{step:06d}.json")))
            except (ValueError, TypeError) as error:
                raise BucketError(f"steps/{step:06d}.json is not an entry ({error}): the log cannot be folded past it") from None
            got = entry.get("format"), entry.get("version"), entry.get("run_id"), entry.get("step")
            if got != ("async-grpo-step", 1, self.run["run_id"], step):
                raise BucketError(f"steps/{step:06d}.json: expected this run's entry {step}, got {got}")
            self.entries[step] = entry
        return self.entries[step]

    def named(self, first: int, last: int) -> dict[str, int]:
        """{group key: step} of every group that entries first..last train or drop."""
        return {key: t for t in range(max(1, first), last + 1) for key in named_groups(self.read(t))}

def named_groups(entry: dict) -> list[str]:
    return [key for chunk in entry["chunks"] for key in chunk] + list(entry["dropped"])

@dataclass
class State:
    """What is folded: the adapter and AdamW's moments, fp32 on the CPU. updates counts the steps that changed it."""
    step: int
    updates: int
    adapter: dict
    exp_avg: dict
    exp_avg_sq: dict

    def tensors(self) -> dict:
        kinds = {"adapter": self.adapter, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {f"{kind}.{n}": t for kind, named in kinds.items() for n, t in named.items()} | {"updates": torch.tensor([self.updates])}

    @classmethod
    def of(cls, step: int, tensors: dict) -> State:
        kinds = ({n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}
                 for kind in ("adapter.", "exp_avg.", "exp_avg_sq."))
        return cls(step, int(tensors["updates"]), *kinds)

def apply(state: State, update: dict, parts: list[dict]) -> tuple[State, float]:
    """State t from state t-1, the entry's scalars and the parts' tensors in chunk order; also the gradient's norm.

    A left fold in fp32, one clip (norm in float64, coefficient rounded to fp32), then AdamW [6] written out. A sum that
    is not finite, or a count of 0, changes nothing but the step. Subtle: one elementwise operation at a time. Fused
    kernels (and alpha=, addcmul) round differently between builds, and every learner must get the same bits."""
    grads = dict(parts[0])
    for part in parts[1:]:
        grads = {name: g + part[name] for name, g in grads.items()} if part and grads else {}
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values())) if grads else math.nan
    norm /= update["normaliser"] or 1.0
    if not update["normaliser"] or not math.isfinite(norm):
        return replace(state, step=state.step + 1), norm
    scale = min(1.0, update["clip_norm"] / norm) if update["clip_norm"] and norm else 1.0
    b1, b2, lr, k = update["beta1"], update["beta2"], update["lr"], state.updates + 1
    new = State(state.step + 1, k, {}, {}, {})
    for name, g in grads.items():
        g = (g / update["normaliser"]) * torch.tensor(scale, dtype=torch.float32)
        m = state.exp_avg[name] * b1 + g * (1 - b1)
        v = state.exp_avg_sq[name] * b2 + (g * g) * (1 - b2)
        denominator = v.sqrt() / math.sqrt(1 - b2 ** k) + update["eps"]
        decayed = state.adapter[name] * (1 - lr * update["weight_decay"])
        new.adapter[name] = decayed - (m / denominator) * (lr / (1 - b1 ** k))
        new.exp_avg[name], new.exp_avg_sq[name] = m, v
    return new, norm

def policy_version(step: int, run: dict) -> int:
    """The newest version published once `step` is applied: one every sync_steps steps."""
    return step // run["sync_steps"]

def learning_rate(step: int, steps: int, run: dict) -> float:
    """Linear warm-up over warmup_steps, then constant, or linear to a tenth at the last step."""
    warm = min(1.0, step / max(1, run["warmup_steps"]))
    left = min(1.0, max(0.0, (steps - step) / max(1, steps - run["warmup_steps"])))
    return run["lr"] * warm * (1.0 if run["lr_schedule"] == "constant" else 0.1 + 0.9 * left)

def step_metrics(entry: dict, sums: list[dict], grad_norm: float, run: dict) -> dict:
    """A step's line of the learning curve, from its entry and the sums of its parts alone; None is not measured."""
    total = {name: sum(s.get(name, 0) for s in sums) for name in {n for s in sums for n in s}}
    def per(name, count):  # noqa: E306
        value = total[name] / total[count] if total.get(count) else math.nan
        return value if math.isfinite(value) else None
    keys = [k for chunk in entry["chunks"] for k in chunk]
    staleness = [policy_version(entry["step"] - 1, run) - number_in(k) for k in keys]
    return {"step": entry["step"], "version": entry["policy_version"], "reward": per("reward", "rollouts"),
            "ratio": per("ratio", "trained_tokens"), "kl": per("kl", "trained_tokens") if run["kl"] else None,
            "entropy": per("entropy", "trained_tokens"), "clip_frac": per("clipped", "trained_tokens"),
            "loss": per("loss", "count"), "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "staleness_mean": sum(staleness) / len(staleness), "staleness_max": max(staleness), "groups": len(keys),
            "groups_equal": entry["groups_equal"], "dropped": len(entry["dropped"]),
            "mismatch": per("mismatch", "mismatch_tokens"), "tokens": int(total["trained_tokens"]),
            "completion_tokens": per("completion_tokens", "rollouts"), "truncated": per("truncated", "rollouts")}

# ---------------------------------------------------------------- 5. The learner

class Behind:
    """Writes in the order given, behind the learner's back. After a failure nothing more is written until `landed` has
    raised it: what lies in the bucket is always the beginning of what was asked for."""

    def __init__(self):
        self.thread, self.last, self.waited_s = ThreadPoolExecutor(1), None, 0.0

    def write(self, function, *args) -> None:
        before = self.last

        def job():
            if before:
                before.result()
            return function(*args)
        self.last = self.thread.submit(job)

    def landed(self):
        """Waits until everything is written; what the last write returned. Raises the first failure, once."""
        last, self.last, began = self.last, None, time.monotonic()
        try:
            return last.result() if last else None
        finally:
            self.waited_s += time.monotonic() - began

class Learner:
    """Decides, computes, folds and publishes; everything it knows can be rebuilt from the bucket.

    A bucket may be far, so a learner that is alone does not wait for it: the entry is on its way while its chunks are
    computed, and a part while the next step is. Two rules keep the log true: writes land in order, and no part is
    written, nor its step applied, before the entry has landed as the one that counts. At most one part is unlanded."""

    def __init__(self, bucket, run: dict, args, policy: Policy, task: Task):
        self.bucket, self.run, self.args, self.policy, self.task = bucket, run, args, policy, task
        self.id, self.log, self.pool = os.urandom(4).hex(), Log(bucket, run), ThreadPoolExecutor(8)
        self.behind, self.keeper = Behind(), Behind()  # entries, parts, adapters in order; checkpoints and cleaning
        self.groups: dict[str, Group | str] = {}  # not yet named by an entry, or why the next one will drop it
        self.consumed: dict[str, int] = {}        # key: step of the entry that names it, if recent
        self.metrics: dict = {}                   # of the last step applied; the next entry carries them
        self.mean_step_s = 0.0
        self.clock = dict.fromkeys(("wait_s", "fwd_bwd_s", "apply_s", "sync_s"), 0.0)
        self.unmoved = self.queue_groups = self.place = self.decided = 0
        self.canary_base = self.mismatch = None
        self.member = proxy.Member(bucket, "learner", run_id=run["run_id"], id=self.id)
        self.member.update(steps=args.steps, behind=2)
        self.learners, self.actors = proxy.LiveMembers(bucket, "learner"), proxy.LiveMembers(bucket, "actor")
        self.company, self.pace_s, self.is_alone, self.is_warm = [self.id], 0.0, False, False  # pace: seconds per trained token; 0 is unknown

    # ---- start and recovery

    def start(self) -> None:
        if not self.bucket.probe():
            self.refuse_company()
        self.member.start()
        self.at_start = self.catch_up()

    def catch_up(self) -> int:
        """Loads the newest trusted checkpoint and learns which groups there are and which the log has already named,
        whatever was known or on its way before. Returns the newest step decided."""
        with contextlib.suppress(Diverged, Lost):
            self.behind.landed()
        self.decided, newest = 0, self.log.refresh()
        young = policy_version(newest, self.run) - self.run["max_staleness"]
        oldest = max(0, min([young, *map(number_in, listed(self.bucket, "groups/"))]) * self.run["sync_steps"])
        list(self.pool.map(self.log.read, range(oldest + 1, newest + 1)))
        self.groups, self.consumed = {}, self.log.named(oldest + 1, newest)
        self.load_checkpoint()
        self.member.update(behind=newest - self.state.step)
        self.look_sent = self.pool.submit(self.look_once, "")
        self.look()  # at all groups that lie there, while all that they can be named by is known
        if newest:
            say("resumed", checkpoint=self.state.step, decided=newest, digest=self.digest[:12])
        return newest

    def refuse_company(self) -> None:
        """Without conditional writes two learners could decide one step twice: watch whether another one is alive."""
        first = {i: m["counter"] for i, m in self.learners.poll().items()}
        until = time.monotonic() + (proxy.DEAD_S if first else 0)
        while time.monotonic() < until:
            time.sleep(1)
            moved = [i for i, m in self.learners.poll().items() if m["counter"] != first.get(i)]
            if moved:
                raise BucketError(f"{self.bucket.address} ignores create-if-absent, so it can have one learner, and learner "
                                  f"{moved[0]} is alive; stop it, or use a store that honours If-None-Match")
        warn(f"{self.bucket.address} does not honour create-if-absent: this must stay the only learner")

    def load_checkpoint(self) -> None:
        """Loads the newest checkpoint (or 0) whose digest the entry after it confirms; says so when it passes one over.
        One that no entry confirms yet is no loss: an older one and the log give the same state."""
        for step in reversed([s for s in manifests(self.bucket, "checkpoints/") if s < self.log.newest or s == 0]):
            try:
                manifest = json.loads(self.bucket.get(f"checkpoints/{step:06d}/manifest.json"))
                if step < self.log.newest and self.log.read(step + 1)["digest_before"] != manifest["digest"]:
                    raise Corrupt("its digest is not the one that the next entry was written on")
                data = self.bucket.get(manifest["folder"] + "/state.safetensors")
                tensors, header = unpack_object("state", data, self.run["run_id"])
                if header["sha256"] != manifest["digest"]:  # the digest of a state is that of its tensors
                    raise Corrupt("its tensors do not have the digest in its manifest")
                state = State.of(step, tensors)
            except (NotFound, Corrupt, KeyError, ValueError) as error:
                warn(f"checkpoint {step} is passed over: {error}")
                continue
            self.state, self.digest = state, manifest["digest"]
            self.policy.lora.load(0, state.adapter)
            return
        raise BucketError(f"no checkpoint in {self.bucket.address} can be trusted; refusing to start again from the base "
                          "(take an empty bucket if that is what you want)")

    # ---- groups and entries

    def look(self, is_patient: bool = True) -> None:
        """Takes in what a look at the bucket found, if it is back or `is_patient`, and sends the next one out."""
        if not is_patient and not self.look_sent.done():
            return
        for key, group in self.look_sent.result():
            if group and key not in self.consumed:
                self.groups[key] = group
                if isinstance(group, str):
                    warn(f"{key} is set aside: {group}")
        self.member.update(set_aside=[k for k, g in self.groups.items() if isinstance(g, str)])
        # The next look is at those young enough to train on: its cost does not grow with the run.
        oldest = policy_version(self.state.step, self.run) - self.run["max_staleness"]
        self.look_sent = self.pool.submit(self.look_once, f"groups/{max(0, oldest):06d}")

    def look_once(self, start: str) -> list[tuple[str, Group | str]]:
        """Thread: the learners alive, the newest entry, and the groups not seen before, from key `start` on."""
        self.company = self.find_company()
        others = self.learners.poll(1.0).keys() - {self.id}
        self.log.refresh(0.0 if others else 1.0)  # alone, it hears of a newcomer's entry when it writes its own, too
        new = [k for k in listed(self.bucket, "groups/", start) if k not in self.groups and k not in self.consumed]
        return list(zip(new, self.pool.map(self.try_group, new)))

    def find_company(self) -> list[str]:
        """Ids of the learners among whom a step is divided, in order: those alive and at the end of the log, but for
        any that needs three times as long for a token as the fastest."""
        living = {i: m for i, m in self.learners.poll(1.0).items() if m.get("behind", 0) < 2}
        pace_s = {i: m.get("pace_s", 0.0) for i, m in living.items()} | {self.id: self.pace_s}
        limit = 3 * min((s for s in pace_s.values() if s), default=0.0)
        return sorted(i for i, s in pace_s.items() if s <= limit)

    def try_group(self, key: str) -> Group | str:
        """The group, or why it cannot be trained on; "" if it is gone."""
        try:
            return read_twice(self.bucket, key, lambda data: read_group(data, key, self.run))
        except NotFound:
            return ""

    def decide(self, step: int) -> dict | None:
        """The entry of a step if there are groups enough, else None. `gather` sees whether it came first."""
        run, version = self.run, policy_version(step - 1, self.run)
        dropped = {k: f"stale: version {number_in(k)}, learner at {version}" for k in self.groups
                   if version - number_in(k) > run["max_staleness"]}
        dropped |= {k: reason for k, reason in self.groups.items() if isinstance(reason, str)}
        usable = sorted(self.groups.keys() - dropped.keys())  # the key starts with the version: oldest first
        self.queue_groups = len(usable)
        if len(usable) < run["groups_per_step"]:
            return None
        chosen = [self.groups[k] for k in usable[:run["groups_per_step"]]]
        n = min(len(chosen), self.args.chunks or len(self.company))
        cuts = [len(chosen) * i // n for i in range(n + 1)]
        trained = [n for g in chosen for n in g.trained_tokens(run)]
        update = {k: run[k] for k in ("loss", "clip_low", "clip_high", "kl", "tis", "clip_norm", "weight_decay",
                                      "temperature", "max_tokens", "mask_truncated")} | ADAM
        update |= {"lr": learning_rate(step, self.args.steps, run), "normaliser": normaliser(update, trained),
                   "trained_tokens": sum(trained), "rollouts": len(trained)}
        entry = {"format": "async-grpo-step", "version": 1, "run_id": run["run_id"], "step": step,
                 "steps": self.args.steps, "chunks": [[g.key for g in chosen[a:b]] for a, b in zip(cuts, cuts[1:])],
                 "dropped": dropped, "update": update, "policy_version": policy_version(step, run),
                 "publish": step % run["sync_steps"] == 0, "digest_before": self.digest, "previous": self.metrics,
                 "groups_equal": sum(g.is_equal for g in chosen), "written_by": self.id, "unix_s": time.time()}
        self.decided = step
        self.behind.write(self.put_entry, entry)
        return entry

    def put_entry(self, entry: dict) -> None:
        step = entry["step"]
        crash_point("before-entry", step)
        if not self.bucket.put_new(f"steps/{step:06d}.json", json.dumps(entry, sort_keys=True).encode()):
            self.decided, self.log.newest = 0, max(self.log.newest, step)
            raise Lost(f"another learner's entry {step} came first")
        crash_point("after-entry", step)
        self.log.entries[step], self.log.newest = entry, max(self.log.newest, step)

    def next_entry(self, step: int) -> dict:
        """The entry of a step: read, or decided here as soon as there are groups. Says who is missing while it waits."""
        wait = Wait(self.args.wait_s)
        self.look(is_patient=False)
        while not (entry := self.log.read(step) if step <= self.log.newest else self.decide(step)):
            living, missing = self.actors.poll(1.0), self.actors.missing()
            gone = ", ".join(f"{i} not heard of for {s:.0f} s" for i, s in missing.items()) or "none has been seen"
            actors = (f"{len(living)} actors alive" if living else
                      f"no actor alive ({gone}); start one: --role actor --bucket {self.bucket.address}")
            wait.tick(f"groups: {self.queue_groups} of {self.run['groups_per_step']} for step {step}; {actors}",
                      poll_s(self.bucket))
            if self.place and time.monotonic() - wait.start > 2:  # the learner that publishes for all may have died
                self.publish()
            if self.place or (self.behind.last and self.behind.last.done()):
                self.behind.landed()  # a write that failed may be why no groups come
            self.look()
        if entry["digest_before"] != self.digest:
            raise Diverged(f"entry {step} was written on state {entry['digest_before'][:12]}, this learner has {self.digest[:12]}")
        if not self.args.has_steps:  # somebody else may have extended the run
            self.args.steps = max(self.args.steps, entry["steps"])
        return entry

    # ---- parts

    def gather(self, entry: dict) -> list[tuple]:
        """(tensors, header) of every part of a step: those that others wrote, and those computed here.

        Computes its own chunks first; then it waits as long as the last of them took before it takes over what the slow
        and the dead have left. A chunk computed twice is harmless: the first valid part counts."""
        n, company, began = len(entry["chunks"]), self.company, time.monotonic()
        self.is_alone = company == [self.id] and entry["step"] == self.decided  # then nobody else can have written a part
        if not self.is_alone:
            self.behind.landed()  # an entry decided here, before anybody's parts are taken for its parts
        self.place = company.index(self.id) if self.id in company else -1
        own = [c for c in range(n) if c * len(company) // n == self.place]
        order = list(dict.fromkeys(own + [(c + max(0, self.place)) % n for c in range(n)]))
        have, spoilt, sent, wait = {}, {}, None, Wait(self.args.wait_s)
        takeover_at = began + (self.pace_s * entry["update"]["trained_tokens"] / n or proxy.DEAD_S)
        while True:
            if not self.is_alone:
                self.collect(entry, have, spoilt)
            if not (missing := [c for c in order if c not in have]):
                if self.is_alone or self.behind.landed() is not False:
                    return [have[c] for c in range(n)]
                del have[sent]  # another's part of this chunk came first and counts
                continue
            chunk, began = missing[0], time.monotonic()
            if chunk in own or began >= takeover_at or self.find_company() == [self.id]:
                part = self.compute_part(entry, chunk)
                if self.behind.landed() is False:  # the entry if it was decided here, or the part before
                    have.pop(sent, None)
                self.behind.write(self.put_part, entry, chunk, spoilt.get(chunk, 0), part, self.is_alone)
                have[chunk], sent = self.read_part(part, entry, chunk), chunk
                takeover_at = 2 * time.monotonic() - began
            else:
                wait.tick(f"parts {missing} of step {entry['step']} from {company}", min(0.1, poll_s(self.bucket)))

    def put_part(self, entry: dict, chunk: int, attempt: int, data: bytes, is_applied: bool) -> bool:
        """Writes a part, create-if-absent: False if another's counts; Diverged if this learner has gone on with its own."""
        key = f"parts/{entry['step']:06d}/{chunk:03d}{f'.{attempt}' if attempt else ''}.safetensors"
        is_first = self.bucket.put_new(key, data)
        if not is_first and is_applied and read_header(self.bucket.get(key))["sha256"] != read_header(data)["sha256"]:
            raise Diverged(f"{key} was written by another learner, with other bits, while this one thought itself alone")
        crash_point("after-part", entry["step"])
        return is_first or is_applied

    def collect(self, entry: dict, have: dict, spoilt: dict) -> None:
        """Reads the parts that are there. An invalid one is set aside, and its chunk's next name is 002.1, 002.2 …"""
        def read(key: str) -> tuple[int, int, tuple | str | None]:
            chunk, _, attempt = Path(key).name.removesuffix(".safetensors").partition(".")
            chunk, attempt = int(chunk), int(attempt or 0)
            if chunk in have or attempt < spoilt.get(chunk, 0):
                return chunk, attempt, None
            return chunk, attempt, read_twice(self.bucket, key, lambda data: self.read_part(data, entry, chunk))
        keys = [k for k in listed(self.bucket, f"parts/{entry['step']:06d}/") if re.search(r"/\d+(\.\d+)?\.safetensors$", k)]
        keys.sort(key=len)  # 002 before 002.1
        for key, (chunk, attempt, part) in zip(keys, self.pool.map(read, keys)):
            if isinstance(part, str):
                warn(f"{key} is set aside: {part}")
                spoilt[chunk] = attempt + 1
            elif part:
                have.setdefault(chunk, part)

    def read_part(self, data: bytes, entry: dict, chunk: int) -> tuple[dict, dict]:
        """A part's (tensors in fp32, header); Corrupt unless it belongs to this entry, state and adapter, all finite."""
        tensors, header = unpack_object("part", data, self.run["run_id"])
        got, expected = tuple(header.get(k) for k in ("step", "chunk", "digest_before")), (entry["step"], chunk, entry["digest_before"])
        if got != expected:
            raise Corrupt(f"part of step, chunk, state {got}; expected {expected}")
        if header["is_finite"] and {n: tuple(t.shape) for n, t in tensors.items()} != self.policy.lora.shapes:
            raise Corrupt("its tensors are not those of this adapter")
        if not all(bool(t.isfinite().all()) for t in tensors.values()):
            raise Corrupt("NaN or infinity in its tensors")
        return {n: t.float() for n, t in tensors.items()}, header

    def compute_part(self, entry: dict, chunk: int) -> bytes:
        """A chunk's gradient under the state before the step, as the object of its part."""
        step, began, groups = entry["step"], time.monotonic(), []
        self.member.update(doing=f"chunk {chunk} of step {step}")
        for key in entry["chunks"][chunk]:
            group = self.groups.get(key)
            group = group if isinstance(group, Group) else self.try_group(key)
            if not isinstance(group, Group):
                raise (BucketError if group else NotFound)(
                    f"{key}, which entry {step} names, cannot be read ({group or 'gone'}), and its part is missing")
            groups.append(group)
        is_checked = chunk == 0 and step % 10 == 1 and len(set(groups[0].versions)) == 1
        fetched = self.pool.submit(self.bucket.fetch, f"adapters/v{groups[0].versions[0]:06d}") if is_checked else None
        grads, sums = chunk_gradient(self.policy, groups, entry["update"], self.args.token_budget)
        # Neither the first chunk (which compiles) nor one of mostly equal groups tells how fast this learner is.
        if self.is_warm and sums["trained_tokens"] * 2 * len(entry["chunks"]) > entry["update"]["trained_tokens"]:
            now_s = (time.monotonic() - began) / sums["trained_tokens"]
            self.pace_s = 0.7 * self.pace_s + 0.3 * now_s if self.pace_s else now_s
        self.is_warm = True
        is_finite = all(bool(g.isfinite().all()) for g in grads.values())
        if not is_finite:
            warn(f"the gradient of chunk {chunk} of step {step} is not finite: the step will change nothing")
        if fetched:
            sums["mismatch"], sums["mismatch_tokens"] = self.check_mismatch(groups[0], fetched)
        dtype = getattr(torch, self.run["part_dtype"])
        part = pack_object("part", {n: g.to(dtype) for n, g in grads.items()} if is_finite else {}, step=step,
                           chunk=chunk, digest_before=entry["digest_before"], is_finite=is_finite, sums=sums,
                           run_id=self.run["run_id"], written_by=self.id)
        self.clock["fwd_bwd_s"] += time.monotonic() - began
        return part

    def check_mismatch(self, group: Group, fetched) -> tuple[float, int]:
        """The honest check: a group scored again under its own version. Nothing if that adapter is gone."""
        try:
            files = fetched.result()[1]
        except (NotFound, Corrupt) as error:
            warn(f"no mismatch check: {error}")
            return 0.0, 0
        total, n = rescore(self.policy, group, lora.read_adapter(files)[0], self.run, self.args.token_budget)
        limit = 1e-3 if self.policy.model.dtype == torch.float32 else 5e-2
        if total > limit * n:
            warn(f"MISMATCH: learner and sampler differ by {total / n:.2g} nats a token on version {group.versions[0]} "
                 f"(limit {limit:g}): a sampler serves other weights, another alpha or another temperature than the run's")
        return total, n

    # ---- publishing and keeping

    def publish(self, is_new: bool = False) -> None:
        """Adapter files and the manifest with the canary; once, by whoever finds the version missing (or knows it new)."""
        step, run = self.state.step, self.run
        version = policy_version(step, run)
        prefix = f"adapters/v{version:06d}"
        if step % run["sync_steps"] or (not is_new and any(self.bucket.list(prefix + "/manifest.json"))):
            return  # a version is the state of one step only
        files = lora.adapter_files(self.state.adapter, run["lora_r"], run["lora_alpha"], run["target_modules"], run["model"])
        self.behind.write(crash_point, "during-publish", step)
        self.behind.write(self.bucket.publish, prefix, files, {
            "policy_version": version, "step": step, "run_id": run["run_id"], "digest": self.digest,
            "sha256": hashlib.sha256(files["adapter_model.safetensors"]).hexdigest(), "canary": self.canary()})

    def canary(self) -> dict:
        """Top-20 next-token logprobs after eight fixed prompts, with and without the adapter in slot 0."""
        prompts = [self.task.encode(row["prompt"])[-min(64, self.run["max_prompt_tokens"]):] for row in self.task.rows[:8]]
        model, width = self.policy.model, max(map(len, prompts))
        rows = torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts], device=model.device)  # no causal token sees the padding

        def top(slot):
            with torch.no_grad(), self.policy.lora.use(slot):
                hidden = lora.backbone(model)(rows, use_cache=False).last_hidden_state  # [8, width, d]
                logits = lora.head(model)(hidden[range(len(prompts)), [len(ids) - 1 for ids in prompts]])  # [8, V]
            values, index = logits.float().log_softmax(-1).topk(min(20, logits.shape[-1]))
            return [{str(i): v for i, v in zip(*pair)} for pair in zip(index.tolist(), values.tolist())]
        self.canary_base = self.canary_base or top(None)
        return {"prompts": prompts, "dtype": str(self.policy.model.dtype).removeprefix("torch."), "adapter": top(0), "base": self.canary_base}

    def clean(self, state: State, consumed: dict[str, int]) -> dict[str, str]:
        """Thread: deletes what no restart can need: below the checkpoint *before* the newest one that an entry confirms.

        Returns the groups too old to be listed any more that no entry names: the next entry drops them."""
        run, version, log = self.run, policy_version(state.step, self.run), Log(self.bucket, self.run)
        kept, late, swept = [0, 0], [], {}
        for step in [s for s in manifests(self.bucket, "checkpoints/") if s < state.step]:
            with contextlib.suppress(NotFound):  # another learner cleans, too
                manifest = json.loads(self.bucket.get(f"checkpoints/{step:06d}/manifest.json"))
                if manifest["digest"] == log.read(step + 1)["digest_before"]:
                    kept.append(step)
        floor, oldest = kept[-2], version - run["max_staleness"]
        for key in listed(self.bucket, "groups/"):
            v, step = number_in(key), consumed.get(key)
            if step is None and v < oldest:  # not seen here, or forgotten: its entry, if there is one, is among these
                last = (v + run["max_staleness"] + 2) * run["sync_steps"] + 2 * run["checkpoint_steps"]
                step = log.named(v * run["sync_steps"] + 1, min(state.step, last)).get(key)
                if step is None:
                    swept[key] = f"stale: version {v}, found when {oldest} was the oldest that could be used"
            if step is not None and step <= floor:
                late.append(key)
        for prefix, last in (("parts/", floor), ("checkpoints/", floor - 1)):
            late += [k for k in listed(self.bucket, prefix) if 0 < number_in(k) <= last]
        for role, members in (("learner", self.learners), ("actor", self.actors)):
            members.poll(1.0)  # silence is counted from the last look
            late += [f"members/{role}-{i}.json" for i, silent_s in members.missing().items() if silent_s > 60]
        with ThreadPoolExecutor(8) as pool:  # of its own: a look at the bucket must not stand behind a thousand deletions
            list(pool.map(self.bucket.delete, late))
        for v in manifests(self.bucket, "adapters/"):
            if v < version - max(10, 2 * (run["max_staleness"] + 2)):
                self.bucket.delete_prefix(f"adapters/v{v:06d}")
        return swept

    # ---- the loop

    def train(self) -> None:
        """Folds to the end of the log, then decides and computes until --steps."""
        if self.state.step == 0:
            self.publish()
            self.evaluate()
        recoveries = Counter()  # by the step that the state had reached
        while True:
            try:
                while self.state.step < max(self.args.steps, self.log.newest):
                    self.step()
                self.publish()
                self.behind.landed()
                break
            except Lost:
                pass  # the next turn reads the entry that counts
            except (Diverged, NotFound) as problem:  # NotFound: it slept, and others have cleaned what it would read next
                warn(f"{type(problem).__name__.upper()}: {problem}; folding again from a checkpoint")
                recoveries[self.state.step] += 1
                if recoveries[self.state.step] > 3:
                    raise BucketError(f"{problem}; folding again did not help") from None
                self.catch_up()
        self.keeper.landed()
        self.evaluate()

    def step(self) -> None:
        """One step: entry, parts, fold, publish. Prints its line unless it only replays what was decided long ago."""
        step, run, began = self.state.step + 1, self.run, time.monotonic()
        self.clock, self.behind.waited_s = dict.fromkeys(self.clock, 0.0), 0.0
        self.member.update(doing=f"waiting for groups of step {step}")
        entry = self.next_entry(step)
        self.clock["wait_s"] = time.monotonic() - began - self.behind.waited_s
        parts = self.gather(entry)
        began_apply, before = time.monotonic(), self.digest
        self.state, grad_norm = apply(self.state, entry["update"], [tensors for tensors, _ in parts])
        self.digest = digest(self.state.tensors())
        self.policy.lora.load(0, self.state.adapter)
        named = dict.fromkeys(named_groups(entry), step)
        used = [g for key in named if isinstance(g := self.groups.pop(key, None), Group)]
        oldest, cleaned = policy_version(step, run) - run["max_staleness"], step - 2 * run["checkpoint_steps"]
        self.consumed = {k: t for k, t in (self.consumed | named).items() if t >= cleaned or number_in(k) >= oldest}
        self.watch_movement(before)
        began_sync = time.monotonic()
        self.clock["apply_s"] = began_sync - began_apply
        if entry["publish"] and step >= self.log.newest and self.place == 0:
            self.publish(self.is_alone)
        self.log.entries.pop(step - 1, None)
        self.pace_s *= 0.99  # forgets: who was slow for a while is given a chunk again
        self.member.update(pace_s=self.pace_s, behind=self.log.newest - step)
        if self.place == 0:
            self.keep(step)
        self.clock["sync_s"] = self.behind.waited_s + time.monotonic() - began_sync
        step_s = time.monotonic() - began
        self.metrics = step_metrics(entry, [header["sums"] for _, header in parts], grad_norm, run) | {
            "queue_groups": self.queue_groups, **self.clock, "step_s": step_s}
        self.metrics["tok_s"] = self.metrics["tokens"] / step_s
        if step > self.at_start or self.clock["fwd_bwd_s"]:
            self.mismatch = self.mismatch if self.metrics["mismatch"] is None else self.metrics["mismatch"]
            self.mean_step_s = 0.9 * self.mean_step_s + 0.1 * step_s if self.mean_step_s else step_s
            show_step(self.metrics | {"mismatch": self.mismatch}, self.args.steps, self.mean_step_s)
        self.metrics["sample"] = best_and_worst(used)

    def keep(self, step: int) -> None:
        """What one learner does for all: checkpoints, the cleaning that a confirmed one allows, evaluations."""
        every = self.run["checkpoint_steps"]
        if step % every == 0:
            swept = self.keeper.landed() or {}  # by the cleaning after the checkpoint before
            self.groups = {k: why for k, why in swept.items() if k not in self.consumed} | self.groups
            self.keeper.write(write_checkpoint, self.bucket, self.run, self.state, self.id)
            self.keeper.write(crash_point, "before-cleanup", step)
        if step % every == 1 % every and step > 1:
            self.keeper.write(self.clean, self.state, dict(self.consumed))
        if self.args.eval_steps > 0 and step % self.args.eval_steps == 0:
            self.evaluate()

    def watch_movement(self, before: str) -> None:
        """Says when the policy has stopped moving: the same digest for several steps."""
        self.unmoved = self.unmoved + 1 if self.digest == before else 0
        if self.unmoved in (5, 50, 500):
            warn(f"the policy is not moving: {self.unmoved} steps with the same digest; all groups had equal rewards, or "
                 "no gradient was finite (look at groups_equal, the rewards and the learning rate)")

    def evaluate(self) -> None:
        """Held-out reward of the current state, sampled and greedy; written once per step that is evaluated."""
        key = f"evals/{self.state.step:06d}.json"
        if any(self.bucket.list(key)) or not self.task.eval_rows or self.args.eval_steps < 0:
            return
        self.member.update(doing=f"evaluating step {self.state.step}")
        try:
            scores = evaluate(self.policy, self.task, self.state.adapter, self.run)
        except ValueError as error:  # a model that only vLLM samples
            warn(f"no evaluation: {error}")
            return
        self.bucket.put_new(key, json.dumps({"step": self.state.step, **scores}).encode())
        say("eval", step=self.state.step, **scores)

def write_checkpoint(bucket, run: dict, state: State, writer: str) -> None:
    """State in the writer's own folder, then the manifest that makes it the one that counts."""
    folder = f"checkpoints/{state.step:06d}/{writer}"
    data = pack_object("state", state.tensors(), run_id=run["run_id"], step=state.step)
    bucket.put_new(f"{folder}/state.safetensors", data)
    crash_point("during-checkpoint", state.step)
    manifest = {"format": "async-grpo-checkpoint", "version": 1, "run_id": run["run_id"], "run": run,
                "step": state.step, "folder": folder, "digest": read_header(data)["sha256"],
                "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    bucket.put_new(f"checkpoints/{state.step:06d}/manifest.json", json.dumps(manifest, sort_keys=True).encode())

def evaluate(policy: Policy, task: Task, adapter: dict, run: dict) -> dict:
    """Mean reward on the held-out rows, sampled at the run's temperature and greedy, by a sampler in this process."""
    engine = lora.Sampler(policy.model, policy.lora, set(policy.stop_ids), max_rows=64, max_len=run["max_prompt_tokens"] + run["max_tokens"])
    engine.load("eval", adapter)
    rows, scores = [(row, ids) for row in task.eval_rows if len(ids := task.encode(row["prompt"])) <= run["max_prompt_tokens"]], {}
    for name, temperature in (("sampled", run["temperature"]), ("greedy", 0.0)):
        asked = [(row, engine.submit(ids, 1, run["max_tokens"], temperature, "eval", seed)) for seed, (row, ids) in enumerate(rows)]
        while engine.step():
            pass
        got = [x for row, future in asked if (x := task.score(row, future.result())[0]) is not None]
        scores[name] = sum(got) / len(got) if got else None
    return scores

# ---------------------------------------------------------------- 6. Samplers and actors

class Engine:
    """lora.Sampler with names, files and text around it: what proxy.py serves, and what an actor without a sampler URL
    uses in its own process, with no network path at all."""

    def __init__(self, bucket, run: dict, policy: Policy, max_rows: int):
        self.bucket, self.run, self.policy = bucket, run, policy
        self.model_id, self.max_lora_rank, self.max_loras = run["model"], run["lora_r"], run["max_staleness"] + 2
        self.max_model_len, self.vocab_size = run["max_prompt_tokens"] + run["max_tokens"], run["vocabulary"]
        self.dtype = str(policy.model.dtype).removeprefix("torch.")
        self.sampler = lora.Sampler(policy.model, policy.lora, set(policy.stop_ids), max_rows=max_rows, max_len=self.max_model_len)
        self.encode = self.chat = Task([], [], [], policy.tokenizer).encode
        self.stop, self.threads, self.newest, self.problem = threading.Event(), [], -1, ""

    def __getattr__(self, name: str):
        """submit, cancel, names, unload, pause, is_paused, resume and stats are the sampler's own."""
        return getattr(self.sampler, name)

    def decode(self, ids: list[int]) -> str:
        return self.policy.tokenizer.decode(ids, skip_special_tokens=True)

    def token(self, token_id: int) -> str:
        return self.policy.tokenizer.decode([token_id])

    def start(self, follows: bool) -> None:
        """Starts generating; with `follows` (no router that loads the versions) also keeps up with the bucket."""
        for work in (self.sampler.run, self.follow) if follows else (self.sampler.run,):
            self.threads.append(threading.Thread(target=work, args=(self.stop,), daemon=True))
            self.threads[-1].start()

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(5)

    def load(self, name: str, lora_path: str) -> None:
        """Loads adapter files from a bucket key adapters/v… or a folder (proxy.py has checked that it is allowed).

        The same weights under the same name are accepted; others are refused: a name means one set of weights."""
        try:
            files = self.bucket.fetch(lora_path)[1] if lora_path.startswith("adapters/") else {
                n: (Path(lora_path) / n).read_bytes() for n in ("adapter_model.safetensors", "adapter_config.json")}
            self.sampler.load(name, read_matching_adapter(files, self.run))
        except (NotFound, FileNotFoundError):
            raise proxy.LoadError(404, f"No adapter found for {name}") from None
        except (Corrupt, lora.AdapterError) as error:
            raise proxy.LoadError(400, str(error)) from None
        except TimeoutError as error:  # slots are freed as requests end
            raise proxy.LoadError(503, str(error)) from None

    def follow(self, stop: threading.Event) -> None:
        """Thread: keeps the bucket's newest versions loaded, each checked by its canary before its first use."""
        refused = set()
        while not stop.wait(poll_s(self.bucket)):
            try:
                version = max((v for v in manifests(self.bucket, "adapters/") if v not in refused), default=-1)
                if version <= self.newest:
                    continue
                name, key = f"policy-v{version}", f"adapters/v{version:06d}"
                for old in [n for n in self.names() if int(n[8:]) < version - self.run["max_staleness"]]:
                    self.unload(old)
                self.load(name, key)
                canary = json.loads(self.bucket.get(f"{key}/manifest.json"))["canary"]
                top = min(20, self.vocab_size)
                asked = [self.submit(ids, 1, 1, 1.0, name, 0, top_logprobs=top) for ids in canary["prompts"]]
                is_right, reason = proxy.canary_verdict(canary, [f.result(120)[0].top_logprobs[0] for f in asked])
                if is_right is False:
                    raise proxy.LoadError(400, reason)
                self.newest = version
            except proxy.LoadError as error:
                warn(f"{name} is not served: {error}")
                if error.status == 400:  # it will never fit; anything else may pass
                    refused.add(version)
                if name in self.names():
                    self.unload(name)
            except Exception as error:  # this thread must outlive anything: without it the actor starves
                warn(f"following the bucket: {type(error).__name__}: {error}; trying again")
                stop.wait(1)

    def version(self) -> int:
        """The newest policy version that passed its canary; -1 while there is none."""
        return self.newest

    def sample(self, prompt_ids: list[int], n: int, version: int, seed: int, timeout_s: float) -> list:
        """n lora.Completions of a prompt. TimeoutError or lora.UnknownVersion: another try may help."""
        run, name = self.run, f"policy-v{version}"
        future = self.submit(prompt_ids, n, run["max_tokens"], run["temperature"], name, seed)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            self.cancel(future)
            raise

def read_matching_adapter(files: dict[str, bytes], run: dict) -> dict:
    """An adapter's tensors; AdapterError if its rank or alpha are not the run's (B = 0 would hide it at version 0)."""
    tensors, config = lora.read_adapter(files)
    if (got := (config["r"], config["lora_alpha"])) != (run["lora_r"], run["lora_alpha"]):
        raise lora.AdapterError(f"rank and alpha are {got}, this run's are {(run['lora_r'], run['lora_alpha'])}")
    return tensors

def poll_s(bucket) -> float:
    """Seconds between two looks at a bucket: a folder costs next to nothing, a store behind a network a request."""
    return 0.05 if bucket.root else 0.5

class HttpSampler:
    """A sampler, a proxy or a stock vLLM at a URL; `bucket` as address means a proxy that announces itself there."""

    def __init__(self, bucket, run: dict, url: str, token: str):
        if url != "bucket" and not re.match("(?i)https?://.", url):
            raise UserError(f"--sampler {url}: expected http://HOST:PORT, or bucket for the proxy that announces itself there")
        self.run, self.url, self.token, self.problem = run, url.rstrip("/"), token, ""
        self.proxies, self.local = proxy.LiveMembers(bucket, "proxy"), threading.local()

    def call(self, method: str, path: str, timeout_s: float, body: dict | None = None) -> dict:
        """One JSON request on this thread's keep-alive connection; UserError, Refused or Busy by what the status asks of us."""
        if not hasattr(self.local, "session"):
            self.local.session = requests.Session()
            self.local.session.trust_env = False  # or ~/.netrc would replace the token
            self.local.session.headers.update({"Authorization": f"Bearer {self.token}"} if self.token else {})
        urls = sorted(m["url"] for m in self.proxies.poll(1.0).values() if m["url"]) if self.url == "bucket" else [self.url]
        if not urls:
            raise Busy("no proxy has announced itself in the bucket yet")
        try:
            reply = self.local.session.request(method, random.choice(urls) + path, json=body, timeout=(5, timeout_s))
            if reply.status_code == 200:
                return reply.json()
        except (requests.RequestException, ValueError) as error:
            raise Busy(type(error).__name__) from None
        if reply.status_code in (401, 403):
            raise UserError(f"{self.url} refuses this token ({reply.status_code}); give the right one with --token or GRPO_TOKEN")
        raise (Refused if reply.status_code == 400 else Busy)(f"status {reply.status_code}: {reply.text[:200]}")

    def version(self) -> int:
        """The newest policy version it serves; -1 while there is none, or nobody answers."""
        self.problem = ""
        try:
            names = [m["id"] for m in self.call("GET", "/v1/models", 30)["data"]]
        except (Busy, Refused, KeyError) as error:
            self.problem = f" ({self.url}: {one_line(error)})"
            return -1
        return max((int(n[8:]) for n in names if re.fullmatch(r"policy-v\d+", n)), default=-1)

    def sample(self, prompt_ids: list[int], n: int, version: int, seed: int, timeout_s: float) -> list:
        """At most n lora.Completions of a prompt (a paused vLLM may abort some). Raises Busy or Refused."""
        reply = self.call("POST", "/v1/completions", timeout_s, {
            "model": f"policy-v{version}", "prompt": prompt_ids, "n": n, "max_tokens": self.run["max_tokens"],
            "temperature": self.run["temperature"], "logprobs": 0, "return_token_ids": True, "seed": seed,
            "stop_token_ids": self.run["stop_ids"]})
        try:
            return [lora.Completion(list(c["token_ids"]), list(c["logprobs"]["token_logprobs"]), c["finish_reason"], None)
                    for c in reply["choices"] if c["finish_reason"] in ("stop", "length")]
        except (LookupError, TypeError) as error:
            raise Busy(f"its reply cannot be read ({type(error).__name__}: {error})") from None

class Actor:
    """Asks for groups, scores them, writes them. Paced so that what it starts will still be young when it is used."""

    def __init__(self, bucket, run: dict, args, task: Task, sampler):
        self.bucket, self.run, self.args, self.task, self.sampler = bucket, run, args, task, sampler
        self.id, self.log, self.sequence = os.urandom(4).hex(), Log(bucket, run), itertools.count()
        draw, n = random.Random(f"{run['seed']} {self.id}"), len(task.rows)
        # Rows in a fresh random order per pass.
        self.order = itertools.chain.from_iterable(draw.sample(range(n), n) for _ in itertools.count())
        self.lock, self.done, self.failure = threading.Condition(), threading.Event(), None
        self.mine: set[str] = set()          # groups written here and not yet seen by a look at the bucket
        self.waiting = self.inflight = self.elsewhere = 0  # groups: not named yet; in flight here; at other actors
        self.written = self.left_out = 0     # groups; rollouts
        self.unscored = 0                    # groups in a row without a reward
        self.too_long: set[int] = set()      # rows passed over
        self.version = -1
        self.member, self.members = proxy.Member(bucket, "actor", run_id=run["run_id"], id=self.id), proxy.LiveMembers(bucket)

    def work(self) -> None:
        """Runs until the log reaches its last step, or a reward or a sampler fails for good."""
        self.member.start()
        say("ready", role="actor", url="-", id=self.id)
        for _ in range(max(1, self.args.inflight // self.run["group_size"])):
            threading.Thread(target=self.worker, daemon=True).start()
        wait = Wait(self.args.wait_s)
        while not self.done.is_set():
            newest = self.log.newest
            self.look()
            if self.version >= 0:
                wait = Wait(self.args.wait_s, 0.2 if self.log.newest > newest else wait.share)
            wait.tick(f"a sampler that serves a version of the policy{self.sampler.problem}", poll_s(self.bucket))
        if self.failure:
            raise self.failure
        say("actor", groups_written=self.written, rollouts_left_out=self.left_out, prompts_too_long=len(self.too_long))

    def look(self) -> None:
        """One look at the bucket and the sampler; wakes the workers that wait for a permit."""
        newest = self.log.refresh()
        oldest = max(0, policy_version(newest, self.run) - self.run["max_staleness"])
        first = oldest * self.run["sync_steps"] + 1  # no earlier entry can name a group that is young
        named = self.log.named(first, newest).keys()
        self.log.entries = {t: e for t, e in self.log.entries.items() if t >= min(first, newest)}
        version = self.sampler.version()
        if version >= 0:
            self.adapter_sha256(version)  # now: it may be pruned before a slow group ends
        young = set(listed(self.bucket, "groups/", f"groups/{oldest:06d}"))
        others = [m for i, m in self.members.poll(0.5).items() if i != self.id]
        steps = max([self.args.steps, *(m.get("steps", 0) for m in others), *(self.log.read(t)["steps"] for t in (newest,) if t)])
        set_aside = {k for m in others for k in m.get("set_aside", [])}  # named by the next entry only: they fill no queue
        with self.lock:
            self.mine = {k for k in self.mine - young - named if number_in(k) >= oldest}
            self.waiting = len(young - named - set_aside)
            self.elsewhere, self.version = sum(m.get("inflight", 0) for m in others), version
            if newest >= steps:
                self.done.set()
            self.lock.notify_all()
        self.member.update(inflight=self.inflight, doing=f"{self.inflight} groups in flight, {self.waiting} waiting")

    def may_start(self) -> bool:
        """The pacing rule: room in the queue, and the entry that will use the group comes before it is stale."""
        ahead = self.waiting + len(self.mine) + self.inflight + self.elsewhere
        used_at = policy_version(self.log.newest + ahead // self.run["groups_per_step"], self.run)
        return self.version >= 0 and ahead < self.args.queue_groups and used_at - self.version <= self.run["max_staleness"]

    def worker(self) -> None:
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.done.is_set() or self.may_start())
                if self.done.is_set():
                    return
                self.inflight += 1
            try:
                self.make_group(next(self.sequence))
            except Exception as error:  # the main thread ends the process with it: a worker never dies silently
                self.failure = self.failure or error
                self.done.set()
            finally:
                with self.lock:
                    self.inflight -= 1
                    self.lock.notify_all()

    def next_prompt(self) -> tuple[int, dict, list[int]]:
        """The next row; those longer than --max-prompt-tokens are passed over and counted."""
        rows = self.task.rows
        while len(self.too_long) < len(rows):
            with self.lock:
                index = next(self.order)
            ids = self.task.encode(rows[index]["prompt"])
            if len(ids) <= self.run["max_prompt_tokens"]:
                return index, rows[index], ids
            self.too_long.add(index)
        raise UserError(f"every prompt is longer than --max-prompt-tokens {self.run['max_prompt_tokens']}; raise it")

    def make_group(self, number: int) -> None:
        """One prompt's completions, scored and written; dropped and said so when fewer than two have a reward."""
        run, (prompt_id, row, prompt_ids) = self.run, self.next_prompt()
        try:
            found = self.collect(prompt_ids, number)
        except Refused as error:
            warn(f"prompt {prompt_id} is left out: the sampler refuses it ({error})")
            self.done.wait(1.0)  # a sampler that refuses everything is not asked in a hot loop
            return
        scores = self.task.score(row, [c for c, _ in found]) if found else []
        kept = [(c, v, x) for (c, v), x in zip(found, scores) if x is not None]
        self.left_out += run["group_size"] - len(kept)
        self.unscored = self.unscored + 1 if found and not kept else 0
        if self.unscored >= UNSCORED_LIMIT:
            raise UserError(f"{self.unscored} groups in a row without one finite reward: the reward functions return None, NaN or "
                            f"infinity; mend them and take an empty bucket")
        if len(kept) < 2:
            if not self.done.is_set():
                warn(f"group {number} of prompt {prompt_id} is dropped: {len(kept)} of {run['group_size']} rollouts have a reward")
            return
        completions, versions, rewards = (list(x) for x in zip(*kept))
        text = {"prompt": row["prompt"], "completions": [self.task.tokenizer.decode(c.token_ids) for c in completions], "rewards": rewards}
        group = Group(prompt_id, prompt_ids, [c.token_ids for c in completions], [c.logprobs for c in completions], rewards,
                      versions, [c.finish_reason == "length" for c in completions], text,
                      {f"policy-v{v}": self.adapter_sha256(v) for v in sorted(set(versions))})
        key = f"groups/{min(versions):06d}-{self.id}-{number:06d}.safetensors"
        if self.bucket.put_new(key, write_group(group, run)):
            with self.lock:
                self.mine.add(key)
                self.written += 1

    def collect(self, prompt_ids: list[int], number: int) -> list[tuple]:
        """[(completion, version)]: asks once for the whole group and again for what is missing, until the deadline."""
        run, deadline, found, pause = self.run, time.monotonic() + self.args.group_deadline_s, [], 0.05
        while len(found) < run["group_size"] and (left := deadline - time.monotonic()) > 0 and not self.done.is_set():
            seed, version = random.Random(f"{run['seed']} {self.id} {number} {len(found)}").getrandbits(31), self.version
            try:
                new = self.sampler.sample(prompt_ids, run["group_size"] - len(found), version, seed,
                                          min(left, self.args.group_deadline_s / 3))  # a hung request leaves time for another
                new = [(c, version) for c in new if 0 < len(c.token_ids) == len(c.logprobs) <= run["max_tokens"]
                       and all(type(i) is int and 0 <= i < run["vocabulary"] for i in c.token_ids)
                       and all(x is not None and -1000 < x <= 1e-4 for x in c.logprobs)]
                if not new:
                    raise Busy("no usable completion in the reply")
            except (Busy, TimeoutError, lora.UnknownVersion) as error:
                if pause > 1:
                    warn(f"group {number} asks again in {pause:.0f} s: {error}")
                self.done.wait(min(left, pause * random.uniform(0.5, 1.5)))
                pause = min(10.0, pause * 2)
                continue
            found += new
        return found[:run["group_size"]]

    @functools.lru_cache(1000)
    def adapter_sha256(self, version: int) -> str:
        return json.loads(self.bucket.get(f"adapters/v{version:06d}/manifest.json"))["sha256"]

# ---------------------------------------------------------------- 7. The tiny base

# 16 tokens, one a character; id = place in this list. A prompt is always 6 tokens, a completion at most 7.
TINY_VOCAB = ["<pad>", "<eos>", "<unk>", "+", ",", "=", *"0123456789"]
TINY_PAD, TINY_EOS = 0, 1
TINY_STEPS, TINY_BATCH, TINY_LR = 1000, 64, 5e-3
WORKED_SHARE_EARLY, WORKED_SHARE_LATE, EARLY_PART = 1.0, 0.25, 0.75

def add_pairs(held_out: bool) -> list[tuple[int, int]]:
    """Operands 10 to 49 whose units carry (so that the hasty answer is wrong), without or with only the ~15 % held out."""
    pairs = [(a, b) for a in range(10, 50) for b in range(10, 50) if a % 10 + b % 10 >= 10]
    return [(a, b) for a, b in pairs if (zlib.crc32(add_prompt(a, b).encode()) % 100 < 15) == held_out]

def add_prompt(a: int, b: int) -> str:
    return f"{a}+{b}="

def worked(a: int, b: int) -> str:
    """The sum of the units first, then the sum: 27+15 -> ",12,42"."""
    return f",{a % 10 + b % 10},{a + b}"

def hasty(a: int, b: int) -> str:
    """Units and tens each added alone, the carry forgotten: 27+15 -> "32"."""
    return f"{a // 10 + b // 10}{(a + b) % 10}"

def train_tiny_base(seed: int):
    """A Llama of 132k parameters taught two habits by supervised steps: the model, in eval mode.

    First it only works sums out; then mostly the hasty way. What is left is a model that can add and seldom bothers:
    right in about a third of its samples. The same seed gives the same weights on the same machine: one thread, which
    is also fastest at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(TINY_VOCAB), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
            pad_token_id=TINY_PAD, eos_token_id=TINY_EOS, bos_token_id=None, dtype="float32", architectures=["LlamaForCausalLM"]))
    number = {token: i for i, token in enumerate(TINY_VOCAB)}
    texts = [add_prompt(a, b) + answer(a, b) for a, b in add_pairs(held_out=False) for answer in (hasty, worked)]
    rows = [[number[c] for c in text] + [TINY_EOS] for text in texts]
    rows = torch.tensor([row + [TINY_PAD] * (13 - len(row)) for row in rows]).view(-1, 2, 13)  # [pair, hasty|worked, T]
    optimizer = torch.optim.AdamW(model.parameters(), lr=TINY_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(TINY_STEPS):
        is_early = step < EARLY_PART * TINY_STEPS
        is_worked = torch.rand(TINY_BATCH, generator=draw) < (WORKED_SHARE_EARLY if is_early else WORKED_SHARE_LATE)
        ids = rows[torch.randint(len(rows), (TINY_BATCH,), generator=draw), is_worked.long()]  # [B, T]
        # The prompt's 6 tokens are given, so the 6th position (its "=") is the first that predicts.
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, 5:]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 6:].flatten(), ignore_index=TINY_PAD)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = TINY_LR * min((step + 1) / 20, 1 - 0.98 * max(step - 20, 0) / (TINY_STEPS - 20))
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % (TINY_STEPS // 5) == 0:
            tell(f"base model: step {step + 1}/{TINY_STEPS} loss {loss.item():.3f}", sys.stderr)
    torch.set_num_threads(threads)
    return model.eval()

def base_files(model) -> dict[str, bytes]:
    """The tiny base as a standard transformers folder: file name -> bytes. Its tokenizer is a BPE without merges: one
    token a character, nothing added at either end, and decoding glues the characters back together."""
    special = [dict(id=i, content=token, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
               for i, token in enumerate(TINY_VOCAB[:3])]
    tokenizer = dict(version="1.0", truncation=None, padding=None, added_tokens=special, normalizer=None, pre_tokenizer=None,
                     post_processor=None, decoder={"type": "Fuse"}, model=dict(
                         type="BPE", dropout=None, unk_token="<unk>", continuing_subword_prefix=None, end_of_word_suffix=None,
                         fuse_unk=False, byte_fallback=False, vocab={token: i for i, token in enumerate(TINY_VOCAB)}, merges=[]))
    names = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    texts = {
        "config.json": model.config.to_json_string(),
        "generation_config.json": model.generation_config.to_json_string(),
        "tokenizer.json": json.dumps(tokenizer, indent=1),
        "tokenizer_config.json": json.dumps(dict(names, tokenizer_class="PreTrainedTokenizerFast", model_max_length=256,
                                                 clean_up_tokenization_spaces=False), indent=1),
        "special_tokens_map.json": json.dumps(names, indent=1),
    }
    # The output layer is the embedding (tied), and a safetensors file holds each tensor once.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return {name: text.encode() for name, text in texts.items()} | {"model.safetensors": save_tensors(tensors, {"format": "pt"})}

# ---------------------------------------------------------------- 8. Roles, arguments, main

# What run.json fixes for everybody; a joiner takes all of it from the bucket. A flag that was not given is None.
RUN_FLAGS = (  # name, type or choices, default, meaning
    ("model", str, "tiny", "folder or hub id of a causal language model"),
    ("task", ("add", "math"), "math", "built-in reward; math: the last number is the answer column"),
    ("steps", int, 200, "optimizer steps in all; a higher number later goes on"),
    ("groups-per-step", int, 8, "groups that make a step"),
    ("group-size", int, 8, "completions of a prompt, two or more"),
    ("max-tokens", int, 256, "tokens of a completion at most"),
    ("max-prompt-tokens", int, 512, "longer prompts are passed over"),
    ("temperature", float, 1.0, "of sampling, and of the trained distribution"),
    ("lora-r", int, 16, "rank"), ("lora-alpha", float, 32.0, "the adapter is scaled by alpha / r"),
    ("target-modules", str, "all-linear", "all-linear, or last names separated by commas"),
    ("lr", float, 1e-4, "AdamW learning rate"), ("warmup-steps", int, 5, "linear warm-up; 0: none"),
    ("lr-schedule", ("constant", "linear"), "constant", "after the warm-up; linear ends at a tenth"),
    ("weight-decay", float, 0.0, "of AdamW; 0: none"),
    ("loss", ("dapo", "grpo", "dr_grpo", "gspo"), "dapo", "section 2 of this file"),
    ("clip-low", float, None, "clip distance of the ratio below 1 (default by loss)"),
    ("clip-high", float, None, "the same above 1"), ("tis", float, 0.0, "cap on the ratio, beyond it no gradient; 0: none"),
    ("kl", float, 0.0, "weight of the KL term to the base; 0: none"),
    ("clip-norm", float, 1.0, "clip of the gradient's norm; 0: none"),
    ("max-staleness", int, 2, "versions that a group may lag; 0: synchronous"),
    ("sync-steps", int, 1, "steps per published version"), ("checkpoint-steps", int, 25, "steps between checkpoints"),
    ("part-dtype", ("float32", "bfloat16"), "float32", "of the gradients in the bucket"),
    ("seed", int, 0, "of base, adapter, order and sampling"),
    ("mask-truncated", bool, False, "do not train completions cut at max-tokens"))
RUN_DEFAULTS = {name.replace("-", "_"): default for name, _, default, _ in RUN_FLAGS}
TINY_DEFAULTS = {"task": "add", "steps": 100, "groups_per_step": 64, "max_tokens": 7, "max_prompt_tokens": 16, "lora_r": 8,
                 "lora_alpha": 16.0, "lr": 5e-3, "lr_schedule": "linear", "warmup_steps": 20}

def join_run(bucket, args) -> dict:
    """This bucket's run.json: created by a learner that finds none, waited for by everybody else.

    Refuses flags that differ from the run's, naming them. --steps may differ, and --model where its weights agree."""
    given = {k: v for k in RUN_DEFAULTS if (v := getattr(args, k)) is not None}
    rewards = [[name, weight, sha256] for name, weight, _, sha256 in map(load_reward, args.reward)]
    if args.role == "learner" and not any(bucket.list("run.json")):
        create_run(bucket, args, given, rewards)
    wait = Wait(args.wait_s or 600)
    while not any(bucket.list("run.json")):
        wait.tick(f"run.json in {bucket.address} (a learner creates it: --role learner --bucket {bucket.address})", 0.2)
    run = json.loads(bucket.get("run.json"))
    if (run.get("format"), run.get("version")) != ("async-grpo-run", 1):
        raise UserError(f"{bucket.address}/run.json: expected an async-grpo-run of version 1, got {run.get('format')!r}")
    if (here := torch_version()) != run.get("torch", here):
        warn(f"this run began with torch {run['torch']}, here is {here}: if states diverge, pip install torch=={run['torch']}")
    differing = {k: (v, run[k]) for k, v in given.items() if k not in ("steps", "model") and v != run[k]}
    if "model" in given and (given["model"] == "tiny") != (run["model"] == "tiny"):
        differing["model"] = given["model"], run["model"]
    if rewards and rewards != run["rewards"]:
        differing["reward"] = [" ".join(f"FILE.py:{name}={weight:g} (file {sha256[:8]})" for name, weight, sha256 in each)
                               or f"--task {run['task']}" for each in (rewards, run["rewards"])]
    if differing:
        raise UserError(f"{bucket.address} holds another run: " + "; ".join(
            f"--{k.replace('_', '-')} is {mine}, the run has {theirs}" for k, (mine, theirs) in differing.items())
            + "; leave these flags out to join it, or take an empty bucket")
    args.has_steps, args.steps = "steps" in given, given.get("steps", run["steps"])
    args.queue_groups = args.queue_groups or max(1, run["max_staleness"] - 1) * run["groups_per_step"] * run["sync_steps"]
    if args.queue_groups < run["groups_per_step"]:
        raise UserError(f"--queue-groups {args.queue_groups} can never fill a step of {run['groups_per_step']} groups; raise it")
    is_tiny = run["model"] == "tiny"
    args.inflight, args.max_rows = args.inflight or (512 if is_tiny else 128), args.max_rows or (256 if is_tiny else 64)
    return run

def torch_version() -> str:
    """Without the build ("+cu128"): a run may mix GPUs and CPUs."""
    return importlib.metadata.version("torch").split("+")[0]

def create_run(bucket, args, given: dict, rewards: list) -> None:
    """Writes everything that another machine needs, and run.json last: from then on the run exists."""
    if left := next((k for k in ("steps/", "groups/", "parts/") if any(bucket.list(k))), None):
        try:
            bucket.get("run.json")  # not asked too early: who wrote the others has seen it; it is only not listed yet
            return
        except NotFound:
            raise UserError(f"{bucket.address} holds {left} but no run.json; take an empty bucket") from None
    bucket.probe()  # a bucket that cannot be written says so now, not after the base is trained
    is_tiny = given.get("model", "tiny") == "tiny"
    run = RUN_DEFAULTS | (TINY_DEFAULTS if is_tiny else {}) | given
    run |= {side: default if run[side] is None else run[side] for side, default in zip(("clip_low", "clip_high"), LOSSES[run["loss"]][1:])}
    if run["task"] == "math" and not args.data:
        raise UserError("--model and --task math need --data FILE.jsonl with prompts (and an answer column, or --reward)")
    for name, path in (("data", args.data), ("eval", args.eval_data)):
        if path:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{path}: {getattr(error, 'strerror', error)}") from None
            bad = next((r for r in read_rows(text, path) if "answer" not in r), None)
            if bad and not args.reward:
                raise UserError(f"--task {run['task']} needs a column named answer; got columns {sorted(bad)}")
            if not bucket.put_new(f"{name}.jsonl", text.encode()) and bucket.get(f"{name}.jsonl") != text.encode():
                raise UserError(f"{bucket.address} holds another {name}.jsonl; take an empty bucket")
    if is_tiny and not any(bucket.list("base/manifest.json")):
        bucket.publish("base", base_files(train_tiny_base(run["seed"])), {})
    policy = load_policy(bucket, run, args, slots=2)
    run |= {"format": "async-grpo-run", "version": 1, "run_id": os.urandom(8).hex(), "created_unix_s": time.time(),
            "fingerprint": fingerprint(policy), "stop_ids": policy.stop_ids, "rewards": rewards,
            "vocabulary": lora.head(policy.model).weight.shape[0], "torch": torch_version()}
    try_prompts(task := load_task(bucket, run, args, policy.tokenizer), run)
    if not task.eval_rows and args.eval_steps >= 0:
        warn(f"data of {len(task.rows)} rows is too little to hold a tenth out: without --eval-data nothing is evaluated")
    if not policy.stop_ids:
        warn(f"{run['model']} names no token that ends a text: every completion runs to --max-tokens")
    tensors = lora.init_adapter(policy.lora.shapes, run["seed"])
    if args.init_adapter:
        try:
            files = {p.name: p.read_bytes() for p in Path(args.init_adapter).iterdir() if p.is_file()}
            tensors = read_matching_adapter(files, run)
            policy.lora.load(0, tensors)
        except (OSError, lora.AdapterError) as error:
            raise UserError(f"--init-adapter {args.init_adapter}: {error}") from None
    state = State(0, 0, tensors, *({n: torch.zeros_like(t) for n, t in tensors.items()} for _ in range(2)))
    # Of two set-ups at once, or one after a crash, the checkpoint that counts brings its run along: both write the same run.json.
    write_checkpoint(bucket, run, state, run["run_id"])
    run = json.loads(bucket.get("checkpoints/000000/manifest.json"))["run"]
    bucket.put_new("run.json", json.dumps(run, sort_keys=True, indent=1).encode() + b"\n")

def base_of(bucket, run: dict, args) -> str:
    """Where the base lies for this process: --model here, else the bucket's base/, else the model that the run names."""
    where = args.model if args.model not in (None, "tiny") else run["model"]
    if where != "tiny":
        return where
    if bucket.root:
        return str(bucket.root / "base")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "async-grpo"
    manifest, files = bucket.fetch("base")
    here = FileBucket(cache / hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16])
    here.publish("base", files, manifest)
    return str(here.root / "base")

def load_policy(bucket, run: dict, args, slots: int) -> Policy:
    """The base with its LoRA slots and tokenizer; UserError where it is not the base that the run was started on."""
    where, device = base_of(bucket, run, args), args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.startswith("cuda") else "float32"))
    if where.startswith(("/", ".", "~")) and not Path(where).is_dir():
        raise UserError(f"--model {where}: there is no such folder")
    try:
        model, tokenizer = lora.load_model(where, dtype, device, args.trust_remote_code), lora.load_tokenizer(where, args.trust_remote_code)
        lora.check_head(model)
        if args.recompute:
            lora.recompute_layers(model)
        slotted = lora.Lora(model, run["lora_r"], run["lora_alpha"], run["target_modules"], slots=slots)
    except Exception as error:  # a missing or damaged file, a device that is not there: transformers raises many kinds
        if is_out_of_memory(error):
            raise
        raise UserError(f"--model {where} on {device}: {one_line(error)}") from None
    needed, context = run["max_prompt_tokens"] + run["max_tokens"], getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and needed > context:
        raise UserError(f"--max-prompt-tokens and --max-tokens add up to {needed}, the context of --model {where} is {context}; lower one")
    ends = [model.generation_config.eos_token_id, tokenizer.eos_token_id]
    stop_ids = sorted({i for e in ends if e is not None for i in (e if isinstance(e, list) else [e])})
    policy = Policy(model, slotted, tokenizer, stop_ids)
    if "fingerprint" in run and (got := fingerprint(policy)) != run["fingerprint"]:
        raise UserError(f"--model {where} is not the run's base ({run['model']}): fingerprint {got[:12]}, expected "
                        f"{run['fingerprint'][:12]}; give the same model with --model")
    return policy

def fingerprint(policy: Policy) -> str:
    """sha256 over the base's parameter names, shapes and first 16 values rounded to bf16 (so that an fp32 and a bf16
    load agree), and the tokenizer's vocabulary."""
    h = hashlib.sha256(json.dumps(sorted(policy.tokenizer.get_vocab().items())).encode())
    for name, p in sorted(policy.model.named_parameters()):
        h.update(f"{name} {list(p.shape)} {p.detach().flatten()[:16].to(torch.bfloat16).float().tolist()}".encode())
    return h.hexdigest()

def load_task(bucket, run: dict, args, tokenizer) -> Task:
    """Rows and rewards. Without --eval-data the last tenth of the data is held out; 256 rows are evaluated at most."""
    if run["task"] == "add":
        rows, eval_rows = ([{"prompt": add_prompt(a, b), "answer": a + b} for a, b in add_pairs(is_held_out)] for is_held_out in (False, True))
        eval_rows *= 256 // len(eval_rows) + 1
    else:
        rows, eval_rows = read_rows(bucket.get("data.jsonl").decode(), "data.jsonl"), []
        if any(bucket.list("eval.jsonl")):
            eval_rows = read_rows(bucket.get("eval.jsonl").decode(), "eval.jsonl")
        elif len(rows) >= 20:
            rows, eval_rows = rows[:-len(rows) // 10], rows[-len(rows) // 10:]
    if run["rewards"] and not args.reward:
        raise UserError("this run scores with " + " ".join(f"--reward FILE.py:{n}={w:g}" for n, w, _ in run["rewards"]) + "; give the same file")
    rewards = [load_reward(spec)[:3] for spec in args.reward] or [(run["task"], 1.0, add_reward if run["task"] == "add" else math_reward)]
    return Task(rows, eval_rows[:256], rewards, tokenizer, args.reward_timeout_s)

def try_prompts(task: Task, run: dict) -> None:
    """UserError where the tokenizer cannot write the first thousand prompts, or not in tokens of this model."""
    for row in task.rows[:1000]:
        try:
            ids = task.encode(row["prompt"])
        except Exception as error:  # whatever a chat template raises
            raise UserError(f"prompt {row['prompt']!r:.60} cannot be encoded; chat messages need a model with a chat template, "
                            f"text does not ({one_line(error)})") from None
        if max(ids, default=0) >= run["vocabulary"]:
            raise UserError(f"token {max(ids)} is not in the model's vocabulary of {run['vocabulary']}: --model {run['model']} "
                            "has the tokenizer of another model")

def run_learner(bucket, args) -> None:
    began, run = time.monotonic(), join_run(bucket, args)
    policy = load_policy(bucket, run, args, slots=2)
    learner = Learner(bucket, run, args, policy, load_task(bucket, run, args, policy.tokenizer))
    learner.start()
    try:
        say("ready", role="learner", url="-", id=learner.id, run_id=run["run_id"])
        learner.train()
        if learner.at_start >= args.steps:
            print(f"this run is complete: {learner.at_start} steps are done, --steps is {args.steps}", flush=True)
        finish(learner, time.monotonic() - began)
    finally:
        learner.member.stop()

def finish(learner: Learner, wall_s: float) -> None:
    """final/, summary.json, report.html and the summary line."""
    bucket, run = learner.bucket, learner.run
    files = lora.adapter_files(learner.state.adapter, run["lora_r"], run["lora_alpha"], run["target_modules"], run["model"])
    for _ in range(2):
        try:
            bucket.publish("final", files, {"step": learner.state.step, "run_id": run["run_id"], "digest": learner.digest})
            break
        except Conflict:  # the end of the same run with fewer --steps
            bucket.delete_prefix("final")
    before = json.loads(bucket.get("summary.json")) if any(bucket.list("summary.json")) else {}
    if before.get("digest") == learner.digest:  # the run was complete
        wall_s = before["wall_s"]
    summary = summarize(bucket, run, learner.metrics) | {"wall_s": round(wall_s, 1), "digest": learner.digest}
    bucket.put("summary.json", json.dumps(summary | {"last": learner.metrics}, sort_keys=True, indent=1).encode() + b"\n")
    write_report(bucket, run)
    say("summary", **summary)

def curve(bucket, run: dict, last: dict) -> tuple[list[dict], list[dict]]:
    """(entries, metrics of each step). Entry t + 1 carries the metrics of step t: the learning curve is in the log."""
    log = Log(bucket, run)
    with ThreadPoolExecutor(32) as pool:  # the last step is known by its metrics even where a store lists its entry late
        entries = list(pool.map(log.read, range(1, max(log.refresh(), last.get("step", 0)) + 1)))
    rows = {row["step"]: row for row in [e["previous"] for e in entries] + [last] if row}
    return entries, [rows[t] for t in sorted(rows)]

def best_and_worst(groups: list[Group]) -> dict | None:
    """The prompt with the widest rewards of a step, its best and its worst completion, cut short: for people to read."""
    texts = [g.text for g in groups if g.text]
    if not texts:
        return None
    text = max(texts, key=lambda t: max(t["rewards"]) - min(t["rewards"]))
    best, worst = (choose(range(len(text["rewards"])), key=text["rewards"].__getitem__) for choose in (max, min))
    return {"prompt": text["prompt"], **{name: {"text": text["completions"][i][:1000], "reward": text["rewards"][i]}
                                         for name, i in (("best", best), ("worst", worst))}}

def summarize(bucket, run: dict, last: dict) -> dict:
    """Totals over the whole run from the log: every written group is trained, equal, dropped or pending."""
    entries, rows = curve(bucket, run, last)

    def mean(name, some):
        values = [r[name] for r in some if r[name] is not None]
        return sum(values) / len(values) if values else None
    named, dropped = ({k for e in entries for k in f(e)} for f in (named_groups, lambda e: e["dropped"]))
    equal, used = sum(e["groups_equal"] for e in entries), len(named - dropped)
    pending = sum(k not in named for k in listed(bucket, "groups/"))
    evals = {e["step"]: e for e in (json.loads(bucket.get(k)) for k in bucket.list("evals/"))}
    tokens = sum(r["tokens"] for r in rows)
    return {"steps": len(entries), "reward_first": mean("reward", rows[:5]), "reward_last": mean("reward", rows[-10:]),
            **{f"eval_{when}{'_greedy' * (kind == 'greedy')}": evals.get(step, {}).get(kind)
               for when, step in (("before", 0), ("after", len(entries))) for kind in ("sampled", "greedy")},
            "ratio_mean": sum(r["ratio"] * r["tokens"] for r in rows if r["tokens"]) / tokens if tokens else None,
            "mismatch": mean("mismatch", rows), "staleness_mean": mean("staleness_mean", rows),
            "groups_written": len(named) + pending, "groups_trained": used - equal, "groups_equal": equal,
            "groups_dropped": len(dropped), "groups_pending": pending}

def write_report(bucket, run: dict, out: str | None = None) -> None:
    """report.html, docs/report.html with this run's numbers in place of its one placeholder, and metrics.jsonl: in the
    bucket, or in the folder `out` (of somebody else's run)."""
    place = FileBucket(out) if out else bucket
    summary = json.loads(bucket.get("summary.json")) if any(bucket.list("summary.json")) else None
    steps = curve(bucket, run, (summary or {}).get("last", {}))[1]
    place.put("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in steps).encode())
    data = {"run": run, "summary": summary, "steps": steps, "members": list(proxy.LiveMembers(bucket).poll().values()),
            "evals": [json.loads(bucket.get(k)) for k in bucket.list("evals/")]}
    page = Path(__file__).parent / "docs" / "report.html"
    if not page.is_file():
        return warn(f"{page} is missing, so there is no report.html; copy it there, then --role report --bucket {bucket.address}")
    template = page.read_text(encoding="utf-8")
    # Subtle: "</script>" inside a completion would end the page's script; "<" is never part of JSON outside its strings.
    place.put("report.html", template.replace("/*DATA*/null", json.dumps(data).replace("<", "\\u003c")).encode())
    say("report", at=f"{place.address}/report.html")

def load_engine(bucket, run: dict, args) -> Engine:
    policy = load_policy(bucket, run, args, slots=run["max_staleness"] + 4)
    try:
        return Engine(bucket, run, policy, max(args.max_rows, run["group_size"]))
    except ValueError as error:  # an architecture that only vLLM samples
        raise UserError(one_line(error)) from None

def run_sampler(bucket, args) -> None:
    try:
        proxy.parse_listen(args.listen, bool(args.token))
    except ValueError as error:
        raise UserError(str(error)) from None
    run = join_run(bucket, args)
    engine = load_engine(bucket, run, args)
    engine.start(follows=False)  # the router loads the versions, and checks each, before it sends anything here
    member = proxy.Member(bucket, "sampler", run_id=run["run_id"])

    def ready(url):
        member.update(url=url, doing="serving")
        member.start()
        say("ready", role="sampler", url=url)
    try:
        proxy.serve_replica(engine, args.listen, args.token, on_ready=ready, roots=[bucket.root] if bucket.root else [])
    finally:
        engine.end()
        member.stop()

def run_actor(bucket, args) -> None:
    run, engine = join_run(bucket, args), None
    if args.sampler:
        tokenizer, sampler = lora.load_tokenizer(base_of(bucket, run, args)), HttpSampler(bucket, run, args.sampler, args.token)
    else:
        engine = sampler = load_engine(bucket, run, args)
        engine.start(follows=True)
        tokenizer = engine.policy.tokenizer
    actor = Actor(bucket, run, args, load_task(bucket, run, args, tokenizer), sampler)
    try:
        actor.work()
    finally:
        actor.member.stop()
        if engine:
            engine.end()

def published(bucket, version: int | None) -> tuple[int, dict]:
    """(version, tensors) of an adapter in the bucket, the newest by default."""
    versions = manifests(bucket, "adapters/")
    if not versions or (version is not None and version not in versions):
        raise UserError(f"{bucket.address} has no adapter {'yet' if version is None else version}; it has {versions}")
    version = versions[-1] if version is None else version
    return version, lora.read_adapter(bucket.fetch(f"adapters/v{version:06d}")[1])[0]

def run_eval(bucket, args) -> None:
    """Held-out reward of an adapter of the bucket."""
    run = join_run(bucket, args)
    policy, (version, tensors) = load_policy(bucket, run, args, slots=1), published(bucket, args.policy_version)
    say("eval", version=version, **evaluate(policy, load_task(bucket, run, args, policy.tokenizer), tensors, run))

def run_export(bucket, args) -> None:
    """Copies an adapter to --out as PEFT files; --merge writes base and adapter as one model instead."""
    if not args.out:
        raise UserError("--role export needs --out DIR")
    run, out = join_run(bucket, args), FileBucket(args.out).root
    version, tensors = published(bucket, args.policy_version)
    out.mkdir(parents=True, exist_ok=True)
    if args.merge:
        policy = load_policy(bucket, run, args, slots=1)
        lora.merge(policy.model, tensors, run["lora_alpha"], run["lora_r"], policy.model.dtype).save_pretrained(out)
        policy.tokenizer.save_pretrained(out)
    else:
        for name, data in lora.adapter_files(tensors, run["lora_r"], run["lora_alpha"], run["target_modules"], run["model"]).items():
            (out / name).write_bytes(data)
    say("exported", version=version, merged=args.merge, to=out)

def run_report(bucket, args) -> None:
    write_report(bucket, join_run(bucket, args), args.out)

def run_all(args, argv: list[str]) -> int:
    """Every role as a process of its own on this machine; starts one that dies again, ends all when the learners are done."""
    open_bucket(args.bucket)  # a mistake in this, or in a reward, is said before anything is started
    for spec in args.reward:
        load_reward(spec)
    here = Path(__file__).resolve()
    python = [sys.executable, "-u", str(here), *argv]
    commands = {f"learner {i}": [*python, "--role", "learner"] for i in range(args.learners)}
    commands["proxy"] = [sys.executable, "-u", str(here.parent / "proxy.py"), "--bucket", args.bucket, "--listen", "127.0.0.1:0"]
    commands |= {f"sampler {i}": [*python, "--role", "sampler", "--listen", "127.0.0.1:0"] for i in range(args.samplers)}
    commands |= {f"actor {i}": [*python, "--role", "actor", "--sampler", "bucket"] for i in range(args.actors)}
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {"GRPO_PARENT": str(os.getpid()), "GRPO_TOKEN": args.token}
    running, deaths, code = {name: subprocess.Popen(c, env=env) for name, c in commands.items()}, deque(maxlen=5), 0
    env.pop("GRPO_CRASH", None)  # a crash point is for the first life of a process only
    try:
        while not code and any("learner" in name for name in running):
            time.sleep(0.1)
            for name in [n for n, p in running.items() if p.poll() is not None]:
                status = running.pop(name).returncode
                has_died = status or name.split()[0] in ("proxy", "sampler")  # servers are never done: 0 is a signal
                deaths.extend([time.monotonic()] if has_died else [])
                if status == 2 or (len(deaths) == 5 and deaths[-1] - deaths[0] < 300):
                    code = 2 if status == 2 else 1
                elif has_died:
                    warn(f"{name} died with status {status}; starting it again")
                    running[name] = subprocess.Popen(commands[name], env=env)
    except KeyboardInterrupt:
        code = 1
        warn(f"stopped; the same command goes on from here ({args.bucket})")
    finally:
        for process in running.values():
            process.terminate()
        until = time.monotonic() + 4
        for process in running.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
    return code

# What --help shows, so that it fits on a screen; --help-all shows every flag.
EVERYDAY = ("role bucket sampler listen token device samplers actors out merge model data eval-data task reward steps groups-per-step "
            "group-size max-tokens max-prompt-tokens temperature lora-r lora-alpha lr loss kl max-staleness token-budget inflight recompute").split()
PROCESS_FLAGS = (  # name, type or choices, default, meaning
    ("role", ("all", "learner", "actor", "sampler", "proxy", "eval", "report", "export"), "all", "what to start"),
    ("bucket", str, "runs/demo", "folder, s3://bucket/prefix or URL"), ("data", str, None, "JSON lines: prompt (text or chat messages) and any other columns"),
    ("eval-data", str, None, "held-out rows; without it the last tenth of the data"), ("init-adapter", str, None, "PEFT folder to start from"),
    ("sampler", str, None, "URL, or bucket: the proxy announced there; without it an actor samples by itself"),
    ("listen", str, "127.0.0.1:8001", "HOST:PORT of a sampler; port 0: any free one"), ("token", str, os.environ.get("GRPO_TOKEN", ""), "bearer token (also GRPO_TOKEN)"),
    ("device", str, None, "cuda, cuda:1, cpu; without it cuda if there is one"), ("dtype", ("float32", "bfloat16", "float16"), None, "of the base; without it bfloat16 on cuda, float32 on the CPU"),
    ("token-budget", int, 2048, "tokens per forward of a learner"), ("queue-groups", int, 0, "groups waiting and in flight at most; 0: from max-staleness"),
    ("inflight", int, 0, "rollouts in flight per actor; 0: 128, tiny 512"), ("max-rows", int, 0, "rows that a sampler decodes at once; 0: 64 (tiny: 256)"),
    ("chunks", int, 0, "parts per step; 0: one per live learner"), ("eval-steps", int, 0, "steps between evaluations; 0: first and last, -1: none"),
    ("reward-timeout-s", float, 60.0, "seconds a reward function may take"), ("group-deadline-s", float, 600.0, "seconds after which a group closes with what it has"),
    ("wait-s", float, 3600.0, "seconds any wait may take; 0: no limit"), ("policy-version", int, None, "adapter to eval or export; without it the newest"),
    ("out", str, None, "folder that export or report writes (report: else the bucket)"), ("merge", bool, False, "export base and adapter as one model"),
    ("recompute", bool, False, "learner: a third slower, a fifth of the memory per token"), ("trust-remote-code", bool, False, "run code that comes with the model"),
    ("samplers", int, 2, "of role all"), ("actors", int, 1, "of role all"), ("learners", int, 1, "of role all"))

def arguments(argv: list[str]) -> argparse.Namespace:
    parser = Arguments(prog="grpo_async.py", usage="grpo_async.py [--role ROLE] [--bucket ADDRESS] [flags]", allow_abbrev=False,
                       formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
                       description=__doc__.split("\n")[0], epilog="--role proxy has flags of its own: --role proxy --help")
    parser.add_argument("--version", action="version", version=f"async-grpo {VERSION}")
    parser.add_argument("--help-all", action="help", help="every flag; --help leaves the rare ones out")

    titles = "this process", "the run (fixed by its first learner; everybody else reads it from the bucket)"
    for title, flags in zip(titles, (PROCESS_FLAGS, RUN_FLAGS)):
        group = parser.add_argument_group(title)
        for name, kind, default, text in flags:
            tiny = TINY_DEFAULTS.get(name.replace("-", "_"))
            if default is not None and kind is not bool and name != "token":
                text += f" (default {default}{'' if tiny is None else f'; tiny: {tiny}'})"
            if isinstance(kind, tuple):
                how, text = {"choices": kind, "metavar": "NAME"}, f"{', '.join(kind)}: {text}"
            else:
                how = {"action": "store_true"} if kind is bool else {"type": kind, "metavar": kind.__name__.upper()}
            is_shown = name in EVERYDAY or "--help-all" in argv
            group.add_argument(f"--{name}", default=None if flags is RUN_FLAGS else default,
                               help=text if is_shown else argparse.SUPPRESS, **how)
    group.add_argument("--reward", action="append", default=[], metavar="SPEC",
                       help="FILE.py:FUNCTION[=WEIGHT], TRL's signature; repeatable")
    args = parser.parse_args(argv)
    ones = ("steps", "groups_per_step", "max_tokens", "max_prompt_tokens", "lora_r", "sync_steps", "checkpoint_steps", "token_budget",
            "samplers", "actors", "learners")
    least = {**dict.fromkeys(ones, 1), "group_size": 2, "eval_steps": -1}
    for name, value in vars(args).items():
        if type(value) in (int, float) and not least.get(name, 0) <= value < 2 ** 63:  # NaN is not, either
            raise UserError(f"--{name.replace('_', '-')} must be at least {least.get(name, 0)} and below 2**63, got {value}")
    for name in ("temperature", "lora_alpha"):
        if getattr(args, name) == 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, got 0")
    if args.target_modules and args.target_modules != "all-linear":
        args.target_modules = sorted(args.target_modules.split(","))
    return args

def end_with_parent() -> None:
    """Thread: a process started by --role all ends when that one is gone, however it went."""
    parent = int(os.environ.get("GRPO_PARENT", 0))
    while parent and os.getppid() == parent:
        time.sleep(1)
    if parent:
        os._exit(1)

def leave(signum, frame) -> None:
    """The first SIGTERM or Ctrl-C ends this process in order; those that follow must not disturb that."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: None)  # subtle: with SIG_IGN Python reports a signal that arrives meanwhile
    raise Stopped

def main(argv: list[str]) -> int:
    """Runs one role; returns 0 done, 1 the world failed, 2 the user's mistake."""
    args = argparse.Namespace(bucket="", listen="")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if ROLE.parse_known_args(argv)[0].role == "proxy":
            return proxy.main(ROLE.parse_known_args(argv)[1])
        args = arguments(argv)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        if "GRPO_PARENT" not in os.environ:  # a process of --role all: its parent has said this
            say("start", **{k: v for k, v in vars(args).items() if v not in (None, "", [], False) and k != "token"}, **versions)
        if args.role == "all":
            return run_all(args, argv)
        threading.Thread(target=end_with_parent, daemon=True).start()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, leave)
        {"learner": run_learner, "actor": run_actor, "sampler": run_sampler, "eval": run_eval, "export": run_export,
         "report": run_report}[args.role](open_bucket(args.bucket), args)
        return 0
    except Stopped:
        if "GRPO_PARENT" not in os.environ:
            warn(f"stopped; the same command goes on from here ({args.bucket})")
        return 1  # its work is not done
    except (UserError, OSError, RuntimeError, KeyboardInterrupt) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        advice = {errno.ENOSPC: f"; free some there ({args.bucket}), or take another --bucket",
                  errno.EADDRINUSE: f"; --listen HOST:0 takes any free port instead of {args.listen}"}.get(getattr(error, "errno", None), "")
        if is_out_of_memory(error):
            advice = "; lower --token-budget or add --recompute (learner), lower --max-rows (sampler) or --lora-r, or take --dtype bfloat16"
        tell(f"error: {one_line(error) or 'interrupted'}{advice}", sys.stderr)
        return 2 if isinstance(error, (UserError, BadKey, Denied, RuntimeError)) else 1

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
