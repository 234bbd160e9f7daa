"""Load datasets into memory: `load_dataset` splits them, `batches` augments and normalises on the device."""

from __future__ import annotations

from rankrl.data import arrays as digits
from rankrl.data import arrays as npz
from rankrl.data import arrays as onnx_inputs
from rankrl.data import imagefolder
from rankrl.data import published as cifar
from rankrl.data import published as mnist
from rankrl.data.batches import augmented_copy, batches
from rankrl.data.datasets import (
    DatasetSource,
    SourceFiles,
    dataset_option_types,
    dataset_source,
    list_datasets,
    load_dataset,
    register_dataset,
)
from rankrl.data.images import Augmentation, ImageData, Images, Preprocessing, TestImages

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
