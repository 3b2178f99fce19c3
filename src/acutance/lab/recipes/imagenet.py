"""DeiT on ImageNet (https://arxiv.org/abs/2012.12877)."""

from acutance.lab.tasks.imagenet import ImageNetConfig
from acutance.lab.train.config import Config, LoopConfig, OptimConfig, ScheduleConfig, override
from acutance.models import ViTConfig

EPOCHS = 300
BATCH = 1024
RATE = 5e-4 * BATCH / 512
TRAINED = "runs/deit_tiny-seed0/model.safetensors"  # where `acutance train deit_tiny` leaves its model


def deit_tiny() -> Config:
    """DeiT-tiny/16 on ImageNet, 224×224, 300 epochs: the baseline of NeuTRENO's Table 1.

    Published (https://arxiv.org/abs/2312.00751): 72.17 % top-1, 91.02 % top-5; with NeuTRENO 73.01 / 91.56, with
    FeatScale 72.35 / 91.22, with both 73.23 / 91.73. Not measured here yet.

    Differences from DeiT's public code: bfloat16 replaces float16 with loss scaling, and the learning rate changes at
    the start of each epoch (DeiT's code runs the first two epochs at the warm-up's initial rate). All training images
    are used, the held-out slice too, since nothing is chosen. Report the score of the last weights on the test set.

    Needs ImageNet (train/ and val/ with a folder per class, or shards) and GPUs, for 384 million images seen.
    Time: not measured. To estimate it, divide the images by the number of GPUs and by the images/s of one
    (`acutance bench --only steps-224`, batch over time of a step). Decoding may be slower than that; `acutance train`
    shows the time left.

        acutance train deit_tiny --data-dir /data/imagenet
        acutance train deit_tiny --data-dir /data/imagenet --set task.model.mitigation=neutreno:0.6
        torchrun --nproc-per-node 4 -m acutance train deit_tiny --data-dir /data/imagenet
        acutance evaluate runs/deit_tiny-seed0
    """
    model = ViTConfig(image_size=224, patch_size=16, num_classes=1000, dim=192, depth=12, heads=3, drop_path=0.1)
    return Config(
        task=ImageNetConfig(model=model, train_on="all"),  # its defaults are DeiT's augmentation and repeats
        optim=OptimConfig(name="adamw", lr=RATE, weight_decay=0.05),
        schedule=ScheduleConfig(name="cosine", warmup=5, start=1e-6, final=1e-5, per="epoch", warmup_inside=True),
        loop=LoopConfig(
            epochs=EPOCHS, batch_size=BATCH, precision="bf16", compile=True, checkpoint_every=1000, evaluate_every=10
        ),
    )


def deit_small() -> Config:
    """DeiT-small/16 on ImageNet, 224×224, 300 epochs: the baseline of NeuTRENO's Table 7.

    Published (https://arxiv.org/abs/2312.00751): 79.97 % top-1, 95.05 % top-5; with NeuTRENO 80.68 / 95.30, with
    FeatScale 79.96 / 95.06. Not measured here yet.

    Needs what `deit_tiny` needs, for about four times the parameters. Time: not measured, and no bench has this size.

        acutance train deit_small --data-dir /data/imagenet
        acutance train deit_small --data-dir /data/imagenet --set task.model.mitigation=neutreno:0.6
    """
    return override(deit_tiny(), ["task.model.dim=384", "task.model.heads=6"])


def deit_tiny_symmetric() -> Config:
    """DeiT-tiny with symmetric attention (queries are keys) on ImageNet, 300 epochs: NeuTRENO's Table 5.

    Published (https://arxiv.org/abs/2312.00751): 71.14 % top-1, 90.54 % top-5; with NeuTRENO 72.07 / 91.22. Not
    measured here yet.

    Needs what `deit_tiny` needs. Time: not measured, and no bench has this attention.

        acutance train deit_tiny_symmetric --data-dir /data/imagenet
        acutance train deit_tiny_symmetric --data-dir /data/imagenet --set task.model.mitigation=neutreno:0.6
    """
    return override(deit_tiny(), ["task.model.attention=symmetric"])


def deit_tiny_adapt() -> Config:
    """A trained DeiT-tiny, fine-tuned with NeuTRENO for a third of the epochs: NeuTRENO's Table 1.

    Published (https://arxiv.org/abs/2312.00751): 72.63 % top-1, 91.38 % top-5, from a baseline of 72.17 / 91.02. Not
    measured here yet. The paper only says "one-third number of epochs". The learning rate is our choice: a tenth of
    that of training from scratch, with the same warm-up and augmentation.

    Needs ImageNet, GPUs and the weights of a DeiT-tiny: by default those of `acutance train deit_tiny`, or the
    published .pth file. The model sees 128 million images. Time: not measured; a third of `deit_tiny`'s.

        acutance train deit_tiny_adapt --data-dir /data/imagenet
        acutance train deit_tiny_adapt --data-dir /data/imagenet --set task.weights=deit_tiny_patch16_224-a1311bcf.pth
    """
    course = [f"optim.lr={RATE / 10}", f"loop.epochs={EPOCHS / 3}"]
    return override(deit_tiny(), ["task.model.mitigation=neutreno:0.6", f"task.weights={TRAINED}", *course])
