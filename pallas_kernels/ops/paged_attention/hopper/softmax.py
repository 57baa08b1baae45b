"""Constants of the online softmax in decode and prefill."""

from __future__ import annotations

import math

from pallas_kernels.layout import MASKED

LOG2E = math.log2(math.e)
LEAST = MASKED * 1e-10  # below any score, far above what is masked: a row that sees nothing yet adds up to nothing
