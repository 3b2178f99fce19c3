"""Every task, mitigated, in two processes: DDP and FSDP2, compiled or not, train what one process trains."""

from bisect import bisect_right
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from test_train_processes import assert_close, like_torchrun, use_float64
from torch._dynamo.utils import counters
from train_worlds import bits, fit, tiny

from acutance.lab.tasks import BatchSlice, segmentation
from acutance.lab.tasks.language import LanguageTask, LanguageTaskConfig
from acutance.lab.tasks.segmentation import SegmentationConfig
from acutance.lab.tasks.windows import WindowConfig
from acutance.lab.train import Config, LoopConfig, OptimConfig
from acutance.models import LanguageConfig, SegmenterConfig
from together import in_two_processes

LEARNT = {"constant": "neutreno:0.6", "learnt": "neutreno:0.6,learn=head"}
STRATEGIES = ("ddp", "fsdp")
BATCH = 4
COMMON, MIDDLE, RARE, RAREST = ([f"{name}{i}" for i in range(4)] for name in ("common", "middle", "rare", "rarest"))
CUTOFFS = (5, 9, 13)  # <eos> is the most frequent word, then the four kinds


def write_corpus(folder):
    """Rare words in the second half of the text only, so that the first process never sees them; the rarest nowhere."""
    draw = torch.Generator().manual_seed(0)

    def lines(words, count):
        picked = torch.randint(len(words), (count, 9), generator=draw).tolist()
        return "".join(" " + " ".join(words[i] for i in line) + " \n" for line in picked)

    place = folder / "wikitext-2"
    place.mkdir()
    common, more = 4 * COMMON, 4 * COMMON + 2 * MIDDLE + RARE
    unread = " " + " ".join(RAREST) + " \n"  # at the very end, where no whole sequence is left
    texts = {"train": lines(common, 20) + lines(more, 20) + unread, "valid": lines(more, 6), "test": lines(more, 6)}
    for name, text in texts.items():
        (place / f"wiki.{name}.tokens").write_text(text, encoding="utf-8")


def write_camvid(folder):
    image = pytest.importorskip("PIL.Image")
    draw = torch.Generator().manual_seed(0)
    for split, count in (("train", 8), ("val", 2), ("test", 2)):
        for place in (split, f"{split}annot"):
            (folder / "CamVid" / place).mkdir(parents=True)
        for number in range(count):
            labels = torch.randint(12, (6, 8), generator=draw).repeat_interleave(3, 0).repeat_interleave(3, 1).byte()
            if number % 2:
                labels[:, 6:] = 11  # mostly void, so that shares count different numbers of pixels
            pixels = torch.stack([labels * 20, 255 - labels * 20, labels * 7], -1)
            image.fromarray(pixels.numpy()).save(folder / "CamVid" / split / f"{number}.png")
            image.fromarray(labels.numpy()).save(folder / "CamVid" / f"{split}annot" / f"{number}.png")


def vit(folder, spec):
    return tiny(f"task.model.mitigation={spec}", "loop.epochs=0.75")


def language(folder, spec):
    model = LanguageConfig(dim=8, depth=3, heads=2, hidden=12, cutoffs=CUTOFFS, dropout=0.1, mitigation=spec)
    task = LanguageTaskConfig(corpus="wikitext-2", data_dir=str(folder), model=model, length=8, val_stride=8)
    return other(task)


def segmenter(folder, spec):
    model = SegmenterConfig(
        num_classes=11, image_size=16, patch_size=4, dim=12, depth=3, heads=3, decoder_heads=2, mitigation=spec
    )
    windows = WindowConfig(short_side=18, size=16, stride=12)
    return other(SegmentationConfig(dataset="camvid", data_dir=str(folder), model=model, windows=windows))


def other(task):
    loop = LoopConfig(epochs=2, batch_size=BATCH, checkpoint_every=100, evaluate_every=2)
    return Config(task=task, optim=OptimConfig(lr=1e-2, clip=1.0), loop=loop)


TASKS = {"vit": vit, "language": language, "segmenter": segmenter}
CASES = [(task, spec) for task in TASKS for spec in LEARNT]
COMPILED = [("vit", "learnt"), ("language", "learnt")]  # the latter in two graphs, the softmax between them as it is


def with_loop(config, **changes):
    return replace(config, loop=replace(config.loop, **changes))


def prepare(patch):
    use_float64(patch)
    normalised = segmentation.normalised
    patch.setattr(segmentation, "normalised", lambda images: normalised(images).double())


def compiling(patch):
    """With a backend that only traces and differentiates: what two processes make of it is the same, in seconds."""
    import lightning.fabric  # replaces torch.compile by its own, which must be beneath ours  # noqa: F401

    patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def train_together(rank, folder):
    patch = pytest.MonkeyPatch()
    like_torchrun(rank)
    prepare(patch)
    for task, spec in CASES:
        for strategy in STRATEGIES:
            fit(with_loop(TASKS[task](folder, LEARNT[spec]), strategy=strategy), folder / f"{task} {spec} {strategy}")
    compiling(patch)
    for task, spec in COMPILED:
        for strategy in STRATEGIES:
            torch.compiler.reset()
            config = with_loop(TASKS[task](folder, LEARNT[spec]), strategy=strategy, compile=True)
            _, printed = fit(config, folder / f"{task} {spec} {strategy} compiled")
            assert ("compiled" in printed) == (rank == 0)
            assert counters["frames"]["ok"] > 0  # since reset: something was traced


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    write_corpus(folder)
    write_camvid(folder)
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        try:
            for task, spec in CASES:  # two parts a step; two processes have the same two, one each
                fit(with_loop(TASKS[task](folder, LEARNT[spec]), accumulate=2), folder / f"{task} {spec} one")
            in_two_processes(train_together, folder)
        finally:
            torch.set_default_dtype(torch.float32)
    return {path.name: bits(path) for path in folder.iterdir() if (path / "result.json").exists()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("task", "spec"), CASES)
def test_two_processes_equal_one(worlds, task, spec, strategy):
    """Weights, means of gradients and of their squares, after AdamW's steps with dropout, in float64."""
    assert_close(worlds[f"{task} {spec} {strategy}"], worlds[f"{task} {spec} one"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("task", "spec"), COMPILED)
def test_two_compiled_processes_equal_one_that_is_not(worlds, task, spec, strategy):
    assert_close(worlds[f"{task} {spec} {strategy} compiled"], worlds[f"{task} {spec} one"])


def test_one_process_has_no_word_of_some_clusters_and_no_process_any_of_the_last(tmp_path):
    """What makes the language model's case a test of clusters without words."""
    write_corpus(tmp_path)
    task = LanguageTask(language(tmp_path, None).task, seed=0, device=torch.device("cpu"))
    steps = task.steps_per_epoch(BATCH)

    def clusters(index):
        batches = islice(task.batches(BATCH, 0, BatchSlice(index, 2)), steps)
        return {bisect_right(CUTOFFS, int(word)) for _, targets in batches for word in targets.unique()}

    assert clusters(0) == {0}
    assert clusters(1) == {0, 1, 2}
