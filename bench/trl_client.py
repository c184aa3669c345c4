"""TRL's AsyncGRPOTrainer [1] on a CPU. bench/with_trl.py and bench/whole_system.py start it, in TRL's environment:

    python bench/trl_client.py --server URL --model FOLDER --out DIR [--data FILE.jsonl] [--steps N] …

Without --data the task is the tiny model's addition. Prints one JSON object per step: what TRL logs, and unix_s.

TRL 1.16 refuses a machine without a GPU in three places; they are patched here and nowhere else:
 1. the peak of an unknown device is asked for, to report utilisation: there is none;
 2. the package vllm must be installed beside the trainer: it is only ever asked over HTTP;
 3. attention over the shared-prefix tree is a CUDA kernel: SDPA, one tree segment at a time, computes the same.

[1] huggingface/trl, trl/experimental/async_grpo
"""
import argparse
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
import trl.experimental.async_grpo.async_rollout_worker as worker_module
import trl.experimental.async_grpo.packing as packing_module
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo_async

# The tiny base has no chat template, and TRL speaks in messages: their contents, one after the other.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def prepared_tokenizer(folder: str):
    """The model's tokenizer; and, as TRL does not know its chat template, how a reply begins and ends."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = "<|im_start|>assistant\n" if tokenizer.chat_template else "="
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": {
        "content": {"close_pattern": re.escape(tokenizer.eos_token), "content": "text"}}}
    return tokenizer


def segment_attention(module, query, key, value, attention_mask, *, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k,
                      scaling=None, **_):
    """Each segment of the tree attends to the keys on its path from the root; its own tokens are the last of them."""
    out, q, k = [], tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(q, q[1:], k, k[1:]):
        path = tree_kv_index[k0:k1]
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        out.append(F.scaled_dot_product_attention(query[:, :, q0:q1], key[:, :, path], value[:, :, path],
                                                  attn_mask=mask, scale=scaling, enable_gqa=True))
    return torch.cat(out, 2).transpose(1, 2), None  # [1, tokens, heads, width]


def patch() -> None:
    trainer_module.get_peak_flops_per_device = lambda *_: None
    worker_module.is_vllm_available = lambda *_: True
    packing_module.tree_attention = segment_attention
    # No need of TRL's, but of whoever waits: its worker is given 15 s to empty its queue when all is done.
    worker_module.AsyncRolloutWorker.stop = lambda worker: worker._process and worker._process.kill()


def add_reward(completions, completion_ids, answer, **_) -> list[float]:
    """grpo_async.add_reward on what TRL hands over: messages, and no finish reasons."""
    return grpo_async.add_reward([c[-1]["content"] for c in completions], answer,
                                 ["stop" if ids[-1] == grpo_async.TINY_EOS else "length" for ids in completion_ids])


def math_reward(completions, answer, **_) -> list[float]:
    return grpo_async.math_reward(completions, answer)


class Report(TrainerCallback):
    """One JSON line per step."""

    def on_log(self, args, state, control, logs=None, **_):
        known = {name: value for name, value in logs.items() if value is not None}
        print(json.dumps({"step": state.global_step, "unix_s": time.time(), **known}), flush=True)

    def on_train_begin(self, args, state, control, **_):
        print(json.dumps({"begin": state.global_step, "unix_s": time.time()}), flush=True)


def rows(path: str) -> list[dict]:
    if path:
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{"prompt": [{"role": "user", "content": grpo_async.add_prompt(a, b)}], "answer": str(a + b)}
            for a, b in grpo_async.add_pairs(held_out=False)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("server", "model", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--data", default="", help="JSON lines with chat prompts and an answer; default: the tiny addition")
    for name, default in (("steps", 10), ("rollouts", 64), ("max-tokens", 7), ("rank", 8), ("staleness", 2),
                          ("save-steps", 5), ("warmup-steps", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("alpha", 16.0), ("lr", 5e-3)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--resume", default=None, metavar="CHECKPOINT")
    parser.add_argument("--die-in-pause", type=int, default=0, metavar="N", help="SIGKILL itself in the N-th sync")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    patch()
    if args.die_in_pause:
        load = trainer_module.VLLMClient.load_lora_adapter

        def load_or_die(self, name, path, **kwargs):
            if int(re.search(r"\d+$", name)[0]) == args.die_in_pause:
                os.kill(os.getpid(), signal.SIGKILL)
            load(self, name, path, **kwargs)
        trainer_module.VLLMClient.load_lora_adapter = load_or_die
    config = AsyncGRPOConfig(
        args.out, max_steps=args.steps, save_steps=args.save_steps, seed=0,
        learning_rate=args.lr, warmup_steps=args.warmup_steps,
        # TRL's fixed batch: this many rollouts a step, in one forward; no recomputation; fp32, as the samplers.
        per_device_train_batch_size=args.rollouts, token_budget=0, gradient_checkpointing=False, bf16=False,
        use_cpu=True,
        num_generations=8, max_completion_length=args.max_tokens, max_staleness=args.staleness, epsilon_high=0.28,
        vllm_server_base_url=args.server, report_to="none", disable_tqdm=True)
    trainer = AsyncGRPOTrainer(
        args.model, reward_funcs=math_reward if args.data else add_reward, args=config,
        processing_class=prepared_tokenizer(args.model),
        train_dataset=Dataset.from_list(rows(args.data)).shuffle(seed=0), callbacks=[Report()],
        peft_config=LoraConfig(r=args.rank, lora_alpha=args.alpha, target_modules="all-linear"))
    print(json.dumps({"adapter_only_sync": trainer._lora_sync}), flush=True)
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    main()
