"""Asynchronous GRPO with LoRA, on machines that share nothing but a bucket.

    python grpo_async.py                                       # everything on this machine, a tiny model, about two minutes
    python grpo_async.py --role learner --bucket /mnt/run --model meta-llama/Meta-Llama-3-8B --data d.jsonl --task math
    python grpo_async.py --role actor   --bucket /mnt/run      # any number, anywhere; samples in its own process
    python grpo_async.py --role report  --bucket /mnt/run      # also: sampler, proxy, eval, export

The idea. Actors ask the newest policy for a group of G completions of one prompt, score them and write the group to
the bucket. A learner that finds `groups_per_step` of them writes the log entry of the next step (which groups, which
scalars), computes the gradient of each chunk of groups, writes it as a part, and applies the parts. Nobody waits for
anybody by name: the bucket is a write-ahead log, and the state after step t is a fold of it,

    state_t = apply(state_{t-1}, entry_t, parts_t)

so a learner that dies, restarts or joins replays the log and arrives at the same bits.

Guarantees
 1. steps/t is created once, by create-if-absent, before anything is computed from it: no group is trained twice.
 2. A part is the fp32 gradient of a chunk; the first valid one counts. All learners apply the same bits.
 3. Every entry carries the sha256 of the state before it: divergence is seen at the next step.
 4. Nothing is deleted that a restart from the previous trusted checkpoint could need.

Glossary: B rows of packed tokens, W tokens per row, G completions of a group, C completions, T tokens of the longest
completion, V vocabulary, d hidden width, r LoRA rank.

Does NOT: train more than LoRA matrices, shard a model over GPUs, defend against a malicious writer to the bucket.

[1] GRPO: Shao et al. 2024, arXiv:2402.03300   [2] DAPO: Yu et al. 2025, arXiv:2503.14476   [3] Dr. GRPO: Liu et al.
2025, arXiv:2503.20783   [4] GSPO: Zheng et al. 2025, arXiv:2507.18071   [5] k3: schulman.com, "Approximating KL
Divergence", 2020   [6] AdamW: Loshchilov & Hutter 2019, arXiv:1711.05101   [7] truncated importance sampling: Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import requests

import proxy
from bucket import BucketError, Conflict, Corrupt, NotFound, open_bucket

ROLE = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
ROLE.add_argument("--role", default="all")
# A proxy and the supervisor of a local run start in 0.2 s, and need no torch: every use of it is inside a function.
if __name__ != "__main__" or ROLE.parse_known_args()[0].role not in ("all", "proxy", "report"):
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load as load_tensors, save as save_tensors
    from transformers import LlamaConfig, LlamaForCausalLM

    import lora

VERSION = "0.1.0"
LOG_RATIO_LIMIT = 20.0  # exp(20) is finite in fp32 and far beyond any ratio that still means something
POLL_S = 0.05           # between two looks at a folder; ten times as long for a bucket behind a network
WAIT_LIMIT_S = 600      # for what a deployment must provide (run.json, a sampler): after it, exit 1
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


class UserError(Exception):
    """The user's mistake: one line on stderr, exit code 2."""


class Diverged(Exception):
    """This learner's state is not the one that the log's next entry was written on; reload and fold again."""


def say(word: str, /, **values) -> None:
    """Prints one key=value line (floats with 4 significant digits)."""
    text = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
    print(f"{word} {text}".strip(), flush=True)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def crash_point(name: str, step: int) -> None:
    """Dies like a lost machine at one named point of one step, when GRPO_CRASH=name:step asks for it (tests)."""
    if os.environ.get("GRPO_CRASH") == f"{name}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------- 1. Tasks and rewards

@dataclass
class Task:
    """What is asked and how answers are scored. rows: {"prompt": str or chat messages, other columns}."""
    rows: list[dict]
    eval_rows: list[dict]
    rewards: list[tuple]                 # (name, weight, function with TRL's signature)
    tokenizer: object
    max_prompt_tokens: int
    timeout_s: float = 60.0
    raised: int = 0

    def encode(self, prompt) -> list[int]:
        """Token ids of a prompt: a string as it is, chat messages through the tokenizer's template."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def score(self, row: dict, completions: list) -> list[float | None]:
        """Weighted sum of the reward functions per completion; None where no function gave a number."""
        ids = [c.token_ids for c in completions]
        texts = [self.tokenizer.decode(i, skip_special_tokens=True) for i in ids]
        is_chat = not isinstance(row["prompt"], str)
        answers = [[{"role": "assistant", "content": t}] for t in texts] if is_chat else texts
        columns = {k: [v] * len(ids) for k, v in row.items() if k != "prompt"}
        columns |= {"prompts": [row["prompt"]] * len(ids), "completions": answers, "completion_ids": ids,
                    "finish_reasons": [c.finish_reason for c in completions]}
        totals: list[float | None] = [None] * len(ids)
        for name, weight, function in self.rewards:
            for i, value in enumerate(self.call(name, function, columns)):
                if value is not None:
                    totals[i] = (totals[i] or 0.0) + weight * value
        return totals

    def call(self, name: str, function, columns: dict) -> list[float | None]:
        """One reward function, in a thread of its own so that a hang costs `timeout_s` and not the actor.

        An exception or a hang leaves this group's rollouts out, three in a row stop the actor; a result of the wrong
        length stops it at once. NaN and infinities count as None."""
        n, box = len(columns["completions"]), {}
        accepts = inspect.signature(function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in accepts.values()):
            columns = {k: v for k, v in columns.items() if k in accepts}

        def work():
            try:
                box["values"] = list(function(**columns))
            except Exception as error:  # whatever a user's function raises is reported with its name
                box["error"] = f"raised {type(error).__name__}: {error}"
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if "values" not in box:
            self.raised += 1
            problem = f"reward {name} {box.get('error', f'did not return within {self.timeout_s:g} s')}"
            if self.raised >= 3:
                raise UserError(f"{problem}, three times in a row; mend the function and start the actor again")
            warn(f"{problem}; the {n} rollouts of this group are left out")
            return [None] * n
        self.raised, values = 0, box["values"]
        if len(values) != n:
            raise UserError(f"reward {name} returned {len(values)} values for {n} completions; return one for each")
        values = [None if v is None else float(v) for v in values]
        if any(v is not None and not math.isfinite(v) for v in values):
            warn(f"reward {name} returned {values}: rollouts without a finite reward are left out")
        return [v if v is not None and math.isfinite(v) else None for v in values]


NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def add_reward(completions, answer, finish_reasons, **_) -> list[float]:
    """1 when the completion ended by itself and its last number is the sum."""
    return [float(stop == "stop" and re.findall(r"\d+", text)[-1:] == [str(want)])
            for text, want, stop in zip(completions, answer, finish_reasons)]


def math_reward(completions, answer, **_) -> list[float]:
    """1 when the completion's final answer equals the `answer` column: the last \\boxed{}, else what follows the last
    ####, else the last number (or, where the answer is a letter A to J, the last such letter standing alone)."""
    def canonical(text: str) -> str:
        text = text.strip().strip("$. ").replace(",", "")
        try:
            return repr(float(text))
        except ValueError:
            return text.upper()

    def final(text: str, letter: bool) -> str:
        boxed, hashed = re.findall(r"\\boxed\{([^{}]*)\}", text), text.rpartition("####")
        if boxed or hashed[1]:
            return boxed[-1] if boxed else (hashed[2].strip().splitlines() or [""])[0]
        found = re.findall(r"(?<![A-Za-z])[A-Ja-j](?![A-Za-z])", text) if letter else NUMBER.findall(text)
        return found[-1] if found else ""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    wants = [final(str(a), False) if "####" in str(a) else str(a) for a in answer]
    return [float(canonical(final(t, re.fullmatch(r"\s*[A-Ja-j]\s*", w) is not None)) == canonical(w))
            for t, w in zip(texts, wants)]


def read_rows(text: str, name: str) -> list[dict]:
    """The rows of a JSON-lines file; UserError naming file and line for what is not one."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{name} line {number}: not JSON ({error.msg}); expected one object per line") from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        is_chat = isinstance(prompt, list) and prompt and all(
            isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
        if not is_chat and not (isinstance(prompt, str) and prompt):
            raise UserError(f'{name} line {number}: expected "prompt" as text or chat messages, got {prompt!r:.80}')
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
    module_spec.loader.exec_module(module)
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
    """Estimate of KL(learner || reference) per token [C, T]: exp(d) - d - 1 with d = reference - learner [5]."""
    d = log_ratio(reference_logprobs, learner_logprobs, mask)
    return d.exp() - d - 1


def completion_means(per_token, mask):
    """Mean over each completion's trained tokens, [C, T] -> [C]; 0 for a completion without any."""
    return (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)


# Each loss takes log ratios [C, T], mask [C, T] (trained tokens), advantages [C], clip bounds, the cap on r (inf: none)
# and a penalty per token [C, T] (beta k3 r; 0 without --kl). It returns (sum, count); the step divides the sum over all
# chunks by the sum of the counts, so a step adds up exactly however it is cut.

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
    """No length and no std normalisation [3]: token sum / (rollouts x max tokens). Advantages come without std."""
    total, _ = dapo_loss(log_r, mask, advantage, low, high, cap, penalty)
    return total, mask.any(1).sum() * max_tokens


def gspo_loss(log_r, mask, advantage, low, high, cap, penalty):
    """Sequence-level ratio [4]: r = exp(mean log ratio of the completion); its length never enters r."""
    ratio = completion_means(log_r, mask).exp().clamp(max=cap)
    return (surrogate(ratio, advantage, low, high) * mask.any(1) + completion_means(penalty * mask, mask)).sum(), \
        mask.any(1).sum()


LOSSES = {"dapo": (dapo_loss, 0.2, 0.28), "grpo": (grpo_loss, 0.2, 0.2), "dr_grpo": (dr_grpo_loss, 0.2, 0.2),
          "gspo": (gspo_loss, 3e-4, 4e-4)}  # name: function, default clip below and above 1


def normaliser(update: dict, mask) -> float:
    """The loss's count for trained-token mask lengths: what the loss function itself returns, known before computing.
    mask: trained tokens of each completion that enters the loss, as a list of ints."""
    trained = [n for n in mask if n > 0]
    return float({"dapo": sum(trained), "dr_grpo": len(trained) * update["max_tokens"]}.get(update["loss"], len(trained)))

# ---------------------------------------------------------------- 3. Packing and gradients

@dataclass
class Group:
    """One prompt's completions: what an actor writes and a learner trains on. All lists have one item per rollout."""
    prompt_id: int
    prompt_ids: list[int]
    completion_ids: list[list[int]]
    sampler_logprobs: list[list[float]]
    rewards: list[float]
    versions: list[int]
    truncated: list[bool]
    text: dict = field(default_factory=dict)     # {"prompt", "completions"}: for people
    adapter_sha256: dict = field(default_factory=dict)
    key: str = ""

    @property
    def is_equal(self) -> bool:
        return len(self.rewards) < 2 or max(self.rewards) == min(self.rewards)

    def trained_tokens(self, run: dict) -> list[int]:
        """Tokens of each completion that enter the loss: 0 for one that has no gradient or is masked."""
        if self.is_equal and not run["kl"]:
            return [0] * len(self.rewards)
        return [0 if run["mask_truncated"] and cut else len(ids)
                for ids, cut in zip(self.completion_ids, self.truncated)]


@dataclass
class Policy:
    """A frozen base with LoRA slots. Slot 0 trains; slot 1 re-scores rollouts under their own version."""
    model: object
    lora: object
    tokenizer: object
    stop_ids: list[int]

    @property
    def device(self):
        return next(self.model.parameters()).device


@dataclass
class Rows:
    """Packed completions. In a row each group's prompt stands once, its completions behind it (branches); completion
    tokens see the prompt and their own branch. The last token of a completion is only a target, so it takes no place."""
    ids: object            # [B, W] token ids
    positions: object      # [B, W] position in its own sequence: every branch continues after the prompt
    prompt: object         # [B, W] number of the prompt in the row; -1 is padding
    branch: object         # [B, W] 0 for the prompt, 1.. for its completions
    predictor: object      # [C, T] index into B*W of the token whose output predicts target [c, t]
    targets: object        # [C, T] token ids
    mask: object           # [C, T] bool, true where there is a target
    sampler_logprobs: object  # [C, T]
    advantage: object      # [C]
    n_inputs: int


def pieces(groups: list[Group], run: dict, budget: int, share: bool) -> list[tuple]:
    """Cuts groups into (prompt ids, [(ids, sampler logprobs, advantage)]) of at most `budget` tokens each; with
    share=False one completion each, for models whose layers are not all full attention."""
    found = []
    for g in groups:
        scaled = advantages(g.rewards, run["loss"] != "dr_grpo")
        size = budget + 1
        for ids, sampler, a, n in zip(g.completion_ids, g.sampler_logprobs, scaled, g.trained_tokens(run)):
            if not n:
                continue
            if size + n - 1 > budget or not share:
                found.append((g.prompt_ids, []))
                size = len(g.prompt_ids)
            found[-1][1].append((ids, sampler, a))
            size += n - 1
    return found


def pack(found: list[tuple], budget: int, share: bool, device) -> list[Rows]:
    """First-fit decreasing of pieces into rows of one width, `budget` tokens of rows per forward."""
    def length(piece):
        return len(piece[0]) + sum(len(ids) - 1 for ids, _, _ in piece[1])
    found = sorted(found, key=length, reverse=True)  # stable: the order of equal lengths is the groups' order
    batches = []
    while found:
        width = max(length(found[0]), min(budget, 256) if share else 0)
        rows, left = [], []
        for piece in found:
            row = next((r for r in rows if share and r[0] + length(piece) <= width), None)
            if row is None and (not rows or (len(rows) + 1) * width <= budget):
                row = [0]
                rows.append(row)
            if row is None:
                left.append(piece)
                continue
            row[0] += length(piece)
            row.append(piece)
        batches.append(fill([row[1:] for row in rows], width, device))
        found = left
    return batches


def fill(rows: list[list[tuple]], width: int, device) -> Rows:
    """The tensors of packed rows, padded to `width`."""
    ids, positions, prompt, branch, predictor, targets, sampler, advantage = ([] for _ in range(8))
    for b, row in enumerate(rows):
        start = len(ids)
        for p, (prompt_ids, completions) in enumerate(row):
            P = len(prompt_ids)
            last = len(ids) + P - 1
            ids += prompt_ids
            positions += range(P)
            branch += [0] * P
            for j, (tokens, logprobs, a) in enumerate(completions, 1):
                n = len(tokens) - 1
                predictor.append([last, *range(len(ids), len(ids) + n)])
                targets.append(tokens)
                sampler.append(logprobs)
                advantage.append(a)
                ids += tokens[:-1]
                positions += range(P, P + n)
                branch += [j] * n
            prompt += [p] * (len(ids) - len(prompt))
        pad = (b + 1) * width - len(ids)
        ids, positions, branch, prompt = ids + [0] * pad, positions + [0] * pad, branch + [0] * pad, prompt + [-1] * pad
        assert len(ids) == start + width, (len(ids), start, width)
    C, T = len(targets), max(map(len, targets))

    def padded(lists, dtype):
        out = torch.zeros(C, T, dtype=dtype)
        for c, values in enumerate(lists):
            out[c, :len(values)] = torch.tensor(values, dtype=dtype)
        return out.to(device)
    mask = torch.arange(T) < torch.tensor([len(t) for t in targets])[:, None]  # [C, T]
    shaped = [torch.tensor(x, device=device).view(len(rows), width) for x in (ids, positions, prompt, branch)]  # [B, W]
    return Rows(*shaped, padded(predictor, torch.long), padded(targets, torch.long), mask.to(device),
                padded(sampler, torch.float32), torch.tensor(advantage, dtype=torch.float32, device=device),
                n_inputs=sum(x >= 0 for x in prompt))


def attention_mask(rows: Rows, model, share: bool):
    """Which token sees which: [B, 1, W, W] added to the scores (or flex attention's BlockMask of the same rule)."""
    if not share:
        return None  # one sequence per row, padding behind it: causality alone is right, also for sliding windows
    B, W = rows.ids.shape
    prompt, branch = rows.prompt, rows.branch

    def sees(b, h, q, k):
        return (k <= q) & (prompt[b, q] == prompt[b, k]) & ((branch[b, k] == 0) | (branch[b, k] == branch[b, q]))
    if model.config._attn_implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask
        return create_block_mask(sees, B, None, W, W, device=rows.ids.device)
    q, k = torch.arange(W, device=prompt.device)[:, None], torch.arange(W, device=prompt.device)[None, :]
    visible = sees(torch.arange(B, device=prompt.device)[:, None, None], None, q[None], k[None])  # [B, W, W]
    zero = torch.zeros((), dtype=model.dtype, device=prompt.device)
    return torch.where(visible, zero, torch.finfo(model.dtype).min)[:, None]


def shares_prompts(model) -> bool:
    """True when every layer is full attention, so that a group's completions can stand behind one prompt."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    return set(kinds) <= {"full_attention"} if kinds else not getattr(config, "sliding_window", None)


def row_logprobs(policy: Policy, rows: Rows, slot: int | None, temperature: float):
    """Learner logprobs [C, T] (0 where there is no target) and entropies [N] of the targets, under one slot."""
    share = shares_prompts(policy.model)
    with policy.lora.use(slot):
        hidden = lora.backbone(policy.model)(
            input_ids=rows.ids, position_ids=rows.positions, use_cache=False,
            attention_mask=attention_mask(rows, policy.model, share)).last_hidden_state  # [B, W, d]
    head = lora.head(policy.model)
    taken = hidden.flatten(0, 1)[rows.predictor[rows.mask]]  # [N, d]
    logprobs, entropy = lora.token_logprobs(taken, head.weight, head.bias, rows.targets[rows.mask], temperature)
    out = torch.zeros(rows.mask.shape, device=logprobs.device)
    return out.masked_scatter(rows.mask, logprobs.float()), entropy


def chunk_gradient(policy: Policy, groups: list[Group], run: dict, update: dict, budget: int) -> tuple[dict, dict]:
    """The gradient of the summed loss of some groups, under the adapter in slot 0: ({name: fp32 CPU tensor}, sums).

    sums are what the step's metrics are made of; ratio, kl, entropy and clip sums run over trained tokens."""
    parameters = policy.lora.parameters(0)
    for p in parameters.values():
        p.grad = None
    rewards = [x for g in groups for x in g.rewards]
    sums = {"count": 0.0, "loss": 0.0, "ratio": 0.0, "kl": 0.0, "entropy": 0.0, "clipped": 0.0, "trained_tokens": 0,
            "input_tokens": 0, "rollouts": len(rewards), "reward": sum(rewards),
            "completion_tokens": sum(len(i) for g in groups for i in g.completion_ids),
            "truncated": sum(sum(g.truncated) for g in groups)}
    share = shares_prompts(policy.model)
    loss_function, low, high = LOSSES[update["loss"]][0], update["clip_low"], update["clip_high"]
    extra = {"max_tokens": update["max_tokens"]} if update["loss"] == "dr_grpo" else {}
    cap = update["tis"] or math.inf
    for rows in pack(pieces(groups, run, budget, share), budget, share, policy.device):
        learner_logprobs, entropy = row_logprobs(policy, rows, 0, update["temperature"])
        log_r = log_ratio(learner_logprobs, rows.sampler_logprobs, rows.mask)
        penalty = torch.zeros_like(log_r)
        if update["kl"]:
            with torch.no_grad():
                reference_logprobs, _ = row_logprobs(policy, rows, None, update["temperature"])
            kl = k3(learner_logprobs, reference_logprobs, rows.mask)
            penalty = update["kl"] * kl * log_r.detach().exp().clamp(max=cap)
            sums["kl"] += (kl.detach() * rows.mask).sum().item()
        loss, count = loss_function(log_r, rows.mask, rows.advantage, low, high, cap, penalty, **extra)
        loss.backward()
        ratio, a = log_r.detach().exp(), rows.advantage[:, None]
        clipped = rows.mask & (((ratio > 1 + high) & (a > 0)) | ((ratio < 1 - low) & (a < 0)))
        for name, value in (("count", count), ("loss", loss.detach()), ("ratio", (ratio * rows.mask).sum()),
                            ("entropy", entropy.sum()), ("clipped", clipped.sum())):
            sums[name] += value.item()
        sums["trained_tokens"] += int(rows.mask.sum())
        sums["input_tokens"] += rows.n_inputs
    return {name: torch.zeros(p.shape) if p.grad is None else p.grad.float().cpu() for name, p in parameters.items()}, sums


def rescore(policy: Policy, group: Group, tensors: dict, run: dict, budget: int) -> tuple[float, int]:
    """Sum of |learner - sampler logprob| over a group's tokens under the adapter that sampled them, and their number."""
    policy.lora.load(1, tensors)
    share = shares_prompts(policy.model)
    neutral = run | {"kl": 1.0, "mask_truncated": False}  # every completion counts here
    total, n = 0.0, 0
    with torch.no_grad():
        for rows in pack(pieces([group], neutral, budget, share), budget, share, policy.device):
            logprobs, _ = row_logprobs(policy, rows, 1, run["temperature"])
            total += ((logprobs - rows.sampler_logprobs).abs() * rows.mask).sum().item()
            n += int(rows.mask.sum())
    return total, n


# ---------------------------------------------------------------- 4. The log: groups, parts, states

def pack_object(kind: str, tensors: dict, **header) -> bytes:
    """A safetensors object with a named, versioned JSON header and the sha256 of its tensors."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header = {"format": f"async-grpo-{kind}", "version": 1, "sha256": digest(tensors), **header}
    return save_tensors(tensors, {"json": json.dumps(header, sort_keys=True)})


def unpack_object(kind: str, data: bytes, run_id: str) -> tuple[dict, dict]:
    """(tensors, header) of an object of `pack_object`; Corrupt when anything about it is not as written."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8:8 + size])["__metadata__"]["json"])
        tensors = load_tensors(data)
    except Exception as error:  # safetensors, JSON and unicode errors alike: these bytes are not an object of ours
        raise Corrupt(f"not a {kind}: {type(error).__name__}: {error}") from None
    got = header.get("format"), header.get("version"), header.get("run_id")
    if got != (f"async-grpo-{kind}", 1, run_id):
        raise Corrupt(f"not a {kind} of this run: got {got}")
    if digest(tensors) != header["sha256"]:
        raise Corrupt(f"{kind}: its tensors do not have the sha256 in its header")
    return tensors, header


def digest(tensors: dict) -> str:
    """sha256 over tensors in name order: name, shape, then the values as little-endian fp32 (integers as int64)."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu()
        t = t.to(torch.float32 if t.is_floating_point() else torch.int64).contiguous()
        h.update(f"{name} {list(t.shape)}\n".encode())
        h.update(memoryview(t.numpy()).cast("B") if t.numel() else b"")
    return h.hexdigest()


def write_group(g: Group, run: dict) -> bytes:
    lengths = [len(i) for i in g.completion_ids]
    tensors = {"prompt_ids": torch.tensor(g.prompt_ids), "lengths": torch.tensor(lengths),
               "completion_ids": torch.tensor([t for ids in g.completion_ids for t in ids]),
               "sampler_logprobs": torch.tensor([x for row in g.sampler_logprobs for x in row], dtype=torch.float32),
               "rewards": torch.tensor(g.rewards, dtype=torch.float32), "versions": torch.tensor(g.versions),
               "truncated": torch.tensor(g.truncated).long()}
    return pack_object("group", tensors, run_id=run["run_id"], prompt_id=g.prompt_id, text=g.text,
                       adapter_sha256=g.adapter_sha256)


def read_group(data: bytes, key: str, run: dict) -> Group:
    """The group, or Corrupt for anything a learner must not train on: shapes, ranges, finiteness, versions."""
    t, header = unpack_object("group", data, run["run_id"])
    try:
        lengths, K = t["lengths"].tolist(), len(t["rewards"])
        ids, logprobs = t["completion_ids"].split(lengths), t["sampler_logprobs"].split(lengths)
        vocabulary = torch.cat([t["prompt_ids"], t["completion_ids"]])
        sane = (1 <= K <= run["group_size"] and len(lengths) == len(t["versions"]) == len(t["truncated"]) == K
                and 1 <= min(lengths) and max(lengths) <= run["max_tokens"] and len(t["prompt_ids"]) > 0
                and t["sampler_logprobs"].isfinite().all() and bool((t["sampler_logprobs"] <= 1e-4).all())
                and t["rewards"].isfinite().all() and 0 <= vocabulary.min() and vocabulary.max() < run["vocabulary"]
                and int(t["versions"].min()) == version_of(key))
    except (KeyError, RuntimeError, ValueError) as error:
        raise Corrupt(f"tensors do not fit together: {error}") from None
    if not sane:
        raise Corrupt("a shape, range, version or finiteness check fails")
    return Group(header["prompt_id"], t["prompt_ids"].tolist(), [i.tolist() for i in ids],
                 [x.tolist() for x in logprobs], t["rewards"].tolist(), t["versions"].tolist(),
                 [bool(x) for x in t["truncated"]], header["text"], header["adapter_sha256"], key)


def version_of(key: str) -> int:
    """The policy version in a group's key, groups/000007-…"""
    return int(key.split("/")[1][:6])


def step_of(key: str) -> int:
    """The step in a key like steps/000034.json, parts/000034/… or checkpoints/000100/…"""
    return int(key.split("/")[1][:6])


@dataclass
class State:
    """What is folded: the adapter and AdamW's moments, fp32 on the CPU. updates counts the steps that changed it."""
    step: int
    updates: int
    adapter: dict
    exp_avg: dict
    exp_avg_sq: dict

    def tensors(self) -> dict:
        parts = {"adapter": self.adapter, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        named = {f"{kind}.{name}": t for kind, tensors in parts.items() for name, t in tensors.items()}
        return named | {"updates": torch.tensor([self.updates])}

    @classmethod
    def of(cls, step: int, tensors: dict) -> State:
        kinds = {kind: {n.removeprefix(f"{kind}."): t for n, t in tensors.items() if n.startswith(f"{kind}.")}
                 for kind in ("adapter", "exp_avg", "exp_avg_sq")}
        return cls(step, int(tensors["updates"]), **kinds)


def apply(state: State, update: dict, parts: list[dict]) -> tuple[State, float]:
    """State t from state t-1, the entry's scalars and its parts in chunk order; also the gradient's norm.

    A left fold in fp32, one clip (norm in float64, coefficient rounded to fp32), then AdamW [6] written out. Subtle:
    one elementwise operation at a time. Fused kernels (and alpha=, addcmul) round differently between builds, and
    every learner must get the same bits."""
    grads = dict(parts[0])
    for part in parts[1:]:
        grads = {name: g + part[name] for name, g in grads.items()}
    if update["normaliser"]:
        grads = {name: g / update["normaliser"] for name, g in grads.items()}
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
    if not update["normaliser"] or not math.isfinite(norm):
        return replace(state, step=state.step + 1), norm
    if update["clip_norm"] and norm > update["clip_norm"]:
        grads = {name: g * torch.tensor(update["clip_norm"] / norm, dtype=torch.float32) for name, g in grads.items()}
    b1, b2, lr, k = update["beta1"], update["beta2"], update["lr"], state.updates + 1
    new = State(state.step + 1, k, {}, {}, {})
    for name, g in grads.items():
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
    """Linear warm-up over warmup_steps, then constant or linear to a tenth at the last step."""
    warm = min(1.0, step / max(1, run["warmup_steps"]))
    left = max(0.0, (steps - step) / max(1, steps - run["warmup_steps"]))
    decay = 1.0 if run["lr_schedule"] == "constant" else 0.1 + 0.9 * min(1.0, left)
    return run["lr"] * warm * decay

# ---------------------------------------------------------------- 5. The learner

class Wait:
    """A wait that is never silent: says what it waits for after 5 s, then every 15 s, and gives up at its limit."""

    def __init__(self, limit_s: float):
        self.start = time.monotonic()
        self.limit_s, self.next_word_s = limit_s, 5.0

    def tick(self, what: str, pause_s: float = POLL_S) -> None:
        """Pauses; BucketError when the limit (seconds; 0 is none) has passed."""
        waited = time.monotonic() - self.start
        if self.limit_s and waited > self.limit_s:
            raise BucketError(f"waited {waited:.0f} s for {what}; see --wait-s")
        if waited > self.next_word_s:
            self.next_word_s += 15
            print(f"waiting {waited:.0f} s for {what}", file=sys.stderr, flush=True)
        time.sleep(pause_s)


class Log:
    """The entries of steps/, read once each, in order."""

    def __init__(self, bucket, run: dict):
        self.bucket, self.run, self.newest, self.entries = bucket, run, 0, {}

    def refresh(self) -> int:
        """The newest step decided so far."""
        for key in self.bucket.list("steps/", start_after=f"steps/{self.newest:06d}.json"):
            self.newest = max(self.newest, step_of(key))
        return self.newest

    def read(self, step: int) -> dict:
        """The entry that decides a step. An unreadable entry ends the run: nothing can be folded past it."""
        if step not in self.entries:
            entry = json.loads(self.bucket.get(f"steps/{step:06d}.json"))
            got = entry.get("format"), entry.get("version"), entry.get("run_id"), entry.get("step")
            if got != ("async-grpo-step", 1, self.run["run_id"], step):
                raise Corrupt(f"steps/{step:06d}.json: expected this run's entry {step}, got {got}")
            self.entries[step] = entry
        return self.entries[step]

    def named(self, first: int, last: int) -> dict[str, int]:
        """{group key: step} of every group that entries first..last train or drop."""
        return {key: t for t in range(max(1, first), last + 1) for key in named_groups(self.read(t))}


def named_groups(entry: dict) -> list[str]:
    return [key for chunk in entry["chunks"] for key in chunk] + list(entry["dropped"])


class Learner:
    """Decides, computes, folds and publishes; everything it knows can be rebuilt from the bucket."""

    def __init__(self, bucket, run: dict, args, policy: Policy, task: Task):
        self.bucket, self.run, self.args, self.policy, self.task = bucket, run, args, policy, task
        self.id = os.urandom(4).hex()
        self.log = Log(bucket, run)
        self.pool = ThreadPoolExecutor(8)
        self.groups: dict[str, Group] = {}     # valid, not yet named by an entry
        self.refused: dict[str, str] = {}      # key: reason; the next entry records them as dropped
        self.consumed: dict[str, int] = {}     # key: step of the entry that names it, until it is deleted
        self.metrics: dict = {}                # of the last step applied
        self.timings: list[dict] = []          # rows of metrics/ not yet written
        self.timing_chunks, self.unmoved, self.swept, self.canary_base = 0, 0, False, None
        self.member = proxy.Member(bucket, "learner", run_id=run["run_id"], id=self.id)
        self.learners = proxy.LiveMembers(bucket, "learner")
        self.actors = proxy.LiveMembers(bucket, "actor")

    # ---- start and recovery

    def start(self) -> None:
        """Loads the newest trusted checkpoint and learns which groups the log has already named."""
        if not self.bucket.probe():
            self.refuse_company()
        self.member.start()
        self.log.refresh()
        oldest = min([self.log.newest, *(version_of(k) * self.run["sync_steps"] for k in self.bucket.list("groups/"))])
        list(self.pool.map(self.log.read, range(oldest + 1, self.log.newest + 1)))
        self.consumed = self.log.named(oldest + 1, self.log.newest)
        self.at_start = self.log.newest
        self.load_checkpoint(self.log.newest)
        if self.state.step or self.log.newest:
            say("resumed", checkpoint=self.state.step, decided=self.log.newest, digest=self.digest[:12])

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

    def load_checkpoint(self, before: int) -> None:
        """Newest checkpoint below `before` whose digest the next entry confirms; says so when it passes one over."""
        steps = sorted((step_of(k) for k in self.bucket.list("checkpoints/") if k.endswith("/manifest.json")), reverse=True)
        for step in steps:
            if step > before or (step and step >= self.log.newest):
                continue  # nothing written after it confirms it yet; an older one and the log give the same state
            try:
                manifest = json.loads(self.bucket.get(f"checkpoints/{step:06d}/manifest.json"))
                if step < self.log.newest and self.log.read(step + 1)["digest_before"] != manifest["digest"]:
                    raise Corrupt("its digest is not the one that the next entry was written on")
                data = self.bucket.get(manifest["folder"] + "/state.safetensors")
                if len(data) != manifest["size"] or hashlib.sha256(data).hexdigest() != manifest["sha256"]:
                    raise Corrupt("size or sha256 differs from its manifest")
                state = State.of(step, unpack_object("state", data, self.run["run_id"])[0])
            except (NotFound, Corrupt, KeyError, ValueError) as error:
                warn(f"checkpoint {step} is passed over: {error}")
                continue
            self.state, self.digest = state, digest(state.tensors())
            self.policy.lora.load(0, state.adapter)
            return
        raise BucketError(f"no checkpoint in {self.bucket.address} can be trusted; refusing to start again from the base "
                          "(start in an empty bucket if that is what you want)")

    def recover(self, problem: Diverged, attempt: int) -> None:
        """This learner's state is not the log's: fold again, the second time from an older checkpoint."""
        warn(f"DIVERGED: {problem}; folding again from a checkpoint")
        if attempt > 3:
            raise BucketError(f"{problem}; folding again did not help")
        self.load_checkpoint(self.state.step if attempt == 1 else max(0, self.state.step - self.run["checkpoint_steps"]))

    # ---- groups and entries

    def refresh_groups(self, everything: bool = False) -> None:
        """Fetches the groups that were not seen before: those young enough to train on, or all."""
        version = policy_version(self.state.step, self.run)
        start = "" if everything else f"groups/{max(0, version - self.run['max_staleness']):06d}"
        new = [k for k in self.bucket.list("groups/", start_after=start)
               if k not in self.groups and k not in self.refused and k not in self.consumed]
        for key, group in zip(new, self.pool.map(self.try_group, new)):
            if isinstance(group, Group):
                self.groups[key] = group
            elif group:
                self.refused[key] = group
                warn(f"{key} is set aside: {group}")

    def try_group(self, key: str) -> Group | str:
        """The group, or why it cannot be trained on (after a second read: a transfer may have failed)."""
        for attempt in (1, 2):
            try:
                return read_group(self.bucket.get(key), key, self.run)
            except NotFound:
                return ""
            except Corrupt as error:
                problem = f"invalid: {error}"
        return problem

    def decide(self, step: int) -> dict | None:
        """Writes the entry of a step if there are groups enough; None if not. Loses to an earlier one gracefully."""
        run, version = self.run, policy_version(step - 1, self.run)
        self.refresh_groups(everything=not self.swept)
        self.swept = True
        stale = {k: f"stale: version {version_of(k)}, learner at {version}" for k in self.groups
                 if version - version_of(k) > run["max_staleness"]}
        usable = sorted(self.groups.keys() - stale.keys())  # the key starts with the version: oldest first
        self.queue_groups = len(usable)
        if len(usable) < run["groups_per_step"]:
            return None
        chosen = [self.groups[k] for k in usable[:run["groups_per_step"]]]
        n = min(len(chosen), self.args.chunks or max(1, len(self.company())))
        cuts = [len(chosen) * i // n for i in range(n + 1)]
        update = {k: run[k] for k in ("loss", "clip_low", "clip_high", "kl", "tis", "clip_norm", "weight_decay",
                                      "temperature", "max_tokens", "mask_truncated")} | ADAM
        trained = [n for g in chosen for n in g.trained_tokens(run)]
        update |= {"lr": learning_rate(step, self.args.steps, run), "normaliser": normaliser(update, trained),
                   "trained_tokens": sum(trained), "rollouts": len(trained)}
        entry = {"format": "async-grpo-step", "version": 1, "run_id": run["run_id"], "step": step,
                 "steps": self.args.steps, "chunks": [[g.key for g in chosen[a:b]] for a, b in zip(cuts, cuts[1:])],
                 "dropped": self.refused | stale, "update": update, "policy_version": policy_version(step, run),
                 "publish": step % run["sync_steps"] == 0, "digest_before": self.digest, "previous": self.metrics,
                 "groups_equal": sum(g.is_equal for g in chosen), "written_by": self.id, "unix_s": time.time()}
        crash_point("before-entry", step)
        self.bucket.put_new(f"steps/{step:06d}.json", json.dumps(entry, sort_keys=True).encode())
        crash_point("after-entry", step)
        self.log.newest = max(self.log.newest, step)
        return self.log.read(step)  # ours or the winner's: what lies in the bucket is what counts

    def next_entry(self, step: int) -> dict:
        """The entry of a step: read, or decided here as soon as there are groups. Says who is missing while it waits."""
        wait = Wait(self.args.wait_s)
        while True:
            entry = self.log.read(step) if step <= self.log.newest or step <= self.log.refresh() else self.decide(step)
            if entry:
                break
            living, missing = self.actors.poll(), self.actors.missing()
            gone = ", ".join(f"{i} not heard of for {s:.0f} s" for i, s in missing.items()) or "none has been seen"
            wait.tick(f"groups: {self.queue_groups} of {self.run['groups_per_step']} for step {step}; " + (
                f"{len(living)} actors alive" if living else
                f"no actor alive ({gone}); start one: --role actor --bucket {self.bucket.address}"), self.args.poll_s)
        if entry["digest_before"] != self.digest:
            raise Diverged(f"entry {step} was written on state {entry['digest_before'][:12]}, this learner has {self.digest[:12]}")
        for key in named_groups(entry):
            self.consumed[key] = step
        for key in entry["dropped"]:
            self.refused.pop(key, None)
            self.groups.pop(key, None)
        return entry

    # ---- parts

    def company(self) -> list[str]:
        """Ids of the learners alive, this one included, in order."""
        return sorted({self.id, *self.learners.poll()})

    def gather(self, entry: dict) -> list[tuple]:
        """(tensors, header) of every part of a step: those that others wrote, and those computed here.

        Starts at its own place among the learners alive, then waits twice its own time per chunk before it takes over
        what the slow and the dead have left. A chunk computed twice is harmless: the first valid part counts."""
        step, n = entry["step"], len(entry["chunks"])
        company = self.company()
        self.place = company.index(self.id)
        order = [(self.place * n // len(company) + i) % n for i in range(n)]
        have, spoilt, takeover_at = {}, {}, 0.0
        wait = Wait(self.args.wait_s)
        while True:
            self.collect(entry, have, spoilt)
            missing = [c for c in order if c not in have]
            if not missing:
                return [have[c] for c in range(n)]
            if time.monotonic() >= takeover_at or len(self.company()) == 1:
                began = time.monotonic()
                self.write_part(entry, missing[0], spoilt.get(missing[0], 0))
                takeover_at = time.monotonic() + 2 * (time.monotonic() - began)
            else:
                wait.tick(f"parts {missing} of step {step} from {company}", self.args.poll_s)

    def collect(self, entry: dict, have: dict, spoilt: dict) -> None:
        """Reads the parts that are there. An invalid one is set aside and its chunk gets another name, 002.1, 002.2 …"""
        for key in self.bucket.list(f"parts/{entry['step']:06d}/"):
            chunk, _, attempt = Path(key).name.removesuffix(".safetensors").partition(".")
            chunk, attempt = int(chunk), int(attempt or 0)
            if chunk in have or attempt < spoilt.get(chunk, 0):
                continue
            try:
                have[chunk] = self.read_part(self.bucket.get(key), entry, chunk)
            except Corrupt:
                try:  # once more: a transfer may have failed
                    have[chunk] = self.read_part(self.bucket.get(key), entry, chunk)
                except Corrupt as error:
                    warn(f"{key} is set aside: {error}")
                    spoilt[chunk] = attempt + 1

    def read_part(self, data: bytes, entry: dict, chunk: int) -> tuple[dict, dict]:
        tensors, header = unpack_object("part", data, self.run["run_id"])
        got = header["step"], header["chunk"], header["digest_before"]
        if got != (entry["step"], chunk, entry["digest_before"]):
            raise Corrupt(f"part of step, chunk, state {got}; expected {(entry['step'], chunk, entry['digest_before'])}")
        if header["is_finite"] and {n: tuple(t.shape) for n, t in tensors.items()} != self.policy.lora.shapes:
            raise Corrupt("its tensors are not those of this adapter")
        if not all(bool(t.isfinite().all()) for t in tensors.values()):
            raise Corrupt("NaN or infinity in its tensors")
        return {n: t.float() for n, t in tensors.items()}, header

    def write_part(self, entry: dict, chunk: int, attempt: int) -> None:
        """Computes a chunk's gradient under the state before the step and writes it, create-if-absent."""
        step, began = entry["step"], time.monotonic()
        self.member.update(doing=f"chunk {chunk} of step {step}")
        groups = []
        for key in entry["chunks"][chunk]:
            group = self.groups.get(key) or self.try_group(key)
            if not isinstance(group, Group):
                raise BucketError(f"{key}, which entry {step} names, cannot be read ({group or 'gone'}), and its part is missing")
            groups.append(group)
        grads, sums = chunk_gradient(self.policy, groups, self.run, entry["update"], self.args.token_budget)
        is_finite = all(bool(g.isfinite().all()) for g in grads.values())
        if not is_finite:
            warn(f"the gradient of chunk {chunk} of step {step} is not finite: the step will change nothing")
        if chunk == 0 and step % 10 == 1:
            sums["mismatch"], sums["mismatch_tokens"] = self.mismatch(groups[0])
        dtype = getattr(torch, self.run["part_dtype"])
        data = pack_object("part", {n: g.to(dtype) for n, g in grads.items()} if is_finite else {}, step=step,
                           chunk=chunk, digest_before=entry["digest_before"], is_finite=is_finite, sums=sums,
                           run_id=self.run["run_id"], written_by=self.id)
        self.clock["fwd_bwd_s"] += time.monotonic() - began
        suffix = f".{attempt}" if attempt else ""
        self.bucket.put_new(f"parts/{step:06d}/{chunk:03d}{suffix}.safetensors", data)
        crash_point("after-part", step)

    def mismatch(self, group: Group) -> tuple[float, int]:
        """The honest check: a group scored again under its own version. Nothing if that adapter is gone."""
        if len(set(group.versions)) > 1:
            return 0.0, 0
        try:
            files = self.bucket.fetch(f"adapters/v{group.versions[0]:06d}")[1]
        except (NotFound, Corrupt) as error:
            warn(f"no mismatch check: {error}")
            return 0.0, 0
        return rescore(self.policy, group, lora.read_adapter(files)[0], self.run, self.args.token_budget)

    # ---- publishing and keeping

    def publish(self) -> None:
        """Adapter files, canary, manifest; once, by whoever finds the version missing."""
        step, run = self.state.step, self.run
        version = policy_version(step, run)
        prefix = f"adapters/v{version:06d}"
        if any(k.endswith("/manifest.json") for k in self.bucket.list(prefix + "/")):
            return
        files = lora.adapter_files(self.state.adapter, run["lora_r"], run["lora_alpha"], run["target_modules"], run["model"])
        crash_point("during-publish", step)
        self.bucket.publish(prefix, files, {
            "policy_version": version, "step": step, "run_id": run["run_id"], "digest": self.digest,
            "sha256": hashlib.sha256(files["adapter_model.safetensors"]).hexdigest(), "canary": self.canary()})

    def canary(self) -> dict:
        """Top-20 next-token logprobs after eight fixed prompts, with and without the adapter in slot 0."""
        prompts = [self.task.encode(row["prompt"])[-64:] for row in self.task.rows[:8]]

        def top(slot):
            found = []
            for ids in prompts:
                with torch.no_grad(), self.policy.lora.use(slot):
                    logits = self.policy.model(torch.tensor([ids], device=self.policy.device), use_cache=False).logits
                values, index = logits[0, -1].float().log_softmax(-1).topk(min(20, logits.shape[-1]))
                found.append({str(i): v for i, v in zip(index.tolist(), values.tolist())})
            return found
        self.canary_base = self.canary_base or top(None)
        dtype = str(next(self.policy.model.parameters()).dtype).removeprefix("torch.")
        return {"prompts": prompts, "dtype": dtype, "adapter": top(0), "base": self.canary_base}

    def checkpoint(self) -> None:
        """State in this learner's own folder, then the manifest that makes it the one that counts."""
        step, folder = self.state.step, f"checkpoints/{self.state.step:06d}/{self.id}"
        write_checkpoint(self.bucket, self.run, self.state, folder, self.digest)
        crash_point("before-cleanup", step)

    def clean(self) -> None:
        """Deletes what no restart can need: below the checkpoint *before* the newest one that an entry confirms."""
        run, step = self.run, self.state.step
        kept = sorted(step_of(k) for k in self.bucket.list("checkpoints/") if k.endswith("/manifest.json") and step_of(k) < step)
        floor = kept[-2] if len(kept) > 1 else 0
        for key in [k for k, t in self.consumed.items() if t <= floor]:
            self.bucket.delete(key)
            del self.consumed[key]
        for prefix in ("parts/", "checkpoints/"):
            last = floor if prefix == "parts/" else floor - 1
            for key in list(self.bucket.list(prefix)):
                if 0 < step_of(key) <= last:
                    self.bucket.delete(key)
        live = run["max_staleness"] + 2
        in_use = {v for m in proxy.LiveMembers(self.bucket).poll().values() for v in m.get("serving", [])}
        for v in {int(k.split("/")[1][1:]) for k in self.bucket.list("adapters/")}:
            if v < policy_version(step, run) - 2 * live and v not in in_use:
                self.bucket.delete_prefix(f"adapters/v{v:06d}")
        for t in [t for t in self.log.entries if t < floor]:
            del self.log.entries[t]
        self.sweep()

    def sweep(self) -> None:
        """Groups below the window that no entry names become recorded drops of the next entry; a late duplicate of one
        that an entry named long ago is deleted again."""
        run, oldest = self.run, policy_version(self.state.step, self.run) - self.run["max_staleness"]
        for key in list(self.bucket.list("groups/")):
            v = version_of(key)
            if v >= oldest or key in self.consumed or key in self.groups or key in self.refused:
                continue
            last = min(self.state.step, (v + run["max_staleness"] + 1) * run["sync_steps"] + 2 * run["checkpoint_steps"])
            if key in self.log.named(v * run["sync_steps"] + 1, last):
                self.bucket.delete(key)
            else:
                self.refused[key] = f"stale: version {v}, found when the oldest that could be used was {oldest}"

    # ---- the loop

    def train(self) -> None:
        """Folds to the end of the log, then decides and computes until --steps."""
        self.clock = dict.fromkeys(("wait_s", "fwd_bwd_s", "apply_s", "sync_s"), 0.0)
        if self.state.step == 0:
            self.publish()
            self.evaluate()
        attempt = 0
        while self.state.step < max(self.args.steps, self.log.refresh()):
            try:
                self.step()
                attempt = 0
            except Diverged as problem:
                attempt += 1
                self.recover(problem, attempt)
        self.publish()
        if self.args.eval_steps >= 0:
            self.evaluate()

    def step(self) -> None:
        """One step: entry, parts, fold, publish. Prints its line unless it only replays what is long done."""
        step, run, began = self.state.step + 1, self.run, time.monotonic()
        self.clock, self.queue_groups = dict.fromkeys(self.clock, 0.0), 0
        self.member.update(doing=f"waiting for groups of step {step}")
        entry = self.next_entry(step)
        self.clock["wait_s"] = time.monotonic() - began
        parts = self.gather(entry)
        began_apply = time.monotonic()
        before = self.digest
        self.state, grad_norm = apply(self.state, entry["update"], [tensors for tensors, _ in parts])
        self.digest = digest(self.state.tensors())
        self.policy.lora.load(0, self.state.adapter)
        self.metrics = step_metrics(entry, [header["sums"] for _, header in parts], grad_norm, run)
        for chunk in entry["chunks"]:
            for key in chunk:
                self.groups.pop(key, None)
        self.clock["apply_s"] = time.monotonic() - began_apply
        began_sync = time.monotonic()
        if entry["publish"] and step >= self.log.newest:
            self.publish()
        if step % run["checkpoint_steps"] == 0 and self.place == 0:
            self.checkpoint()
        if step % run["checkpoint_steps"] == 1 and step > 1 and self.place == 0:
            self.clean()
        if self.args.eval_steps > 0 and step % self.args.eval_steps == 0 and self.place == 0:
            self.evaluate()
        self.clock["sync_s"] = time.monotonic() - began_sync
        self.watch_movement(before)
        if step > self.at_start or self.clock["fwd_bwd_s"]:
            self.print_step(time.monotonic() - began)

    def watch_movement(self, before: str) -> None:
        """Says when the policy has stopped moving: the same digest for several steps."""
        self.unmoved = self.unmoved + 1 if self.digest == before else 0
        if self.unmoved in (5, 50, 500):
            warn(f"the policy is not moving: same digest for {self.unmoved} steps (version "
                 f"{policy_version(self.state.step, self.run)}); every group had equal rewards, or gradients were not finite")

    def print_step(self, step_s: float) -> None:
        m, step = self.metrics, self.state.step
        row = {"step": step, **{k: v for k, v in m.items() if k != "step"}, "queue_groups": self.queue_groups,
               **self.clock, "step_s": step_s, "tok_s": m["tokens"] / step_s}
        say("", **row)
        self.timings.append({k: row[k] for k in ("step", "queue_groups", *self.clock, "step_s", "tok_s")})
        if len(self.timings) >= 50 or step % self.run["checkpoint_steps"] == 0 or step >= self.args.steps:
            self.timing_chunks += 1
            self.bucket.put_new(f"metrics/learner-{self.id}/{self.timing_chunks:06d}.jsonl",
                                "".join(json.dumps(r) + "\n" for r in self.timings).encode())
            self.timings = []

    def evaluate(self) -> None:
        """Held-out accuracy of the current state, sampled and greedy; written once per step that is evaluated."""
        key = f"evals/{self.state.step:06d}.json"
        if any(self.bucket.list(key)) or not self.task.eval_rows:
            return
        self.member.update(doing=f"evaluating step {self.state.step}")
        scores = evaluate(self.policy, self.task, self.state.adapter, self.run)
        self.policy.lora.load(0, self.state.adapter)
        self.bucket.put_new(key, json.dumps({"step": self.state.step, **scores}).encode())
        say("eval", step=self.state.step, **scores)


def write_checkpoint(bucket, run: dict, state: State, folder: str, state_digest: str) -> None:
    data = pack_object("state", state.tensors(), run_id=run["run_id"], step=state.step)
    bucket.put_new(f"{folder}/state.safetensors", data)
    crash_point("during-checkpoint", state.step)
    manifest = {"format": "async-grpo-checkpoint", "version": 1, "run_id": run["run_id"], "step": state.step,
                "folder": folder, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "digest": state_digest}
    bucket.put_new(f"checkpoints/{state.step:06d}/manifest.json", json.dumps(manifest, sort_keys=True).encode())


def step_metrics(entry: dict, sums: list[dict], grad_norm: float, run: dict) -> dict:
    """A step's line of the learning curve, from the entry and the sums of its parts alone."""
    total = {name: sum(s.get(name, 0) for s in sums) for name in {n for s in sums for n in s}}
    tokens, groups = total["trained_tokens"], [k for chunk in entry["chunks"] for k in chunk]
    version = policy_version(entry["step"] - 1, run)
    staleness = [version - version_of(k) for k in groups]
    per_token = {name: total[key] / tokens if tokens else math.nan for name, key in
                 (("ratio", "ratio"), ("kl", "kl"), ("entropy", "entropy"), ("clip_frac", "clipped"))}
    if not run["kl"]:
        per_token["kl"] = math.nan  # not measured: it would cost a forward of the base
    scored = total.get("mismatch_tokens", 0)
    return {"step": entry["step"], "version": entry["policy_version"],
            "reward": total["reward"] / max(1, total["rollouts"]), **per_token,
            "loss": total["loss"] / entry["update"]["normaliser"] if entry["update"]["normaliser"] else 0.0,
            "grad_norm": grad_norm, "staleness_mean": sum(staleness) / len(staleness), "staleness_max": max(staleness),
            "groups": len(groups), "groups_equal": entry["groups_equal"], "dropped": len(entry["dropped"]),
            "mismatch": total["mismatch"] / scored if scored else math.nan, "tokens": tokens,
            "completion_tokens": total["completion_tokens"] / max(1, total["rollouts"]),
            "truncated": total["truncated"] / max(1, total["rollouts"])}


def evaluate(policy: Policy, task: Task, adapter: dict, run: dict) -> dict:
    """Mean reward on the held-out rows, sampled at the run's temperature and greedy, by the sampler in this process."""
    engine = lora.Sampler(policy.model, policy.lora, set(policy.stop_ids), max_rows=64,
                          max_len=run["max_prompt_tokens"] + run["max_tokens"])
    engine.load("eval", adapter)
    scores = {}
    for name, temperature in (("sampled", run["temperature"]), ("greedy", 0.0)):
        asked = [(row, engine.submit(task.encode(row["prompt"]), 1, run["max_tokens"], temperature, "eval", seed))
                 for seed, row in enumerate(task.eval_rows)]
        while engine.step():
            pass
        got = [task.score(row, future.result())[0] for row, future in asked]
        got = [x for x in got if x is not None]
        scores[name] = sum(got) / len(got) if got else math.nan
    return scores

# ---------------------------------------------------------------- 6. Actor and sampler

class Engine:
    """lora.Sampler with names, files and text around it: what proxy.py serves and what an actor uses in-process.

    Follows the bucket: loads the newest version as soon as it is announced, checks its canary, drops old ones."""

    def __init__(self, bucket, run: dict, policy: Policy, max_rows: int):
        self.bucket, self.run, self.policy = bucket, run, policy
        self.model_id, self.max_lora_rank, self.max_loras = run["model"], run["lora_r"], run["max_staleness"] + 2
        self.max_model_len = run["max_prompt_tokens"] + run["max_tokens"]
        self.dtype, self.vocab_size = str(policy.model.dtype).removeprefix("torch."), run["vocabulary"]
        self.sampler = lora.Sampler(policy.model, policy.lora, set(policy.stop_ids), max_rows=max_rows,
                                    max_len=self.max_model_len)
        self.sha256: dict[str, str] = {}   # name: sha256 of the weights loaded under it
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.submit, self.cancel, self.stats = self.sampler.submit, self.sampler.cancel, self.sampler.stats
        self.pause, self.resume, self.names = self.sampler.pause, self.sampler.resume, self.sampler.names

    @property
    def is_paused(self) -> bool:
        return self.sampler.is_paused

    def start(self, follows: bool) -> None:
        """Starts generating; with `follows` (no router that loads the versions) also keeps up with the bucket."""
        self.threads = [threading.Thread(target=self.sampler.run, args=(self.stop,), daemon=True)]
        self.threads += [threading.Thread(target=self.follow, daemon=True)] if follows else []
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(5)

    def load(self, name: str, lora_path: str) -> None:
        """Loads adapter files from a bucket key adapters/v… or a folder (proxy.py has checked that it is allowed).

        The same bytes under the same name are accepted; other bytes are refused: a name is one set of weights."""
        try:
            if lora_path.startswith("adapters/"):
                files = self.bucket.fetch(lora_path)[1]
            else:
                files = {n: (Path(lora_path) / n).read_bytes() for n in ("adapter_model.safetensors", "adapter_config.json")}
        except (NotFound, FileNotFoundError):
            raise proxy.LoadError(404, f"No adapter found for {name}") from None
        self.put(name, files)

    def put(self, name: str, files: dict[str, bytes]) -> None:
        sha256 = hashlib.sha256(files["adapter_model.safetensors"]).hexdigest()
        with self.lock:
            if name in self.names():
                if self.sha256[name] != sha256:
                    raise proxy.LoadError(400, f"{name} has already been loaded with other weights")
                return
            try:
                tensors, config = lora.read_adapter(files)
                if (config["r"], config["lora_alpha"]) != (self.run["lora_r"], self.run["lora_alpha"]):
                    raise lora.AdapterError(f"rank and alpha are {config['r']}, {config['lora_alpha']}; this run's are "
                                            f"{self.run['lora_r']}, {self.run['lora_alpha']}")
                self.sampler.load(name, tensors)
            except lora.AdapterError as error:
                raise proxy.LoadError(400, str(error)) from None
            self.sha256[name] = sha256

    def unload(self, name: str) -> None:
        self.sampler.unload(name)

    def encode(self, text: str) -> list[int]:
        return self.policy.tokenizer(text)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.policy.tokenizer.decode(ids, skip_special_tokens=True)

    def chat(self, messages: list[dict]) -> list[int]:
        text = self.policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.policy.tokenizer(text, add_special_tokens=False)["input_ids"]

    def token(self, token_id: int) -> str:
        return self.policy.tokenizer.decode([token_id])

    def follow(self) -> None:
        """Thread: keeps the newest versions of the bucket loaded, each checked by its canary before its first use."""
        newest, refused = -1, set()
        while not self.stop.wait(poll_s(self.bucket)):
            try:
                start = f"adapters/v{max(0, newest):06d}"
                versions = {int(k.split("/")[1][1:]) for k in self.bucket.list("adapters/", start_after=start)
                            if k.endswith("/manifest.json")}
                version = max(versions - refused, default=-1)
                if version <= newest:
                    continue
                manifest, files = self.bucket.fetch(f"adapters/v{version:06d}")
                self.put(f"policy-v{version}", files)
                is_right, reason = self.check(manifest["canary"], f"policy-v{version}")
                if is_right is False:
                    warn(f"policy-v{version} is not served: {reason}")
                    self.unload(f"policy-v{version}")
                    refused.add(version)
                    continue
                newest = version
                for name in self.names():
                    match = re.fullmatch(r"policy-v(\d+)", name)
                    if match and int(match[1]) < newest - self.run["max_staleness"] - 1:
                        self.unload(name)
            except (BucketError, proxy.LoadError, OSError) as error:
                warn(f"following the bucket: {error}; trying again")

    def check(self, canary: dict, name: str) -> tuple[bool | None, str]:
        """proxy.canary_verdict on this engine's own answers to the canary's prompts."""
        asked = [self.submit(ids, 1, 1, 1.0, name, 0, top_logprobs=len(top))
                 for ids, top in zip(canary["prompts"], canary["adapter"])]
        return proxy.canary_verdict(canary, [f.result(120)[0].top_logprobs[0] for f in asked])


def poll_s(bucket) -> float:
    return POLL_S if bucket.root else 10 * POLL_S


class HttpSampler:
    """A sampler, a proxy or a stock vLLM at a URL; `bucket` as address means the proxy that announces itself there."""

    def __init__(self, bucket, run: dict, args):
        self.bucket, self.run, self.args = bucket, run, args
        self.token, self.local = args.token, threading.local()
        self.url = None if args.sampler == "bucket" else args.sampler.rstrip("/")
        self.proxies, self.random = proxy.LiveMembers(bucket, "proxy"), random.Random()

    def session(self):
        """One keep-alive connection pool per thread, blind to ~/.netrc."""
        if not hasattr(self.local, "session"):
            self.local.session = requests.Session()
            self.local.session.trust_env = False
            if self.token:
                self.local.session.headers["Authorization"] = f"Bearer {self.token}"
        return self.local.session

    def address(self) -> str:
        if self.args.sampler != "bucket":
            return self.url
        if self.url is None:
            found = self.proxies.poll()
            if not found:
                raise requests.ConnectionError("no proxy has announced itself in the bucket yet")
            self.url = self.random.choice(sorted(m["url"] for m in found.values()))
        return self.url

    def version(self) -> int:
        """The newest policy version it serves; -1 while there is none, or nobody answers."""
        try:
            reply = self.session().get(self.address() + "/v1/models", timeout=(5, 30))
            if reply.status_code == 401:
                raise UserError(f"{self.url} refuses this token (401); give the right one with --token or GRPO_TOKEN")
            names = [m["id"] for m in reply.json()["data"]]
        except (requests.RequestException, ValueError, KeyError):
            self.url = self.url if self.args.sampler != "bucket" else None
            return -1
        return max((int(n[8:]) for n in names if re.fullmatch(r"policy-v\d+", n)), default=-1)

    def sample(self, prompt_ids: list[int], n: int, version: int, seed: int, timeout_s: float) -> list:
        """n completions as lora.Completion; fewer when some were aborted. Raises Busy for what another try may mend."""
        run = self.run
        body = {"model": f"policy-v{version}", "prompt": prompt_ids, "n": n, "max_tokens": run["max_tokens"],
                "temperature": run["temperature"], "logprobs": 0, "return_token_ids": True, "seed": seed,
                "stop_token_ids": run["stop_ids"]}
        try:
            reply = self.session().post(self.address() + "/v1/completions", json=body, timeout=(5, timeout_s))
        except requests.RequestException as error:
            self.url = self.url if self.args.sampler != "bucket" else None
            raise Busy(f"{type(error).__name__}") from None
        if reply.status_code == 401:
            raise UserError(f"{self.url} refuses this token (401); give the right one with --token or GRPO_TOKEN")
        if reply.status_code == 400:
            raise Refused(reply.text[:300])
        if reply.status_code != 200:
            raise Busy(f"status {reply.status_code}: {reply.text[:200]}")
        return [lora.Completion(c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"], None)
                for c in reply.json()["choices"] if c["finish_reason"] in ("stop", "length")]


class Busy(Exception):
    """The sampler could not answer now (404 of a version just gone, 429, 5xx, transport): ask again, with back-off."""


class Refused(Exception):
    """The sampler will never answer this request (400): leave the prompt out."""


class LocalSampler:
    """An engine in the actor's own process: no network path at all."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def version(self) -> int:
        return max((int(n[8:]) for n in self.engine.names() if n.startswith("policy-v")), default=-1)

    def sample(self, prompt_ids, n, version, seed, timeout_s) -> list:
        run = self.engine.run
        try:
            return self.engine.submit(prompt_ids, n, run["max_tokens"], run["temperature"], f"policy-v{version}", seed
                                      ).result(timeout_s)
        except lora.UnknownVersion as error:
            raise Busy(str(error)) from None


class Actor:
    """Asks for groups, scores them, writes them. Paced so that what it starts will still be young when it is used."""

    def __init__(self, bucket, run: dict, args, task: Task, sampler):
        self.bucket, self.run, self.args, self.task, self.sampler = bucket, run, args, task, sampler
        self.id = os.urandom(4).hex()
        self.random = random.Random(f"{run['seed']} {self.id}")
        self.log, self.sequence, self.rows = Log(bucket, run), itertools.count(), iter(())
        self.lock, self.stop, self.failure = threading.Condition(), threading.Event(), None
        self.waiting: set[str] = set()   # groups written and not yet named by an entry
        self.mine: set[str] = set()      # of these, the ones this actor wrote after the last look
        self.inflight = self.elsewhere = self.written = self.left_out = 0
        self.version, self.too_long = -1, 0
        self.member = proxy.Member(bucket, "actor", run_id=run["run_id"], id=self.id)
        self.members = proxy.LiveMembers(bucket, "actor")

    def work(self) -> None:
        """Runs until the log reaches its last step, or a reward or a sampler fails for good."""
        self.member.start()
        say("ready", role="actor", url="-", id=self.id)
        for _ in range(max(1, self.args.inflight // self.run["group_size"])):
            threading.Thread(target=self.worker, daemon=True).start()
        wait = Wait(self.args.wait_s)
        while not self.stop.is_set():
            self.look()
            if self.failure:
                raise self.failure
            if self.version >= 0:
                wait = Wait(self.args.wait_s)
            wait.tick("a sampler that serves a version of the policy", poll_s(self.bucket))
            last = max(self.run["steps"], self.log.read(self.log.newest)["steps"] if self.log.newest else 0)
            if self.log.newest >= last:
                break
        self.stop.set()
        with self.lock:
            self.lock.notify_all()
        say("actor", groups_written=self.written, rollouts_left_out=self.left_out, prompts_too_long=self.too_long)

    def look(self) -> None:
        """One look at the bucket and the sampler; wakes the workers that wait for a permit."""
        known = self.log.newest
        newest = self.log.refresh()
        named = self.log.named(max(known, newest - 1000) + 1, newest)
        version = self.sampler.version()
        oldest = policy_version(newest, self.run) - self.run["max_staleness"]
        with self.lock:
            self.consumed = getattr(self, "consumed", {}) | named
            self.consumed = {k: t for k, t in self.consumed.items() if version_of(k) >= oldest}
            before = set(self.mine)
        listed = set(self.bucket.list("groups/", start_after=f"groups/{max(0, oldest):06d}"))
        others = [m for i, m in self.members.poll().items() if i != self.id]
        with self.lock:
            self.mine -= before & listed
            self.waiting = {k for k in listed | self.mine if k not in self.consumed and version_of(k) >= oldest}
            self.elsewhere = sum(m.get("inflight", 0) for m in others)
            self.version = version
            self.lock.notify_all()
        self.member.update(inflight=self.inflight, doing=f"{self.inflight} groups in flight, {len(self.waiting)} waiting")

    def may_start(self) -> bool:
        """The pacing rule: room in the queue, and the entry that will use the group comes before it is stale."""
        run, ahead = self.run, len(self.waiting) + self.inflight + self.elsewhere
        used_at = policy_version(self.log.newest + ahead // run["groups_per_step"], run)
        return self.version >= 0 and ahead < self.args.queue_groups and used_at - self.version <= run["max_staleness"]

    def worker(self) -> None:
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.stop.is_set() or self.may_start())
                if self.stop.is_set():
                    return
                self.inflight += 1
                number, prompt_id, row, prompt_ids, version = next(self.sequence), *self.next_prompt(), self.version
            try:
                group = self.group(prompt_id, row, prompt_ids, version, number)
                if group:
                    self.write(group, number)
            except Exception as error:  # the main thread ends the process with it: a worker must never die silently
                self.failure = self.failure or error
                self.stop.set()
            finally:
                with self.lock:
                    self.inflight -= 1
                    self.lock.notify_all()

    def next_prompt(self) -> tuple[int, dict, list[int]]:
        """Rows in a fresh random order per pass; those longer than --max-prompt-tokens are passed over and counted."""
        for _ in range(len(self.task.rows) + 1):
            index = next(self.rows, None)
            if index is None:
                order = list(range(len(self.task.rows)))
                self.random.shuffle(order)
                self.rows = iter(order)
                index = next(self.rows)
            ids = self.task.encode(self.task.rows[index]["prompt"])
            if len(ids) <= self.run["max_prompt_tokens"]:
                return index, self.task.rows[index], ids
            self.too_long += 1
        raise UserError(f"every prompt is longer than --max-prompt-tokens {self.run['max_prompt_tokens']}; raise it")

    def group(self, prompt_id, row, prompt_ids, version, number) -> Group | None:
        """Asks once for all completions and again for what is missing, until the deadline; scores what there is."""
        run, deadline = self.run, time.monotonic() + self.args.group_deadline_s
        found, versions, pause = [], [], 0.05
        while len(found) < run["group_size"] and time.monotonic() < deadline and not self.stop.is_set():
            seed = random.Random(f"{run['seed']} {self.id} {number} {len(found)}").getrandbits(31)
            try:
                new = self.sampler.sample(prompt_ids, run["group_size"] - len(found), version, seed,
                                          max(1.0, deadline - time.monotonic()))
            except Refused as error:
                warn(f"prompt {prompt_id} is left out: the sampler refuses it ({error})")
                return None
            except (Busy, TimeoutError) as error:
                warn(f"group {number} waits {pause:.2f} s: {error}") if pause > 1 else None
                self.stop.wait(pause * random.uniform(0.5, 1.5))
                pause, version = min(10.0, pause * 2), max(version, self.version)
                continue
            found += [c for c in new if self.is_sane(c)]
            versions += [version] * (len(found) - len(versions))
        scores = self.task.score(row, found) if found else []
        kept = [i for i, x in enumerate(scores) if x is not None]
        self.left_out += run["group_size"] - len(kept)
        if len(kept) < 2:
            warn(f"group {number} of prompt {prompt_id} is dropped: {len(kept)} of {run['group_size']} rollouts have a reward")
            return None
        kept_versions = [versions[i] for i in kept]
        return Group(prompt_id, prompt_ids, [found[i].token_ids for i in kept], [found[i].logprobs for i in kept],
                     [scores[i] for i in kept], kept_versions, [found[i].finish_reason == "length" for i in kept],
                     {"prompt": row["prompt"], "completions": [self.task.tokenizer.decode(found[i].token_ids) for i in kept]},
                     {f"policy-v{v}": self.adapter_sha256(v) for v in sorted(set(kept_versions))})

    def is_sane(self, c) -> bool:
        return bool(c.token_ids) and len(c.token_ids) == len(c.logprobs) <= self.run["max_tokens"] and all(
            math.isfinite(x) and -1000 < x <= 1e-4 for x in c.logprobs)

    def adapter_sha256(self, version: int) -> str:
        self.sha256 = getattr(self, "sha256", {})
        if version not in self.sha256:
            self.sha256 = {version: json.loads(self.bucket.get(f"adapters/v{version:06d}/manifest.json"))["sha256"]}
        return self.sha256[version]

    def write(self, group: Group, number: int) -> None:
        key = f"groups/{min(group.versions):06d}-{self.id}-{number:06d}.safetensors"
        if self.bucket.put_new(key, write_group(group, self.run)):
            with self.lock:
                self.mine.add(key)
                self.waiting.add(key)
                self.written += 1

# ---------------------------------------------------------------- 7. The tiny base
# 16 tokens, one a character; id = place in this list. A prompt is always 6 tokens, a completion at most 7.
TINY_VOCAB = ["<pad>", "<eos>", "<unk>", "+", ",", "=", *"0123456789"]
TINY_PAD, TINY_EOS = 0, 1
TINY_STEPS, TINY_BATCH, TINY_LR = 1000, 64, 5e-3
WORKED_SHARE_EARLY, WORKED_SHARE_LATE, EARLY_PART = 1.0, 0.2, 0.75


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


def show_progress(step: int, steps: int, loss: float) -> None:
    """A bar on stderr that redraws itself on a terminal, and five plain lines in a file or a pipe."""
    bar = f"base model: [{'#' * (20 * step // steps):20}] step {step}/{steps} loss {loss:.3f}"
    if sys.stderr.isatty():
        print(f"\r{bar}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
    elif step % (steps // 5) == 0:
        print(bar, file=sys.stderr, flush=True)


def train_tiny_base(seed: int, progress=show_progress):
    """A Llama of 132k parameters taught two habits by supervised steps: the model, in eval mode.

    First it only works sums out; then mostly the hasty way. What is left is a model that can add and seldom bothers:
    right in about a third of its samples. `progress(step, steps, loss)` is called every 20 steps. The same seed gives
    the same weights on the same machine: one thread, which is also fastest at this size.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(TINY_VOCAB), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
            pad_token_id=TINY_PAD, eos_token_id=TINY_EOS, bos_token_id=None, dtype="float32"))
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
        if progress and (step + 1) % 20 == 0:
            progress(step + 1, TINY_STEPS, loss.item())
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


# ---------------------------------------------------------------- 8. Roles

def create_run(bucket, args, given: dict) -> dict:
    """Writes everything that another machine needs, and run.json last: from then on the run exists."""
    is_tiny = given.get("model", "tiny") == "tiny"
    run = RUN_DEFAULTS | (TINY_DEFAULTS if is_tiny else {}) | given
    low, high = LOSSES[run["loss"]][1:]
    run["clip_low"], run["clip_high"] = run["clip_low"] or low, run["clip_high"] or high
    if run["task"] == "data" or args.data or args.reward:
        run["task"] = "data" if args.reward else run["task"]
    if not is_tiny and run["task"] == "add":
        raise UserError("--model needs --data FILE.jsonl with --task math or --reward FILE.py:FUNCTION")
    texts = {}
    for name, path in (("data", args.data), ("eval", args.eval_data)):
        if path:
            try:
                texts[name] = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--{name} {path}: {error}") from None
            read_rows(texts[name], path)
    if run["task"] != "add" and "data" not in texts:
        raise UserError(f"--task {run['task']} needs --data FILE.jsonl")
    for name, text in texts.items():
        if not bucket.put_new(f"{name}.jsonl", text.encode()) and bucket.get(f"{name}.jsonl") != text.encode():
            raise UserError(f"{bucket.address} holds another {name}.jsonl; choose an empty bucket")
    if is_tiny and not any(bucket.list("base/manifest.json")):
        bucket.publish("base", base_files(train_tiny_base(run["seed"])), {})
    policy = load_policy(bucket, run, args, slots=2)
    run |= {"format": "async-grpo-run", "version": 1, "run_id": os.urandom(8).hex(), "created_unix_s": time.time(),
            "fingerprint": fingerprint(policy), "stop_ids": policy.stop_ids, "has_eval_data": "eval" in texts,
            "vocabulary": lora.head(policy.model).weight.shape[0], "rewards": reward_names(args.reward)}
    load_task(bucket, run, args, policy.tokenizer)
    tensors = lora.init_adapter(policy.lora.shapes, run["seed"])
    if args.init_adapter:
        tensors = lora.read_adapter({p.name: p.read_bytes() for p in Path(args.init_adapter).iterdir() if p.is_file()},
                                    run["lora_r"], run["lora_alpha"])[0]
        policy.lora.load(0, tensors)  # AdapterError where it does not fit this model
    state = State(0, 0, tensors, *({n: torch.zeros_like(t) for n, t in tensors.items()} for _ in range(2)))
    # Another learner may be setting up the same bucket: its checkpoint 0 is as good, but the ids must agree.
    write_checkpoint(bucket, run, state, f"checkpoints/000000/{run['run_id']}", digest(state.tensors()))
    manifest = json.loads(bucket.get("checkpoints/000000/manifest.json"))
    if manifest["run_id"] == run["run_id"]:
        bucket.put_new("run.json", json.dumps(run, sort_keys=True, indent=1).encode() + b"\n")
    return run


def join_run(bucket, args, role: str) -> dict:
    """This bucket's run.json: created by a learner that finds none, waited for by everybody else.

    Refuses flags that differ from the run's, naming them. --steps may grow."""
    given = {k: v for k in RUN_DEFAULTS if (v := getattr(args, k)) is not None}
    wait = Wait(args.wait_s or WAIT_LIMIT_S)
    if role == "learner" and not any(bucket.list("run.json")):
        leftovers = [k for k in itertools.islice(bucket.list(""), 50) if k.split("/")[0] in ("steps", "groups", "parts")]
        if leftovers:
            raise UserError(f"{bucket.address} holds {leftovers[0]} but no run.json; choose an empty bucket")
        create_run(bucket, args, given)
    while not any(bucket.list("run.json")):
        wait.tick(f"run.json in {bucket.address} (a learner creates it: --role learner --bucket {bucket.address})", 0.2)
    run = json.loads(bucket.get("run.json"))
    if (run.get("format"), run.get("version")) != ("async-grpo-run", 1):
        raise UserError(f"{bucket.address}/run.json: expected an async-grpo-run of version 1, got {run.get('format')!r}")
    free = {"steps", "model", "checkpoint_steps"} if role == "learner" else {"steps", "model"}
    differing = {k: (v, run[k]) for k, v in given.items() if k not in free and v != run[k] and not (k == "task" and args.reward)}
    if "model" in given and (given["model"] == "tiny") != (run["model"] == "tiny"):
        differing["model"] = given["model"], run["model"]
    if args.reward and reward_names(args.reward) != run["rewards"]:
        differing["reward"] = reward_names(args.reward), run["rewards"]
    if differing:
        raise UserError(f"{bucket.address} holds another run: " + "; ".join(
            f"--{k.replace('_', '-')} is {mine}, the run has {theirs}" for k, (mine, theirs) in differing.items())
            + "; leave these flags out to join it, or choose an empty bucket")
    args.steps = given.get("steps", run["steps"])
    args.queue_groups = args.queue_groups or max(1, run["max_staleness"] - 1) * run["groups_per_step"] * run["sync_steps"]
    args.poll_s = poll_s(bucket)
    return run


def reward_names(specs: list[str]) -> list[list]:
    """What run.json keeps of the reward functions: name, weight, sha256 of the file."""
    return [[name, weight, sha256] for name, weight, _, sha256 in map(load_reward, specs)]


def load_policy(bucket, run: dict, args, slots: int) -> Policy:
    """The base with LoRA slots: from --model here, else the model of run.json, else the bucket's base/."""
    where = args.model if args.model not in (None, "tiny") else run["model"]
    if where == "tiny":
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "async-grpo"
        where = bucket.root / "base" if bucket.root else bucket.fetch("base", cache / run.get("run_id", "new") / "base")[1]
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.startswith("cuda") else "float32"))
    try:
        model = lora.load_model(str(where), dtype, device, args.trust_remote_code)
        tokenizer = lora.load_tokenizer(str(where), args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {where}: {str(error).splitlines()[0]}") from None
    lora.check_head(model)
    if device.startswith("cuda") and shares_prompts(model):
        model.set_attn_implementation("flex_attention")
    ends = [model.generation_config.eos_token_id, tokenizer.eos_token_id]
    stop_ids = sorted({i for e in ends if e is not None for i in (e if isinstance(e, list) else [e])})
    policy = Policy(model, lora.Lora(model, run["lora_r"], run["lora_alpha"], run["target_modules"], slots=slots), tokenizer, stop_ids)
    if "fingerprint" in run and fingerprint(policy) != run["fingerprint"]:
        raise UserError(f"--model {where} is not the run's base ({run['model']}): fingerprint {fingerprint(policy)[:12]}, "
                        f"expected {run['fingerprint'][:12]}; give the same model with --model")
    return policy


def fingerprint(policy: Policy) -> str:
    """sha256 over the base's parameter names, shapes and first 16 values rounded to bf16 (so that an fp32 and a bf16
    load agree), and the tokenizer's vocabulary."""
    h = hashlib.sha256(json.dumps(sorted(policy.tokenizer.get_vocab().items())).encode())
    for name, p in sorted(policy.model.named_parameters()):
        sample = p.detach().flatten()[:16].to(torch.bfloat16).float().tolist()
        h.update(f"{name} {list(p.shape)} {sample}".encode())
    return h.hexdigest()


def load_task(bucket, run: dict, args, tokenizer) -> Task:
    """Rows and rewards. Without --eval-data the last tenth of the data, at most 256 rows, is held out."""
    if run["task"] == "add":
        rows, eval_rows = ([{"prompt": add_prompt(a, b), "answer": a + b} for a, b in add_pairs(h)] for h in (False, True))
    else:
        rows, eval_rows = read_rows(bucket.get("data.jsonl").decode(), "data.jsonl"), None
        if run["has_eval_data"]:
            eval_rows = read_rows(bucket.get("eval.jsonl").decode(), "eval.jsonl")
        elif len(rows) >= 20:
            n = min(256, len(rows) // 10)
            rows, eval_rows = rows[:-n], rows[-n:]
    rewards = [(name, weight, f) for name, weight, f, _ in map(load_reward, args.reward)]
    if not rewards and run["rewards"]:
        if args.role in ("actor", "learner", "eval"):
            raise UserError("this run scores with --reward " + " --reward ".join(f"FILE.py:{n}" for n, _, _ in run["rewards"])
                            + "; give the same file here")
    if not rewards:
        rewards = [("add", 1.0, add_reward)] if run["task"] == "add" else [("math", 1.0, math_reward)]
        for row in rows + (eval_rows or []):
            if "answer" not in row:
                raise UserError(f"--task {run['task']} needs a column named answer; got columns {sorted(row)}")
    eval_rows = list(itertools.islice(itertools.cycle(eval_rows), 256)) if run["task"] == "add" else (eval_rows or [])[:256]
    return Task(rows, eval_rows, rewards, tokenizer, run["max_prompt_tokens"], args.reward_timeout_s)


def run_learner(bucket, args) -> None:
    began = time.monotonic()
    run = join_run(bucket, args, "learner")
    policy = load_policy(bucket, run, args, slots=2)
    policy.lora.train(0)
    learner = Learner(bucket, run, args, policy, load_task(bucket, run, args, policy.tokenizer))
    learner.start()
    try:
        done = learner.state.step >= args.steps
        say("ready", role="learner", url="-", id=learner.id, run_id=run["run_id"], step=learner.state.step)
        learner.train()
        if done:
            print(f"this run is complete: {learner.state.step} steps done, --steps {args.steps}", flush=True)
        finish(learner, time.monotonic() - began)
    finally:
        learner.member.stop()


def finish(learner: Learner, wall_s: float) -> None:
    """final/, summary.json, report.html and the summary line."""
    bucket, run = learner.bucket, learner.run
    files = lora.adapter_files(learner.state.adapter, run["lora_r"], run["lora_alpha"], run["target_modules"], run["model"])
    try:
        bucket.publish("final", files, {"step": learner.state.step, "run_id": run["run_id"], "digest": learner.digest})
    except Conflict:  # the end of a shorter run with fewer --steps
        bucket.delete_prefix("final")
        bucket.publish("final", files, {"step": learner.state.step, "run_id": run["run_id"], "digest": learner.digest})
    summary = summarize(bucket, run, learner.metrics) | {"wall_s": round(wall_s, 1), "digest": learner.digest}
    bucket.put("summary.json", json.dumps(summary, sort_keys=True, indent=1).encode() + b"\n")
    if learner.metrics:
        bucket.put("last.json", json.dumps(learner.metrics).encode())
    write_report(bucket, run)
    say("summary", **summary)


def curve(bucket, run: dict, last: dict | None = None) -> tuple[list[dict], list[dict]]:
    """(entries, metrics of each step): entry t + 1 carries the metrics of step t, so the curve is in the log itself."""
    log = Log(bucket, run)
    entries = [log.read(t) for t in range(1, log.refresh() + 1)]
    rows = {e["previous"]["step"]: e["previous"] for e in entries if e["previous"]}
    if last:
        rows[last["step"]] = last
    return entries, [rows[t] for t in sorted(rows)]


def summarize(bucket, run: dict, last: dict) -> dict:
    """Totals over the whole run from the log: every written group is trained, equal, dropped or pending."""
    entries, rows = curve(bucket, run, last)
    mean = lambda values: sum(values) / len(values) if values else math.nan  # noqa: E731
    named = {k for e in entries for k in named_groups(e)}
    dropped = {k for e in entries for k in e["dropped"]}
    equal, used = sum(e["groups_equal"] for e in entries), sum(len(c) for e in entries for c in e["chunks"])
    pending = [k for k in bucket.list("groups/") if k not in named]
    tokens = sum(r["tokens"] for r in rows)
    evals = {e["step"]: e for e in (json.loads(bucket.get(k)) for k in bucket.list("evals/"))}
    before, after = evals.get(0, {}), evals.get(len(entries), {})
    checked = [r["mismatch"] for r in rows if r["mismatch"] is not None]
    return {"steps": len(entries), "reward_first": mean([r["reward"] for r in rows[:5]]),
            "reward_last": mean([r["reward"] for r in rows[-10:]]), "eval_before": before.get("sampled", math.nan),
            "eval_after": after.get("sampled", math.nan), "eval_greedy_before": before.get("greedy", math.nan),
            "eval_greedy_after": after.get("greedy", math.nan),
            "ratio_mean": sum(r["ratio"] * r["tokens"] for r in rows if r["tokens"]) / tokens if tokens else math.nan,
            "mismatch_max": max(checked, default=math.nan), "staleness_mean": mean([r["staleness_mean"] for r in rows]),
            "groups_written": len(named) + len(pending), "groups_trained": used - equal, "groups_equal": equal,
            "groups_dropped": len(dropped), "groups_pending": len(pending)}


def write_report(bucket, run: dict) -> None:
    """report.html: docs/report.html with this run's numbers in place of its one placeholder."""
    def optional(key):
        return json.loads(bucket.get(key)) if any(bucket.list(key)) else None
    _, rows = curve(bucket, run, optional("last.json"))
    timings = {}
    for key in bucket.list("metrics/learner-"):
        for line in bucket.get(key).decode().splitlines():
            timings[json.loads(line)["step"]] = json.loads(line)
    steps = [row | timings.get(row["step"], {}) for row in rows]
    for row in steps:
        if "step_s" in row:
            row["other_s"] = max(0.0, row["step_s"] - sum(row[k] for k in ("wait_s", "fwd_bwd_s", "apply_s", "sync_s")))
    data = {"run": run, "summary": optional("summary.json"), "steps": steps, "samples": samples(bucket, run),
            "evals": [json.loads(bucket.get(k)) for k in bucket.list("evals/")],
            "members": list(proxy.LiveMembers(bucket).poll().values()), "bottleneck": bottleneck(steps)}
    template = (Path(__file__).parent / "docs" / "report.html").read_text(encoding="utf-8")
    # Subtle: "</script>" inside a completion would end the page's script; "<" never appears in JSON outside strings.
    embedded = json.dumps(without_nan(data)).replace("<", "\\u003c")
    bucket.put("report.html", template.replace("/*DATA*/null", embedded).encode())


def without_nan(value):
    """The same JSON value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def samples(bucket, run: dict) -> list[dict]:
    """Best and worst completion of some of the groups that still lie in the bucket, oldest first."""
    if "torch" not in sys.modules:
        return []
    keys = list(bucket.list("groups/"))
    found = []
    for key in keys[::max(1, len(keys) // 20)]:
        try:
            g = read_group(bucket.get(key), key, run)
        except (NotFound, Corrupt):
            continue
        low, high = (min, max)[0](range(len(g.rewards)), key=g.rewards.__getitem__), max(range(len(g.rewards)), key=g.rewards.__getitem__)
        found.append({"step": version_of(key) * run["sync_steps"] + 1, "prompt": g.text["prompt"],
                      **{name: {"text": g.text["completions"][i], "reward": g.rewards[i]} for name, i in (("best", high), ("worst", low))}})
    return found


def bottleneck(steps: list[dict]) -> str:
    """One sentence: what most of a step's time goes to, and what would help."""
    timed = [r for r in steps[-50:] if "step_s" in r]
    if not timed:
        return "No step has been timed yet."
    total = sum(r["step_s"] for r in timed)
    share = {k: sum(r[k] for r in timed) / total for k in ("wait_s", "fwd_bwd_s", "apply_s", "sync_s", "other_s")}
    name = max(share, key=share.get)
    advice = {"wait_s": "the learner waits for groups: add samplers or actors, or raise --inflight (or --queue-groups, if staleness allows)",
              "fwd_bwd_s": "the learner's forward and backward: raise --token-budget if memory allows, or add a learner",
              "apply_s": "the optimizer and digest on the CPU: lower --lora-r, or use a faster CPU",
              "sync_s": "publishing and checkpoints: raise --sync-steps or --checkpoint-steps",
              "other_s": "waiting for other learners' parts and the bucket: use a nearer bucket or fewer --chunks"}
    return f"Over the last {len(timed)} steps {share[name]:.0%} of the time went to {advice[name]}."


def run_sampler(bucket, args) -> None:
    run = join_run(bucket, args, "sampler")
    policy = load_policy(bucket, run, args, slots=run["max_staleness"] + 4)
    engine = Engine(bucket, run, policy, args.max_rows)
    engine.start(follows=False)  # the router loads the versions, and checks them, before it sends anything here
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
    run = join_run(bucket, args, "actor")
    if args.sampler:
        tokenizer = lora.load_tokenizer(str(args.model or (run["model"] if run["model"] != "tiny" else bucket.root / "base")))
        sampler = HttpSampler(bucket, run, args)
    else:
        policy = load_policy(bucket, run, args, slots=run["max_staleness"] + 4)
        engine, tokenizer = Engine(bucket, run, policy, args.max_rows), policy.tokenizer
        engine.start(follows=True)
        sampler = LocalSampler(engine)
    actor = Actor(bucket, run, args, load_task(bucket, run, args, tokenizer), sampler)
    try:
        actor.work()
    finally:
        actor.member.stop()
        if not args.sampler:
            engine.end()


def run_eval(bucket, args) -> None:
    """Held-out reward of the newest adapter of a bucket, or of --version."""
    run = join_run(bucket, args, "eval")
    policy = load_policy(bucket, run, args, slots=1)
    version, tensors = published(bucket, args.version)
    say("eval", version=version, **evaluate(policy, load_task(bucket, run, args, policy.tokenizer), tensors, run))


def published(bucket, version: int | None) -> tuple[int, dict]:
    versions = [int(k.split("/")[1][1:]) for k in bucket.list("adapters/") if k.endswith("/manifest.json")]
    if not versions or (version is not None and version not in versions):
        raise UserError(f"{bucket.address} has no adapter {version if version is not None else 'yet'}; it has {versions}")
    version = max(versions) if version is None else version
    return version, lora.read_adapter(bucket.fetch(f"adapters/v{version:06d}")[1])[0]


def run_export(bucket, args) -> None:
    """Copies the newest adapter (or --version) to --out as PEFT files; --merge adds it to the base instead."""
    run = join_run(bucket, args, "export")
    if not args.out:
        raise UserError("--role export needs --out DIR")
    version, tensors = published(bucket, args.version)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.merge:
        policy = load_policy(bucket, run, args, slots=1)
        model = lora.merge(policy.model, tensors, run["lora_alpha"], run["lora_r"], policy.model.dtype)
        model.save_pretrained(out)
        policy.tokenizer.save_pretrained(out)
    else:
        files = lora.adapter_files(tensors, run["lora_r"], run["lora_alpha"], run["target_modules"], run["model"])
        for name, data in files.items():
            (out / name).write_bytes(data)
    say("exported", version=version, to=out, merged=args.merge)


def run_all(args, argv: list[str]) -> int:
    """Every role as a process of its own on this machine; restarts one that dies, ends all when the learners are done."""
    here = [sys.executable, "-u", str(Path(__file__).resolve()), *argv]
    proxy_flags = ["--bucket", args.bucket, "--listen", "127.0.0.1:0"] + (["--token", args.token] if args.token else [])
    commands = {f"learner {i}": [*here, "--role", "learner"] for i in range(args.learners)}
    commands |= {"proxy": [sys.executable, "-u", str(Path(__file__).resolve().parent / "proxy.py"), *proxy_flags]}
    commands |= {f"sampler {i}": [*here, "--role", "sampler", "--listen", "127.0.0.1:0"] for i in range(args.samplers)}
    commands |= {f"actor {i}": [*here, "--role", "actor", "--sampler", "bucket"] for i in range(args.actors)}
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "GRPO_PARENT": str(os.getpid())}
    crash = env.pop("GRPO_CRASH", None)
    running = {name: subprocess.Popen(c, env=env | ({"GRPO_CRASH": crash} if crash and "learner" in name else {}))
               for name, c in commands.items()}
    restarts, code = deque(maxlen=5), 0
    try:
        while any("learner" in name for name in running):
            time.sleep(0.1)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode == 0:
                    continue
                restarts.append(time.monotonic())
                if process.returncode == 2 or (len(restarts) == 5 and restarts[-1] - restarts[0] < 60):
                    raise SystemExit(process.returncode if process.returncode == 2 else 1)
                warn(f"{name} died with {process.returncode}; starting it again")
                running[name] = subprocess.Popen(commands[name], env=env)
    except SystemExit as stop:
        code = stop.code
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


# ---------------------------------------------------------------- 9. Arguments and main

# What run.json fixes for everybody: a joiner takes these from the bucket. None: the flag was not given.
RUN_DEFAULTS = {"model": "tiny", "task": "math", "steps": 200, "groups_per_step": 8, "group_size": 8, "max_tokens": 256,
                "max_prompt_tokens": 512, "temperature": 1.0, "lora_r": 16, "lora_alpha": 32.0, "target_modules": "all-linear",
                "lr": 1e-4, "lr_schedule": "constant", "warmup_steps": 5, "weight_decay": 0.0, "loss": "dapo",
                "clip_low": None, "clip_high": None, "kl": 0.0, "tis": 0.0, "clip_norm": 1.0, "mask_truncated": False,
                "max_staleness": 2, "sync_steps": 1, "checkpoint_steps": 25, "part_dtype": "float32", "seed": 0}
TINY_DEFAULTS = {"task": "add", "steps": 100, "groups_per_step": 64, "max_tokens": 7, "max_prompt_tokens": 16, "lora_r": 8,
                 "lora_alpha": 16.0, "lr": 1e-2, "lr_schedule": "linear", "warmup_steps": 20}


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    run = parser.add_argument_group("the run (fixed by the first learner; joiners read it from the bucket)")

    def flag(group, name: str, text: str, **more):
        key = name.replace("-", "_")
        if key in RUN_DEFAULTS:
            tiny = f"; tiny: {TINY_DEFAULTS[key]}" if key in TINY_DEFAULTS else ""
            text += f" (default {RUN_DEFAULTS[key]}{tiny})" if RUN_DEFAULTS[key] is not None else ""
        group.add_argument(f"--{name}", help=text.replace("%", "%%"), **more)
    flag(run, "model", "folder or hub id of a causal language model; tiny trains one on the spot")
    flag(run, "task", "add (the tiny model's), math (last number, boxed or #### equals the answer column)", choices=("add", "math", "data"))
    for name, kind, text in (
            ("steps", int, "optimizer steps in all; a higher number later goes on"),
            ("groups-per-step", int, "groups that make a step"), ("group-size", int, "completions per prompt, G"),
            ("max-tokens", int, "tokens of a completion at most"), ("max-prompt-tokens", int, "longer prompts are passed over"),
            ("temperature", float, "of sampling and of the trained distribution"), ("lora-r", int, "rank"),
            ("lora-alpha", float, "scale is alpha / r"), ("lr", float, "AdamW learning rate"),
            ("warmup-steps", int, "linear warm-up, 0 for none"), ("weight-decay", float, "AdamW decay"),
            ("clip-low", float, "lower clip distance of the ratio; default by loss"),
            ("clip-high", float, "upper clip distance of the ratio; default by loss"),
            ("kl", float, "beta of the KL term to the base, 0 for none"), ("tis", float, "cap on the ratio, 0 for none"),
            ("clip-norm", float, "gradient norm clip, 0 for none"),
            ("max-staleness", int, "versions a group may lag; 0 is the synchronous loop"),
            ("sync-steps", int, "steps per published version"), ("checkpoint-steps", int, "steps between checkpoints"),
            ("seed", int, "of base, adapter, order and sampling")):
        flag(run, name, text, type=kind)
    flag(run, "target-modules", "all-linear, or last names separated by commas", type=lambda s: s if s == "all-linear" else sorted(s.split(",")))
    flag(run, "loss", "see section 2 of this file", choices=tuple(LOSSES))
    flag(run, "lr-schedule", "after the warm-up; linear ends at a tenth", choices=("constant", "linear"))
    flag(run, "mask-truncated", "do not train completions cut at max-tokens", action="store_true", default=None)
    flag(run, "part-dtype", "of the gradients in the bucket; bfloat16 halves them", choices=("float32", "bfloat16"))
    run.add_argument("--data", metavar="FILE.jsonl", help="rows with prompt (text or chat messages) and other columns")
    run.add_argument("--eval-data", metavar="FILE.jsonl", help="held-out rows; default: the last tenth of the data")
    run.add_argument("--reward", action="append", default=[], metavar="FILE.py:FUNCTION[=WEIGHT]", help="TRL's signature; repeatable")
    run.add_argument("--init-adapter", metavar="DIR", help="start from this PEFT adapter")
    here = parser.add_argument_group("this process")
    here.add_argument("--role", default="all", choices=("all", "learner", "actor", "sampler", "proxy", "eval", "report", "export"))
    here.add_argument("--bucket", default="runs/demo", help="folder, s3://bucket/prefix or URL (default runs/demo)")
    here.add_argument("--version", type=int, help="adapter version for eval and export (default: the newest)")
    here.add_argument("--out", metavar="DIR", help="where export writes")
    here.add_argument("--merge", action="store_true", help="export base and adapter as one model")
    here.add_argument("--sampler", metavar="URL", help="proxy, sampler or vLLM to ask; bucket: the proxy announced there; none: sample in this process")
    here.add_argument("--listen", default="127.0.0.1:8001", metavar="HOST:PORT", help="of a sampler; port 0: any free one")
    here.add_argument("--token", default=os.environ.get("GRPO_TOKEN", ""), help="bearer token (default: GRPO_TOKEN)")
    here.add_argument("--device", help="cuda, cuda:1, cpu (default: cuda if there is one)")
    here.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the base (default: bfloat16 on cuda, else float32)")
    here.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    for name, kind, default, text in (
            ("token-budget", int, 2048, "tokens per forward of the learner"), ("queue-groups", int, 0, "groups waiting and in flight at most (0: one step's, more with staleness)"),
            ("inflight", int, 128, "rollouts in flight per actor"), ("chunks", int, 0, "parts per step (0: one per live learner)"),
            ("eval-steps", int, 0, "steps between evaluations (0: first and last only; -1: never)"),
            ("max-rows", int, 64, "rows a sampler decodes at once"), ("reward-timeout-s", float, 60.0, "limit of one call of a reward function"),
            ("group-deadline-s", float, 600.0, "a group closes with the rollouts it has after this"),
            ("wait-s", float, 3600.0, "limit of any wait (0: none)"),
            ("samplers", int, 2, "with --role all"), ("actors", int, 1, "with --role all"), ("learners", int, 1, "with --role all")):
        here.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default {default})")
    args = parser.parse_args(argv)
    for name in ("steps", "groups_per_step", "group_size", "max_tokens", "max_prompt_tokens", "lora_r", "sync_steps", "checkpoint_steps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def end_with_parent() -> None:
    """Thread: a process started by --role all ends when that one is gone, however it went."""
    parent = int(os.environ.get("GRPO_PARENT", 0))
    while parent and os.getppid() == parent:
        time.sleep(1)
    if parent:
        os._exit(1)


def main(argv: list[str]) -> int:
    try:
        if ROLE.parse_known_args(argv)[0].role == "proxy":
            return proxy.main([a for i, a in enumerate(argv) if a != "--role" and (i == 0 or argv[i - 1] != "--role")])
        args = arguments(argv)
        if args.role == "all":
            from importlib.metadata import version
            say("start", role="all", bucket=args.bucket, torch=version("torch"), transformers=version("transformers"),
                seed=args.seed or 0, samplers=args.samplers, actors=args.actors, learners=args.learners)
            return run_all(args, argv)
        threading.Thread(target=end_with_parent, daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        bucket = open_bucket(args.bucket)
        if args.role == "report":
            run = join_run(bucket, args, "report")
            write_report(bucket, run)
            say("report", at=bucket.address + "/report.html")
            return 0
        {"learner": run_learner, "actor": run_actor, "sampler": run_sampler, "eval": run_eval, "export": run_export}[args.role](bucket, args)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (BucketError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
