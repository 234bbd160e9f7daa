"""Datasets in memory: `load_dataset` splits them, `batches` augments and normalises them on the device."""

from __future__ import annotations

from rankrl.data import cifar, digits, imagefolder, mnist, npz, onnx_inputs  # registers the sources
from rankrl.data.augmentation import Augmentation
from rankrl.data.batches import augmented_copy, batches
from rankrl.data.images import ImageData, Images, TestImages
from rankrl.data.preprocessing import Preprocessing
from rankrl.data.registry import (
    DatasetSource,
    SourceFiles,
    dataset_option_types,
    dataset_source,
    list_datasets,
    load_dataset,
    register_dataset,
)

__all__ = [
    "Augmentation",
    "DatasetSource",
    "ImageData",
    "Images",
    "Preprocessing",
    "SourceFiles",
    "TestImages",
    "augmented_copy",
    "batches",
    "cifar",
    "dataset_option_types",
    "dataset_source",
    "digits",
    "imagefolder",
    "list_datasets",
    "load_dataset",
    "mnist",
    "npz",
    "onnx_inputs",
    "register_dataset",
]
