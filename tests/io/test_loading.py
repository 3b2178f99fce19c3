"""Models by name: folders of transformers, our own checkpoints and runs, and a Hub that says no."""

import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

import acutance as ac
from acutance.__main__ import app
from acutance.cli.options import DataOptions
from acutance.errors import AcutanceError, AcutanceWarning, MissingExtraError
from acutance.io import load_model
from acutance.io.loading import refuse_unsavable
from acutance.lab import recipes
from acutance.lab.data import load_images
from acutance.lab.data.augment import normalise
from acutance.lab.tasks import task_class
from acutance.lab.train import Run, override
from acutance.measure.profile import Profile
from acutance.models import ViT
from lab.data.tiny_data_sets import picture
from tiny_folders import DECLARATION, save_bert, save_vit, tiny, tiny_tokenizer

pytest.importorskip("transformers", reason="models of transformers are loaded")


def batches_for(loaded, data=None, **options):
    return DataOptions(**options).batches(loaded, data)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    save_bert(folder := tmp_path_factory.mktemp("bert"))
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Path:
    save_vit(folder := tmp_path_factory.mktemp("vit"))
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for i in range(3):
        picture(36, 40, i).save(tmp_path / f"{i}.png")
    return tmp_path


def test_a_folder_gives_the_backbone_or_the_whole_model(bert: Path) -> None:
    backbone, whole = load_model(f"hf:{bert}"), load_model(f"hf:{bert}", head=True)
    assert type(backbone.model).__name__ == "BertModel"
    assert type(whole.model).__name__ == "BertForMaskedLM"
    saved = whole.model.bert.state_dict()
    for name, weight in backbone.model.state_dict().items():
        assert "pooler" in name or torch.equal(weight, saved[name]), name


def test_text_and_images_run_through_what_was_loaded(bert: Path, vit: Path, pictures: Path) -> None:
    loaded = load_model(f"hf:{bert}", dtype="float64")
    batches = loaded.text_batches(DECLARATION, batch=4, limit=5)
    assert batches[0]["input_ids"].shape == (4, 64), "the context of the model is the default"
    (batch := batches[1]).pop("special_tokens_mask")
    output = loaded.model(**batch).last_hidden_state
    assert (output.shape, output.dtype) == ((1, 64, 16), torch.float64)
    with pytest.raises(AcutanceError, match=r"windows of 65 tokens are longer than .* takes: 64 at most"):
        loaded.text_batches(DECLARATION, tokens=65)
    with pytest.raises(AcutanceError, match="does not read images"):
        loaded.image_batches(bert)
    seeing = load_model(f"hf:{vit}", dtype=torch.bfloat16)
    (batch,) = seeing.image_batches(pictures)
    assert seeing.model(**batch).last_hidden_state.shape == (3, 17, 16)
    with pytest.raises(AcutanceError, match="does not read text"):
        seeing.text_batches(DECLARATION)


def test_our_own_models_read_images_or_the_digits(pictures: Path, tmp_path: Path) -> None:
    sizes = {"patch_size": 4, "dim": 12, "depth": 1, "heads": 2, "num_classes": 2}
    loaded = load_model(str(ac.save(ViT(image_size=16, **sizes), tmp_path / "model.safetensors")))
    (batch,) = batches_for(loaded, images=pictures)
    assert loaded.model(batch).shape == (3, 2)
    assert batch.std() > 0.5, "normalised"
    digits = ViT(image_size=8, in_chans=1, **sizes)
    loaded = load_model(str(ac.save(digits, tmp_path / "digits.safetensors")), dtype="float64")
    batch, labels = batches_for(loaded)[0]
    assert loaded.model(batch).dtype == torch.float64
    assert labels.shape == batch.shape[:1]
    with pytest.raises(AcutanceError, match="the model has 1 channels"):
        loaded.image_batches(pictures)[0]


def test_commands_say_which_data_is_missing(bert: Path, vit: Path) -> None:
    text, images = load_model(f"hf:{bert}"), load_model(f"hf:{vit}")
    for loaded, given, message in [
        (text, {}, "say what it shall read with --text FILE"),
        (images, {}, "say what it shall read with --images DIR"),
        (text, {"text": DECLARATION, "images": vit}, "give one of them"),
        (images, {"data_dir": vit}, "--data-dir says where a run's own data lies"),
    ]:
        with pytest.raises(AcutanceError, match=message):
            batches_for(loaded, **given)
    with pytest.raises(AcutanceError, match="it needs --text"):
        DataOptions(images=vit, tokens=3).check("hf:any")


def test_a_gguf_file_is_not_promised_to_be_saved(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(AcutanceError, match="transformers reads but cannot save: leave out --out"):
        refuse_unsavable(f"hf:{tmp_path}", tmp_path / "out")


def test_a_function_of_ones_own_gives_a_model_and_its_batches(tmp_path: Path, monkeypatch) -> None:
    source = """
import torch, acutance as ac
def model(): return ac.models.ViT(image_size=8, patch_size=4, in_chans=1, dim=12, depth=1, heads=2, num_classes=2)
def both(): return model(), [(torch.zeros(2, 1, 8, 8), torch.zeros(2)), torch.ones(1, 1, 8, 8)]
def neither(): return "a model"
"""
    (tmp_path / "own_models.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    loaded = load_model("module:own_models.both", dtype="float64")
    batches = batches_for(loaded)
    assert [len(loaded.model(batch)) for batch in batches] == [2, 1], "in the model's dtype, and without labels"
    assert batches.description == "2 batches of module:own_models.both"
    for name, options, message in [
        ("both", {"limit": 3}, "makes its own batches: leave out --limit"),
        ("model", {}, r"say what it shall read with \(model, batches\) from it"),
        ("neither", {}, r"must return a model, or \(model, batches\), not a str"),
        ("nobody", {}, "cannot be imported: module 'own_models' has no attribute 'nobody'; write module:file.function"),
    ]:
        with pytest.raises(AcutanceError, match=message):
            batches_for(load_model(f"module:own_models.{name}"), **options)
    with pytest.raises(AcutanceError, match=r"module:nowhere\.at_all cannot be imported"):
        load_model("module:nowhere.at_all")


def test_files_of_torch_save_are_told_what_they_are(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for content, message in [
        (model.state_dict(), r"is a state dict of torch\.save, .* write a function .* module:path\.to\.make_model"),
        (model, r"holds an object of torch\.nn\.modules\.linear\.Linear, .* module:path\.to\.make_model"),
        ([1], "is a list of torch.save"),
    ]:
        torch.save(content, tmp_path / "weights.pt")
        with pytest.raises(AcutanceError, match=message):
            load_model(str(tmp_path / "weights.pt"))


def test_weights_that_were_not_there_are_not_silently_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_bert(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["bert.encoder.layer.1.attention.self.query.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(AcutanceWarning, match=r"layer\.1\.attention\.self\.query\.weight: random"):
        load_model(f"hf:{tmp_path}")


# Some of these keep more rows than positions.
FROM_ZERO = ["gpt2", "opt", "bart", "nystromformer"]
FROM_PADDING = ["roberta", "mpnet", "luke", "longformer"]


@pytest.mark.parametrize("kind", [*FROM_ZERO, *FROM_PADDING])
def test_the_context_is_what_the_model_really_takes(kind: str, tmp_path: Path) -> None:
    tiny(kind, vocab_size=60, max_position_embeddings=20, pad_token_id=1).save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}")
    assert loaded.context == (18 if kind in FROM_PADDING else 20)
    loaded.model(input_ids=torch.full((1, loaded.context), 7))
    with pytest.raises((IndexError, RuntimeError)):
        loaded.model(input_ids=torch.full((1, loaded.context + 1), 7))


def test_models_without_a_bound_and_with_a_decoder_are_fed(tmp_path: Path) -> None:
    tiny("xlnet", vocab_size=60).save_pretrained(tmp_path / "xlnet")
    assert load_model(f"hf:{tmp_path / 'xlnet'}").context is None
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "t5")
    tiny("t5", vocab_size=len(tokenizer), decoder_start_token_id=0).save_pretrained(tmp_path / "t5")
    loaded = load_model(f"hf:{tmp_path / 't5'}")
    batch = loaded.text_batches(DECLARATION, tokens=12)[0]
    batch.pop("special_tokens_mask")
    assert loaded.model(**batch).last_hidden_state.shape == (8, 12, 16)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hf:{}/nowhere/at/all", {}, "there is no file or folder .*, and a name on the Hub looks like owner/model"),
        ("hf:{}", {"config.json": '{"model_type": "marvel"}'}, "cannot be loaded: .*marvel"),
        ("hf:{}", {"config.json": '{"model_type": "bert"}'}, "cannot be loaded: .*no file named model.safetensors"),
        ("hf:{}/model.safetensors", {"model.safetensors": ""}, "name the folder with config.json"),
        ("hf:{}", {"a.gguf": "", "b.gguf": ""}, r"holds several GGUF files \(a.gguf, b.gguf\)"),
        ("hf:{}/a.gguf", {"a.gguf": "not one"}, "a.gguf cannot be loaded"),
        *((name, {"config.json": "{}"}, f"'{name}' names no model: write hf:NAME") for name in ("hf:", "timm:", "")),
    ],
)
def test_local_models_that_cannot_be_loaded_are_one_line(name, content, message, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # which is not meant by an empty name
    for file, text in content.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(AcutanceError, match=message) as caught:
        load_model(name.format(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_never_made_up(bert: Path, vit: Path, pictures: Path, tmp_path: Path) -> None:
    """Without its files transformers hands out an empty tokenizer, for which every word is unknown."""
    for source in (bert, vit):
        (tmp_path / source.name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / source.name / file).write_bytes((source / file).read_bytes())
    folder = tmp_path / bert.name
    with pytest.raises(AcutanceError, match="comes without a tokenizer's vocabulary"):
        load_model(f"hf:{folder}").text_batches(DECLARATION)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(AcutanceError, match=r"the tokenizer of hf:.* cannot be loaded") as caught:
        load_model(f"hf:{folder}").text_batches(DECLARATION)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    with pytest.raises(AcutanceError, match=r"the image processor of hf:.* cannot be loaded"):
        load_model(f"hf:{tmp_path / vit.name}").image_batches(pictures)[0]
    (folder / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(AcutanceError, match=f"hf:{folder} cannot be loaded"):
        load_model(f"hf:{folder}")


def test_a_missing_library_is_said_with_its_extra(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs gguf and accelerate: pip install 'acutance\[hf\]'"):
        load_model(f"hf:{tmp_path}")
    for name, library, extra in (("hf:gpt2", "transformers", "hf"), ("timm:vit_tiny_patch16_224", "timm", "timm")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(MissingExtraError, match=rf"pip install 'acutance\[{extra}\]'"):
            load_model(name)


class FakeHub(http.server.BaseHTTPRequestHandler):
    """A Hub with one gated model, which hangs up when asked for owner/silent."""

    def answer(self) -> None:
        if "owner/silent" in self.path:
            self.close_connection = True
            return
        gated, refused = "owner/gated" in self.path, "owner/gated" not in self.path or "/resolve/" in self.path
        body = b"{}" if refused else b'{"id": "owner/gated"}'
        self.send_response((403 if gated else 404) if refused else 200)
        if refused:
            self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_GET = do_HEAD = answer  # noqa: N815
    log_message = Mock()


ASK = """
import sys
from acutance.io import load_model
for name in sys.argv[1:]:
    try:
        load_model(name)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_model_that_cannot_be_downloaded_is_one_line(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub = f"http://127.0.0.1:{server.server_port}"
        expected = {
            "hf:owner/gated": f"is gated: accept its terms at {hub}/owner/gated, then log in",
            "hf:owner/missing": "is not there: no public model 'owner/missing' on the Hub",
            "hf:owner/silent": f"cannot be downloaded: {hub} does not answer (",
        }
        environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
        command = [sys.executable, "-c", ASK, *expected]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        server.shutdown()
    for line, (name, message) in zip(done.stdout.splitlines(), expected.items(), strict=True):
        assert line.startswith(f"AcutanceError: {name} {message}")
    assert "Retry" not in done.stderr


def begun(folder: Path, recipe: str, *changes: str) -> str:
    """A run that was begun, with a model of its first step."""
    small = ("task.model.dim=12", "task.model.depth=1", "task.model.heads=2")
    config = override(recipes.load(recipe), [*small, *changes])
    made = task_class(config.task.kind)(config.task, seed=0, device=torch.device("cpu"))
    Run(folder).begin(config, recipe, 1)
    ac.save(made.build_model(), Run(folder).model_path)
    return str(folder)


def test_a_run_that_is_not_finished_says_how_to_go_on(tmp_path: Path) -> None:
    run = Run(Path(begun(tmp_path / "run", "digits")))
    run.model_path.unlink()
    for asked, file in ((run.folder, run.model_path), (run.best_path, run.best_path)):
        message = f"there is no {file}: the run is not finished. {run.how_to_go_on()}"
        with pytest.raises(AcutanceError, match=re.escape(message)):
            load_model(str(asked))


def test_a_run_is_read_on_its_test_data_as_in_training(tmp_path: Path) -> None:
    loaded = load_model(begun(tmp_path / "run", "digits"), dtype="float64")
    batches = batches_for(loaded, batch=30, limit=70)
    given, labels = zip(*batches, strict=True)
    assert [len(batch) for batch in given] == [len(batch) for batch in labels] == [30, 30, 10]
    assert batches.description == "70 test samples of digits, as the run has them"
    test = load_images("digits", None, "test")
    prepared = normalise(test.images.float(), torch.tensor(test.mean), torch.tensor(test.std)).double()
    assert all(any(torch.equal(image, one) for one in prepared) for image in given[0])
    assert len(set(map(tuple, torch.cat(given).flatten(1).tolist()))) > 60, "different images"
    assert "embedded digits" in batches_for(loaded, data="digits").description
    with pytest.raises(AcutanceError, match="is not to read"):
        batches_for(loaded, images=tmp_path, data_dir=tmp_path)
    bare = load_model(str(tmp_path / "run" / "model.safetensors"))
    assert "embedded digits" in batches_for(bare).description


def test_a_language_model_gets_windows_of_its_corpus_which_may_have_moved(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "wikitext-2").mkdir(parents=True)
    for part in ("train", "valid", "test"):
        (data / "wikitext-2" / f"wiki.{part}.tokens").write_text(" the cat sat on the mat \n" * 60)
    changes = (f"task.data_dir={data}", "task.val_stride=16", "task.length=16")
    loaded = load_model(begun(tmp_path / "run", "wikitext2", *changes))
    ((batch,),) = batches_for(loaded, limit=5)
    assert (batch.shape, batch.dtype) == ((5, 16), torch.int64)
    loaded.model(batch)
    data.rename(tmp_path / "elsewhere")
    with pytest.raises(AcutanceError, match=r"looked for .*data"):
        batches_for(loaded)
    assert len(batches_for(loaded, limit=3, data_dir=tmp_path / "elsewhere").samples) == 3


def test_a_mitigated_model_is_saved_with_all_it_needs_and_read_again(bert: Path, tmp_path: Path) -> None:
    out, profile = tmp_path / "out", tmp_path / "profile.json"
    data = ("--text", DECLARATION, "--tokens", "32", "--limit", "6", "--metrics", "token_cosine")
    asked = (f"hf:{bert}", "neutreno:0.6", *data, "--out", out), (f"hf:{out}", *data, "--json", profile)
    for verb, words in zip(("mitigate", "measure"), asked, strict=True):
        done = CliRunner().invoke(app, [verb, *map(str, words)])
        assert done.exit_code == 0, done.output
    again = Profile.load(profile)  # that it is what `mitigate` printed is seen of models of our own
    context = [again.context[name] for name in ("model", "mitigation", "data")]
    assert context == ["BertForMaskedLM", "neutreno:0.6", "6 windows of 32 tokens from declaration.txt"]
