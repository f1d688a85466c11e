import sys
from pathlib import Path

# Finds tools and utils from any folder, without an install.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.curves import main

sys.exit(main())
