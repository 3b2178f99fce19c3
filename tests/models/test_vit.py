"""What the reference ViT is: counts, options, initial weights; tests/with_timm has names and shapes."""

from functools import partial

import pytest
import torch
from small_models import images, seeded

from acutance import models
from acutance.models import ViTConfig
from acutance.models.block import DropPath


def test_presets_have_the_published_sizes_and_take_overrides():
    with torch.device("meta"):
        for name, expected in {"deit_tiny": 5_717_416, "deit_small": 22_050_664, "deit_base": 86_567_656}.items():
            assert sum(p.numel() for p in getattr(models, name)(mitigation="neutreno:0.6").parameters()) == expected
        model = models.vit_tiny_cifar(depth=2, num_classes=10, mitigation="neutreno:0.4")
    assert model.config == ViTConfig(
        image_size=32, patch_size=4, dim=192, depth=2, heads=3, num_classes=10, mitigation="neutreno:0.4"
    )
    for make, spec in ((models.vit_tiny_plus, "eigen:positive"), (models.vit_tiny_minus, "eigen:negative")):
        assert make(depth=2).config == models.vit_tiny_cifar(depth=2, mitigation=spec).config
    assert model.pos_embed.shape == (1, 65, 192)


def test_initial_weights():
    initial = partial(seeded, spread=0.0, dtype=torch.float32)
    model = initial(dim=96, layer_scale=0.1)
    assert model.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.blocks[1].attn.qkv.bias.any()
    assert (model.blocks[2].ls1.gamma == 0.1).all()
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-6}
    baseline = initial().state_dict()
    for mitigation in ("neutreno:0.6", "neutreno:0.6,learn=head", "featscale+attnscale"):
        treated = initial(mitigation=mitigation).state_dict()
        assert all(torch.equal(treated[name], baseline[name]) for name in baseline), mitigation


@pytest.mark.parametrize(
    ("mitigation", "layers", "expected"),
    [
        ("neutreno:0.6,learn=head", None, {f"blocks.{i}.attn.mitigation.learnt_strength": (3,) for i in (1, 2)}),
        ("featscale", [3], {f"blocks.2.attn.mitigation.{name}": (12,) for name in ("low", "high")}),
    ],
)
def test_a_mitigation_has_parameters_in_its_layers_alone(mitigation, layers, expected):
    model = seeded(mitigation=mitigation, mitigation_layers=layers)
    assert {n: tuple(t.shape) for n, t in model.state_dict().items() if "mitigation" in n} == expected
    assert model.config.mitigation_layers == (None if layers is None else (3,))


def test_drop_path_grows_linearly_and_keeps_the_mean():
    model = seeded(depth=5, drop_path=0.4)
    assert [block.drop_path1.p for block in model.blocks] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    torch.manual_seed(0)
    dropped = DropPath(0.25)(torch.ones(4000, 2, 3))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (dropped == dropped[:, :1, :1]).all()  # whole samples
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)
    weak, strong = (seeded(depth=2, drop_path=1.0, mitigation=f"neutreno:{s}") for s in (0.1, 9.0))
    assert torch.equal(weak(images()), strong(images()))  # the last block is skipped in training, term and all
    assert not torch.equal(weak.eval()(images()), strong.eval()(images()))


@pytest.mark.parametrize("option", ["dropout", "attention_dropout"])
def test_dropouts_are_random_in_training_and_off_in_evaluation(option):
    model = seeded(**{option: 0.5})
    assert not torch.equal(model(images()), model(images()))
    assert torch.equal(model.eval()(images()), seeded().eval()(images()))


def test_distilled_heads_are_a_pair_in_training_and_a_mean_in_evaluation():
    model = seeded(distilled=True)
    head, head_dist = model(images())
    assert not torch.equal(head, head_dist)
    assert torch.equal(model.eval()(images()), (head + head_dist) / 2)
    assert torch.equal(model.head_dist(model.forward_features(images())[:, 1]), head_dist)
