"""`python -m benchmarks.load_memory [--gigabytes 1.0] [--folder /tmp]`: memory that loading takes.

Writes a random Qwen3.5-MoE in shards, loads it in a process of its own and prints how far that
process's memory rose above where it stood after the imports, as a multiple of the model's own size.
Experts packed and one by one; the file's dtype kept and converted. Counted as imports are the
150 MB of torch's own code that the first weight drawn on the meta device brings in. Linux: VmHWM
is read, as `ru_maxrss` of a child starts at its parent's peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from specdec.checkpoints.qwen import published_weights
from specdec.checkpoints.qwen_config import fields_of
from specdec.checkpoints.sharded import INDEX
from specdec.models import QwenMoe, QwenMoeConfig

N_SHARDS = 8

LOAD = """
import sys, torch
from pathlib import Path
from specdec.checkpoints import load_target, sharded
sharded.PIECE = int(sys.argv[3]) or sharded.PIECE
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
with torch.device("meta"):
    torch.nn.Embedding(2, 2)
before = status("VmRSS")
model = load_target(sys.argv[1], getattr(torch, sys.argv[2]))
parameters = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
print(status("VmHWM") - before, sum(parameters.values()))
"""
"""Prints by how many bytes memory rose at most, and the bytes of the model."""


def config_of_size(n_bytes: float, itemsize: int) -> QwenMoeConfig:
    """A model of about as many bytes, most of them experts, as in the real ones."""
    width, inner, n_layers = 512, 256, 4
    n_experts = max(4, int(n_bytes / itemsize / n_layers / (3 * width * inner)))
    return QwenMoeConfig(
        vocab_size=8192,
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=n_experts,
        num_experts_per_tok=4,
        moe_intermediate_size=inner,
        shared_expert_intermediate_size=inner,
    )


def write(
    folder: Path, config: QwenMoeConfig, dtype: torch.dtype, packed: bool, n_shards: int = N_SHARDS
) -> None:
    """A random checkpoint in shards, of which one at a time is held."""
    with torch.device("meta"):
        weights = published_weights(QwenMoe(config), (), fused=False, packed=packed)
    generator, index, names = torch.Generator().manual_seed(0), {}, list(weights)
    for i in range(n_shards):
        file = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        here = names[i::n_shards]
        drawn = {n: torch.randn(weights[n].shape, generator=generator).to(dtype) for n in here}
        save_file(drawn, folder / file)
        index |= dict.fromkeys(here, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(fields_of(config)))


def measure(folder: Path, dtype: torch.dtype, piece: int = 0) -> tuple[int, int]:
    """Bytes by which memory rose at most while `folder` was loaded, and bytes of the model.

    `piece` replaces `sharded.PIECE`.
    """
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-c", LOAD, str(folder), name, str(piece)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    risen, size = out.split()
    return int(risen), int(size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    print("| experts | file | model | GB | peak, of its size |\n|---|---|---|---|---|")
    half, single = torch.bfloat16, torch.float32
    for packed, stored, loaded in ((True, half, half), (False, half, half), (True, half, single)):
        config = config_of_size(arguments.gigabytes * 1e9, loaded.itemsize)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            write(Path(name), config, stored, packed)
            risen, size = measure(Path(name), loaded)
        told = "packed" if packed else "one by one"
        kinds = " | ".join(str(dtype).removeprefix("torch.") for dtype in (stored, loaded))
        print(f"| {told} | {kinds} | {size / 1e9:.2f} | {risen / size:.2f} |", flush=True)


if __name__ == "__main__":
    main()
