"""run_many.py with a ResNet-50 of 4 blocks that draws no pictures."""

import run_many
import small_resnets

small_resnets.use_4_blocks(setattr)
small_resnets.draw_nothing(setattr)
run_many.main()
