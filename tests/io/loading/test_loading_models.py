"""Models by name: folders of transformers, our own checkpoints, and a Hub that says no."""

import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_folders import DECLARATION, save_bert, save_vit

from acutance.errors import AcutanceError, AcutanceWarning, MissingExtraError
from acutance.io import batches_for, load_model
from acutance.io.saving import save
from acutance.models import ViT

pytest.importorskip("transformers", reason="models of transformers are loaded")


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    save_bert(folder)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vit")
    save_vit(folder)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize("name", ["hf:", "timm:", ""])
def test_a_name_that_says_nothing_is_not_the_current_folder(name: str, bert: Path, monkeypatch) -> None:
    monkeypatch.chdir(bert)
    with pytest.raises(AcutanceError, match=f"'{name}' names no model: write hf:NAME"):
        load_model(name)


def test_a_folder_gives_the_backbone_or_the_whole_model(bert: Path) -> None:
    backbone, whole = load_model(f"hf:{bert}"), load_model(f"hf:{bert}", head=True)
    assert type(backbone.model).__name__ == "BertModel"
    assert type(whole.model).__name__ == "BertForMaskedLM"
    saved = whole.model.bert.state_dict()
    for name, weight in backbone.model.state_dict().items():
        assert "pooler" in name or torch.equal(weight, saved[name]), name


def test_text_runs_through_what_was_loaded(bert: Path) -> None:
    loaded = load_model(f"hf:{bert}", dtype="float64")
    batches = loaded.text_batches(DECLARATION, batch=4, limit=5)
    assert batches[0]["input_ids"].shape == (4, 64), "the context of the model is the default"
    batch = {name: value for name, value in batches[1].items() if name != "special_tokens_mask"}
    output = loaded.model(**batch).last_hidden_state
    assert (output.shape, output.dtype) == ((1, 64, 16), torch.float64)
    with pytest.raises(AcutanceError, match=r"windows of 65 tokens are longer than .* takes: 64 at most"):
        loaded.text_batches(DECLARATION, tokens=65)
    with pytest.raises(AcutanceError, match="does not read images"):
        loaded.image_batches(bert)


def test_images_run_through_what_was_loaded(vit: Path, pictures: Path) -> None:
    loaded = load_model(f"hf:{vit}", dtype=torch.bfloat16)
    (batch,) = loaded.image_batches(pictures)
    assert loaded.model(**batch).last_hidden_state.shape == (3, 17, 16)
    with pytest.raises(AcutanceError, match="does not read text"):
        loaded.text_batches(DECLARATION)


def test_our_own_models_read_images_too(pictures: Path, tmp_path: Path) -> None:
    model = ViT(image_size=16, patch_size=4, dim=12, depth=1, heads=2, num_classes=2)
    loaded = load_model(str(save(model, tmp_path / "model.safetensors")))
    (batch,) = batches_for(loaded, images=pictures)
    assert loaded.model(batch).shape == (3, 2)
    assert batch.std() > 0.5, "normalised"


def test_digits_are_the_default_of_models_that_take_them(tmp_path: Path) -> None:
    sizes = {"image_size": 8, "patch_size": 4, "in_chans": 1, "dim": 12, "depth": 1, "heads": 2, "num_classes": 2}
    loaded = load_model(str(save(ViT(**sizes), tmp_path / "model.safetensors")), dtype="float64")
    batches = batches_for(loaded, batch=50, limit=120)
    assert [len(batch) for batch in batches] == [50, 50, 20]
    assert loaded.model(batches[0]).dtype == torch.float64
    with pytest.raises(AcutanceError, match="the model has 1 channels"):
        loaded.image_batches(tmp_path)


def test_commands_say_which_data_is_missing(bert: Path, vit: Path) -> None:
    text, images = load_model(f"hf:{bert}"), load_model(f"hf:{vit}")
    with pytest.raises(AcutanceError, match="say what it shall read with --text FILE"):
        batches_for(text)
    with pytest.raises(AcutanceError, match="say what it shall read with --images DIR"):
        batches_for(images)
    with pytest.raises(AcutanceError, match="give one of them"):
        batches_for(text, text=DECLARATION, images=vit)
    with pytest.raises(AcutanceError, match="it needs --text"):
        batches_for(images, images=vit, tokens=3)


def test_weights_that_were_not_there_are_not_silently_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_bert(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["bert.encoder.layer.1.attention.self.query.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(AcutanceWarning, match=r"layer\.1\.attention\.self\.query\.weight: random"):
        load_model(f"hf:{tmp_path}")


# Some of these keep more rows than positions.
FROM_ZERO = ["bert", "gpt2", "opt", "bart", "mbart", "distilbert", "nystromformer"]
FROM_PADDING = ["roberta", "camembert", "xlm-roberta", "data2vec-text", "mpnet", "ibert", "luke", "longformer", "esm"]


@pytest.mark.parametrize("kind", [*FROM_ZERO, *FROM_PADDING])
def test_the_context_is_what_the_model_really_takes(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    sizes = {"hidden_size": 16, "embedding_size": 16, "d_model": 16, "word_embed_proj_dim": 16, "entity_emb_size": 16}
    depths = {"num_hidden_layers": 1, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"num_attention_heads": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "n_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=60, max_position_embeddings=20, pad_token_id=1)
    for name, value in (sizes | depths | heads).items():
        if hasattr(config, name):
            setattr(config, name, value)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}")
    assert loaded.context == (18 if kind in FROM_PADDING else 20)
    loaded.model(input_ids=torch.full((1, loaded.context), 7))
    with pytest.raises((IndexError, RuntimeError)):
        loaded.model(input_ids=torch.full((1, loaded.context + 1), 7))


def test_a_model_without_bound_has_no_context(tmp_path: Path) -> None:
    from transformers import XLNetConfig, XLNetModel

    XLNetModel(XLNetConfig(vocab_size=60, d_model=16, n_layer=1, n_head=2, d_inner=16)).save_pretrained(tmp_path)
    assert load_model(f"hf:{tmp_path}").context is None


def test_a_decoder_is_fed_beside_its_encoder(tmp_path: Path) -> None:
    from tiny_folders import tiny_tokenizer
    from transformers import T5Config, T5Model

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    T5Model(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}")
    batch = loaded.text_batches(DECLARATION, tokens=12)[0]
    batch.pop("special_tokens_mask")
    assert loaded.model(**batch).last_hidden_state.shape == (8, 12, 16)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hf:{}/nowhere/at/all", None, "there is no file or folder .*, and a name on the Hub looks like owner/model"),
        ("hf:{}/model.gguf", None, "there is no file or folder .*model.gguf"),
        ("hf:{}", {"config.json": "{"}, "cannot be loaded"),
        ("hf:{}", {"config.json": '{"model_type": "marvel"}'}, "cannot be loaded: .*marvel"),
        ("hf:{}", {"config.json": '{"model_type": "bert"}'}, "cannot be loaded: .*no file named model.safetensors"),
        ("hf:{}/model.safetensors", {"model.safetensors": ""}, "name the folder with config.json"),
        ("hf:{}", {"a.gguf": "", "b.gguf": ""}, r"holds several GGUF files \(a.gguf, b.gguf\)"),
        ("hf:{}/a.gguf", {"a.gguf": "not one"}, "a.gguf cannot be loaded"),
        ("{}/nowhere", None, "no checkpoint at"),
    ],
)
def test_local_models_that_cannot_be_loaded_are_one_line(name, content, message, tmp_path: Path) -> None:
    for file, text in (content or {}).items():
        (tmp_path / file).write_text(text)
    with pytest.raises(AcutanceError, match=message) as caught:
        load_model(name.format(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_is_never_made_up(bert: Path, tmp_path: Path) -> None:
    """Without its files transformers hands out an empty one, for which every word is unknown."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((bert / file).read_bytes())
    loaded = load_model(f"hf:{tmp_path}")
    with pytest.raises(AcutanceError, match="comes without a tokenizer's vocabulary"):
        loaded.text_batches(DECLARATION)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(AcutanceError, match=r"the tokenizer of hf:.* cannot be loaded") as caught:
        load_model(f"hf:{tmp_path}").text_batches(DECLARATION)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_an_image_processor_is_never_made_up(vit: Path, pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vit"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((vit / file).read_bytes())
    with pytest.raises(AcutanceError, match=r"the image processor of hf:.* cannot be loaded"):
        load_model(f"hf:{folder}").image_batches(pictures)


def test_damaged_weights_are_one_line(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((bert / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(AcutanceError, match=f"hf:{tmp_path} cannot be loaded"):
        load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "library", "extra"), [("hf:gpt2", "transformers", "hf"), ("timm:vit_tiny_patch16_224", "timm", "timm")]
)
def test_a_missing_library_is_said_with_its_extra(name: str, library: str, extra: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'acutance\[{extra}\]'"):
        load_model(name)


def test_a_gguf_file_says_what_it_needs(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs gguf and accelerate: pip install 'acutance\[hf\]'"):
        load_model(f"hf:{tmp_path}")


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match="dtype 'int8' is not one of float32"):
        load_model(str(tmp_path), dtype="int8")


class FakeHub(http.server.BaseHTTPRequestHandler):
    """A Hub with one gated model and nothing else."""

    def answer(self) -> None:
        gated, asks_for_file = "owner/gated" in self.path, "/resolve/" in self.path
        status, code = (403, "GatedRepo") if gated else (404, "RepoNotFound")
        body = b'{"id": "owner/gated"}' if gated and not asks_for_file else b"{}"
        self.send_response(status if asks_for_file or not gated else 200)
        if asks_for_file or not gated:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


ASK = """
import sys
from acutance.errors import AcutanceError
from acutance.io.loading import load_model
for name in sys.argv[1:]:
    try:
        load_model(name)
    except AcutanceError as error:
        print(error)
    print("end of", name)
    print("end of", name, file=sys.stderr)
"""
SILENT = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[str, str, str]]:
    """By name, the hub that was asked, what was printed and what was complained of; a process for each hub."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hubs = {f"http://127.0.0.1:{server.server_port}": ["hf:owner/gated", "hf:owner/missing"]}
        hubs[SILENT] = ["hf:owner/silent"]
        found = {}
        for hub, names in hubs.items():
            home = str(tmp_path_factory.mktemp("home"))
            environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": home, "NO_PROXY": "*"}
            command = [sys.executable, "-c", ASK, *names]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            printed, complaints = done.stdout, done.stderr
            for name in names:
                own, _, printed = printed.partition(f"end of {name}\n")
                complaint, _, complaints = complaints.partition(f"end of {name}\n")
                found[name] = hub, own, complaint
        server.shutdown()
    return found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:owner/gated", "hf:owner/gated is gated: accept its terms at {hub}/owner/gated, then log in"),
        ("hf:owner/missing", "hf:owner/missing is not there: no public model 'owner/missing' on the Hub"),
        ("hf:owner/silent", f"hf:owner/silent cannot be downloaded: {SILENT} does not answer ("),
    ],
)
def test_a_model_that_cannot_be_downloaded_is_one_line(name: str, message: str, answers) -> None:
    hub, printed, complaints = answers[name]
    assert printed.startswith(message.format(hub=hub)), printed + complaints
    assert len(printed.splitlines()) == 1
    assert "Retry" not in complaints
