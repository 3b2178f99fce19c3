"""What every remedy adds, whether it starts at the identity, and in which kinds of models it works, by trying it.

    python benchmarks/family.py [--only xsa gate]

Writes docs/evidence/family/family.csv, from which docs/figures.py makes the table of docs/remedies.md.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, SwinConfig, SwinModel

import acutance as ac
from acutance.lab.bench.results import Row, write_rows
from acutance.mitigations import REGISTRY, LayerShape

NAMES = sorted(REGISTRY.keys() - {"none", "eigen"})
OUT = Path(__file__).parents[1] / "docs" / "evidence" / "family" / "family.csv"
TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
DEIT_TINY = [LayerShape(layer, dim=192, heads=3, head_dim=64, kv_heads=3, pretrained=True) for layer in range(1, 13)]
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def vit() -> nn.Module:
    return ac.models.ViT(image_size=16, patch_size=4, dim=24, depth=3, heads=3, num_classes=5)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**TINY, **ENDS, num_key_value_heads=2, attention_dropout=0.0))


def bert() -> nn.Module:
    return BertModel(BertConfig(**TINY, max_position_embeddings=32))


def swin() -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 4, "window_size": 4}
    return SwinModel(SwinConfig(**sizes, embed_dim=16, depths=[2, 2], num_heads=[2, 4]))


def ids() -> Tensor:
    return torch.randint(3, 60, (2, 8))


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


# A kind of model, and how it is run.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object]]] = {
    "images": (vit, lambda model: model(torch.randn(2, 3, 16, 16))),
    "padded text": (bert, lambda model: model(**padded())),
    "causal text": (llama, lambda model: model(ids())),
    "a cache": (llama, lambda model: model.generate(ids(), max_new_tokens=3, do_sample=False)),
    "windows": (swin, lambda model: model(torch.randn(2, 3, 32, 32))),
}


def works(spec: str, kind: str) -> str:
    make, run = KINDS[kind]
    torch.manual_seed(0)
    model = make().eval()
    try:
        ac.mitigate(model, spec)
        with torch.no_grad():
            run(model)
    except ac.AcutanceError:
        return "refused"
    return "yes"


def row(name: str, cls: type[ac.Mitigation]) -> Row:
    torch.manual_seed(0)
    model, images = vit().eval(), torch.randn(2, 3, 16, 16)
    before = model(images)
    with ac.mitigate(model, name):
        same = torch.equal(model(images), before)
    formula, _, paper = (cls.__doc__ or "").partition("\n")[0].rpartition(" (")
    added = sum(p.numel() for shape in DEIT_TINY for p in cls().for_layer(shape).parameters())
    fits = {kind: works(name, kind) for kind in KINDS}
    about = {"remedy": name, "class": cls.__name__, "rule": formula, "paper": paper.rstrip(").").rpartition("/")[2]}
    return about | {"parameters in DeiT-Ti": added, "identity": "yes" if same else "no"} | fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(REGISTRY), default=NAMES)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    write_rows(asked.out, [row(name, REGISTRY[name]) for name in asked.only], {})


if __name__ == "__main__":
    main()
