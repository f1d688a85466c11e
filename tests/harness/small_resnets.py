"""ResNet-50s that train in seconds. `setattr` is pytest's, to undo it, or Python's."""

from functools import partial

import torchvision
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

from scripts import model_split


def use_4_blocks(setattr) -> None:
    """4 blocks instead of 16, and half or less of the channels."""
    init = ResNet.__init__

    def init_with_4_blocks(self, block, _, *more, **options):
        options["width_per_group"] = 16
        init(self, block, [1] * 4, *more, **options)

    setattr(ResNet, "__init__", init_with_4_blocks)
    setattr(Bottleneck, "expansion", 2)


class ThinBlock(Bottleneck):
    expansion = 1


class NarrowResNet(ResNet):
    """A ResNet-50 of 32 to 128 channels instead of 256 to 2048, to be faster."""

    def __init__(self, num_classes=1000, norm_layer=None):
        super().__init__(ThinBlock, [3, 4, 6, 3], num_classes, norm_layer=norm_layer)
        self.fc = nn.Linear(self.inplanes, num_classes)

    def _make_layer(self, block, planes, *more, **options):
        return super()._make_layer(block, max(32, planes // 4), *more, **options)


def use_narrow(setattr) -> None:
    setattr(torchvision.models, "resnet50", NarrowResNet)


def use_quick(setattr) -> None:
    """Narrow, and with blocks that are measured once."""
    use_narrow(setattr)
    setattr(model_split, "measure_blocks", partial(model_split.measure_blocks, rounds=1))
