"""A small vision transformer, and its ONNX file with inputs for scripts/bench_linear.py.

    export PYTHONPATH=scripts
    rankrl task=train model=custom model._target_=small_transformer.small_transformer hydra.run.dir=vit
    python scripts/small_transformer.py --checkpoint vit/dense.safetensors --folder vit

writes transformer.onnx, fitting.npz (training images) and testing.npz (test images with labels).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from rankrl.data import Images, batches, load_dataset
from rankrl.models import load_checkpoint
from rankrl.onnx.export import export_onnx


def small_transformer(width: int = 64, depth: int = 3, num_classes: int = 10) -> VisionTransformer:
    """Return a transformer for images of 32x32 pixels in patches of 4x4.

    Two convolutions with stride 2 make the patches' tokens (Xiao et al., NeurIPS 2021): it learns in fewer
    epochs so than with one of stride 4.

    Args:
        width: Numbers in a token, a multiple of 32: each head has 32.
        depth: Layers.
        num_classes: Classes.
    """
    stem = [ConvStemConfig(width // 2, 3, 2), ConvStemConfig(width, 3, 2)]
    return VisionTransformer(
        image_size=32,
        patch_size=4,
        num_layers=depth,
        num_heads=width // 32,
        hidden_dim=width,
        mlp_dim=2 * width,
        num_classes=num_classes,
        conv_stem_configs=stem,
    )


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000, help="images of each file")
    options = parser.parse_args()
    data = load_dataset(options.dataset)
    model = small_transformer(options.width, options.depth, data.classes).eval()
    load_checkpoint(model, options.checkpoint)
    export_onnx(model, options.folder / "transformer.onnx", data.input_shape)

    def save(name: str, images: Images) -> None:
        x, y = next(iter(batches(images, options.images, mean=data.mean, std=data.std)))
        np.savez(options.folder / name, input=x.numpy(), labels=y.numpy())

    save("fitting.npz", data.train)
    save("testing.npz", data.test.for_report())


if __name__ == "__main__":
    with torch.inference_mode():
        main()
