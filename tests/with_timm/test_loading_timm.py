import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import HfApi
from PIL import Image
from safetensors.torch import save_file

from acutance.errors import AcutanceError
from acutance.io.inputs import centre_crop
from acutance.io.loading import load_model


def pictures() -> list[Image.Image]:
    sizes = [(300, 400), (401, 257), (256, 256), (90, 333)]
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


@pytest.mark.parametrize("fraction", [0.875, 1.0])
def test_our_preprocessing_is_timms(fraction: float) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    transform = timm.data.create_transform(224, mean=mean, std=std, crop_pct=fraction, interpolation="bicubic")
    expected = torch.stack([transform(picture) for picture in pictures()])
    found = centre_crop((224, 224), mean, std, fraction=fraction)(pictures())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


ARGUMENTS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2}


def test_a_local_folder_is_loaded_and_fed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    saved = timm.create_model("vit_tiny_patch16_224", num_classes=5, **ARGUMENTS)
    data = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.8, "crop_mode": "center"}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": ARGUMENTS, "pretrained_cfg": data}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(saved.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    for i, picture in enumerate(pictures()):
        picture.save(tmp_path / f"{i}.png")
    loaded = load_model(f"timm:{folder}")
    torch.testing.assert_close(loaded.model.state_dict(), saved.state_dict(), rtol=0, atol=0)
    (batch,) = loaded.image_batches(tmp_path)
    expected = centre_crop((32, 32), [0.5] * 3, [0.25] * 3, fraction=0.8)(pictures())
    torch.testing.assert_close(batch, expected, atol=1e-6, rtol=0)
    assert loaded.model(batch).shape == (4, 5)


def test_a_model_of_another_size_than_its_weights_were_made_for_gets_its_own(tmp_path: Path) -> None:
    """timm saves the size of the pretrained weights, whatever size the model was built for."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **ARGUMENTS)
    timm.models.save_for_hf(model, str(tmp_path / "model"), model_args=ARGUMENTS)
    pictures()[0].save(tmp_path / "0.png")
    loaded = load_model(f"timm:{tmp_path / 'model'}")
    (batch,) = loaded.image_batches(tmp_path)
    assert loaded.model(batch).shape == (1, 5)


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", Mock(side_effect=OSError("no route")))
    refusals = {
        "vit_tiny_patch16_225": "knows no such model, .*did you mean .*vit_tiny_patch16_224",
        str(tmp_path): f"timm:{tmp_path} cannot be loaded: .*config.json",
        "vit_tiny_patch16_224": r"timm:vit_tiny_patch16_224 cannot be downloaded: .* does not answer \(no",
    }
    for name, words in refusals.items():
        with pytest.raises(AcutanceError, match=words) as caught:
            load_model(f"timm:{name}")
        assert "\n" not in str(caught.value)
