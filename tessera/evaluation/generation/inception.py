"""The Inception network of FID: the graph of 2015-12-05 that FID was published with, as a module of torch.

It reads the state dict `pt_inception-2015-12-05`, whose names are those of torchvision's Inception v3. Three things
differ from torchvision: average pooling does not count padding, the last block uses max pooling, and there are 1008
classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 299  # height and width of the input image, in pixels
WIDTH = 2048  # number of features of an image
_CLASSES = 1008
_average = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
_largest = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)


class Convolution(nn.Module):
    """Compute a convolution without bias, batch normalization and ReLU.

    `kernel` and `padding`: an int, or (height, width).
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(width, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class InceptionA(nn.Module):
    """Compute branches of 1x1, 5x5 and two 3x3 convolutions, and pooling, at 35x35 pixels."""

    def __init__(self, width: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(width, 64, 1)
        self.branch5x5_1 = Convolution(width, 48, 1)
        self.branch5x5_2 = Convolution(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = Convolution(width, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, padding=1)
        self.branch_pool = Convolution(width, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.branch5x5_2(self.branch5x5_1(x))
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), wide, double, self.branch_pool(_average(x))], 1)


class InceptionB(nn.Module):
    """Reduce 35x35 to 17x17 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch3x3 = Convolution(width, 384, 3, stride=2)
        self.branch3x3dbl_1 = Convolution(width, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)


class InceptionC(nn.Module):
    """Compute branches of 1x7 and 7x1 convolutions, at 17x17 pixels. `inner`: width within the branches."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(768, 192, 1)
        self.branch7x7_1 = Convolution(768, inner, 1)
        self.branch7x7_2 = Convolution(inner, inner, (1, 7), padding=(0, 3))
        self.branch7x7_3 = Convolution(inner, 192, (7, 1), padding=(3, 0))
        self.branch7x7dbl_1 = Convolution(768, inner, 1)
        self.branch7x7dbl_2 = Convolution(inner, inner, (7, 1), padding=(3, 0))
        self.branch7x7dbl_3 = Convolution(inner, inner, (1, 7), padding=(0, 3))
        self.branch7x7dbl_4 = Convolution(inner, inner, (7, 1), padding=(3, 0))
        self.branch7x7dbl_5 = Convolution(inner, 192, (1, 7), padding=(0, 3))
        self.branch_pool = Convolution(768, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), single, double, self.branch_pool(_average(x))], 1)


class InceptionD(nn.Module):
    """Reduce 17x17 to 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1 = Convolution(768, 192, 1)
        self.branch3x3_2 = Convolution(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Convolution(768, 192, 1)
        self.branch7x7x3_2 = Convolution(192, 192, (1, 7), padding=(0, 3))
        self.branch7x7x3_3 = Convolution(192, 192, (7, 1), padding=(3, 0))
        self.branch7x7x3_4 = Convolution(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        long = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), long, F.max_pool2d(x, 3, stride=2)], 1)


class InceptionE(nn.Module):
    """Compute parallel branches of 1x3 and 3x1 convolutions, at 8x8 pixels. `last`: use maximum pooling."""

    def __init__(self, width: int, last: bool) -> None:
        super().__init__()
        self.pool = _largest if last else _average
        self.branch1x1 = Convolution(width, 320, 1)
        self.branch3x3_1 = Convolution(width, 384, 1)
        self.branch3x3_2a = Convolution(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = Convolution(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = Convolution(width, 448, 1)
        self.branch3x3dbl_2 = Convolution(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = Convolution(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = Convolution(384, 384, (3, 1), padding=(1, 0))
        self.branch_pool = Convolution(width, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        parts = [self.branch1x1(x), self.branch3x3_2a(single), self.branch3x3_2b(single)]
        parts += [self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double), self.branch_pool(self.pool(x))]
        return torch.cat(parts, 1)


class Inception(nn.Module):
    """Compute the 2048 features of FID: the mean over all positions after the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3)
        self.Mixed_5b = InceptionA(192, 32)
        self.Mixed_5c = InceptionA(256, 64)
        self.Mixed_5d = InceptionA(288, 64)
        self.Mixed_6a = InceptionB(288)
        self.Mixed_6b = InceptionC(128)
        self.Mixed_6c = InceptionC(160)
        self.Mixed_6d = InceptionC(160)
        self.Mixed_6e = InceptionC(192)
        self.Mixed_7a = InceptionD()
        self.Mixed_7b = InceptionE(1280, last=False)
        self.Mixed_7c = InceptionE(WIDTH, last=True)
        self.fc = nn.Linear(WIDTH, _CLASSES)  # not used, but the file of weights contains it

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the features [N, 2048] of images [N, 3, 299, 299] in the range -1 to 1."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(pixels)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, stride=2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        features: Tensor = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return features.mean((2, 3))


def prepared(image: Tensor) -> Tensor:
    """Return an image, uint8 [H, W, 3], as input [3, 299, 299]: bilinear without antialiasing, as in pytorch-fid."""
    values = image.permute(2, 0, 1)[None].float() / 255
    return 2 * F.interpolate(values, (SIZE, SIZE), mode="bilinear", align_corners=False)[0] - 1


def fill(module: Inception, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill the module with a state dict, if it has the right tensors.

    Otherwise change nothing, and return the names of tensors that are missing, unknown or of another shape. Counters
    of batch normalization are optional: they have no effect.
    """
    expected = module.state_dict()
    counters = {name for name in expected if name.endswith("num_batches_tracked")}
    wrong = [name for name in expected if name not in tensors and name not in counters]
    wrong += [name for name in tensors if name not in expected or expected[name].shape != tensors[name].shape]
    if not wrong:
        module.load_state_dict(
            {**expected, **{name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}}
        )
    return wrong
