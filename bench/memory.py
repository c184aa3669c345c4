"""Peak memory of one learner step: ours, ours with --recompute, and a padded step with PEFT in three ways.

    python bench/memory.py --model FOLDER --tokens 1024 2048 4096 8192       (no --model: random weights, SmolLM2-135M's shape)

A row of ours holds `tokens` tokens: one prompt of an eighth of them and 8 completions of as many. The padded step gets the same
group: 8 rows [prompt + completion], so each prompt 8 times. `--alone` compares one completion in one row of `tokens` tokens for both,
where nothing is shared. The steps are those of bench/learner_step.py; fp32.

Each measurement is a process of its own: VmHWM, the largest resident set during the step, and in brackets what the step added to the
resident set of torch, model and adapter. MALLOC_MMAP_THRESHOLD_=1000000 leaves out what glibc's heap keeps of freed arrays. Steps of the padded kind over --limit-gb are left out, by the estimate of twice the last.

HF+PEFT        logits whole, as TRL took them until its chunked head.
chunked        our own head in its place: at most [128, V] logits (TRL 1.16 holds tiles of at most [4096, 32768]).
checkpointed   chunked, and gradient checkpointing, TRL's default; to be set against ours with --recompute.

Needs peft beside the project's requirements, and Linux.
"""
import argparse, re, subprocess, sys
from pathlib import Path

from transformers.utils import logging

from learner_step import lora, make_groups, our_policy, ours, peft_model, their_logprobs, theirs

KINDS = ("ours", "ours --recompute", "HF+PEFT", "HF+PEFT chunked", "HF+PEFT checkpointed")

def status_gb(name: str) -> float:
    """VmRSS or VmHWM of this process in GB (10^9 bytes)."""
    return int(re.search(name + r":\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024 / 1e9

def chunked_logprobs(model, batch: dict):
    """Like their_logprobs, without the logits."""
    C, T = batch["mask"].shape
    base, ids = model.get_base_model(), batch["input_ids"]
    hidden = lora.backbone(base)(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).last_hidden_state
    logprobs, entropy = lora.token_logprobs(hidden[:, -T - 1:-1].flatten(0, 1), lora.head(base).weight, None, ids[:, -T:].flatten())
    return logprobs.view(C, T), entropy.view(C, T)

def measure(kind: str, folder: str | None, tokens: int, alone: bool) -> tuple[float, float]:
    """(peak, resident before the step) in GB."""
    prompt = tokens // 8
    length = (tokens - prompt) // (1 if alone else 8) + 1    # the last token of a completion takes no place in our row
    group, = make_groups(1, prompt, length, length)
    policy = our_policy(folder)
    if kind.startswith("ours"):
        if "recompute" in kind:
            lora.recompute_layers(policy.model)
        kept = 2 if alone else 8                             # of two, each fills a row and so has a forward of its own
        step = lambda group: ours(policy, [group], tokens)
    else:
        model, kept = peft_model(folder, policy.lora.shapes), 1 if alone else 8
        del policy
        if "checkpointed" in kind:
            model.enable_input_require_grads()
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.train()
        step = lambda group: theirs(model, [group], their_logprobs if kind == "HF+PEFT" else chunked_logprobs)
    for name in ("completion_ids", "sampler_logprobs", "rewards", "truncated"):
        setattr(group, name, getattr(group, name)[:kept])
    before = status_gb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")            # the peak begins anew: loading had one of its own
    step(group)
    return status_gb("VmHWM"), before

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: random weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens in a row of ours")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--alone", action="store_true", help="one completion in a row, for both")
    parser.add_argument("--limit-gb", type=float, default=10, help="leave out a peer's step that would take more")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        print("peak_gb", *measure(args.child[0], args.model, int(args.child[1]), args.alone))
        return
    print(f"{'one completion a row' if args.alone else 'a group of 8'}; peak GB [of the step alone]; ratio to the first column")
    print("tokens | " + " | ".join(f"{kind:>20}" for kind in args.kinds), flush=True)
    flags, peaks = [*(["--model", args.model] if args.model else []), *(["--alone"] if args.alone else [])], {}
    for tokens in args.tokens:
        cells = []
        for kind in args.kinds:
            if "PEFT" in kind and 2 * peaks.get(kind, 0) > args.limit_gb:
                cells.append("-")
                continue
            out = subprocess.run([sys.executable, __file__, *flags, "--child", kind, str(tokens)], check=True,
                                 stdout=subprocess.PIPE, text=True).stdout
            peaks[kind], before = map(float, out.split("peak_gb")[1].split())
            cells.append(f"{peaks[kind]:.2f} [{peaks[kind] - before:.2f}] {peaks[kind] / peaks[args.kinds[0]]:.2f}")
        print(f"{tokens:6} | " + " | ".join(f"{cell:>20}" for cell in cells), flush=True)

if __name__ == "__main__":
    main()
