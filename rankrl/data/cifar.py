"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32."""

from __future__ import annotations

from pathlib import Path

from rankrl.data.augmentation import Augmentation
from rankrl.data.published import read_published
from rankrl.data.registry import SourceFiles, register_dataset

CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
    shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
"""Names of the fine labels, in their order."""


@register_dataset(
    "cifar10",
    "CIFAR-10: 50,000 + 10,000 colour images of 32x32, 10 classes",
    augmentation=Augmentation(padding=4, flip=True),
    # ImageNet's statistics: the published CIFAR ResNet checkpoints were trained with them.
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)
def cifar10(root: Path) -> SourceFiles:
    """Read CIFAR-10 from `root`; see `read_published`."""
    return read_published("cifar10", root, CIFAR10_CLASSES.split(), "CIFAR10", colours="RGB")


@register_dataset(
    "cifar100",
    "CIFAR-100: 50,000 + 10,000 colour images of 32x32, 100 classes",
    augmentation=Augmentation(padding=4, flip=True),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)
def cifar100(root: Path) -> SourceFiles:
    """Read CIFAR-100 (fine labels) from `root`; see `read_published`."""
    return read_published("cifar100", root, CIFAR100_CLASSES.split(), "CIFAR100", colours="RGB")
