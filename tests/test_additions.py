"""The four additions that CONTRIBUTING shows, each one file in a copy of the package, and all of them used."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("metrics/tokens.py", "mitigations/pairnorm.py", "sites/towers.py", "lab/recipes/deep.py")
USE = """
import torch
from torch import nn
import acutance as ac
from acutance.lab import recipes
from sites.tiny_models import Made

def attend(self, x):
    q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

def rung():
    mix = Made(attend, num_heads=4, qkv=nn.Linear(32, 96), proj=nn.Linear(32, 32))
    return Made(lambda self, x: x + self.mix(self.ln(x)), ln=nn.LayerNorm(32), mix=mix)

class Tower(Made):
    def forward(self, x):
        for rung in self.rungs.values():
            x = rung(x)
        return self.norm(x)

torch.manual_seed(0)
rungs = nn.ModuleDict({str(i): rung() for i in (1, 2, 3)})
tower, x = Tower(None, rungs=rungs, norm=nn.LayerNorm(32)).eval(), torch.randn(2, 10, 32)
plain = tower(x)
print(len(ac.sites.find(tower)), len(ac.explain(tower, progress=False).layers))
cosines = nn.functional.cosine_similarity(x[:, :, None], x[:, None], dim=-1)
widest = ac.measure(tower, [x], metrics=["widest_angle"])["widest_angle"][0]
print(abs(widest - (1 - cosines.amin((1, 2)).mean())) < 1e-6)
with ac.mitigate(tower, ac.PairNorm() + ac.NeuTRENO(0.6)):
    print((tower(x) - plain).abs().max() > 1e-3)
print(recipes.summary("digits_deep"))
"""


def test_each_addition_is_one_file(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    for file, block in zip(FILES, blocks, strict=True):
        with (tmp_path / "src/acutance" / file).open("a") as added:
            added.write(f"\n\n{block}")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 3", "tensor(True)", "tensor(True)", "A 24-layer ViT on the embedded digits."]
