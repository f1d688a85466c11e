"""Peak TFLOP/s of GPUs, from their data sheets."""

# Dense TFLOP/s of fp16 products with sums in float32, from the data sheets. The first name in the card's name counts.
TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "A6000": 155,
    "V100": 125,
    "T4": 65,
    "5090": 209.5,
    "4090": 165,
    "3090": 71,
}


def peak_tflops(name: str) -> float | None:
    """The data sheet's figure; None for a card that is not in the table."""
    return next((tflops for card, tflops in TFLOPS.items() if card in name.replace("-", " ")), None)
