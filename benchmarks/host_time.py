"""Host time that a mitigation adds to a layer's forward pass in eager mode, measured on tiny models.

    python benchmarks/host_time.py [--device cuda] [--label VERSION]

Every row is the median over rounds of (patched − plain) / layers, with quartiles. Plain and patched models take turns.
The road says how attention is reached: by a forward of our own, by transformers' attention interface, or by
interception. Results go to benchmarks/results, one CSV per device, versions and --label.
"""

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import acutance as ac
from acutance.lab.bench import results
from acutance.lab.bench.timing import Pace, paired, spread

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


def written() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Block() for _ in range(DEPTH))), torch.randn(1, TOKENS, DIM)


def torch_nn() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, DIM, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False), torch.randn(1, TOKENS, DIM)


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
    "torch.nn encoder": ("intercepted", torch_nn),
    "timm ViT": ("own forward", timm_vit),
    "transformers Llama": ("interface", llama),
    "hand-written": ("intercepted", written),
}


def added(make: Callable[[], tuple[nn.Module, Tensor]], options: argparse.Namespace) -> list[float]:
    """Added microseconds per layer in each round, from two copies of a model, one of them mitigated."""
    torch.manual_seed(0)
    model, batch = make()
    plain, batch = model.to(options.device).train(), batch.to(options.device)
    patched = copy.deepcopy(plain)
    ac.mitigate(patched, options.spec)
    pace = Pace(options.rounds, CALLS, refresh=CALLS)
    pairs = paired(lambda: patched(batch), lambda: plain(batch), pace, options.device)
    return [1e6 * (mine - theirs) / DEPTH for mine, theirs in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="where the CSV goes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--spec", default="neutreno:0.6")
    parser.add_argument("--label", default="", help="a name for the rows and their file, such as a version")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (road, make) in MODELS.items():
        try:
            found = added(make, options)
        except (ImportError, ac.AcutanceError):  # not installed, or not supported in this version
            continue
        row = {"label": options.label, "model": name, "road": road, "spec": options.spec, "rounds": options.rounds}
        rows.append(row | spread("added_us", found, ".1f"))
        print("{model}, {road}: {added_us} µs a layer ({added_us_q1} to {added_us_q3})".format(**rows[-1]))
    how = results.command("python benchmarks/host_time.py", sys.argv[1:])
    path = options.results / results.file_name("host_time", options.device, "float32", options.label)
    print(results.write_rows(path, rows, results.provenance(options.device, how)))


if __name__ == "__main__":
    main()
