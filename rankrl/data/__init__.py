"""Load datasets into memory: `load_dataset` splits them, `batches` augments and normalises on the device."""

from __future__ import annotations

from rankrl.data import sources
from rankrl.data.datasets import SourceFiles, dataset_source, list_datasets, load_dataset, register_dataset
from rankrl.data.images import Augmentation, ImageData, Images, Preprocessing, TestImages
from rankrl.data.sample import augmented_copy, batches

__all__ = [
    "Augmentation",
    "ImageData",
    "Images",
    "Preprocessing",
    "SourceFiles",
    "TestImages",
    "augmented_copy",
    "batches",
    "dataset_source",
    "list_datasets",
    "load_dataset",
    "register_dataset",
    "sources",
]
