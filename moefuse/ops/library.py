"""The `moefuse` operator library: kept alive here for the life of the process, since its registrations end
with it. In: nothing. Out: `LIBRARY` and the tags that all of its operators carry.
"""

import torch

LIBRARY = torch.library.Library("moefuse", "DEF")

# needs_exact_strides: weights are read as they lie, so a compiler must not hand over re-laid copies
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
