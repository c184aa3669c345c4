"""The policy's tensors: LoRA layers with version slots, PEFT adapter files, and a batched sampler.

LoRA [1] leaves every weight W of the base frozen and adds a low-rank product to the layers it targets:

    y = x W^T + (alpha / r) (x A^T) B^T        A [r, in], B [out, r]; B starts at 0, so a fresh adapter changes nothing

Versions of the policy differ only in A and B, so one base serves several at once. The versions' A are stacked to
[slots*r, in], and so are their B; a row of the batch that uses slot s keeps columns s*r … (s+1)*r of x A^T and loses the
others:

    h = x A^T                 [rows, slots*r]    one product for all versions
    h[row, other slots] = 0
    y = x W^T + (alpha / r) h B

No gather and no loop over versions; the price is slots*r columns in place of r, small beside `out` at low ranks.

The sampler decodes all its rows together, one token a step [2]; rows join and leave between tokens. A prompt is computed
once for all its completions, its keys and values are copied to their rows, and attention reads them where they lie.

Guarantees:
 1. Files are what PEFT writes and reads [3]: same names, shapes, configuration. What we cannot apply is refused by name.
 2. The base's modules, names and state_dict stay as they were: adapters are forward hooks on its linear layers.
 3. A completion depends on its prompt, version, seed and index, not on the rows beside it (up to rounding).
 4. Reported logprobs are those of the distribution that was sampled from: log softmax(logits / temperature), in fp32.
 5. A completion ends under the version it began with. A slot is used anew only when its last row has ended.

Does not: DoRA, biases, adapters on embeddings or the output head, ranks that differ by layer, quantised bases;
in the sampler: sliding windows shorter than the context, recurrent layers, soft-capped logits (vLLM serves those),
top-p, top-k, penalties.

Axes: N tokens or rows, T time, V vocabulary, H query heads, K key heads, d width, r rank.

[1] Hu et al. 2021, LoRA, arXiv 2106.09685.  [2] Yu et al. 2022, Orca (continuous batching), OSDI.
[3] github.com/huggingface/peft, `LoraConfig` and `save_pretrained`.
"""

from __future__ import annotations

import json
import math
import random
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.pytorch_utils import Conv1D

# PEFT wraps the model twice, hence the doubled prefix of every name in an adapter file.
PREFIX = "base_model.model."
# Prompts forwarded in one go, padding included: bounds the memory of a prefill and how long it holds up running rows.
PREFILL_TOKENS = 4096
# Width of the blocks in which a token is drawn: first the block, then the token in it, 64-bit sums over both.
DRAW_BLOCK = 256


class AdapterError(ValueError):
    """An adapter that cannot be applied as it is: names the tensor or field, what it is, what was expected."""


# ---------------------------------------------------------------- Models

def load_model(path: str, dtype: torch.dtype = torch.float32, device: str = "cpu",
               trust_remote_code: bool = False) -> nn.Module:
    """A frozen causal language model, in evaluation mode, from a folder or the hub."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(path: str, trust_remote_code: bool = False):
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def backbone(model: nn.Module) -> nn.Module:
    """The part that maps token ids to final hidden states, `backbone(model)(ids).last_hidden_state` [B, T, d]."""
    return model.base_model


def head(model: nn.Module) -> nn.Module:
    """The output head, hidden state [.., d] -> logits [.., V]."""
    return model.get_output_embeddings()


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Raises ValueError if the logits are more than head(hidden): both learner and sampler rely on that."""
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    logits = model(ids, use_cache=False).logits
    ours = head(model)(backbone(model)(ids, use_cache=False).last_hidden_state)
    if logits.shape != ours.shape or not torch.equal(logits, ours):
        raise ValueError(f"{type(model).__name__} scales or caps its logits after the output head; "
                         "such models are not supported, choose one whose logits are head(hidden)")


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_tokens):
        logprobs, entropy = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = F.linear(hidden[part], weight, bias).float().div_(temperature)   # [n, V]
            target = targets[part, None]
            top = logits.amax(-1, keepdim=True)
            shifted = logits.sub_(top)
            chosen = shifted.gather(-1, target)[:, 0]
            probs = shifted.exp()
            total = probs.sum(-1, keepdim=True)
            probs /= total
            logprobs[part] = chosen - total[:, 0].log()
            # −Σ p (z − log total) = log total − Σ p z
            entropy[part] = total[:, 0].log() - torch.linalg.vecdot(probs, shifted)
            if slopes is not None:
                pull = weight[targets[part]].float() - (probs.to(weight.dtype) @ weight).float()
                slopes[part] = (pull / temperature).to(slopes.dtype)
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, _):
        slopes, = ctx.saved_tensors
        return slopes * grad_logprobs[:, None].to(slopes.dtype), None, None, None, None, None


def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
                   temperature: float = 1.0, chunk_tokens: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """logprobs [N] of `targets` [N] under softmax(head(hidden) / temperature), and its entropy [N], both fp32.

    hidden [N, d]; the frozen head has weight [V, d]. Never more than [chunk_tokens, V] logits exist: the forward
    keeps d logprob / d hidden = (weight[target] − softmax @ weight) / temperature, [N, d], which is all that the
    backward needs. The entropy carries no gradient.
    """
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk_tokens)


# ---------------------------------------------------------------- LoRA layers

def is_target(name: str, target_modules: str | list[str]) -> bool:
    """Whether PEFT would adapt the module called `name`: a whole name, or its last parts."""
    return target_modules == "all-linear" or any(name == t or name.endswith("." + t) for t in target_modules)


class Lora:
    """The adapters of one model, in `slots` version slots, all zero at first.

    >>> lora = Lora(model, r=8, alpha=16, slots=2)
    >>> lora.load(1, init_adapter(lora.shapes, seed=0))
    >>> with lora.use(1): logits = model(ids).logits            # every row under slot 1
    >>> with lora.use([1, 0, -1]): logits = model(ids).logits   # rows under slot 1, slot 0, the base

    Outside `use` the adapter is off and costs nothing. `dtype` is that of the stored A and B: fp32 to train, the
    base's own to serve without casting at every forward; the products are computed in the base's dtype.
    """

    def __init__(self, model: nn.Module, r: int, alpha: float, target_modules: str | list[str] = "all-linear",
                 slots: int = 1, dtype: torch.dtype = torch.float32):
        if r < 1 or alpha <= 0 or slots < 1:
            raise AdapterError(f"r={r} alpha={alpha} slots={slots}: all three must be positive")
        self.r, self.alpha, self.scale, self.slots = r, alpha, alpha / r, slots
        self.target_modules = target_modules
        self.shapes: dict[str, tuple[int, int]] = {}
        self._stacks: dict[str, torch.Tensor] = {}
        # What `use` chose: None, or (first slot, end slot, columns to blank or None).
        self._route: tuple | None = None
        self._trained: int | None = None
        model.requires_grad_(False)
        for name, module in model.named_modules():
            if not isinstance(module, (nn.Linear, Conv1D)) or module is head(model) or not is_target(name, target_modules):
                continue
            n_out, n_in = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
            for side, width in (("A", n_in), ("B", n_out)):
                key = f"{PREFIX}{name}.lora_{side}.weight"
                self.shapes[key] = (r, n_in) if side == "A" else (n_out, r)
                self._stacks[key] = torch.zeros(slots * r, width, dtype=dtype, device=module.weight.device)
            module.register_forward_hook(self._hook(f"{PREFIX}{name}."))
        if not self.shapes:
            raise AdapterError(f"target modules {target_modules}: no linear layer of {type(model).__name__} has such a name")
        self.shapes = dict(sorted(self.shapes.items()))
        self._parameters = [{key: nn.Parameter(self._slot(key, s), requires_grad=False) for key in self.shapes}
                            for s in range(slots)]

    def _slot(self, key: str, slot: int) -> torch.Tensor:
        rows = self._stacks[key][slot * self.r:(slot + 1) * self.r]
        # Subtle: B is stacked transposed, so that both stacks are cut along their first axis; PEFT's B is the view back.
        return rows if key.endswith("lora_A.weight") else rows.T

    def parameters(self, slot: int) -> dict[str, nn.Parameter]:
        """A and B of a slot under PEFT's names; views of the stacks, so in-place updates are seen at once."""
        return self._parameters[slot]

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """The same as plain tensors, fp32 where the stacks are."""
        return {key: parameter.detach() for key, parameter in self._parameters[slot].items()}

    def train(self, slot: int | None) -> dict[str, nn.Parameter]:
        """Lets gradients reach this slot's A and B only (None: no slot's), and returns them."""
        for s, parameters in enumerate(self._parameters):
            for parameter in parameters.values():
                parameter.requires_grad_(s == slot)
        self._trained = slot
        return self._parameters[slot] if slot is not None else {}

    @torch.no_grad()
    def load(self, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        """Copies an adapter into a slot; AdapterError, and nothing changes, unless every tensor fits."""
        for key in tensors.keys() - self.shapes.keys():
            raise AdapterError(f"{key}: this model has no such adapter tensor; expected names like {next(iter(self.shapes))}")
        for key, shape in self.shapes.items():
            if key not in tensors:
                raise AdapterError(f"{key}: missing; {len(tensors)} tensors given, {len(self.shapes)} expected")
            if tuple(tensors[key].shape) != shape:
                raise AdapterError(f"{key}: shape {tuple(tensors[key].shape)}, expected {shape}; is it for another base or rank?")
            if not torch.isfinite(tensors[key]).all():
                raise AdapterError(f"{key}: holds NaN or infinity")
        for key, parameter in self._parameters[slot].items():
            parameter.copy_(tensors[key])

    @contextmanager
    def use(self, slots: int | list[int] | torch.Tensor | None):
        """The forwards inside use this slot (int), one slot per row of the batch (−1: the base), or no adapter (None)."""
        before, self._route = self._route, self._plan(slots)
        try:
            yield
        finally:
            self._route = before

    def _plan(self, slots) -> tuple | None:
        if slots is None or isinstance(slots, int):
            return None if slots in (None, -1) else (slots, slots + 1, None)
        rows = torch.as_tensor(slots, dtype=torch.long, device="cpu")
        low, high = (int(s) for s in rows[rows >= 0].aminmax()) if (rows >= 0).any() else (-1, -1)
        if low == high and (low < 0 or (rows >= 0).all()):
            return None if low < 0 else (low, low + 1, None)
        columns = torch.arange(low, high + 1).repeat_interleave(self.r)
        blank = rows[:, None] != columns                                     # [rows, columns]
        return low, high + 1, blank.to(next(iter(self._stacks.values())).device)

    def _hook(self, name: str):
        key_a, key_b = name + "lora_A.weight", name + "lora_B.weight"

        def add_product(module: nn.Module, inputs: tuple, output: torch.Tensor):
            if self._route is None:
                return None
            first, end, blank = self._route
            x, dtype = inputs[0], output.dtype
            if end - first == 1 and first == self._trained:
                A, B = self._parameters[first][key_a], self._parameters[first][key_b].T
            else:
                A, B = (self._stacks[key][first * self.r:end * self.r] for key in (key_a, key_b))
            h = F.linear(x, A.to(dtype))                                     # [rows, .., columns]
            if blank is not None:
                # Blanking before B, rather than multiplying by 0: another version's overflow must not become NaN here.
                h.masked_fill_(blank.view(len(blank), *[1] * (x.ndim - 2), -1), 0)
            flat, h, B = output.view(-1, output.shape[-1]), h.view(-1, h.shape[-1]), B.to(dtype)
            if torch.is_grad_enabled():
                return torch.addmm(flat, h, B, alpha=self.scale).view_as(output)
            flat.addmm_(h, B, alpha=self.scale)
            return None

        return add_product


# ---------------------------------------------------------------- Adapter files

def init_adapter(shapes: dict[str, tuple[int, int]], seed: int) -> dict[str, torch.Tensor]:
    """PEFT's start: A uniform within ±1/sqrt(in) (Kaiming, a = sqrt 5), B zero; the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return {key: (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1]) if ".lora_A." in key
            else torch.zeros(shape) for key, shape in sorted(shapes.items())}


def adapter_files(tensors: dict[str, torch.Tensor], r: int, alpha: float, target_modules: str | list[str],
                  base_model: str) -> dict[str, bytes]:
    """The two files of a PEFT adapter folder; equal input gives equal bytes."""
    check_tensors(tensors, r)
    if target_modules == "all-linear":
        # A list of last names says the same to PEFT and vLLM, which expand "all-linear" each in their own way.
        target_modules = {key.split(".lora_")[0].rsplit(".", 1)[-1] for key in tensors}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "r": r,
              "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "target_modules": sorted(target_modules),
              "lora_dropout": 0.0, "bias": "none", "modules_to_save": None, "fan_in_fan_out": False,
              "init_lora_weights": True, "inference_mode": True, "use_dora": False, "use_rslora": False,
              "rank_pattern": {}, "alpha_pattern": {}, "auto_mapping": None, "revision": None}
    whole = {key: tensor.detach().to("cpu", torch.float32).contiguous() for key, tensor in sorted(tensors.items())}
    return {"adapter_config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
            "adapter_model.safetensors": safetensors.torch.save(whole, metadata={"format": "pt"})}


def read_adapter(files: dict[str, bytes], r: int | None = None,
                 alpha: float | None = None) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors in fp32, configuration) of a PEFT adapter; AdapterError if it needs more than plain LoRA of rank r."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if name not in files:
            raise AdapterError(f"{name}: missing; an adapter folder holds it, got {sorted(files)}")
    try:
        config = json.loads(files["adapter_config.json"])
        tensors = safetensors.torch.load(files["adapter_model.safetensors"])
    except (ValueError, safetensors.SafetensorError) as error:
        raise AdapterError(f"adapter files do not parse: {error}") from error
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type {config.get('peft_type')!r}: only LORA is supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias {config['bias']!r}: only 'none' is supported")
    for field in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias",
                  "trainable_token_indices", "target_parameters", "layer_replication", "use_qalora", "use_bdlora",
                  "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config", "monteclora_config"):
        if config.get(field):
            raise AdapterError(f"{field} {config[field]!r}: not supported, only plain LoRA of one rank and alpha")
    for field, ours in (("r", r), ("lora_alpha", alpha)):
        if not isinstance(config.get(field), (int, float)) or (ours is not None and config[field] != ours):
            raise AdapterError(f"{field} {config.get(field)!r}: expected {ours if ours is not None else 'a number'}")
    check_tensors(tensors, config["r"])
    return {key: tensors[key].to(torch.float32) for key in sorted(tensors)}, config


def check_tensors(tensors: dict[str, torch.Tensor], r: int) -> None:
    """AdapterError unless these are pairs of finite A [r, in] and B [out, r] under PEFT's names, none on the head."""
    if not tensors:
        raise AdapterError("the adapter holds no tensors")
    for key, tensor in tensors.items():
        path, _, side = key.removesuffix(".weight").rpartition(".lora_")
        if not key.startswith(PREFIX) or not key.endswith(".weight") or side not in ("A", "B"):
            raise AdapterError(f"{key}: expected {PREFIX}<module>.lora_A.weight or .lora_B.weight")
        if path.rsplit(".", 1)[-1] in ("lm_head", "embed_out", "embed_tokens", "wte", "wpe"):
            raise AdapterError(f"{key}: adapters on the output head or the embeddings are not supported")
        if tensor.ndim != 2 or tensor.shape[side == "B"] != r:
            raise AdapterError(f"{key}: shape {tuple(tensor.shape)}, expected rank {r} in axis {int(side == 'B')}")
        if f"{path}.lora_{'AB'[side == 'A']}.weight" not in tensors:
            raise AdapterError(f"{key}: its pair lora_{'AB'[side == 'A']} is missing")
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"{key}: holds NaN or infinity")


@torch.no_grad()
def merge(model: nn.Module, tensors: dict[str, torch.Tensor], alpha: float, r: int, dtype: torch.dtype) -> nn.Module:
    """Adds (alpha / r) B A to the model's own weights, in fp32, then casts once to `dtype`; for export.

    Merging in bf16 instead would lose updates near 1e-5. A model with hooks of `Lora` must have them unused.
    """
    check_tensors(tensors, r)
    for key in (key for key in tensors if ".lora_A." in key):
        module = model.get_submodule(key[len(PREFIX):].split(".lora_")[0])
        A, B = (tensors[k].to(module.weight.device, torch.float32) for k in (key, key.replace(".lora_A.", ".lora_B.")))
        update = (alpha / r) * (B @ A)
        merged = module.weight.float() + (update.T if isinstance(module, Conv1D) else update)
        module.weight = nn.Parameter(merged.to(dtype), requires_grad=False)
    return model.to(dtype)


# ---------------------------------------------------------------- Keys and values

class KeyValues:
    """Per layer one slab of keys and one of values, [rows, K, time, d]; row i holds what row i of the batch attends to.

    Slabs double when rows or time run out. `attend` is called by every attention layer of the model: during a
    prefill it keeps the prompts' keys and values aside, during a decode it appends one token to each row in place.
    """

    def __init__(self, max_rows: int, max_len: int):
        self.max_rows, self.max_len = max_rows, max_len
        self.slabs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._positions: torch.Tensor | None = None

    def begin_prefill(self) -> None:
        self.fresh, self._positions = {}, None

    def begin_decode(self, positions: list[int], device, dtype) -> None:
        """Row i appends at positions[i] and attends up to it."""
        self.reserve(len(positions), max(positions) + 1)
        self._positions = torch.tensor(positions, device=device)
        self._rows = torch.arange(len(positions), device=device)
        self._time = max(positions) + 1
        visible = torch.arange(self._time, device=device) <= self._positions[:, None]
        # As added to the scores, [rows, 1, 1, time]; built once for all layers.
        self._mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -math.inf)[:, None, None]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [N, H, T, d], k and v [N, K, T, d] of the new tokens -> [N, T, H, d]."""
        N, H, T, d = q.shape
        K = k.shape[1]
        if self._positions is None:
            # Prompts are padded on the right, where causal attention never looks.
            self.fresh[layer] = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=H != K).transpose(1, 2)
        keys, values = self.slabs[layer]
        keys[self._rows, :, self._positions] = k[:, :, 0]
        values[self._rows, :, self._positions] = v[:, :, 0]
        # The H/K query heads that share a key head stand where SDPA expects query positions: no copy of the keys.
        out = F.scaled_dot_product_attention(q.view(N, K, H // K, d), keys[:N, :, :self._time], values[:N, :, :self._time],
                                             attn_mask=self._mask, scale=scale)
        return out.reshape(N, 1, H, -1)

    def reserve(self, rows: int, time: int) -> None:
        for layer, pair in self.slabs.items():
            have_rows, _, have_time, _ = pair[0].shape
            if rows <= have_rows and time <= have_time:
                continue
            new_rows = have_rows if rows <= have_rows else min(self.max_rows, max(rows, 2 * have_rows))
            new_time = have_time if time <= have_time else min(self.max_len, max(time, 2 * have_time))
            self.slabs[layer] = tuple(grown(slab, new_rows, new_time) for slab in pair)

    def join(self, first_row: int, prefix: Prefix, n: int) -> None:
        """Copies a prompt's keys and values to rows first_row … first_row + n."""
        time = prefix.layers[next(iter(prefix.layers))][0].shape[1]
        for layer, (k, v) in prefix.layers.items():
            if layer not in self.slabs:
                self.slabs[layer] = tuple(x.new_zeros(1, x.shape[0], 1, x.shape[2]) for x in (k, v))
        self.reserve(first_row + n, time)
        for layer, pair in prefix.layers.items():
            for slab, fresh in zip(self.slabs[layer], pair):
                slab[first_row:first_row + n, :, :time] = fresh

    def move(self, to: list[int], source: list[int], time: int) -> None:
        for pair in self.slabs.values():
            for slab in pair:
                slab[to, :, :time] = slab[source, :, :time]

    def clear(self, row: int) -> None:
        # A row that met NaN must not leave it behind: 0 × NaN under a later row's mask would be NaN again.
        for pair in self.slabs.values():
            for slab in pair:
                slab[row] = 0


def grown(slab: torch.Tensor, rows: int, time: int) -> torch.Tensor:
    new = slab.new_zeros(rows, slab.shape[1], time, slab.shape[3])
    new[:slab.shape[0], :, :slab.shape[2]] = slab
    return new


def slab_attention(module, query, key, value, attention_mask, scaling=None, key_values=None, **kwargs):
    """transformers' attention interface; without `key_values` in the model's arguments it is plain SDPA."""
    if key_values is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return key_values.attend(module.layer_idx, query, key, value, scaling), None


# ---------------------------------------------------------------- Drawing tokens

def uniforms(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """[N] float64 in [0, 1): the `counters`-th number of each row's stream. SplitMix64: its state is key + n × golden."""
    z = keys + (counters + 1) * -0x61C8864680B583EB                          # int64 wraps around
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return ((z >> 11) & ((1 << 53) - 1)).double() * 2.0 ** -53


def draw(logits: torch.Tensor, temperatures: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [N] drawn at `points` [N] of the cumulated distribution, logprobs [N], and log-normalised logits [N, V].

    Temperature 0 takes the likeliest token and reports it under temperature 1. A token of probability 0 is never drawn.
    """
    N, V = logits.shape
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1, temperatures)[:, None]
    scaled -= scaled.amax(-1, keepdim=True)
    blocks = -(-V // DRAW_BLOCK)
    weights = scaled.new_zeros(N, blocks * DRAW_BLOCK)
    torch.exp(scaled, out=weights[:, :V])
    weights = weights.view(N, blocks, DRAW_BLOCK)
    sums = weights.sum(-1, dtype=torch.float64).cumsum(-1)                   # [N, blocks]
    total = sums[:, -1:]
    block, rest = find(sums, points[:, None] * total)
    inner = weights[torch.arange(N, device=logits.device), block].double().cumsum(-1)
    within, _ = find(inner, rest)
    tokens = torch.where(greedy, scaled.argmax(-1), block * DRAW_BLOCK + within)
    scaled -= total.log().float()
    return tokens, scaled.gather(-1, tokens[:, None])[:, 0], scaled


def find(sums: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(i, target − sums[i − 1]) for the first i with sums[i] > target, both by row; sums ascend."""
    # Subtle: rounding may put a target at the very end; just below the end, the first i above it has a positive weight.
    targets = torch.minimum(targets, torch.nextafter(sums[:, -1:], torch.zeros_like(sums[:, -1:])))
    i = (sums <= targets).sum(-1)
    before = F.pad(sums, (1, 0)).gather(-1, i[:, None])
    return i, targets - before


# ---------------------------------------------------------------- Sampler

class UnknownVersion(LookupError):
    """No such version is loaded; `names` are those that are. Asking again cannot help before a load."""

    def __init__(self, name: str, names: list[str]):
        super().__init__(f"version {name!r} is not loaded here; live versions: {', '.join(names) or 'none'}")
        self.names = names


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str                                   # "stop" (its token is in token_ids), "length" or "abort"
    top_logprobs: list[dict[int, float]] | None = None


@dataclass(eq=False)
class Request:
    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    slot: int                                            # −1: the base
    seed: int
    stops: frozenset[int]
    top_logprobs: int
    future: Future = field(default_factory=Future)
    done: dict[int, Completion] = field(default_factory=dict)


@dataclass(eq=False)
class Row:
    request: Request
    index: int
    key: int
    out: Completion

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.out.token_ids)


@dataclass
class Prefix:
    """A computed prompt: per layer its keys and values [K, time, d], and the hidden state of its last token [d]."""
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    hidden: torch.Tensor


class Sampler:
    """Continuous batching over one model and its adapters. `step` computes one token for every row; `run` loops it.

    `submit`, `cancel`, `load`, `unload`, `pause` may be called from any thread; `step` from one at a time.
    `prefix_tokens`: prompts of that many tokens in all are kept for later requests with the same prompt and version.
    """

    def __init__(self, model: nn.Module, lora: Lora, eos_ids: set[int], max_rows: int = 64, max_len: int = 1024,
                 pad_id: int = 0, prefix_tokens: int = 4096):
        self.model, self.lora, self.eos_ids, self.pad_id = model, lora, frozenset(eos_ids), pad_id
        self.max_rows, self.max_len, self.prefix_tokens = max_rows, max_len, prefix_tokens
        self.device, self.dtype = model.device, model.dtype
        self.key_values = KeyValues(max_rows, max_len)
        self.rows: list[Row] = []
        self.waiting: deque[Request] = deque()
        self.prefixes: OrderedDict[tuple[int, tuple[int, ...]], Prefix] = OrderedDict()
        self._slots: dict[str, int] = {}
        self._leaving: set[int] = set()                  # unloaded slots with rows still under way
        self._free = list(range(lora.slots))
        self._changed = threading.Condition()
        self._paused: str | None = None
        self._running = False
        self._counts = dict.fromkeys(("tokens", "prompts", "prompt_tokens", "prefix_hits", "steps", "completions", "errors"), 0)
        check_head(model)
        check_layers(model, max_len)
        AttentionInterface.register("slab", slab_attention)
        AttentionMaskInterface.register("slab", sdpa_mask)
        model.set_attn_implementation("slab")
        self._check_decoding()

    # -- versions

    def names(self) -> list[str]:
        with self._changed:
            return list(self._slots)

    def load(self, name: str, tensors: dict[str, torch.Tensor], timeout_s: float = 30.0) -> None:
        """Makes a version available. The same name with the same tensors changes nothing; with others it is refused.

        With every slot taken it waits for the rows of an unloaded version to end, at most `timeout_s` while `run` runs.
        """
        with self._changed:
            if name in self._slots:
                held = self.lora.tensors(self._slots[name])
                if held.keys() == tensors.keys() and all(torch.equal(held[k], tensors[k].to(held[k])) for k in held):
                    return
                raise AdapterError(f"{name}: already loaded with other weights; a name means one set of weights for ever")
            self._changed.wait_for(lambda: self._free or not (self._running and self._leaving), timeout_s)
            if not self._free:
                raise AdapterError(f"{name}: all {self.lora.slots} slots are taken; live versions: {', '.join(self._slots)}; "
                                   f"{len(self._leaving)} more are finishing their rows. Unload one first")
            self.lora.load(self._free[0], tensors)
            self._slots[name] = self._free.pop(0)

    def unload(self, name: str) -> None:
        """Forgets a name at once; its slot is freed when its last request has ended."""
        with self._changed:
            if name not in self._slots:
                raise UnknownVersion(name, list(self._slots))
            self._leaving.add(self._slots.pop(name))
            self._release()

    def _release(self) -> None:
        used = {row.request.slot for row in self.rows} | {request.slot for request in self.waiting}
        for slot in self._leaving - used:
            for key in [key for key in self.prefixes if key[0] == slot]:
                del self.prefixes[key]
            self._leaving.remove(slot)
            self._free.append(slot)
        self._changed.notify_all()

    # -- requests

    def submit(self, prompt_ids: list[int], n: int = 1, max_tokens: int = 16, temperature: float = 1.0,
               name: str | None = None, seed: int | None = None, stop_ids: tuple[int, ...] = (), top_logprobs: int = 0,
               ignore_eos: bool = False) -> Future:
        """A Future of n Completions of one prompt under version `name` (None: the base). Equal seeds give equal ones.

        Raises UnknownVersion, or ValueError for a request that could never run.
        """
        prompt, V = tuple(prompt_ids), head(self.model).weight.shape[0]
        if not prompt or not all(isinstance(t, int) and 0 <= t < V for t in prompt):
            raise ValueError(f"prompt of {len(prompt)} ids: expected one or more integers from 0 to {V - 1}")
        if not 1 <= n <= self.max_rows or max_tokens < 1 or len(prompt) + max_tokens > self.max_len:
            raise ValueError(f"n={n} max_tokens={max_tokens} after {len(prompt)} prompt tokens: this sampler takes "
                             f"n up to {self.max_rows} and {self.max_len} tokens in all")
        if not 0 <= temperature < math.inf or top_logprobs < 0:
            raise ValueError(f"temperature={temperature} top_logprobs={top_logprobs}: out of range")
        stops = frozenset(stop_ids) | (frozenset() if ignore_eos else self.eos_ids)
        seed = random.getrandbits(63) if seed is None else seed
        with self._changed:
            if name is not None and name not in self._slots:
                raise UnknownVersion(name, list(self._slots))
            slot = -1 if name is None else self._slots[name]
            request = Request(prompt, n, max_tokens, temperature, slot, seed, stops, min(top_logprobs, V))
            self.waiting.append(request)
            self._changed.notify_all()
        return request.future

    def cancel(self, future: Future) -> None:
        """Its rows are freed before the next token."""
        future.cancel()
        with self._changed:
            self._changed.notify_all()

    def pause(self, mode: str = "keep") -> None:
        """No more tokens until `resume`. Rows under way: "keep" holds them, "abort" ends them as they are, "wait" lets them end first."""
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause mode {mode!r}: expected keep, abort or wait")
        with self._changed:
            self._paused = mode
            self._changed.notify_all()
            if mode == "wait" and self._running:
                self._changed.wait_for(lambda: not self.rows or self._paused != "wait")
        while mode == "wait" and self.rows and not self._running:
            self.step()

    def resume(self) -> None:
        with self._changed:
            self._paused = None
            self._changed.notify_all()

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    def stats(self) -> dict:
        with self._changed:
            slabs = [slab for pair in self.key_values.slabs.values() for slab in pair]
            return {**self._counts, "running": len(self.rows), "waiting": len(self.waiting), "paused": self.is_paused,
                    "versions": list(self._slots), "free_slots": len(self._free), "prefixes": len(self.prefixes),
                    "kv_tokens": sum(row.length for row in self.rows),
                    "kv_bytes": sum(slab.numel() * slab.element_size() for slab in slabs)}

    # -- the loop

    def run(self, stop: threading.Event) -> None:
        """Steps until `stop` is set; sleeps while there is nothing to do. An error fails the requests under way, not the loop."""
        self._running = True
        try:
            while not stop.is_set():
                try:
                    if self.step():
                        continue
                except Exception:
                    traceback.print_exc(file=sys.stderr)
                with self._changed:
                    # The time-out only bounds how late `stop` is seen; work wakes it at once.
                    self._changed.wait_for(lambda: stop.is_set() or self._has_work(), timeout=0.5)
        finally:
            self._running = False

    def _has_work(self) -> bool:
        if self._paused is None:
            return bool(self.rows or self.waiting)
        return self._paused != "keep" and bool(self.rows)

    @torch.inference_mode()
    def step(self) -> bool:
        """One token for every row; requests that fit join first. True if there is more to do."""
        try:
            self._drop([i for i, row in enumerate(self.rows) if row.request.future.cancelled()])
            with self._changed:
                running = len(self.rows)
                if self._paused == "abort":
                    for row in self.rows:
                        self._finish(row, "abort")
                elif self._paused is None:
                    self._admit()
            if self._paused == "abort":
                self._drop(range(running))
            if self.rows and self._paused != "keep":
                self._advance(running)
        except Exception as error:
            self._fail({id(row.request): row.request for row in self.rows}.values(), error)
            self._drop(range(len(self.rows)))
            raise
        with self._changed:
            return self._has_work()

    def _admit(self) -> None:
        """Waiting requests become rows, in order of arrival, whole groups at a time."""
        while self.waiting:
            request = self.waiting[0]
            if not request.future.cancelled():
                if len(self.rows) + request.n > self.max_rows:
                    break
                for index in range(request.n):
                    # A stream of its own for each completion of the seed.
                    key = random.Random(f"{request.seed}/{index}").getrandbits(64) - (1 << 63)
                    tops = [] if request.top_logprobs else None
                    self.rows.append(Row(request, index, key, Completion([], [], "", tops)))
            self.waiting.popleft()
        self._release()

    def _advance(self, running: int) -> None:
        """Decodes rows[:running], computes the prompts of the rest, and draws a token for each."""
        hidden, owner = [], list(range(running))
        if running:
            hidden.append(self._decode(self.rows[:running]))
        at = running
        self._prefill([row.request for row in self.rows[running:] if row.index == 0])
        while at < len(self.rows):
            request = self.rows[at].request
            prefix = self.prefixes[request.slot, request.prompt]
            self.key_values.join(at, prefix, request.n)
            owner += [running + len(hidden) - bool(running)] * request.n
            hidden.append(prefix.hidden[None])
            at += request.n
        self._forget_prefixes()
        logits = head(self.model)(torch.cat(hidden))
        if len(logits) < len(self.rows):
            logits = logits[torch.tensor(owner, device=self.device)]
        ints = torch.tensor([[row.key for row in self.rows], [len(row.out.token_ids) for row in self.rows]], device=self.device)
        temperatures = torch.tensor([row.request.temperature for row in self.rows], device=self.device)
        tokens, logprobs, normalised = draw(logits, temperatures, uniforms(ints[0], ints[1]))
        leaving = []
        for i, (row, token, logprob) in enumerate(zip(self.rows, tokens.tolist(), logprobs.tolist())):
            row.out.token_ids.append(token)
            row.out.logprobs.append(logprob)
            if row.out.top_logprobs is not None:
                values, ids = normalised[i].topk(row.request.top_logprobs)
                row.out.top_logprobs.append(dict(zip(ids.tolist(), values.tolist())))
            if not math.isfinite(logprob):
                self.key_values.clear(i)
                self._fail([row.request], FloatingPointError("the model's logits are not finite under this version"))
            elif token in row.request.stops or len(row.out.token_ids) == row.request.max_tokens:
                self._finish(row, "stop" if token in row.request.stops else "length")
                leaving.append(i)
        self._counts["steps"] += 1
        self._counts["tokens"] += len(self.rows)
        self._drop(leaving)

    def _forward(self, ids: list[list[int]], positions: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """Final hidden states [rows, T, d]."""
        # Any 4-dimensional mask is passed through as it is and then ignored: `attend` makes its own.
        unused = torch.zeros(1, 1, 1, 1, device=self.device)
        with self.lora.use(slots):
            return backbone(self.model)(input_ids=torch.tensor(ids, device=self.device), position_ids=positions,
                                        attention_mask=unused, use_cache=False, key_values=self.key_values).last_hidden_state

    def _decode(self, rows: list[Row]) -> torch.Tensor:
        positions = [row.length - 1 for row in rows]
        self.key_values.begin_decode(positions, self.device, self.dtype)
        return self._forward([[row.out.token_ids[-1]] for row in rows], torch.tensor(positions, device=self.device)[:, None],
                             [row.request.slot for row in rows])[:, 0]

    def _prefill(self, requests: list[Request]) -> None:
        """Makes sure that the prompts of these requests are in `prefixes`, computing those that are not, several at a time."""
        wanted = dict.fromkeys((request.slot, request.prompt) for request in requests)
        missing = sorted((key for key in wanted if key not in self.prefixes), key=lambda key: len(key[1]))
        self._counts["prefix_hits"] += len(requests) - len(missing)
        for key in wanted.keys() & self.prefixes.keys():
            self.prefixes.move_to_end(key)
        while missing:
            T = len(missing[-1][1])
            batch = [missing.pop() for _ in range(min(len(missing), max(1, PREFILL_TOKENS // T)))]
            ids = [[*prompt, *[self.pad_id] * (T - len(prompt))] for _, prompt in batch]
            self.key_values.begin_prefill()
            hidden = self._forward(ids, torch.arange(T, device=self.device)[None].expand(len(batch), -1), [slot for slot, _ in batch])
            for b, key in enumerate(batch):
                P = len(key[1])
                layers = {layer: (k[b, :, :P].clone(), v[b, :, :P].clone()) for layer, (k, v) in self.key_values.fresh.items()}
                self.prefixes[key] = Prefix(layers, hidden[b, P - 1].clone())
                self._counts["prompts"] += 1
                self._counts["prompt_tokens"] += P

    def _forget_prefixes(self) -> None:
        kept = sum(len(prompt) for _, prompt in self.prefixes)
        while kept > self.prefix_tokens:
            (_, prompt), _ = self.prefixes.popitem(last=False)
            kept -= len(prompt)

    def _finish(self, row: Row, reason: str) -> None:
        row.out.finish_reason = reason
        request = row.request
        request.done[row.index] = row.out
        if len(request.done) == request.n and request.future.set_running_or_notify_cancel():
            request.future.set_result([request.done[i] for i in range(request.n)])
        self._counts["completions"] += 1

    def _fail(self, requests, error: Exception) -> None:
        for request in requests:
            self._counts["errors"] += 1
            if not request.future.done() and request.future.set_running_or_notify_cancel():
                request.future.set_exception(error)

    def _drop(self, leaving) -> None:
        """Rows leave; the last ones move into their places, so that the batch stays dense."""
        if not leaving:
            return
        gone, keep = set(leaving), len(self.rows) - len(leaving)
        to = [i for i in leaving if i < keep]
        source = [i for i in range(keep, len(self.rows)) if i not in gone]
        if to:
            self.key_values.move(to, source, max(self.rows[i].length for i in source))
        with self._changed:
            for i, j in zip(to, source):
                self.rows[i] = self.rows[j]
            del self.rows[keep:]
            self._release()

    @torch.inference_mode()
    def _check_decoding(self) -> None:
        """ValueError unless a token decoded from our slabs equals the model's own full forward."""
        ids = [i % self.model.config.vocab_size for i in range(1, 9)]
        row = Row(Request(tuple(ids[:-1]), 1, 1, 0.0, -1, 0, frozenset(), 0), 0, 0, Completion(ids[-1:], [], ""))
        self._prefill([row.request])
        self.key_values.join(0, self.prefixes.popitem()[1], 1)
        ours = self._decode([row])[0].float()
        theirs = backbone(self.model)(torch.tensor([ids], device=self.device), use_cache=False).last_hidden_state[0, -1].float()
        if not (ours - theirs).norm() <= (1e-3 if self.dtype == torch.float32 else 0.1) * theirs.norm():
            raise ValueError(f"{type(self.model).__name__}: decoding with our cache differs from its full forward; "
                             "serve this model with vLLM")
        self._counts.update(dict.fromkeys(self._counts, 0))


def check_layers(model: nn.Module, max_len: int) -> None:
    """ValueError unless every layer attends to everything before it, up to max_len tokens."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds - {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and (window or 0) < max_len):
        raise ValueError(f"{type(model).__name__} has layers {sorted(kinds)} (window {window}) for {max_len} tokens: "
                         "this sampler needs full attention; serve this model with vLLM, or lower the length")
    positions = getattr(config, "max_position_embeddings", None)
    if positions and max_len > positions:
        raise ValueError(f"max_len {max_len}: {type(model).__name__} has only {positions} positions")
