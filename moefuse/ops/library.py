"""The `moefuse` operator library.

In: nothing. Out: `LIBRARY`, kept alive here since its registrations end with it, and the tags of all of its
operators.
"""

import torch

LIBRARY = torch.library.Library("moefuse", "DEF")

# needs_exact_strides: weights are read as they lie, so a compiler must not hand over re-laid copies
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
