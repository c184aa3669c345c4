"""Writes docs/one-step.md: one step of a real run, number by number.

    python docs/walkthrough.py                          # makes a run of 6 steps (a minute on two cores), shows step 2
    python docs/walkthrough.py BUCKET STEP > page.md    # a step of a run of yours, while its groups are still there

Everything on the page is read from the bucket or recomputed from it with the functions of grpo_async.py; where both
exist (the norm of the gradient, the mean ratio) they must agree, or the script stops.
"""
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo_async as grpo
import lora
from bucket import open_bucket

RUN_FLAGS = "--steps 6 --groups-per-step 8 --samplers 1 --warmup-steps 1 --eval-steps -1".split()
SHOWN = 2


def adapter(bucket, version: int) -> dict:
    return lora.read_adapter(bucket.fetch(f"adapters/v{version:06d}")[1])[0]


def completion_logprobs(policy, group, run, tensors) -> list[list[float]]:
    """Learner logprobs of each token of each completion of a group under an adapter."""
    policy.lora.load(0, tensors)
    rows, = grpo.pack([group], run, 10**6, share=True)
    with grpo.torch.no_grad():
        logprobs, _ = grpo.row_logprobs(policy, rows, 0, run["temperature"])
    return [row[:len(ids)].tolist() for row, ids in zip(logprobs, group.completion_ids)]


def norm(tensors) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def page(address: str, step: int) -> str:
    bucket, args = open_bucket(address), grpo.arguments([])
    run = json.loads(bucket.get("run.json"))
    assert run["sync_steps"] == 1 and run["loss"] == "dapo" and not run["kl"], "the page explains the default loss, a version a step"
    policy, log = grpo.load_policy(bucket, run, args, slots=2), grpo.Log(bucket, run)
    entry, after = log.read(step), log.read(step + 1)
    groups = [grpo.read_group(bucket.get(key), key, run) for chunk in entry["chunks"] for key in chunk]
    group = max((g for g in groups if not g.is_equal), key=lambda g: len(set(map(str, g.completion_ids))))
    old, new = adapter(bucket, step - 1), adapter(bucket, step)
    before, later = (completion_logprobs(policy, group, run, tensors) for tensors in (old, new))
    advantages = grpo.advantages(group.rewards)

    policy.lora.load(0, old)
    grads, sums = grpo.chunk_gradient(policy, groups, entry["update"], args.token_budget)
    size, clip, metrics = norm(grads.values()) / entry["update"]["normaliser"], entry["update"]["clip_norm"], after["previous"]
    assert math.isclose(size, metrics["grad_norm"], rel_tol=1e-3), (size, metrics["grad_norm"])
    assert math.isclose(sums["ratio"] / sums["trained_tokens"], metrics["ratio"], rel_tol=1e-3), (sums, metrics["ratio"])

    def show(ids):
        return "`" + "".join(policy.tokenizer.convert_ids_to_tokens(ids)).replace("<eos>", "⏎") + "`"
    table = ["| completion | reward | advantage | log p, sampler | log p, learner | ratio by token | log p after the step |", "|---|---|---|---|---|---|---|"]
    for ids, reward, a, sampler, learner, then in zip(group.completion_ids, group.rewards, advantages, group.sampler_logprobs, before, later):
        ratios = " ".join(f"{math.exp(x - y):.2f}" for x, y in zip(learner, sampler))
        table.append(f"| {show(ids)} | {reward:g} | {a:+.3f} | {sum(sampler):.2f} | {sum(learner):.2f} | {ratios} | {sum(then):.2f} |")
    mean, G = sum(group.rewards) / len(group.rewards), len(group.rewards)
    std = math.sqrt(sum((x - mean) ** 2 for x in group.rewards) / G)
    equal, trained = sum(g.is_equal for g in groups), int(sums["trained_tokens"])
    moved = norm([new[n] - old[n] for n in new])
    shown = {k: v for k, v in entry.items() if k not in ("previous", "dropped")} | {"chunks": [[f"{len(groups)} keys, {groups[0].key} first"]]}
    return f"""# One step, with its numbers

Step {step} of a run of the tiny model on `--task add` ({run['groups_per_step']} groups of {run['group_size']} a step, rank {run['lora_r']}, seed {run['seed']}).
Written by `python docs/walkthrough.py`; the words are fixed, every number comes from the run.

## 1. The actor asks

One prompt, {show(group.prompt_ids)}, goes to a sampler that serves version {group.versions[0]} of the policy. {G} completions come back, as token ids
with the log-probability of each token under the distribution it was drawn from. The reward function gives 1 where the
completion stops by itself on the right sum, else 0. All this becomes one object, `{group.key}`.

{chr(10).join(table)}

## 2. Rewards become advantages

The mean reward of the group is {mean:.3f}, the standard deviation {std:.3f}: a right answer has the advantage
(1 − {mean:.3f}) / {std:.3f} = {max(advantages):+.3f}, a wrong one (0 − {mean:.3f}) / {std:.3f} = {min(advantages):+.3f}. No value network: the other
completions of the same prompt are the baseline. {equal} of the step's {len(groups)} groups had equal rewards; theirs are exactly 0, and they cost no forward.

## 3. The learner decides

It has version {step - 1}, the group is of version {group.versions[0]}: staleness {step - 1 - group.versions[0]}, of at most {run['max_staleness']}. It decides the step with
the log's entry, which only one learner can create:

```json
{json.dumps(shown, indent=1)}
```

## 4. Ratios

The learner scores the same tokens under its own weights. ratio = exp(log p learner − log p sampler), per token: 1 where both are
the same policy. In the whole step it is {sums['ratio'] / trained:.4f} on average over {trained} trained tokens, and {sums['clipped'] / trained:.1%} of them leave
[1 − {entry['update']['clip_low']:g}, 1 + {entry['update']['clip_high']:g}] in the direction of their advantage, where the gradient is cut off. The loss is the mean of

    −min(ratio · A, clip(ratio) · A)

over all {trained} of them: {sums['loss'] / sums['count']:.4f}.

## 5. The gradient

It goes to `parts/{step:06d}/000.safetensors`: {len(grads)} tensors, {sum(g.numel() for g in grads.values()):,} numbers, a part of
{4 * sum(g.numel() for g in grads.values()) / 1024:.0f} KiB. Divided by the {trained} tokens its norm is {size:.4f}{f', cut to {clip:g}' if clip and size > clip else f', under the limit of {clip:g}'}. Any learner that
reads entry and part applies the same AdamW step in fp32, one operation at a time, and gets the same bits: the state before
has the digest `{entry['digest_before'][:16]}…`, the state after `{after['digest_before'][:16]}…`.

## 6. The new version

Learning rate {entry['update']['lr']:.2g}: the adapter moves by {moved:.4f} (norm; its own is {norm(new.values()):.3f}) and is published as `adapters/v{step:06d}`. The last
column of the table shows what that did to this prompt's completions: those with a positive advantage changed by
{sum(sum(t) - sum(b) for t, b, a in zip(later, before, advantages) if a > 0) / sum(a > 0 for a in advantages):+.3f} in log-probability on average, the others by {sum(sum(t) - sum(b) for t, b, a in zip(later, before, advantages) if a <= 0) / sum(a <= 0 for a in advantages):+.3f}.
"""


def main() -> int:
    if len(sys.argv) == 3:
        print(page(sys.argv[1], int(sys.argv[2])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "grpo_async.py", "--bucket", folder, *RUN_FLAGS], check=True)
        (ROOT / "docs" / "one-step.md").write_text(page(folder, SHOWN), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
