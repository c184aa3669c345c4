"""What a GPU must hold to train or to sample a model here: the table of the README, from the model's config alone.

    python bench/memory_table.py                  # Llama 3 8B, its config written out below
    python bench/memory_table.py FOLDER           # any folder with a config.json that transformers knows

The model is built on torch's meta device: real modules, shapes and dtypes, no memory. Base and adapter are summed over
its tensors. Activations are what autograd really saves in one forward of 1,024 tokens through the learner's own LoRA
layers (`saved_tensors_hooks`: each storage once, parameters not), with an attention that saves what flex attention
saves: q, k, v, output and one number a row and head. With --recompute a layer keeps its input, and one layer at a time
all the rest. Logits are counted for the targets that `lora.token_logprobs` computes at once.

In the learner's GPU: base, two slots of the adapter, one gradient, activations of --token-budget tokens, logits. The
adapter's own state, its two AdamW moments and the summed gradient are in the CPU's memory, in fp32. In a sampler's: base, max_staleness + 4
slots, keys and values.

Does not count: CUDA's context (about 0.5 GiB), the allocator's slack (3 GiB are left free for both), compiled kernels.
"""
import contextlib
import inspect
import sys
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lora

GIB = 2 ** 30
RANKS = (1, 4, 8, 16, 32, 64)
TOKENS, SLACK_GIB, MAX_STALENESS = 1024, 3, 2
TARGETS_AT_ONCE = inspect.signature(lora.token_logprobs).parameters["chunk_tokens"].default
CARDS = {"RTX 4090": 24, "L40S": 48, "A100 40 GB": 40, "A100/H100 80 GB": 80, "H200": 141}  # as sold: 10^9 bytes, nearly GiB
LLAMA_3_8B = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                  num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=False,
                  rope_parameters={"rope_type": "default", "rope_theta": 500000.0})


class Attention(torch.autograd.Function):
    """Shapes of attention, and what a fused kernel saves for its backward."""

    @staticmethod
    def forward(ctx, q, k, v):
        B, H, T, d = q.shape
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(B, H, T, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("the forward alone is counted")


def fused(module, query, key, value, attention_mask, **kwargs):
    return Attention.apply(query, key, value).transpose(1, 2), None


def model_on_meta(config):
    AttentionInterface.register("fused_on_meta", fused)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="fused_on_meta")


def n_bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def activation_bytes(model, r: int) -> int:
    """Saved for the backward of one row of TOKENS tokens."""
    layers, seen = lora.Lora(model, r, 2 * r, slots=2), {}
    layers.train(0)
    parameters = {p.untyped_storage()._cdata for p in [*model.parameters(), *layers._stacks.values()]}

    def pack(t):
        if t.untyped_storage()._cdata not in parameters:
            seen[t.untyped_storage()._cdata] = t  # kept alive: a freed storage's address could come again
        return t
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with layers.use(0), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), contextlib.suppress(StopIteration):
        lora.backbone(model)(input_ids=ids, position_ids=ids, use_cache=False, attention_mask=torch.zeros(1, 1, TOKENS, TOKENS, device="meta"))
    return sum(t.untyped_storage().nbytes() for t in seen.values())


def activation_ways(config, r: int) -> tuple[float, float]:
    """(all kept, only each layer's input kept and one layer computed again)."""
    kept, layers = activation_bytes(model_on_meta(config), r), config.num_hidden_layers
    return kept, layers * TOKENS * config.hidden_size * 2 + kept / layers


def main() -> int:
    config = AutoConfig.from_pretrained(sys.argv[1]) if len(sys.argv) > 1 else LlamaConfig(**LLAMA_3_8B)
    base = n_bytes(model_on_meta(config).parameters())
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_per_1k = 1024 * 2 * layers * heads * head_dim * 2
    logits = 3 * TARGETS_AT_ONCE * config.vocab_size * 4  # logits, their exponentials, one temporary: fp32
    print(f"base {base / GIB:.2f} GiB in bfloat16; keys and values {kv_per_1k / GIB:.3f} GiB per 1,024 tokens; logits {logits / GIB:.2f} GiB\n")
    print("| rank | adapter (a part in the bucket), MiB | slots + gradient on the learner's GPU, GiB | AdamW and state in CPU memory, GiB "
          "| activations per 1,024 tokens, GiB | the same with --recompute | learner at --token-budget 2048, GiB | the same with --recompute |")
    print("|---|---|---|---|---|---|---|---|")
    for r in RANKS:
        model = model_on_meta(config)
        shapes = lora.Lora(model, r, 2 * r, slots=1).shapes.values()
        adapter = 4 * sum(a * b for a, b in shapes)
        ways = activation_ways(config, r)
        print(f"| {r} | {adapter / 2**20:.0f} | {3 * adapter / GIB:.2f} | {4 * adapter / GIB:.2f} | {ways[0] / GIB:.2f} | {ways[1] / GIB:.2f} | "
              + " | ".join(f"{(base + 3 * adapter + logits + 2 * way) / GIB:.1f}" for way in ways) + " |")
    print("\n| card (memory, GB) | largest --token-budget of a learner, rank 16 | with --recompute | tokens of keys and values in a sampler, rank 16 |\n|---|---|---|---|")
    adapter = 4 * sum(a * b for a, b in lora.Lora(model_on_meta(config), 16, 32, slots=1).shapes.values())
    ways = activation_ways(config, 16)
    for card, gib in CARDS.items():
        room = [gib - SLACK_GIB - (base + x) / GIB for x in (3 * adapter + logits, (MAX_STALENESS + 4) * adapter)]
        budgets = [int(room[0] * GIB / way * 1024) // 256 * 256 for way in ways]
        print(f"| {card} ({gib}) | " + " | ".join(f"{b:,}" if b > 0 else "does not fit" for b in budgets) + f" | {int(room[1] * GIB / kv_per_1k) * 1024:,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
