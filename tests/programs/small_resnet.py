"""run_many.py with a ResNet-50 of 4 blocks."""

import run_many
import small_resnets

small_resnets.use_4_blocks(setattr)
run_many.main()
