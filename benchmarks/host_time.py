"""Host time that a mitigation adds to a layer, forwards, in eager mode: tiny models, so that nothing else counts.

    python benchmarks/host_time.py [--device cuda] [--csv FILE]

Every row is the median over rounds of (patched − plain) / layers, plain and patched taking turns; the spread is the
quartiles. The road says how attention is reached: by a forward of our
own, by transformers' attention interface, or intercepted as it runs.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import acutance as ac

DIM, HEADS, DEPTH, TOKENS = 32, 4, 12, 8
CALLS = 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = HEADS, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def tokens() -> Tensor:
    return torch.randn(1, TOKENS, DIM)


def written() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Block() for _ in range(DEPTH))), tokens()


def torch_nn() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, DIM, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False), tokens()


def own() -> tuple[nn.Module, Tensor]:
    model = ac.models.ViT(image_size=8, patch_size=4, dim=DIM, depth=DEPTH, heads=HEADS, num_classes=2, mlp_ratio=1)
    return model, torch.randn(1, 3, 8, 8)


def timm_vit() -> tuple[nn.Module, Tensor]:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS, "mlp_ratio": 1}
    return VisionTransformer(**sizes, num_classes=2), torch.randn(1, 3, 8, 8)


def llama() -> tuple[nn.Module, Tensor]:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": DIM, "intermediate_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, use_cache=False)
    return LlamaModel(config), torch.randint(3, 60, (1, TOKENS))


MODELS: dict[str, tuple[str, Callable[[], tuple[nn.Module, Tensor]]]] = {
    "acutance ViT": ("own forward", own),
    "torch.nn encoder": ("own forward", torch_nn),
    "timm ViT": ("own forward", timm_vit),
    "transformers Llama": ("interface", llama),
    "hand-written": ("intercepted", written),
}


def seconds(model: nn.Module, batch: Tensor) -> float:
    if batch.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        model(batch)
    return (time.perf_counter() - start) / CALLS


def added(model: nn.Module, batch: Tensor, spec: str, rounds: int) -> list[float]:
    """Microseconds a layer, round by round."""
    found = []
    for _ in range(rounds):
        plain = seconds(model, batch)
        with ac.mitigate(model, spec):
            seconds(model, batch)
            patched = seconds(model, batch)
        found.append(1e6 * (patched - plain) / DEPTH)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--spec", default="neutreno:0.6")
    parser.add_argument("--label", default="", help="what the rows are called, such as a version")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (road, make) in MODELS.items():
        torch.manual_seed(0)
        try:
            model, batch = make()
        except ImportError:
            continue
        model, batch = model.to(options.device).train(), batch.to(options.device)
        try:
            found = added(model, batch, options.spec, options.rounds)
        except ac.AcutanceError:  # a version that cannot
            continue
        low, _, high = statistics.quantiles(found, n=4)
        row = {"label": options.label, "model": name, "road": road, "spec": options.spec, "device": options.device}
        row |= {"added_us": round(statistics.median(found), 1), "q1": round(low, 1), "q3": round(high, 1)}
        rows.append(row | {"torch": torch.__version__, "rounds": options.rounds})
        print(row)
    if options.csv is not None:
        new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
