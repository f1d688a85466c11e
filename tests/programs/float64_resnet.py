"""run_many.py in float64, with a ResNet-50 of as many blocks as the first word says: 4 or 16."""

import sys

import run_many
import small_resnets

small_resnets.use_float64(setattr, int(sys.argv.pop(1)))
run_many.main()
