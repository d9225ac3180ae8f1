"""Facts about each data set, known without reading a file: classes, shape, sizes, normalisation, licence."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about one data set; the sizes are those of the complete official files."""

    name: str
    title: str
    classes: tuple[str, ...]
    image_shape: tuple[int, ...]  # as the model sees a sample: (channels, height, width), or (sentence length,)
    train_size: int
    test_size: int
    mean: tuple[float, ...]  # per channel over the whole train set, pixels scaled to 0..1
    std: tuple[float, ...]
    licence: str
    download_nbytes: int  # approximate
    augment: tuple[str, ...] = ()  # what published runs do to its training images


_MNIST = DatasetInfo(
    name="mnist",
    title="MNIST",
    classes=tuple("0123456789"),
    image_shape=(1, 28, 28),
    train_size=60_000,
    test_size=10_000,
    mean=(0.130660,),
    std=(0.308108,),
    licence="CC BY-SA 3.0, copyright Yann LeCun and Corinna Cortes",
    download_nbytes=11_594_722,
)

# Made as a drop-in replacement of MNIST: same shape and sizes.
_FASHION_MNIST = replace(
    _MNIST,
    name="fashion-mnist",
    title="Fashion-MNIST",
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    mean=(0.286041,),
    std=(0.353024,),
    licence="MIT, copyright (c) 2017 Zalando SE",
    download_nbytes=30_878_645,
)

_CIFAR10 = DatasetInfo(
    name="cifar10",
    title="CIFAR-10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    image_shape=(3, 32, 32),
    train_size=50_000,
    test_size=10_000,
    mean=(0.491400, 0.482158, 0.446531),
    std=(0.247032, 0.243485, 0.261588),
    licence="no licence published; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    download_nbytes=170_498_071,
    augment=("crop", "mirror"),
)

_SST5 = DatasetInfo(
    name="sst5",
    title="SST-5",
    classes=("very negative", "negative", "neutral", "positive", "very positive"),
    image_shape=(64,),
    train_size=8_544,
    test_size=2_210,
    mean=(),
    std=(),
    licence="no licence published; cite Socher et al., Recursive Deep Models for Semantic Compositionality, 2013",
    download_nbytes=789_539,
)

# The facts of ILSVRC12; a user's folder replaces the classes and the sizes.
_IMAGENET = DatasetInfo(
    name="imagenet",
    title="ImageNet, or any folder of class folders",
    classes=tuple(str(number) for number in range(1000)),
    image_shape=(3, 224, 224),
    train_size=1_281_167,
    test_size=50_000,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    licence="ImageNet's terms of access: non-commercial research and education, by request at image-net.org",
    download_nbytes=155_000_000_000,
    augment=("crop", "mirror"),
)

# The sample keeps the mean and std of the whole set, so that a model trained on either sees the same scale.
_SAMPLE = replace(
    _FASHION_MNIST,
    name="fashion-mnist-sample",
    title="Fashion-MNIST, built-in sample",
    train_size=12_000,
    test_size=2_000,
    download_nbytes=0,
)

DATASETS: dict[str, DatasetInfo] = {
    info.name: info for info in (_FASHION_MNIST, _MNIST, _CIFAR10, _SST5, _IMAGENET, _SAMPLE)
}
