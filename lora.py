"""The policy's tensors: LoRA layers with version slots, PEFT adapter files, and a batched sampler.

LoRA [1] freezes every weight W of the base and adds a low-rank product to the layers it targets:

    y = x W^T + (alpha / r) (x A^T) B^T        A [r, in], B [out, r]; B starts at 0, so a fresh adapter changes nothing

Versions of the policy differ only in A and B, so one base serves several at once. The A of all versions are stacked to
[slots*r, in], and so are the B. A row of the batch that uses slot s keeps columns s*r … (s+1)*r of x A^T:

    h = x A^T                                  [rows, slots*r], one product for all versions
    h[row, columns of other slots] = 0
    y = x W^T + (alpha / r) h B                no gather, no loop over versions; the price is slots*r columns, not r

The sampler computes one token a step for all its rows together [2]; rows join and leave between tokens. A prompt is
computed once for all its completions, and its keys and values are read once for up to 8 of them.

    sampler = Sampler(model, Lora(model, r=8, alpha=16, slots=4), eos_ids={2})
    sampler.load("policy-v1", read_adapter(files)[0])
    future = sampler.submit([5, 6, 7], n=8, max_tokens=32, name="policy-v1", seed=0)
    while sampler.step(): pass                 # or a thread in sampler.run(stop); future.result() is 8 Completions

Guarantees:
 1. Files are what PEFT writes and reads [3]. What we cannot apply is refused, and the error names it.
 2. The base keeps its modules, names and state_dict: adapters are forward hooks on its linear layers.
 3. A completion depends on its prompt, version, seed and index, not on the rows beside it (up to rounding).
 4. Reported logprobs are of the distribution that was sampled from, log softmax(logits / temperature), in fp32.
 5. A completion ends under the version it began with: a slot is written again only after its last row has ended.

Does not: DoRA, biases, adapters on embeddings or the head, ranks that differ by layer, quantised bases. The sampler
does not: windows shorter than the context, recurrent layers, capped logits (vLLM serves those), top-p, penalties.

Axes: N rows or tokens, T time, V vocabulary, H query heads, K key heads, d width, r rank.
[1] Hu et al. 2021, arXiv 2106.09685. [2] Yu et al. 2022, Orca, OSDI. [3] github.com/huggingface/peft, `LoraConfig`.
[4] Dao 2023, FlashAttention-2, arXiv 2307.08691, section 2.
"""
from __future__ import annotations
import json, math, random, sys, threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."   # PEFT wraps a model twice: each name in an adapter file begins with this
PREFILL_TOKENS = 4096          # of prompts forwarded together, padding included: bounds memory, and how long rows wait
READERS = 8                    # rows that read one copy of a prompt
DRAW_BLOCK = 256               # a draw finds first a block of so many tokens, then the token in it
UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "use_qalora",
               "trainable_token_indices", "target_parameters", "layer_replication", "alora_invocation_tokens", "use_bdlora",
               "kasa_config", "monteclora_config", "arrow_config")
KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva")   # init_lora_weights: the others change W, too

class AdapterError(ValueError):
    """An adapter that cannot be applied as it is: names the tensor or field, what it is, what was expected."""

# ---- Models --------------------------------------------------------------------------------------------------------

def load_model(path: str, dtype=torch.float32, device: str = "cpu", trust_remote_code: bool = False) -> nn.Module:
    """A frozen causal language model, in evaluation mode, from a folder or the hub."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    model = model.to(device).eval().requires_grad_(False)
    for module in model.modules() if model.device.type == "cpu" else ():
        if isinstance(module, nn.Linear) and module is not head(model):
            # Column by column in memory: MKL multiplies 16 to 128 rows by it 5 to 20 % faster, and more rows as fast.
            module.weight.data = module.weight.data.T.contiguous().T
    return model

def load_tokenizer(path: str, trust_remote_code: bool = False):
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)

def backbone(model: nn.Module) -> nn.Module:
    """Token ids to final hidden states: `backbone(model)(ids).last_hidden_state` [N, T, d]."""
    return model.base_model

def head(model: nn.Module) -> nn.Module:
    """Hidden states [.., d] to logits [.., V]."""
    return model.get_output_embeddings()

def recompute_layers(model: nn.Module) -> None:
    """From now on a layer keeps only its input and computes the rest again in the backward."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # It recomputes in training mode only; set on the layer alone, so that dropout inside it stays off.
            module.training = True

@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """ValueError unless logits are head(hidden), on which learner and sampler rely."""
    ids = torch.arange(1, 5, device=model.device)[None] % head(model).weight.shape[0]
    if not torch.equal(model(ids).logits, head(model)(backbone(model)(ids).last_hidden_state)):
        raise ValueError(f"{type(model).__name__} scales or caps its logits after the output head, which is not supported")

class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_tokens):
        logprobs, entropy = hidden.new_empty(2, len(hidden), dtype=torch.float32)
        slopes = torch.empty_like(hidden)
        for at in range(0, len(hidden), chunk_tokens):
            part = slice(at, at + chunk_tokens)
            logits = F.linear(hidden[part], weight, bias).float().div_(temperature)   # [n, V]
            logits -= logits.amax(-1, keepdim=True)
            probs = logits.exp()
            total = probs.sum(-1, keepdim=True)
            probs /= total
            chosen = targets[part, None]
            logprobs[part] = (logits.gather(-1, chosen) - total.log())[:, 0]
            entropy[part] = total[:, 0].log() - torch.linalg.vecdot(probs, logits)
            if ctx.needs_input_grad[0]:
                # In fp32: rounded to bf16 first, a confident token's probability would be 1 and its gradient 0.
                probs.scatter_(-1, chosen, probs.gather(-1, chosen) - 1)
                slopes[part] = probs.to(weight.dtype) @ weight / -temperature
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, _):
        slopes, = ctx.saved_tensors
        return slopes * grad_logprobs[:, None].to(slopes.dtype), None, None, None, None, None

def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
                   temperature: float = 1.0, chunk_tokens: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs [N] of `targets` [N] under softmax(head(hidden [N, d]) / temperature), and entropies [N]; both fp32.

    The head, weight [V, d], is frozen, so the forward keeps all that the backward needs, [N, d],
    d logprob / d hidden = (onehot − softmax) @ weight / temperature, and at most [chunk_tokens, V] logits live.
    The entropies carry no gradient."""
    return TokenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk_tokens)

# ---- LoRA layers ---------------------------------------------------------------------------------------------------

class AddProduct(torch.autograd.Function):
    """Adds scale (x A^T) B to y, in place, where y = x W^T (+ bias) is what the frozen layer returned.

    x [.., in], y [.., out], W [out, in], A [r, in], B [r, out]. Both paths' gradients of x add up in one array; W has
    none, so x is kept for A alone."""

    @staticmethod
    def forward(ctx, y, x, W, A, B, scale):
        h = F.linear(x, A)                               # [.., r]
        y.view(-1, y.shape[-1]).addmm_(h.view(-1, h.shape[-1]), B, alpha=scale)
        ctx.save_for_backward(x, h, W, A, B)
        ctx.scale = scale
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, h, W, A, B = ctx.saved_tensors
        g = grad.flatten(0, -2)                          # [N, out]
        dh = (g @ B.T).mul_(ctx.scale)                   # [N, r]
        dx = (g @ W).addmm_(dh, A).view_as(x) if ctx.needs_input_grad[1] else None
        return None, dx, None, dh.T @ x.flatten(0, -2), (h.flatten(0, -2).T @ g).mul_(ctx.scale), None

class Lora:
    """The adapters of one model, in `slots` version slots, all zero at first; freezes the model.

    `target_modules` as in PEFT: "all-linear" (all but the head), or the last parts of module names. A and B are stored
    in fp32, and applied in the base's dtype."""

    def __init__(self, model: nn.Module, r: int, alpha: float, target_modules: str | list[str] = "all-linear", slots: int = 1):
        if r < 1 or alpha <= 0 or slots < 1:
            raise AdapterError(f"r={r} alpha={alpha} slots={slots}: all three must be positive")
        self.r, self.scale, self.slots = r, alpha / r, slots
        self._stacks: dict[str, torch.Tensor] = {}       # [slots*r, in or out]: B is stored transposed
        self._cuts: dict[tuple, dict] = {}               # the rows of the stacks that belong to slots first .. end
        self._route: tuple | None = None                 # set by `use`: first slot, cut, columns to blank or None
        shapes = {}
        model.requires_grad_(False)
        for name, module in model.named_modules():
            wanted = target_modules == "all-linear" or any(f".{name}".endswith(f".{t}") for t in target_modules)
            if not wanted or not isinstance(module, (nn.Linear, Conv1D)) or module is head(model):
                continue
            n_out, n_in = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
            a, b = (f"{PREFIX}{name}.lora_{side}.weight" for side in "AB")
            shapes[a], shapes[b] = (r, n_in), (n_out, r)
            self._stacks[a], self._stacks[b] = (module.weight.new_zeros(slots * r, n, dtype=torch.float32) for n in (n_in, n_out))
            module.register_forward_hook(partial(self._add_product, a, b))
        if not shapes:
            raise AdapterError(f"target modules {target_modules}: {type(model).__name__} has no such linear layer")
        self.shapes: dict[str, tuple[int, int]] = dict(sorted(shapes.items()))
        cuts = [{key: self._stacks[key][s * r:(s + 1) * r] for key in self.shapes} for s in range(slots)]
        self._parameters = [{key: nn.Parameter(rows if ".lora_A." in key else rows.T, requires_grad=False)
                             for key, rows in cut.items()} for cut in cuts]

    def parameters(self, slot: int) -> dict[str, nn.Parameter]:
        """A and B of a slot under PEFT's names: views of the stacks, so an update in place is seen at once."""
        return self._parameters[slot]

    def train(self, slot: int | None) -> None:
        """Lets gradients reach this slot's A and B and no other's (None: none)."""
        for s, parameters in enumerate(self._parameters):
            for parameter in parameters.values():
                parameter.requires_grad_(s == slot)

    @torch.no_grad()
    def load(self, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        """Copies an adapter into a slot; AdapterError, with nothing changed, unless every tensor fits."""
        for key in sorted(tensors.keys() | self.shapes.keys()):
            expected = self.shapes.get(key, "no such tensor: it is unknown to this model")
            got = tuple(tensors[key].shape) if key in tensors else "missing"
            if got != expected or not torch.isfinite(tensors[key]).all():
                raise AdapterError(f"{key}: shape {got}, expected {expected}, and no NaN or infinity")
        for key, parameter in self._parameters[slot].items():
            parameter.copy_(tensors[key])

    @contextmanager
    def use(self, slots: int | list[int] | None):
        """Forwards inside use this slot, or one slot per row of the batch (−1: the base), or no adapter (None, free).

        A backward that recomputes its forward must be inside, too."""
        rows = [-1] if slots is None else [slots] if isinstance(slots, int) else slots
        used, blank, before = sorted(set(rows) - {-1}), None, self._route
        if len(set(rows)) > 1:
            columns = torch.arange(used[0], used[-1] + 1).repeat_interleave(self.r)
            blank = (torch.tensor(rows)[:, None] != columns).to(next(iter(self._stacks.values())).device, non_blocking=True)
        if used and (span := (used[0], used[-1] + 1)) not in self._cuts:
            # Cut once: at 32 rows cutting at every layer took 5 % of a decode step.
            self._cuts[span] = {key: rows[span[0] * self.r:span[1] * self.r] for key, rows in self._stacks.items()}
        self._route = (used[0], self._cuts[span], blank) if used else None
        try:
            yield
        finally:
            self._route = before

    def _add_product(self, key_a: str, key_b: str, module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        if self._route is None:
            return output
        first, cut, blank = self._route
        if torch.is_grad_enabled():
            assert blank is None, "gradients reach one slot: all rows must use it"
            A, B = (self._parameters[first][key].to(output.dtype) for key in (key_a, key_b))
            weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
            return AddProduct.apply(output.detach(), inputs[0], weight, A, B.T, self.scale)
        A, B = cut[key_a].to(output.dtype), cut[key_b].to(output.dtype)
        h = F.linear(inputs[0], A)                       # [rows, .., columns]
        if blank is not None:
            # Blanked rather than multiplied by 0: an overflow in another version's columns stays there.
            h.masked_fill_(blank.view(len(blank), *[1] * (h.ndim - 2), -1), 0)
        output.view(-1, output.shape[-1]).addmm_(h.view(-1, h.shape[-1]), B, alpha=self.scale)
        return output

# ---- Attention of packed rows --------------------------------------------------------------------------------------

class BranchAttention(torch.autograd.Function):
    """Causal attention on the CPU where completions stand behind one shared prompt; no array of time × time.

    A row holds pieces, a piece is lengths [prompt, completion, completion, ..]. Each of these segments attends to itself,
    and the completions of a piece, all as one, to their prompt. Two parts of one softmax join exactly [4]:
    out = Σ exp(lse_i − lse) out_i with lse = log Σ exp(lse_i); and given the joined out and lse, flash attention's
    backward of one part is that part's share of the gradient."""

    @staticmethod
    def forward(ctx, q, k, v, scale, pieces):
        B, H, T, d = q.shape
        out, lse, at = q.new_empty(B, T, H, d).transpose(1, 2), q.new_empty(B, H, T, dtype=torch.float32), 0
        ctx.scale, ctx.parts = scale, []                 # [(queries, keys, is_causal)]
        for lengths in pieces:
            ends = [at, *(at := at + n for n in lengths if n)]
            ctx.parts += [(span, span, True) for span in map(slice, ends, ends[1:])]
            if len(ends) > 2:
                ctx.parts.append((slice(ends[1], at), slice(*ends[:2]), False))
        for rows, keys, is_causal in ctx.parts:
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], is_causal=is_causal, scale=scale)
            if not is_causal:
                own, own_lse, prompt_lse = out[:, :, rows], lse[:, :, rows], part_lse
                part_lse = torch.logaddexp(own_lse, prompt_lse)
                part = part * (prompt_lse - part_lse).exp()[..., None] + own * (own_lse - part_lse).exp()[..., None]
            out[:, :, rows], lse[:, :, rows] = part, part_lse
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for rows, keys, is_causal in ctx.parts:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows], 0.0,
                is_causal, scale=ctx.scale)
            for whole, part, span in zip(grads, parts, (rows, keys, keys)):
                # A piece's own segments come first and cover it, so the sum starts there.
                whole[:, :, span].copy_(part) if is_causal else whole[:, :, span].add_(part)
        return *grads, None, None

def branch_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' attention interface. The mask, 4-D so that it comes down untouched, is the lengths of all pieces
    [1, 1, pieces, segments], padded with 0; None is one segment. query [B, H, T, d], key and value [B, K, T, d]."""
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise ValueError("a model that caps or biases its scores or has sinks is not supported")
    T = query.shape[2]
    pieces = [[T]] if attention_mask is None else attention_mask[0, 0].tolist()
    assert key.shape[2] == T == sum(map(sum, pieces)), f"{key.shape[2]} keys, {T} queries, pieces {pieces}"
    return BranchAttention.apply(query, key, value, scaling, pieces).transpose(1, 2), None

# ---- Adapter files -------------------------------------------------------------------------------------------------

def init_adapter(shapes: dict[str, tuple[int, int]], seed: int) -> dict[str, torch.Tensor]:
    """As PEFT begins: A uniform within ±1/sqrt(in) (Kaiming with a = sqrt 5), B zero. Equal on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return {key: (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1]) if ".lora_A." in key
            else torch.zeros(shape) for key, shape in sorted(shapes.items())}

def adapter_files(tensors: dict[str, torch.Tensor], r: int, alpha: float, target_modules: str | list[str],
                  base_model: str) -> dict[str, bytes]:
    """The two files of a PEFT adapter folder; equal input gives equal bytes. AdapterError for what nobody could load."""
    check_tensors(tensors, r)
    if target_modules == "all-linear":
        # Spelled out, because PEFT and vLLM expand "all-linear" each in their own way.
        target_modules = {key.split(".lora_")[0].rsplit(".", 1)[-1] for key in tensors}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "r": r,
              "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "target_modules": sorted(target_modules),
              "lora_dropout": 0.0, "bias": "none", "modules_to_save": None, "fan_in_fan_out": False,
              "init_lora_weights": True, "inference_mode": True, "use_dora": False, "use_rslora": False}
    whole = {key: tensor.detach().to("cpu", torch.float32).contiguous() for key, tensor in sorted(tensors.items())}
    return {"adapter_config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
            "adapter_model.safetensors": safetensors.torch.save(whole, metadata={"format": "pt"})}

def read_adapter(files: dict[str, bytes]) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors in fp32, configuration) of a PEFT adapter; AdapterError if it is more or less than plain LoRA."""
    try:
        config = json.loads(files["adapter_config.json"])
        tensors = safetensors.torch.load(files["adapter_model.safetensors"])
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise AdapterError(f"the adapter's files {sorted(files)} are incomplete or damaged: {error}") from None
    for name, plain in (("peft_type", "LORA"), ("bias", "none"), *((name, None) for name in UNSUPPORTED)):
        if config.get(name, plain) != plain and config[name]:
            raise AdapterError(f"{name} is {config[name]!r} in the adapter's configuration: only plain LoRA is supported")
    if (init := config.get("init_lora_weights")) not in KEEPS_BASE:
        raise AdapterError(f"init_lora_weights is {init!r} in the adapter's configuration, which changes the base's weights, too; save it "
                           "with PEFT's path_initial_model_for_weight_conversion")
    for name in ("r", "lora_alpha"):
        if type(config.get(name)) not in (int, float) or config[name] <= 0:
            raise AdapterError(f"{name} is {config.get(name)!r} in the adapter's configuration, expected a number above 0")
    check_tensors(tensors, config["r"])
    return {key: tensors[key].to(torch.float32) for key in sorted(tensors)}, config

def check_tensors(tensors: dict[str, torch.Tensor], r: int) -> None:
    """AdapterError unless these are finite pairs A [r, in], B [out, r], named as in PEFT, not on head or embeddings."""
    if not tensors:
        raise AdapterError("the adapter holds no tensors")
    for key, tensor in tensors.items():
        module, _, side = key.removesuffix(".weight").rpartition(".lora_")
        if side not in ("A", "B") or not key.startswith(PREFIX) or not key.endswith(".weight"):
            raise AdapterError(f"{key}: expected {PREFIX}<module>.lora_A.weight or .lora_B.weight")
        if module.rsplit(".", 1)[-1] in ("lm_head", "embed_out", "embed_tokens", "wte", "wpe"):
            raise AdapterError(f"{key}: adapters on the output head or the embeddings are not supported")
        if f"{module}.lora_{'B' if side == 'A' else 'A'}.weight" not in tensors:
            raise AdapterError(f"{key}: the other half of the pair is missing")
        if tensor.ndim != 2 or tensor.shape["AB".index(side)] != r or not torch.isfinite(tensor).all():
            raise AdapterError(f"{key}: shape {tuple(tensor.shape)}, expected rank {r} and no NaN or infinity")

@torch.no_grad()
def merge(model: nn.Module, tensors: dict[str, torch.Tensor], alpha: float, r: int, dtype: torch.dtype) -> nn.Module:
    """Adds (alpha / r) B A to the model's weights in fp32, then casts once: in bf16 updates near 1e-5 would be lost."""
    check_tensors(tensors, r)
    for key in (key for key in tensors if ".lora_A." in key):
        module = model.get_submodule(key[len(PREFIX):].split(".lora_")[0])
        A, B = (tensors[k].to(module.weight.device, torch.float32) for k in (key, key.replace(".lora_A.", ".lora_B.")))
        update = (alpha / r) * (B @ A)
        merged = module.weight.float() + (update.T if isinstance(module, Conv1D) else update)
        module.weight = nn.Parameter(merged.to(dtype), requires_grad=False)
    return model.to(dtype)

# ---- Keys and values -----------------------------------------------------------------------------------------------

class KeyValues:
    """What attention reads: `own` [layers, 2, rows, K, time, d], the tokens that each row has drawn, and `copies`, shaped
    alike, of prompts, each read by up to READERS rows in one product. Both grow as needed.

    Every attention layer calls `attend`. With `mask` None, a prefill, it sets the prompts' keys and values aside; after
    `begin_decode` it appends a token to each row, in place, and the row attends to its prompt and to its own tokens."""

    def __init__(self):
        self.own = self.copies = self.mask = None
        self.prefilled: dict[int, torch.Tensor] = {}     # layer: [2, N, K, T, d]

    def begin_decode(self, copy: list[int], place: list[int], prompt_lengths: list[int], own_lengths: list[int]) -> None:
        """Row i reads prompt copy[i], at its place among that one's readers, and own_lengths[i] tokens before its new one."""
        N, self.seats, self.P, T = len(copy), max(place) + 1, max(prompt_lengths), max(own_lengths) + 1
        self.own = grown(self.own, N, T)
        copy, place, own_lengths = torch.tensor([copy, place, own_lengths])
        seat = copy * self.seats + place
        # An empty seat reads for row 0, and nobody looks at the result.
        readers = torch.zeros(len(prompt_lengths) * self.seats, dtype=torch.long).index_copy_(0, seat, torch.arange(N))
        beyond = torch.cat([torch.arange(self.P) >= torch.tensor(prompt_lengths)[copy, None],
                            torch.arange(T) > own_lengths[:, None]], -1)
        # Added to the scores [rows, K, queries, P + T], the same in all layers.
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, -math.inf)[:, None, None]
        self.rows, self.at, self.seat, self.readers, self.mask = (
            x.to(self.own.device, non_blocking=True) for x in (torch.arange(N), own_lengths, seat, readers, mask))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [N, H, T, d], k and v [N, K, T, d] of the new tokens -> [N, T, H, d]."""
        (N, H, _, d), K = q.shape, k.shape[1]
        if self.mask is None:
            self.prefilled[layer] = torch.stack([k, v])
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=H != K).transpose(1, 2)
        keys, values = self.own[layer, :, :N, :, :self.mask.shape[-1] - self.P]
        keys[self.rows, :, self.at], values[self.rows, :, self.at] = k[:, :, 0], v[:, :, 0]
        prompt_keys, prompt_values = self.copies[layer, :, :len(self.readers) // self.seats, :, :self.P]
        # Query heads that share a key head stand as several queries: no key is copied.
        q = q.view(N, K, H // K, d)
        scores = torch.cat([self._by_row(dot(self._by_copy(q), prompt_keys)), dot(q, keys)], -1)
        weights = torch.add(self.mask, scores, alpha=scale).softmax(-1).to(v.dtype)      # [N, K, H/K, P + T]
        out = self._by_row(self._by_copy(weights[..., :self.P]) @ prompt_values)
        return out.add_(weights[..., self.P:] @ values).reshape(N, 1, H, d)

    def _by_copy(self, x: torch.Tensor) -> torch.Tensor:
        """What belongs to rows [N, K, H/K, ..], gathered for their prompts [copies, K, seats * H/K, ..]."""
        return x.index_select(0, self.readers).unflatten(0, (-1, self.seats)).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return x.unflatten(2, (self.seats, -1)).transpose(1, 2).flatten(0, 1).index_select(0, self.seat)

    def join(self, copy: int, prompt: torch.Tensor, rows: int) -> None:
        """Makes a prompt's keys and values [layers, 2, K, time, d] copy number `copy`, and room for `rows` rows."""
        layers, _, K, time, d = prompt.shape
        if self.own is None:
            self.own = self.copies = prompt.new_zeros(layers, 2, 0, K, 0, d)
        self.own, self.copies = grown(self.own, rows, 1), grown(self.copies, copy + 1, time)
        self.copies[:, :, copy, :, :time] = prompt
        # What is masked is multiplied by 0, which an earlier prompt's NaN would outlive.
        self.copies[:, :, copy, :, time:] = 0

def grown(slab: torch.Tensor, entries: int, time: int) -> torch.Tensor:
    """The slab [layers, 2, entries, K, time, d] itself, or a copy with room for so many; sizes are powers of two."""
    layers, _, held, K, length, d = slab.shape
    if entries <= held and time <= length:
        return slab
    entries, time = (1 << (max(sizes) - 1).bit_length() for sizes in ((entries, held), (time, length)))
    larger = slab.new_zeros(layers, 2, entries, K, time, d)
    larger[:, :, :held, :, :length] = slab
    return larger

def close_gaps(items: list, is_live: list[bool], slab: torch.Tensor) -> None:
    """Items that are not live leave; the last ones take their places, in the list and in the slab."""
    live = [i for i, alive in enumerate(is_live) if alive]
    holes = sorted(set(range(len(live))) - set(live))
    movers = live[len(live) - len(holes):]
    if holes:
        slab[:, :, holes] = slab[:, :, movers]
    for hole, mover in zip(holes, movers):
        items[hole] = items[mover]
    del items[len(live):]

def dot(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [N, K, n, d] times k [N, K, t, d], in fp32: scores rounded to bf16 would be off by 0.4 % of their size."""
    if q.is_cuda and q.dtype != torch.float32:
        return torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out_dtype=torch.float32).unflatten(0, q.shape[:2])
    return q.float() @ k.float().mT

def slab_attention(module, query, key, value, attention_mask, scaling=None, key_values=None, **kwargs):
    """transformers' attention interface; `key_values` comes down from the model's arguments."""
    if key_values is None or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("it caps scores, has sinks, or passes no arguments down to its attention")
    return key_values.attend(module.layer_idx, query, key, value, scaling), None

def draw(logits: torch.Tensor, temperatures: list[float], points: list[float], top: int = 0) -> tuple:
    """Where the cumulated distribution passes points: tokens [N], logprobs [N], and of the `top` likeliest (values, ids).

    Temperature 0 takes the likeliest token, under temperature 1. A token of probability 0 is never drawn. Overwrites logits."""
    N, V = logits.shape
    heat, points = torch.tensor([temperatures, points], dtype=torch.float64).to(logits.device, non_blocking=True)[..., None]
    scaled = logits.float().div_(heat.where(heat > 0, 1).float())
    scaled -= scaled.amax(-1, keepdim=True)
    likeliest = scaled.topk(max(top, int(0 in temperatures)))
    # In place: a second array of this size would cost more in fresh memory than the arithmetic does.
    weights = scaled.exp_() if V % DRAW_BLOCK == 0 else F.pad(scaled.exp_(), (0, -V % DRAW_BLOCK))
    blocks = weights.view(N, -1, DRAW_BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)            # [N, blocks]
    targets = points * sums[:, -1:]
    block = torch.searchsorted(sums, targets, right=True).clamp_(max=sums.shape[1] - 1)
    inner = blocks[torch.arange(N, device=block.device), block[:, 0]].double().cumsum(-1)
    # Subtle: the block's sum was rounded, so what is left may pass its end; just below the end is a positive weight.
    rest = torch.minimum(targets - F.pad(sums, (1, 0)).gather(-1, block), inner[:, -1:].nextafter(inner.new_zeros(())))
    tokens = (block * DRAW_BLOCK + torch.searchsorted(inner, rest, right=True)).clamp_(max=V - 1)
    if 0 in temperatures:
        tokens = torch.where(heat == 0, likeliest.indices[:, :1], tokens)
    log_total = sums[:, -1:].log()
    logprobs = (weights.gather(-1, tokens).double().log() - log_total).float()
    return tokens[:, 0], logprobs[:, 0], ((likeliest.values - log_total).float()[:, :top], likeliest.indices[:, :top])

# ---- Sampler -------------------------------------------------------------------------------------------------------

class UnknownVersion(LookupError):
    """No version of that name is loaded; `names` are. Asking again cannot help before a load."""

    def __init__(self, name: str, names: list[str]):
        super().__init__(f"version {name!r} is not loaded; live versions: {', '.join(names) or 'none'}")
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
    version: tuple[int, int]                             # slot (−1: the base), and a number that no other load has
    max_tokens: int
    temperature: float
    stops: frozenset[int]
    top_logprobs: int
    rows: list[Row] = field(default_factory=list)
    future: Future = field(default_factory=Future)

@dataclass(eq=False)
class Row:
    request: Request
    random: random.Random                                # its own stream
    out: Completion
    index: int                                           # among the request's rows

    @property
    def copy(self) -> tuple[Request, int]:
        """Names the copy of the prompt that this row and up to READERS − 1 others of its request read."""
        return self.request, self.index // READERS

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.out.token_ids)

    @property
    def is_finished(self) -> bool:
        return bool(self.out.finish_reason) or self.request.future.done()

class Sampler:
    """Continuous batching over one model and its adapters. `step` computes one token for every row; `run` loops it.

    All but `step` and `run` may be called from any thread. Up to `max_rows` completions are under way, each of at most
    `max_len` tokens with its prompt; prompts of `prefix_tokens` in all stay computed for requests that come later."""

    def __init__(self, model: nn.Module, lora: Lora, eos_ids: set[int], max_rows: int = 64, max_len: int = 1024,
                 prefix_tokens: int = 4096):
        self.model, self.lora, self.eos_ids = model, lora, frozenset(eos_ids)
        self.max_rows, self.max_len, self.prefix_tokens = max_rows, max_len, prefix_tokens
        self.key_values = KeyValues()
        self.rows: list[Row] = []                        # row i of the batch, and of key_values.own
        self.copies: list[tuple[Request, int]] = []      # entry i of key_values.copies
        self.waiting: deque[Request] = deque()
        # (version, prompt): its keys and values, and the hidden state of its last token; the longest unused first.
        self.prefixes: OrderedDict[tuple, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._versions: dict[str, tuple[int, int]] = {}
        self._changed = threading.Condition()
        self._paused: str | None = None
        self._is_running = False
        self._counts = dict.fromkeys(("loads", "steps", "tokens", "completions", "errors", "prompts", "prefix_hits"), 0)
        AttentionInterface.register("slab", slab_attention)
        self._check_attention()
        self._counts = dict.fromkeys(self._counts, 0)

    @torch.inference_mode()
    def _check_attention(self) -> None:
        """ValueError unless a token attends to all before it, and decoding from our slab agrees with the model alone."""
        config, name = self.model.config.get_text_config(), type(self.model).__name__
        kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
        limit = getattr(config, "max_position_embeddings", None) or math.inf
        if "sliding_attention" in kinds or window and not kinds:
            limit = min(limit, window)
        if kinds - {"full_attention", "sliding_attention"} or self.max_len > limit:
            raise ValueError(f"{name}, layers {sorted(kinds)}, max_len={self.max_len}: this sampler needs full attention and at "
                             f"most {limit} tokens; serve the model with vLLM, or lower the length")
        try:
            future = self.submit(prompt := list(range(1, min(8, self.max_len - 1))), max_tokens=2, seed=0, ignore_eos=True)
            while self.step():
                pass
        except (TypeError, ValueError, KeyError, RuntimeError) as fault:
            raise ValueError(f"{name} cannot use this sampler's attention ({fault}): serve it with vLLM") from fault
        ours, ids = future.result()[0].logprobs[-1], prompt + future.result()[0].token_ids
        theirs = self.model(torch.tensor([ids], device=self.model.device)).logits[0, -2].float().log_softmax(-1)[ids[-1]]
        if not abs(ours - theirs) <= (1e-3 if self.model.dtype == torch.float32 else 0.1):
            raise ValueError(f"{name} decodes otherwise in this sampler ({ours} for {theirs}): serve it with vLLM")

    # Versions

    def names(self) -> list[str]:
        return list(self._versions)

    def load(self, name: str, tensors: dict[str, torch.Tensor], timeout_s: float = 30.0) -> None:
        """Makes a version available. The same name with the same tensors changes nothing.

        AdapterError: it does not fit, or the name has other tensors. TimeoutError: no slot is free; while `run` runs,
        the rows of unloaded versions are waited for first."""
        with self._changed:
            if name in self._versions:
                held = self.lora.parameters(self._versions[name][0])
                if held.keys() != tensors.keys() or not all(torch.equal(held[k], tensors[k].to(held[k])) for k in held):
                    raise AdapterError(f"{name}: loaded with other weights already; a name is one set of weights for ever")
                return
            if not self._changed.wait_for(self._free_slots, timeout_s if self._is_running else 0):
                raise TimeoutError(f"{name}: all {self.lora.slots} slots are in use; live: {', '.join(self._versions)}")
            slot = min(self._free_slots())
            self.lora.load(slot, tensors)
            self._counts["loads"] += 1
            self._versions[name] = slot, self._counts["loads"]

    def unload(self, name: str) -> None:
        """Forgets a name at once; its slot is free when its last request has ended."""
        with self._changed:
            if name not in self._versions:
                raise UnknownVersion(name, list(self._versions))
            del self._versions[name]

    def _free_slots(self) -> set[int]:
        requests = [*(row.request for row in self.rows), *self.waiting]
        return set(range(self.lora.slots)) - {slot for slot, _ in [*self._versions.values(), *(r.version for r in requests)]}

    # Requests

    def submit(self, prompt_ids: list[int], n: int = 1, max_tokens: int = 16, temperature: float = 1.0,
               name: str | None = None, seed: int | None = None, stop_ids=(), top_logprobs: int = 0,
               ignore_eos: bool = False) -> Future:
        """A Future of n Completions of a prompt under version `name` (None: the base); equal seeds give equal ones.

        UnknownVersion, or ValueError for what could never run."""
        V, room = head(self.model).weight.shape[0], self.max_len - len(prompt_ids)
        if not prompt_ids or not all(isinstance(t, int) and 0 <= t < V for t in prompt_ids):
            raise ValueError(f"prompt of {len(prompt_ids)} ids: expected at least one, each an integer from 0 to {V - 1}")
        if not (1 <= max_tokens <= room and 1 <= n <= self.max_rows and 0 <= temperature < math.inf and 0 <= top_logprobs <= V):
            raise ValueError(f"max_tokens={max_tokens} n={n} temperature={temperature} top_logprobs={top_logprobs}: expected "
                             f"1 to {room} tokens after this prompt, n from 1 to {self.max_rows}, the others 0 or more")
        stops = frozenset(stop_ids) | (frozenset() if ignore_eos else self.eos_ids)
        seed = random.getrandbits(63) if seed is None else seed
        with self._changed:
            if name is not None and name not in self._versions:
                raise UnknownVersion(name, list(self._versions))
            version = self._versions.get(name, (-1, 0))
            request = Request(tuple(prompt_ids), version, max_tokens, temperature, stops, top_logprobs)
            request.rows = [Row(request, random.Random(f"{seed}/{i}"), Completion([], [], "", [] if top_logprobs else None), i)
                            for i in range(n)]
            self.waiting.append(request)
            self._changed.notify_all()
        return request.future

    def cancel(self, future: Future) -> None:
        """Its rows are freed before the next token."""
        future.cancel()
        with self._changed:
            self._changed.notify_all()

    def pause(self, mode: str | None = "keep") -> None:
        """No token until `resume`. Rows under way: "keep" holds them, "abort" ends them, "wait" returns when they ended."""
        if mode not in (None, "keep", "abort", "wait"):
            raise ValueError(f"pause mode {mode!r}: expected keep, abort or wait")
        with self._changed:
            self._paused = mode
            self._changed.notify_all()
            self._changed.wait_for(lambda: mode != "wait" or not (self.rows and self.is_paused and self._is_running))

    def resume(self) -> None:
        self.pause(None)

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    def stats(self) -> dict:
        """Counts since the start, and what is held now."""
        with self._changed:
            return {**self._counts, "running": len(self.rows), "waiting": len(self.waiting), "is_paused": self.is_paused,
                    "versions": list(self._versions), "free_slots": len(self._free_slots()),
                    "kv_tokens": sum(row.length for row in self.rows),
                    "kv_bytes": sum(slab.nbytes for slab in (self.key_values.own, self.key_values.copies))}

    # The loop

    def run(self, stop: threading.Event) -> None:
        """Steps until `stop` is set and sleeps while idle. An error fails the requests under way, never the loop."""
        self._is_running = True
        while not stop.is_set():
            try:
                self.step()
            except Exception as error:
                advice = "; lower --max-rows" if "out of memory" in str(error) else ""
                print(f"warning: the requests under way failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}{advice}",
                      file=sys.stderr, flush=True)
            with self._changed:
                # Work wakes it at once; the time-out bounds only how late `stop` is seen.
                self._changed.wait_for(lambda: stop.is_set() or self._has_work(), timeout=0.5)
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def _has_work(self) -> bool:
        can_move = {None: self.rows or self.waiting, "keep": None}.get(self._paused, self.rows)
        return bool(can_move) or any(row.is_finished for row in self.rows)

    @torch.inference_mode()
    def step(self) -> bool:
        """Finished rows leave, waiting requests join, and every row gets a token. True if there is more to do."""
        try:
            with self._changed:
                is_held = self._paused == "keep"
                running = self._regroup()
                self._changed.notify_all()
            if self.rows and not is_held:
                self._advance(running)
        except Exception as error:
            for row in self.rows:
                self._fail(row.request, error)
            self.rows.clear()
            raise
        with self._changed:
            return self._has_work()

    def _regroup(self) -> int:
        """Finished rows leave, and prompts that no row reads; waiting requests join behind. How many rows go on."""
        rows = self.rows
        for row in rows:
            if self._paused == "abort" and not row.is_finished:
                self._finish(row, "abort")
        close_gaps(rows, [not row.is_finished for row in rows], self.key_values.own)
        read = {row.copy for row in rows}
        close_gaps(self.copies, [copy in read for copy in self.copies], self.key_values.copies)
        running = len(rows)
        # Requests join whole and in order of arrival, so none is overtaken for ever.
        while self.waiting and not self.is_paused:
            joining = [] if self.waiting[0].future.done() else self.waiting[0].rows
            if len(rows) + len(joining) > self.max_rows:
                break
            rows += joining
            self.waiting.popleft()
        return running

    def _advance(self, running: int) -> None:
        """Decodes rows[:running], computes the prompts of the others, and draws a token for each."""
        hidden = [self._decode(self.rows[:running])] if running else []
        owners = list(range(running))                    # which hidden state a row draws from
        joined = list(dict.fromkeys(row.request for row in self.rows[running:]))
        self._prefill(joined)
        for i, request in enumerate(joined):
            prompt, last = self.prefixes[request.version, request.prompt]
            for part in range(-(-len(request.rows) // READERS)):
                self.key_values.join(len(self.copies), prompt, len(self.rows))
                self.copies.append((request, part))
            owners += [running + i] * len(request.rows)
            hidden.append(last[None])
        while sum(len(prompt) for _, prompt in self.prefixes) > self.prefix_tokens:
            self.prefixes.popitem(last=False)
        logits = head(self.model)(torch.cat(hidden))
        logits = logits[owners] if joined else logits
        temperatures, points = zip(*((row.request.temperature, row.random.random()) for row in self.rows))
        tokens, logprobs, tops = draw(logits, temperatures, points, max(row.request.top_logprobs for row in self.rows))
        for i, (token, logprob, values, ids) in enumerate(zip(*(t.tolist() for t in (tokens, logprobs, *tops)))):
            row = self.rows[i]
            request, out = row.request, row.out
            if not math.isfinite(logprob):
                # A NaN left in the slab would spread, as 0 × NaN, to a later row in its place.
                self.key_values.own[:, :, i] = 0
                self._fail(request, FloatingPointError("logits are not finite under this version"))
                continue
            out.token_ids.append(token)
            out.logprobs.append(logprob)
            if out.top_logprobs is not None:
                out.top_logprobs.append(dict(list(zip(ids, values))[:request.top_logprobs]))
            if token in request.stops or len(out.token_ids) == request.max_tokens:
                self._finish(row, "stop" if token in request.stops else "length")
        self._counts["steps"] += 1
        self._counts["tokens"] += len(self.rows)

    def _finish(self, row: Row, reason: str) -> None:
        request, row.out.finish_reason = row.request, reason
        self._counts["completions"] += 1
        if all(r.out.finish_reason for r in request.rows) and request.future.set_running_or_notify_cancel():
            request.future.set_result([r.out for r in request.rows])

    def _fail(self, request: Request, error: Exception) -> None:
        if not request.future.done() and request.future.set_running_or_notify_cancel():
            self._counts["errors"] += 1
            request.future.set_exception(error)

    def _decode(self, rows: list[Row]) -> torch.Tensor:
        """Hidden states [N, d] of the rows' last tokens."""
        number = {copy: i for i, copy in enumerate(self.copies)}
        self.key_values.begin_decode([number[row.copy] for row in rows], [row.index % READERS for row in rows],
                                     [len(request.prompt) for request, _ in self.copies],
                                     [len(row.out.token_ids) - 1 for row in rows])
        return self._forward([row.out.token_ids[-1:] for row in rows], [[row.length - 1] for row in rows],
                             [row.request.version[0] for row in rows])[:, 0]

    def _prefill(self, requests: list[Request]) -> None:
        """Computes those prompts of the requests that `prefixes` lacks, several at a time."""
        wanted = dict.fromkeys((request.version, request.prompt) for request in requests)
        for key in wanted.keys() & self.prefixes.keys():
            self.prefixes.move_to_end(key)
        missing = sorted(wanted.keys() - self.prefixes.keys(), key=lambda key: len(key[1]))
        self._counts["prompts"] += len(missing)
        self._counts["prefix_hits"] += len(requests) - len(missing)
        while missing:
            T, kv = len(missing[-1][1]), self.key_values
            keys = [missing.pop() for _ in range(min(len(missing), max(1, PREFILL_TOKENS // T)))]
            # Padded on the right with any id: causal attention never looks there.
            ids = [[*prompt, *[0] * (T - len(prompt))] for _, prompt in keys]
            kv.mask, kv.prefilled = None, {}
            hidden = self._forward(ids, [range(T)], [slot for (slot, _), _ in keys])
            for i, key in enumerate(keys):
                P = len(key[1])
                prompt = torch.stack([kv.prefilled[layer][:, i, :, :P] for layer in sorted(kv.prefilled)])
                self.prefixes[key] = prompt, hidden[i, P - 1].clone()

    def _forward(self, ids: list[list[int]], positions: list, slots: list[int]) -> torch.Tensor:
        """Hidden states [N, T, d] of ids [N, T], with our attention in place of the model's own."""
        config = self.model.config
        ids, positions = (torch.tensor(x).to(self.model.device, non_blocking=True) for x in (ids, positions))
        before, config._attn_implementation = config._attn_implementation, "slab"
        try:
            with self.lora.use(slots):
                return backbone(self.model)(ids, position_ids=positions.expand_as(ids), use_cache=False,
                                            key_values=self.key_values).last_hidden_state
        finally:
            config._attn_implementation = before
