"""scripts/resnet50.py in float64, with a ResNet-50 of 4 blocks."""

from small_resnets import use_float64

from scripts import resnet50


def main():
    use_float64(setattr)
    resnet50.main()
