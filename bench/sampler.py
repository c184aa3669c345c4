"""Tokens per second of our sampler, of HF generate with PEFT, and of the matrix products alone, on this machine.

    python bench/sampler.py --model FOLDER --rows 32 64 128 --rank 8          (no --model: random weights, SmolLM2-135M's shape)

All three do the same work: `rows` completions of `--tokens` tokens, in groups of 8 with a prompt of `--prompt` tokens.
Ours serves three versions at once, PEFT one. The prefill is in both; "products" is the time of the base's matrix
products alone, one token for every row, so no sampler at this batch can be faster. Runs alternate; medians are printed.

Needs peft beside the project's requirements.
"""
import argparse, statistics, sys, time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lora

SMOLLM2 = dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
               vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192)

def base(folder: str | None) -> torch.nn.Module:
    if folder:
        return lora.load_model(folder)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval().requires_grad_(False)

def adapter(shapes: dict, seed: int) -> dict:
    """A version that differs from the others: B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    return {key: t if ".lora_A." in key else torch.randn(t.shape, generator=generator) * 0.01
            for key, t in lora.init_adapter(shapes, seed).items()}

def ours(folder: str | None, rank: int, rows: int, prompts: list, tokens: int):
    model = base(folder)
    layers = lora.Lora(model, rank, 2 * rank, slots=4)
    sampler = lora.Sampler(model, layers, set(), max_rows=rows, max_len=len(prompts[0]) + tokens, prefix_tokens=0)
    for version in range(3):
        sampler.load(f"policy-v{version}", adapter(layers.shapes, version))
    def go():
        futures = [sampler.submit(p, 8, tokens, 1.0, f"policy-v{i % 3}", seed=i) for i, p in enumerate(prompts)]
        while sampler.step():
            pass
        assert sum(len(c.token_ids) for f in futures for c in f.result()) == rows * tokens
    return go

def theirs(folder: str | None, rank: int, rows: int, prompts: list, tokens: int):
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(base(folder), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")).eval()
    ids = torch.tensor([p for p in prompts for _ in range(8)])
    @torch.inference_mode()
    def go():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=tokens,
                             min_new_tokens=tokens, pad_token_id=0)
        assert out.shape == (rows, ids.shape[1] + tokens)
    return go

def products(folder: str | None, rows: int, tokens: int):
    model = base(folder)
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in weights}
    @torch.inference_mode()
    def go():
        for _ in range(tokens):
            for w in weights:
                F.linear(inputs[w.shape[1]], w)
    return go

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: random weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128], help="completions in flight")
    parser.add_argument("--rank", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=96, help="prompt length [tokens]")
    parser.add_argument("--tokens", type=int, default=32, help="completion length [tokens]")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each, after one to warm up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"torch {torch.__version__}, {args.threads} threads, prompt {args.prompt}, {args.tokens} new tokens, {args.runs} runs")
    print("rank rows | ours tok/s | HF+PEFT tok/s  ours/HF | products tok/s  ours/products")
    for rank in args.rank:
        for rows in args.rows:
            prompts = [[(7 * g + i * i) % 1000 + 3 for i in range(args.prompt)] for g in range(rows // 8)]
            contestants = [ours(args.model, rank, rows, prompts, args.tokens), theirs(args.model, rank, rows, prompts, args.tokens),
                           products(args.model, rows, args.tokens)]
            times = [[], [], []]
            for run in range(args.runs + 1):
                for go, seen in zip(contestants, times):
                    start = time.perf_counter()
                    go()
                    if run:
                        seen.append(time.perf_counter() - start)
            a, b, c = (rows * args.tokens / statistics.median(seen) for seen in times)
            print(f"{rank:4} {rows:4} | {a:10.0f} | {b:13.0f}  {a / b:7.2f} | {c:14.0f}  {a / c:13.2f}", flush=True)

if __name__ == "__main__":
    main()
