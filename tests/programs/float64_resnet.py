"""run_many.py in float64, with a ResNet-50 of 4 blocks."""

import run_many
import small_resnets

small_resnets.use_float64(setattr)
run_many.main()
