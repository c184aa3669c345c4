"""Tokens per second of our sampler, of HF generate with PEFT, of vLLM, and of the matrix products alone, on this machine.

    python bench/sampler.py --model FOLDER --rows 32 64 128 --rank 1 8        (no --model: random weights, SmolLM2-135M's shape)
    python bench/sampler.py --model FOLDER --vllm                             (vLLM too; the first run makes its environment, 3.5 GB)

All do the same work: `rows` completions of `--tokens` tokens, in groups of 8 that share a prompt of `--prompt` tokens, a new
one in every run, so that no cache of prompts has it. Ours
and vLLM serve three versions of the adapter at once, PEFT one. "Products" is the time of the base's matrix products alone,
in the memory layout that ours uses: each prompt once, then a token for every row. So no sampler can be faster at this batch.
"decode" leaves the prompts out on both sides: median time of the products of one token for all rows, over that of a step;
"as loaded" is the same with the products in the memory layout that transformers gives the weights; "bare" is the share
that a token for all rows reaches with transformers' modules alone: no adapter, no attention, no draw.
The contestants alternate; medians are printed.

Needs peft beside the project's requirements.
"""
import argparse, json, statistics, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import requests
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lora
import peers
from learner_step import no_attention

SMOLLM2 = dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
               vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192)
GROUP, VERSIONS = 8, 3

def adapter(shapes: dict, seed: int) -> dict:
    """A version that differs from the others: B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    return {key: t if ".lora_A." in key else torch.randn(t.shape, generator=generator) * 0.01
            for key, t in lora.init_adapter(shapes, seed).items()}

class Ours:
    def __init__(self, folder: str, rank: int, rows: int, prompts: list, tokens: int):
        self.prompts, self.tokens, self.step_s, model = prompts, tokens, [], lora.load_model(folder)
        layers = lora.Lora(model, rank, 2 * rank, slots=VERSIONS + 1)
        # No prompt is kept from one run to the next.
        self.sampler = lora.Sampler(model, layers, set(), max_rows=rows, max_len=len(prompts[0]) + tokens, prefix_tokens=0)
        for version in range(VERSIONS):
            self.sampler.load(f"policy-v{version}", adapter(layers.shapes, version))

    def run(self, first: int) -> int:
        futures = [self.sampler.submit([first, *prompt[1:]], GROUP, self.tokens, 1.0, f"policy-v{i % VERSIONS}", seed=i)
                   for i, prompt in enumerate(self.prompts)]
        more, times = True, []
        while more:
            start = time.perf_counter()
            more = self.sampler.step()
            times.append(time.perf_counter() - start)
        # Without the first, which computes the prompts, and the last, which only empties the rows.
        self.step_s.append(statistics.median(times[1:-1]))
        return sum(len(c.token_ids) for future in futures for c in future.result())

def as_loaded(folder: str):
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)

class Peft:
    def __init__(self, folder: str, rank: int, rows: int, prompts: list, tokens: int):
        from peft import LoraConfig, get_peft_model
        self.model = get_peft_model(as_loaded(folder), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")).eval()
        self.ids, self.tokens = torch.tensor([p for p in prompts for _ in range(GROUP)]), tokens

    @torch.inference_mode()
    def run(self, first: int) -> int:
        self.ids[:, 0] = first
        out = self.model.generate(input_ids=self.ids, attention_mask=torch.ones_like(self.ids), do_sample=True, top_k=0,
                                  max_new_tokens=self.tokens, min_new_tokens=self.tokens, pad_token_id=0)
        return out.numel() - self.ids.numel()

class Products:
    """The products of the prompts, then of a token for every row, again and again."""

    def __init__(self, folder: str, rank: int, rows: int, prompts: list, tokens: int, load=lora.load_model):
        self.model, self.rows, self.tokens, self.step_s = load(folder), rows, tokens, []
        self.groups, self.prompt_tokens = len(prompts), len(prompts) * len(prompts[0])
        head = lora.head(self.model)
        self.weights = [m.weight for m in self.model.modules() if isinstance(m, torch.nn.Linear) and m is not head]

    def forward(self, rows: int) -> torch.Tensor:
        inputs = {n: torch.randn(rows, n) for n in {w.shape[1] for w in self.weights}}
        for weight in self.weights:
            F.linear(inputs[weight.shape[1]], weight)
        return inputs[self.model.config.hidden_size]

    @torch.inference_mode()
    def seconds(self, rows: int, logits: int) -> float:
        start = time.perf_counter()
        lora.head(self.model)(self.forward(rows)[:logits])
        return time.perf_counter() - start

    def run(self, first: int) -> int:
        self.seconds(self.prompt_tokens, self.groups)
        self.step_s.append(statistics.median(self.seconds(self.rows, self.rows) for _ in range(self.tokens - 1)))
        return self.rows * self.tokens

class Bare(Products):
    def forward(self, rows: int) -> torch.Tensor:
        self.model.config._attn_implementation = "none"
        return lora.backbone(self.model)(torch.ones(rows, 1, dtype=torch.long), use_cache=False).last_hidden_state[:, 0]

class Vllm:
    """One request per group; the server takes what it likes of them at once."""

    def __init__(self, stack: ExitStack, folder: str, rank: int, rows: int, prompts: list, tokens: int):
        temp = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes, port = stack.enter_context(peers.Processes(temp)), peers.free_ports(1)[0]
        self.url, self.prompts, self.tokens = f"http://127.0.0.1:{port}", prompts, tokens
        processes.start("vllm", peers.vllm_command(Path(folder).resolve(), port, rank, VERSIONS + 2, len(prompts[0]) + tokens),
                        **peers.VLLM_ENV | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
        processes.wait("vllm", "Application startup complete", 300)
        shapes = lora.Lora(lora.load_model(folder), rank, 2 * rank).shapes
        for version in range(VERSIONS):
            where = temp / f"policy-v{version}"
            where.mkdir()
            for name, data in lora.adapter_files(adapter(shapes, version), rank, 2 * rank, "all-linear", folder).items():
                (where / name).write_bytes(data)
            self.ask("load_lora_adapter", lora_name=where.name, lora_path=str(where))

    def ask(self, route: str, **body) -> str:
        reply = requests.post(f"{self.url}/v1/{route}", json=body, timeout=600)
        reply.raise_for_status()
        return reply.text

    def run(self, first: int) -> int:
        def group(i: int) -> int:
            prompt = [first, *self.prompts[i][1:]]
            reply = json.loads(self.ask("completions", model=f"policy-v{i % VERSIONS}", prompt=prompt, n=GROUP, temperature=1.0,
                                        max_tokens=self.tokens, ignore_eos=True, logprobs=0, return_token_ids=True))
            return sum(len(choice["token_ids"]) for choice in reply["choices"])
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            return sum(pool.map(group, range(len(self.prompts))))

def compare(args, folder: str, rank: int, rows: int) -> str:
    """One line of the table."""
    prompts = [[(7 * g + i * i) % 1000 + 3 for i in range(args.prompt)] for g in range(rows // GROUP)]
    work = folder, rank, rows, prompts, args.tokens
    with ExitStack() as stack:
        contestants = [Ours(*work), Peft(*work), Products(*work), Products(*work, load=as_loaded), Bare(*work),
                       *([Vllm(stack, *work)] if args.vllm else [])]
        times = [[] for _ in contestants]
        for run in range(args.runs + 1):
            for contestant, seen in zip(contestants, times):
                start = time.perf_counter()
                made = contestant.run(2000 + run)
                assert made == rows * args.tokens, (type(contestant).__name__, made)
                # The first run warms up.
                seen[:] = [*seen, time.perf_counter() - start] if run else []
    ours, peft, products, _, _, *vllm = (rows * args.tokens / statistics.median(seen) for seen in times)
    step, ours_laid, loaded, bare = (statistics.median(contestants[i].step_s[1:]) for i in (0, 2, 3, 4))
    said = "".join(f" | {speed:11.0f} {ours / speed:6.2f}x" for speed in (peft, *vllm))
    return (f"{rank:4} {rows:5} | {ours:10.0f}{said} | {products:14.0f} {ours / products:5.2f} {ours_laid / step:7.2f} {loaded / step:10.2f} "
            f"{ours_laid / bare:5.2f}")

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Llama; default: random weights of SmolLM2-135M's shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128], help="completions in flight, multiples of 8")
    parser.add_argument("--rank", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=96, help="prompt length [tokens]")
    parser.add_argument("--tokens", type=int, default=32, help="completion length [tokens]")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each, after one to warm up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's CPU build, too; needs --model with a tokenizer")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    AttentionInterface.register("none", no_attention)
    print(f"torch {torch.__version__}, {args.threads} threads, prompt {args.prompt}, {args.tokens} new tokens, {args.runs} runs")
    print(f"rank  rows | ours tok/s | HF+PEFT  ours/HF {'| vLLM    ours/vLLM ' if args.vllm else ''}| products tok/s share  decode  as loaded  bare")
    with tempfile.TemporaryDirectory() as temp:
        if not args.model:
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(temp)
        for rank in args.rank:
            for rows in args.rows:
                print(compare(args, args.model or temp, rank, rows), flush=True)

if __name__ == "__main__":
    main()
