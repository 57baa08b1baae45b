"""Constants of the online softmax in decode and prefill."""

from __future__ import annotations

import math

from pallas_kernels.layout import MASKED

LOG2E = math.log2(math.e)
# Peak of a row that saw no key yet: below any score, and so far above MASKED that masked scores get weight 0.
LEAST = MASKED * 1e-10
