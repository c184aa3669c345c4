"""Trained tokens per second of our learner, of a padded step with PEFT, and of the matrix products alone, on this machine.

    python bench/learner_step.py --model FOLDER        (no --model: random weights, SmolLM2-135M's shape; bench/smollm2.py makes one)

Both learners get the same groups (8 completions of 32 to 64 tokens), the same rank 8 adapter on all linear layers and the same
loss, and return the same gradient; fp32. A run is forward, loss and backward; runs alternate and medians are printed.

theirs      what TRL's GRPOTrainer computes: one row [prompt + completion] per completion, all padded to the longest; logits of the
            completions only (`logits_to_keep`), their logprobs and entropies; the clipped loss; backward. Written here with
            transformers and PEFT. It is the faster one of TRL's ways: gradient checkpointing is off (TRL's default is on), and on a
            CPU the head of TRL 1.16 would compute every prompt position, too, and each logit twice.
of peak     the share of the machine's matrix-product rate that ours reaches. Owed are 2 operations per weight and token forward and
            2 for the input's gradient (none for a frozen weight's own), for the head only where a token is trained. The rate is that of
            the model's own products, forward and input gradient, at 1,024 rows, measured between the runs.
bare        the same share for the frozen base alone: transformers' modules on as many tokens, no adapter, and for attention
            query + key + value, at next to no cost. What keeps these modules cannot reach more.

Needs peft beside the project's requirements.
"""
import argparse, random, statistics, sys, time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo_async
import lora

SMOLLM2 = dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
               vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192)
G, RANK = 8, 8
UPDATE = {"loss": "dapo", "clip_low": 0.2, "clip_high": 0.28, "kl": 0.0, "tis": 0.0, "temperature": 1.0, "max_tokens": 64,
          "mask_truncated": False}

def base(folder: str | None) -> torch.nn.Module:
    if folder:
        return lora.load_model(folder)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval().requires_grad_(False)

def make_groups(n: int, prompt: int, shortest: int, longest: int, seed: int = 0) -> list[grpo_async.Group]:
    """Groups of random tokens, lengths uniform between the two; the speed does not depend on what is said."""
    draw = random.Random(seed)
    def tokens(length):
        return [draw.randrange(3, 49000) for _ in range(length)]
    return [grpo_async.Group(i, tokens(prompt), ids := [tokens(draw.randint(shortest, longest)) for _ in range(G)],
                             [[draw.uniform(-12, -10) for _ in c] for c in ids], [float(j % 2) for j in range(G)], [0] * G, [False] * G)
            for i in range(n)]

def adapter(shapes: dict) -> dict:
    """B is not zero, so that both halves have a gradient."""
    generator = torch.Generator().manual_seed(1)
    return {key: t if ".lora_A." in key else torch.randn(t.shape, generator=generator) * 0.01
            for key, t in lora.init_adapter(shapes, 0).items()}

def our_policy(folder: str | None) -> grpo_async.Policy:
    model = base(folder)
    policy = grpo_async.Policy(model, lora.Lora(model, RANK, 2 * RANK, slots=2), None, [2])
    policy.lora.load(0, adapter(policy.lora.shapes))
    return policy

def ours(policy: grpo_async.Policy, groups: list, budget: int) -> dict:
    return grpo_async.chunk_gradient(policy, groups, UPDATE, budget)[0]

def peft_model(folder: str | None, shapes: dict):
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(base(folder), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    named = dict(model.named_parameters())
    for key, tensor in adapter(shapes).items():
        named[key.replace(".weight", ".default.weight")].data.copy_(tensor)
    return model

def padded(groups: list) -> dict:
    """Tensors of one row per completion: prompts padded on the left, completions on the right."""
    rows = [(g.prompt_ids, ids, logprobs, a) for g in groups for ids, logprobs, a in
            zip(g.completion_ids, g.sampler_logprobs, grpo_async.advantages(g.rewards))]
    P, T = max(len(p) for p, *_ in rows), max(len(c) for _, c, *_ in rows)
    left, right = [P - len(p) for p, *_ in rows], [T - len(c) for _, c, *_ in rows]
    return {"input_ids": torch.tensor([[0] * n + p + c + [0] * m for n, (p, c, _, _), m in zip(left, rows, right)]),
            "attention_mask": torch.tensor([[0] * n + [1] * (P - n + T - m) + [0] * m for n, m in zip(left, right)]),
            "mask": torch.tensor([[1.0] * (T - m) + [0.0] * m for m in right]),
            "sampler": torch.tensor([s + [0.0] * m for (_, _, s, _), m in zip(rows, right)]),
            "advantage": torch.tensor([a for *_, a in rows])[:, None]}

def their_logprobs(model, batch: dict, temperature: float = 1.0):
    """Logprobs [C, T] and entropies [C, T]; the logits [C, T, V] are whole, as in TRL before its chunked head."""
    T = batch["mask"].shape[1]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=T + 1,
                   use_cache=False).logits[:, :-1] / temperature
    chosen = logits.gather(-1, batch["input_ids"][:, -T:, None])[..., 0]
    logprobs = chosen - torch.stack([row.logsumexp(-1) for row in logits])
    with torch.no_grad():
        parts = [part.log_softmax(-1) for part in logits.flatten(0, 1).split(128)]
        entropy = torch.cat([-(part.exp() * part).sum(-1) for part in parts]).view_as(logprobs)
    return logprobs, entropy

def theirs(model, groups: list, logprobs_of=their_logprobs) -> dict:
    batch = padded(groups)
    model.zero_grad()
    logprobs, _ = logprobs_of(model, batch)
    ratio, a = (logprobs - batch["sampler"]).exp(), batch["advantage"]
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - UPDATE["clip_low"], 1 + UPDATE["clip_high"]) * a)
    (loss * batch["mask"]).sum().backward()
    return {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}

def compare(policy, model, groups: list, budget: int) -> tuple[float, float]:
    """Largest difference of a logprob, and of a gradient relative to the largest entry of its tensor."""
    batch = padded(groups)
    with torch.no_grad():
        logprobs = their_logprobs(model, batch)[0]
        wanted = {tuple(ids): row[:len(ids)] for ids, row in zip((c for g in groups for c in g.completion_ids), logprobs)}
        worst = 0.0
        for rows in grpo_async.pack(groups, UPDATE, budget, True):
            for ids, mask, got in zip(rows.targets, rows.mask, grpo_async.row_logprobs(policy, rows, 0, 1.0)[0]):
                worst = max(worst, (wanted[tuple(ids[mask].tolist())] - got[mask]).abs().max().item())
    mine, other = ours(policy, groups, budget), theirs(model, groups)
    return worst, max(((mine[k] - other[k]).abs().max() / other[k].abs().max()).item() for k in other)

def no_attention(module, query, key, value, attention_mask, **kwargs):
    return (query + (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)).transpose(1, 2), None

def bare(model, tokens: int, trained: int) -> None:
    """Forward and input gradient of the base, no adapter, no attention; the head on the last `trained` of the tokens."""
    ids, before, model.config._attn_implementation = torch.arange(tokens)[None], model.config._attn_implementation, "none"
    inputs = model.get_input_embeddings()(ids).requires_grad_()
    hidden = lora.backbone(model)(inputs_embeds=inputs, use_cache=False).last_hidden_state[0, -trained:]
    model.config._attn_implementation = before
    head = lora.head(model)
    lora.token_logprobs(hidden, head.weight, head.bias, ids[0, -trained:])[0].sum().backward()

def products(weights: list, rows: int = 1024):
    """A run of the model's products with `rows` tokens, and its number of operations."""
    inputs = {n: torch.randn(rows, n) for w in weights for n in w.shape}
    @torch.inference_mode()
    def go():
        for w in weights:
            F.linear(inputs[w.shape[1]], w)
            inputs[w.shape[0]] @ w
    return go, 4 * rows * sum(w.numel() for w in weights)

def seconds(go) -> float:
    start = time.perf_counter()
    go()
    return time.perf_counter() - start

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: random weights")
    parser.add_argument("--prompt", type=int, nargs="+", default=[96, 256], help="prompt lengths [tokens]")
    parser.add_argument("--groups", type=int, default=2, help="groups in a step")
    parser.add_argument("--token-budget", type=int, default=2048, help="tokens in a forward of ours")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each, after one to warm up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    policy = our_policy(args.model)
    model = peft_model(args.model, policy.lora.shapes)
    AttentionInterface.register("none", no_attention)
    head = lora.head(policy.model)
    weights = [m.weight for m in policy.model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    print(f"torch {torch.__version__}, {args.threads} threads, {args.groups} groups of {G}, rank {RANK}, {args.runs} runs")
    print("prompt | tokens ours / theirs | ours tok/s | HF+PEFT tok/s  ours/HF | peak GFLOP/s  of peak  bare | logprobs  gradient")
    for prompt in args.prompt:
        groups = make_groups(args.groups, prompt, 32, 64)
        differences = compare(policy, model, groups, args.token_budget)
        trained = sum(len(ids) for g in groups for ids in g.completion_ids)
        tokens = sum(len(g.prompt_ids) + sum(len(ids) - 1 for ids in g.completion_ids) for g in groups)
        go, operations = products(weights)
        contestants = (lambda: ours(policy, groups, args.token_budget), lambda: theirs(model, groups),
                       lambda: bare(policy.model, tokens, trained), go)
        times = list(zip(*([seconds(go) for go in contestants] for _ in range(args.runs + 1))))
        mine, other, base_alone, peak = (statistics.median(seen[1:]) for seen in times)
        owed = (4 * tokens * sum(w.numel() for w in weights) + 4 * trained * head.weight.numel()) / (operations / peak)
        print(f"{prompt:6} | {tokens:11} / {padded(groups)['input_ids'].numel():6} | {trained / mine:10.0f} | {trained / other:13.0f}  "
              f"{other / mine:7.2f} | {operations / peak / 1e9:12.0f}  {owed / mine:7.2f}  {owed / base_alone:4.2f} | "
              f"{differences[0]:8.1e}  {differences[1]:8.1e}", flush=True)

if __name__ == "__main__":
    main()
